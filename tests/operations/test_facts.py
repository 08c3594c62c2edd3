"""Facts: what a host's answer means, odd answers included, and commands that a real shell runs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import PROXY, REPO, asked, commands, group, owner, program, run

from roles.accept.facts import LoggedKvCaches
from roles.cmake.facts import Cmake
from roles.driver.facts import Drivers
from roles.facts import PathState, PathStates
from roles.host.facts import (
    AvailableVersions,
    Holds,
    HostState,
    InstalledPackages,
    KernelParameter,
    KernelParameters,
    NvidiaState,
)
from roles.kysec.facts import Kysec
from roles.model.facts import ModelIsWhole
from roles.nginx.facts import Nginx, NginxState, OurNginxRuns
from roles.nginx.operations import live_configuration
from roles.selinux.facts import Denials, Selinux
from roles.vllm.facts import Server, ServerState, UnitNames

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


# PathStates


@pytest.fixture
def odd_paths(tmp_path: Path) -> Path:
    """A folder with a path of every kind, with odd names."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "with  two spaces").write_bytes(b"")
    (tmp_path / 'it\'s $HOME `id` "x" \\').write_bytes(b"")
    (tmp_path / "-n").write_bytes(b"")
    (tmp_path / "模型").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "link to 模型").symlink_to(tmp_path / "模型")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def states(folder: Path, *names: str) -> dict[str, PathState]:
    found = asked(PathStates, paths=[str(folder / name) for name in names])
    assert isinstance(found, dict)
    return {Path(path).name: state for path, state in found.items()}


def test_a_file_has_mode_owner_group_and_digest(odd_paths: Path) -> None:
    assert states(odd_paths, "file") == {"file": PathState("file", "640", owner(), group(), EMPTY)}


def test_names_that_a_shell_could_misread_are_read_right(odd_paths: Path) -> None:
    names = ["with  two spaces", 'it\'s $HOME `id` "x" \\', "-n", "模型"]
    found = states(odd_paths, *names)
    assert list(found) == names
    assert [state.kind for state in found.values()] == ["file", "file", "file", "directory"]
    assert found["模型"] == PathState("directory", "750", owner(), group(), "")


def test_what_is_absent_a_link_or_a_pipe_is_said_so(odd_paths: Path) -> None:
    found = states(odd_paths, "nothing", "link", "dangling", "pipe")
    assert {name: state.kind for name, state in found.items()} == {
        "nothing": "absent",
        "link": "other",
        "dangling": "other",
        "pipe": "other",
    }
    assert found["nothing"] == PathState("absent", "-", "-", "-", "")
    assert found["link"].sha256 == ""


def test_a_link_to_a_directory_is_that_directory(odd_paths: Path) -> None:
    (state,) = states(odd_paths, "link to 模型").values()
    assert state == PathState("directory", "750", owner(), group(), "")


def test_a_links_own_mode_is_told_after_a_directorys(odd_paths: Path) -> None:
    """What was asked of one path does not leak into the next."""
    found = states(odd_paths, "link to 模型", "link", "file")
    assert [state.mode for state in found.values()] == ["750", "777", "640"]


def test_many_paths_are_one_command(odd_paths: Path) -> None:
    names = [f"n{number}" for number in range(200)]
    assert len(states(odd_paths, *names)) == 200


def test_no_answer_means_no_paths() -> None:
    assert PathStates().process([]) == {}
    assert PathStates.default() == {}


# InstalledPackages


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ([], {}),
        (
            ["installed curl curl 7.88.1-10", "installed g++ g++ 4:12.2.0-3"],
            {"curl": ("7.88.1-10",), "g++": ("4:12.2.0-3",)},
        ),
        (["config-files nginx nginx 1", "not-installed numactl numactl ", "half x x 1"], {}),
        (["dpkg-query: no packages found matching x", ""], {}),
        (
            ["installed kernel kernel 0:4.19.90-24", "installed kernel kernel 0:4.19.90-52"],
            {"kernel": ("0:4.19.90-24", "0:4.19.90-52")},
        ),
        (["installed numactl-libs numactl 0:2.0.13-4"], {"numactl-libs": ()}),
        (["no package provides nginx"], {}),
    ],
)
def test_only_installed_packages_count(
    output: list[str], names: dict[str, tuple[str, ...]]
) -> None:
    assert InstalledPackages().process(output) == names
    assert InstalledPackages.default() == {}


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="dpkg-query is not on this machine")
def test_dpkg_is_asked_for_all_packages_at_once() -> None:
    found = asked(
        InstalledPackages, names=["dpkg", "no-such-package-x", "base-files"], family="apt"
    )
    assert set(found) == {"dpkg", "base-files"}
    assert re.match(r"1\.", found["dpkg"][0])


def test_rpm_is_asked_by_what_a_package_provides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """case "$*" in
    *--whatprovides*gcc-c++) echo "installed gcc-c++ gcc-c++ 0:7.3.0-20" ;;
    *) echo "no package provides nginx"; exit 1 ;; esac"""
    program(tmp_path, "rpm", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = asked(InstalledPackages, names=["gcc-c++", "nginx"], family="dnf")
    assert found == {"gcc-c++": ("0:7.3.0-20",)}


@pytest.mark.parametrize("family", ["apt", "dnf"])
def test_a_host_without_the_package_manager_has_no_package(family: str, tmp_path: Path) -> None:
    command = str(InstalledPackages().command(names=["curl"], family=family))
    result = run(command, env={"PATH": str(tmp_path)})
    assert (result.returncode, result.stdout) == (0, "")


# KernelParameters


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        ("net.core.somaxconn rw 4096", KernelParameter("4096", True)),
        ("net.core.somaxconn ro 4096", KernelParameter("4096", False)),
        (
            "net.ipv4.tcp_rmem rw 4096\t131072\t6291456",
            KernelParameter("4096 131072 6291456", True),
        ),
        ("net.nothing - -", KernelParameter(None, False)),
    ],
)
def test_a_kernel_parameters_value_is_normalised(line: str, parameter: KernelParameter) -> None:
    assert KernelParameters().process([line]) == {line.split()[0]: parameter}


@pytest.mark.parametrize("line", ["kernel.modprobe rw ", "kernel.modprobe rw"])
def test_a_kernel_parameter_may_be_empty(line: str) -> None:
    assert KernelParameters().process([line]) == {"kernel.modprobe": KernelParameter("", True)}


@pytest.mark.skipif(not Path("/proc/sys/kernel/ostype").exists(), reason="no /proc/sys")
def test_this_kernel_is_asked() -> None:
    found = asked(KernelParameters, names=["kernel.ostype", "no.such.parameter"])
    assert found["kernel.ostype"].value == "Linux"
    assert not found["kernel.ostype"].writable
    assert found["no.such.parameter"] == KernelParameter(None, False)


def test_a_kernel_parameter_of_several_lines_is_one_value(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/info").write_text("CD-ROM information\n\ndrive name:\tsr0\nx\n")
    command = KernelParameters().command(names=["dev.info"]).replace("/proc/sys", str(tmp_path))
    found = KernelParameters().process(run(command).stdout.splitlines())
    assert found["dev.info"].value == "CD-ROM information drive name: sr0 x"


# What a host says between its answers


NOISE = ["", " ", "x", "x y", "x y z", "a=b", "=", ":", "program ", "@", "\u4e2d \u6587"]


@pytest.mark.parametrize(
    "fact",
    [
        *(PathStates, InstalledPackages, KernelParameters, NvidiaState, Holds, Selinux),
        *(Denials, Kysec, Cmake, Server, Nginx),
    ],
)
def test_noise_means_nothing(fact: Any) -> None:
    assert fact().process(NOISE) == fact().process([])


@pytest.mark.parametrize("fact", [AvailableVersions, Drivers, UnitNames])
def test_noise_is_no_fault_where_any_name_may_stand(fact: Any) -> None:
    assert type(fact().process(NOISE)) is type(fact().process([]))


@pytest.mark.parametrize(
    "part", ["paths", "packages", "parameters", "units", "clocks", "applied", "container"]
)
def test_noise_within_a_part_of_the_hosts_state_is_no_fault(part: str) -> None:
    found = HostState().process([f"@{part}", *NOISE])
    assert (found.user, found.paths, found.packages, found.parameters) == (None, {}, {}, {})


# ModelIsWhole


@pytest.mark.parametrize(("code", "whole"), [(0, True), (1, False), (2, False)])
def test_a_model_is_whole_when_the_tool_says_so(tmp_path: Path, code: int, whole: bool) -> None:
    program(tmp_path, "python", f'echo "not whole: whole"; exit {code}')
    assert asked(ModelIsWhole, inspect=f"{tmp_path}/python /x.pyz inspect /models/tiny") is whole


def test_a_host_without_the_tool_has_no_whole_model() -> None:
    assert asked(ModelIsWhole, inspect="/no/python /x.pyz inspect /models/tiny") is False


# Server

READY = [
    "ActiveState=active",
    "SubState=running",
    "UnitFileState=enabled",
    "NeedDaemonReload=no",
    f"Started={EMPTY}  /etc/fp8fleet/instances/main.yaml",
    "Started=0123  /etc/fp8fleet/instances/main.env",
    "Ready=yes",
]
STARTED_FROM = {
    "/etc/fp8fleet/instances/main.yaml": EMPTY,
    "/etc/fp8fleet/instances/main.env": "0123",
}


def changed(**values: str) -> list[str]:
    """``READY`` with other values."""
    return [f"{k}={values.get(k, v)}" for k, v in (line.split("=", 1) for line in READY)]


def test_a_ready_server_is_all_that() -> None:
    assert Server().process(READY) == ServerState(True, True, False, STARTED_FROM, True, None)


@pytest.mark.parametrize("line", ["Started=", "Started=0123", "Started=  "])
def test_a_half_written_record_of_a_start_names_no_file(line: str) -> None:
    assert Server().process([line]).started_from == {}


@pytest.mark.parametrize(
    ("active", "sub", "runs"),
    [
        ("active", "running", True),
        ("active", "exited", False),
        ("activating", "start-pre", False),
        ("activating", "auto-restart", False),
        ("deactivating", "stop-sigterm", False),
        ("failed", "failed", False),
        ("inactive", "dead", False),
    ],
)
def test_only_a_running_server_is_active(active: str, sub: str, runs: bool) -> None:
    assert Server().process(changed(ActiveState=active, SubState=sub)).active is runs


def test_an_unknown_unit_is_nothing() -> None:
    output = ["ActiveState=inactive", "SubState=dead", "UnitFileState=", "NeedDaemonReload=no"]
    assert Server().process(output) == ServerState(False, False, False, {}, False, None)
    assert Server().process([]) == Server.default()


def test_noise_between_the_answers_is_overlooked() -> None:
    noise = ["System has not been booted with systemd", "", "sh: 1: x: not found"]
    assert Server().process([*noise, *READY, *noise]) == Server().process(READY)


def server_asked(check: str = "false") -> ServerState:
    state = asked(Server, unit="fp8fleet-main.service", instance="main", port=8000, check=check)
    assert isinstance(state, ServerState)
    return state


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the run directory, and a systemctl that knows nothing."""
    monkeypatch.setattr("roles.vllm.facts.RUN_DIRECTORY", str(tmp_path))
    program(tmp_path / "bin", "systemctl", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path


def test_a_bare_host_has_no_server(systemd: Path) -> None:
    assert server_asked("/no/python /no/tool ready") == Server.default()


@pytest.mark.parametrize("output", [[], ["Ready=yes"]])
def test_a_port_that_no_unit_of_ours_holds_has_no_holder(output: list[str]) -> None:
    assert Server().process(output).port_holder is None
    held = Server().process([*output, "Holder=fp8fleet-old.service"])
    assert held.port_holder == "fp8fleet-old.service"


def test_a_foreign_process_on_the_port_is_no_holder(systemd: Path) -> None:
    """These tests, which run in no unit of ours, stand for it."""
    users = f'users:((\\"python\\",pid={os.getpid()},fd=3))'
    program(systemd / "bin", "ss", f'echo "LISTEN 0 5 0.0.0.0:8000 0.0.0.0:* {users}"')
    assert server_asked() == Server.default()


@pytest.mark.parametrize(
    ("check", "ready"),
    [("true", True), ("false", False), ("echo Ready=yes; false", False), ("exec 2>&1; true", True)],
)
def test_a_server_is_ready_when_the_check_says_so(systemd: Path, check: str, ready: bool) -> None:
    assert server_asked(f"sh -c '{check}'").ready is ready


def test_a_server_tells_what_its_start_was_made_of_whatever_the_files_are_now(
    systemd: Path,
) -> None:
    """It is what the unit's ExecStartPre wrote."""
    options, variables = systemd / "main.yaml", systemd / "main.env"
    options.write_text("a: 1\n")
    variables.write_text("")
    assert server_asked().started_from == {}
    run(f"sha256sum {options} {variables} >{systemd}/main.started")
    started = {
        str(options): hashlib.sha256(b"a: 1\n").hexdigest(),
        str(variables): EMPTY,
    }
    assert server_asked().started_from == started
    options.write_text("a: 2\n")
    variables.unlink()
    assert server_asked().started_from == started


# UnitNames


def test_unit_names_are_sorted_and_without_blanks() -> None:
    assert UnitNames().process(["fp8fleet-b.service", "", " fp8fleet-a.service "]) == [
        "fp8fleet-a.service",
        "fp8fleet-b.service",
    ]
    assert UnitNames().process([]) == []


def test_only_our_units_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.vllm.facts.UNIT_DIRECTORY", str(tmp_path))
    assert asked(UnitNames) == []
    for name in ("fp8fleet-a.service", "fp8fleet-b.c.service", "nginx.service", "fp8fleet-x.mount"):
        (tmp_path / name).write_text("")
    (tmp_path / "fp8fleet-a.service.fp8fleet-new").write_text("")
    assert asked(UnitNames) == ["fp8fleet-a.service", "fp8fleet-b.c.service"]


def test_a_host_without_systemds_folder_has_no_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roles.vllm.facts.UNIT_DIRECTORY", str(tmp_path / "none"))
    assert asked(UnitNames) == []


# Nginx


@pytest.mark.parametrize(
    ("output", "state"),
    [
        (["ActiveState=active", "UnitFileState=enabled", "Live=0123"], (True, True, "0123")),
        (["ActiveState=inactive", "UnitFileState=disabled", "Live="], (False, False, None)),
        (["ActiveState=failed", "UnitFileState=enabled", "Live="], (False, True, None)),
        (["ActiveState=active", "UnitFileState=", "Live=<html>"], (True, False, "<html>")),
        (["ActiveState=reloading", "Live=0123"], (False, False, "0123")),
        ([], (False, False, None)),
    ],
)
def test_nginxs_state(output: list[str], state: tuple[bool, bool, str | None]) -> None:
    assert Nginx().process(output) == NginxState(*state)


def test_a_host_without_nginx_and_curl_serves_nothing(tmp_path: Path) -> None:
    result = run(str(Nginx().command(status_port=1)), env={"PATH": str(tmp_path)})
    assert result.returncode == 0
    assert Nginx().process(result.stdout.splitlines()) == Nginx.default()


# OurNginxRuns

OURS = (REPO / "tests/data/golden/gw-1/etc/nginx/nginx.conf").read_text()
SYSTEMCTL = """\
case "$1" in
  is-active) echo active; [ -e {folder}/active ] ;;
  is-enabled) echo enabled; [ -e {folder}/enabled ] ;;
  disable) [ "$2" = --now ] && rm -f {folder}/active {folder}/enabled ;;
esac"""


def our_nginx_runs(folder: Path) -> bool:
    """The fact, with the configuration and the unit's state in ``folder``."""
    command = OurNginxRuns().command().replace("/etc/nginx/nginx.conf", f"{folder}/nginx.conf")
    result = run(command)
    assert result.returncode == 0
    return OurNginxRuns().process(result.stdout.splitlines())


@pytest.fixture
def nginx_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for Nginx's configuration and the state of its unit."""
    program(tmp_path / "bin", "systemctl", SYSTEMCTL.format(folder=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize(
    ("configuration", "unit", "runs"),
    [
        (OURS, ["active", "enabled"], True),
        (OURS, ["active"], True),
        (OURS, ["enabled"], True),
        (OURS, [], False),
        ("http { }\n", ["active", "enabled"], False),
        (None, ["active", "enabled"], False),
        (None, [], False),
    ],
)
def test_only_an_nginx_of_ours_that_runs_or_would_at_boot_counts(
    nginx_unit: Path, configuration: str | None, unit: list[str], runs: bool
) -> None:
    if configuration is not None:
        (nginx_unit / "nginx.conf").write_text(configuration)
    for state in unit:
        (nginx_unit / state).touch()
    assert our_nginx_runs(nginx_unit) is runs
    assert OurNginxRuns.default() is False


def test_the_nginx_of_a_host_without_a_proxy_is_stopped_once(nginx_unit: Path) -> None:
    (nginx_unit / "nginx.conf").write_text(OURS)
    for state in ("active", "enabled"):
        (nginx_unit / state).touch()
    facts = {OurNginxRuns: lambda: our_nginx_runs(nginx_unit)}
    (stop,) = commands(live_configuration, facts, proxy=None)
    assert run(stop).returncode == 0
    assert commands(live_configuration, facts, proxy=None) == []
    assert (nginx_unit / "nginx.conf").exists()


def test_a_planned_proxy_never_asks_whether_an_nginx_of_ours_runs() -> None:
    live = NginxState(True, True, PROXY.digest)
    assert commands(live_configuration, {Nginx: live}, proxy=PROXY) == []


# LoggedKvCaches

LOGGED = "(EngineCore pid=1) INFO [kv_cache_utils.py:1744] GPU KV cache size: 962,624 tokens"


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which the unit `a` runs since start 0a, whose journal can be read."""
    state = 'case "$2" in a) echo InvocationID=0a ;; *) echo InvocationID= ;; esac'
    program(tmp_path, "systemctl", state)
    lines = f"echo noise; echo '{LOGGED}'; echo 'GPU KV cache size: 1 tokens'"
    program(tmp_path, "journalctl", f'case "$*" in *ID=0a) {lines} ;; *) exit 1 ;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.usefixtures("journal")
def test_a_kv_caches_size_is_the_first_of_the_start_that_goes_on() -> None:
    assert asked(LoggedKvCaches, units=["a", "b"]) == {"a": 962_624}


def test_a_journal_that_cannot_be_read_tells_no_size(journal: Path) -> None:
    program(journal, "journalctl", "exit 1")
    assert asked(LoggedKvCaches, units=["a"]) == {}

"""The preflight role: one command a host, errors stop that host alone, sudo when needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gevent import GreenletExit
from harness import REPO, RecordedHost, context, host_plan, run
from pyinfra.api.exceptions import PyinfraError
from test_deploy import FLEET, ONE_HOST, Groups, inventory

import roles.preflight
from fp8fleet.preflight.facts import parts_of, probe_arguments
from roles.preflight.facts import HostProbe, probe_command

REPORT = REPO / "reports/preflight-_fake_gpu-1.json"


def pyinfra(
    folder: Path, groups: Groups, deploy: str, *arguments: str, probe: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a deploy on hosts without anything; ``probe``: ``HOST=RECORDING`` of a broken one."""
    REPORT.unlink(missing_ok=True)
    return subprocess.run(
        [
            *(sys.executable, str(REPO / "tests/operations/fake_run.py"), "bare"),
            *(inventory(folder, "site", groups), deploy, *arguments),
        ],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "PYINFRA_FAKE_DELAY": "0",
            "PYINFRA_FAKE_DELAY_JITTER": "0",
            "FP8FLEET_API_KEY": "sk-live-5ecre7",
            "FP8FLEET_TEST_PROBE": probe,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def commands(ran: subprocess.CompletedProcess[str], host: str) -> list[str]:
    """The commands that the host was asked for."""
    return re.findall(rf"^asked {re.escape(host)}: (.*)$", ran.stderr, flags=re.M)


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(REPORT.read_text())
    return found


@pytest.mark.parametrize("arguments", [["-y"], ["--dry"]])
def test_preflight_alone_asks_each_host_one_command(tmp_path: Path, arguments: list[str]) -> None:
    ran = pyinfra(tmp_path, FLEET, "deploys/preflight.py", *arguments)
    assert ran.returncode == 0, ran.stderr
    for host in ("@fake/gpu-1", "@fake/kylin-1", "@fake/gw-1"):
        assert len(commands(ran, host)) == 1, ran.stderr
        assert f"preflight {host}: 0 errors, 0 warnings, 0 ignored" in ran.stderr
    assert report()["passed"] is True
    assert report()["mode"] == "fast"


def test_preflight_adds_one_command_to_full(tmp_path: Path) -> None:
    ran = pyinfra(tmp_path, ONE_HOST, "deploys/full.py", "--dry")
    assert ran.returncode == 0, ran.stderr
    probes = [command for command in commands(ran, "@fake/gpu-1") if "sh -c" in command]
    assert len([command for command in probes if "PATH=$PATH" in command]) == 1


@pytest.mark.parametrize("mode", ["-y", "--dry"])
def test_an_error_stops_its_host_before_anything_else_is_asked(tmp_path: Path, mode: str) -> None:
    ran = pyinfra(
        tmp_path, ONE_HOST, "deploys/full.py", mode, probe="@fake/gpu-1=broken/driver-mismatch"
    )
    assert ran.returncode == 1
    assert "stopped before any change: driver-broken" in ran.stderr
    assert "Driver/library version mismatch" in ran.stderr.replace("\n", " ")
    assert len(commands(ran, "@fake/gpu-1")) == 1
    assert "Traceback" not in ran.stderr
    assert report()["passed"] is False


def test_the_other_hosts_go_on(tmp_path: Path) -> None:
    ran = pyinfra(
        *(tmp_path, FLEET, "deploys/full.py", "--dry", "--json"),
        probe="@fake/gpu-1=broken/read-only-usr",
    )
    assert ran.returncode == 1
    touched = {h for op in json.loads(ran.stdout)["plan"] for h in op["hosts_with_change"]}
    assert "@fake/gpu-1" not in touched
    assert {"@fake/kylin-1", "@fake/gw-1"} <= touched


def test_a_fault_of_judging_stops_its_host_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise IndexError("list index\nout of range")

    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)
        raise GreenletExit

    monkeypatch.setattr(roles.preflight, "judge", fails)
    monkeypatch.setattr(roles.preflight, "_stop", stop)
    monkeypatch.setattr(roles.preflight, "_probe", lambda plan, full: [])
    monkeypatch.setattr(roles.preflight, "host_plan", lambda host: host_plan())
    session = SimpleNamespace(preflight_full=False, ignored=frozenset())
    monkeypatch.setattr(roles.preflight, "current", lambda: session)
    with context(RecordedHost({})), pytest.raises(GreenletExit):
        roles.preflight.check._inner()
    assert stopped == [True]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "IndexError" in line and "left as it is" in line and "\n" not in line


def test_an_ignored_error_lets_the_run_go_on_and_stands_in_the_report(tmp_path: Path) -> None:
    ran = pyinfra(
        *(tmp_path, ONE_HOST, "deploys/full.py", "--dry", "--data", "ignore=driver-broken"),
        probe="@fake/gpu-1=broken/driver-mismatch",
    )
    assert ran.returncode == 0, ran.stderr
    assert len(commands(ran, "@fake/gpu-1")) > 5
    assert report()["ignore"] == ["driver-broken"]
    assert [f["ignored"] for f in report()["findings"]] == [True]


def test_a_warning_stops_nothing(tmp_path: Path) -> None:
    ran = pyinfra(tmp_path, ONE_HOST, "deploys/full.py", "--dry", probe="@fake/gpu-1=broken/proxy")
    assert ran.returncode == 0, ran.stderr
    assert "proxy-differs" in ran.stderr


def test_the_full_mode_is_asked_for(tmp_path: Path) -> None:
    ran = pyinfra(
        *(tmp_path, ONE_HOST, "deploys/preflight.py", "-y", "--data", "preflight=full"),
        probe="@fake/gpu-1=broken/xid",
    )
    assert ran.returncode == 1
    assert report()["mode"] == "full"
    assert "gpu-kernel-errors" in ran.stderr


# The probe as a command


def test_the_probes_command_survives_the_shells_that_it_passes() -> None:
    arguments = probe_arguments(full=False, need_root=False, paths=["/opt/a"], ports=[9])
    done = run(probe_command(arguments))
    assert done.returncode == 0
    parts = parts_of(HostProbe().process(done.stdout.splitlines()))
    assert parts is not None
    assert "os" in parts
    assert "xid" not in parts


NOT_ROOT = ["@user", " 1001", " deploy", " sudo {}", " =0", "@end"]
WHOLE = ["@user", " 0", " root", " =0", "@time", " 1", " =0", "@end"]


def asked(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[bool], list[str]],
    sudo: bool,
    terminal: bool = False,
    password: bool = False,
) -> tuple[list[bool], list[str]]:
    """With which ``_sudo`` the probe was sent, and the answer that counts."""
    sent: list[bool] = []

    def get_fact(fact: type[HostProbe], **arguments: Any) -> list[str]:
        assert fact is HostProbe
        assert f"root={int(sudo)}" in arguments["arguments"]
        assert arguments["_ignore_errors"]
        sent.append(arguments["_sudo"])
        return answer(arguments["_sudo"])

    host = RecordedHost({}, connector_data={"prompted_sudo_password": "x"} if password else {})
    monkeypatch.setattr(host, "get_fact", get_fact)
    monkeypatch.setattr(host, "data", {"_sudo": True} if sudo else {}, raising=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
    with context(host):
        return sent, roles.preflight._probe(host_plan(), full=False)


def not_root(works: int) -> list[str]:
    return [line.format(works) for line in NOT_ROOT]


def test_as_root_one_command_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, lines = asked(monkeypatch, lambda sudo: WHOLE, sudo=True)
    assert (sent, lines) == ([False], WHOLE)


def test_sudo_that_asks_for_nothing_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, lines = asked(monkeypatch, lambda sudo: WHOLE if sudo else not_root(0), sudo=True)
    assert (sent, lines) == ([False, True], WHOLE)


@pytest.mark.parametrize("known", ["terminal", "password"])
def test_sudo_with_a_password_is_used_where_one_can_be_had(
    monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    sent, lines = asked(
        monkeypatch,
        lambda sudo: WHOLE if sudo else not_root(1),
        sudo=True,
        **{known: True},
    )
    assert (sent, lines) == ([False, True], WHOLE)


def test_sudo_without_a_password_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, lines = asked(monkeypatch, lambda sudo: not_root(1), sudo=True)
    assert (sent, lines) == ([False], not_root(1))


def test_sudo_that_fails_leaves_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, lines = asked(
        monkeypatch, lambda sudo: [] if sudo else not_root(1), sudo=True, password=True
    )
    assert (sent, lines) == ([False, True], not_root(1))


def test_the_last_host_that_stops_ends_its_own_preparation_only() -> None:
    host = RecordedHost({})
    with context(host) as state:
        state.active_hosts = set()

        def fail(hosts: Any) -> None:
            raise PyinfraError("No hosts remaining!")

        state.fail_hosts = fail
        with pytest.raises(GreenletExit):
            roles.preflight._stop()
        state.active_hosts = {host.name}
        with pytest.raises(PyinfraError):
            roles.preflight._stop()

"""The host role's operations: exact versions, holds, clock, services, NVIDIA's devices."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import RecordedHost, asked, commands, context, host_plan, lines, program, run
from pyinfra import logger
from pyinfra.api import FunctionCommand, StringCommand

from fp8fleet import catalog
from fp8fleet.accounts import COMMENT, Account
from fp8fleet.plan import NVIDIA_UNIT, PERSISTENCE_UNIT, HostPlan, ServicePlan, TimePlan
from roles.host import distribution
from roles.host.distribution import (
    FINISH_DPKG,
    has_version,
    held_packages,
    package_sources,
    packages,
)
from roles.host.facts import (
    AvailableVersions,
    HeldPackages,
    Holds,
    HostFacts,
    HostState,
    KernelParameter,
    NvidiaFacts,
    NvidiaState,
    Unit,
)
from roles.host.operations import (
    clock,
    kernel_parameters,
    nvidia_devices,
    service_user,
    services,
)
from roles.host.state import forget, host_facts

RUNS = Unit("loaded", True, "enabled")
STOPPED = Unit("loaded", False, "disabled")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator is warned of."""
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    return said


def plan(packages: tuple[str, ...] = ("curl", "nginx"), **changes: Any) -> HostPlan:
    """A plan with these packages; other changes are of its preparation, or of the plan itself."""
    own = {key: changes.pop(key) for key in ("family", "sysctl", "proxy_url") if key in changes}
    whole = host_plan(packages=packages, **own)
    changes = {"retired": ()} | changes
    return replace(whole, preparation=replace(whole.preparation, **changes))


def executed(
    operation: Any, facts: list[Any], offered: dict[str, tuple[str, ...]], **arguments: Any
) -> tuple[list[str], list[str]]:
    """What an operation does while a run executes, and what it says; ``facts`` in turn."""
    answers = iter(facts)

    def state(**_: Any) -> Any:
        return next(answers)

    host = RecordedHost({HostState: state, AvailableVersions: offered})
    texts: list[str] = []
    with context(host, executing=True) as run_state:
        for command in operation._inner(**arguments):
            if isinstance(command, FunctionCommand):
                assert command.execute(run_state, host, {}) is False
                break  # as pyinfra does
            assert isinstance(command, StringCommand)
            texts.append(str(command.get_raw_value()))
    return texts, host.said


# The compound fact


def test_the_role_asks_its_fact_once_until_it_changes_something() -> None:
    host = RecordedHost({HostState: HostFacts()})
    with context(host):
        host_facts(plan())
        host_facts(plan())
        assert len(host.asked) == 1
        forget()
        host_facts(plan())
        assert len(host.asked) == 2


def test_executing_asks_anew_what_was_asked_when_the_run_was_prepared() -> None:
    host = RecordedHost({HostState: HostFacts()})
    with context(host):
        host_facts(plan())
    with context(host, executing=True):
        host_facts(plan())
    assert len(host.asked) == 2


def test_a_host_without_anything_answers_in_one_command(tmp_path: Path) -> None:
    """Run here: a plain machine, none of whose parts are ours."""
    found = asked(HostState, plan=plan(("no-such-package-x",), sysctl={"no.such": "1"}))
    assert isinstance(found, HostFacts)
    assert found.packages == {}
    assert found.parameters == {"no.such": KernelParameter(None, False)}
    assert found.user is None
    assert all(state.kind in ("absent", "directory", "file") for state in found.paths.values())


RECORDED = [
    "@paths",
    "file 644 root root abc /etc/x",
    "@packages",
    "installed nginx nginx 1.22.1-9",
    "@parameters",
    "net.core.somaxconn rw 4096",
    "@user",
    "vllm:x:999:998:fp8fleet:/var/cache/fp8fleet/home:/usr/sbin/nologin",
    "@group",
    "vllm:x:998:",
    "@units",
    "systemd-timesyncd.service LoadState=loaded ActiveState=inactive UnitFileState=disabled"
    " NeedDaemonReload=no",
    "chronyd.service LoadState=not-found ActiveState=inactive UnitFileState= NeedDaemonReload=no",
    "systemd-journald.service LoadState=loaded ActiveState=active UnitFileState=static"
    " NeedDaemonReload=yes",
    "@clocks",
    "phc2sys@eth0.service loaded active running Synchronize system clock for eth0",
    "@applied",
    "systemd-journald.service.applied:0123",
    "@dnf",
    "reposdir=/etc/fp8fleet/yum.repos.d",
    "@container",
    "yes",
]


def test_every_part_of_the_answer_is_read() -> None:
    found = HostState().process(RECORDED)
    assert found.paths["/etc/x"].sha256 == "abc"
    assert found.packages == {"nginx": ("1.22.1-9",)}
    assert found.parameters == {"net.core.somaxconn": KernelParameter("4096", True)}
    assert found.user == Account("998", COMMENT, "/var/cache/fp8fleet/home", "/usr/sbin/nologin")
    assert found.group == "998"
    assert found.unit("systemd-timesyncd.service") == Unit("loaded", False, "disabled")
    assert not found.unit("chronyd.service").exists
    assert found.unit("systemd-journald.service") == Unit("loaded", True, "static", True)
    assert not found.unit("never.asked").exists
    assert found.applied == {"systemd-journald.service": "0123"}
    assert found.clocks == ("phc2sys@eth0.service",)
    assert found.dnf_sources == ("reposdir=/etc/fp8fleet/yum.repos.d",)
    assert found.container
    assert HostState().process([]) == HostFacts()


# Versions


@pytest.mark.parametrize(
    ("family", "have", "want", "same"),
    [
        ("apt", "1.22.1-9+deb12u1", "1.22.1-9+deb12u1", True),
        ("apt", "1.22.1-9+deb12u1", "1.22.1-9", False),
        ("apt", "4:12.2.0-3", "12.2.0-3", False),
        ("dnf", "0:1.21.5-4.ky10", "1.21.5", True),
        ("dnf", "0:1.21.5-4.ky10", "1.21.5-4.ky10", True),
        ("dnf", "0:1.21.5-4.ky10", "1.21.5-3.ky10", False),
        ("dnf", "0:1.21.5-4.ky10", "1.21", False),
        ("dnf", "1:1.21.5-4.ky10", "1.21.5", True),
        ("dnf", "1:1.21.5-4.ky10", "1:1.21.5", True),
        ("dnf", "1:1.21.5-4.ky10", "0:1.21.5-4.ky10", False),
    ],
)
def test_a_version_is_compared_whole_and_an_rpms_epoch_and_release_may_be_left_out(
    family: str, have: str, want: str, same: bool
) -> None:
    assert has_version(family, [have], want) is same
    assert has_version(family, ["0:9-9", have], want) is same
    assert not has_version(family, [], want)


def test_what_the_sources_have_is_read_from_apt_and_dnf() -> None:
    apt = ["    nginx | 1.22.1-9 | file:/srv/deb ./ Packages"]
    printed = "\n".join(apt)
    text = str(AvailableVersions().command(names=["nginx"], family="apt", options=""))
    assert "madison nginx" in text
    cleaned = run(text.replace("apt-cache madison nginx", f"echo {shlex.quote(printed)}"))
    assert AvailableVersions().process(cleaned.stdout.splitlines()) == {"nginx": ("1.22.1-9",)}
    dnf = ["nginx 1:1.16.1-7.ky10", "nginx 1:1.21.5-4.ky10", "nginx 1:1.21.5-4.ky10"]
    found = AvailableVersions().process(dnf)
    assert found == {"nginx": ("1:1.16.1-7.ky10", "1:1.21.5-4.ky10")}


# Packages


def test_a_host_that_has_its_packages_gets_no_command() -> None:
    facts = {HostState: HostFacts(packages={"curl": ("1",), "nginx": ("2",), "more": ("3",)})}
    for family in ("apt", "dnf"):
        assert lines(packages, facts, plan=plan(family=family)) == []


def test_a_package_at_its_version_gets_no_command() -> None:
    facts = {HostState: HostFacts(packages={"curl": ("1",), "nginx": ("0:1.2-3",)})}
    assert lines(packages, facts, plan=plan(family="dnf", versions={"nginx": "1.2"})) == []


def test_only_missing_packages_are_installed_by_apt() -> None:
    facts = {HostState: HostFacts(packages={"curl": ("1",)})}
    found = commands(packages, facts, plan=plan(("curl", "g++", "nginx")))
    assert all(command.streamed for command in found)
    assert [command.text.split()[-1] for command in found][-2:] == ["update", "nginx"]
    install = found[-1].text
    assert install.endswith("--no-install-recommends install g++ nginx")
    assert "DPkg::Lock::Timeout=" in install
    assert "DEBIAN_FRONTEND=noninteractive" in install
    assert "--allow-downgrades" not in install


def inner(command: str) -> str:
    """The script of ``sh -c SCRIPT`` at a command's end."""
    words = shlex.split(command)
    assert words[-3:-1] == ["sh", "-c"]
    return words[-1]


def test_only_missing_packages_are_installed_by_dnf() -> None:
    facts = {HostState: HostFacts(packages={"curl": ("1",)})}
    bare = replace(plan(("curl", "gcc-c++"), family="dnf"), proxy_url="http://p:3128/?a&b")
    (install,) = lines(packages, facts, plan=replace(bare, ca_bundle="/etc/ca.pem"))
    script = inner(install)
    assert " install gcc-c++;" in script
    assert "--setopt='proxy=http" not in script
    assert "--setopt=proxy='http://p:3128/?a&b'" in script
    assert "--setopt=sslcacert=/etc/ca.pem" in script
    assert "exit_on_lock=True" in script
    assert "--disableexcludes" not in script


def test_a_pinned_package_alone_may_be_downgraded_and_is_held_again_by_apt() -> None:
    facts = {HostState: HostFacts(packages={"nginx": ("1.24-1",)})}
    found = lines(packages, facts, plan=plan(versions={"nginx": "1.22-9"}))
    pinned, missing = found[-2:]
    script = inner(pinned)
    assert "--allow-downgrades --allow-change-held-packages install nginx=1.22-9;" in script
    assert script.startswith("held=$(apt-mark showhold nginx);")
    assert "apt-mark hold $held; exit $r" in script
    assert missing.endswith("install curl")
    assert "--allow" not in missing


def test_a_pinned_package_is_installed_by_dnf_in_spite_of_our_exclude() -> None:
    facts = {HostState: HostFacts(packages={"curl": ("1",), "nginx": ("0:1.24-1",)})}
    (pinned,) = lines(packages, facts, plan=plan(family="dnf", versions={"nginx": "1.22"}))
    assert "--disableexcludes=main install nginx-1.22;" in inner(pinned)


def test_a_version_that_the_sources_lack_is_one_line_with_those_that_they_have() -> None:
    facts = HostFacts(packages={"curl": ("1",), "nginx": ("1.22-9",)})
    texts, said = executed(
        packages, [facts], {"nginx": ("1.24-1", "1.22-9")}, plan=plan(versions={"nginx": "9.9"})
    )
    assert [text.split()[-1] for text in texts][-1] == "update"
    assert said == [
        "package nginx: version 9.9 (package_versions) is not in the package sources;"
        " they have 1.24-1, 1.22-9"
    ]


def test_a_version_that_is_not_there_after_all_is_one_line() -> None:
    before = HostFacts(packages={"curl": ("1",), "nginx": ("1.22-9",)})
    texts, said = executed(
        packages, [before, before], {"nginx": ("1.24-1",)}, plan=plan(versions={"nginx": "1.24-1"})
    )
    assert "nginx=1.24-1" in texts[-1]
    (line,) = said
    assert "nginx: version 1.24-1 is asked for, 1.22-9 is installed" in line


def test_a_version_that_is_there_afterwards_is_fine() -> None:
    before = HostFacts(packages={"curl": ("1",)})
    after = HostFacts(packages={"curl": ("1",), "nginx": ("0:1.24-1",)})
    _, said = executed(
        packages,
        [before, after],
        {"nginx": ("0:1.24-1",)},
        plan=plan(family="dnf", versions={"nginx": "1.24"}),
    )
    assert said == []


# Locks, in a real shell


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins, first in PATH; nothing sleeps."""
    folder = tmp_path / "bin"
    program(folder, "sleep", "exit 0")
    program(folder, "rpm", f"echo {tmp_path}")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def test_dpkgs_lock_is_awaited(path: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    program(path, "dpkg", f"echo >>{count}; [ $(wc -l <{count}) -ge 3 ] || exit 2")
    program(path, "dpkg-query", "exit 0")
    assert run(FINISH_DPKG).returncode == 0
    assert len(count.read_text().splitlines()) == 3


@pytest.mark.parametrize("code", [1, 2])
def test_a_broken_database_of_dpkg_is_no_lock(path: Path, tmp_path: Path, code: int) -> None:
    """dpkg ends with 2 there as well; 1: its database does not even name dpkg."""
    count = tmp_path / "count"
    program(path, "dpkg", f"echo >>{count}; echo 'dpkg: error: parsing file' >&2; exit 2")
    program(path, "dpkg-query", f"exit {code}")
    done = run(FINISH_DPKG)
    assert (done.returncode, len(count.read_text().splitlines())) == (1, 1)
    assert "dpkg: error: parsing file" in done.stderr


def test_dnfs_lock_is_awaited(path: Path, tmp_path: Path) -> None:
    """dnf exits with 200 where another dnf works and exit_on_lock is set."""
    count = tmp_path / "count"
    program(path, "dnf", f'echo "$*" >>{count}; [ $(wc -l <{count}) -ge 3 ] || exit 200')
    assert run(distribution.dnf_command(" install x")).returncode == 0
    assert count.read_text().splitlines() == ["-y --setopt=exit_on_lock=True install x"] * 3


def test_a_lock_that_stays_is_one_line_after_five_minutes(path: Path) -> None:
    program(path, "dnf", "exit 200")
    done = run(distribution.dnf_command(" install x"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "has held the lock of dnf or rpm for 5 minutes" in done.stderr


def test_another_failure_of_dnf_is_not_tried_again(path: Path, tmp_path: Path) -> None:
    program(path, "dnf", f"echo >>{tmp_path}/count; exit 1")
    assert run(distribution.dnf_command(" install x")).returncode == 1
    assert len((tmp_path / "count").read_text().splitlines()) == 1


def test_rpms_lock_is_awaited(path: Path, tmp_path: Path) -> None:
    """rpm would wait for it for ever: a lock of fcntl, which /proc/locks shows."""
    lock = tmp_path / ".rpm.lock"
    lock.touch()
    program(path, "dnf", "exit 0")
    hold = f"import fcntl,sys; f=open({str(lock)!r},'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    wait = "print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{hold}; {wait}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdin
        holder.stdout.readline()
        held = run(distribution.dnf_command(" install x"))
        holder.stdin.close()
        holder.wait()
    assert held.returncode == 1
    assert "lock of dnf or rpm" in held.stderr
    assert run(distribution.dnf_command(" install x")).returncode == 0


# dnf's configuration


def applied(command: str, file: Path) -> str:
    """What a change of dnf's configuration makes of ``file``."""
    text = command.replace("mkdir -p /etc/dnf", "true").replace("/etc/dnf/dnf.conf", str(file))
    done = run(text)
    assert done.returncode == 0, done.stderr
    return file.read_text()


def test_our_lines_stand_in_dnfs_main_section_and_go_again(tmp_path: Path) -> None:
    file = tmp_path / "dnf.conf"
    own = "[main]\ngpgcheck=1\nexclude=java*\n\n[site]\nenabled=0\n"
    file.write_text(own)
    sources = ("reposdir=/etc/fp8fleet/yum.repos.d",)
    applied(distribution._dnf_block("sources", sources), file)
    applied(distribution._dnf_block("holds", ("excludepkgs=kernel kernel-devel*",)), file)
    text = applied(distribution._dnf_block("holds", ("excludepkgs=kernel",)), file)
    assert text.splitlines()[:7] == [
        "[main]",
        "# fp8fleet holds: begin",
        "excludepkgs=kernel",
        "# fp8fleet holds: end",
        "# fp8fleet sources: begin",
        "reposdir=/etc/fp8fleet/yum.repos.d",
        "# fp8fleet sources: end",
    ]
    assert text.endswith(own.removeprefix("[main]\n"))
    applied(distribution._dnf_block("holds", ()), file)
    assert applied(distribution._dnf_block("sources", ()), file) == own
    assert [entry.name for entry in tmp_path.iterdir()] == ["dnf.conf"]


def test_a_host_without_dnfs_configuration_gets_one(tmp_path: Path) -> None:
    text = applied(distribution._dnf_block("holds", ("excludepkgs=kernel",)), tmp_path / "new")
    assert text.startswith("[main]\n# fp8fleet holds: begin\nexcludepkgs=kernel\n")


def test_sources_are_set_once_and_only_for_dnf() -> None:
    want = ("reposdir=/etc/fp8fleet/yum.repos.d",)
    asked_for = plan(family="dnf", dnf_sources=want)
    assert len(lines(package_sources, {HostState: HostFacts()}, plan=asked_for)) == 1
    assert lines(package_sources, {HostState: HostFacts(dnf_sources=want)}, plan=asked_for) == []
    (gone,) = lines(
        package_sources, {HostState: HostFacts(dnf_sources=want)}, plan=plan(family="dnf")
    )
    assert "reposdir" not in gone
    assert lines(package_sources, {}, plan=plan(family="apt")) == []


# Holds

KERNEL = ("linux-generic*", "nvidia-driver*")


def holds(
    matching: Sequence[str] = (), held: Sequence[str] = (), ours: Sequence[str] = ()
) -> list[str]:
    found = HeldPackages(frozenset(matching), frozenset(held), frozenset(ours))
    return lines(held_packages, {Holds: found}, plan=plan(held=KERNEL))


def test_packages_that_are_held_get_no_command() -> None:
    one = ["linux-generic"]
    assert holds(matching=one, held=one, ours=one) == []
    assert holds(matching=one, held=one) == [], "the operator holds it"
    assert holds() == []


def test_a_new_driver_is_held_and_noted_before() -> None:
    one, both = ["linux-generic"], ["linux-generic", "nvidia-driver-580"]
    (command,) = holds(matching=both, held=one, ours=one)
    note, hold, final = re.split(r" && (?=apt-mark)|(?<=580) && (?=printf)", command)
    assert "linux-generic nvidia-driver-580" in note
    assert hold == "apt-mark hold nvidia-driver-580"
    assert "linux-generic nvidia-driver-580" in final
    assert "unhold" not in command


def test_only_what_we_held_is_released() -> None:
    (command,) = holds(matching=[], held=["mine", "operators"], ours=["mine"])
    assert command.startswith("apt-mark unhold mine && ")
    assert "operators" not in command
    assert holds(matching=[], held=["operators"]) == []


def test_what_was_removed_is_forgotten() -> None:
    (command,) = holds(matching=[], held=[], ours=["gone"])
    assert "apt-mark" not in command


def test_dnf_excludes_by_the_key_that_the_operator_has_not_used() -> None:
    on_dnf = plan(family="dnf", held=("kernel", "kernel-devel*"))

    def asked_of(*keys: str) -> list[str]:
        found = HeldPackages(exclude_keys=frozenset(keys))
        return lines(held_packages, {Holds: found}, plan=on_dnf)

    assert "excludepkgs=kernel kernel-devel*" in asked_of()[0]
    assert "excludepkgs=kernel kernel-devel*" in asked_of("exclude")[0]
    assert "\\nexclude=kernel kernel-devel*" in asked_of("excludepkgs")[0]
    same = HeldPackages(excluded=("excludepkgs=kernel kernel-devel*",))
    assert lines(held_packages, {Holds: same}, plan=on_dnf) == []
    assert len(lines(held_packages, {Holds: same}, plan=plan(family="dnf", held=()))) == 1


def test_what_is_held_is_read(tmp_path: Path) -> None:
    found = Holds().process(
        ["matching linux-generic", "held linux-generic", "held libc6:i386", "ours linux-generic"]
    )
    assert found.matching == found.ours == {"linux-generic"}
    assert found.held == {"linux-generic", "libc6"}
    file = tmp_path / "dnf.conf"
    file.write_text(
        "[main]\n# fp8fleet holds: begin\nexcludepkgs=kernel\n# fp8fleet holds: end\n"
        "exclude = java*\n"
    )
    text = str(Holds().command(patterns=(), family="dnf")).replace("/etc/dnf/dnf.conf", str(file))
    printed = run(text).stdout.splitlines()
    assert printed == ["excluded excludepkgs=kernel", "uses exclude"]
    assert Holds().process(printed).exclude_keys == {"exclude"}


# The service user


OURS = Account("998", COMMENT, plan().home, plan().no_login_shell)


def test_a_bare_host_gets_user_and_group_in_one_command() -> None:
    (user,) = lines(service_user, {HostState: HostFacts()}, plan=plan())
    assert user.startswith("useradd --system --user-group --no-create-home --home-dir /")
    assert "--comment fp8fleet --shell /usr/sbin/nologin vllm" in user


def test_a_user_that_is_right_gets_no_command() -> None:
    facts = {HostState: HostFacts(user=OURS, group="998")}
    assert lines(service_user, facts, plan=plan()) == []


@pytest.mark.parametrize(
    "user",
    [
        replace(OURS, home="/data/cache/home"),
        replace(OURS, comment=""),
        replace(OURS, shell="/bin/sh"),
        replace(OURS, gid="100"),
    ],
)
def test_a_user_that_fp8fleet_made_is_brought_up_to_date(user: Account) -> None:
    facts = {HostState: HostFacts(user=user, group="998")}
    (command,) = lines(service_user, facts, plan=plan())
    assert command.startswith(f"usermod --gid vllm --home {plan().home} --comment fp8fleet ")


@pytest.mark.parametrize(
    ("passwd", "group"),
    [
        ("ops:x:1000:1000::/home/ops:/bin/bash", "ops:x:1000:"),
        ("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin", ""),
        ("www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin", "www-data:x:33:"),
        ("", "disk:x:6:"),
        ("an odd line", "an odd line"),
        ("", "odd"),
    ],
)
def test_somebody_elses_account_or_group_is_one_line_and_stays_as_it_is(
    passwd: str, group: str
) -> None:
    facts = HostState().process(["@user", passwd, "@group", group])
    texts, said = executed(service_user, [facts], {}, plan=plan())
    assert texts == []
    (line,) = said
    assert line.startswith("service_user = 'vllm': the host has a")
    assert "set service_user to a name that the host does not have" in line


# Kernel parameters


def parameters(value: str | None, writable: bool, want: str) -> list[str]:
    found = HostFacts(parameters={"net.a": KernelParameter(value, writable)})
    return lines(kernel_parameters, {HostState: found}, plan=plan(sysctl={"net.a": want}))


def test_a_parameter_in_force_gets_no_command() -> None:
    assert parameters("1 2", True, "1\t2") == []
    assert lines(kernel_parameters, {}, plan=plan(sysctl={})) == []


def test_a_parameter_with_another_value_is_set() -> None:
    (command,) = parameters("1", True, "4096 8192")
    assert shlex.split(command) == ["sysctl", "-q", "-w", "net.a=4096 8192"]


def test_a_parameter_that_a_container_may_not_set_is_said_and_left(warnings: list[str]) -> None:
    assert parameters("60", False, "10") == []
    (warning,) = warnings
    assert "kernel parameter net.a is 60, not 10" in warning
    assert "container" in warning


def test_a_parameter_that_the_kernel_lacks_is_said_and_left(warnings: list[str]) -> None:
    assert parameters(None, False, "1") == []
    assert "this kernel lacks it" in warnings[0]


# Services

JOURNAL = ServicePlan("systemd-journald.service", "d1", enable=False, then="journalctl --flush")
TIMER = ServicePlan("fp8fleet-logrotate.timer", "d2", enable=True)


def test_a_service_that_runs_with_our_files_is_left() -> None:
    facts = HostFacts(
        units={JOURNAL.unit: Unit("loaded", True, "static"), TIMER.unit: RUNS},
        applied={JOURNAL.unit: "d1", TIMER.unit: "d2"},
    )
    assert lines(services, {HostState: facts}, plan=plan(services=(JOURNAL, TIMER))) == []


@pytest.mark.parametrize(
    ("unit", "noted"), [(RUNS, "old"), (RUNS, None), (Unit("loaded", False, "enabled"), "d2")]
)
def test_a_changed_or_stopped_service_is_started_and_noted_afterwards(
    unit: Unit, noted: str | None
) -> None:
    facts = HostFacts(units={TIMER.unit: unit}, applied={TIMER.unit: noted} if noted else {})
    start, note = lines(services, {HostState: facts}, plan=plan(services=(TIMER,)))
    assert "systemctl restart fp8fleet-logrotate.timer" in start
    assert "systemctl enable --quiet fp8fleet-logrotate.timer" in start
    assert note.startswith("echo d2 >/var/lib/fp8fleet/host/fp8fleet-logrotate.timer.applied.new")


def test_the_journal_is_restarted_and_flushed_but_not_enabled() -> None:
    start, _ = lines(services, {HostState: HostFacts()}, plan=plan(services=(JOURNAL,)))
    assert "systemctl restart systemd-journald.service && journalctl --flush" in start
    assert "enable" not in start


def test_a_timer_that_is_no_longer_planned_is_removed() -> None:
    without = plan(services=(), retired=(TIMER.unit,))
    facts = HostFacts(units={TIMER.unit: RUNS})
    (command,) = lines(services, {HostState: facts}, plan=without)
    assert command.startswith("systemctl disable --now --quiet fp8fleet-logrotate.timer; rm -f ")
    assert "/etc/systemd/system/fp8fleet-logrotate.service" in command
    assert lines(services, {HostState: HostFacts()}, plan=without) == []


# Clock

TIMESYNCD = TimePlan("systemd-timesyncd.service", "systemd-timesyncd", None)
CHRONY = TimePlan("chronyd.service", "chrony", "d3")


def test_a_host_whose_clock_is_kept_is_left_whoever_keeps_it() -> None:
    for name in ("chrony.service", "openntpd.service", "phc2sys@eth0.service"):
        facts = HostFacts(clocks=(name,))
        assert lines(clock, {HostState: facts}, plan=plan(time=TIMESYNCD)) == []
    facts = HostFacts(units={TIMESYNCD.unit: RUNS}, clocks=(TIMESYNCD.unit,))
    assert lines(clock, {HostState: facts}, plan=plan(time=TIMESYNCD)) == []


def test_where_nothing_keeps_the_clock_the_platforms_service_is_installed_and_started() -> None:
    _, update, install, start = lines(clock, {HostState: HostFacts()}, plan=plan(time=TIMESYNCD))
    assert update.endswith(" update")
    assert install.endswith("install systemd-timesyncd")
    assert "systemctl enable --quiet systemd-timesyncd.service" in start
    facts = HostFacts(units={TIMESYNCD.unit: STOPPED})
    assert len(lines(clock, {HostState: facts}, plan=plan(time=TIMESYNCD))) == 1


def test_the_sites_servers_restart_the_service_once() -> None:
    asked_for = plan(family="dnf", time=CHRONY)
    facts = HostFacts(units={CHRONY.unit: RUNS}, clocks=(CHRONY.unit,))
    (start,) = lines(clock, {HostState: facts}, plan=asked_for)
    assert "systemctl restart chronyd.service" in start
    noted = replace(facts, applied={CHRONY.unit: "d3"})
    assert lines(clock, {HostState: noted}, plan=asked_for) == []
    gone = plan(family="dnf", time=replace(CHRONY, digest=None))
    assert len(lines(clock, {HostState: noted}, plan=gone)) == 1


def test_a_container_is_told_and_left(warnings: list[str]) -> None:
    facts = HostFacts(container=True)
    assert lines(clock, {HostState: facts}, plan=plan(time=TIMESYNCD)) == []
    assert warnings == []
    assert lines(clock, {HostState: facts}, plan=plan(time=CHRONY)) == []
    assert "clock of the machine below" in warnings[0]


def test_another_time_service_is_told_where_the_inventory_has_servers(warnings: list[str]) -> None:
    facts = HostFacts(clocks=("ntpd.service",))
    assert lines(clock, {HostState: facts}, plan=plan(time=CHRONY)) == []
    assert "ntpd.service keeps this host's clock, not chronyd.service" in warnings[0]


def test_whoever_the_catalogue_knows_to_keep_a_clock_is_asked_for(path: Path) -> None:
    program(path, "systemctl", 'case $1 in list-units) shift 4; printf "%s x x x\\n" "$@" ;; esac')
    assert asked(HostState, plan=plan()).clocks == catalog.clock_units()
    program(path, "systemctl", "exit 1")
    assert asked(HostState, plan=plan()).clocks == ()


# NVIDIA's devices


def devices(family: str = "apt", digest: str | None = "d4", **state: Any) -> list[str]:
    facts = {NvidiaState: NvidiaFacts(**state)}
    return lines(nvidia_devices, facts, plan=plan(family=family, nouveau_digest=digest))


def test_a_host_without_nvidia_is_not_even_asked() -> None:
    assert lines(nvidia_devices, {}, plan=plan(nouveau_digest=None)) == []


def test_a_host_that_is_ready_gets_no_command() -> None:
    modules = frozenset({"nvidia"})
    ready: dict[str, Any] = {"devices": RUNS, "nouveau_digest": "d4", "modules": modules}
    assert devices(persistence=RUNS, **ready) == []
    assert devices(persistence=Unit("loaded", True, "static"), **ready) == []
    assert devices(**ready) == [], "a driver from a runfile has no nvidia-persistenced"


@pytest.mark.parametrize(
    ("family", "rebuild"),
    [("apt", "update-initramfs -u -k all"), ("dnf", "dracut --force --regenerate-all")],
)
def test_the_initramfs_is_rebuilt_when_the_file_is_another(family: str, rebuild: str) -> None:
    first, note = devices(family, devices=RUNS, nouveau_digest="old")[:2]
    assert rebuild in first
    assert note.startswith("echo d4 >/var/lib/fp8fleet/host/nouveau.applied.new")


def test_a_loaded_nouveau_asks_for_a_reboot_in_one_line(warnings: list[str]) -> None:
    state: dict[str, Any] = {"devices": Unit("loaded", False, "enabled"), "nouveau_digest": "d4"}
    assert devices(modules=frozenset({"nouveau"}), **state) == []
    (line,) = warnings
    assert "reboot this host" in line


def test_without_a_loaded_driver_the_units_are_enabled_and_nothing_is_started() -> None:
    found = devices(persistence=STOPPED, devices=Unit("loaded"), nouveau_digest="d4")
    assert found == [
        f"systemctl daemon-reload && systemctl enable --quiet {PERSISTENCE_UNIT}",
        f"systemctl daemon-reload && systemctl enable --quiet {NVIDIA_UNIT}",
    ]


def test_with_a_driver_the_units_are_started_too() -> None:
    found = devices(
        persistence=STOPPED,
        devices=Unit("loaded"),
        nouveau_digest="d4",
        modules=frozenset({"nvidia"}),
    )
    assert found[1::2] == [
        f"systemctl restart {PERSISTENCE_UNIT}",
        f"systemctl restart {NVIDIA_UNIT}",
    ]


def test_the_state_of_nvidias_driver_is_read() -> None:
    found = NvidiaState().process(
        [
            "@units",
            f"{PERSISTENCE_UNIT} LoadState=loaded ActiveState=active UnitFileState=static",
            f"{NVIDIA_UNIT} LoadState=not-found ActiveState=inactive UnitFileState=",
            "@applied",
            "nouveau.applied:d4",
            "@modules",
            "nvidia",
        ]
    )
    assert found.persistence == Unit("loaded", True, "static")
    assert not found.devices.exists
    assert found.nouveau_digest == "d4"
    assert found.modules == {"nvidia"}
    assert isinstance(asked(NvidiaState), NvidiaFacts)

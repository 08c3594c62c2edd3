"""The driver role: what is installed, refused, compared; installers run in a real shell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest
from harness import RecordedHost, context, host_plan, planned_file, program, run
from pyinfra.api import FunctionCommand, StringCommand

from fp8fleet.plan import DriverPlan, DriversPlan, HostPlan
from roles.driver import operations
from roles.driver.facts import REBOOT, Drivers, DriversState
from roles.driver.operations import drivers
from roles.facts import PathStates
from roles.lock.operations import hold_lock

VERSION = "580.95.05"
URL = "https://m.example.com/NVIDIA-580.95.05.run"
DIGEST = "ab" * 32
RUN = DriverPlan("nvidia", VERSION, (), URL, DIGEST, ("gcc", "linux-headers-{kernel}"))
PACKAGES = DriverPlan("nvidia", VERSION, (f"nvidia-headless-580-server={VERSION}-*",), None, None)
FABRIC = DriverPlan(
    "fabric-manager", VERSION, (f"nvidia-fabricmanager-580={VERSION}-*",), None, None
)
ASCEND = DriverPlan("ascend-driver", "25.5.0", (), "https://m.example.com/d.run", DIGEST)
OPS = DriverPlan("cann-ops", "9.1.0", (), "https://m.example.com/o.run", DIGEST)
WELL = DriversState(
    versions={"nvidia": VERSION, "fabric-manager": VERSION},
    loaded=VERSION,
    library=VERSION,
    fabric_active=True,
)
OLD = DriversState(versions={"nvidia": "570.86.15"}, loaded="570.86.15", library="570.86.15")


def plan(*items: DriverPlan, reboot: bool = False, **changes: Any) -> HostPlan:
    asked = DriversPlan(items, reboot, "/opt/f/downloads")
    return host_plan(drivers=asked, **changes)


def commands(
    plan: HostPlan, *states: DriversState, executing: bool = True
) -> tuple[list[str], RecordedHost]:
    """The commands' texts, one state for each time the fact is asked."""
    left = list(states)
    host = RecordedHost({Drivers: lambda: left.pop(0), PathStates: {}})
    found = []
    with context(host, executing):
        for command in drivers._inner(plan=plan):
            found.append(_text(command, host))
    assert left == [], "the fact is asked as often as there are states"
    return found, host


def _text(command: StringCommand | FunctionCommand, host: RecordedHost) -> str:
    if isinstance(command, StringCommand):
        return str(command.get_raw_value())
    if command.function.__name__ == "fail":
        command.function(None, host, *command.args, **command.kwargs)
        return host.said[-1]
    return str(command.function.__name__)


def test_a_host_that_nothing_is_asked_for_is_not_asked_anything() -> None:
    assert commands(plan())[0] == []


def test_what_is_as_planned_needs_one_fact() -> None:
    assert commands(plan(RUN), WELL)[0] == []
    assert commands(plan(PACKAGES, FABRIC), WELL)[0] == []


def test_a_dry_run_shows_the_installation_and_compares_nothing() -> None:
    found, _ = commands(plan(RUN), DriversState(), executing=False)
    assert any("sha256sum" in line for line in found)


def test_an_installer_is_fetched_checked_and_run_without_questions() -> None:
    found, _ = commands(plan(RUN), DriversState(), WELL)
    _, _, needs, fetch, install = (line for line in found if "flock" in line)
    assert '"linux-headers-$(uname -r)"' in needs
    assert URL in fetch
    assert "--silent --dkms" in install
    assert "modprobe -q -r $m" in "\n".join(found[: found.index(fetch)])
    assert "modprobe -q nvidia" in found[found.index(install) + 1]


def test_packages_are_pinned_and_taken_over_holds() -> None:
    pin = planned_file("/etc/apt/preferences.d/90fp8fleet-driver", role="driver")
    found, _ = commands(plan(PACKAGES, files=(pin,)), DriversState(), WELL)
    install = next(line for line in found if " install " in line)
    assert "--allow-change-held-packages" in install
    assert f'"nvidia-headless-580-server={VERSION}-*"' in install
    assert found.index(next(line for line in found if pin.path in line)) < found.index(install)


def test_dnf_takes_packages_over_version_locks() -> None:
    item = replace(PACKAGES, packages=(f"nvidia-driver-{VERSION}",))
    found, _ = commands(plan(item, family="dnf"), DriversState(), WELL)
    install = next(line for line in found if "dnf -y" in line)
    assert "--disableplugin=versionlock" in install
    assert f'"nvidia-driver-{VERSION}"' in install


def test_an_unfinished_installation_is_done_again_whatever_its_version() -> None:
    unfinished = replace(WELL, unfinished=frozenset({"nvidia"}))
    found, _ = commands(plan(RUN), unfinished, WELL)
    assert any("--silent" in line for line in found)


def test_a_driver_is_not_replaced_under_running_servers() -> None:
    found, _ = commands(plan(RUN), replace(OLD, servers=("fp8fleet-main.service",)))
    (line,) = found
    assert "servers run on this host: stop them first (systemctl stop fp8fleet-main.service" in line


def test_huaweis_driver_is_upgraded_in_place_and_asks_for_a_reboot() -> None:
    state = DriversState(versions={"ascend-driver": "24.1.0"})
    after = DriversState(versions={"ascend-driver": "25.5.0"}, reboot=True)
    found, host = commands(plan(ASCEND), state, after)
    assert any("--upgrade --quiet" in line for line in found)
    assert f"echo ascend-driver >>{REBOOT}" in found
    assert "in force after a reboot only: reboot this host" in host.said[-1]


def test_what_leaves_no_version_gets_a_note_of_ours() -> None:
    found, _ = commands(plan(OPS), DriversState(), DriversState(versions={"cann-ops": "9.1.0"}))
    assert any("echo 9.1.0 >/etc/fp8fleet/driver-cann-ops.installed.new" in line for line in found)


# In force


def test_a_module_that_is_not_loaded_asks_for_a_reboot_and_stops_the_host() -> None:
    old = replace(WELL, loaded="570.86.15")
    (line,), _ = commands(plan(RUN), old)
    assert f"nvidia {VERSION} is installed, the kernel runs 570.86.15: reboot this host" in line
    assert "driver_reboot = True" in line
    (line,), _ = commands(plan(RUN), replace(WELL, loaded=None))
    assert "the kernel runs none" in line


def test_a_reboot_that_is_allowed_is_made_and_the_versions_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hold_lock, "_inner", lambda: iter(()))
    old = replace(WELL, loaded="570.86.15")
    found, host = commands(plan(RUN, reboot=True), old, WELL)
    assert [line for line in found if not line.startswith("(")] == ["_note_boot", "_wait_for_boot"]
    assert "systemctl reboot" in found[1]
    assert host.said == []
    _, host = commands(plan(RUN, reboot=True), old, old)
    assert "after a reboot still: nvidia 580.95.05 is installed" in host.said[-1]


def test_a_host_with_running_servers_is_not_rebooted() -> None:
    state = replace(WELL, loaded=None, servers=("fp8fleet-main.service",))
    (line,), _ = commands(plan(RUN, reboot=True), state)
    assert "servers run on this host" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"library": "570.86.15"}, "NVIDIA's libraries are 570.86.15"),
        ({"versions": {"nvidia": VERSION, "fabric-manager": "580.82.07"}}, "not 580.95.05"),
    ],
)
def test_versions_that_differ_after_an_installation_fail_the_host(
    change: dict[str, Any], message: str
) -> None:
    found, _ = commands(plan(PACKAGES, FABRIC), OLD, replace(WELL, **change))
    assert message in found[-1]


def test_a_fabric_manager_of_another_version_than_a_driver_not_asked_for_is_told() -> None:
    found, _ = commands(plan(FABRIC), replace(WELL, loaded="570.86.15"))
    assert found == ["driver: fabric manager 580.95.05, driver 570.86.15: both need one version"]


def test_a_fabric_manager_that_does_not_run_is_started() -> None:
    found, _ = commands(plan(PACKAGES, FABRIC), replace(WELL, fabric_active=False))
    assert found == ["systemctl enable --quiet --now nvidia-fabricmanager.service"]


def test_what_is_missing_after_its_installation_fails_the_host() -> None:
    found, _ = commands(plan(RUN), DriversState(), DriversState())
    assert "nvidia is missing after its installation, not 580.95.05" in found[-1]


# Waiting for a boot


class Booting:
    """A host whose boot id is read; None: the connection breaks."""

    def __init__(self, *boots: str | None) -> None:
        self.boots = list(boots)
        self.connected = True
        self.connector_data: dict[str, Any] = {"fp8fleet_lock": object()}
        self.print_prefix = ""
        self.said: list[str] = []

    def disconnect(self) -> None:
        self.connected = False

    def connect(self, show_errors: bool) -> None:
        assert not show_errors
        self.connected = True

    def log_styled(self, message: str, **style: Any) -> None:
        self.said.append(message)

    def run_shell_command(self, command: Any, **options: Any) -> Any:
        boot = self.boots.pop(0)
        if boot is None:
            raise OSError("closed")
        return True, type("Output", (), {"stdout": boot})()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time does not pass, but for what the function is given."""
    monkeypatch.setattr(gevent, "sleep", lambda seconds: None)

    def limit(seconds: float) -> None:
        monkeypatch.setattr(operations, "REBOOT_TIMEOUT_S", seconds)

    return limit


def test_a_reboot_is_over_when_another_boot_answers(quick: Callable[[float], None]) -> None:
    host = Booting("one", None, "one", "two")
    assert operations._wait_for_boot(None, host, ["one"])
    assert host.boots == []
    assert "fp8fleet_lock" not in host.connector_data


def test_a_host_that_does_not_come_back_fails(quick: Callable[[float], None]) -> None:
    quick(-1)
    host = Booting()
    assert not operations._wait_for_boot(None, host, ["one"])
    assert "SSH is not back" in host.said[-1]


# Installers in a real shell


def fetch(tmp_path: Path, source: Path, sha256: str) -> tuple[Path, Any]:
    item = replace(RUN, url=f"file://{source}", sha256=sha256)
    file = tmp_path / "downloads/nvidia.run"
    script = operations._fetch_script(item, str(file.parent), str(file))
    return file, run(script)


def test_a_file_gets_its_name_only_when_its_digest_is_right(tmp_path: Path) -> None:
    source = tmp_path / "source.run"
    source.write_bytes(b"x" * 100_000)
    file, result = fetch(tmp_path, source, DIGEST)
    assert result.returncode == 1
    assert f"expected SHA256 {DIGEST}, got " in result.stderr
    assert list(file.parent.iterdir()) == []
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    part = file.with_name(file.name + ".part")
    part.write_bytes(b"x" * 1000)
    file, result = fetch(tmp_path, source, digest)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == source.read_bytes()


def test_a_part_that_is_longer_than_its_source_is_fetched_anew(tmp_path: Path) -> None:
    source = tmp_path / "source.run"
    source.write_bytes(b"x" * 1000)
    part = tmp_path / "downloads/nvidia.run.part"
    part.parent.mkdir()
    part.write_bytes(b"y" * 2000)
    file, result = fetch(tmp_path, source, hashlib.sha256(source.read_bytes()).hexdigest())
    assert result.returncode == 0, result.stderr
    assert file.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["nvidia.run", "nvidia.run.part"])
def test_a_directory_in_the_installers_place_is_one_line_and_stays(
    tmp_path: Path, name: str
) -> None:
    source = tmp_path / "source.run"
    source.write_bytes(b"x")
    (tmp_path / "downloads" / name).mkdir(parents=True)
    _, result = fetch(tmp_path, source, hashlib.sha256(b"x").hexdigest())
    assert result.returncode == 1
    said = f"driver: {tmp_path}/downloads/{name} is a directory: move it away\n"
    assert result.stderr == said
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [name]


def install(tmp_path: Path, text: str, item: DriverPlan = RUN, options: str = "--silent") -> Any:
    file = tmp_path / "installer.run"
    file.write_text(text)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return run(operations._install_script(replace(item, sha256=digest), str(file), options))


def test_an_installer_that_succeeds_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = install(tmp_path, f'echo "$@" >{out}')
    assert result.returncode == 0, result.stderr
    assert out.read_text() == "--silent\n"
    assert not (tmp_path / "installer.run").exists()


def test_an_installer_that_fails_says_with_which_code_and_keeps_its_file(tmp_path: Path) -> None:
    result = install(tmp_path, "exit 3")
    assert result.returncode == 1
    assert "the installer of nvidia 580.95.05 ended with exit code 3" in result.stderr
    assert (tmp_path / "installer.run").exists()


def test_exit_codes_that_the_catalogue_calls_fine_are_fine(tmp_path: Path) -> None:
    firmware = replace(ASCEND, name="ascend-firmware")
    assert install(tmp_path, "exit 2", firmware).returncode == 0
    assert install(tmp_path, "exit 1", firmware).returncode == 1


def test_a_file_that_changed_since_it_was_checked_is_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = tmp_path / "installer.run"
    file.write_text(f"touch {out}")
    result = run(operations._install_script(RUN, str(file), "--silent"))
    assert result.returncode == 1
    assert "has changed since it was fetched" in result.stderr
    assert not out.exists()


# What the host says


def test_versions_are_read_from_programs_and_files(tmp_path: Path) -> None:
    program(tmp_path, "modinfo", f"echo {VERSION}")
    program(tmp_path, "nv-fabricmanager", f"echo 'Fabric Manager version is : {VERSION}'")
    program(
        tmp_path,
        "systemctl",
        'case "$*" in *is-active*) exit 0 ;; esac; echo "fp8fleet-main.service loaded active x"\n'
        'echo "fp8fleet-peer.service loaded active x"',
    )
    result = run(str(Drivers().command()), env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (result.returncode, result.stderr) == (0, "")
    state = Drivers().process(result.stdout.splitlines())
    assert state.versions == {"nvidia": VERSION, "fabric-manager": VERSION}
    assert state.fabric_active
    assert state.servers == ("fp8fleet-main.service",)


def test_marks_and_huaweis_versions_are_read() -> None:
    state = Drivers().process(
        [
            "loaded 580.95.05",
            "library 580.95.05",
            "ascend-driver 25.5.0",
            "cann-toolkit 9.1.0",
            "mark /etc/fp8fleet/driver-cann-ops.installed 9.1.0",
            "mark /etc/fp8fleet/driver-ascend-firmware.unfinished ",
            "reboot",
        ]
    )
    assert state == DriversState(
        versions={"ascend-driver": "25.5.0", "cann-toolkit": "9.1.0", "cann-ops": "9.1.0"},
        loaded="580.95.05",
        library="580.95.05",
        unfinished=frozenset({"ascend-firmware"}),
        reboot=True,
    )


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep  2 20:00:00 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (b@x)",
    ],
)
def test_both_forms_of_the_kernels_version_line_are_read(tmp_path: Path, line: str) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc 12\n")
    command = str(Drivers().command())
    assert "/proc/driver/nvidia/version" in command
    here = command.replace("/proc/driver/nvidia/version", str(tmp_path / "version"))
    result = run(here.replace("/sys/module/nvidia/version", str(tmp_path / "none")))
    assert Drivers().process(result.stdout.splitlines()).loaded == "580.95.05"

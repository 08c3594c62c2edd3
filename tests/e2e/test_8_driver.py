"""Drivers that the inventory asks for: imitated installers and packages on a real lab host.

The tests of this file follow each other on one host.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import MAIN, Done, Fleet, command, ssh, until
from imitations import (
    STATE,
    Server,
    ascend_installer,
    driver_packages,
    imitate_kernel,
    nvidia_installer,
    served,
    sha256,
)

from lab import site

pytestmark = [pytest.mark.lab, pytest.mark.long]
DEPLOY = "tests/e2e/deploy_drivers.py"
OLD, NEW = "580.82.07", "580.95.05"
OPERATION = "Driver | Drivers in the planned versions, in force"


@pytest.fixture(scope="module")
def mirror(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A site's mirror with installers and packages, and a fresh host for them."""
    folder = tmp_path_factory.mktemp("drivers")
    (folder / "packages").mkdir()
    (folder / "other-fabric").mkdir()
    driver_packages(folder / "packages", NEW, NEW)
    driver_packages(folder / "other-fabric", NEW, "580.65.06")
    for version in (OLD, NEW):
        (folder / f"nvidia-{version}.run").write_bytes(nvidia_installer(version))
    (folder / "driver.run").write_bytes(ascend_installer("ascend-driver", "25.2.0"))
    (folder / "cann.run").write_bytes(ascend_installer("cann-toolkit", "9.1.0"))
    command("fp8fleet", "lab", "destroy", MAIN)
    assert command("fp8fleet", "lab", "create", MAIN).code == 0
    imitate_kernel(MAIN)
    with served(folder) as server:
        yield server


def nvidia(mirror: Server, version: str, **changes: Any) -> dict[str, Any]:
    digest = sha256(nvidia_installer(version))
    url = f"{mirror.url}/nvidia-{version}.run"
    return {"name": "nvidia", "version": version, "source": url, "sha256": digest} | changes


def run(
    fleet: Fleet, mirror: Server, *drivers: dict[str, Any], packages: str = "packages", **data: Any
) -> Done:
    return fleet.pyinfra(
        inventory(fleet, mirror, *drivers, packages=packages, **data), "-y", "--json", deploy=DEPLOY
    )


def inventory(
    fleet: Fleet, mirror: Server, *drivers: dict[str, Any], packages: str = "packages", **data: Any
) -> str:
    gpu: dict[str, Any] = {
        "accelerator": "h100-80g",
        "engine_release": "0.33.0",
        "engine_python": "3.12",
        "engine_requirements": "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt",
        "engine_pins": [],
        "instances": [{"name": "main", "port": 8000, "devices": [0]}],
        "apt_sources": [
            f"deb [trusted=yes] {site.site().debian_url} ./",
            f"deb [trusted=yes] {mirror.url}/{packages} ./",
        ],
        "drivers": list(drivers),
    }
    return fleet.inventory(**(gpu | data))


def calls() -> list[str]:
    return ssh(MAIN, f"cat {STATE}/calls 2>/dev/null; true").splitlines()


def loaded() -> str:
    script = (
        "sed -n 's/.*Module  \\([0-9.]*\\)  .*/\\1/p' /proc/driver/nvidia/version 2>/dev/null; true"
    )
    return ssh(MAIN, script)


def left() -> list[str]:
    marks = "/etc/fp8fleet/driver-* /opt/fp8fleet/downloads/* /run/fp8fleet.reboot"
    return ssh(MAIN, f"ls -d {marks} 2>/dev/null; true").split()


def test_an_installer_with_another_digest_is_never_run(fleet: Fleet, mirror: Server) -> None:
    wrong = nvidia(mirror, OLD, sha256="ab" * 32)
    done = run(fleet, mirror, wrong)
    assert done.code == 1
    assert f"expected SHA256 {'ab' * 32}, got {sha256(nvidia_installer(OLD))}" in done.text
    assert "Traceback" not in done.text
    assert (calls(), loaded()) == ([], "")
    assert [path for path in left() if "downloads" in path] == []


def test_a_download_that_breaks_off_goes_on_where_it_stopped(fleet: Fleet, mirror: Server) -> None:
    mirror.cut = True
    done = run(fleet, mirror, nvidia(mirror, OLD))
    assert done.code == 1
    assert calls() == []
    mirror.cut = False
    mirror.requests.clear()
    done = run(fleet, mirror, nvidia(mirror, OLD))
    assert done.code == 0, done.text
    half = len(nvidia_installer(OLD)) // 2
    assert mirror.requests[-1] == f"nvidia-{OLD}.run bytes={half}-"
    assert len(calls()) == 1
    assert (loaded(), left()) == (OLD, [])


def test_a_second_run_changes_nothing_and_asks_one_thing(fleet: Fleet, mirror: Server) -> None:
    done = run(fleet, mirror, nvidia(mirror, OLD))
    assert (done.code, done.changed) == (0, []), done.text
    asked = fleet.pyinfra(
        inventory(fleet, mirror, nvidia(mirror, OLD)), "-y", "--debug", deploy=DEPLOY
    ).text.count("Running command on")
    unasked = fleet.pyinfra(inventory(fleet, mirror), "-y", "--debug", deploy=DEPLOY)
    assert asked - unasked.text.count("Running command on") == 1


def test_an_installer_that_fails_half_way_is_told_and_run_again(
    fleet: Fleet, mirror: Server
) -> None:
    ssh(MAIN, f"touch {STATE}/fail")
    done = run(fleet, mirror, nvidia(mirror, NEW))
    assert done.code == 1
    assert f"the installer of nvidia {NEW} ended with exit code 1" in done.text
    assert "Unable to build the kernel module" in done.text
    assert ssh(MAIN, "modinfo") == NEW, "the module is there already: a version alone says nothing"
    ssh(MAIN, f"rm {STATE}/fail")
    done = run(fleet, mirror, nvidia(mirror, NEW))
    assert done.code == 0, done.text
    assert (loaded(), left()) == (NEW, [])


def test_a_killed_run_goes_on(fleet: Fleet, mirror: Server) -> None:
    ssh(MAIN, f"touch {STATE}/slow; rm {STATE}/calls")
    process = fleet.start(inventory(fleet, mirror, nvidia(mirror, OLD)), deploy=DEPLOY)
    until(lambda: len(calls()) == 1, "the installer at work", 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    done = run(fleet, mirror, nvidia(mirror, OLD))
    assert done.code == 0, done.text
    assert time.monotonic() - began > 5, "it waits for what the killed run left at work"
    ssh(MAIN, f"rm {STATE}/slow")
    assert (loaded(), left()) == (OLD, [])
    again = run(fleet, mirror, nvidia(mirror, OLD))
    assert (again.code, again.changed) == (0, []), again.text


def test_a_driver_is_not_replaced_under_running_servers(fleet: Fleet, mirror: Server) -> None:
    before = calls()
    ssh(MAIN, "systemd-run -q --unit=fp8fleet-main sleep 1000")
    done = run(fleet, mirror, nvidia(mirror, NEW))
    ssh(MAIN, "systemctl stop fp8fleet-main")
    assert done.code == 1
    assert "servers run on this host: stop them first" in done.text
    assert "fp8fleet-main.service" in done.text
    assert (calls(), loaded()) == (before, OLD)


def test_a_module_in_use_asks_for_a_reboot_and_stops_the_host(fleet: Fleet, mirror: Server) -> None:
    ssh(MAIN, "touch /run/lab-busy")
    done = run(fleet, mirror, nvidia(mirror, NEW))
    assert done.code == 1
    assert f"nvidia {NEW} is installed, the kernel runs {OLD}: reboot this host" in done.text
    assert "driver_reboot = True" in done.text
    before = calls()
    again = run(fleet, mirror, nvidia(mirror, NEW))
    assert again.code == 1
    assert calls() == before, "nothing is installed again"


def test_an_allowed_reboot_is_waited_for_and_the_run_goes_on(fleet: Fleet, mirror: Server) -> None:
    boot = ssh(MAIN, "cat /proc/sys/kernel/random/boot_id")
    done = run(fleet, mirror, nvidia(mirror, NEW), driver_reboot=True)
    assert done.code == 0, done.text
    assert done.changed == [OPERATION]
    assert ssh(MAIN, "cat /proc/sys/kernel/random/boot_id") != boot
    assert loaded() == NEW
    again = run(fleet, mirror, nvidia(mirror, NEW), driver_reboot=True)
    assert (again.code, again.changed) == (0, []), again.text


def test_driver_and_fabric_manager_come_from_packages_at_one_version(
    fleet: Fleet, mirror: Server
) -> None:
    ssh(MAIN, f"rm {STATE}/module; modprobe -r nvidia")
    wanted = [{"name": name, "version": NEW} for name in ("nvidia", "fabric-manager")]
    done = run(fleet, mirror, *wanted)
    assert done.code == 0, done.text
    assert ssh(MAIN, "systemctl is-active nvidia-fabricmanager") == "active"
    assert f"Pin: version {NEW}-*" in ssh(MAIN, "cat /etc/apt/preferences.d/90fp8fleet-driver")
    again = run(fleet, mirror, *wanted)
    assert (again.code, again.changed) == (0, []), again.text


def test_a_fabric_manager_of_another_version_fails_the_host(fleet: Fleet, mirror: Server) -> None:
    ssh(MAIN, "dpkg -P nvidia-fabricmanager-580; apt-get clean")
    wanted = [{"name": name, "version": NEW} for name in ("nvidia", "fabric-manager")]
    done = run(fleet, mirror, *wanted, packages="other-fabric")
    assert done.code == 1
    assert f"fabric-manager is 580.65.06 after its installation, not {NEW}" in done.text


def test_huaweis_installers_run_in_their_order_and_reboot_once(
    fleet: Fleet, mirror: Server, tmp_path: Path
) -> None:
    ssh(MAIN, f"rm -f {STATE}/calls")
    lock = tmp_path / "ascend.txt"
    lock.write_text(f"vllm-ascend==0.23.0.post1 \\\n    --hash=sha256:{'ab' * 32}\n")
    installers = {"cann-toolkit": ("9.1.0", "cann"), "ascend-driver": ("25.2.0", "driver")}
    wanted = [
        {
            "name": name,
            "version": version,
            "source": f"{mirror.url}/{file}.run",
            "sha256": sha256(ascend_installer(name, version)),
        }
        for name, (version, file) in installers.items()
    ]
    data = {
        "accelerator": "ascend-910b",
        "engine_release": "vllm-ascend-0.23.0.post1",
        "engine_requirements": str(lock),
        "engine_build": "source",
    }
    done = run(fleet, mirror, *wanted, **data, driver_reboot=True)
    assert done.code == 0, done.text
    assert [call.split()[0] for call in calls()] == ["ascend-driver", "cann-toolkit"]
    assert left() == []
    again = run(fleet, mirror, *wanted, **data, driver_reboot=True)
    assert (again.code, again.changed) == (0, []), again.text

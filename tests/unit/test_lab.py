"""What the lab decides without a host: names, records of processes, cgroups, pages."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8fleet.catalog import platforms
from fp8fleet.cli import main
from fp8fleet.errors import CheckFailed, OperatorError
from lab import cli as lab_cli
from lab import machine, selinux_vm
from lab.cli import wanted_hosts
from lab.hosts import in_order
from lab.processes import alive, recorded, run
from lab.rpm import fedora
from lab.site import LabHost, Site, build_once, cache_dir, host, named, site, write_site
from lab.webserver import AccessLine, index_page

OFFER = Site(
    hosts=(host(1), host(2)),
    mirror_url="http://198.18.0.1:8900",
    frontend_url="http://198.18.0.1:8900/frontend/conda.sh",
    frontend_sha256="0" * 64,
    channel_url="http://198.18.0.1:8900/conda",
    wheels_url="http://198.18.0.1:8900/wheels/",
    models_url="http://198.18.0.1:8900/models",
    debian_url="http://198.18.0.1:8900/debian",
    cmake_url="http://198.18.0.1:8900/cmake/cmake-3.28.4-linux-x86_64.tar.gz",
    cmake_sha256="0" * 64,
)

HYBRID_CGROUPS = """\
9:name=systemd:/
4:memory:/box/a1
3:cpuset:/
2:cpu,cpuacct:/
0::/
"""
HYBRID_MOUNTS = """\
30 23 0:1 / / rw,relatime - ext4 /dev/vda rw
32 31 0:2 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
33 31 0:3 / /sys/fs/cgroup/cpuset rw,nosuid - cgroup cgroup rw,cpuset
35 31 0:4 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
40 31 0:5 / /sys/fs/cgroup/systemd rw,nosuid - cgroup cgroup rw,xattr,name=systemd
41 31 0:6 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
"""


def test_hosts_are_numbered_from_1_and_address_11() -> None:
    assert (host(1).name, host(1).address) == ("lab-1", "198.18.0.11")
    assert (host(12).name, host(12).address) == ("lab-12", "198.18.0.22")


def test_rpm_hosts_have_names_and_addresses_of_their_own() -> None:
    first = host(1, "rpm")
    assert (first.name, first.address, first.family) == ("lab-rpm-1", "198.18.0.211", "rpm")
    assert named("lab-rpm-12") == host(12, "rpm")
    assert (named("lab-12").family, named("lab-12").number) == ("debian", 12)
    numbers = [*(host(n) for n in range(1, 201)), *(host(n, "rpm") for n in range(1, 41))]
    assert len({one.address for one in numbers}) == 240


@pytest.mark.parametrize(
    ("number", "family", "last"),
    [(0, "debian", 200), (-1, "debian", 200), (201, "debian", 200), (41, "rpm", 40)],
)
def test_a_host_number_without_an_address_is_refused(number: int, family: str, last: int) -> None:
    message = f"lab host {number}: expected a number from 1 to {last}"
    with pytest.raises(OperatorError, match=message):
        host(number, family)


@pytest.mark.parametrize(
    "name", ["", "lab-0", "lab-01", "lab-1 ", "../lab-1", "lab-", "lab-rpm-0", "lab-rpm-41"]
)
def test_a_name_that_is_no_lab_hosts_is_refused(name: str) -> None:
    with pytest.raises(OperatorError, match=r"expected (lab-1, lab-2|a number)"):
        named(name)


def test_hosts_are_listed_by_family_and_number_not_by_letter() -> None:
    names = ["lab-rpm-2", "lab-10", "lab-rpm-10", "lab-2"]
    found = [one.name for one in in_order(names)]
    assert found == ["lab-2", "lab-10", "lab-rpm-2", "lab-rpm-10"]


def test_lab_up_starts_with_one_host() -> None:
    assert wanted_hosts(None, None, (), ()) == [host(1)]


def test_lab_up_without_a_number_keeps_the_hosts_that_are_up() -> None:
    assert wanted_hosts(None, None, [host(2), host(3)], [host(5)]) == [host(2), host(3)]


def test_lab_up_without_a_number_boots_the_hosts_that_have_a_disk() -> None:
    assert wanted_hosts(None, None, (), [host(1), host(2)]) == [host(1), host(2)]


def test_lab_up_with_a_number_adds_to_the_hosts_that_are_up() -> None:
    assert wanted_hosts(2, None, [host(4)], [host(5)]) == [host(1), host(2), host(4)]


def test_lab_up_with_a_family_adds_hosts_of_that_family() -> None:
    assert wanted_hosts(None, "rpm", (), ()) == [host(1, "rpm")]
    assert wanted_hosts(2, "rpm", [host(1)], ()) == [host(1), host(1, "rpm"), host(2, "rpm")]


def test_a_lab_that_is_not_up_says_how_to_bring_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.site.lab_dir", lambda: tmp_path)
    with pytest.raises(OperatorError, match=r"the lab is not up .*: run fp8fleet lab up"):
        site()


def test_what_the_lab_offers_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.site.lab_dir", lambda: tmp_path)
    write_site(OFFER)
    assert site() == OFFER


@pytest.fixture
def destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the hosts whose disks the commands of this test would throw away."""
    names: list[str] = []
    monkeypatch.setattr("lab.site.lab_dir", lambda: tmp_path)
    monkeypatch.setenv("FP8FLEET_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("lab.hosts.destroy", names.append)
    return names


@pytest.mark.parametrize(
    ("name", "left"), [("lab-1", (host(2),)), ("lab-2", (host(1),)), ("lab-3", (host(1), host(2)))]
)
def test_a_destroyed_host_is_no_longer_offered(
    destroyed: list[str], name: str, left: tuple[LabHost, ...]
) -> None:
    write_site(OFFER)
    assert main(["lab", "destroy", name]) == 0
    assert destroyed == [name]
    assert site() == OFFER.model_copy(update={"hosts": left})


def test_a_host_of_a_lab_that_is_down_can_be_destroyed(destroyed: list[str]) -> None:
    assert main(["lab", "destroy", "lab-1"]) == 0
    assert destroyed == ["lab-1"]
    with pytest.raises(OperatorError, match="the lab is not up"):
        site()


def test_the_lab_offers_what_hosts_of_every_kind_install() -> None:
    assert {"curl", "g++", "nginx"} <= set(lab_cli._host_packages())


def test_the_rpm_hosts_repository_has_what_the_catalogue_names_for_kylin() -> None:
    kylin = platforms()["kylin-v10"]
    wanted = {*kylin.packages, *kylin.serving_packages, *kylin.proxy_packages}
    assert wanted <= {fedora.NAMES.get(name, name) for name in fedora.PACKAGES}


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8FLEET_LAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fp8fleet-lab"
    monkeypatch.setenv("FP8FLEET_LAB_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_build_that_fails_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise CheckFailed("no network")

    with pytest.raises(CheckFailed):
        build_once(tmp_path / "built", fail)
    assert not (tmp_path / "built").exists()


def test_a_build_starts_from_an_empty_folder_and_happens_once(tmp_path: Path) -> None:
    seen: list[list[Path]] = []
    (tmp_path / "built.partial").mkdir()
    (tmp_path / "built.partial" / "half").touch()
    for _ in range(2):
        build_once(tmp_path / "built", lambda folder: seen.append(list(folder.iterdir())))
    assert seen == [[]]


def write_record(pid: int, record: Path) -> None:
    stat = Path(f"/proc/{pid}/stat").read_text()
    record.write_text(stat + Path("/proc/sys/kernel/random/boot_id").read_text())


def test_a_process_records_itself_before_it_starts(tmp_path: Path) -> None:
    record = tmp_path / "record"
    child = subprocess.Popen(recorded(["cat"], record), stdin=subprocess.PIPE)
    try:
        while alive(record) is None and child.poll() is None:
            pass
        assert alive(record) == child.pid
    finally:
        child.communicate()
    assert alive(record) is None


def test_a_recorded_process_is_alive(tmp_path: Path) -> None:
    write_record(os.getpid(), tmp_path / "record")
    assert alive(tmp_path / "record") == os.getpid()


def test_a_process_that_got_a_recorded_pid_later_is_not_the_recorded_one(tmp_path: Path) -> None:
    record = tmp_path / "record"
    write_record(os.getpid(), record)
    before, _, after = record.read_text().rpartition(")")
    fields = after.split(" ")
    fields[20] = str(int(fields[20]) - 1)
    record.write_text(f"{before}){' '.join(fields)}")
    assert alive(record) is None


def test_a_record_of_another_boot_names_no_process(tmp_path: Path) -> None:
    record = tmp_path / "record"
    write_record(os.getpid(), record)
    stat = record.read_text().splitlines()[0]
    record.write_text(f"{stat}\n00000000-0000-0000-0000-000000000000\n")
    assert alive(record) is None


@pytest.mark.parametrize("text", ["", "\n", "12", "x y z\nboot\n"])
def test_a_half_written_record_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    assert alive(tmp_path / "record") is None


def test_a_missing_record_names_no_process(tmp_path: Path) -> None:
    assert alive(tmp_path / "record") is None


def test_a_failed_command_says_its_exit_code_and_its_last_words() -> None:
    with pytest.raises(CheckFailed, match="sh failed with exit code 3: no such mirror"):
        run(["sh", "-c", "echo no such mirror >&2; exit 3"])


def test_guests_get_cgroups_in_every_hierarchy_that_systemd_uses() -> None:
    folders = machine.cgroup_folders(HYBRID_CGROUPS, HYBRID_MOUNTS)
    assert folders == [
        Path("/sys/fs/cgroup/systemd"),
        Path("/sys/fs/cgroup/memory/box/a1"),
        Path("/sys/fs/cgroup/cpu,cpuacct"),
        Path("/sys/fs/cgroup/unified"),
    ]


def test_guests_get_one_cgroup_where_there_is_one_hierarchy() -> None:
    mounts = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    folders = machine.cgroup_folders("0::/user.slice/session-3.scope\n", mounts)
    assert folders == [Path("/sys/fs/cgroup/user.slice/session-3.scope")]


def test_without_root_the_lab_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (machine.missing() or "").startswith("the lab needs root")


def test_without_apt_the_lab_says_that_it_needs_a_debian_family_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert (machine.missing() or "").startswith("the lab needs a Debian-family machine")


@pytest.fixture
def ubuntu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could run the lab but is no Debian 12."""
    release = {"ID": "ubuntu", "VERSION_CODENAME": "noble", "PRETTY_NAME": "Ubuntu 24.04.1 LTS"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    for check in ("_overlay_fault", "_cgroup_fault"):
        monkeypatch.setattr(machine, check, lambda: None)
    monkeypatch.delenv("FP8FLEET_LAB_DEBIAN", raising=False)


@pytest.mark.usefixtures("ubuntu")
def test_a_machine_that_is_not_debian_12_is_told_to_name_a_debian_mirror() -> None:
    assert machine.missing() == (
        "the lab's hosts are Debian 12 and this machine is Ubuntu 24.04.1 LTS: "
        "set FP8FLEET_LAB_DEBIAN to a Debian mirror, such as http://MIRROR/debian"
    )


@pytest.mark.usefixtures("ubuntu")
def test_with_a_debian_mirror_any_debian_family_machine_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8FLEET_LAB_DEBIAN", "http://mirror.test/debian")
    assert machine.missing() is None


@pytest.mark.usefixtures("ubuntu")
@pytest.mark.parametrize("value", ["mirror.test/debian", "http://mirror.test/debian sid"])
def test_a_debian_mirror_that_is_no_url_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FP8FLEET_LAB_DEBIAN", value)
    assert machine.missing() == (
        f"FP8FLEET_LAB_DEBIAN is {value!r}: expected a URL such as http://MIRROR/debian"
    )


@pytest.mark.usefixtures("ubuntu")
def test_debian_12_needs_no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    debian = {"ID": "debian", "VERSION_CODENAME": "bookworm", "PRETTY_NAME": "Debian 12"}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: debian)
    assert machine.missing() is None


def test_a_folders_page_links_its_entries_with_escaped_names(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311.whl").touch()
    (tmp_path / "sub").mkdir()
    page = index_page(tmp_path)
    assert page.index('<a href="sub/">sub/</a>') < page.index(
        '<a href="torch-2.13.0%2Bcpu-cp311.whl">torch-2.13.0+cpu-cp311.whl</a>'
    )


def test_the_access_log_has_status_bytes_and_range(caplog: pytest.LogCaptureFixture) -> None:
    request = SimpleNamespace(
        headers={"Range": "bytes=5-"}, remote="198.18.0.11", method="GET", path="/wheels/a.whl"
    )
    response = SimpleNamespace(status=206, body_length=1234)
    with caplog.at_level(logging.INFO, logger="access"):
        logger = AccessLine(logging.getLogger("access"), "")
        logger.log(cast(Any, request), cast(Any, response), 0.1)
    assert caplog.messages[0].split()[1:] == [
        "198.18.0.11",
        "GET",
        "/wheels/a.whl",
        "206",
        "1234",
        "bytes=5-",
    ]


def test_the_selinux_machine_reaches_nothing_and_is_reached_on_loopback_alone() -> None:
    command = selinux_vm._machine(Path("/image"), "127.1.2.3", "snapshot=on")
    network = command[command.index("-netdev") + 1]
    assert "restrict=on" in network
    ports = [part for part in network.split(",") if part.startswith("hostfwd=")]
    assert ports
    assert all(part.startswith("hostfwd=tcp:127.1.2.3:") for part in ports)
    assert "file=/image/disk,format=raw,if=virtio,cache=unsafe,snapshot=on" in command


def test_selinux_machines_of_one_machine_have_addresses_of_their_own() -> None:
    addresses = {selinux_vm._free_address() for _ in range(20)}
    assert len(addresses) > 15
    assert all(re.fullmatch(r"127(\.\d{1,3}){3}", address) for address in addresses)


def test_its_commands_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert selinux_vm.main([]) == 2
    assert "up|down|ssh" in capsys.readouterr().err

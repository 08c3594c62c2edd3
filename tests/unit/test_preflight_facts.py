"""The compound fact: what is read out of a probe's answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from probes import RECORDED, answer, facts

from fp8fleet import catalog
from fp8fleet.preflight.facts import (
    Security,
    parts_of,
    probe_arguments,
    probe_script,
    read_facts,
    user_of,
)

SYSTEMS = {
    "ubuntu-22.04": ("ubuntu-22.04", None, "2.35"),
    "ubuntu-24.04": ("ubuntu-24.04", None, "2.39"),
    "kylin-v10-sp1": ("kylin-v10", "SP1", "2.28"),
    "kylin-v10-sp2": ("kylin-v10", "SP2", "2.28"),
    "kylin-v10-sp3": ("kylin-v10", "SP3", "2.28"),
    "kylin-v10-sp3-2403": ("kylin-v10", "SP3-2403", "2.28"),
    "kylin-v11": ("kylin-v11", None, "2.38"),
    "kylin-desktop-v10": ("kylin-desktop-v10", None, "2.31"),
    "openeuler-22.03": ("openeuler-22.03", None, "2.34"),
    "openeuler-24.03": ("openeuler-24.03", None, "2.38"),
    "uos-20": ("uos-20", None, "2.28"),
}
"""Platform, service pack and C library by recording."""


def test_every_recorded_system_is_expected() -> None:
    assert {path.stem for path in (RECORDED / "os").glob("*.txt")} == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recorded_system_is_told(name: str) -> None:
    system = facts(f"os/{name}").system
    platform = catalog.platform_of(system.os_id, system.version_id, system.id_like)
    assert (platform, system.service_pack, system.glibc) == SYSTEMS[name]
    assert system.architecture in ("x86_64", "aarch64")
    assert system.init == "systemd"


def test_kysec_and_selinux_are_two_things() -> None:
    first, third = facts("os/kylin-v10-sp1").security, facts("os/kylin-v10-sp3").security
    assert (first.kysec, first.kysec_exec, first.selinux) == (True, "warning", "disabled")
    assert (third.kysec, third.kysec_exec, third.selinux) == (True, "off", "enforcing")
    assert third.firewall == "firewalld"
    assert third.open_ports == ("22/tcp", "8080/tcp")
    assert facts().security.selinux == "absent"


def test_two_h200_as_they_answered() -> None:
    cards = facts("os/ubuntu-22.04", "gpu/h200-x2").accelerators
    assert [device.id for device in cards.pci] == ["10de:2335"] * 2
    assert [(d.index, d.slot, d.memory_mib) for d in cards.devices] == [
        (0, "0000:00:06.0", 143771),
        (1, "0000:00:07.0", 143771),
    ]
    one = cards.devices[0]
    assert (one.driver, one.compute_capability) == ("580.159.04", "9.0")
    assert (one.ecc, one.ecc_errors, one.mig, one.persistence) == (True, 0, False, True)
    assert cards.links == (("X", "NV18"), ("NV18", "X"))
    # sysfs says -1 there, the matrix says 0
    assert cards.device_numa == {0: 0, 1: 0}
    assert (cards.cuda, cards.module_version) == ("13.0", "580.159.04")


def test_a_matrix_with_ansi_codes_fused_cells_and_nics() -> None:
    cards = facts("gpu/h100-x8").accelerators
    assert len(cards.links) == 8
    assert {link for row in cards.links for link in row} == {"X", "NV18"}
    assert cards.device_numa == {i: int(i > 3) for i in range(8)}
    assert sum(device.is_switch for device in cards.pci) == 4
    assert (cards.fabric_active, cards.fabric_version) == (True, "580.95.05")


def test_a_matrix_of_bridged_pairs() -> None:
    cards = facts("gpu/a100-x4").accelerators
    assert [row[0] for row in cards.links] == ["X", "NV12", "SYS", "SYS"]
    assert cards.device_numa == {0: 0, 1: 0, 2: 1, 3: 1}


def test_four_ascend_910b() -> None:
    cards = facts("os/openeuler-22.03", "gpu/910b-x4").accelerators
    assert [(d.name, d.health, d.memory_mib) for d in cards.devices] == [("910B3", "OK", 65536)] * 4
    assert [d.used_mib for d in cards.devices] == [3370, 3371, 3372, 3373]
    assert cards.links[0] == ("X", "HCCS", "HCCS", "HCCS")
    assert (cards.ascend_driver, cards.cann) == ("25.2.0", "9.1.0")
    assert cards.holders == ()
    assert cards.device_numa == {0: 6, 1: 6, 2: 4, 3: 4}


def test_processes_of_npu_smi_are_read_by_device() -> None:
    lines = answer("gpu/910b-x4")
    empty = next(i for i, line in enumerate(lines) if "No running processes" in line)
    held = " | 2       0                 | 2961215       | VLLMWorker_TP            | 58313"
    lines[empty] = f"{held}                   |"
    parts = parts_of(lines)
    assert parts
    (holder,) = read_facts(parts).accelerators.holders
    assert (holder.uuid, holder.pid, holder.program) == ("npu-2", 2961215, "VLLMWorker_TP")


def test_what_cannot_be_read_is_unknown_not_wrong() -> None:
    cards = facts("gpu/h200-x2", "broken/ecc").accelerators
    assert cards.devices[1].ecc_errors is None
    assert (cards.devices[1].ecc, cards.devices[0].mig) == (False, True)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("broken/driver-missing", "missing"),
        ("broken/driver-hung", "hung"),
        ("broken/driver-mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
        ("gpu/h200-x2", "ok"),
    ],
)
def test_the_state_of_nvidia_smi(name: str, state: str) -> None:
    assert facts(name).accelerators.nvidia_tool == state


def test_holders_are_told_with_their_units() -> None:
    first, second = facts("gpu/h200-x2", "broken/gpu-held").accelerators.holders
    assert (first.pid, first.memory_mib, first.unit) == (4711, 90112, "session-3.scope")
    assert second.unit == "gdm.service"


def test_broken_and_unconfigured_packages_are_told_apart() -> None:
    packages = facts("broken/half-installed").packages
    assert (packages.broken, packages.unfinished) == (("libcuda1",), ("nginx",))
    assert facts("broken/unconfigured").packages.broken == ()
    assert facts("broken/rpm-locked").packages.error == "it does not answer"
    assert "BDB1507" in (facts("broken/rpm-broken").packages.error or "")


def test_unattended_upgrades_count_only_where_they_are_switched_on() -> None:
    assert facts("os/ubuntu-22.04").packages.unattended == ("apt-daily-upgrade.timer",)
    assert facts().packages.unattended == ()


def test_an_empty_answer_and_one_without_an_end_are_no_answer() -> None:
    assert parts_of([]) is None
    assert parts_of(answer()[:-1]) is None


@pytest.mark.parametrize("section", sorted({line[1:] for line in answer() if line[0] == "@"}))
def test_a_missing_section_is_not_fatal(section: str) -> None:
    parts = parts_of(answer(without=[section]))
    if section == "end":
        return
    assert parts is not None
    read_facts(parts)


# The script itself, on this machine


def shells() -> list[list[str]]:
    found = [[path] for name in ("dash", "bash") if (path := shutil.which(name))]
    busybox = shutil.which("busybox")
    return found + ([[busybox, "sh"]] if busybox else [])


@pytest.fixture(params=shells(), ids=lambda words: Path(words[0]).name)
def shell(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Each POSIX shell of this machine."""
    yield request.param


def run(shell: list[str], *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [*shell, "-c", probe_script(), "fp8fleet-probe", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_probe_runs_to_its_end_in_every_shell(shell: list[str], tmp_path: Path) -> None:
    (tmp_path / "held").write_bytes(bytes(8192))
    arguments = probe_arguments(
        full=True,
        need_root=False,
        paths=[f"{tmp_path}/not/yet"],
        stamps=[f"{tmp_path}/held", f"{tmp_path}/none"],
        sizes=[str(tmp_path)],
        ports=[9],
        account="root",
    )
    parts = parts_of(run(shell, *arguments))
    assert parts is not None
    found = read_facts(parts)
    assert found.timed_out == ()
    assert found.account is not None
    assert (found.account.home, found.account_group) == ("/root", "0")
    assert found.system.os_id
    assert found.system.kernel == os.uname().release
    assert found.system.architecture == os.uname().machine
    assert found.hardware.processors == os.cpu_count()
    assert found.present == {f"{tmp_path}/held"}
    assert found.sizes[str(tmp_path)] >= 8192
    (disk,) = [disk for disk in found.disks if disk.path == f"{tmp_path}/not/yet"]
    assert 0 < disk.free <= disk.size
    assert not disk.read_only


def test_the_probe_changes_nothing(shell: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    run(shell, f"path={tmp_path}/a/b", f"size={tmp_path}", f"stamp={tmp_path}/c")
    assert sorted(tmp_path.rglob("*")) == before


def test_without_root_only_the_user_is_told(shell: list[str]) -> None:
    parts = parts_of(run(shell, "root=1"))
    assert parts is not None
    assert user_of(parts).uid == os.getuid()
    assert ("time" in parts) == (os.getuid() == 0)


def fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_hung_tool_does_not_hang_the_probe(tmp_path: Path) -> None:
    """The limit is cut to a second by a timeout that knows only that."""
    real = shutil.which("timeout")
    fake(
        tmp_path, "timeout", f'[ "$3" = 5 ] || set -- -k 1 1 "$4" "$5" "$6" "$7"\nexec {real} "$@"'
    )
    fake(tmp_path, "nvidia-smi", "sleep 60")
    path = f"{tmp_path}:{os.environ['PATH']}"
    parts = parts_of(run(["/bin/sh"], PATH=path))
    assert parts is not None
    assert read_facts(parts).accelerators.nvidia_tool == "hung"


def test_whoever_the_catalogue_knows_to_keep_a_clock_is_found(
    shell: list[str], tmp_path: Path
) -> None:
    fake(tmp_path, "systemctl", 'case $1 in list-units) shift 4; printf "%s x x x\\n" "$@" ;; esac')
    arguments = probe_arguments(full=False, need_root=False)
    parts = parts_of(run(shell, *arguments, PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert parts is not None
    names = [unit.removesuffix(".service") for unit in catalog.clock_units()]
    assert read_facts(parts).clock.services == tuple(names)


def test_the_probe_speaks_ascii_whatever_a_tool_prints(tmp_path: Path) -> None:
    fake(tmp_path, "nvidia-smi", r"printf 'NVIDIA-SMI \261\276\265\330 failed\n'; exit 9")
    parts = parts_of(run(["/bin/sh"], PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert parts is not None
    assert read_facts(parts).accelerators.nvidia_tool == "NVIDIA-SMI  failed"


def test_a_login_in_a_proxys_url_never_leaves_the_host() -> None:
    parts = parts_of(run(["/bin/sh"], http_proxy="http://me:s3cret@10.0.0.9:3128"))
    assert parts is not None
    assert "http_proxy=http://...@10.0.0.9:3128" in read_facts(parts).proxies
    assert "s3cret" not in str(parts)


def test_who_listens_on_a_port_is_told(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        parts = parts_of(run(["/bin/sh"], f"port={port}"))
    assert parts is not None
    (listener,) = [found for found in read_facts(parts).listeners if found.port == port]
    assert listener.pid == os.getpid()


@pytest.mark.parametrize(("address", "told"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_who_listens_beyond_loopback_is_told_unasked(address: str, told: bool) -> None:
    import socket

    with socket.create_server((address, 0)) as listening:
        parts = parts_of(run(["/bin/sh"]))
        assert parts is not None
        ports = [found.port for found in read_facts(parts).listeners]
        assert (listening.getsockname()[1] in ports) == told


def firewall(*lines: str) -> Security:
    found = parts_of(["@firewall", *(f" {line}" for line in lines), " =0", "@end"])
    assert found is not None
    return read_facts(found).security


def test_what_ufw_lets_in_is_read_whether_it_is_on_or_off() -> None:
    on = firewall(
        "ufw Status: active",
        "ufw Default: deny (incoming), allow (outgoing), disabled (routed)",
        "ufw 22/tcp                     ALLOW IN    Anywhere                   # fp8fleet ssh",
        "ufw 8000/tcp                   ALLOW IN    10.0.0.5                   # fp8fleet",
        "ufw 8443 (v6)                  ALLOW IN    Anywhere (v6)",
        "ufw 9000/tcp                   DENY IN     Anywhere",
    )
    assert (on.firewall, on.lets_all_in) == ("ufw", False)
    assert on.open_ports == ("22/tcp", "8000/tcp", "8443")
    assert on.open_to_all == ("22/tcp", "8443")
    off = firewall(
        "ufw Status: inactive",
        "added allow 9100/tcp",
        "added allow from 10.0.0.5 to any port 8000 proto tcp comment 'fp8fleet'",
        "added deny 9000",
    )
    assert (off.firewall, off.open_ports, off.open_to_all) == (
        None,
        ("9100", "8000"),
        ("9100",),
    )
    assert firewall("ufw Status: active", "ufw Default: allow (incoming)").lets_all_in


def test_what_firewalld_lets_in_is_read_whether_it_is_on_or_off() -> None:
    rich = (
        'rich rule family="ipv4" source address="10.0.0.5" port port="8000" protocol="tcp" accept'
    )
    on = firewall("firewalld running", "open 9100/tcp 9200/udp", rich, "target default")
    assert (on.firewall, on.lets_all_in) == ("firewalld", False)
    assert on.open_ports == ("9100/tcp", "9200/udp", "8000/tcp")
    assert on.open_to_all == ("9100/tcp", "9200/udp")
    off = firewall("firewalld not running", 'rich rule port port="8080" protocol="tcp" accept')
    assert (off.firewall, off.open_to_all) == (None, ("8080/tcp",))
    assert firewall("firewalld running", "target ACCEPT").lets_all_in


def test_the_script_fits_a_command_line() -> None:
    assert len(probe_script()) < 32_000

"""The compound fact: what is read out of a probe's answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from probes import RECORDED, answer, facts

from fp8fleet import catalog
from fp8fleet.firewalls import Firewall
from fp8fleet.preflight.facts import (
    HostFacts,
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
    assert third.firewall and third.firewall.name == "firewalld"
    assert [port for port in (22, 8080, 9090) if third.firewall.is_open(port)] == [22, 8080]
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


# Lines that no part prints


def laid_over(**sections: list[str]) -> HostFacts:
    """The facts of a recording with the named sections in place of its own."""
    lines = answer("os/ubuntu-22.04", "gpu/h200-x2", without=sections)[:-1]
    for name, held in sections.items():
        lines += [f"@{name}", *(f" {line}" for line in held), " =0"]
    parts = parts_of([*lines, "@end"])
    assert parts is not None
    return read_facts(parts)


ODD = {
    "time": "date: not found",
    "kernel": "sh: 1: uname: not found",
    "tools": "sh: 1: Syntax error: newline unexpected",
    "reboot": "sh: 1: cannot open /run: Permission denied",
    "cpu": "grep: /proc/cpuinfo: Permission denied",
    "memory": "grep: /proc/meminfo: Permission denied",
    "numa": "cat: /sys/devices/system/node/node0/cpulist: Input/output error",
    "disk": "/opt/fp8fleet - - /opt rw",
    "stamps": "sh: 1: [: missing ]",
    "sizes": "du: cannot access '/var/model.part': No such file or directory",
    "packages": "dpkg-query: warning: parsing file",
    "managers": "sh: 1: read: Illegal option -r",
    "pci": "cat: /sys/bus/pci/devices: Input/output error",
    "modules": "awk: cannot open /proc/modules",
    "ports": "sh: 1: Syntax error: bad substitution",
    "smi": "WARNING: infoROM is corrupted at gpu 0000:41:00.0",
}
"""A line of each part that is none of its own."""


@pytest.mark.parametrize("part", ODD)
def test_a_line_that_a_part_does_not_print_is_set_aside_and_told(part: str) -> None:
    lines = answer("os/ubuntu-22.04", "gpu/h200-x2")
    start = lines.index(f"@{part}") + 1
    end = next(i for i in range(start, len(lines)) if lines[i].startswith(" ="))
    own = [line[1:] for line in lines[start:end]]
    found = laid_over(**{part: [*own, ODD[part], "9" * 5000]})
    assert found.unread == {part: ODD[part]}
    clean = laid_over(**{part: own})
    assert clean.unread == {}
    assert (found.disks, found.hardware, found.system) == (
        clean.disks,
        clean.hardware,
        clean.system,
    )
    assert found.accelerators.devices == clean.accelerators.devices


@pytest.mark.parametrize("part", ["time", "kernel", "cpu", "memory"])
def test_a_part_that_says_nothing_is_unread(part: str) -> None:
    assert laid_over(**{part: []}).unread == {part: ""}


def test_numbers_that_no_computer_has_are_not_read() -> None:
    long = "9" * 5000
    lines = [f"@{part}" for part in ODD]
    lines = [text for name in lines for text in (name, f" {long} {long} {long} {long} {long}")]
    parts = parts_of([*lines, f" ={long}", "@user", f" {long}", " sudo ", " =1", "@end"])
    assert parts is not None
    assert user_of(parts).uid == -1
    assert read_facts(parts).disks == ()


def test_a_row_of_npu_smi_without_its_device_ends_nothing() -> None:
    found = laid_over(smi=[], npu=["| NPU Chip | Process id |", "|   | 1 | python | 3 |"])
    assert [holder.pid for holder in found.accelerators.holders] == [1]


def test_colours_and_other_escapes_of_a_terminal_are_taken_out() -> None:
    name = 'PRETTY_NAME="\x1b]0;x\x1b[2J\x1b[31mRed\x1b[0m"'
    assert "\x1b" not in laid_over(os=["ID=ubuntu", name]).system.name


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


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("bob:s3cret@proxy", "...@proxy"),
        ("http://bob:s3/cret@proxy:1", "http://...@proxy:1"),
        ("http://bob:s3@cret/w0rd@proxy", "http://...@proxy"),
        ("'socks5h://bob:s3=cret@proxy:1'", "'socks5h://...@proxy:1'"),
        ("http://[fd00::1]:3128", "http://[fd00::1]:3128"),
    ],
)
def test_a_login_is_blanked_up_to_the_last_at(value: str, left: str) -> None:
    parts = parts_of(run(["/bin/sh"], HTTPS_PROXY=value))
    assert parts is not None
    assert f"HTTPS_PROXY={left}" in read_facts(parts).proxies
    assert "bob" not in str(parts) and "cret" not in str(parts)


@pytest.mark.skipif(not shutil.which("apt-config"), reason="no apt here")
def test_apts_proxies_are_read_in_whatever_form_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "apt.conf").write_text(
        'Acquire { http { Proxy "http://dave:se@cret4@p:1"; Proxy::mirror "DIRECT"; }; };\n'
    )
    parts = parts_of(run(["/bin/sh"], APT_CONFIG=f"{tmp_path}/apt.conf"))
    assert parts is not None
    found = read_facts(parts).proxies
    assert 'Acquire::http::Proxy "http://...@p:1";' in found
    assert 'Acquire::http::Proxy::mirror "DIRECT";' in found
    assert "dave" not in str(parts) and "cret4" not in str(parts)


def probed_with(folder: Path, *arguments: str, **scripts: str) -> HostFacts:
    """The real probe's facts where these commands are stand-ins; ``_`` stands for ``-``."""
    for name, script in scripts.items():
        fake(folder, name.replace("_", "-"), script)
    path = f"{folder}:{os.environ['PATH']}"
    parts = parts_of(run(["/bin/sh"], *arguments, PATH=path))
    assert parts is not None
    return read_facts(parts)


@pytest.mark.parametrize(
    ("source", "mount"),
    [("/dev/sda1", "/"), ("//nas/AI models", "/mnt/nas"), ("//nas/3 4 of 5", "/mnt/AI models")],
)
def test_sources_and_mounts_with_blanks_shift_no_column(
    tmp_path: Path, source: str, mount: str
) -> None:
    answer = f"echo Filesystem ...; echo '{source}   5000000 2000000  3000000      40% {mount}'"
    found = probed_with(tmp_path, f"path={tmp_path}/a", df=answer)
    disk = next(disk for disk in found.disks if disk.path == f"{tmp_path}/a")
    assert (disk.size, disk.free, disk.mount) == (5000000 * 1024, 3000000 * 1024, mount)
    assert found.unread == {}


@pytest.mark.parametrize("code", [0, 1])
def test_what_df_says_in_place_of_an_answer_is_told(tmp_path: Path, code: int) -> None:
    failing = f"echo 'df: /opt: Stale file handle' >&2; exit {code}"
    found = probed_with(tmp_path, "path=/opt", df=failing)
    assert (found.disks, found.unread) == ((), {"disk": "df: /opt: Stale file handle"})


def test_a_file_that_goes_while_du_counts_is_no_message(tmp_path: Path) -> None:
    racing = "echo \"du: cannot access 'model.part'\" >&2; printf '12\\t/tmp\\n'; exit 1"
    found = probed_with(tmp_path, "size=/tmp", du=racing)
    assert (found.sizes, found.unread) == ({"/tmp": 12 * 1024}, {})


DPKG_ERROR = "dpkg-query: error: parsing file '/var/lib/dpkg/status' near line 7236:"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (f'echo "{DPKG_ERROR}" >&2; echo " garbage" >&2; exit 2', DPKG_ERROR),
        ("exit 0", "its database names no package"),
        ("echo 'ok installed dpkg'; echo 'dpkg-query: warning: odd' >&2", None),
    ],
)
def test_a_dpkg_database_that_cannot_be_read_is_told(
    tmp_path: Path, script: str, error: str | None
) -> None:
    found = probed_with(tmp_path, dpkg_query=script)
    assert (found.packages.family, found.packages.error) == ("apt", error)
    assert found.unread == {}


def test_a_clock_before_the_epoch_is_read(tmp_path: Path) -> None:
    assert probed_with(tmp_path, date="echo -86400").clock.time == -86400


def test_a_process_may_have_blanks_in_its_name(tmp_path: Path) -> None:
    """Its name is that of the file that it was started from."""
    program = tmp_path / "VLLM::API serv"
    program.symlink_to(sys.executable)
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [program, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout and server.stdin
        port = int(server.stdout.readline())
        parts = parts_of(run(["/bin/sh"], f"port={port}"))
        server.stdin.close()
    assert parts is not None
    (listener,) = [found for found in read_facts(parts).listeners if found.port == port]
    assert (listener.pid, listener.program) == (server.pid, "VLLM::API serv")


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


def security(*lines: str) -> Security:
    found = parts_of(["@firewall", *(f" {line}" for line in lines), " =0", "@end"])
    assert found is not None
    return read_facts(found).security


def firewall(*lines: str) -> Firewall:
    """The one that the lines are about, on or off."""
    (found,) = security(*lines).firewalls
    return found


UFW = (
    "ufw active",
    "ipv6 yes",
    'policy "DROP"',
    "### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in comment=667038666c65657420737368",
    "### tuple ### allow tcp 8000 0.0.0.0/0 any 10.0.0.5 in comment=667038666c656574",
    "### tuple ### deny tcp 9000 0.0.0.0/0 any 0.0.0.0/0 in",
    "### tuple ### allow any 8443 ::/0 any ::/0 in",
)


def test_what_ufw_lets_in_is_read_whether_it_is_on_or_off() -> None:
    ports = (22, 8000, 8443, 9000)
    for state in ("active", "inactive"):
        ufw = firewall(f"ufw {state}", *UFW[1:])
        assert (ufw.name, ufw.active, ufw.lets_all_in) == ("ufw", state == "active", False)
        assert [port for port in ports if ufw.lets_in(port)] == [22, 8000, 8443]
        assert [port for port in ports if ufw.is_open(port)] == [22, 8443]
    assert security(*UFW).firewall == firewall(*UFW)
    assert security("ufw inactive").firewall is None


def test_ufws_defaults_are_read() -> None:
    assert firewall("ufw active", 'policy "ACCEPT"').lets_all_in
    assert not firewall("ufw active", 'policy "REJECT"').lets_all_in
    assert firewall("ufw active", "ipv6 yes").ipv6
    assert not firewall("ufw active", "ipv6 no").ipv6
    assert firewall("ufw active").ipv6


FIREWALLD = (
    "zone public (active)",
    "zone   target: default",
    "zone   interfaces: eth0",
    "zone   sources: ",
    "zone   services: ssh cockpit",
    "zone   ports: 9100-9200/tcp 9300/udp",
    "zone   rich rules: ",
    'zone \trule family="ipv4" source address="10.0.0.5" port port="8000" protocol="tcp" accept',
    "default public",
    'service /usr/lib/firewalld/services/ssh.xml:  <port protocol="tcp" port="22"/>',
    'service /usr/lib/firewalld/services/cockpit.xml:  <port protocol="tcp" port="9090"/>',
    'service /usr/lib/firewalld/services/http.xml:  <port protocol="tcp" port="80"/>',
)


def test_what_firewalld_lets_in_is_read_whether_it_is_on_or_off() -> None:
    ports = (22, 80, 8000, 9090, 9150, 9300)
    for state in ("running", "not running"):
        firewalld = firewall(f"firewalld {state}", *FIREWALLD)
        assert (firewalld.name, firewalld.active) == ("firewalld", state == "running")
        assert not firewalld.lets_all_in
        assert [port for port in ports if firewalld.lets_in(port)] == [22, 8000, 9090, 9150]
        assert [port for port in ports if firewalld.is_open(port)] == [22, 9090, 9150]
    open_zone = ("zone trusted", "zone   target: ACCEPT", "default trusted")
    assert firewall("firewalld running", *open_zone).lets_all_in


def test_a_service_that_the_operator_changed_has_the_operators_ports() -> None:
    own = 'service /etc/firewalld/services/cockpit.xml:  <port port="9999" protocol="tcp"/>'
    firewalld = firewall("firewalld running", *FIREWALLD, own)
    assert (firewalld.lets_in(9999), firewalld.lets_in(9090)) == (True, False)


def test_sshs_ports_are_read_behind_systemds_socket_too() -> None:
    lines = (
        'listen LISTEN 0 4096 *:2222 *:* users:(("systemd",pid=1,fd=41))',
        'established 0 0 10.0.0.1:2222 10.0.0.9:5000 users:(("sshd",pid=8,fd=4))',
    )
    assert security(*lines).ssh_ports == (2222,)


def test_the_script_fits_a_command_line() -> None:
    assert len(probe_script()) < 32_000

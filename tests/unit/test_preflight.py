"""Findings: what is wrong with a host, judged against the plan; one for each bad input."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fleets import INSTANCE, MANIFEST, REPO, Site, lock_text, refusal
from probes import NOW, answer, for_plan, sections
from rich.console import Console

from fp8fleet.inventory import ignored_codes
from fp8fleet.plan import HostPlan
from fp8fleet.preflight.codes import CODES
from fp8fleet.preflight.findings import Finding, Judgement
from fp8fleet.preflight.judge import judge
from fp8fleet.preflight.report import codes_table, stopping, summary, table, write_report

UBUNTU = "os/ubuntu-22.04"
H200 = "gpu/h200-x2"


def plan_of(
    site: Site, accelerator: str = "h200-141g", devices: int = 2, **serving: Any
) -> HostPlan:
    """A host that serves over all its devices."""
    instance = {**INSTANCE, "devices": list(range(devices)), "tensor_parallel_size": devices}
    site.serving |= {"accelerator": accelerator, "instances": [instance], **serving}
    return site.host_plan()


def findings(plan: HostPlan, *recordings: str) -> dict[str, Finding]:
    """The findings by code."""
    found = judge(plan, for_plan(plan, *recordings), NOW).findings
    assert len({f.code for f in found}) == len(found), found
    return {finding.code: finding for finding in found}


def cpu_plan(site: Site, **serving: Any) -> HostPlan:
    """A CPU host on Debian, as lab hosts are."""
    site.file("locks/engine.txt", lock_text(vllm="0.32.0"))
    site.serving |= {"platform": "debian-12", "accelerator": "cpu", "engine_release": "0.32.0"}
    site.serving |= {"instances": [{"name": "tiny", "port": 8000}], **serving}
    return site.host_plan()


# Hosts that are well


def test_a_host_that_is_well_has_no_finding(site: Site) -> None:
    assert findings(plan_of(site), UBUNTU, H200) == {}


def test_a_plain_cpu_host_has_no_finding(site: Site) -> None:
    assert findings(cpu_plan(site)) == {}


def test_an_hgx_board_has_no_finding(site: Site) -> None:
    assert findings(plan_of(site, "h100-80g", 8), UBUNTU, "gpu/h100-x8") == {}


@pytest.mark.parametrize("pack", ["sp1", "sp2", "sp3"])
def test_kylin_v10_with_a100_passes(site: Site, pack: str) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.21.0"))
    plan = plan_of(site, "a100-80g", 2, platform="kylin-v10", engine_release="0.21.0")
    found = findings(plan, f"os/kylin-v10-{pack}", "gpu/a100-x4")
    assert [f for f in found.values() if f.severity == "error"] == []
    expected = {"sp1": {"kysec-exec", "selinux-off"}, "sp2": set(), "sp3": set()}
    assert set(found) == expected[pack]


def test_ascend_on_openeuler_passes(site: Site) -> None:
    found = findings(npu_plan(site), "os/openeuler-22.03", "gpu/910b-x4")
    assert {f.code for f in found.values() if f.severity == "error"} == set()


def npu_plan(site: Site) -> HostPlan:
    release = "vllm-ascend-0.23.0"
    site.file("locks/engine.txt", lock_text(vllm_ascend="0.23.0", vllm="0.23.0"))
    return plan_of(
        site, "ascend-910b", 4, platform="openeuler-22.03", arch="aarch64", engine_release=release,
    )  # fmt: skip


def test_a_gateway_is_not_asked_for_devices(gateway_site: Site) -> None:
    plan = gateway_site.plan().hosts["gw-1"]
    assert findings(plan, UBUNTU, "broken/driver-missing") == {}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            ["user vllm:x:1000:1000::/home/vllm:/bin/bash", "group vllm:x:1000:"],
            "vllm: an account with the home /home/vllm and the shell /bin/bash",
        ),
        (["group vllm:x:6:"], "vllm: a group of that name (id 6)"),
        (["user vllm"], "vllm: an account with the home ? and the shell ?"),
    ],
)
def test_a_service_user_that_is_somebody_elses_stops_the_host(
    site: Site, lines: list[str], found: str
) -> None:
    plan = plan_of(site)
    told = ["@account", *(f" {line}" for line in lines), *for_plan(plan, UBUNTU, H200)]
    (finding,) = judge(plan, told, NOW).findings
    assert (finding.code, finding.severity) == ("user-taken", "error")
    assert finding.found == found


@pytest.mark.parametrize("account", ["::{home}:/bin/sh", ":fp8fleet:/data/home:/sbin/nologin"])
def test_a_service_user_that_fp8fleet_made_is_fine(site: Site, account: str) -> None:
    plan = plan_of(site)
    line = f" user vllm:x:998:998{account.format(home=plan.home)}"
    told = ["@account", line, " group vllm:x:998:", *for_plan(plan, UBUNTU, H200)]
    assert judge(plan, told, NOW).findings == ()


# Bad input: one finding each


BAD = {
    "broken/unknown-os": "os-unknown",
    "broken/driver-missing": "driver-missing",
    "broken/driver-mismatch": "driver-broken",
    "broken/driver-hung": "driver-hung",
    "broken/half-installed": "packages-broken",
    "broken/dpkg-broken": "packages-broken",
    "broken/rpm-locked": "packages-broken",
    "broken/rpm-broken": "packages-broken",
    "broken/no-space": "disk-short",
    "broken/read-only-usr": "disk-read-only",
    "broken/clock": "clock-wrong",
    "broken/proxy": "proxy-differs",
    "broken/locale": "locale-not-utf8",
    "broken/unattended": "upgrades-unattended",
}
ALONGSIDE = {
    "broken/driver-hung": {"probe-incomplete"},
    "broken/half-installed": {"packages-unfinished"},
}


@pytest.mark.parametrize("recording", BAD)
def test_each_bad_input_is_one_finding(site: Site, recording: str) -> None:
    found = findings(plan_of(site), UBUNTU, H200, recording)
    assert set(found) - ALONGSIDE.get(recording, set()) == {BAD[recording]}
    finding = found[BAD[recording]]
    assert finding.found and finding.needed and finding.remedy


@pytest.mark.parametrize("recording", ["broken/no-sudo", "broken/sudo-password"])
def test_without_root_there_is_one_finding_and_no_facts(site: Site, recording: str) -> None:
    """The probe then ends after its first section."""
    lines = answer(recording)
    short = [*lines[: lines.index("@time")], "@end"]
    judgement = judge(plan_of(site), short, NOW)
    (finding,) = judgement.findings
    assert finding.code == "no-root"
    assert "deploy is not root" in finding.found
    assert "sudo_password" in finding.remedy
    assert judgement.facts is None


def test_a_whole_probe_without_root_says_so(site: Site) -> None:
    assert "no-root" in findings(plan_of(site), UBUNTU, H200, "broken/no-sudo")


@pytest.mark.parametrize("lines", [[], ["@user", " 0", " =0"]])
def test_an_answer_without_an_end_is_a_finding(site: Site, lines: list[str]) -> None:
    (finding,) = judge(plan_of(site), lines, NOW).findings
    assert (finding.code, finding.severity) == ("probe-failed", "error")


def replaced(plan: HostPlan, *recordings: str, **sections: list[str]) -> list[str]:
    """A probe's answer with the named sections in place of the recorded ones."""
    result: list[str] = []
    name = ""
    for line in for_plan(plan, *recordings):
        if line.startswith("@"):
            name = line[1:]
            result += [line, *(f" {text}" for text in sections.get(name, []))]
        elif name not in sections:
            result.append(line)
    return result


def codes_of(plan: HostPlan, lines: list[str], now: float = NOW) -> list[str]:
    return [finding.code for finding in judge(plan, lines, now).findings]


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("sizes", "du: cannot access '/m/model.part': No such file or directory"),
        ("disk", "df: cannot read table of mounted file systems: No such file"),
        ("disk", "/opt/fp8fleet - - /opt rw"),
        ("memory", "grep: /proc/meminfo: Permission denied"),
        ("ports", "sh: 1: Syntax error: bad substitution"),
        ("time", "date: not found"),
    ],
)
def test_a_line_that_cannot_be_read_is_one_finding_with_its_part(
    site: Site, part: str, line: str
) -> None:
    plan = plan_of(site)
    (finding,) = judge(plan, with_lines(for_plan(plan, UBUNTU, H200), **{part: line}), NOW).findings
    assert (finding.code, finding.severity) == ("unread", "warning")
    assert finding.found == f"{part}: {line}"


def test_memory_that_cannot_be_read_is_not_short(site: Site) -> None:
    plan = plan_of(site)
    lines = replaced(plan, UBUNTU, H200, memory=["grep: /proc/meminfo: Permission denied"])
    assert codes_of(plan, lines) == ["unread"]


def test_what_an_ordinary_user_cannot_read_is_told_as_no_root(site: Site) -> None:
    plan = plan_of(site)
    lines = for_plan(plan, UBUNTU, H200, "broken/no-sudo")
    assert codes_of(plan, with_lines(lines, sizes="du: /x: Permission denied")) == ["no-root"]


@pytest.mark.parametrize("sudo", ["sudo ", "sudo", "sudo x y"])
def test_an_odd_answer_about_sudo_is_no_root(site: Site, sudo: str) -> None:
    plan = plan_of(site)
    lines = replaced(plan, UBUNTU, H200, user=["1000", "ops", sudo])
    assert codes_of(plan, lines) == ["no-root"]
    short = ["@user", " 1000", " ops", f" {sudo}", " =0", "@end"]
    assert codes_of(plan, short) == ["no-root"]


# Operating system


def test_an_architecture_that_is_not_told_is_looked_for(site: Site) -> None:
    plan = plan_of(site)
    found = judge(plan, replaced(plan, UBUNTU, H200, kernel=[]), NOW).findings
    assert [f.code for f in found] == ["arch-mismatch", "unread"]
    assert found[0].remedy == "log in, look what `uname -m` says"


def test_another_platform_than_the_inventorys_is_refused_with_its_name(site: Site) -> None:
    finding = findings(plan_of(site), "os/kylin-v10-sp3", H200)["os-mismatch"]
    assert "SP3" in finding.found
    assert "that is kylin-v10" in finding.found
    assert "platform = 'kylin-v10'" in finding.remedy


def test_kylins_desktop_is_not_its_server(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.21.0"))
    plan = plan_of(site, "a100-80g", 2, platform="kylin-v10", engine_release="0.21.0")
    found = findings(plan, "os/kylin-desktop-v10", "gpu/a100-x4")
    assert "that is kylin-desktop-v10" in found["os-mismatch"].found


def test_another_architecture_is_refused(site: Site) -> None:
    assert "arch-mismatch" in findings(plan_of(site), UBUNTU, "os/openeuler-22.03", H200)


def test_a_c_library_older_than_the_wheel_needs_is_refused(site: Site) -> None:
    found = findings(plan_of(site), "os/kylin-v10-sp1", H200)
    # its wheel's tag is 2_28, but a requirement of it needs 2.31
    assert found["glibc-old"].needed == "glibc 2.31 or newer for engine_release = '0.33.0'"


def test_a_c_library_that_only_differs_is_a_warning(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, "os/ubuntu-24.04", H200)
    assert found["glibc-differs"].severity == "warning"


def test_a_bare_container_without_tools_is_refused(site: Site) -> None:
    found = findings(cpu_plan(site), "broken/tools")
    assert set(found) == {"init-missing", "tool-missing", "container"}
    assert found["tool-missing"].found == "no flock, systemctl"


@pytest.mark.parametrize(
    ("off", "code"),
    [(0, None), (9, None), (-9, None), (60, "clock-skew"), (-60, "clock-skew"),
     (7200, "clock-wrong"), (-10**8, "clock-wrong")],
)  # fmt: skip
def test_the_clock_is_held_against_this_machines(site: Site, off: int, code: str | None) -> None:
    plan = cpu_plan(site)
    found = judge(plan, for_plan(plan), NOW - off).findings
    assert [f.code for f in found] == ([code] if code else [])


@pytest.mark.parametrize(
    ("took", "off", "expected"),
    [(60, 0, []), (60, 59, []), (60, 75, ["clock-skew"]), (60, -15, ["clock-skew"]),
     (7200, 7100, [])],
)  # fmt: skip
def test_a_slow_probe_is_no_wrong_clock(
    site: Site, took: int, off: int, expected: list[str]
) -> None:
    """The host reads its clock at some moment between the question and the answer."""
    plan = cpu_plan(site)
    asked = NOW - off
    found = judge(plan, for_plan(plan), asked + took, asked).findings
    assert [f.code for f in found] == expected


def test_a_clock_before_the_epoch_is_wrong(site: Site) -> None:
    plan = cpu_plan(site)
    (finding,) = judge(plan, replaced(plan, time=["-86400"]), NOW).findings
    assert finding.code == "clock-wrong"


def test_years_are_told_as_years(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/clock")
    assert re.match(r"21\.\d years behind", found["clock-wrong"].found)
    assert "timedatectl set-time" in found["clock-wrong"].remedy


def test_a_host_without_a_time_service_is_not_told_since_the_run_starts_one(site: Site) -> None:
    plan = cpu_plan(site)
    assert judge(plan, replaced(plan, clock=["NTPSynchronized=no"]), NOW).findings == ()


def test_a_containers_clock_is_the_business_of_the_machine_below(site: Site) -> None:
    plan = cpu_plan(site)
    inside = {"init": ["systemd", "systemd-nspawn"]}
    synced = judge(plan, replaced(plan, clock=["NTPSynchronized=yes"], **inside), NOW).findings
    assert [finding.code for finding in synced] == ["container"]
    loose = judge(plan, replaced(plan, clock=["NTPSynchronized=no"], **inside), NOW).findings
    (told,) = [finding for finding in loose if finding.code == "clock-unsynced"]
    assert told.remedy == "start one there"
    early = judge(plan, replaced(plan, time=["1104537600"], **inside), NOW).findings
    (wrong,) = [finding for finding in early if finding.code == "clock-wrong"]
    assert wrong.remedy == "set the clock of the machine below"
    assert "machine below" in told.needed


# cmake


ARCHIVE = {
    "cmake_archive_url": "https://mirror.example.com/cmake-3.28.4-linux-x86_64.tar.gz",
    "cmake_sha256": "ab" * 32,
}


@pytest.mark.parametrize(
    ("serving", "have", "told"),
    [
        ({}, [], None),
        ({"engine_build": "source"}, ["cmake version 3.26.1"], None),
        ({"engine_build": "source"}, ["cmake version 3.18.4"], "cmake 3.18.4"),
        ({"engine_build": "source"}, ["cmake version 3.9-rc1"], "cmake 3.9"),
        ({"engine_build": "source"}, [], "no cmake"),
        ({"engine_build": "source", **ARCHIVE}, [], None),
        ({"engine_build": "source", "package_versions": {"cmake": "3.28.3-1"}}, [], None),
    ],
)
def test_a_cmake_that_a_source_build_lacks_and_no_archive_brings_stops_the_host(
    site: Site, serving: dict[str, Any], have: list[str], told: str | None
) -> None:
    plan = cpu_plan(site, **serving)
    found = {f.code: f.found for f in judge(plan, replaced(plan, cmake=have), NOW).findings}
    assert found == ({"cmake-old": told} if told else {})
    assert CODES["cmake-old"].severity == "error"


# Packages


def with_lines(lines: list[str], **added: str) -> list[str]:
    """``lines`` with one more line in the named sections."""
    result = []
    for line in lines:
        result.append(line)
        if line.startswith("@") and line[1:] in added:
            result.append(f" {added[line[1:]]}")
    return result


def test_what_a_killed_run_left_is_not_broken(site: Site) -> None:
    plan = plan_of(site)
    lines = with_lines(for_plan(plan, UBUNTU, H200, "broken/half-installed"), earlier="yes")
    assert [f.code for f in judge(plan, lines, NOW).findings] == ["packages-unfinished"]


def test_a_package_manager_at_work_is_waited_for(site: Site) -> None:
    plan = plan_of(site)
    lines = with_lines(for_plan(plan, UBUNTU, H200, "broken/half-installed"), managers="dpkg 99")
    found = {f.code: f.severity for f in judge(plan, lines, NOW).findings}
    assert found == {"packages-unfinished": "warning", "packages-busy": "warning"}


def test_unfinished_packages_are_a_warning(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/unconfigured")
    assert set(found) == {"packages-unfinished"}


def test_upgrades_are_no_matter_on_hosts_without_devices(site: Site) -> None:
    assert findings(cpu_plan(site), "broken/unattended") == {}


def test_a_broken_database_of_dpkg_is_told_with_its_remedy(site: Site) -> None:
    finding = findings(plan_of(site), UBUNTU, H200, "broken/dpkg-broken")["packages-broken"]
    assert finding.found.startswith("dpkg: dpkg-query: error: parsing file")
    assert "/var/lib/dpkg/status-old" in finding.remedy


# Disk, memory, processor


def with_disk(plan: HostPlan, path: str, row: str | None) -> list[str]:
    """The answer with another disk under ``path``, or none."""
    lines = [line for line in for_plan(plan, UBUNTU, H200) if not line.startswith(f" {path} ")]
    return with_lines(lines, disk=f"{path} {row}") if row else lines


@pytest.mark.parametrize("path", ["/etc", "/run", "/usr", "/var/cache", "/var/lib", "/var/log"])
def test_the_systems_own_directories_have_to_be_writable_and_to_have_room(
    site: Site, path: str
) -> None:
    plan = plan_of(site)
    assert codes_of(plan, with_disk(plan, path, f"900000 900000 {path} ro")) == ["disk-read-only"]
    assert codes_of(plan, with_disk(plan, path, f"100 900000 {path} rw")) == ["disk-short"]
    assert codes_of(plan, with_disk(plan, path, f"70000 900000 {path} rw")) == []


def test_a_path_whose_file_system_does_not_answer_stops_the_host(site: Site) -> None:
    plan = plan_of(site)
    (finding,) = judge(plan, with_disk(plan, "/var/cache/fp8fleet", None), NOW).findings
    assert (finding.code, finding.severity) == ("disk-unknown", "error")
    assert finding.found == "df tells nothing of /var/cache/fp8fleet"


def test_a_mount_with_a_blank_is_judged(site: Site) -> None:
    plan = plan_of(site)
    lines = with_disk(plan, "/var/cache/fp8fleet", "900000 900000 /mnt/AI\\040models ro")
    (finding,) = judge(plan, lines, NOW).findings
    assert finding.found == "/mnt/AI models is mounted read-only (/var/cache/fp8fleet lies on it)"


def test_disk_is_counted_for_all_that_is_missing_on_a_file_system(site: Site) -> None:
    finding = findings(plan_of(site), UBUNTU, H200, "broken/no-space")["disk-short"]
    assert finding.found == "5.0 GiB free on /opt"
    assert re.match(r"16\.\d GiB needed beside what is there", finding.needed)
    assert "environment engine 0.33.0 16.0 GiB" in finding.needed


def test_disk_of_what_is_there_already_is_not_needed_again(site: Site) -> None:
    plan = plan_of(site)
    stamps = [space.stamp for space in plan.requirements.spaces if space.stamp]
    lines = for_plan(plan, UBUNTU, H200, "broken/no-space")
    for stamp in stamps:
        lines = with_lines(lines, stamps=str(stamp))
    assert judge(plan, lines, NOW).findings == ()


def test_a_partial_model_needs_the_rest_only(site: Site) -> None:
    size = 100 << 30
    site.file("models/tiny/manifest.toml", MANIFEST.replace("size = 2", f"size = {size}"))
    plan = plan_of(site, model_directory="/opt/fp8fleet-models")
    lines = for_plan(plan, UBUNTU, H200, "broken/no-space")
    lines = with_lines(lines, stamps=str(plan.requirements.spaces[1].stamp))
    (finding,) = [f for f in judge(plan, lines, NOW).findings if f.code == "disk-short"]
    assert "model tiny 100.0 GiB" in finding.needed
    kept = f"{99 << 20}\t{plan.requirements.spaces[2].path}"
    assert judge(plan, with_lines(lines, sizes=kept), NOW).findings == ()


def test_less_memory_than_the_model_is_a_warning(site: Site) -> None:
    size = 600 << 30
    site.file("models/tiny/manifest.toml", MANIFEST.replace("size = 2", f"size = {size}"))
    found = findings(plan_of(site), UBUNTU, H200)
    assert set(found) == {"memory-short"}


def test_block_fp8_on_a_cpu_needs_amx(site: Site) -> None:
    named = MANIFEST.replace('revision = "1"', 'revision = "1"\nquantization = "fp8-block"')
    site.file("models/tiny/manifest.toml", named)
    assert set(findings(cpu_plan(site))) == {"cpu-lacks-amx"}


# Accelerators


def test_fewer_devices_than_the_plan_uses_are_refused(site: Site) -> None:
    finding = findings(plan_of(site, devices=4), UBUNTU, H200)["gpu-missing"]
    assert finding.found == "2 nvidia devices on the PCI bus"
    assert finding.needed == "4, for devices 0,1,2,3 of the plan"


def test_other_devices_than_the_inventory_names_are_refused_even_without_a_driver(
    site: Site,
) -> None:
    found = findings(plan_of(site, "h100-80g"), UBUNTU, H200, "broken/driver-missing")
    assert set(found) == {"driver-missing", "gpu-other"}
    assert "set accelerator = 'h200-141g'" in found["gpu-other"].remedy


def test_a_pci_id_that_the_catalogue_lacks_is_a_warning(site: Site) -> None:
    plan = plan_of(site)
    lines = [line.replace("0x2335", "0x2999") for line in for_plan(plan, UBUNTU, H200)]
    (finding,) = judge(plan, lines, NOW).findings
    assert (finding.code, finding.severity) == ("gpu-unknown", "warning")


def test_a_device_that_fell_off_the_bus_is_told_by_its_slot(site: Site) -> None:
    plan = plan_of(site, devices=1)
    lines = [line for line in for_plan(plan, UBUNTU, H200) if not line.startswith(" 1, GPU-")]
    (finding,) = judge(plan, lines, NOW).findings
    assert finding.code == "gpu-lost"
    assert "0000:00:07.0" in finding.found


def test_memory_errors_mig_and_ecc_off(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/ecc")
    assert set(found) == {"gpu-ecc-errors", "gpu-mig", "gpu-ecc-off", "persistence-off"}
    assert "device 0 (0000:00:06.0): 3 uncorrected errors" in found["gpu-ecc-errors"].found


def test_devices_that_the_plan_does_not_use_are_not_judged(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "devices": [1]}]
    site.serving["accelerator"] = "h200-141g"
    found = findings(site.host_plan(), UBUNTU, H200, "broken/ecc")
    assert set(found) == {"gpu-ecc-off"}


def test_held_memory_is_an_error_only_where_the_server_would_not_start(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/gpu-held")
    assert set(found) == {"gpu-busy", "gpu-shared"}
    assert "/usr/bin/python3 (4711, 90112 MiB)" in found["gpu-busy"].found
    assert found["gpu-busy"].needed == "92% of the memory for server main"


def test_memory_that_the_driver_tells_of_no_process_is_that_in_use(site: Site) -> None:
    plan = plan_of(site, devices=1)
    other = "GPU-00000000-0000-0000-0000-000000000000, 123, [N/A], python | /user.slice"
    ours = "GPU-00000000-0000-0000-0000-000000000000, 124, 90000, vllm | /fp8fleet-main.service"

    def judged(used: int, *holders: str) -> list[tuple[str, str]]:
        smi = [HEAD, FIRST.replace(" 0 MiB", f" {used} MiB"), SECOND]
        lines = replaced(plan, UBUNTU, H200, smi=smi, holders=list(holders))
        return [(f.code, f.found.split(" held")[0]) for f in judge(plan, lines, NOW).findings]

    assert judged(140000, other) == [("gpu-busy", "device 0: 140000 of 143771 MiB")]
    assert judged(500, other) == [("gpu-shared", "device 0: 500 of 143771 MiB")]
    assert judged(91000, other, ours) == [("gpu-shared", "device 0: 1000 of 143771 MiB")]


def test_our_own_servers_memory_is_no_finding(site: Site) -> None:
    plan = plan_of(site)
    lines = [
        re.sub(r"\| /.*", "| /system.slice/fp8fleet-main.service", line)
        for line in for_plan(plan, UBUNTU, H200, "broken/gpu-held")
    ]
    assert judge(plan, lines, NOW).findings == ()


def test_gpu_errors_of_the_full_mode(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/xid")
    assert set(found) == {"gpu-kernel-errors", "gpu-ecc-errors"}
    assert "00000000:00:06.0" in found["gpu-ecc-errors"].found


def test_servers_over_unlinked_devices_are_warned_of(site: Site) -> None:
    site.serving["accelerator"] = "a100-80g"
    site.serving["instances"] = [
        {**INSTANCE, "devices": [0], "tensor_parallel_size": 1},
        {"name": "far", "port": 8001, "devices": [2, 1], "tensor_parallel_size": 2},
    ]
    found = findings(site.host_plan(), UBUNTU, "gpu/a100-x4")
    assert set(found) == {"nvlink-missing", "numa-split"}
    assert found["nvlink-missing"].found == "server far: 1-2 SYS"


def test_an_npu_that_is_not_well_and_an_old_cann(site: Site) -> None:
    found = findings(npu_plan(site), "os/openeuler-22.03", "gpu/910b-x4", "broken/old-npu")
    assert {f.code for f in found.values() if f.severity == "error"} == {
        "gpu-unhealthy",
        "cann-missing",
    }
    assert found["cann-missing"].found == "CANN 8.0.RC3"


@pytest.mark.parametrize("preview", ["9.1.0.RC1", "9.1.0.alpha001", "9.1.01", "9.1"])
def test_a_preview_of_cann_is_not_the_release(site: Site, preview: str) -> None:
    plan = npu_plan(site)
    recordings = ("os/openeuler-22.03", "gpu/910b-x4")
    assert codes_of(plan, replaced(plan, *recordings, ascend=[f"cann {preview}"])) == [
        "cann-missing"
    ]
    assert codes_of(plan, replaced(plan, *recordings, ascend=["cann 9.1.0.1"])) == []


# Tools that end well and say nothing useful

HEAD, FIRST, SECOND = (line.strip() for line in sections(H200)["smi"][:3])
GPU_IS_LOST = ", ".join(["[GPU is lost]"] * 12)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["No devices were found"], "No devices were found"),
        ([], "it lists no device"),
        ([HEAD], "it lists no device"),
        ([HEAD, GPU_IS_LOST], "[GPU is lost]"),
    ],
)
def test_nvidia_smi_that_shows_no_device_is_a_broken_driver(
    site: Site, lines: list[str], says: str
) -> None:
    plan = plan_of(site)
    (finding,) = judge(plan, replaced(plan, UBUNTU, H200, smi=lines), NOW).findings
    assert finding.code == "driver-broken"
    assert finding.found.startswith(f"nvidia-smi: {says}")


@pytest.mark.parametrize(
    "lines",
    [
        ["dcmi model initialized failed, because the device is used. ret is -8020"],
        [],
        [line.strip() for line in sections("gpu/910b-x4")["npu"][:6]],
    ],
)
def test_npu_smi_that_shows_no_device_is_a_broken_driver(site: Site, lines: list[str]) -> None:
    plan = npu_plan(site)
    found = replaced(plan, "os/openeuler-22.03", "gpu/910b-x4", npu=lines)
    (finding,) = judge(plan, found, NOW).findings
    assert finding.code == "driver-broken"
    assert finding.found.startswith(f"npu-smi: {lines[0] if len(lines) == 1 else 'it lists no'}")


def test_a_row_of_a_lost_device_is_no_device(site: Site) -> None:
    plan = plan_of(site)
    (finding,) = judge(
        plan, replaced(plan, UBUNTU, H200, smi=[HEAD, FIRST, GPU_IS_LOST]), NOW
    ).findings
    assert finding.code == "gpu-lost"
    assert "0000:00:07.0" in finding.found


@pytest.mark.parametrize("value", ["[GPU requires reset]", "[Unknown Error]"])
def test_an_error_in_place_of_a_devices_values_stops_the_host(site: Site, value: str) -> None:
    cells = SECOND.split(", ")
    row = ", ".join([*cells[:4], *([value] * 7), cells[-1]])
    plan = plan_of(site)
    (finding,) = judge(plan, replaced(plan, UBUNTU, H200, smi=[HEAD, row, FIRST]), NOW).findings
    assert (finding.code, finding.severity) == ("gpu-unhealthy", "error")
    assert finding.found == f"device 1 (0000:00:07.0): {value.strip('[]')}"


def test_a_display_card_beside_the_devices_of_the_plan_is_not_judged(site: Site) -> None:
    plan = plan_of(site)
    card = "2, GPU-2, NVIDIA T1000, 00000000:02:00.0, 4096 MiB, 0 MiB, 580.159.04, [N/A], [N/A],"
    shown = [HEAD, FIRST, SECOND, f"{card} [N/A], Enabled, 7.5"]
    pci = [line.strip() for line in sections(H200)["pci"]]
    pci.insert(0, "0000:02:00.0 0x10de 0x1ff0 0x030000 0 nvidia")
    assert codes_of(plan, replaced(plan, UBUNTU, H200, smi=shown, pci=pci)) == []
    # with no driver of its own
    assert codes_of(plan, replaced(plan, UBUNTU, H200, pci=pci)) == []
    used = plan_of(site, devices=3)
    assert "gpu-other" in codes_of(used, replaced(used, UBUNTU, H200, smi=shown, pci=pci))


# Driver


def with_driver(lines: list[str], version: str) -> list[str]:
    return [line.replace("580.159.04", version) for line in lines]


def test_a_driver_below_the_wheels_cuda_is_refused_and_its_ended_branch_warned_of(
    site: Site,
) -> None:
    plan = plan_of(site)
    lines = with_driver(for_plan(plan, UBUNTU, H200), "535.104.05")
    found = {f.code: f for f in judge(plan, lines, NOW).findings}
    assert set(found) == {"driver-old", "driver-ended"}
    assert found["driver-old"].needed == "NVIDIA's driver 580.65.06 or newer (CUDA 13.0)"


def test_a_sites_table_is_held_against_the_real_driver(site: Site) -> None:
    table = [{"driver": "580.95.05", "engine": "0.33.0"}]
    plan = plan_of(site, validated_combinations=table)
    (finding,) = judge(plan, for_plan(plan, UBUNTU, H200), NOW).findings
    assert (finding.code, finding.severity) == ("driver-unvalidated", "warning")
    lines = with_driver(for_plan(plan, UBUNTU, H200), "580.95.05")
    assert judge(plan, lines, NOW).findings == ()


def test_a_kernel_upgrade_that_left_the_module_behind(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/driver-gone")
    assert set(found) == {"driver-broken", "driver-module"}
    assert "5.15.0-160-generic runs" in found["driver-module"].found


def test_the_next_kernel_without_a_module_is_a_warning(site: Site) -> None:
    plan = plan_of(site)
    lines = with_lines(for_plan(plan, UBUNTU, H200), modules="kernel 6.8.0-90-generic ")
    lines = with_lines(lines, modules="kernel 5.15.0-157-generic nvidia")
    (finding,) = judge(plan, lines, NOW).findings
    assert finding.code == "driver-next-kernel"


def test_nouveau_is_told_and_stops_nothing_by_itself(site: Site) -> None:
    found = findings(plan_of(site), UBUNTU, H200, "broken/nouveau")
    assert set(found) == {"nouveau-loaded", "driver-missing"}


def test_a_fabric_manager_that_is_down_or_of_another_version(site: Site) -> None:
    found = findings(plan_of(site, "h100-80g", 8), UBUNTU, "gpu/h100-x8", "broken/fabric")
    assert set(found) == {"fabric-manager-down", "fabric-manager-version"}
    assert found["fabric-manager-version"].found == "fabric manager 570.172.08, driver 580.95.05"


@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        ({"fabric-manager": "580.82.07"}, "fabric manager 580.82.07 (planned), driver 580.95.05"),
        ({"nvidia": "580.82.07"}, "fabric manager 580.95.05, driver 580.82.07 (planned)"),
        ({"fabric-manager": "580.95.05"}, None),
        ({"nvidia": "580.82.07", "fabric-manager": "580.82.07"}, None),
    ],
)
def test_a_fabric_manager_that_will_differ_from_the_driver_stops_the_host(
    site: Site, drivers: dict[str, str], expected: str | None
) -> None:
    asked = [{"name": name, "version": version} for name, version in drivers.items()]
    plan = plan_of(site, "h100-80g", 8, drivers=asked)
    found = judge(plan, for_plan(plan, UBUNTU, "gpu/h100-x8"), NOW).findings
    assert [(f.code, f.severity, f.found) for f in found] == (
        [("fabric-manager-version", "error", expected)] if expected else []
    )


def test_boards_without_switches_need_no_fabric_manager(site: Site) -> None:
    assert findings(plan_of(site), UBUNTU, H200, "broken/fabric") == {}


# Network and security


@pytest.mark.parametrize("name", ["VLLM::API server", "gunicorn: master", "-", "x /y"])
def test_a_server_of_ours_may_have_blanks_in_its_name(site: Site, name: str) -> None:
    plan = plan_of(site)
    listens = f"8000 900 /system.slice/fp8fleet-main.service {name}"
    assert codes_of(plan, with_lines(for_plan(plan, UBUNTU, H200), ports=listens)) == []
    others = f"8000 900 /system.slice/other.service {name}"
    (finding,) = judge(plan, with_lines(for_plan(plan, UBUNTU, H200), ports=others), NOW).findings
    assert finding.found == f"{name} (900) listens on port 8000"


def test_a_port_of_another_program_is_refused_and_our_own_is_not(site: Site) -> None:
    finding = findings(plan_of(site), UBUNTU, H200, "broken/ports")["port-taken"]
    assert finding.found == "java (812) listens on port 8000"
    assert finding.needed == "port 8000 for server main"


UFW_ON = "ufw active"


def stored(words: str) -> str:
    """A rule of ufw's, as its file has it."""
    return f"### tuple ### {words}"


def with_firewall(lines: list[str], *added: str) -> list[str]:
    """``lines`` with those about the firewall, in their order."""
    for line in reversed(added):
        lines = with_lines(lines, firewall=line)
    return lines


def firewalld(*lines: str, state: str = "not running") -> list[str]:
    zone = ["public (active)", "  target: default", "  interfaces: eth0", *lines]
    return [f"firewalld {state}", "default public", *(f"zone {line}" for line in zone)]


def test_a_closed_port_of_the_plan_is_told_only_where_nobody_opens_it(site: Site) -> None:
    plan = cpu_plan(site, nginx_listen=8443, firewall="unmanaged")
    lines = with_lines(for_plan(plan), firewall=UFW_ON)
    (finding,) = judge(plan, lines, NOW).findings
    assert finding.code == "firewall-closed"
    managed = cpu_plan(site, nginx_listen=8443, firewall="auto")
    assert judge(managed, lines, NOW).findings == ()


@pytest.mark.parametrize(
    "rule",
    [
        "allow tcp 8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow any 8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow tcp 8400:8500 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow tcp 80,8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow any any 0.0.0.0/0 any 10.0.0.0/8 in",
        "limit tcp 8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow tcp 8443 0.0.0.0/0 any 0.0.0.0/0 Web%20Server - in",
        "allow tcp 8443 0.0.0.0/0 any 0.0.0.0/0 in_eth0",
        "allow_log tcp 8443 ::/0 any ::/0 in",
    ],
)
def test_whatever_form_ufws_rule_has_it_opens_the_port(site: Site, rule: str) -> None:
    """A port of the plan under `unmanaged`, and another program's while ufw is off."""
    plan = cpu_plan(site, nginx_listen=8443, firewall="unmanaged")
    lines = with_firewall(for_plan(plan), UFW_ON, stored(rule))
    assert judge(plan, lines, NOW).findings == ()
    managed = cpu_plan(site, nginx_listen=8080, firewall="ufw")
    lines = with_lines(for_plan(managed), ports="8443 812 /system.slice/other.service other")
    lines = with_firewall(lines, "ufw inactive", stored(rule))
    assert judge(managed, lines, NOW).findings == ()


@pytest.mark.parametrize(
    "rule",
    [
        "allow udp 8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow tcp 8444:8500 0.0.0.0/0 any 0.0.0.0/0 in",
        "allow tcp 8443 0.0.0.0/0 any 0.0.0.0/0 out",
        "route:allow tcp 8443 0.0.0.0/0 any 0.0.0.0/0 in",
        "deny tcp 8443 0.0.0.0/0 any 0.0.0.0/0 in",
    ],
)
def test_other_rules_of_ufw_open_nothing(site: Site, rule: str) -> None:
    plan = cpu_plan(site, nginx_listen=8443, firewall="unmanaged")
    lines = with_firewall(for_plan(plan), UFW_ON, stored(rule))
    assert [f.code for f in judge(plan, lines, NOW).findings] == ["firewall-closed"]


@pytest.mark.parametrize("line", [UFW_ON, "firewalld running"])
def test_another_firewall_than_the_plans_stops_the_host(site: Site, line: str) -> None:
    active, other = line.split()[0], {"ufw": "firewalld", "firewalld": "ufw"}[line.split()[0]]
    plan = cpu_plan(site, firewall=other)
    (finding,) = judge(plan, with_lines(for_plan(plan), firewall=line), NOW).findings
    assert (finding.code, finding.severity) == ("firewall-other", "error")
    assert f"set firewall = {active!r}" in finding.remedy
    same = cpu_plan(site, firewall=active)
    assert judge(same, with_lines(for_plan(same), firewall=line), NOW).findings == ()


def test_what_a_firewall_would_shut_out_stops_the_host_while_it_is_off(site: Site) -> None:
    plan = cpu_plan(site)
    lines = with_lines(for_plan(plan), ports="9100 812 /system.slice/ne.service node_exporter")
    (finding,) = judge(plan, lines, NOW).findings
    assert (finding.code, finding.severity) == ("firewall-cuts", "error")
    assert "9100 (node_exporter)" in finding.found
    assert "ufw allow PORT/tcp" in finding.remedy
    assert judge(plan, with_lines(lines, firewall=UFW_ON), NOW).findings == ()
    unmanaged = cpu_plan(site, firewall="unmanaged")
    assert judge(unmanaged, lines, NOW).findings == ()


@pytest.mark.parametrize(
    "rule",
    ["  services: cockpit", "  ports: 9000-9200/tcp", '\trule service name="cockpit" accept'],
)
def test_whatever_form_firewallds_rule_has_it_opens_the_port(site: Site, rule: str) -> None:
    plan = cpu_plan(site, firewall="firewalld")
    lines = with_lines(for_plan(plan), ports="9090 812 /system.slice/cockpit.service cockpit-tls")
    port = 'services/cockpit.xml:  <port protocol="tcp" port="9090"/>'
    lines = with_firewall(lines, *firewalld(rule), f"service /usr/lib/firewalld/{port}")
    assert judge(plan, lines, NOW).findings == ()
    without = with_lines(for_plan(plan), ports="9090 812 /system.slice/c.service cockpit-tls")
    without = with_firewall(without, *firewalld("  services: ssh"))
    assert [f.code for f in judge(plan, without, NOW).findings] == ["firewall-cuts"]


def test_a_rule_of_the_other_firewall_opens_nothing(site: Site) -> None:
    plan = cpu_plan(site, firewall="ufw")
    lines = with_lines(for_plan(plan), ports="9100 812 /system.slice/x.service exporter")
    lines = with_firewall(lines, *firewalld("  ports: 9100/tcp"))
    assert [f.code for f in judge(plan, lines, NOW).findings] == ["firewall-cuts"]


def test_ssh_that_systemd_listens_for_on_another_port_is_not_shut_out(site: Site) -> None:
    """Its port may stand in an SSH configuration alone, which the plan does not read."""
    plan = cpu_plan(site)
    lines = with_lines(for_plan(plan), ports="2222 1 /init.scope systemd")
    assert [f.code for f in judge(plan, lines, NOW).findings] == ["firewall-cuts"]
    lines = with_firewall(
        lines,
        'listen LISTEN 0 4096 *:2222 *:* users:(("systemd",pid=1,fd=41))',
        'established 0 0 10.0.0.1:2222 10.0.0.9:5000 users:(("sshd",pid=8,fd=4))',
    )
    assert judge(plan, lines, NOW).findings == ()


def test_ipv6_clients_of_a_host_whose_ufw_takes_none_stop_it(site: Site) -> None:
    plan = cpu_plan(site, client_networks=["2001:db8::/32", "10.0.0.0/8"], firewall="ufw")
    lines = with_lines(for_plan(plan), firewall="ufw inactive")
    assert judge(plan, lines, NOW).findings == ()
    (finding,) = judge(plan, with_lines(lines, firewall="ipv6 no"), NOW).findings
    assert (finding.code, finding.severity) == ("firewall-ipv6", "error")
    assert "2001:db8::/32" in finding.needed
    assert "10.0.0.0/8" not in finding.needed
    plain = cpu_plan(site, client_networks=["10.0.0.0/8"], firewall="ufw")
    assert judge(plain, with_lines(lines, firewall="ipv6 no"), NOW).findings == ()


def test_a_firewall_that_lets_in_what_no_rule_names_is_told(site: Site) -> None:
    plan = cpu_plan(site, firewall="ufw")
    policy = 'policy "ACCEPT"'
    on, off = (with_firewall(for_plan(plan), line, policy) for line in (UFW_ON, "ufw inactive"))
    (finding,) = judge(plan, on, NOW).findings
    assert (finding.code, finding.remedy) == ("firewall-open", "ufw default deny incoming")
    # the deploy that switches it on sets it
    assert judge(plan, off, NOW).findings == ()
    zones = cpu_plan(site, firewall="firewalld")
    for state in ("running", "not running"):
        opened = (line.replace(": default", ": ACCEPT") for line in firewalld(state=state))
        lines = with_firewall(for_plan(zones), *opened)
        assert [f.code for f in judge(zones, lines, NOW).findings] == ["firewall-open"]


@pytest.mark.parametrize(
    "listener",
    [
        "22 1 /init.scope systemd",
        "2222 700 /system.slice/ssh.service sshd",
        "8009 900 /system.slice/fp8fleet-old.service python",
        "8080 901 /system.slice/nginx.service nginx",
        "80 901 /system.slice/nginx.service nginx",
    ],
)
def test_ssh_and_what_is_ours_is_not_shut_out(site: Site, listener: str) -> None:
    plan = cpu_plan(site)
    assert judge(plan, with_lines(for_plan(plan), ports=listener), NOW).findings == ()


def test_a_guarded_port_that_others_opened_is_told(gateway_site: Site) -> None:
    plan = gateway_site.plan().hosts["gpu-1"]
    wide = stored("allow any 8000 0.0.0.0/0 any 0.0.0.0/0 in")

    def codes(*lines: str, of: HostPlan = plan) -> list[str]:
        text = with_firewall(for_plan(of, UBUNTU, "gpu/h100-x8"), *lines)
        return [finding.code for finding in judge(of, text, NOW).findings]

    assert codes(UFW_ON) == []
    assert codes(UFW_ON, wide) == ["firewall-open"]
    assert codes(UFW_ON, stored("allow tcp 8000:8100 ::/0 any ::/0 in")) == ["firewall-open"]
    assert codes(UFW_ON, stored("deny any any 0.0.0.0/0 any 0.0.0.0/0 in"), wide) == []
    assert codes(UFW_ON, stored("allow tcp 8000 0.0.0.0/0 any 10.30.0.100 in")) == []
    gateway_site.serving["firewall"] = "unmanaged"
    unmanaged = gateway_site.plan().hosts["gpu-1"]
    assert codes("ufw inactive", of=unmanaged) == ["firewall-open"]


# Drivers that the run installs


def test_what_the_run_installs_itself_stops_nothing(site: Site) -> None:
    drivers = [{"name": "nvidia", "version": "580.95.05"}]
    for broken in ("driver-missing", "driver-mismatch", "nouveau"):
        judged = findings(plan_of(site), UBUNTU, H200, f"broken/{broken}")
        assert [f for f in judged.values() if f.severity == "error"], broken
        mended = findings(plan_of(site, drivers=drivers), UBUNTU, H200, f"broken/{broken}")
        assert [f for f in mended.values() if f.severity == "error"] == [], broken
        site.serving.pop("drivers")


def test_a_hung_driver_stops_a_host_whatever_is_asked_for(site: Site) -> None:
    plan = plan_of(site, drivers=[{"name": "nvidia", "version": "580.95.05"}])
    assert "driver-hung" in findings(plan, UBUNTU, H200, "broken/driver-hung")


def test_a_proxy_that_the_inventory_names_is_expected(site: Site) -> None:
    plan = plan_of(site, proxy="http://10.0.0.9:3128")
    assert findings(plan, UBUNTU, H200, "broken/proxy") == {}


@pytest.mark.parametrize(
    "line",
    [
        *("http_proxy=", 'export https_proxy=""', "proxy=_none_", "proxy ="),
        *('Acquire::http::Proxy "DIRECT";', 'Acquire::http::Proxy::mirror "DIRECT";'),
        "no_proxy=localhost",
    ],
)
def test_what_names_no_proxy_is_none(site: Site, line: str) -> None:
    plan = plan_of(site)
    assert codes_of(plan, with_lines(for_plan(plan, UBUNTU, H200), proxy=line)) == []


def selinux(
    site: Site, planned: str | None, now: str | None, configured: str | None, kernel: str = ""
) -> dict[str, str]:
    """Codes and severities of the findings about SELinux."""
    more: dict[str, Any] = {"selinux": planned} if planned else {}
    plan = plan_of(site, **more)
    lines = for_plan(plan)
    if kernel:
        lines = with_lines(lines, selinux=f"kernel {kernel}")
    if configured:
        lines = with_lines(lines, selinux=f"config {configured}")
    if now:
        lines = with_lines(lines, selinux=f"enforce {int(now == 'enforcing')}")
    found = judge(plan, lines, NOW).findings
    return {f.code: f.severity for f in found if f.code.startswith("selinux")}


@pytest.mark.parametrize(
    ("planned", "now", "configured", "kernel", "expected"),
    [
        ("enforcing", "enforcing", "enforcing", "", {}),
        ("enforcing", None, "disabled", "", {"selinux-disabled": "error"}),
        ("enforcing", None, "enforcing", "selinux=0", {"selinux-disabled": "error"}),
        ("permissive", None, None, "", {"selinux-disabled": "error"}),
        ("enforcing", "permissive", "permissive", "", {"selinux-permissive": "warning"}),
        ("permissive", "permissive", "permissive", "", {"selinux-permissive": "warning"}),
        (
            *("permissive", "enforcing", "enforcing", ""),
            {"selinux-permissive": "warning"},
        ),
        ("enforcing", "enforcing", "permissive", "", {"selinux-pending": "warning"}),
        ("enforcing", "enforcing", "enforcing", "enforcing=0", {"selinux-pending": "warning"}),
        ("unmanaged", None, "disabled", "", {}),
        (None, None, None, "", {}),
        ("unmanaged", "permissive", "permissive", "", {"selinux-permissive": "warning"}),
    ],
)
def test_selinuxs_mode_is_held_against_the_planned_one(
    site: Site,
    planned: str | None,
    now: str | None,
    configured: str | None,
    kernel: str,
    expected: dict[str, str],
) -> None:
    assert selinux(site, planned, now, configured, kernel) == expected


def test_selinux_that_is_off_is_told_with_what_turns_it_on(site: Site) -> None:
    plan = plan_of(site, selinux="enforcing")
    lines = with_lines(for_plan(plan), selinux="config disabled")
    finding = next(f for f in judge(plan, lines, NOW).findings if f.code == "selinux-disabled")
    for words in ("/.autorelabel", "reboot", 'selinux = "unmanaged"'):
        assert words in finding.remedy


# Codes, reports, ignoring


def test_every_code_is_used_by_a_check_and_every_check_has_a_code() -> None:
    folder = REPO / "fp8fleet/preflight"
    texts = [p.read_text() for p in folder.glob("*.py") if p.name != "codes.py"]
    used = set(re.findall(r'"([a-z0-9-]+)"', "\n".join(texts)))
    assert sorted(set(CODES) - used) == []


def test_the_documentations_table_is_the_codes() -> None:
    assert codes_table() in (REPO / "docs/preflight.md").read_text(encoding="utf-8")


def test_the_chinese_page_has_a_row_for_every_code_in_their_order() -> None:
    text = (REPO / "docs/zh/preflight.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (错误|警告) \| .+ \|$", text, flags=re.M)
    words = {"error": "错误", "warning": "警告"}
    assert rows == [(name, words[code.severity]) for name, code in CODES.items()]


def judged(site: Site, *recordings: str) -> Judgement:
    plan = plan_of(site)
    return judge(plan, for_plan(plan, UBUNTU, H200, *recordings), NOW)


def test_errors_stop_unless_ignored(site: Site) -> None:
    judgement = judged(site, "broken/ecc")
    assert {f.code for f in stopping(judgement.findings, frozenset())} == {
        "gpu-ecc-errors",
        "gpu-mig",
    }
    assert stopping(judgement.findings, frozenset({"gpu-ecc-errors", "gpu-mig"})) == []


def test_the_report_holds_findings_facts_and_what_was_ignored(site: Site, tmp_path: Path) -> None:
    ignored = frozenset({"gpu-mig"})
    path = write_report(
        "@fake/gpu 1",
        judged(site, "broken/ecc"),
        full=True,
        ignored=ignored,
        folder=tmp_path / "reports",
    )
    assert path.name == "preflight-_fake_gpu_1.json"
    report = json.loads(path.read_text())
    assert (report["mode"], report["passed"], report["ignore"]) == ("full", False, ["gpu-mig"])
    entries = {finding["code"]: finding for finding in report["findings"]}
    assert entries["gpu-mig"]["ignored"] is True
    assert entries["gpu-ecc-errors"]["severity"] == "error"
    assert set(entries["gpu-mig"]) == {
        *("code", "severity", "found", "needed", "remedy", "ignored")
    }
    facts = report["facts"]
    assert facts["system"]["os_id"] == "ubuntu"
    assert facts["accelerators"]["topology"]["links"] == [["X", "NV18"], ["NV18", "X"]]
    assert [p.name for p in (tmp_path / "reports").iterdir()] == [path.name]


def test_a_report_without_facts_is_a_report(tmp_path: Path, site: Site) -> None:
    judgement = judge(plan_of(site), [], NOW)
    path = write_report("a", judgement, full=False, ignored=frozenset(), folder=tmp_path)
    assert json.loads(path.read_text())["facts"] is None


def test_the_table_is_for_people(site: Site) -> None:
    judgement = judged(site, "broken/ecc")
    printed = Console(file=io.StringIO(), width=200)
    printed.print(table("gpu-1", judgement, frozenset({"gpu-mig"})))
    text = printed.file.getvalue()  # type: ignore[attr-defined]
    assert "preflight gpu-1: 1 error, 2 warnings, 1 ignored" in text
    for word in ("gpu-mig", "ignored", "3 uncorrected errors", "nvidia-persistenced"):
        assert word in text


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("smi", "Failed to open [/dev/nvidiactl]: permission denied"),
        ("proxy", "http_proxy=http://[fd00::1]:3128"),
        ("packages", "[bold]dpkg[/x] \\"),
    ],
)
def test_what_looks_like_markup_is_shown_as_it_is(site: Site, part: str, line: str) -> None:
    plan = plan_of(site)
    judgement = judge(plan, replaced(plan, UBUNTU, H200, **{part: [line]}), NOW)
    printed = Console(file=io.StringIO(), width=400)
    printed.print(table("gpu-[1]", judgement, frozenset()))
    text = printed.file.getvalue()  # type: ignore[attr-defined]
    assert line in text
    assert "gpu-[1]" in text


def test_errors_come_first(site: Site) -> None:
    severities = [f.severity for f in judged(site, "broken/ecc").findings]
    assert severities == sorted(severities, key=lambda severity: severity != "error")


def test_the_summary_counts(site: Site) -> None:
    assert summary("a", judged(site), frozenset()) == "preflight a: 0 errors, 0 warnings, 0 ignored"


def test_ignore_takes_codes_and_refuses_others() -> None:
    assert ignored_codes("gpu-mig, gpu-busy") == {"gpu-mig", "gpu-busy"}
    assert ignored_codes(None) == frozenset()
    message = refusal(lambda: ignored_codes("gpu-mg"))
    assert message == "--data ignore=gpu-mg: gpu-mg: no such code; did you mean gpu-mig?"


def test_switches_of_a_run_are_checked_before_it_connects(site: Site) -> None:
    assert "did you mean disk-short?" in site.refusal("ignore=disk-shrt")
    assert "expected one of fast, full" in site.refusal("preflight=slow")
    assert site.plan("preflight=full", "ignore=disk-short,gpu-mig")

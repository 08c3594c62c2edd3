"""Servers of an inventory on their devices: the plan, its units, preflight, what probe prints."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fleets import INSTANCE, Site, file_text, fp8fleet, lock_text, without
from matrices import ASCEND, ASCEND_DIES, BRIDGED, CPUS, CROSSED, LEGEND, NVSWITCH, matrix, near
from probes import NOW, facts, for_plan

from fp8fleet import probe_cli
from fp8fleet.cli import main
from fp8fleet.plan import HostPlan, InstancePlan
from fp8fleet.preflight.facts import HostFacts
from fp8fleet.preflight.findings import Finding
from fp8fleet.preflight.judge import judge
from fp8fleet.topology import load_topology, parse_topology

UNIT = "/etc/systemd/system/fp8fleet-main.service"
UBUNTU = "os/ubuntu-22.04"
FREE = without(INSTANCE, "devices")


def server(name: str = "main", port: int = 8000, size: int = 1, **keys: Any) -> dict[str, Any]:
    """A server that leaves its devices to the plan."""
    return {"name": name, "port": port, "tensor_parallel_size": size, **keys}


def declare(site: Site, text: str | None, *servers: dict[str, Any], **keys: Any) -> Site:
    """The site with a matrix of its hosts, or without."""
    site.serving |= {"accelerator": "a100-80g", "instances": list(servers), **keys}
    if text is not None:
        site.file("topology/a100.txt", text)
        site.serving["topology"] = "topology/a100.txt"
    return site


def by_name(plan: HostPlan) -> dict[str, InstancePlan]:
    return {instance.name: instance for instance in plan.instances}


# The plan


def test_a_server_without_devices_gets_a_bridged_pair_and_the_plan_says_why(site: Site) -> None:
    plan = declare(site, CROSSED, server(size=2)).host_plan()
    (instance,) = plan.instances
    assert instance.devices == (0, 3)
    assert instance.notes[0] == "devices 0,3: NV12, NUMA nodes 0-1"
    environment = file_text(plan, "/etc/fp8fleet/instances/main.env")
    assert 'CUDA_VISIBLE_DEVICES="0,3"' in environment
    assert plan.requirements.devices[0].indices == (0, 3)
    assert plan.requirements.devices[0].tensor_parallel == 2


def test_servers_of_several_sizes_share_a_board(site: Site) -> None:
    servers = [server("large", 8000, 4), server("left", 8001, 2), server("right", 8002, 2)]
    plan = by_name(declare(site, NVSWITCH, *servers, accelerator="h100-80g").host_plan())
    assert plan["large"].devices == (0, 1, 2, 3)
    assert plan["left"].devices == (4, 5)
    assert plan["right"].notes[0] == "devices 6,7: NV18, NUMA node 1"


def test_a_pipeline_takes_its_stages_times_its_ranks(site: Site) -> None:
    one = server(size=2, pipeline_parallel_size=2)
    (instance,) = declare(site, CROSSED, one).host_plan().instances
    assert instance.devices == (0, 3, 1, 2)


@pytest.mark.parametrize("stages", [0, "2", True, 1.5, None])
def test_stages_that_are_no_number_are_refused(site: Site, stages: object) -> None:
    one = server(pipeline_parallel_size=stages)
    assert "pipeline_parallel_size" in declare(site, BRIDGED, one).refusal()


def test_a_part_of_a_server_over_several_hosts_lists_its_devices(site: Site) -> None:
    one = server(size=4, pipeline_parallel_size=2, group="serving")
    assert "main: devices must be listed with group" in declare(site, BRIDGED, one).refusal()


def test_pairs_of_the_group_place_servers_without_a_matrix(site: Site) -> None:
    keys = {"device_count": 4, "device_pairs": [[0, 2], [1, 3]]}
    servers = [server("a", 8000, 2), server("b", 8001, 2)]
    plan = by_name(declare(site, None, *servers, **keys).host_plan())
    assert (plan["a"].devices, plan["b"].devices) == ((0, 2), (1, 3))
    assert plan["a"].notes == ("devices 0,2: linked",)


def test_a_number_of_devices_alone_is_enough_to_place(site: Site) -> None:
    plan = declare(site, None, server(size=2), device_count=2).host_plan()
    assert plan.instances[0].notes == ("devices 0,1: links not known",)
    assert plan.instances[0].binding is None


def test_a_matrix_is_stronger_than_the_groups_pairs(site: Site) -> None:
    keys = {"device_count": 4, "device_pairs": [[0, 1]]}
    plan = declare(site, CROSSED, server(size=2), **keys).host_plan()
    assert plan.instances[0].devices == (0, 3)


def test_fixed_devices_are_kept_with_a_warning_where_a_faster_set_is_free(site: Site) -> None:
    servers = [server(size=2, devices=[0, 1]), server("other", 8001)]
    plan = by_name(declare(site, CROSSED, *servers).host_plan())
    assert plan["main"].devices == (0, 1)
    assert plan["main"].notes[1] == (
        "warning: a faster set is free (devices 0,3: NV12, NUMA nodes 0-1): leave devices out, or"
        " name those"
    )
    assert plan["other"].devices == (2,)


def test_fixed_devices_that_cost_another_server_its_link_are_warned_of(site: Site) -> None:
    servers = [server("a", size=2, devices=[1, 2]), server("b", 8001, 2)]
    plan = by_name(declare(site, BRIDGED, *servers).host_plan())
    assert plan["a"].notes[1] == (
        "warning: without listed devices no server is slower and some are faster (a devices 0,1:"
        " NV12, NUMA node 0; b devices 2,3: NV12, NUMA node 1): leave devices out, or name those"
    )
    assert not any("warning" in note for note in plan["b"].notes)


def test_without_any_of_the_keys_nothing_changes(site: Site) -> None:
    (instance,) = site.host_plan().instances
    assert (instance.devices, instance.binding, instance.notes) == ((0,), None, ())
    assert "CPUAffinity" not in site.content(UNIT)


def test_the_command_shows_the_reason_and_json_has_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = declare(site, BRIDGED, server(size=2)).inventory()
    monkeypatch.chdir(site.root)
    assert main(["plan", path]) == 0
    assert "devices 0,1: NV12, NUMA node 0" in capsys.readouterr().out
    assert main(["plan", path, "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["hosts"]["gpu-1"]
    assert host["instances"][0]["devices"] == [0, 1]
    assert host["instances"][0]["notes"][0] == "devices 0,1: NV12, NUMA node 0"
    assert host["instances"][0]["binding"] == {"cpus": CPUS[0], "numa_node": 0}
    assert host["requirements"]["topology"]["links"][0] == ["X", "NV12", "SYS", "SYS"]


# CPUs and memory in the unit


def bound(site: Site, text: str, *servers: dict[str, Any], **keys: Any) -> dict[str, str]:
    """The keys of the unit of ``main`` that bind it."""
    unit = file_text(declare(site, text, *servers, **keys).host_plan(), UNIT)
    return dict(re.findall(r"^(CPUAffinity|NUMA\w+)=(.*)$", unit, flags=re.M))


def test_a_server_of_one_node_is_bound_to_its_cpus_and_prefers_its_memory(site: Site) -> None:
    servers = [server("first", 8001, 2), server(size=2)]
    assert bound(site, BRIDGED, *servers) == {
        "CPUAffinity": "52-103,156-207",
        "NUMAPolicy": "preferred",
        "NUMAMask": "1",
    }


def test_a_server_of_two_nodes_is_bound_to_the_cpus_of_both(site: Site) -> None:
    assert bound(site, BRIDGED, server(size=4)) == {
        "CPUAffinity": "0-207",
        "NUMAPolicy": "local",
    }


def test_fixed_devices_are_bound_too(site: Site) -> None:
    assert bound(site, BRIDGED, server(devices=[3]))["NUMAMask"] == "1"


def test_a_matrix_without_nodes_binds_cpus_alone(site: Site) -> None:
    text = matrix(2, lambda a, b: "PHB", ["0-63\tN/A\t\tN/A"] * 2)
    assert bound(site, text, server()) == {"CPUAffinity": "0-63", "NUMAPolicy": "local"}


def test_a_matrix_without_affinities_binds_nothing(site: Site) -> None:
    assert bound(site, matrix(2, lambda a, b: "PHB"), server()) == {}
    half = matrix(2, lambda a, b: "PHB", [near(0), "\t\t\t"])
    assert bound(site, half, server(size=2)) == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [("numa-bind", True), ("numa-bind-nodes", [0, 1]), ("numa-bind-cpus", ["0-3", "4-7"])],
)
def test_vllms_own_binding_is_left_alone(site: Site, option: str, value: object) -> None:
    assert bound(site, BRIDGED, server(options={option: value})) == {}


def test_npus_are_bound_by_their_engine(site: Site) -> None:
    plan = npu_site(site, ASCEND).host_plan()
    assert plan.instances[0].devices == (0, 1)
    assert plan.instances[0].notes == ("devices 0,1: HCCS",)
    assert plan.instances[0].binding is None
    assert 'ASCEND_RT_VISIBLE_DEVICES="0,1"' in file_text(plan, "/etc/fp8fleet/instances/main.env")


def npu_site(site: Site, text: str) -> Site:
    site.file("locks/engine.txt", lock_text(vllm_ascend="0.23.0", vllm="0.23.0"))
    keys = {"platform": "openeuler-22.03", "arch": "aarch64", "accelerator": "ascend-910b"}
    return declare(site, text, server(size=2), engine_release="vllm-ascend-0.23.0", **keys)


def test_a_change_of_the_matrix_changes_the_unit_alone(site: Site) -> None:
    before = declare(site, BRIDGED, server(size=2)).host_plan()
    moved = BRIDGED.replace(CPUS[0], "0-15")
    after = declare(site, moved, server(size=2)).host_plan()
    paths = {file.path for file in set(after.files) - set(before.files)}
    assert paths == {UNIT}


# What is refused


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"device_count": 0}, "device_count = 0: Input should be greater than or equal to 1"),
        ({"device_count": 17}, "device_count = 17: Input should be less than or equal to 16"),
        ({"device_count": 10**40}, "device_count"),
        ({"device_count": "8"}, "device_count = '8': Input should be a valid integer"),
        ({"device_count": 4.5}, "device_count = 4.5"),
        ({"device_count": True}, "device_count"),
        ({"topology": 8}, "topology = 8: Input should be a valid string"),
        ({"topology": ""}, "topology = ''"),
        ({"device_count": 2, "device_pairs": [[0, 2]]}, "device 2 is outside device_count = 2"),
        ({"device_count": 2, "device_pairs": [[1, 1]]}, "[1, 1] is one device, no pair"),
        ({"device_count": 2, "device_pairs": [[0]]}, "device_pairs.0"),
        ({"device_count": 2, "device_pairs": [[0, 1, 1]]}, "device_pairs.0"),
        ({"device_count": 2, "device_pairs": [[-1, 1]]}, "device_pairs.0"),
        ({"device_count": 2, "device_pairs": 3}, "device_pairs = 3"),
        ({"device_pairs": [[0, 1]]}, "device_count is needed with it"),
    ],
)
def test_keys_that_mean_nothing_are_refused(
    site: Site, keys: dict[str, Any], expected: str
) -> None:
    assert expected in declare(site, None, server(devices=[0]), **keys).refusal()


def test_devices_outside_the_declared_number_are_refused(site: Site) -> None:
    message = declare(site, None, server(devices=[4]), device_count=4).refusal()
    assert "instances: main: device 4 is outside device_count = 4 (0-3)" in message


def test_devices_outside_the_matrix_are_refused(site: Site) -> None:
    message = declare(site, BRIDGED, server(devices=[4])).refusal()
    assert "host gpu-1: instances: main: device 4 is not one of the 4 (0-3)" in message


def test_more_devices_than_there_are_are_refused(site: Site) -> None:
    message = declare(site, BRIDGED, server(size=4), server("b", 8001)).refusal()
    assert "need 5, and 4 of 4 devices are left" in message


def test_a_declared_number_that_the_matrix_lacks_is_refused(site: Site) -> None:
    message = declare(site, BRIDGED, server(), device_count=8).refusal()
    assert "topology = 'topology/a100.txt': has 4 devices, device_count is 8" in message


def test_a_server_needs_devices_where_nothing_is_declared(site: Site) -> None:
    message = declare(site, None, server()).refusal()
    assert "main: devices must list at least one, or device_count or topology must be" in message


@pytest.mark.parametrize("key", [{"device_count": 2}, {"topology": "topology/a.txt"}])
def test_a_cpu_host_has_no_devices(site: Site, key: dict[str, Any]) -> None:
    message = declare(site, None, FREE, accelerator="cpu", **key).refusal()
    assert f"{next(iter(key))}: a CPU host has no devices" in message


@pytest.mark.parametrize("text", [ASCEND, ASCEND_DIES])
def test_another_vendors_matrix_is_refused(site: Site, text: str) -> None:
    message = declare(site, text, server()).refusal()
    assert "a matrix of `npu-smi info -t topo`, accelerator is a100-80g" in message


def test_a_matrix_of_gpus_is_refused_on_npus(site: Site) -> None:
    assert "name the output of npu-smi" in npu_site(site, BRIDGED).refusal()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        (BRIDGED.partition("GPU3\tSYS")[0], "is not square"),
        (LEGEND, "has no row of devices"),
        ("Failed to run topology matrix\n", "holds an error message"),
    ],
)
def test_a_broken_matrix_is_refused_by_host_and_file(site: Site, text: str, expected: str) -> None:
    message = declare(site, text, server()).refusal()
    assert "host gpu-1: " in message
    assert f"topology/a100.txt: {expected}" in message


def test_a_missing_matrix_is_refused_by_its_name(site: Site) -> None:
    message = declare(site, None, server(), topology="topology/none.txt").refusal()
    assert "topology/none.txt: cannot be read: " in message


def test_a_server_on_a_device_that_mig_splits_is_refused(site: Site) -> None:
    message = declare(site, BRIDGED + "MIG enabled: GPU2\n", server(devices=[2])).refusal()
    assert "instances: main: device 2 is split by MIG and servers use whole devices" in message


def test_the_command_refuses_with_exit_code_2_and_one_line(site: Site) -> None:
    path = declare(site, BRIDGED[:200], server()).inventory()
    ran = fp8fleet("plan", path, cwd=site.root)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1


# Preflight


def findings(plan: HostPlan, *recordings: str, change: Any = None) -> dict[str, Finding]:
    lines = for_plan(plan, UBUNTU, "gpu/a100-x4", *recordings)
    if change:
        lines = [change(line) for line in lines]
    return {finding.code: finding for finding in judge(plan, lines, NOW).findings}


def test_a_host_with_the_declared_matrix_has_no_finding(site: Site) -> None:
    assert findings(declare(site, BRIDGED, server(size=2)).host_plan()) == {}


def test_links_that_differ_are_named_with_both_classes(site: Site) -> None:
    found = findings(declare(site, CROSSED, server(size=2)).host_plan())["topology-differs"]
    assert found.severity == "error"
    assert found.found == (
        "devices 0-1: NV12, declared SYS, devices 0-3: SYS, declared NV12,"
        " devices 1-2: SYS, declared NV12 and 3 more"
    )


def test_a_bridge_that_has_failed_differs(site: Site) -> None:
    plan = declare(site, BRIDGED, server(size=2)).host_plan()
    found = findings(plan, change=lambda line: line.replace("NV12", "SYS"))
    assert "devices 2-3: SYS, declared NV12" in found["topology-differs"].found
    assert "nvlink-missing" in found


def test_cpus_that_differ_are_named(site: Site) -> None:
    plan = declare(site, BRIDGED.replace(CPUS[1], "64-127"), server(size=2)).host_plan()
    assert findings(plan)["topology-differs"].found.startswith(
        "device 2: CPUs 52-103,156-207 of NUMA node 1, declared CPUs 64-127 of NUMA node 1"
    )


def test_declared_pairs_are_compared_with_direct_links(site: Site) -> None:
    keys = {"device_count": 4, "device_pairs": [[0, 1], [2, 3]]}
    assert findings(declare(site, None, server(size=2), **keys).host_plan()) == {}
    keys = {"device_count": 4, "device_pairs": [[0, 2]]}
    found = findings(declare(site, None, server(size=2), **keys).host_plan())
    assert found["topology-differs"].found == "devices 0-2: SYS, declared linked"


def test_fewer_devices_than_declared_are_an_error(site: Site) -> None:
    text = matrix(6, lambda a, b: "NV12" if a // 2 == b // 2 else "SYS", [near(0)] * 6)
    found = findings(declare(site, text, server(size=2)).host_plan())
    assert set(found) == {"gpu-fewer"}
    assert found["gpu-fewer"].severity == "error"
    assert found["gpu-fewer"].found == "4 nvidia devices on the PCI bus"
    assert found["gpu-fewer"].needed.startswith("6, ")


def test_devices_that_a_server_uses_and_the_host_lacks_are_one_finding(site: Site) -> None:
    found = findings(declare(site, None, server(devices=[7]), device_count=8).host_plan())
    assert set(found) == {"gpu-missing"}


def test_a_host_with_more_devices_than_declared_is_fine(site: Site) -> None:
    assert findings(declare(site, None, server(size=2), device_count=2).host_plan()) == {}


def test_a_matrix_that_the_host_does_not_print_is_a_warning(site: Site) -> None:
    plan = declare(site, BRIDGED, server(size=2)).host_plan()
    found = findings(plan, change=lambda line: re.sub(r"^ (GPU\d)\t.*", r" \1", line))
    assert (set(found), found["topology-unread"].severity) == ({"topology-unread"}, "warning")


# What probe writes


def pasted(lines: list[str]) -> dict[str, Any]:
    nodes = ast.parse("\n".join(lines)).body
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def probe(monkeypatch: pytest.MonkeyPatch, found: dict[str, HostFacts], *arguments: str) -> int:
    monkeypatch.setattr(probe_cli, "read_hosts", lambda inventory, names: (found, []))
    return main(["probe", "root@10.20.0.11", *arguments])


def test_probe_writes_a_matrix_that_the_plan_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {f"gpu {i}": facts(UBUNTU, "gpu/h100-x8") for i in (1, 2)}
    found["a100"] = facts(UBUNTU, "gpu/a100-x4")
    assert probe(monkeypatch, found, "--topology", "topology") == 0
    blocks = capsys.readouterr().out.split("\n\n")
    keys = [pasted(block.splitlines()) for block in blocks if block.strip()]
    assert [(k["device_count"], k["topology"]) for k in keys] == [
        (8, "topology/gpu_1.txt"),
        (4, "topology/a100.txt"),
    ]
    assert sorted(path.name for path in (tmp_path / "topology").iterdir()) == [
        "a100.txt",
        "gpu_1.txt",
    ]
    written = load_topology(tmp_path / "topology/gpu_1.txt")
    assert written == found["gpu 1"].accelerators.topology
    assert "\x1b" not in (tmp_path / "topology/gpu_1.txt").read_text()


def test_probe_names_devices_that_mig_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = facts(UBUNTU, "gpu/h200-x2", "broken/ecc")
    assert [device.mig for device in split.accelerators.devices].count(True) == 1
    assert probe(monkeypatch, {"a": split}, "--topology", str(tmp_path)) == 0
    written = load_topology(tmp_path / "a.txt")
    assert [d.mig for d in written.devices] == [d.mig for d in split.accelerators.devices]


def test_hosts_with_other_links_are_another_kind() -> None:
    bridged = facts(UBUNTU, "gpu/a100-x4")
    other = parse_topology(CROSSED)
    cards = dataclasses.replace(bridged.accelerators, topology=other)
    lines = list(
        probe_cli.group_data({"a": bridged, "b": dataclasses.replace(bridged, accelerators=cards)})
    )
    assert [line for line in lines if line.startswith("device_pairs")] == [
        "device_pairs = [[0, 1], [2, 3]]",
        "device_pairs = [[0, 3], [1, 2]]",
    ]


def test_a_board_that_links_all_has_no_pairs_to_paste() -> None:
    keys = pasted(list(probe_cli.group_data({"a": facts(UBUNTU, "gpu/h100-x8")})))
    assert keys["device_count"] == 8
    assert "device_pairs" not in keys


def test_a_folder_that_cannot_be_written_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    found = {"a": facts(UBUNTU, "gpu/a100-x4")}
    assert probe(monkeypatch, found, "--topology", str(tmp_path / "file/x")) == 2
    assert "cannot be written" in capsys.readouterr().err

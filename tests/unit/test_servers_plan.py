"""Several servers of a host, and one server over several hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fleets import DIGEST, GATEWAY, INSTANCE, Site, file_text, fp8fleet, lock_text

from fp8fleet import node
from fp8fleet.inventory import load_fleet
from fp8fleet.plan import FirewallRule, HostPlan, InstancePlan, NodePlan
from fp8fleet.planner import make_plan

BIG: dict[str, Any] = {
    "name": "big",
    "port": 8000,
    "devices": [0, 1],
    "group": "serving",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
}
UNIT = "/etc/systemd/system/fp8fleet-big.service"
OPTIONS = "/etc/fp8fleet/instances/big.yaml"
VARIABLES = "/etc/fp8fleet/instances/big.env"


@pytest.fixture
def pair(site: Site) -> Site:
    """One server over two hosts."""
    site.hosts = {
        "gpu-1": {"service_address": "10.30.0.1"},
        "gpu-2": {"service_address": "10.30.0.2"},
    }
    site.serving["instances"] = [BIG]
    return site


def server(name: str, port: int, devices: list[int], **options: Any) -> dict[str, Any]:
    written = {key.replace("_", "-"): value for key, value in options.items()}
    return {"name": name, "port": port, "devices": devices, "options": written}


def node_of(plan: HostPlan) -> NodePlan:
    (instance,) = plan.instances
    assert instance.node
    return instance.node


# Servers that share a device


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((0.6, 0.5), "a (0.6) and b (0.5) share device 1 and take 1.1 of its memory"),
        ((0.3, None), "a (0.3) and b (0.92, the default) share device 1 and take 1.22"),
        ((None, None), "a (0.92, the default) and b (0.92, the default) share device 1"),
    ],
)
def test_servers_that_take_more_than_a_device_has_are_refused(
    site: Site, shares: tuple[float | None, float | None], told: str
) -> None:
    first, second = ({"gpu_memory_utilization": share} if share else {} for share in shares)
    site.serving["instances"] = [
        server("a", 8000, [0, 1], **first),
        server("b", 8001, [1], **second),
    ]
    message = site.refusal()
    assert told in message
    assert "set gpu-memory-utilization in the options of each, such as 0.47" in message


def test_the_default_share_is_the_releases_own(site: Site) -> None:
    site.serving |= {"engine_release": "0.19.1", "engine_python": "3.12"}
    site.file("locks/engine.txt", lock_text(vllm="0.19.1", pydantic="2.12.5"))
    site.serving["instances"] = [server("a", 8000, [0]), server("b", 8001, [0])]
    assert "a (0.9, the default) and b (0.9, the default) share device 0" in site.refusal()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.1, 0.9), (0.3, 0.3, 0.4)])
def test_servers_may_share_the_whole_of_a_device(site: Site, shares: tuple[float, ...]) -> None:
    site.serving["instances"] = [
        server(f"s{n}", 8000 + n, [0], gpu_memory_utilization=share)
        for n, share in enumerate(shares)
    ]
    assert len(site.host_plan().instances) == len(shares)


def test_servers_that_leave_a_device_nothing_are_warned_of(site: Site) -> None:
    site.serving["instances"] = [
        server(name, 8000 + n, [0], gpu_memory_utilization=0.5) for n, name in enumerate("ab")
    ]
    notes = "\n".join(site.host_plan().notes)
    assert "a and b share a device and take 1 of its memory: a little belongs to no server" in notes
    assert "kv-cache-memory-bytes in the options of each is safer" in notes


def test_servers_that_share_a_device_as_advised_have_no_note(site: Site) -> None:
    size = {"gpu_memory_utilization": 0.47, "kv_cache_memory_bytes": 1 << 30}
    site.serving["instances"] = [server(name, 8000 + n, [0], **size) for n, name in enumerate("ab")]
    assert not [note for note in site.host_plan().notes if "share a device" in note]


def test_servers_on_devices_of_their_own_share_nothing(site: Site) -> None:
    site.serving["instances"] = [server("a", 8000, [0]), server("b", 8001, [1])]
    assert len(site.host_plan().instances) == 2


def test_servers_of_a_host_write_caches_of_their_own_and_share_what_is_locked(site: Site) -> None:
    site.serving["instances"] = [server("a", 8000, [0]), server("b", 8001, [1])]
    plan = site.host_plan()
    texts = [file_text(plan, f"/etc/fp8fleet/instances/{name}.env") for name in "ab"]
    first, second = (set(text.splitlines()) for text in texts)
    names = {line.partition("=")[0] for line in first ^ second}
    assert names == {"VLLM_CACHE_ROOT", "CUDA_VISIBLE_DEVICES"}


def test_a_pipeline_within_a_host_is_an_option(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "devices": [0, 1], "pipeline_parallel_size": 2}]
    (instance,) = site.host_plan().instances
    assert instance.options["pipeline-parallel-size"] == 2
    assert instance.options["tensor-parallel-size"] == 1
    assert instance.node is None


def test_a_host_needs_a_device_for_each_rank_of_its_server(site: Site) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    site.serving["instances"] = [{**INSTANCE, "devices": [0, 1], **sizes}]
    assert "tensor_parallel_size 2 x pipeline_parallel_size 2 needs as many" in site.refusal()


# One server over several hosts


def test_the_first_host_of_the_group_is_the_head_and_the_others_follow(pair: Site) -> None:
    plan = pair.plan()
    common = {
        "tensor-parallel-size": 2,
        "pipeline-parallel-size": 2,
        "nnodes": 2,
        "master-addr": "10.30.0.1",
        "master-port": 29501,
        "distributed-executor-backend": "mp",
    }
    for rank, name in enumerate(("gpu-1", "gpu-2")):
        (instance,) = plan.hosts[name].instances
        assert common.items() <= instance.options.items()
        assert instance.options["node-rank"] == rank
        assert instance.options.get("headless", False) is bool(rank)
        assert instance.has_api is not bool(rank)


def test_a_node_is_started_with_the_others_and_talks_over_its_service_address(pair: Site) -> None:
    plan = pair.plan().hosts["gpu-2"]
    digest = node_of(plan).digest
    (start,) = (
        line for line in file_text(plan, UNIT).splitlines() if line.startswith("ExecStart=")
    )
    assert (
        f"/opt/fp8fleet/bin/vllm-node.py --rank 1 --addresses 10.30.0.1,10.30.0.2 --port 29502"
        f" --plan {digest} --drain 120 -- /opt/fp8fleet/engines/"
    ) in start
    assert start.endswith(f" --config {OPTIONS}")
    assert re.search(r'^VLLM_HOST_IP="?10[.]30[.]0[.]2"?$', file_text(plan, VARIABLES), re.M)
    program = file_text(plan, "/opt/fp8fleet/bin/vllm-node.py")
    assert program == Path(node.__file__).read_text()


def test_a_host_without_such_a_server_has_no_program_for_it(site: Site) -> None:
    assert not [file for file in site.host_plan().files if "vllm-node" in file.path]


def test_a_pipeline_over_hosts_is_told_to_be_unproven(pair: Site) -> None:
    (head,) = pair.host_plan().instances
    assert any("a pipeline over hosts was never run on GPUs" in note for note in head.notes)
    pair.serving["instances"] = [{**BIG, "tensor_parallel_size": 4, "pipeline_parallel_size": 1}]
    (head,) = pair.host_plan().instances
    assert not any("pipeline" in note for note in head.notes)


def test_only_the_head_is_asked_by_clients(pair: Site) -> None:
    plan = pair.plan()
    head = plan.hosts["gpu-1"].proxy
    assert head
    assert head.upstreams == ("127.0.0.1:8000",)
    assert plan.hosts["gpu-2"].proxy is None
    pair.gateways = {"gw-1": GATEWAY}
    plan = pair.plan()
    gateway = plan.hosts["gw-1"].proxy
    assert gateway
    assert gateway.upstreams == ("10.30.0.1:8000",)
    assert FirewallRule(8000, "10.30.0.100") in plan.hosts["gpu-1"].firewall.rules
    assert FirewallRule(8000, "10.30.0.100") not in plan.hosts["gpu-2"].firewall.rules


def test_nodes_let_each_other_in_and_nobody_else(pair: Site) -> None:
    pair.hosts["gpu-3"] = {"service_address": "10.30.0.3"}
    pair.serving["instances"] = [{**BIG, "pipeline_parallel_size": 3}]
    ranges = [rule for rule in pair.plan().hosts["gpu-1"].firewall.rules if rule.last]
    assert ranges == [
        FirewallRule(1024, "10.30.0.2", 65535),
        FirewallRule(1024, "10.30.0.3", 65535),
    ]


def test_preflight_wants_the_heads_ports_free(pair: Site) -> None:
    plan = pair.plan()
    assert {port.port for port in plan.hosts["gpu-1"].requirements.ports} >= {8000, 29501, 29502}
    assert plan.hosts["gpu-2"].requirements.ports == ()


@pytest.mark.parametrize(
    "change",
    [
        {"drain_timeout": 60},
        {"nofile_limit": 4096},
        {"engine_environment": {"NCCL_DEBUG": "INFO"}},
    ],
)
def test_a_change_of_one_node_restarts_all(pair: Site, change: dict[str, Any]) -> None:
    before = pair.plan().hosts
    pair.hosts["gpu-2"] |= change
    after = pair.plan().hosts
    for name in ("gpu-1", "gpu-2"):
        assert file_text(before[name], UNIT) != file_text(after[name], UNIT)
    assert node_of(after["gpu-1"]).digest == node_of(after["gpu-2"]).digest


def test_a_change_that_no_node_is_made_of_restarts_none(pair: Site) -> None:
    before = pair.plan().hosts["gpu-1"]
    pair.hosts["gpu-2"] |= {"nginx_body_size": "1m", "start_timeout": 1800}
    assert file_text(before, UNIT) == pair.content(UNIT)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"group": "h800"}, "host gpu-1 is not in the group 'h800' that its server names"),
        ({"tensor_parallel_size": 8}, "= 16, but the 2 hosts of group serving have 4 devices"),
        ({"pipeline_parallel_size": 1}, "both must be equal, such as 2 x 2"),
        (
            {"options": {"distributed-executor-backend": "ray"}},
            "option distributed-executor-backend 'ray': a server over a group runs without Ray",
        ),
        ({"options": {"data-parallel-size": 2}}, "option 'data-parallel-size': not with group"),
        ({"options": {"nnodes": 2}}, "option 'nnodes' is set from the instance's group"),
        ({"port": 29502}, "port 29502 is used twice"),
        ({"master_port": 65535}, "master_port"),
        ({"group": "a b"}, "group"),
    ],
)
def test_a_server_that_cannot_be_one_is_refused(
    pair: Site, change: dict[str, Any], told: str
) -> None:
    pair.serving["instances"] = [{**BIG, **change}]
    assert told in pair.refusal()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"service_address": None}, "host gpu-2: service_address is not set: nodes need it"),
        ({"service_address": "10.30.0.1"}, "a service_address of its own is needed"),
        ({"workload": "chat"}, "on gpu-2, and not set on the first host: give all of them"),
        (
            {"sampling": {"temperature": 0.2}},
            "differ: override-generation-config would be {'temperature': 0.2} on gpu-2",
        ),
        ({"accelerator": "a100-80g"}, "differ: one accelerator is needed"),
        ({"served_model_name": "other"}, "differ: one served_model_name is needed"),
        ({"engine_requirements": "locks/more.txt"}, "differ: one engine_release and"),
        ({"model_manifest": "models/more/manifest.toml"}, "differ: one model_manifest is needed"),
        ({"instances": [INSTANCE]}, "host gpu-2 of group serving does not declare this server"),
        ({"instances": [{**BIG, "port": 8001}]}, "differ: the same keys of the server"),
        ({"instances": [{**BIG, "devices": [0]}]}, "differ: the same keys of the server"),
    ],
)
def test_hosts_that_do_not_agree_on_their_server_are_refused(
    pair: Site, change: dict[str, Any], told: str
) -> None:
    pair.file("locks/more.txt", lock_text(vllm="0.33.0", pydantic="2.12.4"))
    manifest = (pair.root / "models/tiny/manifest.toml").read_text()
    pair.file("models/more/manifest.toml", manifest.replace(DIGEST, DIGEST[::-1]))
    pair.hosts["gpu-2"] |= change
    message = pair.refusal()
    assert "instances: big: " in message
    assert told in message


@pytest.mark.parametrize("second", [{}, {"workload": "documents"}])
def test_one_server_is_not_made_for_two_workloads(pair: Site, second: dict[str, Any]) -> None:
    pair.hosts["gpu-1"]["workload"] = "chat"
    pair.hosts["gpu-2"] |= second
    message = pair.refusal()
    assert "give all of them what it comes from (workload, sampling" in message
    pair.hosts["gpu-2"]["workload"] = "chat"
    assert node_of(pair.plan().hosts["gpu-2"]).rank == 1


@pytest.mark.parametrize("address", ["10.30.0.2", "::ffff:10.30.0.2"])
def test_two_followers_with_one_address_are_refused(pair: Site, address: str) -> None:
    pair.hosts["gpu-3"] = {"service_address": address}
    pair.serving["instances"] = [{**BIG, "pipeline_parallel_size": 3}]
    assert "hosts gpu-2 and gpu-3 of group serving have one service_address" in pair.refusal()


def test_the_head_is_the_first_of_the_group_wherever_else_its_hosts_are_named(pair: Site) -> None:
    one, two = ((name, pair.hosts[name]) for name in ("gpu-1", "gpu-2"))
    text = f"rack = ['gpu-2']\nserving = {[one, two]!r}\nlate = ['gpu-2', 'gpu-1']\n"
    plan = make_plan(load_fleet(pair.inventory(text)), pair.root)
    assert list(plan.hosts) == ["gpu-2", "gpu-1"]
    assert node_of(plan.hosts["gpu-2"]).hosts == ("gpu-1", "gpu-2")
    assert node_of(plan.hosts["gpu-1"]).rank == 0


def test_devices_of_a_node_may_have_other_numbers(pair: Site) -> None:
    pair.hosts["gpu-2"]["instances"] = [{**BIG, "devices": [6, 7]}]
    plan = pair.plan().hosts
    assert plan["gpu-2"].instances[0].devices == (6, 7)
    assert node_of(plan["gpu-1"]).hosts == ("gpu-1", "gpu-2")


def test_a_group_of_one_host_is_refused(pair: Site) -> None:
    del pair.hosts["gpu-2"]
    assert "group serving has one host: leave group out" in pair.refusal()


def test_a_release_without_the_mode_is_refused_and_ray_is_named(pair: Site) -> None:
    pair.file("locks/engine.txt", lock_text(vllm="0.6.3", pydantic="2.12.5"))
    pair.serving |= {"engine_release": "0.6.3", "engine_python": "3.11"}
    message = pair.refusal()
    assert "vLLM 0.6.3 has no multi-node mode (--nnodes), and servers over Ray are not" in message


def test_a_host_may_have_a_server_of_its_own_beside_its_node(pair: Site) -> None:
    pair.serving["instances"] = [BIG, {**INSTANCE, "port": 8001, "devices": [2]}]
    plan = pair.plan().hosts
    proxy = plan["gpu-2"].proxy
    assert proxy
    assert proxy.upstreams == ("127.0.0.1:8001",)
    servers: tuple[InstancePlan, ...] = plan["gpu-2"].servers
    assert [instance.name for instance in servers] == ["main"]


def test_a_node_without_the_api_is_shown_as_a_node_and_the_capacity_once(pair: Site) -> None:
    ran = fp8fleet("plan", pair.inventory(), cwd=pair.root)
    first, second = ran.out.split("gpu-2  ")
    assert "  server big         http://" in first
    assert "  node of big        devices" in second
    assert (first.count("KV cache"), second.count("KV cache")) == (1, 0)
    assert "http://" not in second.partition("node of big")[2].partition("firewall")[0]

"""One server over two hosts: it serves, a second run changes nothing, a lost node comes back."""

from __future__ import annotations

import pytest
from clients import complete
from fleet import MAIN, OTHER, Fleet, command, ssh, until, url

from lab.site import named

pytestmark = [pytest.mark.lab, pytest.mark.long]
UNIT = "fp8fleet-big.service"


def inventory(fleet: Fleet, **options: object) -> str:
    """Two hosts without a gateway, with one server of two tensor-parallel ranks."""
    plain = {"dtype": "bfloat16", "max-model-len": 1024, "max-num-seqs": 16, "enforce-eager": True}
    server = {
        "name": "big",
        "port": 8000,
        "group": "serving",
        "tensor_parallel_size": 2,
        "options": plain | {"kv-cache-memory-bytes": 64 * 1024 * 1024} | options,
    }
    hosts = {name: {"service_address": named(name).address} for name in (MAIN, OTHER)}
    return fleet.inventory(hosts, instances=[server], engine_environment={}, warm_up_concurrency=2)


def serves() -> bool:
    """Whether a completion comes through the head's proxy."""
    try:
        return complete(url(MAIN)).status_code == 200
    except OSError:
        return False


def kill_vllm(host: str) -> None:
    """SIGKILL for the vLLM of a host's node, and for nothing else of the unit."""
    ssh(host, f"kill -9 $(pgrep -P $(systemctl show -P MainPID {UNIT}))")


def test_one_server_over_two_hosts_serves_and_outlives_the_loss_of_any_node(fleet: Fleet) -> None:
    for name in (MAIN, OTHER):
        command("fp8fleet", "lab", "destroy", name)
        assert command("fp8fleet", "lab", "create", name).code == 0

    done = fleet.full(inventory(fleet))
    assert done.code == 0, done.text
    assert complete(url(MAIN)).status_code == 200
    assert ssh(OTHER, f"systemctl is-active {UNIT}") == "active"
    assert ssh(OTHER, "command -v nginx || echo none") == "none"
    again = fleet.full(inventory(fleet))
    assert (again.code, again.changed) == (0, []), again.text

    alone = fleet.full(inventory(fleet, **{"max-num-seqs": 8}), "--limit", MAIN)
    assert alone.code == 1
    assert f"{OTHER} of group serving failed or is left out of this run" in alone.text
    assert serves()

    for host in (OTHER, MAIN):
        kill_vllm(host)
        until(lambda: not serves(), f"the server ends without the node on {host}")
        until(serves, f"the server is back with the node on {host}")

    ssh(OTHER, f"systemctl restart {UNIT}")
    until(serves, "the server is back after a restart of the follower's unit")
    settled = fleet.full(inventory(fleet))
    assert settled.code == 0, settled.text

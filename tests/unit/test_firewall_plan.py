"""The firewall of a plan: who may connect to which port of a host."""

from __future__ import annotations

import pytest
from fleets import GATEWAY, REPO, Site, refusal

from fp8fleet.inventory import load_fleet
from fp8fleet.plan import FirewallRule, FleetPlan
from fp8fleet.planner import make_plan

Rules = list[tuple[int, str | None]]


def rules(plan: FleetPlan, host: str) -> Rules:
    return [(rule.port, rule.source) for rule in plan.hosts[host].firewall.rules]


def test_each_family_has_its_own_firewall_by_default(prod: FleetPlan) -> None:
    assert prod.hosts["gpu-h100-1"].firewall.tool == "ufw"
    assert prod.hosts["gw-1"].firewall.tool == "ufw"
    assert prod.hosts["gpu-kylin-1"].firewall.packages == ("firewalld",)


@pytest.mark.parametrize("asked", ["ufw", "firewalld", "unmanaged"])
def test_the_inventory_may_ask_for_another(site: Site, asked: str) -> None:
    site.serving["firewall"] = asked
    packages = {"ufw": ("ufw",), "firewalld": ("firewalld", "netbase"), "unmanaged": ()}
    firewall = site.host_plan().firewall
    assert (firewall.tool, firewall.packages) == (asked, packages[asked])


def test_everybody_reaches_the_proxy_of_a_single_host_and_nobody_its_servers(site: Site) -> None:
    assert rules(site.plan(), "gpu-1") == [(8080, None)]


def test_client_networks_alone_reach_the_proxy(site: Site) -> None:
    site.serving["client_networks"] = ["10.0.0.0/8", "fd00::/8", "192.0.2.7/32"]
    expected: Rules = [(8080, "10.0.0.0/8"), (8080, "fd00::/8"), (8080, "192.0.2.7")]
    assert rules(site.plan(), "gpu-1") == expected


def test_servers_behind_gateways_let_in_their_addresses_only(gateway_site: Site) -> None:
    gateway_site.gateways["gw-2"] = {**GATEWAY, "service_address": "fd00::9"}
    plan = gateway_site.plan()
    assert rules(plan, "gpu-1") == [(8000, "10.30.0.100"), (8000, "fd00::9")]
    assert rules(plan, "gw-1") == [(8080, None)]
    assert plan.hosts["gpu-1"].firewall.guarded == (8000,)
    assert plan.hosts["gw-1"].firewall.guarded == ()


def test_a_gateway_without_a_service_address_is_refused_unless_nobody_needs_it(
    gateway_site: Site,
) -> None:
    gateway_site.gateways = {"gw-1": {"platform": "ubuntu-22.04", "conda_frontend_path": "/c/c"}}
    message = refusal(gateway_site.plan)
    assert "host gpu-1: gateway gw-1: service_address is not set: the firewall" in message
    gateway_site.serving["firewall"] = "unmanaged"
    assert rules(gateway_site.plan(), "gpu-1") == []


def test_peer_ports_are_for_the_other_hosts_of_the_model(gateway_site: Site) -> None:
    gateway_site.file("models/tiny/model.torrent", "read on the hosts only")
    gateway_site.hosts["gpu-1"]["storage_address"] = "10.40.0.1"
    gateway_site.hosts["gpu-2"] |= {"storage_address": "fd00::2", "peer_port": 7000}
    plan = gateway_site.plan()
    assert rules(plan, "gpu-1") == [(8000, "10.30.0.100"), (6881, "fd00::2")]
    assert rules(plan, "gpu-2") == [(8000, "10.30.0.100"), (7000, "10.40.0.1")]


def test_the_port_that_ssh_connects_to_is_planned(site: Site) -> None:
    assert site.host_plan().firewall.ssh_port == 22
    site.hosts["gpu-1"]["ssh_port"] = 2222
    assert site.host_plan().firewall.ssh_port == 2222


@pytest.mark.parametrize(
    ("ssh_port", "keys", "user"),
    [
        (22, {"nginx_listen": 22}, "nginx_listen"),
        (None, {"nginx_listen": 22}, "nginx_listen"),
        (8089, {}, "nginx_status_port"),
        (8000, {}, "instance main"),
        (6881, {"storage_address": "10.40.0.1"}, "peer_port"),
    ],
)
def test_ssh_keeps_its_port(
    site: Site, ssh_port: int | None, keys: dict[str, object], user: str
) -> None:
    site.hosts["gpu-1"] = {**keys, **({"ssh_port": ssh_port} if ssh_port else {})}
    message = f"host gpu-1: {user}: port {ssh_port or 22} is SSH's (ssh_port): choose another"
    assert message in site.refusal()


def test_one_rule_stands_once(site: Site) -> None:
    site.serving["client_networks"] = ["10.0.0.0/8", "10.0.0.0/8"]
    assert site.host_plan().firewall.rules == (FirewallRule(8080, "10.0.0.0/8"),)


@pytest.mark.parametrize("value", ["10.0.0.1/8", "lan", "10.0.0.0/33", ""])
def test_what_is_no_network_is_refused(site: Site, value: str) -> None:
    site.serving["client_networks"] = [value]
    message = refusal(site.fleet)
    assert "client_networks" in message
    assert "10.0.0.0/8 or an address is needed" in message


def test_the_plan_of_the_example_is_complete() -> None:
    plan = make_plan(load_fleet(str(REPO / "inventories/prod.py")), REPO)
    assert rules(plan, "gpu-h100-1") == [(8000, "10.30.0.2"), (8001, "10.30.0.2")]

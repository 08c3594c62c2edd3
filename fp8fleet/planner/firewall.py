"""Who may connect to a host: clients to the proxy, gateways to servers, the fleet to its peers."""

from __future__ import annotations

from collections.abc import Iterator

from fp8fleet.catalog import Platform
from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.plan import FirewallPlan, FirewallRule, ModelPlan, ProxyPlan
from fp8fleet.planner.serving import Serving

TOOLS = {"apt": "ufw", "dnf": "firewalld"}
"""The firewall that a family of distributions brings."""

PACKAGES: dict[str, tuple[str, ...]] = {
    "ufw": ("ufw",),
    # without /etc/protocols, which minimal systems lack, firewalld does not start
    "firewalld": ("firewalld", "netbase"),
}
"""What each comes in on apt systems; elsewhere its own package has all."""


def firewall_packages(tool: str, family: str) -> tuple[str, ...]:
    """Packages of a firewall, by its name and the family of distributions."""
    if tool == "unmanaged":
        return ()
    return PACKAGES[tool] if family == "apt" else (tool,)


def firewall_plan(
    fleet: Fleet,
    host: FleetHost,
    platform: Platform,
    own: Serving | None,
    model: ModelPlan | None,
    proxy: ProxyPlan | None,
) -> FirewallPlan:
    """Which firewall the host has, and what it lets in.

    Raises:
        OperatorError: a gateway has no address that could be let in.
    """
    asked = host.spec.firewall
    tool = TOOLS[platform.family] if asked == "auto" else asked
    rules: list[FirewallRule] = []
    if proxy:
        clients = host.spec.client_networks or (None,)
        rules += [FirewallRule(proxy.listen, source) for source in clients]
    if own and not host.is_gateway:
        sources = list(_gateway_addresses(fleet, required=tool != "unmanaged"))
        served = [i for i in own.instances if i.has_api]
        rules += [FirewallRule(i.port, source) for i in served for source in sources]
        nodes = [i.node for i in own.instances if i.node]
        rules += [_any_port(other) for node in nodes for other in node.others]
    if model and model.peer:
        mine, port = _split(model.peer.listen)
        others = (_split(peer)[0] for peer in model.peer.peers)
        rules += [FirewallRule(port, other) for other in others if other != mine]
    return FirewallPlan(
        tool=tool,
        packages=firewall_packages(tool, platform.family),
        rules=tuple(dict.fromkeys(rules)),
        ssh_port=host.ssh_port,
    )


def _any_port(source: str) -> FirewallRule:
    """For another node of a server: torch, NCCL and vLLM listen on ports that the kernel picks."""
    return FirewallRule(1024, source, 65535)


def _gateway_addresses(fleet: Fleet, required: bool) -> Iterator[str]:
    for other in fleet.hosts:
        if not other.is_gateway:
            continue
        if other.spec.service_address:
            yield other.spec.service_address
        elif required:
            raise OperatorError(
                f"gateway {other.name}: service_address is not set: the firewall of the servers"
                " lets in that address only (or firewall = 'unmanaged' for them)"
            )


def _split(listen: str) -> tuple[str, int]:
    """Address and port of ``ADDRESS:PORT``."""
    address, _, port = listen.rpartition(":")
    return address.strip("[]"), int(port)

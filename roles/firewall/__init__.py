"""firewall: clients, gateways and other hosts of the fleet let in; SSH first, and never closed."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.firewall.operations import close_unplanned, let_in


@deploy("Firewall")
def guard() -> None:
    """Let in what the plan names, before anything listens; switch the firewall on."""
    plan = host_plan(host)
    let_in(name="Planned connections are let in, others not", plan=plan)


@deploy("Firewall")
def close() -> None:
    """Close what the plan no longer names, after servers and proxy have moved."""
    plan = host_plan(host)
    close_unplanned(name="Ports no longer planned", plan=plan)

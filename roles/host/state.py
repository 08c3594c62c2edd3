"""The role's compound fact, asked once and again only after the role has changed the host."""

from __future__ import annotations

from pyinfra import host

from fp8fleet.plan import HostPlan
from roles.host.facts import HostFacts, HostState

_KEY = "fp8fleet_host_facts"


def host_facts(plan: HostPlan) -> HostFacts:
    """What the role knows of this host; pyinfra itself asks a fact anew each time.

    Preparing and executing are apart: between them an operator may think for long.
    """
    phase = host.state.is_executing
    known = host.connector_data.get(_KEY)
    if known is None or known[0] != phase:
        known = (phase, host.get_fact(HostState, plan=plan))
        host.connector_data[_KEY] = known
    facts: HostFacts = known[1]
    return facts


def forget() -> None:
    """The host is about to change: the next operation asks anew."""
    host.connector_data.pop(_KEY, None)

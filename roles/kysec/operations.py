"""KySec's trust in the environments that lie on a host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import HostPlan, programs_of
from roles.kysec.facts import Kysec
from roles.operations import streamed, trust_command


@operation()
def trusted_environments(plan: HostPlan) -> Iterator[StringCommand]:
    """Have KySec trust environments whose program it does not; new ones are when they are made."""
    if not plan.kysec:
        return
    found = host.get_fact(Kysec, programs=programs_of(plan.frontend, plan.environments))
    for program in found.untrusted if found.enabled else ():
        yield streamed(trust_command(str(PurePosixPath(program).parents[1])))

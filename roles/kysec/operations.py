"""KySec's trust in the environments that lie on a host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import HostPlan
from roles.kysec.facts import Kysec
from roles.operations import streamed, trust_command


@operation()
def trusted_environments(plan: HostPlan) -> Iterator[StringCommand]:
    """Have KySec trust environments whose program it does not; new ones are when they are made."""
    if not plan.kysec:
        return
    programs = [environment.interpreter for environment in plan.environments]
    if plan.frontend.prefix:
        programs.insert(0, plan.frontend.program)
    found = host.get_fact(Kysec, programs=programs)
    for program in found.untrusted if found.enabled else ():
        yield streamed(trust_command(str(PurePosixPath(program).parents[1])))

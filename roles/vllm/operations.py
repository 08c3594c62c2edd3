"""Starting, restarting, proving and removing servers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    RUN_DIRECTORY,
    UNIT_DIRECTORY,
    UNIT_PREFIX,
    HostPlan,
    InstancePlan,
)
from roles.operations import streamed
from roles.vllm.facts import Server, UnitNames


@operation()
def serve_instance(plan: HostPlan, instance: InstancePlan) -> Iterator[StringCommand]:
    """Have a server run from its present files, ready and warm.

    A server that runs from the files as they are is left alone, whoever started it.
    """
    ready = _ready_command(plan, instance)
    state = host.get_fact(
        Server, unit=instance.unit, instance=instance.name, check=f"{ready} --check"
    )
    if state.needs_reload or not state.active:
        yield StringCommand("systemctl daemon-reload")
    if not state.enabled:
        yield StringCommand(f"systemctl enable --quiet {instance.unit}")
    restart = not (state.active and state.started_from_present_files)
    if restart:
        yield StringCommand(f"systemctl reset-failed {instance.unit} 2>/dev/null || true")
        yield streamed(f"systemctl restart {instance.unit}")
    if restart or not state.ready:
        yield streamed(ready)


def _ready_command(plan: HostPlan, instance: InstancePlan) -> str:
    assert plan.tools
    key = f" --api-key-file {instance.key_file}" if instance.key_file else ""
    return (
        f"{plan.tools.interpreter} {plan.program} ready --unit {instance.unit}"
        f" --url {instance.url} --model {shlex.quote(instance.model_id)}"
        f" --timeout {instance.start_timeout_s} --warm-up {instance.warm_up_concurrency}"
        f" --marker {instance.marker}{key}"
    )


@operation()
def stop_unplanned(plan: HostPlan) -> Iterator[StringCommand]:
    """Stop servers that the plan does not name, and remove their files."""
    planned = {instance.unit for instance in plan.instances}
    for unit in host.get_fact(UnitNames):
        if unit in planned:
            continue
        name = unit.removeprefix(UNIT_PREFIX).removesuffix(".service")
        base = f"{CONFIG_DIRECTORY}/instances/{name}"
        yield streamed(f"systemctl disable --now {unit}")
        yield StringCommand(
            f"rm -f {UNIT_DIRECTORY}/{unit} {base}.yaml {base}.env {base}.key"
            f" {RUN_DIRECTORY}/{name}.started {RUN_DIRECTORY}/{name}.ready"
            " && systemctl daemon-reload"
        )

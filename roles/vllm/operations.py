"""Starting, restarting, proving and removing servers."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    PEER_UNIT,
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
    """Have a server run from its planned files, ready and warm.

    A server that was started from them is left alone, whoever started it. They are compared as
    planned, not as they lie on the disk, so that `--dry` shows a restart before they are placed.
    """
    ready = _ready_command(plan, instance)
    state = host.get_fact(
        Server,
        unit=instance.unit,
        instance=instance.name,
        port=instance.port,
        check=f"{ready} --check",
    )
    if state.needs_reload or not state.active:
        yield StringCommand("systemctl daemon-reload")
    if not state.enabled:
        yield StringCommand(f"systemctl enable --quiet {instance.unit}")
    restart = not state.active or state.started_from != _digests(plan, instance)
    if restart:
        if state.port_holder not in (None, instance.unit):
            # A renamed server, or two that swap ports: the old one would answer for the new one.
            yield streamed(f"systemctl stop {state.port_holder}")
        yield StringCommand(f"systemctl reset-failed {instance.unit} 2>/dev/null || true")
        yield streamed(f"systemctl restart {instance.unit}")
    if restart or not state.ready:
        yield streamed(ready)


def _digests(plan: HostPlan, instance: InstancePlan) -> dict[str, str]:
    files = (file for file in plan.files if file.path in instance.files)
    return {file.path: hashlib.sha256(file.resolved()).hexdigest() for file in files}


def _ready_command(plan: HostPlan, instance: InstancePlan) -> str:
    key = f" --api-key-file {instance.key_file}" if instance.key_file else ""
    return (
        f"{plan.tools.interpreter} {plan.program} ready --unit {instance.unit}"
        f" --url {instance.url} --model {shlex.quote(instance.model_id)}"
        f" --timeout {instance.start_timeout_s} --warm-up {instance.warm_up_concurrency}"
        f" --marker {instance.marker}{key}"
    )


@operation()
def stop_unplanned(plan: HostPlan) -> Iterator[StringCommand]:
    """Stop servers that the plan does not name, and remove their files.

    Not in a run that leaves out the gateway (`--limit`): it would go on to send requests there.
    """
    active = {other.name for other in host.state.inventory.get_active_hosts()}
    if not set(plan.gateways) <= active:
        return
    planned = {PEER_UNIT, *(instance.unit for instance in plan.instances)}
    planned |= {PurePosixPath(file.path).name for file in plan.role_files("host")}
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

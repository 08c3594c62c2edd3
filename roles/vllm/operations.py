"""Starting, restarting, proving and removing servers."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation

from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    PEER_UNIT,
    RUN_DIRECTORY,
    UNIT_DIRECTORY,
    UNIT_PREFIX,
    HostPlan,
    InstancePlan,
    NodePlan,
)
from roles.operations import failed, streamed
from roles.vllm.facts import Server, ServerState, UnitNames


@operation()
def nodes_together(plan: HostPlan) -> Iterator[FunctionCommand]:
    """Fail a host whose node would change in a run without the other nodes' hosts.

    Before any file is placed: a node that starts again by itself must not read a part of a plan.
    """
    for instance in plan.instances:
        if instance.node and _missing(instance.node):
            state = _state(plan, instance)
            if not state.ready or _restarts(plan, instance, state):
                yield _incomplete(instance.name, instance.node)
                return


@operation()
def serve_instance(
    plan: HostPlan, instance: InstancePlan
) -> Iterator[StringCommand | FunctionCommand]:
    """Have a server run from its planned files, ready and warm.

    A server that was started from them is left alone, whoever started it. They are compared as
    planned, not as they lie on the disk, so that `--dry` shows a restart before they are placed.
    """
    state = _state(plan, instance)
    restart = _restarts(plan, instance, state)
    if instance.node and (restart or not state.ready) and _missing(instance.node):
        yield _incomplete(instance.name, instance.node)  # a node's host failed in this run
        return
    yield from _running(instance, state, restart)
    if restart or not state.ready:
        yield streamed(_ready_command(plan, instance))


@operation()
def follow(plan: HostPlan) -> Iterator[StringCommand]:
    """Have this host's nodes of other hosts' servers run from their planned files.

    Before any server is waited for, since its head waits for its nodes. Whether they work is for
    the head to prove: a completion goes through all of them.
    """
    for instance in plan.instances:
        if not instance.has_api:
            state = _state(plan, instance)
            yield from _running(instance, state, _restarts(plan, instance, state))


def _state(plan: HostPlan, instance: InstancePlan) -> ServerState:
    """A node without an API is ready when its unit is active."""
    check = f"{_ready_command(plan, instance)} --check" if instance.has_api else "true"
    state: ServerState = host.get_fact(
        Server,
        unit=instance.unit,
        instance=instance.name,
        port=instance.port,
        check=check,
    )
    return state


def _restarts(plan: HostPlan, instance: InstancePlan, state: ServerState) -> bool:
    return not state.active or state.started_from != _digests(plan, instance)


def _running(instance: InstancePlan, state: ServerState, restart: bool) -> Iterator[StringCommand]:
    if state.needs_reload or not state.active:
        yield StringCommand("systemctl daemon-reload")
    if not state.enabled:
        yield StringCommand(f"systemctl enable --quiet {instance.unit}")
    if restart:
        if state.port_holder not in (None, instance.unit):
            # A renamed server, or two that swap ports: the old one would answer for the new one.
            yield streamed(f"systemctl stop {state.port_holder}")
        yield StringCommand(f"systemctl reset-failed {instance.unit} 2>/dev/null || true")
        yield streamed(f"systemctl restart {instance.unit}")


def _incomplete(name: str, node: NodePlan) -> FunctionCommand:
    return failed(
        f"server {name}: its nodes start together, and {', '.join(_missing(node))} of group"
        f" {node.group} failed or is left out of this run (--limit): run on"
        f" {', '.join(node.hosts)}"
    )


def _missing(node: NodePlan) -> list[str]:
    """Hosts of the group that this run does not, or no longer, work on."""
    active = {other.name for other in host.state.inventory.get_active_hosts()}
    return [name for name in node.hosts if name not in active]


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

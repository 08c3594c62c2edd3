"""One server over the hosts of an inventory group, by vLLM's own multi-node mode.

Source: vllm/config/parallel.py (nnodes, node_rank, master_addr, master_port) and `run_headless` in
vllm/entrypoints/cli/serve.py. Each node has the ranks of its devices, consecutive, tensor-parallel
ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.jsonfile import shown
from fp8fleet.plan import InstancePlan, NodePlan
from fp8fleet.planner.files import digest_of
from fp8fleet.planner.model import model_plan
from fp8fleet.planner.servers import instance_files
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import InstanceSpec

BACKEND = "distributed-executor-backend"
_UNPROVEN = (
    "warning: a pipeline over hosts was never run on GPUs, and vLLM's CPU build fails with it at"
    " the first request (docs/servers.md): try such a server before you rely on it",
)
_OWN_OPTIONS = {"host", "shutdown-timeout"}
"""Options that each node may have in its own way."""


def join_nodes(fleet: Fleet, serving: dict[str, Serving]) -> dict[str, Serving]:
    """``serving`` with the instances that name a group made its nodes.

    Raises:
        OperatorError: the hosts of a group do not agree, or do not have what one server needs.
    """
    joined = dict(serving)
    for group, name in _named(fleet):
        try:
            members = _members(fleet, group, name)
            _check(members, serving, group)
            for host, plan in _nodes(members, serving, group):
                own = joined[host]
                kept = (plan if plan.name == i.name else i for i in own.instances)
                joined[host] = replace(own, instances=tuple(kept))
        except OperatorError as error:
            raise OperatorError(f"{fleet.path}: instances: {name}: {error}") from None
    return joined


def _named(fleet: Fleet) -> list[tuple[str, str]]:
    """Group and name of every server over several hosts."""
    found = {
        (i.group, i.name): None
        for host in fleet.hosts
        if not host.is_gateway
        for i in host.spec.instances
        if i.group
    }
    return list(found)


def _members(fleet: Fleet, group: str, name: str) -> list[tuple[FleetHost, InstanceSpec]]:
    """The group's hosts in the group's order, each with its declaration of the server."""
    members = []
    order = {name: position for position, name in enumerate(fleet.groups.get(group, ()))}
    for host in sorted(fleet.hosts, key=lambda host: order.get(host.name, len(order))):
        own = next((i for i in host.spec.instances if (i.group, i.name) == (group, name)), None)
        if group not in host.groups:
            if own and not host.is_gateway:
                raise OperatorError(
                    f"host {host.name} is not in the group {group!r} that its server names"
                )
            continue
        if own is None or host.is_gateway:
            raise OperatorError(
                f"host {host.name} of group {group} does not declare this server: write instances"
                f" in group_data/{group}.py, for all of its hosts"
            )
        members.append((host, own))
    if len(members) < 2:
        raise OperatorError(f"group {group} has one host: leave group out, or add hosts to it")
    return members


def _check(
    members: list[tuple[FleetHost, InstanceSpec]], serving: dict[str, Serving], group: str
) -> None:
    (head, first), *others = members
    own = serving[head.name]
    if not own.release.multi_node:
        raise OperatorError(
            f"vLLM {head.spec.engine_release} has no multi-node mode (--nnodes), and servers over"
            " Ray are not set up: name a newer engine_release, or leave group out"
        )
    _check_options(first)
    _check_addresses(members, group)
    for host, instance in others:
        theirs = serving[host.name]
        same = {
            "the same keys of the server (devices may differ, not their number)": (
                _comparable(first) == _comparable(instance)
            ),
            "one engine_release and engine_requirements": own.engine.name == theirs.engine.name
            and own.lock.digest == theirs.lock.digest,
            "one model_manifest": own.manifest.digest == theirs.manifest.digest,
            "one served_model_name": own.model_id == theirs.model_id,
            "one accelerator": head.spec.accelerator == host.spec.accelerator,
        }
        for needed, holds in same.items():
            if not holds:
                raise OperatorError(
                    f"hosts {head.name} and {host.name} of group {group} differ: {needed} is needed"
                )
        _check_decided(_plan(serving, head, first), _plan(serving, host, instance), host, group)
    _check_size(first, len(members), group)


def _plan(serving: dict[str, Serving], host: FleetHost, instance: InstanceSpec) -> InstancePlan:
    return next(i for i in serving[host.name].instances if i.name == instance.name)


def _check_addresses(members: list[tuple[FleetHost, InstanceSpec]], group: str) -> None:
    holders: dict[str, str] = {}
    for host, _ in members:
        address = host.spec.service_address
        if address is None:
            raise OperatorError(f"host {host.name}: service_address is not set: nodes need it")
        other = holders.setdefault(address, host.name)
        if other != host.name:
            raise OperatorError(
                f"hosts {other} and {host.name} of group {group} have one service_address,"
                f" {address}: a service_address of its own is needed"
            )


def _check_decided(head: InstancePlan, node: InstancePlan, host: FleetHost, group: str) -> None:
    """Refuse a node whose options, as written, sampled or chosen, are not the head's."""
    for option in sorted({*head.options, *node.options} - _OWN_OPTIONS):
        present = option in head.options and option in node.options
        if present and head.options[option] == node.options[option]:
            continue
        one, other = (
            shown(plan.options[option]) if option in plan.options else "not set"
            for plan in (head, node)
        )
        raise OperatorError(
            f"hosts of group {group} differ: {option} would be {other} on {host.name}, and {one} on"
            " the first host: give all of them what it comes from (workload, sampling, topology) in"
            f" group_data/{group}.py"
        )


def _comparable(instance: InstanceSpec) -> tuple[Any, ...]:
    return instance.model_dump(exclude={"devices"}), len(instance.devices)


def _check_options(instance: InstanceSpec) -> None:
    backend = instance.options.get(BACKEND, "mp")
    if backend != "mp":
        raise OperatorError(
            f"option {BACKEND} {backend!r}: a server over a group runs without Ray, by 'mp': leave"
            " it out"
        )
    for option in sorted(instance.options):
        if option.startswith("data-parallel"):
            raise OperatorError(
                f"option {option!r}: not with group: for more throughput set up several servers,"
                " which Nginx shares the requests among"
            )


def _check_size(instance: InstanceSpec, hosts: int, group: str) -> None:
    tensor, pipeline = instance.tensor_parallel_size, instance.pipeline_parallel_size
    ranks = tensor * pipeline
    sizes = f"tensor_parallel_size {tensor} x pipeline_parallel_size {pipeline} = {ranks}"
    devices = hosts * len(instance.devices)
    if devices and ranks != devices:
        raise OperatorError(
            f"{sizes}, but the {hosts} hosts of group {group} have {devices} devices for it: both"
            f" must be equal, such as {len(instance.devices)} x {hosts}"
        )
    if ranks % hosts:
        raise OperatorError(
            f"{sizes}, which the {hosts} hosts of group {group} cannot share evenly"
        )


def _nodes(
    members: list[tuple[FleetHost, InstanceSpec]], serving: dict[str, Serving], group: str
) -> Iterator[tuple[str, InstancePlan]]:
    """Each host's plan of its node."""
    addresses = tuple(str(host.spec.service_address) for host, _ in members)
    names = tuple(host.name for host, _ in members)
    plans = []
    for rank, (host, instance) in enumerate(members):
        own = serving[host.name]
        plan = _plan(serving, host, instance)
        node = NodePlan(group, rank, names, addresses, instance.master_port, digest="")
        options = plan.options | _options(node)
        notes = plan.notes + _UNPROVEN * (instance.pipeline_parallel_size > 1)
        plans.append((host, replace(plan, options=options, node=node, notes=notes)))
    texts = []
    for host, plan in plans:
        own = serving[host.name]
        model = model_plan(host.spec, own, None, None)
        files = instance_files(host.spec, own, plan, model)
        texts += [file.content.decode() for file in files if file.path in plan.files]
    digest = digest_of(*texts)
    for host, plan in plans:
        assert plan.node
        yield host.name, replace(plan, node=replace(plan.node, digest=digest))


def _options(node: NodePlan) -> dict[str, Any]:
    options: dict[str, Any] = {
        "nnodes": len(node.hosts),
        "node-rank": node.rank,
        "master-addr": node.addresses[0],
        "master-port": node.master_port,
        BACKEND: "mp",
    }
    return options | ({"headless": True} if node.rank else {})

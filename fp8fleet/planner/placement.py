"""Which devices each server of a host gets, and the CPUs and memory beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import OperatorError
from fp8fleet.plan import Binding
from fp8fleet.spec import HostSpec, InstanceSpec
from fp8fleet.topology import (
    Asked,
    Topology,
    declared_topology,
    load_topology,
    numbers_of,
    numbers_text,
    place,
)

_TOOLS = {"nvidia": "nvidia-smi", "ascend": "npu-smi"}


@dataclass(frozen=True)
class Placement:
    """The place of one server."""

    devices: tuple[int, ...]
    binding: Binding | None
    notes: tuple[str, ...] = ()


def declared_devices(spec: HostSpec, root: Path) -> Topology | None:
    """What the inventory says of the host's devices; None: nothing.

    Raises:
        OperatorError: the matrix is missing, broken, another vendor's, or contradicts device_count.
    """
    if spec.topology is None:
        return (
            declared_topology(spec.device_count, spec.device_pairs) if spec.device_count else None
        )
    key = f"topology = {spec.topology!r}"
    topology = load_topology(root / spec.topology)
    tool = _TOOLS.get(spec.vendor or "")
    if tool and not topology.tool.startswith(tool):
        raise OperatorError(
            f"{key}: a matrix of `{topology.tool}`, accelerator is {spec.accelerator}: name the"
            f" output of {tool}"
        )
    count = len(topology.devices)
    if spec.device_count not in (None, count):
        raise OperatorError(
            f"{key}: has {count} devices, device_count is {spec.device_count}: look which devices"
            " the host lost, or correct device_count"
        )
    return topology


def placements(spec: HostSpec, topology: Topology | None) -> tuple[Placement, ...]:
    """Where every server of a host runs, in the inventory's order.

    Raises:
        OperatorError: the devices don't suffice, or one that a server names cannot be used.
    """
    if topology is None:
        return tuple(Placement(instance.devices, None) for instance in spec.instances)
    asked = tuple(_asked(instance) for instance in spec.instances)
    try:
        chosen = place(topology, asked)
    except OperatorError as error:
        raise OperatorError(f"instances: {error}") from None
    found = []
    for instance, choice in zip(spec.instances, chosen, strict=True):
        notes = [choice.reason]
        if choice.faster:
            notes.append(
                f"warning: a faster set is free ({choice.faster}): leave devices out, or name those"
            )
        elif choice.better:
            notes.append(
                "warning: without listed devices no server is slower and some are faster"
                f" ({choice.better}): leave devices out, or name those"
            )
        binding = _binding(spec, topology, instance, choice.devices)
        if binding:
            notes.append(f"bound to CPUs {binding.cpus}")
        found.append(Placement(choice.devices, binding, tuple(notes)))
    return tuple(found)


def _asked(instance: InstanceSpec) -> Asked:
    group = instance.tensor_parallel_size
    if instance.group:
        # this host has a part of the server's devices, all of them listed
        count = len(instance.devices)
        part = group if count % group == 0 else count
        return Asked(count, part, instance.devices, instance.name)
    return Asked(instance.ranks, group, instance.devices, instance.name)


def _binding(
    spec: HostSpec, topology: Topology, instance: InstanceSpec, devices: tuple[int, ...]
) -> Binding | None:
    """CPUs and memory beside a server's devices; None: not known, or the engine does it itself.

    vLLM's own --numa-bind binds each worker; vllm-ascend binds unasked, from the same matrix.
    """
    own = [topology.devices[index] for index in devices]
    engine = spec.vendor != "nvidia" or any(key.startswith("numa-bind") for key in instance.options)
    if engine or not all(device.cpus for device in own):
        return None
    cpus = numbers_text(cpu for device in own for cpu in numbers_of(device.cpus))
    nodes = {node for device in own for node in device.numa}
    return Binding(cpus, nodes.pop() if len(nodes) == 1 else None)

"""The share of a device's memory that a server takes, and servers that share a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import shown
from fp8fleet.plan import InstancePlan
from fp8fleet.spec import HostSpec

FRACTION = "gpu-memory-utilization"
CACHE = "kv-cache-memory-bytes"
_LENT = 0.95
"""Of a device's memory that servers that share it can have: the rest is their processes'."""
_GIB = 1 << 30


def memory_fraction(spec: HostSpec, options: Mapping[str, Any], name: str) -> float:
    """Of each of its devices' memory; the release's default where the options say none.

    Args:
        name: of the server, for errors.

    Raises:
        OperatorError: it is no share.
    """
    share = options.get(
        FRACTION, catalog.releases()[spec.engine_release or ""].gpu_memory_utilization
    )
    if type(share) in (int, float) and 0 < share <= 1:
        return float(share)
    quoted = isinstance(share, str) and re.fullmatch(r"0?\.[0-9]{1,6}|1(\.0{1,6})?", share)
    raise OperatorError(
        f"instances: {name}: {FRACTION} is {shown(share)}, expected a share of each device's memory"
        f" above 0 and up to 1" + (f": write {share} without quotes" if quoted else "")
    )


def check_shared_devices(spec: HostSpec, instances: Sequence[InstancePlan]) -> tuple[str, ...]:
    """Servers that share a device have to share its memory.

    Returns:
        What is tight: notes of the plan.

    Raises:
        OperatorError: together they would take more than the whole of it.
    """
    notes: dict[str, None] = {}
    for device, sharers in _sharers(instances):
        total = sum(memory_fraction(spec, i.options, i.name) for i in sharers)
        if len(sharers) > 1 and total > 1 + 1e-9:
            raise OperatorError(_too_much(spec, device, sharers, total))
        if len(sharers) > 1:
            notes |= dict.fromkeys(_tight(sharers, total))
    return tuple(notes)


def _tight(sharers: Sequence[InstancePlan], total: float) -> Iterator[str]:
    names = " and ".join(i.name for i in sharers)
    if total > _LENT + 1e-9:
        yield (
            f"warning: instances: {names} share a device and take {total:.3g} of its memory: a"
            f" little belongs to no server (each process's CUDA context): let {FRACTION} sum to"
            f" {_LENT:g} at most (docs/servers.md)"
        )
    if not all(CACHE in i.options for i in sharers):
        yield (
            f"instances: {names} share a device: started at the same moment they measure each"
            f" other's memory; {CACHE} in the options of each is safer (docs/servers.md)"
        )


def check_device_memory(spec: HostSpec, instances: Sequence[InstancePlan]) -> None:
    """What servers take of a device in bytes has to be there: kv-cache-memory-bytes heeds no share.

    Raises:
        OperatorError: it is not; nothing is checked where the catalogue has no memory.
    """
    memory = catalog.accelerators()[spec.accelerator or "cpu"].engine_bytes
    for device, sharers in _sharers(instances):
        takers = [i for i in sharers if i.capacity]
        taken = {i.name: i.capacity.device_bytes for i in takers if i.capacity}
        named = [i for i in takers if CACHE in i.options]
        if memory and named and sum(taken.values()) > memory:
            parts = " and ".join(f"{i.name} {taken[i.name] / _GIB:.1f} ({_how(i)})" for i in takers)
            raise OperatorError(
                f"instances: device {device} has {memory / _GIB:.1f} GiB, of which {parts} are"
                f" taken: lower {CACHE} of {' and '.join(i.name for i in named)}"
            )


def _how(instance: InstancePlan) -> str:
    return f"{CACHE} and the weights" if CACHE in instance.options else FRACTION


def _sharers(instances: Sequence[InstancePlan]) -> Iterator[tuple[int, list[InstancePlan]]]:
    """Every device with the servers on it."""
    for device in sorted({device for i in instances for device in i.devices}):
        yield device, [i for i in instances if device in i.devices]


def _too_much(spec: HostSpec, device: int, sharers: Sequence[InstancePlan], total: float) -> str:
    shares = {i.name: memory_fraction(spec, i.options, i.name) for i in sharers}
    defaulted = {i.name for i in sharers if FRACTION not in i.options}
    names = " and ".join(
        f"{name} ({share:g}{', the default' if name in defaulted else ''})"
        for name, share in shares.items()
    )
    fair = int(100 * _LENT / len(sharers)) / 100
    return (
        f"instances: {names} share device {device} and take {total:.3g} of its memory, 1 at most"
        f" is there: set {FRACTION} in the options of each, such as {fair:g}, or give them"
        " devices of their own"
    )

"""The share of a device's memory that a server takes, and servers that share a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.plan import InstancePlan
from fp8fleet.spec import HostSpec

FRACTION = "gpu-memory-utilization"
_CACHE = "kv-cache-memory-bytes"
_LENT = 0.95
"""Of a device's memory that servers that share it can have: the rest is their processes'."""


def memory_fraction(spec: HostSpec, instance: InstancePlan) -> float:
    """Of each of its devices' memory; the release's default where the options say none."""
    default = catalog.releases()[spec.engine_release or ""].gpu_memory_utilization
    share = instance.options.get(FRACTION, default)
    return float(share) if isinstance(share, int | float) else 1.0


def check_shared_devices(spec: HostSpec, instances: Sequence[InstancePlan]) -> tuple[str, ...]:
    """Servers that share a device have to share its memory.

    Returns:
        What is tight: notes of the plan.

    Raises:
        OperatorError: together they would take more than the whole of it.
    """
    notes: dict[str, None] = {}
    for device in sorted({device for i in instances for device in i.devices}):
        sharers = [i for i in instances if device in i.devices]
        total = sum(memory_fraction(spec, i) for i in sharers)
        # `not`: NaN is no sum that fits
        if len(sharers) > 1 and not total <= 1 + 1e-9:
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
    if not all(_CACHE in i.options for i in sharers):
        yield (
            f"instances: {names} share a device: started at the same moment they measure each"
            f" other's memory; {_CACHE} in the options of each is safer (docs/servers.md)"
        )


def _too_much(spec: HostSpec, device: int, sharers: Sequence[InstancePlan], total: float) -> str:
    names = " and ".join(
        f"{i.name} ({memory_fraction(spec, i):g}{'' if FRACTION in i.options else ', the default'})"
        for i in sharers
    )
    fair = int(100 * _LENT / len(sharers)) / 100
    return (
        f"instances: {names} share device {device} and take {total:.3g} of its memory, 1 at most"
        f" is there: set {FRACTION} in the options of each, such as {fair:g}, or give them"
        " devices of their own"
    )

"""The share of a device's memory that a server takes, and servers that share a device."""

from __future__ import annotations

from collections.abc import Sequence

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.plan import InstancePlan
from fp8fleet.spec import HostSpec

FRACTION = "gpu-memory-utilization"


def memory_fraction(spec: HostSpec, instance: InstancePlan) -> float:
    """Of each of its devices' memory; the release's default where the options say none."""
    default = catalog.releases()[spec.engine_release or ""].gpu_memory_utilization
    share = instance.options.get(FRACTION, default)
    return float(share) if isinstance(share, int | float) else 1.0


def check_shared_devices(spec: HostSpec, instances: Sequence[InstancePlan]) -> None:
    """Servers that share a device have to share its memory.

    Raises:
        OperatorError: together they would take more than the whole of it.
    """
    for device in sorted({device for i in instances for device in i.devices}):
        sharers = [i for i in instances if device in i.devices]
        total = sum(memory_fraction(spec, i) for i in sharers)
        # `not`: NaN is no sum that fits
        if len(sharers) > 1 and not total <= 1 + 1e-9:
            raise OperatorError(_too_much(spec, device, sharers, total))


def _too_much(spec: HostSpec, device: int, sharers: Sequence[InstancePlan], total: float) -> str:
    names = " and ".join(
        f"{i.name} ({memory_fraction(spec, i):g}{'' if FRACTION in i.options else ', the default'})"
        for i in sharers
    )
    # a little of the device belongs to no server: each process's CUDA context
    fair = int(95 / len(sharers)) / 100
    return (
        f"instances: {names} share device {device} and take {total:.3g} of its memory, 1 at most"
        f" is there: set {FRACTION} in the options of each, such as {fair:g}, or give them"
        " devices of their own"
    )

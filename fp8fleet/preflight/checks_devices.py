"""Findings about GPUs and NPUs: which they are, their health, who holds them, their links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fp8fleet import catalog
from fp8fleet.plan import Devices
from fp8fleet.preflight.facts import Device, Holder, PciDevice
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    is_ours,
    numbers,
    on_bus,
    planned_accelerator,
    planned_indices,
    some,
)
from fp8fleet.topology import LINKED, UNKNOWN, UNLINKED, Topology, TopologyDevice, is_direct


def _devices(case: Case) -> Iterator[Finding]:
    planned = planned_accelerator(case)
    if planned is None:
        return
    name, accelerator = planned
    bus = on_bus(case, accelerator.vendor)
    wanted = planned_indices(case.needs)
    if wanted and len(bus) <= wanted[-1]:
        yield Finding(
            "gpu-missing",
            f"{len(bus)} {accelerator.vendor} devices on the PCI bus",
            f"{wanted[-1] + 1}, for devices {numbers(wanted)} of the plan",
            "check the inventory's devices, the BIOS and the seating (`fp8fleet probe` lists them)",
        )
    yield from _identity(name, accelerator, _planned_on_bus(case, bus))
    yield from _capability(case, name, accelerator)
    shown = case.facts.accelerators.devices
    slots = {d.slot for d in bus if d.id in accelerator.pci or not d.is_display}
    lost = sorted(slots - {d.slot for d in shown})
    if shown and lost:  # where it shows none, the driver has a finding
        yield Finding(
            "gpu-lost",
            f"the driver shows {len(shown)} devices, the PCI bus {len(bus)}; not: {some(lost)}",
            "every device in the driver's hands",
            "look at dmesg for Xid 79 or NVRM errors; reset or power-cycle the host",
        )


def _planned_on_bus(case: Case, bus: list[PciDevice]) -> list[PciDevice]:
    """The devices of the plan: as the driver numbers them, else in the order of their slots."""
    by_index = {d.index: d.slot for d in case.facts.accelerators.devices}
    in_order = dict(enumerate(sorted(device.slot for device in bus)))
    slots = {by_index.get(i) or in_order.get(i) for i in planned_indices(case.needs)}
    return [device for device in bus if device.slot in slots]


def _planned_devices(case: Case) -> list[Device]:
    """The devices of the plan, as far as the driver shows them."""
    wanted = planned_indices(case.needs)
    return [device for device in case.facts.accelerators.devices if device.index in wanted]


def _identity(
    name: str, accelerator: catalog.Accelerator, bus: list[PciDevice]
) -> Iterator[Finding]:
    others: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for device in bus:
        if device.id in accelerator.pci:
            continue
        known = catalog.accelerator_of(device.id)
        if known:
            others[known] = None
        else:
            unknown[device.id] = None
    if others:
        yield Finding(
            "gpu-other",
            f"{', '.join(others)} on the PCI bus",
            f"accelerator = {name!r}",
            f"set accelerator = {next(iter(others))!r}, with options and a lock for it",
        )
    if unknown:
        yield Finding(
            "gpu-unknown",
            f"PCI id {', '.join(unknown)}",
            f"{' or '.join(accelerator.pci)} ({name})",
            "add the id to fp8fleet/catalog/accelerators.toml, with its source",
        )


def _capability(case: Case, name: str, accelerator: catalog.Accelerator) -> Iterator[Finding]:
    for device in _planned_devices(case):
        have, want = device.compute_capability, accelerator.compute_capability
        if have and want and have != want:
            yield Finding(
                "gpu-other",
                f"{device.name} with compute capability {have}",
                f"accelerator = {name!r}, compute capability {want}",
                "set accelerator to what the host has (`fp8fleet probe`)",
            )
            return
        size, expected = device.memory_mib, accelerator.memory_mib
        # a tenth of slack: ECC and the driver take some of it
        if size and expected and size < 0.9 * expected:
            yield Finding(
                "gpu-other",
                f"{device.name} with {size} MiB",
                f"accelerator = {name!r}, {expected} MiB",
                "set accelerator to what the host has (`fp8fleet probe`)",
            )
            return


def _health(case: Case) -> Iterator[Finding]:
    if planned_accelerator(case) is None:
        return
    devices = _planned_devices(case)
    for device in devices:
        yield from _device_health(device)
    off = [d.index for d in devices if d.persistence is False]
    if off:
        yield Finding(
            "persistence-off",
            f"devices {numbers(off)}",
            "nvidia-persistenced",
            "systemctl enable --now nvidia-persistenced",
        )
    slots = case.facts.accelerators.bad_rows
    if slots:
        yield Finding(
            "gpu-ecc-errors",
            f"memory rows to be remapped, or not remapped, on {some(slots)}",
            "no row that waits for repair",
            "reset the device or reboot; replace the card where it stays so",
        )
    if case.facts.accelerators.kernel_errors:
        errors = case.facts.accelerators.kernel_errors
        yield Finding(
            "gpu-kernel-errors",
            errors[-1],
            "no Xid in the kernel's log",
            "look the number up in NVIDIA's list of Xid errors",
        )


def _device_health(device: Device) -> Iterator[Finding]:
    where = f"device {device.index} ({device.slot})"
    if device.ecc_errors:
        yield Finding(
            "gpu-ecc-errors",
            f"{where}: {device.ecc_errors} uncorrected errors since the last reset",
            "none",
            "reset the device or reboot; replace the card where they come back",
        )
    if device.ecc is False:
        yield Finding(
            "gpu-ecc-off", where, "ECC on", f"nvidia-smi -i {device.index} -e 1, then reboot"
        )
    if device.mig:
        yield Finding(
            "gpu-mig",
            f"{where}: MIG is enabled",
            "whole devices",
            f"stop what uses it; nvidia-smi -i {device.index} -mig 0",
        )
    if device.health is not None and device.health != "OK":
        yield Finding(
            "gpu-unhealthy",
            f"{where}: {device.health}",
            "a device that is well",
            "look at dmesg and `nvidia-smi -q` or `npu-smi info -t health`; reset it or reboot",
        )


def _memory_holders(case: Case) -> Iterator[Finding]:
    """Other programs on the plan's devices; our own servers are replaced by the deploy."""
    if planned_accelerator(case) is None:
        return
    facts = case.facts.accelerators
    by_index = {device.index: device for device in facts.devices}
    for devices in case.needs.devices:
        for index in devices.indices:
            device = by_index.get(index)
            if device is None:
                continue
            all_holders = [h for h in facts.holders if h.uuid == device.uuid]
            holders = [h for h in all_holders if not is_ours(h.unit)]
            ours = [h for h in all_holders if is_ours(h.unit)]
            yield from _held_memory(devices, device, holders, ours)


def _held_memory(
    devices: Devices, device: Device, holders: list[Holder], ours: list[Holder]
) -> Iterator[Finding]:
    total = device.memory_mib or 0
    held = sum(h.memory_mib or 0 for h in holders)
    if not holders and not ours:
        # in another PID namespace the driver names no process; a little the driver itself takes
        held = device.used_mib or 0
        if held <= 0.1 * total:
            return
    if any(h.memory_mib is None for h in holders) and all(h.memory_mib for h in ours):
        # the driver does not tell what each takes: all that is used but not by our servers
        held = max(held, (device.used_mib or 0) - sum(h.memory_mib or 0 for h in ours))
    if not held and not holders:
        return
    who = some(f"{h.program} ({h.pid}, {h.memory_mib or '?'} MiB)" for h in holders)
    found = f"device {device.index}: {held} of {total} MiB held by {who or 'processes not shown'}"
    share = devices.memory_fraction
    needed = f"{share:.0%} of the memory for server {devices.instance}"
    if total and held > (1 - share) * total:
        yield Finding("gpu-busy", found, needed, "stop it, or lower gpu-memory-utilization")
    else:
        yield Finding("gpu-shared", found, "devices of its own", "move the other program")


def _links(case: Case) -> Iterator[Finding]:
    facts = case.facts.accelerators
    if planned_accelerator(case) is None:
        return
    links = facts.links
    for devices in case.needs.devices:
        group = devices.indices[: devices.tensor_parallel]
        if len(group) < 2:
            continue
        slow = [
            (a, b, links[a][b])
            for a in group
            for b in group
            if a < b < len(links) and not is_direct(links[a][b])
        ]
        if slow:
            listed = some((f"{a}-{b} {link}" for a, b, link in slow), 3)
            yield Finding(
                "nvlink-missing",
                f"server {devices.instance}: {listed}",
                "NVLink (NV#) or HCCS between the devices of a server",
                "choose linked devices (`fp8fleet probe` shows them), or more, smaller servers",
            )
        nodes = sorted({facts.device_numa[i] for i in group if i in facts.device_numa})
        # over NVLink or HCCS the nodes don't matter
        if len(nodes) > 1 and (slow or not links):
            yield Finding(
                "numa-split",
                f"server {devices.instance}: devices {numbers(group)} on NUMA nodes"
                f" {numbers(nodes)}",
                "devices of one NUMA node",
                "choose other devices where that is possible",
            )


def _declared(case: Case) -> Iterator[Finding]:
    """The devices as the inventory declares them against the real ones."""
    planned, declared = planned_accelerator(case), case.needs.topology
    if planned is None or declared is None:
        return
    facts = case.facts.accelerators
    count = len(declared.devices)
    bus = len(on_bus(case, planned[1].vendor))
    if bus < count:
        # devices that a server uses have a finding of their own
        if bus > max(planned_indices(case.needs), default=-1):
            yield Finding(
                "gpu-fewer",
                f"{bus} {planned[1].vendor} devices on the PCI bus",
                f"{count}, as device_count or the matrix of topology declares",
                "look for the lost device (BIOS, seating), or declare what is there",
            )
        return
    if facts.topology is None:
        if declared.tool and facts.devices:
            yield Finding(
                "topology-unread",
                f"`{declared.tool}` gives no whole matrix",
                "the matrix that the inventory declares",
                f"run `{declared.tool}` on the host and look what it says",
            )
        return
    differences = list(_differences(declared, facts.topology))
    if differences:
        yield Finding(
            "topology-differs",
            some(differences, 3),
            "the links that the inventory declares",
            "a link or bridge that fails: repair it; else `fp8fleet probe --topology` writes the"
            " matrix anew",
        )


def _differences(declared: Topology, real: Topology) -> Iterator[str]:
    count = min(len(declared.devices), len(real.devices))
    for a, b in itertools.combinations(range(count), 2):
        want, have = declared.links[a][b], real.links[a][b]
        if want == have or want in (UNLINKED, UNKNOWN) or (want == LINKED and is_direct(have)):
            continue
        yield f"devices {a}-{b}: {have}, declared {want}"
    for index in range(count):
        near, found = declared.devices[index], real.devices[index]
        if near.cpus and (near.cpus, near.numa) != (found.cpus, found.numa):
            yield f"device {index}: {_beside(found)}, declared {_beside(near)}"


def _beside(device: TopologyDevice) -> str:
    nodes = f" of NUMA node {numbers(device.numa)}" if device.numa else ""
    return f"CPUs {device.cpus or 'not told'}{nodes}"


CHECKS: tuple[Check, ...] = (_devices, _health, _memory_holders, _links, _declared)

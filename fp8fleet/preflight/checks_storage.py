"""Findings about processor, memory and disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fp8fleet.preflight.facts import Disk
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    human_bytes,
    some,
)

LEAST_FREE = 64 << 20
"""Bytes that have to be left on each file system that the run writes to: units, settings, logs."""


def _processor(case: Case) -> Iterator[Finding]:
    flags = case.facts.hardware.flags
    if case.needs.target.accelerator != "cpu" or not flags:
        return
    model = case.facts.hardware.model
    if case.needs.target.architecture == "x86_64" and "avx2" not in flags:
        yield Finding("cpu-lacks-avx2", model, "a CPU with AVX2", "choose another host")
    if case.needs.target.fp8_block and "amx_tile" not in flags:
        yield Finding(
            "cpu-lacks-amx",
            f"{model} without AMX",
            "AMX for a block-FP8 checkpoint",
            "serve a BF16 checkpoint",
        )


def _memory(case: Case) -> Iterator[Finding]:
    have, model = case.facts.hardware.memory, case.needs.model_bytes
    if 0 < have < model:
        yield Finding(
            "memory-short",
            f"{human_bytes(have)} of memory",
            f"{human_bytes(model)}, the model's size, to load it at once",
            "expect slow starts, or add memory",
        )


def _disks(case: Case) -> Iterator[Finding]:
    disks = {disk.path: disk for disk in case.facts.disks}
    read_only = {d.mount: d for d in case.facts.disks if d.read_only}
    for mount, disk in read_only.items():
        yield Finding(
            "disk-read-only",
            f"{mount} is mounted read-only ({disk.path} lies on it)",
            "a file system that can be written to",
            f"look at dmesg for disk errors; mount -o remount,rw {mount}",
        )
    silent = [path for path in case.needs.paths if path not in disks]
    if silent:
        yield Finding(
            "disk-unknown",
            f"df tells nothing of {some(silent)}",
            "a file system with a size that can be written to",
            f"look what `df {silent[0]}` says on the host; a mount that hangs: dmesg",
        )
    needed: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for disk in case.facts.disks:
        needed[disk.mount] = [("settings and logs", LEAST_FREE)]
    for space in case.needs.spaces:
        missing = space.size - case.facts.sizes.get(space.path, 0)
        if space.stamp in case.facts.present or space.path not in disks or missing <= 0:
            continue
        needed[disks[space.path].mount].append((space.what, missing))
    by_mount: dict[str, Disk] = {disk.mount: disk for disk in disks.values()}
    for mount, wants in needed.items():
        total = sum(size for _, size in wants)
        if total > by_mount[mount].free and mount not in read_only:
            listed = ", ".join(f"{what} {human_bytes(size)}" for what, size in wants)
            yield Finding(
                "disk-short",
                f"{human_bytes(by_mount[mount].free)} free on {mount}",
                f"{human_bytes(total)} needed beside what is there ({listed})",
                "free or add disk, or set install_directory or model_directory to a larger one",
            )


CHECKS: tuple[Check, ...] = (_processor, _memory, _disks)

"""Recorded answers of the probe (tests/data/probes), laid over each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fp8fleet.plan import HostPlan
from fp8fleet.preflight.facts import HostFacts, parts_of, read_facts

RECORDED = Path(__file__).resolve().parents[1] / "data/probes"
NOW = 1796011205
"""The time of the recordings."""

OVER = {"h100-80g": "gpu/h100-x8", "h200-141g": "gpu/h200-x2", "a100-80g": "gpu/a100-x4"}
"""A recording by accelerator."""


def sections(*names: str) -> dict[str, list[str]]:
    """The sections of ``host`` with those of the named recordings in their places."""
    merged: dict[str, list[str]] = {}
    for name in ("host", *names):
        current: list[str] = []
        for line in (RECORDED / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if line.startswith("@"):
                current = merged[line[1:]] = []
            elif not line.startswith("#"):
                current.append(line)
    return merged


def answer(*names: str, paths: Iterable[str] = (), without: Iterable[str] = ()) -> list[str]:
    """A probe's answer.

    Args:
        names: recordings, the later over the earlier, such as ``os/kylin-v10-sp1``.
        paths: the paths that were asked for; each gets the disk of the longest recorded prefix.
        without: sections that are left out.
    """
    merged = sections(*names)
    rows = {line.split()[0]: line.split(None, 1)[1] for line in merged["disk"] if "/" in line}
    for path in paths:
        known = [p for p in rows if p == "/usr" or path.startswith(p)]
        merged["disk"].insert(0, f" {path} {rows[max(known, key=len)]}")
    lines = []
    for section, held in merged.items():
        if section not in without:
            lines += [f"@{section}", *held]
    return [*lines, "@end"]


def facts(*names: str) -> HostFacts:
    """The compound fact of a recording."""
    parts = parts_of(answer(*names))
    assert parts is not None
    return read_facts(parts)


def for_plan(plan: HostPlan, *names: str) -> list[str]:
    """The answer of a host to the probe that ``plan`` asks for."""
    return answer(*names, paths=plan.requirements.paths)

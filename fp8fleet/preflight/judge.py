"""A host's compound fact judged against its plan and the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fp8fleet.plan import HostPlan
from fp8fleet.preflight import (
    checks_devices,
    checks_driver,
    checks_site,
    checks_storage,
    checks_system,
)
from fp8fleet.preflight.codes import CODES
from fp8fleet.preflight.facts import Part, parts_of, read_facts, user_of
from fp8fleet.preflight.findings import Case, Check, Finding, Judgement

CHECKS: tuple[Check, ...] = (
    *checks_system.CHECKS,
    *checks_storage.CHECKS,
    *checks_devices.CHECKS,
    *checks_driver.CHECKS,
    *checks_site.CHECKS,
)


def judge(
    plan: HostPlan, lines: Iterable[str], now: float, asked: float | None = None
) -> Judgement:
    """Judge a host.

    Args:
        plan: what the host shall be.
        lines: the probe's answer.
        now: the control machine's clock when the answer came, seconds since the epoch.
        asked: the same when the probe was sent; None: as ``now``.

    Returns:
        The facts, and the findings: errors first, each kind in the order of docs/preflight.md.
    """
    parts = parts_of(lines)
    if parts is None:
        return Judgement(None, (_no_answer(),))
    if "time" not in parts:
        return Judgement(None, tuple(_who(parts)))
    facts = read_facts(parts)
    case = Case(
        needs=plan.requirements,
        platform=plan.platform,
        selinux=plan.selinux,
        facts=facts,
        asked=now if asked is None else asked,
        now=now,
        firewall=plan.firewall,
        cmake=None if "cmake" in plan.packages else plan.cmake,
        drivers={item.name: item.version for item in plan.drivers.items},
    )
    mended = checks_driver.mended(plan.drivers.names)
    found = [f for look in CHECKS for f in look(case) if f.code not in mended]
    order = list(CODES)
    found.sort(key=lambda finding: (finding.severity != "error", order.index(finding.code)))
    return Judgement(facts, tuple(found))


def _no_answer() -> Finding:
    return Finding(
        "probe-failed",
        "the probe's answer has no end",
        "a POSIX shell that runs the probe to its end within its time limit",
        "log in and run `nvidia-smi` and `df`: what hangs there hangs the probe; look at dmesg",
    )


def _who(parts: Mapping[str, Part]) -> Iterator[Finding]:
    user = user_of(parts)
    if user.uid == 0:
        return
    if user.sudo is None and not user.sudo_missing:
        found = f"user {user.name} is not root"
    elif user.sudo_missing:
        found = f"user {user.name} is not root and the host has no sudo"
    else:
        found = f"user {user.name} is not root and sudo asks for a password"
    yield Finding(
        "no-root",
        found,
        "commands that run as root",
        "set _sudo = True, and sudo_password where sudo asks for one; or ssh_user = 'root'",
    )

"""Findings about the operating system, its clock and its packages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from packaging.version import Version

from fp8fleet import catalog
from fp8fleet.accounts import REMEDY, whose
from fp8fleet.plan import Requirements
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    some,
)

CLOCK_WRONG_S = 3600
CLOCK_SKEW_S = 10


def _root(case: Case) -> Iterator[Finding]:
    user = case.facts.user
    if user.uid != 0:
        yield Finding(
            "no-root",
            f"commands run as user {user.name}",
            "commands that run as root",
            "set _sudo = True, and sudo_password where sudo asks for one; or ssh_user = 'root'",
        )


def _time_limits(case: Case) -> Iterator[Finding]:
    # these three have findings of their own
    others = [name for name in case.facts.timed_out if name not in ("smi", "npu", "packages")]
    if others:
        yield Finding(
            "probe-incomplete",
            f"no answer in time from: {', '.join(others)}",
            "every part of the probe within its limit",
            "run the deploy again; where it stays so, look for a hung device, disk or daemon",
        )


def _unread(case: Case) -> Iterator[Finding]:
    if case.facts.user.uid != 0:
        return  # that is why
    for name, line in case.facts.unread.items():
        yield Finding(
            "unread",
            f"{name}: {line or 'too little'}",
            "what the host's tools print",
            "log in, look why its tools print that; what this part asks for was not judged",
        )


# Operating system


def _os(case: Case) -> Iterator[Finding]:
    system = case.facts.system
    shown = system.name or system.os_id or "no os-release"
    if system.service_pack:
        shown += f" {system.service_pack}"
    platform = catalog.platform_of(system.os_id, system.version_id, system.id_like)
    told = f"{shown} (ID={system.os_id}, VERSION_ID={system.version_id})"
    if platform is None:
        yield Finding(
            "os-unknown",
            told,
            f"one of {', '.join(catalog.platforms())}",
            "add the platform to fp8fleet/catalog/platforms.toml, with its source",
        )
    elif platform != case.platform:
        yield Finding(
            "os-mismatch",
            f"{told}, that is {platform}",
            f"platform = {case.platform!r}",
            f"set platform = {platform!r} for this host, or install the other system",
        )


def _architecture(case: Case) -> Iterator[Finding]:
    have, want = case.facts.system.architecture, case.needs.target.architecture
    other = f"set arch = {have!r}, with a lock for it, or take the host out of the inventory"
    if have != want:
        yield Finding(
            "arch-mismatch",
            have or "unknown",
            f"arch = {want!r}",
            other if have else "log in, look what `uname -m` says",
        )


def _glibc(case: Case) -> Iterator[Finding]:
    have = case.facts.system.glibc
    expected = catalog.platforms()[case.platform].glibc
    if have is None or have == expected:
        return
    needed = _glibc_floor(case.needs)
    if needed and Version(have) < Version(needed):
        yield Finding(
            "glibc-old",
            f"glibc {have}",
            f"glibc {needed} or newer for engine_release = {case.needs.release!r}",
            "choose another release (`fp8fleet catalog check`), or engine_build = 'source'"
            " (untested)",
        )
    else:
        yield Finding(
            "glibc-differs",
            f"glibc {have}",
            f"glibc {expected}, the catalogue's for {case.platform}",
            "make sure that the lock was made for this C library",
        )


def _glibc_floor(needs: Requirements) -> str | None:
    """What the release's wheels need there, its own and those of its requirements."""
    if needs.release is None or needs.target.build != "wheel":
        return None
    release = catalog.releases()[needs.release]
    arch = needs.target.architecture
    traps = [trap.glibc for trap in release.traps if trap.architecture in (None, arch)]
    return max([release.glibc, *traps], key=Version)


def _basics(case: Case) -> Iterator[Finding]:
    system = case.facts.system
    if system.init != "systemd":
        yield Finding(
            "init-missing",
            f"process 1 is {system.init or 'unknown'}",
            "systemd",
            "boot the host with systemd; a plain container cannot run servers as units",
        )
    if system.missing_tools:
        yield Finding(
            "tool-missing",
            f"no {', '.join(system.missing_tools)}",
            "coreutils, util-linux, grep, sed, awk and systemd",
            "install the distribution's base packages",
        )
    if system.container:
        yield Finding(
            "container",
            f"a container ({system.container})",
            "a host of its own, for kernel parameters and drivers",
            "set kernel parameters and drivers on the machine below",
        )
    if system.locale and not _is_utf8(system.locale):
        yield Finding(
            "locale-not-utf8",
            f"the system's locale is {system.locale}",
            "a UTF-8 locale",
            "localectl set-locale LANG=C.UTF-8",
        )
    if system.reboot_pending:
        yield Finding(
            "reboot-pending",
            "an update asks for a reboot",
            "a kernel and libraries that are in use as installed",
            "drain the host and reboot it",
        )


def _is_utf8(locale: str) -> bool:
    return locale in ("C", "POSIX") or re.search(r"utf-?8", locale, re.IGNORECASE) is not None


def _clock(case: Case) -> Iterator[Finding]:
    clock = case.facts.clock
    if clock.time is not None:
        # read at some moment between the question and the answer
        off = clock.time - min(max(clock.time, case.asked), case.now)
        shown = f"{_duration(abs(off))} {'ahead of' if off > 0 else 'behind'} this machine"
        if abs(off) > CLOCK_WRONG_S:
            yield Finding(
                "clock-wrong",
                shown,
                "the right time, to the second",
                "set the clock of the machine below"
                if case.facts.system.container
                else "set the clock (timedatectl set-time); the run starts a time service",
            )
        elif abs(off) > CLOCK_SKEW_S:
            yield Finding(
                "clock-skew", shown, "the right time, to the second", "check the time sources"
            )
    # elsewhere the run starts a time service
    if case.facts.system.container and not clock.services and not clock.synchronized:
        yield Finding(
            "clock-unsynced",
            "a container, and the kernel's clock is not synchronized",
            "a time service on the machine below, whose clock this is",
            "start one there",
        )


def _duration(seconds: float) -> str:
    for size, unit in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _account(case: Case) -> Iterator[Finding]:
    facts, needs = case.facts, case.needs
    if others := whose(facts.account, facts.account_group, needs.home):
        yield Finding(
            "user-taken", f"{needs.service_user}: {others}", "a user of fp8fleet's own", REMEDY
        )


# Packages


def _packages(case: Case) -> Iterator[Finding]:
    packages = case.facts.packages
    managers = packages.managers
    again = packages.broken
    unfinished = packages.unfinished
    if again and (managers or case.facts.system.earlier_run):
        # in the middle of its work, or what a killed run left: this run's apt finishes it
        again, unfinished = (), (*again, *unfinished)
    if packages.error:
        yield Finding(
            "packages-broken",
            f"{'dpkg' if packages.family == 'apt' else 'rpm'}: {packages.error}",
            "a package database that answers",
            "put /var/lib/dpkg/status-old or one of /var/backups/dpkg.status.* in the place of"
            " /var/lib/dpkg/status"
            if packages.family == "apt"
            else "end what holds /var/lib/rpm/.rpm.lock; then `rpm --rebuilddb`",
        )
    if again:
        yield Finding(
            "packages-broken",
            f"half-installed: {some(again)}",
            "packages that are installed or absent",
            f"apt-get install --reinstall {' '.join(again[:3])}, or remove them",
        )
    if unfinished:
        yield Finding(
            "packages-unfinished",
            f"not configured: {some(unfinished)}",
            "configured packages",
            "nothing: the host role runs `dpkg --configure -a`",
        )
    if managers:
        yield Finding(
            "packages-busy",
            f"at work: {some(managers)}",
            "one package manager at a time",
            "nothing: the run waits up to five minutes",
        )


def _cmake(case: Case) -> Iterator[Finding]:
    planned, have = case.cmake, case.facts.cmake
    if planned is None or planned.url or "cmake" in case.facts.timed_out:
        return
    if have is None or Version(have) < Version(planned.minimum):
        yield Finding(
            "cmake-old",
            f"cmake {have}" if have else "no cmake",
            f"cmake {planned.minimum} or newer: engine_build = 'source'",
            "set cmake_archive_url and cmake_sha256, or install one",
        )


def _upgrades(case: Case) -> Iterator[Finding]:
    packages = case.facts.packages
    accelerated = case.needs.target.accelerator not in (None, "cpu")
    if not (packages.unattended and accelerated):
        return
    loose = [package for package in packages.drivers if not _is_held(package, packages.held)]
    if loose or not packages.drivers:
        what = f"; not held: {some(loose)}" if loose else "; no driver package is held"
        yield Finding(
            "upgrades-unattended",
            f"{', '.join(packages.unattended)} is on{what}",
            "driver and kernel that change when you say so",
            "nothing, where hold_packages names them: the host role holds them; otherwise name them"
            " or switch the timer off",
        )


def _is_held(package: str, held: Iterable[str]) -> bool:
    """Whether a hold names the package, by its name, a pattern or name-version."""
    name = package.split()[0]
    patterns = [pattern for pattern in held if pattern]
    return any(name.startswith(p.rstrip("*")) or p.startswith(name) for p in patterns)


CHECKS: tuple[Check, ...] = (
    _root,
    _time_limits,
    _unread,
    _os,
    _architecture,
    _glibc,
    _basics,
    _clock,
    _account,
    _packages,
    _cmake,
    _upgrades,
)

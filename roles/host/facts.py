"""What a host has of packages, accounts, kernel parameters and units: one command for the role."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyinfra.api import FactBase

from fp8fleet import catalog
from fp8fleet.accounts import Account, group_id, passwd_account
from fp8fleet.plan import NVIDIA_UNIT, PERSISTENCE_UNIT, STATE_DIRECTORY, HostPlan
from roles.facts import PathState, PathStates

DNF_CONFIGURATION = "/etc/dnf/dnf.conf"

NOUVEAU = "nouveau"
"""Under this name it is noted with which file the initramfs was built."""

Versions = dict[str, tuple[str, ...]]
"""Installed versions by package; of an RPM ``EPOCH:VERSION-RELEASE``."""


class InstalledPackages(FactBase[Versions]):
    """Those of ``names`` that are installed, with their versions, asked from dpkg or rpm.

    An RPM that another package provides counts with no version.
    """

    def command(self, names: Sequence[str], family: str) -> str:
        quoted = " ".join(shlex.quote(name) for name in names)
        if family == "apt":
            status = "${db:Status-Status} ${Package} ${Package} ${Version}\\n"
            return f"dpkg-query -W -f '{status}' {quoted} 2>/dev/null || true"
        known = "%{NAME} %{EPOCHNUM}:%{VERSION}-%{RELEASE}\\n"
        return (
            f"for p in {quoted}; do"
            f' rpm -q --whatprovides --qf "installed $p {known}" $p 2>/dev/null; done; true'
        )

    @staticmethod
    def default() -> Versions:
        return {}

    def process(self, output: list[str]) -> Versions:
        found: Versions = {}
        for line in output:
            words = line.split()
            if len(words) == 4 and words[0] == "installed":
                versions = (words[3],) if words[1] == words[2] else ()
                found[words[1]] = (*found.get(words[1], ()), *versions)
        return found


class AvailableVersions(FactBase[Versions]):
    """The versions of ``names`` that the package sources have; ``options`` go to dnf."""

    def command(self, names: Sequence[str], family: str, options: str) -> str:
        quoted = " ".join(shlex.quote(name) for name in names)
        if family == "apt":
            return f"apt-cache madison {quoted} 2>/dev/null | sed 's/|//g'; true"
        query = "repoquery --showduplicates --qf '%{name} %{epoch}:%{version}-%{release}'"
        return f"dnf -q{options} --disableexcludes=main {query} {quoted} 2>/dev/null; true"

    @staticmethod
    def default() -> Versions:
        return {}

    def process(self, output: list[str]) -> Versions:
        found: Versions = {}
        for line in output:
            words = line.split()
            if len(words) >= 2 and words[1] not in found.get(words[0], ()):
                found[words[0]] = (*found.get(words[0], ()), words[1])
        return found


@dataclass(frozen=True)
class KernelParameter:
    """A kernel parameter's value, whitespace normalised; None where the kernel lacks it."""

    value: str | None
    writable: bool


class KernelParameters(FactBase[dict[str, KernelParameter]]):
    """The values of kernel parameters by name, and whether this host may set them."""

    def command(self, names: Sequence[str]) -> str:
        quoted = " ".join(shlex.quote(name) for name in names)
        return (
            f"for n in {quoted}; do f=/proc/sys/$(echo $n | tr . /); "
            'if [ ! -e $f ]; then echo "$n - -"; '
            # some have several lines, others cannot be read
            'else [ -w $f ] && w=rw || w=ro; echo "$n $w $(tr 2>/dev/null "\\n" " " <$f)"; fi; done'
        )

    @staticmethod
    def default() -> dict[str, KernelParameter]:
        return {}

    def process(self, output: list[str]) -> dict[str, KernelParameter]:
        found = {}
        for line in output:
            match line.split():
                case [name, "-", "-"]:
                    found[name] = KernelParameter(None, False)
                case [name, ("rw" | "ro") as access, *value]:
                    found[name] = KernelParameter(" ".join(value), access == "rw")
        return found


@dataclass(frozen=True)
class Unit:
    """A systemd unit as ``systemctl show`` tells it."""

    load: str = "not-found"
    active: bool = False
    file_state: str = ""
    needs_reload: bool = False

    @property
    def exists(self) -> bool:
        """Whether the host has the unit."""
        return self.load not in ("", "not-found")

    @property
    def starts_at_boot(self) -> bool:
        """Enabled, or of those that others pull in and nobody can enable."""
        return self.file_state in ("enabled", "static", "indirect", "alias", "generated")


@dataclass(frozen=True)
class HostFacts:
    """All that the host role asks."""

    paths: dict[str, PathState] = field(default_factory=dict)
    packages: Versions = field(default_factory=dict)
    parameters: dict[str, KernelParameter] = field(default_factory=dict)
    user: Account | None = None
    group: str | None = None
    """Id of the service user's group."""
    units: Mapping[str, Unit] = field(default_factory=dict)
    clocks: tuple[str, ...] = ()
    """Units that run and keep the clock."""
    applied: Mapping[str, str] = field(default_factory=dict)
    """Digest of what is in force by its name, as noted when it was put in force."""
    dnf_sources: tuple[str, ...] = ()
    """Lines of ours in dnf's configuration that name the package sources."""
    container: bool = False

    def unit(self, name: str) -> Unit:
        """A unit of the host, or one that is not there."""
        return self.units.get(name, Unit())


class HostState(FactBase[HostFacts]):
    """What the host role has to know of a host for its plan, in one command."""

    def command(self, plan: HostPlan) -> str:
        user = plan.service_user
        parts = {
            "paths": PathStates().command(paths=_paths(plan)),
            "packages": InstalledPackages().command(names=plan.packages, family=plan.family),
            "parameters": KernelParameters().command(names=list(plan.sysctl)),
            "user": f"getent passwd {user} || true",
            "group": f"getent group {user} || true",
            "units": _show_units(_units(plan)),
            "clocks": _show_active(catalog.clock_units()),
            "applied": _SHOW_APPLIED,
            "dnf": dnf_block_command("sources"),
            "container": "systemd-detect-virt --quiet --container && echo yes; true",
        }
        return _joined(parts)

    @staticmethod
    def default() -> HostFacts:
        return HostFacts()

    def process(self, output: list[str]) -> HostFacts:
        parts = _parts(output)
        return HostFacts(
            paths=PathStates().process(parts.get("paths", [])),
            packages=InstalledPackages().process(parts.get("packages", [])),
            parameters=KernelParameters().process(parts.get("parameters", [])),
            user=passwd_account(parts.get("user", ())),
            group=group_id(parts.get("group", ())),
            units=dict(_unit(line) for line in parts.get("units", ())),
            clocks=tuple(line.split()[0] for line in parts.get("clocks", ())),
            applied=_applied(parts.get("applied", ())),
            dnf_sources=tuple(parts.get("dnf", ())),
            container="yes" in parts.get("container", ()),
        )


_SHOW_APPLIED = f"cd {STATE_DIRECTORY} 2>/dev/null && grep -s . *.applied /dev/null; true"


def _show_units(names: Sequence[str]) -> str:
    show = "systemctl show -p LoadState,ActiveState,UnitFileState,NeedDaemonReload $u"
    return f'for u in {" ".join(names)}; do echo "$u" $({show} 2>/dev/null); done'


def _show_active(patterns: Sequence[str]) -> str:
    quoted = " ".join(map(shlex.quote, patterns))
    return f"systemctl list-units --plain --no-legend --state=active {quoted} 2>/dev/null; true"


def _joined(parts: Mapping[str, str]) -> str:
    return "; ".join(f"echo @{name}; ( {text} )" for name, text in parts.items())


def _applied(lines: Sequence[str]) -> dict[str, str]:
    pairs = (line.partition(".applied:") for line in lines)
    return {name: digest for name, _, digest in pairs}


def _paths(plan: HostPlan) -> list[str]:
    directories = (*plan.preparation.directories, *plan.directories)
    files = [file.path for file in plan.role_files("host")]
    return [*(directory.path for directory in directories), *files, *plan.role_absent("host")]


def _units(plan: HostPlan) -> list[str]:
    ready = plan.preparation
    names = [service.unit for service in ready.services]
    return [ready.time.unit, *names, *ready.retired]


def _parts(output: list[str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in output:
        if re.fullmatch(r"@[a-z]+", line):
            lines = parts.setdefault(line[1:], [])
        elif line.strip():
            lines.append(line)
    return parts


def _unit(line: str) -> tuple[str, Unit]:
    name, *pairs = line.split()
    values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return name, Unit(
        load=values.get("LoadState", ""),
        active=values.get("ActiveState") == "active",
        file_state=values.get("UnitFileState", ""),
        needs_reload=values.get("NeedDaemonReload") == "yes",
    )


def dnf_markers(name: str) -> tuple[str, str]:
    """The comments around our lines ``name`` in dnf's configuration."""
    return f"# fp8fleet {name}: begin", f"# fp8fleet {name}: end"


def dnf_block_command(name: str) -> str:
    """A command that prints our lines ``name`` of dnf's configuration."""
    begin, end = dnf_markers(name)
    inner = f"/^{begin}$/,/^{end}$/{{ /^# fp8fleet /!p; }}"
    return f"sed -n {shlex.quote(inner)} {DNF_CONFIGURATION} 2>/dev/null; true"


@dataclass(frozen=True)
class NvidiaFacts:
    """What of NVIDIA's driver is loaded and runs."""

    persistence: Unit = field(default_factory=Unit)
    devices: Unit = field(default_factory=Unit)
    """Our unit, which makes the device files."""
    nouveau_digest: str | None = None
    """Of the file with which the initramfs was built."""
    modules: frozenset[str] = frozenset()
    """Which of nvidia and nouveau the kernel has loaded."""


class NvidiaState(FactBase[NvidiaFacts]):
    """What of NVIDIA's driver is loaded and runs, asked after what installs drivers."""

    def command(self) -> str:
        return _joined(
            {
                "units": _show_units((PERSISTENCE_UNIT, NVIDIA_UNIT)),
                "applied": _SHOW_APPLIED,
                "modules": "sed -n 's/^\\(nvidia\\|nouveau\\) .*/\\1/p' /proc/modules; true",
            }
        )

    @staticmethod
    def default() -> NvidiaFacts:
        return NvidiaFacts()

    def process(self, output: list[str]) -> NvidiaFacts:
        parts = _parts(output)
        units = dict(_unit(line) for line in parts.get("units", ()))
        return NvidiaFacts(
            persistence=units.get(PERSISTENCE_UNIT, Unit()),
            devices=units.get(NVIDIA_UNIT, Unit()),
            nouveau_digest=_applied(parts.get("applied", ())).get(NOUVEAU),
            modules=frozenset(parts.get("modules", ())),
        )


@dataclass(frozen=True)
class HeldPackages:
    """What upgrades of a host leave as it is."""

    matching: frozenset[str] = frozenset()
    """Installed packages that the plan would have held (apt)."""
    held: frozenset[str] = frozenset()
    """Those that are, whoever held them (apt)."""
    ours: frozenset[str] = frozenset()
    """Those that fp8fleet held (apt)."""
    excluded: tuple[str, ...] = ()
    """Our lines in dnf's configuration (dnf)."""
    exclude_keys: frozenset[str] = frozenset()
    """Which keys that exclude packages the operator's own lines have there (dnf)."""


class Holds(FactBase[HeldPackages]):
    """What upgrades of a host leave as it is."""

    def command(self, patterns: Sequence[str], family: str) -> str:
        if family == "dnf":
            begin, end = dnf_markers("holds")
            other = f"/^{begin}$/,/^{end}$/d; s/^\\(exclude[a-z]*\\) *=.*/uses \\1/p"
            return (
                f"( {dnf_block_command('holds')} ) | sed 's/^/excluded /';"
                f" sed -n {shlex.quote(other)} {DNF_CONFIGURATION} 2>/dev/null; true"
            )
        quoted = " ".join(shlex.quote(pattern) for pattern in patterns)
        status = "${db:Status-Status} ${Package}\\n"
        matching = f"dpkg-query -W -f '{status}' {quoted} 2>/dev/null" if patterns else "true"
        return (
            f"{matching} | sed -n 's/^installed /matching /p';"
            f" apt-mark showhold | sed 's/^/held /';"
            f" sed 's/^/ours /' {STATE_DIRECTORY}/held 2>/dev/null; true"
        )

    @staticmethod
    def default() -> HeldPackages:
        return HeldPackages()

    def process(self, output: list[str]) -> HeldPackages:
        rows = [line.split(" ", 1) for line in output if " " in line]

        def named(kind: str) -> list[str]:
            return [row[1] for row in rows if row[0] == kind]

        return HeldPackages(
            matching=frozenset(named("matching")),
            held=frozenset(name.partition(":")[0] for name in named("held")),
            ours=frozenset(named("ours")),
            excluded=tuple(named("excluded")),
            exclude_keys=frozenset(named("uses")),
        )

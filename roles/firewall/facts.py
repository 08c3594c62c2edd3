"""What a host's firewall is and lets in: one command for either of the two."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyinfra.api import FactBase

from fp8fleet.plan import FirewallRule

MARK = "fp8fleet"
"""Comment of our rules in ufw."""
RECORD = "/etc/fp8fleet/firewall.rules"
"""Our rich rules in firewalld, which knows no comments: lines of zone and rule."""
HOLD = "/etc/systemd/system/firewalld.service.d/fp8fleet.conf"
"""Keeps a firewalld that was just installed from starting before it lets SSH in."""
WATCHDOG = "fp8fleet-firewall-off"
"""Switches the firewall off again, unless SSH has got in after it was switched on."""

# Who listens for SSH: sshd itself, or systemd for it, which the established connections show.
_SSH = (
    "ss -Htnlp 2>/dev/null | sed -n 's/^/listen /p'; "
    "ss -Htnp state established 2>/dev/null | sed -n 's/^/established /p'; "
)


def _installed(packages: Sequence[str]) -> str:
    """Whole packages: one that is unpacked and not configured has its programs already."""
    names = " ".join(shlex.quote(name) for name in packages)
    dpkg = "dpkg-query -W -f '${db:Status-Status}\\n' $p 2>/dev/null | grep -qx installed"
    return (
        f"m=; for p in {names}; do if command -v dpkg-query >/dev/null; then {dpkg};"
        " else rpm -q --quiet --whatprovides $p; fi || m=$p; done; [ $m ] || echo installed; "
    )


_COMMON = f"systemctl -q is-active {WATCHDOG}.timer && echo watchdog; {_SSH}"


@dataclass(frozen=True)
class UfwState:
    """ufw: whether it is there, in force, in force after a boot, and its rules."""

    installed: bool = False
    active: bool = False
    enabled: bool = False
    firewalld: bool = False
    """Whether the other firewall runs."""
    watchdog: bool = False
    ssh_ports: tuple[int, ...] = ()
    allowed: frozenset[FirewallRule] = frozenset()
    """Stored rules, whoever made them."""
    limited: frozenset[FirewallRule] = frozenset()
    """Those of others that let in a few connections a minute (``ufw limit``)."""
    denied: frozenset[FirewallRule] = frozenset()
    ours: frozenset[FirewallRule] = frozenset()
    in_force: frozenset[FirewallRule] = frozenset()
    """Allowed by the kernel."""

    @property
    def let_in(self) -> frozenset[FirewallRule]:
        """Stored rules that need not be added; ufw would replace them."""
        return self.allowed | self.limited


class Ufw(FactBase[UfwState]):
    """ufw's settings, its stored rules and those in force (ufw(8), ufw-framework(8))."""

    def command(self, packages: Sequence[str]) -> str:
        return (
            f"{_installed(packages)}"
            "systemctl -q is-active firewalld.service && echo firewalld; "
            "grep -qs '^ENABLED=yes' /etc/ufw/ufw.conf"
            " && systemctl -q is-enabled ufw.service && echo enabled; "
            "grep -hs '^### tuple' /etc/ufw/user.rules /etc/ufw/user6.rules; "
            "iptables -S ufw-user-input 2>/dev/null; ip6tables -S ufw6-user-input 2>/dev/null; "
            f"{_COMMON}true"
        )

    @staticmethod
    def default() -> UfwState:
        return UfwState()

    def process(self, output: list[str]) -> UfwState:
        stored = [known for line in output if (known := _stored(line))]
        return UfwState(
            installed="installed" in output,
            active="-N ufw-user-input" in output,
            enabled="enabled" in output,
            firewalld="firewalld" in output,
            watchdog="watchdog" in output,
            ssh_ports=ssh_ports(output),
            allowed=frozenset(rule for action, rule, _ in stored if action == "allow"),
            limited=frozenset(rule for action, rule, _ in stored if action == "limit"),
            denied=frozenset(rule for action, rule, _ in stored if action in ("deny", "reject")),
            ours=frozenset(rule for _, rule, comment in stored if comment == MARK),
            in_force=frozenset(rule for line in output if (rule := _in_force(line))),
        )


def _stored(line: str) -> tuple[str, FirewallRule, str] | None:
    """An incoming TCP rule of user.rules: action, rule, comment (which is in hexadecimal)."""
    anywhere = r"(?:0\.0\.0\.0/0|::/0)"
    match = re.fullmatch(
        r"### tuple ### (allow|limit|deny|reject) tcp (\d+)(?::(\d+))?"
        rf" {anywhere} any (\S+) in(?: comment=([0-9a-f]*))?",
        line,
    )
    if match is None:
        return None
    source = None if re.fullmatch(anywhere, match[4]) else match[4]
    comment = bytes.fromhex(match[5] or "").decode(errors="replace")
    return match[1], _rule(match[2], match[3], source), comment


def _in_force(line: str) -> FirewallRule | None:
    """A rule as `iptables -S` prints it."""
    match = re.fullmatch(
        r"-A ufw6?-user-input (?:-s (\S+) )?-p tcp"
        r" -m (?:tcp|multiport) --dports? (\d+)(?::(\d+))? -j ACCEPT",
        line,
    )
    if match is None:
        return None
    source = re.sub(r"(?<=\.)(\d+)/32$|/128$", r"\1", match[1]) if match[1] else None
    return _rule(match[2], match[3], source)


def _rule(port: str, last: str | None, source: str | None) -> FirewallRule:
    return FirewallRule(int(port), source, int(last) if last else None)


def ssh_ports(output: Iterable[str]) -> tuple[int, ...]:
    """Ports on which SSH comes in, from lines of ``ss -Htnlp`` and of its established ones."""
    listening: dict[int, str] = {}
    connected: set[int] = set()
    for line in output:
        kind, _, rest = line.partition(" ")
        words = rest.split()
        if kind == "listen" and len(words) >= 4 and (port := _port(words[3])):
            listening[port] = f"{listening.get(port, '')} {rest}"
        elif kind == "established" and '"sshd' in rest and len(words) >= 3:
            connected.add(_port(words[2]) or 0)
    found = {port for port, who in listening.items() if '"sshd' in who}
    return tuple(sorted(found | (connected & listening.keys())))


def _port(address: str) -> int | None:
    text = address.rpartition(":")[2]
    return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class Zone:
    """A zone of firewalld: whether traffic comes to it, and its rich rules."""

    name: str
    target: str = "default"
    used: bool = False
    """Whether interfaces or sources are bound to it."""
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FirewalldState:
    """firewalld: whether it is there, runs, starts at boot, and its zones."""

    installed: bool = False
    active: bool = False
    enabled: bool = False
    masked: bool = False
    held: bool = False
    """Whether `HOLD` is there."""
    ufw: bool = False
    """Whether the other firewall is in force."""
    watchdog: bool = False
    ssh_ports: tuple[int, ...] = ()
    default_zone: str = "public"
    bound_zones: tuple[str, ...] = ()
    """Zones that the network's configuration names."""
    runtime: dict[str, Zone] = field(default_factory=dict)
    """In force now; empty where it does not run."""
    permanent: dict[str, Zone] = field(default_factory=dict)
    """In force after a restart."""
    recorded: frozenset[tuple[str, str]] = frozenset()
    """Zone and rule of what we added."""


class Firewalld(FactBase[FirewalldState]):
    """firewalld's zones, in force and stored (firewall-cmd(1), firewall-offline-cmd(1))."""

    def command(self, packages: Sequence[str]) -> str:
        zones = "--list-all-zones | sed"
        return (
            f"{_installed(packages)}"
            "systemctl show firewalld.service -p ActiveState,UnitFileState,LoadState; "
            f"[ -e {HOLD} ] && echo held; "
            "iptables -S ufw-user-input >/dev/null 2>&1 && echo ufw; "
            "sed -n 's/^DefaultZone=/default /p' /etc/firewalld/firewalld.conf 2>/dev/null; "
            "sed -n 's/^ZONE=/bound /p;s/^zone=/bound /p'"
            " /etc/sysconfig/network-scripts/ifcfg-*"
            " /etc/NetworkManager/system-connections/* 2>/dev/null; "
            f"sed 's/^/record /' {RECORD} 2>/dev/null; "
            "if systemctl -q is-active firewalld.service; then "
            f"firewall-cmd {zones} 's/^/runtime /'; firewall-cmd --permanent {zones}"
            " 's/^/permanent /'; elif command -v firewall-offline-cmd >/dev/null; then "
            f"firewall-offline-cmd {zones} 's/^/permanent /'; fi; "
            f"{_COMMON}true"
        )

    @staticmethod
    def default() -> FirewalldState:
        return FirewalldState()

    def process(self, output: list[str]) -> FirewalldState:
        values = dict(line.split("=", 1) for line in output if re.match(r"[A-Z]\w+State=", line))
        recorded = [line.split(" ", 1) for line in _after(output, "record") if " " in line]
        return FirewalldState(
            installed="installed" in output,
            active=values.get("ActiveState") == "active",
            enabled=values.get("UnitFileState") == "enabled",
            masked=values.get("LoadState") == "masked",
            held="held" in output,
            ufw="ufw" in output,
            watchdog="watchdog" in output,
            ssh_ports=ssh_ports(output),
            default_zone=next(iter(_after(output, "default")), "public").strip(),
            bound_zones=tuple(dict.fromkeys(z.strip("\"' ") for z in _after(output, "bound"))),
            runtime=_zones(_after(output, "runtime")),
            permanent=_zones(_after(output, "permanent")),
            recorded=frozenset((zone, rule) for zone, rule in recorded),
        )


def _after(output: Iterable[str], word: str) -> list[str]:
    return [line[len(word) + 1 :] for line in output if line.startswith(f"{word} ")]


def _zones(lines: Iterable[str]) -> dict[str, Zone]:
    """Zones from ``--list-all-zones``: a name, then indented ``key: values`` and rich rules."""
    zones: dict[str, Zone] = {}
    name = ""
    values: dict[str, str] = {}
    rules: set[str] = set()

    def add() -> None:
        if name:
            used = bool(values.get("interfaces") or values.get("sources"))
            zones[name] = Zone(name, values.get("target", "default"), used, frozenset(rules))

    for line in lines:
        text = line.strip()
        if text and not line[0].isspace():
            add()
            name, values, rules = text.split()[0], {}, set()
        elif text.startswith("rule "):
            rules.add(text)
        elif ":" in text:
            key, _, value = text.partition(":")
            values[key] = value.strip()
    add()
    return zones

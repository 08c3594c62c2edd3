"""What a host's firewall is and lets in: one command for either of the two."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyinfra.api import FactBase

from fp8fleet.firewalls import Rule, Zone, read_zones, service_ports, ssh_ports, ufw_rule
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
    lets_all_in: bool = False
    """Whether it would let in what no rule names."""
    watchdog: bool = False
    ssh_ports: tuple[int, ...] = ()
    allowed: frozenset[FirewallRule] = frozenset()
    """Stored rules, whoever made them."""
    limited: frozenset[FirewallRule] = frozenset()
    """Those of others that let in a few connections a minute (``ufw limit``)."""
    rules: tuple[Rule, ...] = ()
    """All stored ones about incoming TCP, in the order in which ufw goes by them."""
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
            "grep -qs '^DEFAULT_INPUT_POLICY=.*ACCEPT' /etc/default/ufw && echo lets-all-in; "
            "grep -hs '^### tuple' /etc/ufw/user.rules /etc/ufw/user6.rules; "
            "iptables -S ufw-user-input 2>/dev/null; ip6tables -S ufw6-user-input 2>/dev/null; "
            f"{_COMMON}true"
        )

    @staticmethod
    def default() -> UfwState:
        return UfwState()

    def process(self, output: list[str]) -> UfwState:
        rules = tuple(stored for line in output if (stored := ufw_rule(line)))
        return UfwState(
            installed="installed" in output,
            active="-N ufw-user-input" in output,
            enabled="enabled" in output,
            firewalld="firewalld" in output,
            lets_all_in="lets-all-in" in output,
            watchdog="watchdog" in output,
            ssh_ports=ssh_ports(output),
            allowed=_planned(rule for rule in rules if rule.action == "allow"),
            limited=_planned(rule for rule in rules if rule.action == "limit"),
            rules=rules,
            ours=_planned(rule for rule in rules if rule.comment == MARK),
            in_force=frozenset(rule for line in output if (rule := _in_force(line))),
        )


def _planned(rules: Iterable[Rule]) -> frozenset[FirewallRule]:
    return frozenset(rule.planned for rule in rules if rule.planned)


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
    services: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Ports of firewalld's services."""
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
            "grep -s '<port ' /usr/lib/firewalld/services/*.xml /etc/firewalld/services/*.xml"
            " | sed 's/^/service /'; "
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
            runtime=read_zones(_after(output, "runtime")),
            permanent=read_zones(_after(output, "permanent")),
            services=service_ports(_after(output, "service")),
            recorded=frozenset((zone, rule) for zone, rule in recorded),
        )


def _after(output: Iterable[str], word: str) -> list[str]:
    return [line[len(word) + 1 :] for line in output if line.startswith(f"{word} ")]

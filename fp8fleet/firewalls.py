"""What a host's ufw or firewalld says of incoming TCP connections, read from its own words.

Preflight judges by it, and the firewall role; both ask the host for the same lines.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8fleet.addresses import short
from fp8fleet.plan import FirewallRule

EVERYBODY = ("0.0.0.0/0", "::/0")
"""The networks that are all addresses of a family."""
OPEN_TARGET = "ACCEPT"
"""Target of firewalld's zones that let everything in."""
SHUT_TARGETS = ("DROP", "%%REJECT%%", "REJECT")
"""Targets of those that let in what a rule names, and answer nobody else."""

Action = Literal["allow", "limit", "deny"]
Ports = tuple[tuple[int, int], ...]
"""Ranges, both ends included."""
_ALL_PORTS: Ports = ((0, 65535),)


@dataclass(frozen=True)
class Rule:
    """A rule about incoming TCP connections."""

    action: Action
    """``limit``: allowed, a few a minute; ``deny``: refused or dropped."""
    ports: Ports
    source: str | None
    """A network, ``ADDRESS/BITS``; None: everybody of both families."""
    text: str
    """As an operator finds it with the firewall's own program."""
    narrow: bool = False
    """Whether it asks for more than port and source: an interface, a destination, ..."""
    planned: FirewallRule | None = None
    """The rule of a plan that it is, of ufw's."""
    comment: str = ""

    def names(self, port: int, last: int | None = None) -> bool:
        """Whether it is about the port, or all of a range up to ``last``, for whomever."""
        return any(low <= port and (last or port) <= high for low, high in self.ports)

    def covers(self, port: int, source: str, last: int | None = None) -> bool:
        """Whether it decides about every connection from the network to the port, or the range."""
        return not self.narrow and self.names(port, last) and _contains(self.source, source)


def first_fit(
    rules: Iterable[Rule], port: int, source: str, last: int | None = None
) -> Rule | None:
    """The rule that decides about all of ``source``; the first that fits wins.

    Args:
        rules: in the order in which the firewall goes by them.
        port: of TCP.
        source: an address or network.
        last: where a range that begins with ``port`` ends.
    """
    return next((rule for rule in rules if rule.covers(port, source, last)), None)


def denial(rules: Sequence[Rule], planned: FirewallRule) -> Rule | None:
    """The rule that keeps out all that a plan lets in, of one family at least, if there is one."""
    sources = (planned.source,) if planned.source else EVERYBODY
    fits = (first_fit(rules, planned.port, source, planned.last) for source in sources)
    return next((rule for rule in fits if rule and rule.action == "deny"), None)


@dataclass(frozen=True)
class Firewall:
    """A firewall that a host has, on or off."""

    name: str
    active: bool
    chains: tuple[tuple[Rule, ...], ...]
    """Rules in the order in which it goes by them: of ufw one chain, of firewalld one a zone."""
    lets_all_in: bool = False
    """Whether what no rule names is let in."""
    ipv6: bool = True
    """Whether it takes rules for IPv6."""

    def lets_in(self, port: int, last: int | None = None) -> bool:
        """Whether a rule lets somebody in, to the port or the range up to ``last``."""
        return any(
            rule.action != "deny" and rule.names(port, last)
            for chain in self.chains
            for rule in _until_denied(chain, port, last)
        )

    def is_open(self, port: int) -> bool:
        """Whether rules let in everybody, of one family at least."""
        fits = (first_fit(chain, port, network) for chain in self.chains for network in EVERYBODY)
        return any(rule is not None and rule.action != "deny" for rule in fits)


def _until_denied(chain: Iterable[Rule], port: int, last: int | None) -> Iterator[Rule]:
    """The rules before the one that keeps out everybody."""
    for rule in chain:
        if rule.action == "deny" and rule.covers(port, EVERYBODY[0], last):
            return
        yield rule


def _contains(outer: str | None, inner: str) -> bool:
    if outer is None:
        return True
    one, other = ipaddress.ip_network(outer), ipaddress.ip_network(inner)
    return one.version == other.version and (
        one.prefixlen <= other.prefixlen and other.network_address in one
    )


# ufw


def ufw_rule(line: str) -> Rule | None:
    """A line ``### tuple ###`` of ufw's user.rules (ufw 0.36, backend_iptables.py).

    Its words: ACTION[_LOG] PROTOCOL PORTS DESTINATION SOURCE-PORTS SOURCE [APP SOURCE-APP]
    DIRECTION[_INTERFACE] [comment=HEX]; an application profile's ports stand in PORTS.

    Returns:
        The rule; None: it is none about incoming TCP connections.
    """
    head, _, rest = line.partition("### tuple ### ")
    words = rest.split()
    comment = ""
    if words and words[-1].startswith("comment="):
        comment = _from_hex(words.pop().removeprefix("comment="))
    if head or len(words) not in (7, 9):
        return None
    named, protocol, ports, destination, source_ports, source = words[:6]
    application = words[6] if len(words) == 9 else "-"
    direction, _, interface = words[-1].partition("_")
    action = _UFW_ACTIONS.get(named.partition("_")[0])
    numbers = _ports(ports)
    network = _network(source)
    if action is None or numbers is None or network is None:
        return None
    if direction != "in" or protocol not in ("tcp", "any"):
        return None
    narrow = bool(interface) or destination not in EVERYBODY or source_ports != "any"
    plain = protocol == "tcp" and len(numbers) == 1 and application == "-" and not narrow
    return Rule(
        action,
        numbers,
        network,
        _ufw_text(named, protocol, ports, source, application),
        narrow,
        _planned(*numbers[0], _source(network)) if plain and ports != "any" else None,
        comment,
    )


def _planned(port: int, last: int, source: str | None) -> FirewallRule:
    return FirewallRule(port, source, last if last != port else None)


_UFW_ACTIONS: dict[str, Action] = {
    "allow": "allow",
    "limit": "limit",
    "deny": "deny",
    "reject": "deny",
}


def _ufw_text(action: str, protocol: str, ports: str, source: str, application: str) -> str:
    what = "" if ports == "any" else ports + ("" if protocol == "any" else f"/{protocol}")
    if application != "-":
        what = application.replace("%20", " ")
    origin = "" if source in EVERYBODY else f"from {source}"
    return " ".join(filter(None, (action, what, origin)))


def _source(network: str) -> str | None:
    return None if network in EVERYBODY else short(ipaddress.ip_network(network))


def _from_hex(text: str) -> str:
    try:
        return bytes.fromhex(text).decode(errors="replace")
    except ValueError:
        return text


def _ports(text: str) -> Ports | None:
    """``any``, or numbers and ranges: ``80,443``, ``8000:8100``, ``8000-8100``."""
    if text == "any":
        return _ALL_PORTS
    ranges = [re.fullmatch(r"(\d{1,5})(?:[:-](\d{1,5}))?", part) for part in text.split(",")]
    return tuple((int(m[1]), int(m[2] or m[1])) for m in ranges if m) or None


def _network(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None


# firewalld


@dataclass(frozen=True)
class Zone:
    """A zone of firewalld: whether traffic comes to it, and what it lets in."""

    name: str
    target: str = "default"
    used: bool = False
    """Whether interfaces or sources are bound to it, and it does more than shut those out."""
    rules: frozenset[str] = frozenset()
    """Rich rules."""
    ports: tuple[str, ...] = ()
    """Such as ``8000-8100/tcp``."""
    services: tuple[str, ...] = ()

    def chain(self, services: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
        """Its rules in firewalld's order: by priority, what denies first.

        Args:
            services: ports of services, from `service_ports`.
        """
        found = [rich for text in sorted(self.rules) for rich in _rich_rules(text, services)]
        opened = [(port, f"port {port}") for port in self.ports]
        opened += [
            (port, f"service {name}") for name in self.services for port in services.get(name, ())
        ]
        found += [
            (0, Rule("allow", ports, None, text))
            for port, text in opened
            if (ports := _tcp_ports(port))
        ]
        return tuple(rule for _, rule in sorted(found, key=_precedence))


def _precedence(found: tuple[int, Rule]) -> tuple[int, bool]:
    priority, rule = found
    return priority, rule.action != "deny"


def read_zones(lines: Iterable[str]) -> dict[str, Zone]:
    """Zones from ``--list-all-zones``: a name, then indented ``key: values`` and rich rules."""
    zones: dict[str, Zone] = {}
    name = ""
    values: dict[str, str] = {}
    rules: set[str] = set()

    def add() -> None:
        if name:
            ports, services = values.get("ports", "").split(), values.get("services", "").split()
            target = values.get("target", "default")
            # zones such as `drop` with addresses that somebody wants to be rid of
            shut = target in SHUT_TARGETS and not (rules or ports or services)
            used = bool(values.get("interfaces") or (values.get("sources") and not shut))
            zones[name] = Zone(name, target, used, frozenset(rules), tuple(ports), tuple(services))

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


def zones_in_use(zones: Mapping[str, Zone], default: str, bound: Iterable[str]) -> list[str]:
    """The zones that traffic comes to, but for those that let all in anyway.

    Args:
        zones: by name; empty: not known.
        default: name of the default zone.
        bound: zones that the network's configuration names.
    """
    names = {default, *bound, *(zone.name for zone in zones.values() if zone.used)}
    if not zones:
        return sorted(names)
    return sorted(n for n in names if n in zones and zones[n].target != OPEN_TARGET)


def service_ports(lines: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Ports of firewalld's services, from lines of ``grep '<port ' .../services/*.xml``.

    A file of /etc stands for that of the same name in /usr (firewalld.service(5)).
    """
    files: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        path = re.match(r"\s*(\S+)/([\w.@+-]+)\.xml:", line)
        port = re.search(r"""\bport=["']([\d-]+)["']""", line)
        protocol = re.search(r"""\bprotocol=["'](\w+)["']""", line)
        if path and port and protocol:
            files.setdefault((path[1], path[2]), []).append(f"{port[1]}/{protocol[1]}")
    ordered = sorted(files.items(), key=lambda item: item[0][0].startswith("/etc/"))
    return {name: tuple(ports) for (_, name), ports in ordered}


def _tcp_ports(text: str) -> Ports | None:
    number, _, protocol = text.partition("/")
    return _ports(number) if protocol == "tcp" else None


_RICH_ACTIONS: dict[str, Action] = {"accept": "allow", "reject": "deny", "drop": "deny"}
_ELEMENTS = ("port", "service", "protocol", "source-port", "forward-port", "masquerade")


def _rich_rules(text: str, services: Mapping[str, tuple[str, ...]]) -> list[tuple[int, Rule]]:
    """Priority and meaning of a rich rule, one a port (firewalld.richlanguage(5))."""
    words = _rich_words(text)
    action = next((a for word, a in _RICH_ACTIONS.items() if word in words), None)
    if action is None:
        return []
    rule, source = words["rule"], words.get("source", {})
    network = _network(source.get("address", ""))
    inverted = "NOT" in words or "invert" in source
    # of a set of the host's, or a hardware address, nobody knows here who is in it
    narrow = inverted or "destination" in words or (network is None and bool(source))
    if network is None and "family" in rule:
        network = EVERYBODY[rule["family"] == "ipv6"]
    priority = rule.get("priority", "0")
    return [
        (
            int(priority) if re.fullmatch(r"-?\d{1,5}", priority) else 0,
            Rule(action, ports, network, text, narrow),
        )
        for ports in _rich_ports(words, services)
    ]


def _rich_ports(
    words: Mapping[str, Mapping[str, str]], services: Mapping[str, tuple[str, ...]]
) -> list[Ports]:
    element = next((name for name in words if name in _ELEMENTS or name.startswith("icmp-")), None)
    if element is None:
        return [_ALL_PORTS]
    values = words[element]
    if element == "protocol":
        return [_ALL_PORTS] if values.get("value") in ("tcp", "6") else []
    named: tuple[str, ...] = ()
    if element == "port":
        named = (f"{values.get('port')}/{values.get('protocol')}",)
    elif element == "service":
        named = services.get(values.get("name", ""), ())
    return [ports for text in named if (ports := _tcp_ports(text))]


def _rich_words(text: str) -> dict[str, dict[str, str]]:
    """The elements of a rich rule with their attributes."""
    words: dict[str, dict[str, str]] = {}
    try:
        parts = shlex.split(text)
    except ValueError:
        return words
    current: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals:
            current[key] = value
        else:
            current = words.setdefault(part, current if part == "NOT" else {})
    return words


# SSH


def ssh_ports(lines: Iterable[str]) -> tuple[int, ...]:
    """Ports on which SSH comes in, sshd's own or systemd's for it.

    Args:
        lines: of ``ss -Htnlp`` behind ``listen``, of established connections (``ss -Htnp state
            established``) behind ``established``.
    """
    listening: dict[int, str] = {}
    connected: set[int] = set()
    for line in lines:
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

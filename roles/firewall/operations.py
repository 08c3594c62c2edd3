"""Letting in what the plan names, and nothing else, with the host's own firewall.

The order is always: SSH, our rules, a watchdog, the firewall on, a new SSH connection, the watchdog
off. Wherever a run is killed the host stays reachable, and the next run goes on.
"""

from __future__ import annotations

import base64
import itertools
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh import SSHConnector

from fp8fleet.firewalls import Rule, denial, zones_in_use
from fp8fleet.plan import FirewallPlan, FirewallRule, HostPlan
from roles.firewall.facts import (
    HOLD,
    MARK,
    RECORD,
    WATCHDOG,
    Firewalld,
    FirewalldState,
    Ufw,
)
from roles.host.distribution import install_command, refreshed
from roles.operations import failed, streamed

WATCHDOG_S = 90
"""Seconds until a firewall that was switched on is off again, if SSH does not get in."""
TOO_MANY = 50
"""Rules in one command, so that it stays far below the longest that a shell takes."""

Commands = Iterator[StringCommand | FunctionCommand]


@operation()
def let_in(plan: HostPlan) -> Commands:
    """Let in what is planned, now and after a boot, and switch the firewall on.

    What others let in is left alone. SSH is let in before the firewall is switched on; where it is
    on already SSH gets in, or this run would not be here.
    """
    if plan.firewall.tool == "ufw":
        yield from _ufw(plan)
    elif plan.firewall.tool == "firewalld":
        yield from _firewalld(plan)


@operation()
def close_unplanned(plan: HostPlan) -> Commands:
    """Close what is no longer planned, if we had let it in; no fact beyond that of `let_in`.

    Not in a run that leaves out the gateway (`--limit`): it would go on to send requests there.
    """
    active = {other.name for other in host.state.inventory.get_active_hosts()}
    if not set(plan.gateways) <= active:
        return
    yield from host.connector_data.get(_STALE, ())


_STALE = "fp8fleet_firewall_stale"


def _installed(plan: HostPlan) -> Commands:
    yield from refreshed(plan)
    yield streamed(install_command(plan, plan.firewall.packages))


def _let_ssh_in(firewall: FirewallPlan, ports: Iterable[int]) -> list[FirewallRule]:
    return [FirewallRule(port, None) for port in sorted({*ports, firewall.ssh_port})]


def _no_sshd(tool: str) -> FunctionCommand:
    return failed(
        f"firewall: no sshd was found listening (`ss -tlnp`), so {tool} is not switched on: it"
        " could shut this host; find out why, or set firewall = 'unmanaged'"
    )


def _other(active: str, planned: str) -> FunctionCommand:
    return failed(
        f"firewall: {active} is active on this host and the inventory asks for {planned}: set"
        f" firewall = {active!r}, or switch {active} off"
    )


def _denied(tool: str, planned: FirewallRule, rule: Rule, how: str) -> FunctionCommand:
    return failed(
        f"firewall: {tool} denies port {planned.ports()} on this host ({rule.text}), the plan lets"
        f" in {planned.source or 'everybody'}: remove that rule ({how}), or change the plan"
    )


# Switching on


def _watchdog(off: str) -> StringCommand:
    again = f"systemctl stop {WATCHDOG}.timer {WATCHDOG}.service 2>/dev/null;"
    return StringCommand(
        f"{again} systemctl reset-failed {WATCHDOG}.service 2>/dev/null;"
        f" systemd-run --quiet --on-active={WATCHDOG_S} --unit={WATCHDOG} sh -c {shlex.quote(off)}"
    )


def _proved(tool: str) -> Commands:
    """A new connection gets in, so the watchdog may go."""
    yield FunctionCommand(_ssh_gets_in, [tool], {})
    late = f"firewall: {tool} took more than {WATCHDOG_S} s to start and is off again: run again"
    tell = f"{{ echo {shlex.quote(late)} >&2; exit 1; }}"
    yield StringCommand(f"systemctl stop {WATCHDOG}.timer 2>/dev/null || {tell}")


def _ssh_gets_in(state: Any, host: Any, tool: str) -> bool:
    if not isinstance(host.connector, SSHConnector):
        return True
    fresh = SSHConnector(state, host)
    try:
        fresh.connect()
    except ConnectError as error:
        host.log_styled(
            f"firewall: SSH does not get in with {tool} on ({error}); it is switched off again"
            f" within {WATCHDOG_S} seconds: let the SSH port in, then run again",
            fg="red",
            log_func=logger.error,
        )
        return False
    if fresh.client:
        fresh.client.close()
    return True


# ufw


def _ufw(plan: HostPlan) -> Commands:
    firewall = plan.firewall
    state = host.get_fact(Ufw, packages=firewall.packages)
    if state.firewalld:
        yield _other("firewalld", "ufw")
        return
    if not state.installed:
        yield from _installed(plan)
        if host.state.is_executing:
            state = host.get_fact(Ufw, packages=firewall.packages)
    wanted = [*firewall.rules]
    switch_on = not (state.active and state.enabled) or state.watchdog
    if switch_on and not state.ssh_ports:
        yield _no_sshd("ufw")
        return
    ssh = _let_ssh_in(firewall, state.ssh_ports) if switch_on else []
    for planned in (*ssh, *wanted):
        if rule := denial(state.rules, planned):
            yield _denied("ufw", planned, rule, "ufw status numbered, ufw delete NUMBER")
            return
    yield from _ufw_add((rule for rule in ssh if rule not in state.let_in), f"{MARK} ssh")
    yield from _ufw_add((rule for rule in wanted if rule not in state.let_in), MARK)
    if switch_on:
        yield _watchdog("ufw --force disable")
        if state.lets_all_in:
            yield _quietly("ufw default deny incoming")
        yield StringCommand("systemctl enable --quiet ufw.service")
        yield _quietly("ufw --force enable")
        yield from _proved("ufw")
    elif any(rule in state.allowed and rule not in state.in_force for rule in wanted):
        yield _quietly("ufw reload")
    stale = sorted(state.ours - set(wanted), key=str)
    host.connector_data[_STALE] = [StringCommand(f"ufw delete {_ufw_words(r)}") for r in stale]


def _quietly(command: str) -> StringCommand:
    """Output goes to a file: with the run killed, a closed pipe must not end ufw half-way."""
    output = "/run/fp8fleet.ufw"
    return StringCommand(f"{command} >{output} 2>&1 </dev/null || {{ cat {output} >&2; exit 1; }}")


def _ufw_add(rules: Iterable[FirewallRule], comment: str) -> Iterator[StringCommand]:
    for rule in rules:
        yield StringCommand(f"ufw {_ufw_words(rule)} comment {shlex.quote(comment)}")


def _ufw_words(rule: FirewallRule) -> str:
    return f"allow proto tcp from {rule.source or 'any'} to any port {rule.ports(':')}"


# firewalld


def _firewalld(plan: HostPlan) -> Commands:
    state = host.get_fact(Firewalld, packages=plan.firewall.packages)
    if state.ufw:
        yield _other("ufw", "firewalld")
        return
    if state.masked:
        yield failed(
            "firewall: firewalld is masked on this host: `systemctl unmask firewalld`, or set"
            " firewall = 'unmanaged'"
        )
        return
    if not state.installed:
        yield _hold()
        yield from _installed(plan)
        if host.state.is_executing:
            state = host.get_fact(Firewalld, packages=plan.firewall.packages)
    switch_on = not state.active or state.held or state.watchdog
    if switch_on and not state.ssh_ports:
        yield _no_sshd("firewalld")
        return
    ssh = _let_ssh_in(plan.firewall, state.ssh_ports) if switch_on else []
    known = state.runtime or state.permanent
    zones = zones_in_use(known, state.default_zone, state.bound_zones)
    if denied := _firewalld_denied(state, zones, [*ssh, *plan.firewall.rules]):
        yield denied
        return
    rules = [rich_rule(rule) for rule in plan.firewall.rules]
    wanted = [(zone, rule) for zone in zones for rule in rules]
    first = [(zone, rich_rule(rule)) for zone in zones for rule in ssh]
    stored = {(zone.name, rule) for zone in state.permanent.values() for rule in zone.rules}
    in_force = {(zone.name, rule) for zone in state.runtime.values() for rule in zone.rules}
    new = [pair for pair in wanted if pair not in stored]
    yield from _record(state.recorded, state.recorded | set(new))
    program = "firewall-cmd --permanent" if state.active else "firewall-offline-cmd"
    yield from _rich(program, "add", [*(pair for pair in first if pair not in stored), *new])
    if state.active:
        missing = [pair for pair in (*first, *wanted) if pair not in in_force]
        yield from _rich("firewall-cmd", "add", missing)
    if switch_on:
        yield StringCommand(f"rm -f {HOLD} && systemctl daemon-reload")
        yield _watchdog("systemctl disable --now firewalld.service")
        yield StringCommand("systemctl enable --quiet --now firewalld.service")
        # systemd counts it as started before its rules are in force
        yield StringCommand(
            "for i in $(seq 60); do firewall-cmd --state >/dev/null 2>&1 && exit 0; sleep 1; done;"
            " firewall-cmd --state >&2; exit 1"
        )
        yield from _proved("firewalld")
    elif not state.enabled:
        yield StringCommand("systemctl enable --quiet firewalld.service")
    live = in_force if state.active else stored
    host.connector_data[_STALE] = list(_remove(state, rules, new, stored, live))


def _firewalld_denied(
    state: FirewalldState, zones: list[str], rules: list[FirewallRule]
) -> FunctionCommand | None:
    """What keeps out a port of the plan, now or after a restart: it goes before what lets in."""
    for known, name in itertools.product((state.runtime, state.permanent), zones):
        chain = known[name].chain(state.services) if name in known else ()
        for planned in rules:
            if rule := denial(chain, planned):
                how = f"firewall-cmd --zone={name} --remove-rich-rule=..., with --permanent too"
                return _denied("firewalld", planned, rule, how)
    return None


def _hold() -> StringCommand:
    """Keeps firewalld from starting, whoever starts it, until the unit's file is removed."""
    return StringCommand(
        f"mkdir -p {HOLD.rpartition('/')[0]} && printf '[Unit]\\n# written by fp8fleet: not"
        f" before SSH is let in\\nConditionPathExists=/run/fp8fleet/never\\n' >{HOLD}"
        " && systemctl daemon-reload"
    )


def _remove(
    state: FirewalldState,
    rules: list[str],
    new: list[tuple[str, str]],
    stored: set[tuple[str, str]],
    live: set[tuple[str, str]],
) -> Iterator[StringCommand]:
    """Remove what we had added for a plan that was another."""
    stale = {(zone, rule) for zone, rule in state.recorded if rule not in rules}
    yield from _rich("firewall-cmd --permanent", "remove", sorted(stale & stored))
    yield from _rich("firewall-cmd", "remove", sorted(stale & live))
    ours = state.recorded | set(new)
    yield from _record(ours, ours - stale)


def rich_rule(rule: FirewallRule) -> str:
    """A rule in the form in which firewalld itself prints it (firewalld.richlanguage(5))."""
    source = ""
    if rule.source:
        family = "ipv6" if ":" in rule.source else "ipv4"
        source = f' family="{family}" source address="{rule.source}"'
    return f'rule{source} port port="{rule.ports()}" protocol="tcp" accept'


def _rich(program: str, verb: str, pairs: list[tuple[str, str]]) -> Iterator[StringCommand]:
    for zone in sorted({zone for zone, _ in pairs}):
        mine = [rule for name, rule in pairs if name == zone]
        for start in range(0, len(mine), TOO_MANY):
            options = " ".join(
                shlex.quote(f"--{verb}-rich-rule={rule}") for rule in mine[start : start + TOO_MANY]
            )
            yield StringCommand(f"{program} --quiet --zone={shlex.quote(zone)} {options}")


def _record(
    before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> Iterator[StringCommand]:
    """Note what is ours before it is added: a killed run leaves nothing that nobody removes."""
    if set(before) == set(after):
        return
    text = "".join(f"{zone} {rule}\n" for zone, rule in sorted(after))
    yield StringCommand(
        f"umask 022; base64 -d >{RECORD}.new && sync {RECORD}.new && mv -fT {RECORD}.new {RECORD}",
        _stdin=base64.b64encode(text.encode()).decode(),
    )

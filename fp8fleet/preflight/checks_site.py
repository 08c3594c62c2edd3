"""Findings about ports, firewall, proxies, SELinux and KySec."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8fleet.firewalls import Firewall
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    is_ours,
    numbers,
    some,
)


def _ports(case: Case) -> Iterator[Finding]:
    for planned in case.needs.ports:
        for listener in case.facts.listeners:
            if listener.port != planned.port or listener.unit == planned.unit:
                continue
            if is_ours(listener.unit):
                continue  # a server that the deploy moves or removes
            who = f"{listener.program} ({listener.pid})" if listener.pid else "another program"
            yield Finding(
                "port-taken",
                f"{who} listens on port {planned.port}",
                f"port {planned.port} for {planned.user}",
                "stop it, or choose another port",
            )


def _firewall(case: Case) -> Iterator[Finding]:
    active, planned = case.facts.security.firewall, case.firewall.tool
    if planned != "unmanaged" and active is not None and active.name != planned:
        yield Finding(
            "firewall-other",
            f"{active.name} is active",
            f"firewall = {planned!r}, one firewall at a time",
            f"set firewall = {active.name!r} (or 'unmanaged'), or switch {active.name} off",
        )
        return
    if planned == "unmanaged":
        yield from _closed(case, active)
    else:
        yield from _no_ipv6(case)
        if active is None:
            yield from _cuts(case)
    yield from _open(case, active)


def _planned_firewall(case: Case) -> Firewall | None:
    """The host's one of those that the plan names, on or off; None: it is not installed."""
    firewalls = case.facts.security.firewalls
    return next((one for one in firewalls if one.name == case.firewall.tool), None)


def _closed(case: Case, active: Firewall | None) -> Iterator[Finding]:
    if active is None or active.lets_all_in:
        return
    to_all = {rule.ports() for rule in case.firewall.rules if not rule.source}
    planned = {rule.ports(): rule for rule in case.firewall.rules}
    for ports, rule in sorted(planned.items(), key=lambda item: item[1].port):
        if not active.lets_in(rule.port, rule.last):
            who = "for clients" if ports in to_all else "for gateways or other hosts"
            yield Finding(
                "firewall-closed",
                f"{active.name} is active, port {ports} is not open",
                f"port {ports} open {who}",
                "open it to their addresses only, or let fp8fleet do it (firewall)",
            )


def _no_ipv6(case: Case) -> Iterator[Finding]:
    firewall = _planned_firewall(case)
    sources = {rule.source for rule in case.firewall.rules if rule.source and ":" in rule.source}
    if sources and firewall and not firewall.ipv6:
        yield Finding(
            "firewall-ipv6",
            f"{firewall.name} takes no rules for IPv6 (IPV6=no in /etc/default/ufw)",
            f"rules for {some(sorted(sources))}",
            "IPV6=yes there, or name IPv4 addresses in the inventory",
        )


def _cuts(case: Case) -> Iterator[Finding]:
    """Other services that would be shut out when the firewall is switched on."""
    firewall = _planned_firewall(case)
    planned = {port.port for port in case.needs.ports} | {
        r.port for r in case.firewall.rules if not r.last
    }
    units = {port.unit for port in case.needs.ports}
    ssh = {case.firewall.ssh_port, *case.facts.security.ssh_ports}
    cut = {
        listener.port: listener.program
        for listener in case.facts.listeners
        if listener.port not in planned | ssh
        and not (firewall and firewall.lets_in(listener.port))
        and not listener.program.startswith("sshd")
        and not is_ours(listener.unit)
        and listener.unit not in units
    }
    if cut:
        tool = case.firewall.tool
        allow = (
            "ufw allow PORT/tcp" if tool == "ufw" else "firewall-offline-cmd --add-port=PORT/tcp"
        )
        yield Finding(
            "firewall-cuts",
            f"{tool} is off, and others listen: "
            + some(f"{port} ({program})" for port, program in sorted(cut.items())),
            "a rule for what shall stay reachable",
            f"{allow} for each; or firewall = 'unmanaged'; or ignore this code to shut them out",
        )


def _open(case: Case, active: Firewall | None) -> Iterator[Finding]:
    """Rules of others, or none at all, that make ours say less than the plan does."""
    guarded, managed = case.firewall.guarded, case.firewall.tool != "unmanaged"
    firewall = active or _planned_firewall(case)
    if active is None and guarded and not managed:
        yield Finding(
            "firewall-open",
            f"no ufw or firewalld is active; ports {numbers(guarded)} are open to all",
            "these ports for gateways and other hosts only",
            "guard them in the network, or let fp8fleet manage the firewall (firewall)",
        )
    if firewall is None:
        return
    # ufw's default is set when ufw is switched on
    if firewall.lets_all_in and (active or firewall.name != "ufw"):
        if guarded or managed:
            yield Finding(
                "firewall-open",
                f"{firewall.name} lets in what no rule names",
                "what the plan lets in, and nothing else",
                "ufw default deny incoming"
                if firewall.name == "ufw"
                else "a default zone whose target is not ACCEPT (firewall-cmd --set-default-zone)",
            )
        return
    wide = [port for port in guarded if firewall.is_open(port)]
    if wide:
        yield Finding(
            "firewall-open",
            f"{firewall.name} has rules of others: ports {numbers(wide)} are open to all",
            "these ports for gateways, other hosts or client_networks only",
            "remove those rules",
        )


def _sets_proxy(line: str) -> bool:
    """Whether a setting names a proxy: not nothing, and neither apt's nor dnf's word for none."""
    setting = r"(?i)(?:export )?(?:https?|all)_proxy=|proxy *=|acquire\S*"
    match = re.match(setting, line)
    return match is not None and line[match.end() :].strip("\"'; ") not in ("", "DIRECT", "_none_")


def _proxies(case: Case) -> Iterator[Finding]:
    if case.needs.proxy:
        return
    found = [line for line in case.facts.proxies if _sets_proxy(line)]
    if found:
        yield Finding(
            "proxy-differs",
            some(found, 2),
            "what the inventory's proxy says: none",
            "set proxy and no_proxy in the inventory, or remove the host's own setting",
        )


_RELABEL = (
    "SELINUX=permissive in /etc/selinux/config, no selinux=0 among the kernel's arguments,"
    " touch /.autorelabel, reboot; then deploy"
)


def _selinux(case: Case) -> Iterator[Finding]:
    security, plan = case.facts.security, case.selinux
    if plan and security.selinux in ("disabled", "absent"):
        kernel = f" ({' '.join(security.selinux_kernel)})" if security.selinux_kernel else ""
        yield Finding(
            "selinux-disabled" if plan.asked else "selinux-off",
            f"SELinux is {security.selinux}{kernel}: a deploy cannot turn it on",
            plan.mode,
            f'{_RELABEL}. Or selinux = "unmanaged"',
        )
    elif plan and plan.mode == "permissive":
        yield Finding(
            "selinux-permissive",
            f"SELinux is {security.selinux}, the inventory asks for permissive",
            "enforcing",
            'selinux = "enforcing": docs/selinux.md says what that sets',
        )
    elif security.selinux == "permissive":
        remedy = "the deploy makes it so and restarts the servers" if plan else "setenforce 1"
        yield Finding("selinux-permissive", "SELinux is permissive", "enforcing", remedy)
    configured = security.selinux_configured
    active = security.selinux in ("enforcing", "permissive")
    if active and "enforcing=0" in security.selinux_kernel:
        yield Finding(
            "selinux-pending",
            "the kernel's argument enforcing=0 makes every boot permissive",
            "one mode",
            "remove it from the boot loader's configuration",
        )
    elif configured and active and configured != security.selinux:
        yield Finding(
            "selinux-pending",
            f"{security.selinux} now, {configured} after a reboot",
            "one mode",
            "the deploy writes the planned mode to /etc/selinux/config"
            if plan
            else "make /etc/selinux/config say what is meant",
        )


def _kysec(case: Case) -> Iterator[Finding]:
    security = case.facts.security
    if security.kysec and security.kysec_exec not in (None, "off", "disable"):
        yield Finding(
            "kysec-exec",
            f"KySec's exec control is {security.kysec_exec}",
            "what is installed trusted by KySec",
            "the deploy has KySec trust its environments; kernels that servers compile stay"
            " untrusted: docs/selinux.md",
        )


CHECKS: tuple[Check, ...] = (_ports, _firewall, _proxies, _selinux, _kysec)

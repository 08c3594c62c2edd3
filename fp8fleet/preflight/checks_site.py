"""Findings about ports, firewall, proxies, SELinux and KySec."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8fleet import catalog
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    is_ours,
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
    security = case.facts.security
    proxy = [port for port in case.needs.ports if port.user == "the proxy"]
    for planned in proxy:
        allowed = {f"{planned.port}/tcp", str(planned.port)}
        if security.firewall and not allowed & set(security.open_ports):
            yield Finding(
                "firewall-closed",
                f"{security.firewall} is active, port {planned.port} is not open",
                f"port {planned.port} open for clients",
                "open it to the clients' addresses only",
            )


def _proxies(case: Case) -> Iterator[Finding]:
    if case.needs.proxy:
        return
    setting = r"(?i)(export )?(https?|all)_proxy|proxy *=|acquire"
    found = [line for line in case.facts.proxies if re.match(setting, line)]
    if found:
        yield Finding(
            "proxy-differs",
            some(found, 2),
            "what the inventory's proxy says: none",
            "set proxy and no_proxy in the inventory, or remove the host's own setting",
        )


def _selinux(case: Case) -> Iterator[Finding]:
    security = case.facts.security
    family = catalog.platforms()[case.platform].family
    if security.selinux == "disabled" and family == "dnf":
        yield Finding(
            "selinux-off",
            "SELinux is disabled",
            "enforcing",
            "SELINUX=permissive, touch /.autorelabel, reboot; then enforcing",
        )
    elif security.selinux == "permissive":
        yield Finding(
            "selinux-permissive", "SELinux is permissive", "enforcing", "setenforce 1, when ready"
        )
    configured = security.selinux_configured
    active = security.selinux in ("enforcing", "permissive")
    if configured and active and configured != security.selinux:
        yield Finding(
            "selinux-pending",
            f"{security.selinux} now, {configured} after a reboot",
            "one mode",
            "make /etc/selinux/config say what is meant",
        )


def _kysec(case: Case) -> Iterator[Finding]:
    security = case.facts.security
    if security.kysec and security.kysec_exec not in (None, "off", "disable"):
        yield Finding(
            "kysec-exec",
            f"KySec's exec control is {security.kysec_exec}",
            "our programs trusted by KySec",
            "kysec_set -r -n exectl -v verified DIRECTORY, for install_directory",
        )


CHECKS: tuple[Check, ...] = (_ports, _firewall, _proxies, _selinux, _kysec)

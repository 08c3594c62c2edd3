"""Findings about ports, firewall, proxies, SELinux and KySec."""

from __future__ import annotations

import re
from collections.abc import Iterator

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

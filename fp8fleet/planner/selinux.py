"""SELinux: mode, what Nginx may do, labels."""

from __future__ import annotations

from fp8fleet.catalog import Platform
from fp8fleet.plan import (
    EnvironmentPlan,
    FrontendPlan,
    PlannedFile,
    ProxyPlan,
    SelinuxPlan,
    programs_of,
)
from fp8fleet.spec import HostSpec

LABELLED = "/opt"
"""The policy knows programs below it by their paths (`/opt/.../bin`) and labels them so."""


def selinux_plan(
    spec: HostSpec,
    platform: Platform,
    frontend: FrontendPlan,
    environments: tuple[EnvironmentPlan, ...],
    proxy: ProxyPlan | None,
    files: tuple[PlannedFile, ...],
) -> SelinuxPlan | None:
    """What SELinux shall be set to; None where it is left alone."""
    mode = spec.selinux or ("enforcing" if platform.selinux else "unmanaged")
    if mode == "unmanaged":
        return None
    top = spec.install_directory
    return SelinuxPlan(
        mode=mode,
        asked=spec.selinux is not None,
        booleans=_booleans(spec) if proxy else {},
        ports=_ports(spec, proxy) if proxy else (),
        equivalences={} if top.startswith(f"{LABELLED}/") else {top: LABELLED},
        programs=programs_of(frontend, environments),
        paths=tuple(file.path for file in files if file.role in ("nginx", "vllm")),
    )


def _booleans(spec: HostSpec) -> dict[str, bool]:
    """Nginx's way to the servers, and its own limit of open files (`worker_rlimit_nofile`)."""
    if spec.selinux_network == "relay":
        # with the wide one on, the tight one would not be tight
        way = {"httpd_can_network_connect": False, "httpd_can_network_relay": True}
    else:
        way = {"httpd_can_network_connect": True}
    return {**way, "httpd_setrlimit": True}


def _ports(spec: HostSpec, proxy: ProxyPlan) -> tuple[int, ...]:
    ports = {proxy.listen, proxy.status_port}
    if spec.selinux_network == "relay":
        ports |= {int(upstream.rpartition(":")[2]) for upstream in proxy.upstreams}
    return tuple(sorted(ports))

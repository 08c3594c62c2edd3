"""What a host has to bring: preflight judges by it."""

from __future__ import annotations

from fp8fleet import catalog
from fp8fleet.catalog_check import Target
from fp8fleet.plan import (
    STAMP,
    Devices,
    EnvironmentPlan,
    InstancePlan,
    ModelPlan,
    PlannedPort,
    ProxyPlan,
    Requirements,
    Space,
)
from fp8fleet.planner.budget import memory_fraction
from fp8fleet.planner.files import home_directory
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import HostSpec

TOOLS_BYTES = 400 << 20
"""Disk that the tools environment takes with its Python, rounded up from a lab host's."""


def requirements_of(
    spec: HostSpec,
    own: Serving | None,
    tools: EnvironmentPlan,
    model: ModelPlan | None,
    proxy: ProxyPlan | None,
) -> Requirements:
    """What the host has to bring for its plan."""
    spaces = [_environment_space(tools, TOOLS_BYTES)]
    if own and model and spec.vendor:
        vendor = catalog.vendors()[spec.vendor]
        spaces.append(_environment_space(own.engine, vendor.environment_gib << 30))
        spaces.append(Space(f"model {model.name}", model.directory, model.size, None))
    paths = [spec.install_directory]
    if own:
        paths += [spec.model_directory, spec.cache_directory]
    return Requirements(
        target=own.target if own else Target(spec.platform, spec.arch),
        release=spec.engine_release if own else None,
        devices=tuple(_devices(spec, i) for i in own.instances) if own else (),
        topology=own.topology if own else None,
        ports=_ports(own, proxy),
        spaces=tuple(spaces),
        directories=tuple(paths),
        model_bytes=model.size if model else 0,
        proxy=spec.proxy,
        service_user=spec.service_user,
        home=home_directory(spec),
    )


def _environment_space(environment: EnvironmentPlan, size: int) -> Space:
    prefix = environment.prefix
    return Space(f"environment {environment.name}", prefix, size, f"{prefix}/{STAMP}")


def _devices(spec: HostSpec, instance: InstancePlan) -> Devices:
    ranks = instance.options["tensor-parallel-size"]
    return Devices(
        instance.name,
        instance.devices,
        ranks,
        memory_fraction(spec, instance.options, instance.name),
    )


def _ports(own: Serving | None, proxy: ProxyPlan | None) -> tuple[PlannedPort, ...]:
    ports = []
    for instance in own.instances if own else ():
        name, unit = f"server {instance.name}", instance.unit
        if instance.has_api:
            ports.append(PlannedPort(instance.port, name, unit))
        if instance.node and instance.has_api:
            ports.append(PlannedPort(instance.node.master_port, name, unit))
            ports.append(PlannedPort(instance.node.link_port, name, unit))
    if proxy:
        ports.append(PlannedPort(proxy.listen, "the proxy", "nginx.service"))
        ports.append(PlannedPort(proxy.status_port, "the proxy's status", "nginx.service"))
    return tuple(ports)

"""Computes the plan from the inventory, the catalogue and models/ alone.

Pure: no host, no secret and no network is needed, and the same input gives the same plan.
"""

from __future__ import annotations

from pathlib import Path

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.locks import read_lock
from fp8fleet.plan import FleetPlan, HostPlan
from fp8fleet.planner.cmake import cmake_plan
from fp8fleet.planner.driver import drivers_plan
from fp8fleet.planner.environments import (
    conda_files,
    download_environment,
    frontend_plan,
    package_options,
    tools_environment,
    trusted_hosts,
)
from fp8fleet.planner.files import home_directory
from fp8fleet.planner.firewall import firewall_plan
from fp8fleet.planner.host import (
    absent_files,
    host_directories,
    host_files,
    host_packages,
    preparation,
)
from fp8fleet.planner.model import model_files, model_plan, peer_plan
from fp8fleet.planner.nodes import join_nodes
from fp8fleet.planner.proxy import proxy_plan
from fp8fleet.planner.requirements import requirements_of
from fp8fleet.planner.selinux import selinux_plan
from fp8fleet.planner.servers import instance_files, node_files
from fp8fleet.planner.serving import Serving
from fp8fleet.planner.sources import BEYOND_MEANING, check_addresses, serving_of
from fp8fleet.zipapp import zipapp_name


def make_plan(fleet: Fleet, root: Path = Path()) -> FleetPlan:
    """Compute what every host of ``fleet`` shall be.

    Args:
        fleet: the validated inventory.
        root: folder to which the inventory's file names (locks, manifests) are relative.

    Raises:
        OperatorError: a named file is missing or broken, or two settings contradict each other.
    """
    serving = {h.name: serving_of(fleet, h, root) for h in fleet.hosts if not h.is_gateway}
    check_addresses(fleet)
    serving = join_nodes(fleet, serving)
    plans = {}
    for host in fleet.hosts:
        try:
            plans[host.name] = _host_plan(fleet, host, serving, root)
        except OperatorError as error:
            raise OperatorError(f"{fleet.path}: host {host.name}: {error}") from None
        except BEYOND_MEANING as error:
            text = f"{fleet.path}: host {host.name}: {type(error).__name__}: {error}"
            raise OperatorError(f"{text}; no value of an inventory file can be that") from None
    return FleetPlan(fleet.path, plans)


def _host_plan(fleet: Fleet, host: FleetHost, serving: dict[str, Serving], root: Path) -> HostPlan:
    spec = host.spec
    platform = catalog.platforms()[spec.platform]
    own = serving.get(host.name)
    gateways = tuple(other.name for other in fleet.hosts if other.is_gateway)
    tools_lock = read_lock(root / spec.tools_requirements)
    tools = tools_environment(spec, tools_lock)
    program = f"{spec.install_directory}/bin/{zipapp_name()}"
    peer, note = peer_plan(fleet, host, serving) if own else (None, None)
    model = model_plan(spec, own, peer, note) if own else None
    proxy, proxy_files = proxy_plan(fleet, host, platform, serving)
    system_files = host_files(spec, platform, proxy is not None)
    files = [*system_files]
    files += conda_files(own, tools, tools_lock, program)
    if own and model:
        files += model_files(spec, own, model, tools, program)
        files += [f for i in own.instances for f in instance_files(spec, own, i, model)]
        files += node_files(spec, own)
    files += proxy_files
    drivers, driver_files, driver_notes = drivers_plan(spec, platform, own)
    files += driver_files
    frontend = frontend_plan(spec)
    environments = (tools, own.engine) if own else (tools,)
    selinux = selinux_plan(spec, platform, frontend, environments, proxy, tuple(files))
    return HostPlan(
        name=host.name,
        platform=spec.platform,
        family=platform.family,
        packages=host_packages(
            spec, platform, own is not None, proxy is not None, selinux is not None
        ),
        preparation=preparation(spec, platform, system_files, proxy is not None),
        service_user=spec.service_user,
        no_login_shell="/usr/sbin/nologin" if platform.family == "apt" else "/sbin/nologin",
        sysctl={key: str(value) for key, value in spec.sysctl.items()},
        home=home_directory(spec),
        directories=host_directories(spec, model),
        files=tuple(files),
        absent=absent_files(spec, platform, own, model),
        download_environment=download_environment(spec),
        proxy_url=spec.proxy,
        ca_bundle=spec.ca_bundle,
        package_options=package_options(spec),
        trusted_hosts=trusted_hosts(spec),
        frontend=frontend,
        cmake=cmake_plan(spec) if own and spec.engine_build == "source" else None,
        tools=tools,
        program=program,
        engine=own.engine if own else None,
        model=model,
        instances=own.instances if own else (),
        proxy=proxy,
        requirements=requirements_of(spec, own, tools, model, proxy),
        drivers=drivers,
        firewall=firewall_plan(fleet, host, platform, own, model, proxy),
        selinux=selinux,
        kysec=platform.kysec,
        notes=(*(own.notes if own else ()), *driver_notes),
        gateways=() if host.is_gateway else gateways,
    )

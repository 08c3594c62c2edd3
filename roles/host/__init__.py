"""host: packages, the service user, directories, limits, clock, logs, kernel parameters, holds."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.facts import PathState
from roles.host.distribution import held_packages, package_sources, packages
from roles.host.operations import (
    clock,
    kernel_parameters,
    nvidia_devices,
    service_user,
    services,
)
from roles.host.state import host_facts
from roles.operations import place


@deploy("Host")
def prepare() -> None:
    """Prepare a bare host for the engine and the proxy."""
    plan = host_plan(host)

    def known() -> dict[str, PathState]:
        return host_facts(plan).paths

    place(
        name="Package sources, limits, kernel parameters, logs",
        files=plan.role_files("host"),
        directories=plan.preparation.directories,
        absent=plan.role_absent("host"),
        known=known,
    )
    package_sources(name="Package sources alone", plan=plan)
    packages(name="Packages", plan=plan)
    service_user(name="Service user, without a shell", plan=plan)
    place(name="Directories", directories=plan.directories, known=known)
    kernel_parameters(name="Kernel parameters are in force", plan=plan)
    services(name="Journal and log rotation are in force", plan=plan)
    clock(name="Clock", plan=plan)


@deploy("Host")
def settle() -> None:
    """What comes after drivers are installed: their devices at boot, upgrades kept from them."""
    plan = host_plan(host)
    nvidia_devices(name="NVIDIA devices", plan=plan)
    held_packages(name="Packages that upgrades leave", plan=plan)

"""host: packages, the service user, directories, limits and kernel parameters."""

from pyinfra import host
from pyinfra.api.deploy import deploy
from pyinfra.operations import server

from fp8fleet.session import host_plan
from roles.host.operations import kernel_parameters, packages
from roles.operations import place


@deploy("Host")
def prepare() -> None:
    """Prepare a bare host for the engine and the proxy."""
    plan = host_plan(host)
    place(name="Package sources, limits, kernel parameters", files=plan.role_files("host"))
    packages(
        name="Packages",
        names=plan.packages,
        family=plan.family,
        proxy=plan.proxy_url,
        ca_bundle=plan.ca_bundle,
    )
    server.group(name="Service group", group=plan.service_user, system=True)
    server.user(
        name="Service user, without a shell",
        user=plan.service_user,
        group=plan.service_user,
        home=plan.home,
        shell=plan.no_login_shell,
        system=True,
        create_home=False,
        ensure_home=False,
    )
    place(name="Directories", directories=plan.directories)
    kernel_parameters(name="Kernel parameters are in force", values=plan.sysctl)

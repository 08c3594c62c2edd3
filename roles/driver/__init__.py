"""driver: the drivers that the inventory asks for, checked, installed, in force, of one version."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.driver.operations import drivers


@deploy("Driver")
def install() -> None:
    """Install what the inventory asks for; nothing is asked of a host that it asks nothing for."""
    drivers(name="Drivers in the planned versions, in force", plan=host_plan(host))

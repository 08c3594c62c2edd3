"""selinux: its mode, what Nginx may do, labels; and after the run, what was denied."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.selinux.operations import no_denials, selinux_as_planned


@deploy("SELinux")
def enforce() -> None:
    """Set SELinux as planned, before anything is installed or started."""
    selinux_as_planned(name="Mode, booleans, labels", selinux=host_plan(host).selinux)


@deploy("SELinux")
def audit() -> None:
    """A denial of ours since SELinux was set as planned fails the run."""
    no_denials(name="Nothing of ours was denied", plan=host_plan(host))

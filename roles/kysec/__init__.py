"""kysec: Kylin's control of what may be executed has to trust what is installed."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.kysec.operations import trusted_environments


@deploy("KySec")
def trust() -> None:
    """Have KySec trust the environments that are there already."""
    trusted_environments(name="Environments are trusted", plan=host_plan(host))

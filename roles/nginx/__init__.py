"""nginx: the reverse proxy, tested before it gets its name and proved live after."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.nginx.operations import live_configuration
from roles.operations import place


@deploy("Nginx")
def proxy() -> None:
    """Put the proxy in front of the planned servers."""
    plan = host_plan(host)
    place(name="Configuration", files=plan.role_files("nginx"), check="nginx -t -q -c {}")
    live_configuration(name="The configuration is live", proxy=plan.proxy)

"""accept: the endpoint proved from the control machine, through the proxy."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.accept.operations import endpoint_answers, kv_caches_noted


@deploy("Accept")
def prove() -> None:
    """A completion through the proxy, streamed and not; a failed check fails the run.

    What the servers logged of their KV caches is noted in reports/measured.toml.
    """
    plan = host_plan(host)
    endpoint_answers(name="The endpoint answers", proxy=plan.proxy)
    kv_caches_noted(name="KV cache sizes are noted", plan=plan)

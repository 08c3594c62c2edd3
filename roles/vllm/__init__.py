"""vllm: one systemd unit a server, ready and warm before it takes traffic."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.operations import place
from roles.vllm.operations import follow, nodes_together, serve_instance, stop_unplanned


@deploy("vLLM")
def serve() -> None:
    """Run the planned servers; restart those whose files changed, one after the other."""
    plan = host_plan(host)
    nodes_together(name="Servers over several hosts are in this run", plan=plan)
    place(
        name="Units, options, environments",
        files=plan.role_files("vllm"),
        absent=plan.role_absent("vllm"),
    )
    follow(name="Nodes of other hosts' servers", plan=plan)
    # pyinfra shows one name for all hosts, so it must not name a host's own instance
    for number, instance in enumerate(host.loop(plan.servers), 1):
        serve_instance(name=f"Server {number}", plan=plan, instance=instance)


@deploy("vLLM")
def retire() -> None:
    """Stop and remove servers that the inventory no longer names."""
    plan = host_plan(host)
    stop_unplanned(name="Servers no longer planned", plan=plan)

"""conda: the conda frontend, the tools environment and the engine's, at versioned paths."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.conda.operations import engine_environment, frontend, tools_environment
from roles.operations import place


@deploy("Conda")
def install() -> None:
    """Install what runs fp8fleet's tools and the engine, from hash-locked requirements."""
    plan = host_plan(host)
    place(name="Requirements and the fp8fleet tool", files=plan.role_files("conda"))
    frontend(name="Conda frontend", plan=plan)
    tools_environment(name="Tools environment", plan=plan)
    engine_environment(name="Engine environment", plan=plan)

"""model: the manifest's files on the host, checked and inspected before a server may start."""

from pyinfra import host
from pyinfra.api.deploy import deploy

from fp8fleet.session import host_plan
from roles.model.operations import model_files, share_model
from roles.operations import place


@deploy("Model")
def install() -> None:
    """Fetch what the model directory lacks; verify and inspect what it has."""
    plan = host_plan(host)
    place(name="Manifest", files=plan.role_files("model"), absent=plan.role_absent("model"))
    model_files(name="Model files", plan=plan)
    share_model(name="Transfer to other hosts", plan=plan)

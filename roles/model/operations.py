"""Fetching a model with fp8fleet's own tool on the host."""

from __future__ import annotations

from collections.abc import Iterator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import HostPlan
from fp8fleet.session import current
from roles.model.facts import ModelIsWhole
from roles.operations import streamed


@operation()
def model_files(plan: HostPlan) -> Iterator[StringCommand]:
    """Fetch the files that are missing or wrong."""
    model, tools = plan.model, plan.tools
    if model is None or tools is None:
        return
    whole = host.get_fact(
        ModelIsWhole,
        interpreter=tools.interpreter,
        program=plan.program,
        manifest=model.manifest,
        directory=model.directory,
        full=current().verify_full,
    )
    if whole:
        return
    # The proxy comes from the environment: only there no_proxy holds too.
    options = f" --token-file {model.token}" if model.token else ""
    if plan.ca_bundle:
        options += f" --ca-bundle {plan.ca_bundle}"
    yield streamed(
        f"{tools.interpreter} {plan.program} fetch {model.manifest} {model.directory}{options}",
        plan.download_environment,
    )

"""Fetching and inspecting a model with fp8fleet's own tool on the host."""

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
    """Fetch the files that are missing or wrong, then inspect the checkpoint.

    A finding of the inspection fails the host, so that no server starts on what would load and
    answer garbage: vLLM notices neither missing scales nor, before 0.32, a missing shard.
    """
    model = plan.model
    if model is None:
        return
    run = f"{plan.tools.interpreter} {plan.program}"
    inspect = f"{run} inspect {model.directory} --manifest {model.manifest}"
    if model.headers:
        inspect += f" --headers {model.headers}"
    if current().verify_full:
        inspect += " --full"
    if host.get_fact(ModelIsWhole, inspect=inspect):
        return
    # The proxy comes from the environment: only there no_proxy holds too.
    options = f" --token-file {model.token}" if model.token else ""
    if plan.ca_bundle:
        options += f" --ca-bundle {plan.ca_bundle}"
    yield streamed(
        f"{run} fetch {model.manifest} {model.directory}{options}", plan.download_environment
    )
    yield streamed(inspect)

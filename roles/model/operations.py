"""Fetching and inspecting a model with fp8fleet's own tool on the host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import PEER_UNIT, RUN_DIRECTORY, UNIT_DIRECTORY, HostPlan
from fp8fleet.session import current
from roles.model.facts import ModelIsWhole, PeerUnit
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
    if model.peer:
        # It listens where the fetch will, and may give an older revision.
        yield StringCommand(f"systemctl stop {PEER_UNIT} 2>/dev/null || true")
    # The proxy comes from the environment: only there no_proxy holds too.
    options = f" --token file:{model.token}" if model.token else ""
    if model.token_for:
        options += f" --token-for {shlex.quote(model.token_for)}"
    if plan.ca_bundle:
        options += f" --ca-bundle {plan.ca_bundle}"
    if model.rate_limit:
        options += f" --rate-limit {model.rate_limit}"
    if model.peer:
        options += f" --torrent {model.peer.torrent} --listen {model.peer.listen}"
        options += "".join(f" --peer {other}" for other in model.peer.peers)
    yield streamed(
        f"{run} fetch {model.manifest} {model.directory}{options}", plan.download_environment
    )
    # Servers that run loaded the files as they were: this makes them start anew.
    started = " ".join(f"{RUN_DIRECTORY}/{instance.name}.started" for instance in plan.instances)
    yield StringCommand(f"rm -f {started}")
    yield streamed(inspect)


@operation()
def share_model(plan: HostPlan) -> Iterator[StringCommand]:
    """Give the model to the other hosts, or stop where that is no longer planned."""
    state = host.get_fact(PeerUnit)
    planned = plan.model is not None and plan.model.peer is not None
    if planned and not (state.active and state.enabled and not state.needs_reload):
        yield StringCommand(
            f"systemctl daemon-reload && systemctl enable --quiet {PEER_UNIT}"
            f" && systemctl restart {PEER_UNIT}"
        )
    if not planned and state.exists:
        yield StringCommand(
            f"systemctl disable --now --quiet {PEER_UNIT};"
            f" rm -f {UNIT_DIRECTORY}/{PEER_UNIT} && systemctl daemon-reload"
        )

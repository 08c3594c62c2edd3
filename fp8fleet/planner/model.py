"""A model's files on a host, and how hosts share them."""

from __future__ import annotations

import hashlib

from fp8fleet import render
from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    PEER_UNIT,
    UNIT_DIRECTORY,
    EnvironmentPlan,
    ModelPlan,
    PeerPlan,
    PlannedFile,
    bracketed,
)
from fp8fleet.planner.files import planned_file, secret_file, token_file
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import HostSpec
from fp8fleet.tokens import token_origin


def model_plan(spec: HostSpec, own: Serving, peer: PeerPlan | None, note: str | None) -> ModelPlan:
    """A model's files on a host."""
    manifest = own.manifest
    name = f"{manifest.name}-{manifest.revision}"
    return ModelPlan(
        name=manifest.name,
        revision=manifest.revision,
        manifest=f"{CONFIG_DIRECTORY}/models/{name}.toml",
        directory=f"{spec.model_directory}/{manifest.name}/{manifest.revision}",
        size=manifest.total_bytes,
        files=len(manifest.files),
        token=token_file(manifest.name, manifest.revision) if spec.model_token else None,
        token_for=spec.model_token_for if spec.model_token else None,
        headers=f"{CONFIG_DIRECTORY}/models/{name}.headers.json" if own.headers else None,
        rate_limit=spec.model_rate_limit,
        peer=peer,
        note=note,
    )


def peer_plan(
    fleet: Fleet, host: FleetHost, serving: dict[str, Serving]
) -> tuple[PeerPlan | None, str | None]:
    """How ``host`` shares its model, or why it does not; neither where it is not asked for."""
    own = serving[host.name]
    willing = [
        other.spec
        for other in fleet.hosts
        if other.spec.peer_transfer
        and other.name in serving
        and serving[other.name].manifest.digest == own.manifest.digest
    ]
    if not host.spec.peer_transfer or len(willing) < 2:
        return None, None
    if not host.spec.storage_address:
        return None, "not shared between hosts: set storage_address"
    shares = [
        f"{bracketed(spec.storage_address)}:{spec.peer_port}"
        for spec in willing
        if spec.storage_address
    ]
    if len(shares) < 2:
        return None, "not shared between hosts: no other host of it has a storage_address"
    if own.torrent is None:
        return None, "not shared between hosts: make model.torrent (fp8fleet manifest torrent)"
    name = f"{own.manifest.name}-{own.manifest.revision}"
    listen = f"{bracketed(host.spec.storage_address)}:{host.spec.peer_port}"
    return PeerPlan(f"{CONFIG_DIRECTORY}/models/{name}.torrent", listen, tuple(shares)), None


def model_files(
    spec: HostSpec, own: Serving, model: ModelPlan, tools: EnvironmentPlan, program: str
) -> list[PlannedFile]:
    """Manifest, headers and torrent of a model, and the unit that shares it."""
    sources = spec.model_sources or tuple(own.manifest.sources)
    if not sources:
        raise OperatorError(
            f"model_sources is not set and {spec.model_manifest} names no sources: set one"
        )
    if spec.model_token:
        try:
            token_origin(sources, spec.model_token_for, "model_token_for")
        except ValueError as error:
            raise OperatorError(f"model_token: {error}") from None
    elif spec.model_token_for:
        raise OperatorError("model_token_for is set, but no model_token: set both or none")
    text = render.manifest_text(own.manifest, sources)
    files = [PlannedFile("model", model.manifest, text.encode())]
    if own.headers and model.headers:
        files.append(PlannedFile("model", model.headers, own.headers))
    if own.torrent and model.peer:
        files.append(PlannedFile("model", model.peer.torrent, own.torrent))
        values = {
            "spec": spec,
            "model": model,
            "peer": model.peer,
            "digest": hashlib.sha256(own.torrent).hexdigest(),
            "run": f"{tools.interpreter} {program}",
        }
        files.append(planned_file("model", f"{UNIT_DIRECTORY}/{PEER_UNIT}", values))
    if spec.model_token and model.token:
        files.append(secret_file("model", model.token, spec.model_token))
    return files

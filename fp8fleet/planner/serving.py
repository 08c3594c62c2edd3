"""What a serving host contributes to its own plan and to the gateways'."""

from __future__ import annotations

from dataclasses import dataclass

from fp8fleet.catalog import Release
from fp8fleet.catalog_check import Target
from fp8fleet.locks import Lock
from fp8fleet.manifest import Manifest
from fp8fleet.plan import EnvironmentPlan, InstancePlan
from fp8fleet.topology import Topology


@dataclass(frozen=True)
class Serving:
    """What a serving host contributes to its own plan and to the gateways'."""

    release: Release
    lock: Lock
    pins: str
    manifest: Manifest
    headers: bytes | None
    """The model's headers.json."""
    torrent: bytes | None
    """The model's model.torrent."""
    model_id: str
    engine: EnvironmentPlan
    instances: tuple[InstancePlan, ...]
    topology: Topology | None
    """The host's devices as the inventory declares them."""
    target: Target
    notes: tuple[str, ...]

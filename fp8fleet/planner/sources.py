"""Reads what a serving host is built from: release, lock, manifest, stored headers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from yaml import YAMLError

from fp8fleet import catalog
from fp8fleet.catalog_check import Combination, Target, advice, check, is_fp8_block
from fp8fleet.errors import OperatorError
from fp8fleet.headers import HEADERS, Header, HeaderError, read_headers
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.locks import Lock, pinned_part, read_lock
from fp8fleet.manifest import TORRENT, Manifest, load_manifest
from fp8fleet.measured import MEASURED, read_measured
from fp8fleet.plan import InstancePlan
from fp8fleet.planner.budget import check_device_memory, check_shared_devices
from fp8fleet.planner.capacity import check_config, with_capacity
from fp8fleet.planner.environments import engine_environment
from fp8fleet.planner.limits import check_limits
from fp8fleet.planner.placement import declared_devices, placements
from fp8fleet.planner.servers import instance_plan
from fp8fleet.planner.serving import Serving
from fp8fleet.planner.workload import Model, decide
from fp8fleet.quantized import CONFIG
from fp8fleet.serve_options import Checkpoint, checkpoint_of, judge
from fp8fleet.spec import HostSpec
from fp8fleet.stored import StoredCheckpoint, read_config, stored_checkpoint
from fp8fleet.topology import Topology

BEYOND_MEANING = (YAMLError, UnicodeError, RecursionError, ValueError)
"""What odd Python objects in an inventory, which is code, lead to when they are written out."""


def serving_of(fleet: Fleet, host: FleetHost, root: Path) -> Serving:
    """Read and judge what a serving host is built from.

    Raises:
        OperatorError: a named file is missing or broken, or the catalogue knows better.
    """
    spec = host.spec
    try:
        assert spec.engine_release and spec.engine_requirements and spec.model_manifest
        release = catalog.releases()[spec.engine_release]
        path = root / spec.model_manifest
        manifest = load_manifest(path)
        target = _target_of(spec, manifest)
        lock = read_lock(root / spec.engine_requirements)
        config = read_config(path.with_name(CONFIG))
        warnings = _check_options(spec, lock, checkpoint_of(manifest, config))
        topology = declared_devices(spec, root)
        headers = _headers(path, manifest)
        checkpoint = _checkpoint(path)
        if checkpoint:
            check_config(spec, checkpoint)
        model = Model(config, checkpoint)
        decision = decide(spec, model, target, topology, root)
        for declared in decision.spec.instances:
            check_limits(spec, declared, model.longest)
        notes = _check_release(decision.spec, target) + warnings + _made_elsewhere(spec, lock)
        have = lock.versions.get(release.distribution)
        if have != catalog.release_version(spec.engine_release):
            raise OperatorError(
                f"engine_requirements = {spec.engine_requirements!r}: has {release.distribution}"
                f" {have}, engine_release is {spec.engine_release}"
            )
        model_id = spec.served_model_name or manifest.name
        engine = engine_environment(spec, release, lock)
        address = _listen_address(fleet, host)
        measured = read_measured(path.with_name(MEASURED))
        places = placements(decision.spec, topology)
        planned = [
            instance_plan(spec, release, instance, placement, address, model_id, decision, root)
            for instance, placement in zip(decision.spec.instances, places, strict=True)
        ]
        notes += check_shared_devices(spec, planned)
        instances = tuple(
            with_capacity(
                spec,
                instance,
                manifest,
                checkpoint,
                measured,
                _devices_for(fleet, host, instance, topology),
            )
            for instance in planned
        )
        check_device_memory(spec, instances)
        return Serving(
            release,
            lock,
            pinned_part(lock, spec.engine_pins),
            manifest,
            headers,
            _torrent(path),
            model_id,
            engine,
            instances,
            topology,
            target,
            notes,
        )
    except OperatorError as error:
        raise OperatorError(f"{fleet.path}: host {host.name}: {error}") from None
    except BEYOND_MEANING as error:
        text = f"{fleet.path}: host {host.name}: {type(error).__name__}: {error}"
        raise OperatorError(f"{text}; no value of an inventory file can be that") from None


def _devices_for(
    fleet: Fleet, host: FleetHost, instance: InstancePlan, topology: Topology | None
) -> int | None:
    """Devices that a server could have: the host's, or its part on each host of its group."""
    declared = (i.group for i in host.spec.instances if i.name == instance.name)
    group = next(declared, None)
    if group:
        return len(instance.devices) * sum(group in other.groups for other in fleet.hosts)
    return topology.whole_devices if topology else None


def _torrent(manifest: Path) -> bytes | None:
    path = manifest.with_name(TORRENT)
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None


def _headers(manifest_path: Path, manifest: Manifest) -> bytes | None:
    """The headers that are stored beside a manifest; None: there are none."""
    path = manifest_path.with_name(HEADERS)
    try:
        content, stored = _read_headers(path, *_version(path))
        shards = [file.path for file in manifest.files if file.path.endswith(".safetensors")]
        missing = [shard for shard in shards if shard not in stored]
        if missing:
            raise OperatorError(
                f"{path}: lacks the headers of {len(missing)} of the {len(shards)} shards in"
                f" {manifest_path.name}, such as {missing[0]}: create the manifest anew"
            )
        return content
    except FileNotFoundError:
        return None
    except (OSError, HeaderError) as error:
        raise OperatorError(f"{error}: create the manifest anew, or remove {path}") from None


def _checkpoint(manifest: Path) -> StoredCheckpoint | None:
    """The model as config.json and headers.json have it; None: one of them is not there."""
    headers, config = manifest.with_name(HEADERS), manifest.with_name(CONFIG)
    try:
        return _read_checkpoint(headers, config, (_version(headers), _version(config)))
    except FileNotFoundError:
        return None


def _version(path: Path) -> tuple[int, int]:
    """What changes when a file is written: its time and its size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


# Read once for all hosts: the headers of a large model are some 10 MB.
@functools.cache
def _read_headers(path: Path, mtime_ns: int, size: int) -> tuple[bytes, dict[str, Header]]:
    del mtime_ns, size
    return path.read_bytes(), read_headers(path)


@functools.cache
def _read_checkpoint(
    headers: Path, config: Path, versions: tuple[tuple[int, int], ...]
) -> StoredCheckpoint | None:
    _, stored = _read_headers(headers, *versions[0])
    values = read_config(config)
    return stored_checkpoint(values, stored) if stored and values is not None else None


def _target_of(spec: HostSpec, manifest: Manifest) -> Target:
    return Target(
        platform=spec.platform,
        architecture=spec.arch,
        python=spec.engine_python,
        accelerator=spec.accelerator,
        pins=spec.engine_pins,
        build=spec.engine_build,
        fp8_block=is_fp8_block(manifest.quantization),
        quantization=manifest.quantization,
        validated=tuple(
            Combination(line.driver, line.engine, line.cuda) for line in spec.validated_combinations
        ),
    )


def _check_release(spec: HostSpec, target: Target) -> tuple[str, ...]:
    """Refuse what the catalogue knows to be impossible, before hours of installation show it.

    Returns:
        The gates' warnings.
    """
    assert spec.engine_release
    notes: dict[str, None] = {}
    for instance in spec.instances:
        dtype = instance.options.get("kv-cache-dtype")
        method = instance.options.get("quantization")
        own = replace(
            target,
            kv_cache_dtype=str(dtype) if dtype else None,
            quantization=str(method) if method else target.quantization,
        )
        for verdict in check(spec.engine_release, own):
            if verdict.severity == "error":
                raise OperatorError(f"{verdict} ({advice(spec.engine_release, own)})")
            notes[str(verdict)] = None
    return tuple(notes)


def _made_elsewhere(spec: HostSpec, lock: Lock) -> tuple[str, ...]:
    """A note where the lock was resolved for another platform or architecture."""
    if lock.made_for in (None, (spec.platform, spec.arch)):
        return ()
    made = " ".join(lock.made_for)
    return (
        f"engine_requirements = {spec.engine_requirements!r}: made for {made}, the host is"
        f" {spec.platform} {spec.arch}: its versions may lack wheels there; make a lock for it"
        " (fp8fleet lock)",
    )


def _check_options(spec: HostSpec, lock: Lock, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Refuse options that the release refuses, ignores, or that contradict the checkpoint.

    Returns:
        The warnings.
    """
    assert spec.engine_release
    major = lock.versions.get("transformers", "").partition(".")[0]
    notes: dict[str, None] = {}
    for instance in spec.instances:
        for finding in judge(
            spec.engine_release,
            instance.options,
            checkpoint,
            int(major) if major.isdigit() else None,
            spec.accelerator,
        ):
            text = f"{finding.message}: {finding.remedy}"
            if finding.severity == "error":
                raise OperatorError(f"instance {instance.name}: {text}")
            notes[text] = None
    return tuple(notes)


def check_addresses(fleet: Fleet) -> None:
    """Refuse an address of two hosts.

    One upstream twice would send a server twice its share; one gateway's address twice would let
    in both, or neither.
    """
    if any(host.is_gateway for host in fleet.hosts):
        _check_unique(fleet.path, "service_address", fleet.hosts)
    sharing = [host for host in fleet.hosts if host.spec.peer_transfer and not host.is_gateway]
    _check_unique(fleet.path, "storage_address", sharing)


def _check_unique(path: str, key: str, hosts: Iterable[FleetHost]) -> None:
    holders: dict[str, str] = {}
    for host in hosts:
        address = getattr(host.spec, key)
        other = holders.setdefault(address, host.name) if address else host.name
        if other != host.name:
            raise OperatorError(
                f"{path}: host {host.name}: {key}: {address} is also that of host {other}: give"
                " each host its own"
            )


def _listen_address(fleet: Fleet, host: FleetHost) -> str:
    if not any(other.is_gateway for other in fleet.hosts):
        return "127.0.0.1"
    if host.spec.service_address is None:
        raise OperatorError(
            "service_address is not set: the gateway needs it to reach this host's servers"
        )
    return host.spec.service_address

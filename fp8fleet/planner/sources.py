"""Reads what a serving host is built from: release, lock, manifest, stored headers."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from yaml import YAMLError

from fp8fleet import catalog
from fp8fleet.catalog_check import Combination, Target, advice, check, is_fp8_block
from fp8fleet.errors import OperatorError
from fp8fleet.headers import HEADERS, HeaderError, read_headers
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.locks import Lock, pinned_part, read_lock
from fp8fleet.manifest import TORRENT, Manifest, load_manifest
from fp8fleet.planner.environments import engine_environment
from fp8fleet.planner.servers import instance_plan
from fp8fleet.planner.serving import Serving
from fp8fleet.serve_options import Checkpoint, checkpoint_of, judge
from fp8fleet.spec import HostSpec

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
        manifest = load_manifest(root / spec.model_manifest)
        target = _target_of(spec, manifest)
        lock = read_lock(root / spec.engine_requirements)
        notes = _check_release(spec, target)
        notes += _check_options(spec, lock, checkpoint_of(root / spec.model_manifest, manifest))
        have = lock.versions.get(release.distribution)
        if have != catalog.release_version(spec.engine_release):
            raise OperatorError(
                f"engine_requirements = {spec.engine_requirements!r}: has {release.distribution}"
                f" {have}, engine_release is {spec.engine_release}"
            )
        model_id = spec.served_model_name or manifest.name
        engine = engine_environment(spec, release, lock)
        address = _listen_address(fleet, host)
        instances = tuple(
            instance_plan(spec, release, instance, address, model_id) for instance in spec.instances
        )
        return Serving(
            release,
            lock,
            pinned_part(lock, spec.engine_pins),
            manifest,
            _headers(root / spec.model_manifest),
            _torrent(root / spec.model_manifest),
            model_id,
            engine,
            instances,
            target,
            notes,
        )
    except OperatorError as error:
        raise OperatorError(f"{fleet.path}: host {host.name}: {error}") from None
    except BEYOND_MEANING as error:
        text = f"{fleet.path}: host {host.name}: {type(error).__name__}: {error}"
        raise OperatorError(f"{text}; no value of an inventory file can be that") from None


def _torrent(manifest: Path) -> bytes | None:
    path = manifest.with_name(TORRENT)
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None


def _headers(manifest: Path) -> bytes | None:
    """The headers that are stored beside a manifest; None: there are none."""
    path = manifest.with_name(HEADERS)
    try:
        status = path.stat()
        return _checked_headers(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, HeaderError) as error:
        raise OperatorError(f"{error}: create the manifest anew, or remove {path}") from None


@functools.cache
def _checked_headers(path: Path, mtime_ns: int, size: int) -> bytes:
    """Read and check a headers.json: once for all hosts, a large model's are some 10 MB."""
    del mtime_ns, size
    read_headers(path)
    return path.read_bytes()


def _target_of(spec: HostSpec, manifest: Manifest) -> Target:
    return Target(
        platform=spec.platform,
        architecture=spec.arch,
        python=spec.engine_python,
        accelerator=spec.accelerator,
        pins=spec.engine_pins,
        build=spec.engine_build,
        fp8_block=is_fp8_block(manifest.quantization),
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
        own = replace(target, kv_cache_dtype=str(dtype) if dtype else None)
        for verdict in check(spec.engine_release, own):
            if verdict.severity == "error":
                raise OperatorError(f"{verdict} ({advice(spec.engine_release, own)})")
            notes[str(verdict)] = None
    return tuple(notes)


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


def check_addresses(fleet: Fleet, serving: dict[str, Serving]) -> None:
    """One upstream twice would send a server twice its share."""
    if not any(host.is_gateway for host in fleet.hosts):
        return
    holders: dict[str, str] = {}
    for name, own in serving.items():
        for instance in own.instances:
            other = holders.setdefault(instance.upstream, name)
            if other != name:
                raise OperatorError(
                    f"{fleet.path}: host {name}: {instance.upstream} is also an address of host"
                    f" {other}: give each host its own service_address"
                )


def _listen_address(fleet: Fleet, host: FleetHost) -> str:
    if not any(other.is_gateway for other in fleet.hosts):
        return "127.0.0.1"
    if host.spec.service_address is None:
        raise OperatorError(
            "service_address is not set: the gateway needs it to reach this host's servers"
        )
    return host.spec.service_address

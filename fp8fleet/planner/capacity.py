"""What the KV cache of a planned server holds; what cannot fit is refused here."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fp8fleet import catalog
from fp8fleet.capacity import Capacity, Settings, estimate
from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import shown
from fp8fleet.manifest import Manifest
from fp8fleet.measured import Combination, Measurement, measured_tokens
from fp8fleet.plan import CapacityPlan, InstancePlan
from fp8fleet.spec import HostSpec
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.tensor_parallel import TensorParallel, has_attention, tensor_parallel

_ELSEWHERE = (
    "cpu-offload-gb",
    "decode-context-parallel-size",
    "enable-lora",
    "hf-overrides",
    "speculative-config",
)
"""Options with which memory is used otherwise than the estimate knows."""
_WITH_UNITS = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgtKMGT]?)")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def with_capacity(
    spec: HostSpec,
    instance: InstancePlan,
    manifest: Manifest,
    checkpoint: StoredCheckpoint | None,
    measured: Iterable[Measurement],
    devices: int | None,
) -> InstancePlan:
    """A server with what its KV cache holds, or with the reason why that is not known.

    Args:
        devices: of the host, or of all hosts of a server over several; None: not told.

    Raises:
        OperatorError: the model cannot be divided among that many devices, or does not fit.
    """
    settings = settings_of(spec, instance.options, instance.name)
    _check_devices(spec, instance, settings)
    if checkpoint is None:
        why = "models/ has no config.json and headers.json of the model"
        return _unknown(spec, instance, why)
    _check_heads(spec, checkpoint)
    _check_pipeline(instance.name, checkpoint, settings.pipeline_parallel)
    _check_tensor_parallel(instance.name, checkpoint, settings.tensor_parallel)
    for option in _ELSEWHERE:
        if instance.options.get(option):
            return _unknown(spec, instance, f"{option} uses memory in other ways")
    if not settings.memory_bytes and settings.kv_cache_memory_bytes is None:
        return _unknown(spec, instance, f"the catalogue has no memory of {spec.accelerator}")
    capacity = estimate(checkpoint, settings)
    if capacity is None:
        return _unknown(spec, instance, "config.json or kv-cache-dtype does not tell enough")
    combination = _combination(spec, manifest, settings, capacity)
    tokens = measured_tokens(measured, combination, capacity.layout.uniform)
    capacity = replace(capacity, measured_kv_tokens=tokens)
    if _is_automatic(instance.options.get("max-model-len")):
        capacity = replace(capacity, context=capacity.largest_context() or capacity.context)
    if not capacity.fits:
        raise OperatorError(_does_not_fit(spec, instance, checkpoint, settings, capacity, devices))
    return replace(instance, capacity=_plan(capacity, combination))


def capacity_of(
    spec: HostSpec, options: Mapping[str, Any], name: str, checkpoint: StoredCheckpoint | None
) -> Capacity | None:
    """The estimate for a server with ``options``; None: what it holds is not known.

    Raises:
        OperatorError: an option has a value that vLLM would refuse.
    """
    settings = settings_of(spec, options, name)
    memory = settings.memory_bytes or settings.kv_cache_memory_bytes is not None
    if checkpoint is None or not memory or any(options.get(option) for option in _ELSEWHERE):
        return None
    return estimate(checkpoint, settings)


def settings_of(spec: HostSpec, options: Mapping[str, Any], name: str) -> Settings:
    """What of a server's options and of its accelerator its memory depends on.

    Args:
        spec: the host's; names release and accelerator, whose defaults hold.
        options: of ``vllm serve`` by their long names.
        name: of the server, for errors.

    Returns:
        ``memory_bytes`` is 0 where the catalogue has none, as for CPUs.

    Raises:
        OperatorError: an option has a value that vLLM would refuse.
    """
    accelerator = catalog.accelerators()[spec.accelerator or "cpu"]
    release = catalog.releases()[spec.engine_release or ""]

    def count(option: str, default: int | None) -> int | None:
        return _count(name, option, options.get(option), default)

    share = options.get("gpu-memory-utilization", release.gpu_memory_utilization)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise OperatorError(
            f"instances: {name}: gpu-memory-utilization is {shown(share)}, expected a share of each"
            " device's memory above 0 and up to 1"
        )
    length = options.get("max-model-len")
    quantization = options.get("quantization")
    budget = count("max-num-batched-tokens", None) or accelerator.batched_tokens
    return Settings(
        memory_bytes=accelerator.engine_bytes or 0,
        utilization=float(share),
        # vLLM's default is never above the tokens of a step
        max_num_seqs=count("max-num-seqs", None) or min(accelerator.sequences, budget),
        max_num_batched_tokens=budget,
        kv_cache_dtype=str(options.get("kv-cache-dtype") or "auto"),
        max_model_len=None if _is_automatic(length) else count("max-model-len", None),
        tensor_parallel=count("tensor-parallel-size", 1) or 1,
        pipeline_parallel=count("pipeline-parallel-size", 1) or 1,
        enforce_eager=options.get("enforce-eager") is True,
        kv_cache_memory_bytes=count("kv-cache-memory-bytes", None),
        quantization=str(quantization) if quantization else None,
    )


def _is_automatic(length: Any) -> bool:
    """Whether vLLM takes the largest context that fits."""
    return length in ("auto", "-1") or (type(length) is int and length == -1)


def _count(name: str, option: str, value: Any, default: int | None) -> int | None:
    """A number as vLLM reads it: ``32k`` is 32,000, ``32K`` is 32,768."""
    if value is None:
        return default
    match = _WITH_UNITS.fullmatch(value) if isinstance(value, str) else None
    if match:
        step = 1024 if match[2].isupper() else 1000
        value = int(float(match[1]) * step ** _UNITS[match[2].lower()])
    if type(value) is not int or not 0 < value < 2**63:
        raise OperatorError(
            f"instances: {name}: {option} is {shown(value)}, expected a number from 1 on"
        )
    return value


# --- what is refused ----------------------------------------------------------------------------


def _check_devices(spec: HostSpec, instance: InstancePlan, settings: Settings) -> None:
    """A server that is spread over hosts has devices elsewhere."""
    spread = instance.options.get("distributed-executor-backend") == "ray"
    spread |= any(i.group for i in spec.instances if i.name == instance.name)
    if not instance.devices or spread:
        return
    asked = settings.tensor_parallel * settings.pipeline_parallel
    if asked > len(instance.devices):
        raise OperatorError(
            f"instances: {instance.name}: tensor-parallel-size {settings.tensor_parallel} x"
            f" pipeline-parallel-size {settings.pipeline_parallel} needs {asked} devices,"
            f" {len(instance.devices)} are listed: list more or lower one"
        )


def _check_heads(spec: HostSpec, checkpoint: StoredCheckpoint) -> None:
    """The headers have attention, so that config.json has to have heads."""
    if checkpoint.architecture.heads:
        return
    if has_attention(checkpoint.tensors):
        raise OperatorError(
            f"config.json beside {spec.model_manifest}: num_attention_heads is missing or no"
            " number, though the headers have attention: take config.json from the checkpoint's"
            " publisher, and create the manifest from it"
        )


def _check_pipeline(name: str, checkpoint: StoredCheckpoint, ranks: int) -> None:
    layers = checkpoint.architecture.layers
    if ranks > (layers or 1):
        raise OperatorError(
            f"instances: {name}: pipeline-parallel-size is {ranks}, the model has"
            f" {layers or 'no known number of'} layers to divide: lower it"
        )


def _check_tensor_parallel(name: str, checkpoint: StoredCheckpoint, size: int) -> None:
    if size == 1:
        return
    found = _tensor_parallel(checkpoint, size)
    if (found.sizes or found.refused) and size not in found.sizes:
        sizes = ", ".join(map(str, found.sizes)) or "none"
        raise OperatorError(
            f"instances: {name}: tensor_parallel_size {size}: {found.refused[size]};"
            f" sizes that work: {sizes}"
        )


@functools.lru_cache(maxsize=256)
def _tensor_parallel(checkpoint: StoredCheckpoint, asked: int) -> TensorParallel:
    return tensor_parallel(
        checkpoint.architecture, checkpoint.quantization, checkpoint.tensors, (asked,)
    )


def _does_not_fit(
    spec: HostSpec,
    instance: InstancePlan,
    checkpoint: StoredCheckpoint,
    settings: Settings,
    capacity: Capacity,
    devices: int | None,
) -> str:
    """What is needed, what there is, what would do."""
    remedies = []
    if capacity.largest_context():
        remedies.append(f"set max-model-len to {capacity.largest_context()} or less")
    remedies += _options_to_lower(spec, instance, checkpoint, settings)
    sizes = _sizes_that_fit(checkpoint, settings)
    here = [
        size for size in sizes if devices is None or size * settings.pipeline_parallel <= devices
    ]
    if here:
        told = " or ".join(map(str, here[:3]))
        remedies.append(f"set tensor_parallel_size to {told}, with as many devices")
    elif sizes:
        remedies.append(
            "share the server among more hosts (group: docs/servers.md): tensor_parallel_size"
            f" {sizes[0]} would do, and there are {devices} devices"
        )
    elif not remedies:
        remedies.append(
            "no tensor_parallel_size would do: take a smaller or quantized checkpoint, or share the"
            " server among hosts (group: docs/servers.md)"
        )
    remedy = ", or ".join(remedies)
    return f"instances: {instance.name}: does not fit: {capacity.shortage()}: {remedy}"


def _options_to_lower(
    spec: HostSpec, instance: InstancePlan, checkpoint: StoredCheckpoint, settings: Settings
) -> list[str]:
    """Options of the inventory that alone take the room: with vLLM's defaults it would do."""
    default = settings_of(spec, {}, instance.name)
    changes: dict[str, dict[str, Any]] = {
        "max-num-seqs": {"max_num_seqs": default.max_num_seqs},
        "max-num-batched-tokens": {"max_num_batched_tokens": default.max_num_batched_tokens},
    }
    changes["max-num-seqs and max-num-batched-tokens"] = {
        key: value for change in changes.values() for key, value in change.items()
    }
    for options, change in changes.items():
        if all(getattr(settings, key) <= value for key, value in change.items()):
            continue
        if _fits(checkpoint, replace(settings, **change)):
            told = " and ".join(f"{value}" for value in change.values())
            return [f"lower {options}, such as to vLLM's default, {told}"]
    share = default.utilization
    if settings.utilization < share and _fits(checkpoint, replace(settings, utilization=share)):
        return [f"raise gpu-memory-utilization, such as to the default, {share:g}"]
    return []


def _fits(checkpoint: StoredCheckpoint, settings: Settings) -> bool:
    capacity = estimate(checkpoint, settings)
    return capacity is not None and capacity.fits


def _sizes_that_fit(checkpoint: StoredCheckpoint, settings: Settings) -> list[int]:
    """Larger tensor-parallel sizes with which the asked context fits, the smallest first."""
    sizes = _tensor_parallel(checkpoint, settings.tensor_parallel).sizes
    larger = (size for size in sizes if size > settings.tensor_parallel)
    return [size for size in larger if _fits(checkpoint, replace(settings, tensor_parallel=size))]


# --- what is planned ----------------------------------------------------------------------------


def _unknown(spec: HostSpec, instance: InstancePlan, why: str) -> InstancePlan:
    """Nothing is claimed of a CPU host without one word."""
    if spec.vendor == "cpu":
        return instance
    return replace(instance, capacity_unknown=why)


def _combination(
    spec: HostSpec, manifest: Manifest, settings: Settings, capacity: Capacity
) -> Combination:
    return Combination(
        model=manifest.name,
        revision=manifest.revision,
        engine_release=spec.engine_release or "",
        accelerator=spec.accelerator or "",
        tensor_parallel_size=settings.tensor_parallel,
        pipeline_parallel_size=settings.pipeline_parallel,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        gpu_memory_utilization=settings.utilization,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=capacity.context,
        enforce_eager=settings.enforce_eager,
    )


def _plan(capacity: Capacity, combination: Combination) -> CapacityPlan:
    context = capacity.context
    return CapacityPlan(
        parts=capacity.parts,
        kv_bytes=capacity.kv_bytes,
        kv_tokens=capacity.kv_tokens,
        measured_kv_tokens=capacity.measured_kv_tokens,
        error=capacity.error,
        context=context,
        sequences=round(capacity.sequences(context), 2) if context else None,
        largest_context=capacity.largest_context(),
        combination=combination,
    )

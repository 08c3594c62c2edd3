"""What the KV cache of a planned server holds; what cannot fit is refused here."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8fleet import catalog
from fp8fleet.architecture import shared_layers_problem
from fp8fleet.capacity import Capacity, Settings, estimate
from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import shown
from fp8fleet.manifest import Manifest
from fp8fleet.measured import MEASURED, Combination, Measurement, measured_tokens
from fp8fleet.plan import CapacityPlan, InstancePlan
from fp8fleet.planner.budget import memory_fraction
from fp8fleet.spec import HostSpec
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.tensor_parallel import TensorParallel, has_attention, tensor_parallel

_ELSEWHERE = (
    "cpu-offload-gb",
    "decode-context-parallel-size",
    "enable-eplb",
    "enable-lora",
    "hf-overrides",
    "num-gpu-blocks-override",
    "prefill-context-parallel-size",
    "quantization-config",
    "speculative-config",
)
"""Options with which memory is used otherwise than the estimate knows."""
_WITH_UNITS = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgtKMGT]?)")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_GIB = 1 << 30
_BOUND = 2
"""Times that a measured size is off the estimate at most; the estimates are off by percents."""
_SINGLE = ("float", "float32")
"""Values of vLLM's dtype with four bytes."""


def with_capacity(
    spec: HostSpec,
    instance: InstancePlan,
    manifest: Manifest,
    checkpoint: StoredCheckpoint | None,
    measured: Sequence[Measurement],
    devices: int | None,
) -> InstancePlan:
    """A server with what its KV cache holds, or with the reason why that is not known.

    Args:
        devices: of the host, or of all hosts of a server over several; None: not told.

    Raises:
        OperatorError: the model cannot be divided among that many devices, or does not fit.
    """
    settings = settings_of(spec, instance.options, instance.name)
    _check_cache(instance.name, settings)
    if checkpoint is None:
        why = "models/ has no config.json and headers.json of the model"
        return _unknown(spec, instance, why)
    _check_pipeline(instance.name, checkpoint, settings.pipeline_parallel)
    _check_tensor_parallel(instance.name, checkpoint, settings)
    for option in _ELSEWHERE:
        if instance.options.get(option):
            return _unknown(spec, instance, f"{option} uses memory in other ways")
    if not settings.memory_bytes and settings.kv_cache_memory_bytes is None:
        return _unknown(spec, instance, f"the catalogue has no memory of {spec.accelerator}")
    capacity = estimate(checkpoint, settings)
    if capacity is None:
        why = "config.json, kv-cache-dtype or quantization does not tell enough"
        return _unknown(spec, instance, why)
    combination = _combination(spec, manifest, settings, capacity)
    tokens = measured_tokens(measured, combination, capacity.layout.uniform)
    doubt = _doubt(spec, instance.name, capacity, tokens)
    if doubt:
        instance = replace(instance, notes=(*instance.notes, doubt))
    else:
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

    def count(option: str, default: int | None) -> int | None:
        return _count(name, option, options.get(option), default)

    length = options.get("max-model-len")
    quantization = options.get("quantization")
    budget = count("max-num-batched-tokens", None) or accelerator.batched_tokens
    return Settings(
        memory_bytes=accelerator.engine_bytes or 0,
        utilization=memory_fraction(spec, options, name),
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
        data_parallel=count("data-parallel-size", 1) or 1,
        dtype_bytes=4 if options.get("dtype") in _SINGLE else 2,
        whole_experts=options.get("enable-expert-parallel") is True,
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


def check_config(spec: HostSpec, checkpoint: StoredCheckpoint) -> None:
    """Refuse a config.json with which no size can be computed.

    Raises:
        OperatorError: the headers have attention but config.json no heads, or no layer keeps keys.
    """
    architecture = checkpoint.architecture
    shared, layers = architecture.kv_shared_layers, architecture.layers
    why = None
    if not architecture.heads and has_attention(checkpoint.tensors):
        why = "num_attention_heads is missing or no number, though the headers have attention"
    elif layers and shared >= layers:
        why = shared_layers_problem(shared, layers)
    if why:
        raise OperatorError(
            f"config.json beside {spec.model_manifest}: {why}: take config.json from the"
            " checkpoint's publisher, and create the manifest from it"
        )


def _check_cache(name: str, settings: Settings) -> None:
    """Also where the weights are not known a cache is no larger than the device."""
    cache, memory = settings.kv_cache_memory_bytes, settings.memory_bytes
    if cache and memory and cache > memory:
        raise OperatorError(
            f"instances: {name}: kv-cache-memory-bytes is {cache / _GIB:.1f} GiB, a device has"
            f" {memory / _GIB:.1f} GiB for it and the weights: lower it"
        )


def _check_pipeline(name: str, checkpoint: StoredCheckpoint, ranks: int) -> None:
    layers = checkpoint.architecture.layers
    if ranks > (layers or 1):
        raise OperatorError(
            f"instances: {name}: pipeline-parallel-size is {ranks}, the model has"
            f" {layers or 'no known number of'} layers to divide: lower it"
        )


def _check_tensor_parallel(name: str, checkpoint: StoredCheckpoint, settings: Settings) -> None:
    size = settings.tensor_parallel
    if size == 1:
        return
    found = _tensor_parallel(checkpoint, size, settings.whole_experts)
    if (found.sizes or found.refused) and size not in found.sizes:
        sizes = ", ".join(map(str, found.sizes)) or "none"
        raise OperatorError(
            f"instances: {name}: tensor_parallel_size {size}: {found.refused[size]};"
            f" sizes that work: {sizes}"
        )


@functools.lru_cache(maxsize=256)
def _tensor_parallel(
    checkpoint: StoredCheckpoint, asked: int, whole_experts: bool
) -> TensorParallel:
    return tensor_parallel(
        checkpoint.architecture,
        checkpoint.quantization,
        checkpoint.different_tensors,
        (asked,),
        whole_experts,
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
    own = settings.tensor_parallel
    sizes = _tensor_parallel(checkpoint, own, settings.whole_experts).sizes
    larger = (size for size in sizes if size > settings.tensor_parallel)
    return [size for size in larger if _fits(checkpoint, replace(settings, tensor_parallel=size))]


# --- what is planned ----------------------------------------------------------------------------


def _unknown(spec: HostSpec, instance: InstancePlan, why: str) -> InstancePlan:
    """Nothing is claimed of a CPU host without one word."""
    if spec.vendor == "cpu":
        return instance
    return replace(instance, capacity_unknown=why)


def _doubt(spec: HostSpec, name: str, capacity: Capacity, tokens: int | None) -> str | None:
    """A warning where what was measured cannot be of this server.

    The estimate is no measure where a state of unknown size is kept too.
    """
    bound = capacity.kv_tokens
    if tokens is None or not bound or capacity.layout.unknown:
        return None
    if bound <= _BOUND * tokens and tokens <= _BOUND * bound:
        return None
    return (
        f"warning: {MEASURED} beside {spec.model_manifest}: the entry of {name}'s settings has"
        f" kv_tokens = {tokens:,}, the estimate is {bound:,}, which counts: correct the entry, or"
        " remove it and measure anew"
    )


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
        data_parallel_size=settings.data_parallel,
        enable_expert_parallel=settings.whole_experts,
        dtype="float32" if settings.dtype_bytes > 2 else "auto",
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
        device_bytes=capacity.device_bytes,
        combination=combination,
    )

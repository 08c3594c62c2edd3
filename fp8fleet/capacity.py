"""How much context a server's GPUs hold: the sum of what its memory is used for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from fp8fleet.kv_cache import BLOCK, CacheLayout, cache_layout
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.weights import knows_quantization, layers_of_ranks, weights_per_gpu

How = Literal["catalogue", "headers", "estimate", "option", "unknown"]

_MIB = 1 << 20
_GIB = 1 << 30
_CONTEXT_BYTES = 240 * _MIB
"""CUDA context and libraries. vLLM 0.23.0 on an H200: 230 to 238 MiB."""
_NCCL_BYTES = 160 * _MIB
"""Buffers of a process among several. Two H200: 156 MiB."""
_LOGIT = 15
"""Bytes that sampling takes a sequence and entry of the vocabulary: sorted logits with indices."""
_LARGEST_GRAPH = 512
"""Sequences of the largest batch for which vLLM captures a CUDA graph."""


@dataclass(frozen=True)
class Settings:
    """What of a server's options its memory depends on."""

    memory_bytes: int
    """Of one device, as the engine sees it."""
    utilization: float
    """Share of it that the server takes."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens; None: the model's context."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None
    """vLLM's option of that name: the cache's size, whatever is left."""
    quantization: str | None = None
    """vLLM's option of that name: quantization while loading."""
    data_parallel: int = 1
    """Ranks of the server, each with a cache of its own."""
    dtype_bytes: int = 2
    """Of a number that is not quantized, by vLLM's dtype."""
    whole_experts: bool = False
    """vLLM's enable-expert-parallel: every GPU has some experts, whole."""

    @property
    def gpus(self) -> int:
        """Of the server, all ranks' together."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def expert_parallel(self) -> int | None:
        """GPUs among which whole experts are divided; None: experts are cut.

        Source: FusedMoEParallelConfig.make in vllm/model_executor/layers/fused_moe/config.py.
        """
        return self.tensor_parallel * self.data_parallel if self.whole_experts else None


@dataclass(frozen=True)
class Part:
    """A term of the sum that is shown."""

    name: str
    bytes: int
    """On the fullest GPU; negative where it is taken away."""
    how: How
    """Where it is from."""


@dataclass(frozen=True)
class Capacity:
    """What a server's KV cache holds."""

    parts: tuple[Part, ...]
    """Add up to ``kv_bytes``."""
    kv_bytes: int
    """For the KV cache on the fullest GPU; not above 0 where the model alone is too large."""
    kv_tokens: int
    """The estimate of what vLLM logs as ``GPU KV cache size``."""
    context: int | None
    """Tokens a sequence may have; None: neither the model nor the options say."""
    longest: int | None
    """Tokens a sequence may have at most, by the model, or by the options if these say more."""
    layout: CacheLayout
    device_bytes: int
    """That the server takes of a device, with its weights."""
    measured_kv_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds: measured where that is known."""
        return self.kv_tokens if self.measured_kv_tokens is None else self.measured_kv_tokens

    @property
    def error(self) -> float | None:
        """Of the estimate against what was measured: 0.01 is one percent too much."""
        if not self.measured_kv_tokens:
            return None
        return self.kv_tokens / self.measured_kv_tokens - 1

    @property
    def fits(self) -> bool:
        """Whether a sequence of the asked context fits, which vLLM demands at its start."""
        return self.sequences(self.context or BLOCK) >= 1

    def sequences(self, context: int) -> float:
        """Sequences of ``context`` tokens that the cache holds at once.

        One of them is being admitted; below 1 not even that one fits.
        """
        asked, cache = self.layout.admitted_bytes(context), self._cache_bytes
        if not asked or cache < asked:
            return cache / asked if asked else 0.0
        return 1 + (cache - asked) / self.layout.held_bytes(context)

    def shortage(self) -> str:
        """The sum behind a sequence of the asked context that does not fit, for a refusal."""
        context = self.context or BLOCK
        lent = next(part for part in self.parts if part.bytes >= 0)
        taken = " and ".join(
            f"{part.name} {-part.bytes / _GIB:.1f}" for part in self.parts if part.bytes < 0
        )
        less = f" less {taken}" if taken else ""
        left = f"{self.kv_bytes / _GIB:.1f} GiB" if self.kv_bytes > 0 else "nothing"
        return (
            f"{lent.name} ({lent.bytes / _GIB:.1f} GiB a device){less} leaves {left} for the KV"
            f" cache; one sequence of {context:,} tokens needs"
            f" {self.layout.admitted_bytes(context) / _GIB:.1f}"
        )

    def largest_context(self) -> int:
        """Tokens of the longest sequence that the cache holds and the model takes; 0: none."""
        if not self.layout.layers:
            return self.longest or 0
        low, high = 0, -(-(self.longest or self.tokens) // BLOCK)
        while low < high:
            middle = (low + high + 1) // 2
            if self.layout.admitted_bytes(middle * BLOCK) <= self._cache_bytes:
                low = middle
            else:
                high = middle - 1
        return min(low * BLOCK, self.longest or low * BLOCK)

    @property
    def _cache_bytes(self) -> int:
        """What was measured says more than the estimate."""
        if self.measured_kv_tokens is None or not self.kv_tokens:
            return max(self.kv_bytes, 0)
        return max(self.kv_bytes, 0) * self.measured_kv_tokens // self.kv_tokens


@functools.lru_cache(maxsize=1024)
def estimate(checkpoint: StoredCheckpoint, settings: Settings) -> Capacity | None:
    """Estimate what the KV cache of a server holds.

    What a GPU lends, less the weights, less what else the engine takes there. The rest is the
    cache's, as vLLM determines it when it starts (determine_available_memory in
    vllm/v1/worker/gpu_worker.py).

    Returns:
        None: config.json does not tell what is needed, or the KV dtype is not known here.
    """
    architecture = checkpoint.architecture
    layout = cache_layout(
        architecture,
        settings.kv_cache_dtype,
        settings.max_num_batched_tokens,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        settings.dtype_bytes,
    )
    parts = _parts(checkpoint, settings) if layout else None
    if layout is None or parts is None:
        return None
    unknown = tuple(Part(f"state of {layers}", 0, "unknown") for layers in layout.unknown)
    kv_bytes = sum(part.bytes for part in parts)
    context = settings.max_model_len or architecture.context
    longest = max(settings.max_model_len or 0, architecture.context or 0) or None
    return Capacity(
        parts=(*parts, *unknown),
        kv_bytes=kv_bytes,
        kv_tokens=_tokens(layout, max(kv_bytes, 0), context or BLOCK),
        context=context,
        longest=longest,
        layout=layout,
        device_bytes=_device_bytes(checkpoint, settings),
    )


def _tokens(layout: CacheLayout, kv_bytes: int, context: int) -> int:
    """As vLLM logs it: sequences of the longest context times their tokens.

    Source: get_kv_cache_capacity in vllm/v1/core/kv_cache_utils.py.
    """
    if not layout.layers:
        return 0
    if layout.uniform:
        return kv_bytes // (layout.bytes_per_token * BLOCK) * BLOCK
    return kv_bytes * context // layout.admitted_bytes(context)


def _device_bytes(checkpoint: StoredCheckpoint, settings: Settings) -> int:
    """With kv-cache-memory-bytes vLLM takes that and what it needs beside, whatever its share.

    Source: determine_available_memory in vllm/v1/worker/gpu_worker.py.
    """
    if settings.kv_cache_memory_bytes is None:
        return int(settings.memory_bytes * settings.utilization)
    beside = _beside(checkpoint, settings) or ()
    return settings.kv_cache_memory_bytes - sum(part.bytes for part in beside)


def _parts(checkpoint: StoredCheckpoint, settings: Settings) -> tuple[Part, ...] | None:
    if settings.kv_cache_memory_bytes is not None:
        return (Part("kv-cache-memory-bytes", settings.kv_cache_memory_bytes, "option"),)
    beside = _beside(checkpoint, settings)
    if beside is None:
        return None
    lent = int(settings.memory_bytes * settings.utilization)
    gib = settings.memory_bytes / 2**30
    return (Part(f"{settings.utilization:g} of {gib:.2f} GiB", lent, "catalogue"), *beside)


def _beside(checkpoint: StoredCheckpoint, settings: Settings) -> tuple[Part, ...] | None:
    """What a GPU has beside the cache; None: not known."""
    activations = _activations(checkpoint, settings)
    if activations is None or not knows_quantization(checkpoint, settings.quantization):
        return None
    weights = weights_per_gpu(
        checkpoint,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        settings.quantization,
        settings.expert_parallel,
        settings.dtype_bytes,
    )
    several = settings.gpus > 1
    context = _CONTEXT_BYTES + several * _NCCL_BYTES
    return (
        Part("weights", -weights, "headers"),
        Part("CUDA context" + several * " and NCCL", -context, "estimate"),
        Part("activations", -activations, "estimate"),
        Part("CUDA graphs", -_graphs(checkpoint, settings), "estimate"),
    )


def _activations(checkpoint: StoredCheckpoint, settings: Settings) -> int | None:
    """Bytes of activations at the peak: the largest of three moments.

    A layer over a whole step; sampling for all sequences; compilation, which holds the output layer
    once more. Fitted to thirteen starts of vLLM 0.23.0 with an 8B model on an H200.
    """
    architecture, tokens = checkpoint.architecture, settings.max_num_batched_tokens
    hidden, vocabulary = architecture.hidden_size, architecture.vocabulary
    if not hidden or not vocabulary:
        return None
    inner = max((architecture.intermediate_size or 0) // settings.tensor_parallel, hidden)
    number = settings.dtype_bytes
    layer = number * 4 * inner * tokens
    sampling = _LOGIT * vocabulary * settings.max_num_seqs + number * hidden * tokens
    compiling = number * (vocabulary * hidden // settings.tensor_parallel + 2 * hidden * tokens)
    return max(layer, sampling) if settings.enforce_eager else max(layer, sampling, compiling)


def _graphs(checkpoint: StoredCheckpoint, settings: Settings) -> int:
    """Bytes of CUDA graphs, which are captured up to twice max_num_seqs: 1 MiB each in an 8B."""
    if settings.enforce_eager:
        return 0
    layers = max(layers_of_ranks(checkpoint.architecture.layers or 0, settings.pipeline_parallel))
    captured = min(2 * settings.max_num_seqs, _LARGEST_GRAPH)
    hidden = checkpoint.architecture.hidden_size or 0
    return 4 * settings.dtype_bytes * hidden * layers * captured

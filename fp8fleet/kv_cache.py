"""Bytes that the keys and values of a sequence take on one GPU, by the types of layers."""

from __future__ import annotations

from dataclasses import dataclass

from fp8fleet.architecture import FULL, SLIDING, Architecture, LayerGroup
from fp8fleet.weights import layers_of_ranks

BLOCK = 16
"""Tokens that are kept together (block_size of vLLM's CacheConfig on GPUs)."""
_ATTENTION = (FULL, SLIDING, "chunked_attention")
_HALVES = frozenset({"bfloat16", "float16"})
_BYTES = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})
_WITH_SCALES = frozenset({"fp8_per_token_head", "int8_per_token_head"})
_SCALE = 4
"""Bytes of a scale beside each key's and each value's head."""
_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token's latent numbers and scales (MLAAttention.get_kv_cache_spec of vLLM)."""
_INDEX_BLOCK = 128
"""Numbers of a key in the index that share a scale; they have a byte each."""


@dataclass(frozen=True)
class CacheLayers:
    """Layers whose keys and values are kept for equally many tokens."""

    bytes_per_token: int
    """Of all of them together."""
    window: int | None
    """Tokens that are looked back; None: all are kept."""


@dataclass(frozen=True)
class CacheLayout:
    """What a sequence asks of the cache of one GPU."""

    layers: tuple[CacheLayers, ...]
    in_flight: int
    """Tokens that steps under way may add to a sequence."""
    unknown: tuple[str, ...]
    """Layers with a state of a size that is not known here."""

    @property
    def uniform(self) -> bool:
        """Whether every layer keeps every token, so that a token always takes the same."""
        return all(layers.window is None for layers in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """While nothing has left a window."""
        return sum(layers.bytes_per_token for layers in self.layers)

    def admitted_bytes(self, context: int) -> int:
        """Bytes that a sequence of ``context`` tokens asks for while its prompt is read.

        So vLLM admits a sequence, and sizes its log's tokens: of layers with a window it counts the
        window and the tokens in flight (SlidingWindowSpec in vllm/v1/kv_cache_interface.py).
        """
        return self._bytes(context, self.in_flight)

    def held_bytes(self, context: int) -> int:
        """Bytes of a sequence of ``context`` tokens that goes on a token a step."""
        return self._bytes(context, 1)

    def _bytes(self, context: int, in_flight: int) -> int:
        """In whole blocks; a block more for a window, since it may begin within one."""
        total = 0
        for layers in self.layers:
            tokens, more = context, 0
            if layers.window is not None:
                tokens, more = min(context, layers.window - 1 + in_flight), 1
            total += (-(-tokens // BLOCK) + more) * BLOCK * layers.bytes_per_token
        return total


def cache_layout(
    architecture: Architecture,
    kv_cache_dtype: str,
    max_num_batched_tokens: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    dtype_bytes: int = 2,
) -> CacheLayout | None:
    """What a sequence asks of the fullest GPU's cache.

    Keys and values of a layer take 2 x KV heads on the GPU x head dimension; multi-head latent
    attention keeps its latent numbers once, on every GPU, and sparse attention a key of its index
    (counted in every layer, also where some share one). Layers that share earlier layers' keys and
    values keep none.

    Args:
        architecture: config.json's.
        kv_cache_dtype: vLLM's option; ``auto`` is the model's dtype.
        max_num_batched_tokens: vLLM's option; one more step than the pipeline has ranks is under
            way (max_in_flight_tokens in vllm/config/vllm.py, 0.32, with asynchronous scheduling).
        tensor_parallel: GPUs among which heads are divided, or repeated where they are fewer.
        pipeline_parallel: ranks among which layers are divided; the one with the most counts.
        dtype_bytes: of a number of the model's dtype.

    Returns:
        None: config.json does not tell layers or heads, or the cache's format is not known here.
    """
    if not architecture.layers or architecture.compressed:
        return None
    most = max(layers_of_ranks(architecture.layers, pipeline_parallel))
    kept: dict[int | None, int] = {}
    unknown = []
    for group in architecture.groups:
        if group.type not in _ATTENTION:
            unknown.append(f"{group.count} x {group.type}")
            continue
        if architecture.latent_dim:
            size = _latent_bytes(architecture, kv_cache_dtype, dtype_bytes)
        else:
            size = _heads_bytes(group, kv_cache_dtype, dtype_bytes, tensor_parallel)
        if size is None:
            return None
        own = size * (group.count - group.kv_shared)
        kept[group.window] = kept.get(group.window, 0) + own
    layers = tuple(
        CacheLayers(-(-size * most // architecture.layers), window)
        for window, size in kept.items()
        if size
    )
    in_flight = (pipeline_parallel + 1) * max_num_batched_tokens
    return CacheLayout(layers, in_flight, tuple(unknown))


def _latent_bytes(architecture: Architecture, kv_cache_dtype: str, dtype_bytes: int) -> int | None:
    """Of a token in a layer with latent attention; None: the format is not known here.

    Sparse attention packs fp8 as fp8_ds_mla (_canonicalize_sparse_mla_kv_cache_dtype in
    mla_attention.py; on Blackwell it may take less). The index: Indexer in models/deepseek_v2.py.
    """
    numbers, index = architecture.latent_dim or 0, architecture.index_dim
    if index and kv_cache_dtype in _BYTES:
        kv_cache_dtype = "fp8_ds_mla"
    size = _PACKED.get(kv_cache_dtype)
    if size is None:
        width = _width(kv_cache_dtype, dtype_bytes)
        if width is None:
            return None
        size = numbers * width
    return size + (index + index // _INDEX_BLOCK * _SCALE if index else 0)


def _heads_bytes(
    group: LayerGroup, kv_cache_dtype: str, dtype_bytes: int, tensor_parallel: int
) -> int | None:
    """Of a token's keys and values in a layer, on one GPU; None: not known."""
    scaled = kv_cache_dtype in _WITH_SCALES
    width = 1 if scaled else _width(kv_cache_dtype, dtype_bytes)
    if width is None or not group.kv_heads or not group.head_dim:
        return None
    return 2 * -(-group.kv_heads // tensor_parallel) * (group.head_dim * width + scaled * _SCALE)


def _width(kv_cache_dtype: str, dtype_bytes: int) -> int | None:
    """Bytes of a number in the cache; None: not a plain format."""
    if kv_cache_dtype == "auto":
        return dtype_bytes
    if kv_cache_dtype in _HALVES:
        return 2
    return 1 if kv_cache_dtype in _BYTES else None

"""Bytes of a checkpoint's weights on one GPU, as tensor and pipeline parallelism divide them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from fp8fleet.headers import Tensor
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.tensor_parallel import (
    COLUMNS,
    EXPERTS,
    HALVES,
    KEYS_AND_VALUES,
    LAYER,
    ROWS,
    group_of_keys,
    is_language_model,
)

_PADDING = 64
"""Rows of an embedding are filled up to a multiple (DEFAULT_VOCAB_PADDING_SIZE of vLLM)."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ONLINE_BITS: dict[str, tuple[float | None, float | None]] = {
    "fp8": (8, 8),
    "fp8_per_tensor": (8, 8),
    "fp8_per_block": (8, 8),
    "fp8_per_channel": (8, 8),
    "mxfp8": (8.25, 8.25),
    "mxfp4": (4.25, 4.25),
    "int8_per_channel_weight_only": (None, 8),
    "experts_int8": (None, 8),
    "nvfp4_per_token": (None, 4.5),
}
"""Bits of a number, with its scale, of linear layers and of experts that are quantized while
loading; None: they are not. Source: _ONLINE_SHORTHANDS in vllm/config/quantization.py (0.32), whose
scales are a byte for 32 numbers (MX) or 16 (NV)."""

_COLUMNS = COLUMNS | HALVES | {"qkv_proj", "qkv", "fc1", "in_proj_qkvz", "in_proj_ba"}
"""Every GPU has some outputs of these."""
_ROWS = ROWS | {"out_proj", "fc2"}
"""Every GPU has some inputs of these."""
_EMBEDDINGS = frozenset({"embed_tokens", "embed_tokens_per_layer", "lm_head"})
_LAST = frozenset({"lm_head", "norm"})
"""Outside the layers, on the last rank of a pipeline."""


def knows_quantization(checkpoint: StoredCheckpoint, quantization: str | None) -> bool:
    """Whether it is known what vLLM's option for quantization makes of the weights."""
    own = checkpoint.quantization.method is not None
    return own or not quantization or quantization in _ONLINE_BITS


@functools.lru_cache(maxsize=1024)
def weights_per_gpu(
    checkpoint: StoredCheckpoint,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    quantization: str | None = None,
    expert_parallel: int | None = None,
    dtype_bytes: int = 2,
) -> int:
    """Bytes of the weights on the fullest GPU.

    Divided among the GPUs of a tensor-parallel group: linear layers by outputs or inputs with their
    block and channel scales, experts, the embedding and the output layer. Keys and values are
    repeated where there are fewer heads than GPUs. On every GPU: norms, routers, biases of layers
    that are divided by inputs, and whatever is not known here, so that the sum errs upwards.

    Args:
        checkpoint: its tensors are counted as the headers have them.
        tensor_parallel: GPUs that share each layer.
        pipeline_parallel: groups of GPUs that share the layers; the embedding is on the first, the
            output layer on the last.
        quantization: vLLM's option; of a checkpoint that is not quantized, its quantization while
            loading.
        expert_parallel: GPUs among which whole experts are divided (enable-expert-parallel); None:
            every expert is cut among the tensor-parallel ones.
        dtype_bytes: of a number that is not quantized; vLLM's dtype ``auto`` loads none as F32.

    Source of the rules: vllm/model_executor/layers/linear.py, vocab_parallel_embedding.py,
    fused_moe/layer.py and get_pp_indices in vllm/distributed/utils.py.
    """
    ranks = [0] * pipeline_parallel
    owners = _owners(checkpoint.architecture.layers or 0, pipeline_parallel)
    plain = checkpoint.quantization.method is None
    bits = _ONLINE_BITS.get(quantization or "", (None, None)) if plain else (None, None)
    for name, tensor, count in _loaded(checkpoint):
        if expert_parallel and EXPERTS in name:
            size = _experts_share(checkpoint, name, tensor, expert_parallel, dtype_bytes)
        else:
            size = _share(checkpoint, name, tensor, tensor_parallel, dtype_bytes)
        own = bits[EXPERTS in name]
        if own and _is_linear_weight(name, tensor):
            size = int(size * own / (8 * dtype_bytes))
        for rank in _ranks_of(checkpoint, name, owners, pipeline_parallel):
            ranks[rank] += count * size
    return max(ranks)


def layers_of_ranks(layers: int, pipeline_parallel: int) -> list[int]:
    """How many layers each rank of a pipeline has.

    What is left over goes to the ranks before the last one, from behind.
    """
    each, left = divmod(layers, pipeline_parallel)
    counts = [each] * pipeline_parallel
    for number in range(left):
        counts[-(number + 2) % pipeline_parallel] += 1
    return counts


def _owners(layers: int, pipeline_parallel: int) -> list[int]:
    """The rank of each layer."""
    counts = layers_of_ranks(layers, pipeline_parallel)
    return [rank for rank, count in enumerate(counts) for _ in range(count)]


def _loaded(checkpoint: StoredCheckpoint) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors that vLLM loads, and how many there are of each.

    No layers for drafts, no second copy of a tied embedding.
    """
    layers = checkpoint.architecture.layers
    for name, count in checkpoint.alike.items():
        layer = LAYER.search(name)
        if layer and layers and is_language_model(name) and int(layer[1]) >= layers:
            continue
        if checkpoint.tied and _kind(name) == "lm_head":
            continue
        yield name, checkpoint.tensors[name], count


def _ranks_of(
    checkpoint: StoredCheckpoint, name: str, owners: list[int], pipeline_parallel: int
) -> set[int]:
    layer = LAYER.search(name)
    if layer and is_language_model(name) and int(layer[1]) < len(owners):
        return {owners[int(layer[1])]}
    kind = _kind(name)
    if kind == "embed_tokens" and _shares_embedding(checkpoint):
        return {0, pipeline_parallel - 1}
    return {pipeline_parallel - 1} if kind in _LAST else {0}


def _shares_embedding(checkpoint: StoredCheckpoint) -> bool:
    return checkpoint.tied or not any(_kind(name) == "lm_head" for name in checkpoint.tensors)


def _kind(name: str) -> str:
    """The module that decides how a tensor is divided: ``q_proj`` of ``...q_proj.weight_scale``."""
    parts = name.split(".")
    known = _COLUMNS | _ROWS | _EMBEDDINGS
    return next((part for part in reversed(parts) if part in known), (*parts, "")[-2])


def _is_linear_weight(name: str, tensor: Tensor) -> bool:
    plain = tensor.dtype in _FLOAT_BYTES and len(tensor.shape) >= 2
    return plain and (_kind(name) in _COLUMNS | _ROWS or EXPERTS in name)


def _share(checkpoint: StoredCheckpoint, name: str, tensor: Tensor, size: int, width: int) -> int:
    """Bytes of a tensor on each of ``size`` GPUs."""
    kind, shape = _kind(name), tensor.shape
    if EXPERTS in name:
        return -(-_bytes(name, tensor, shape, width) // size)
    if kind in _EMBEDDINGS and shape:
        rows = -(-shape[0] // _PADDING) * _PADDING
        return _bytes(name, tensor, (-(-rows // size), *shape[1:]), width)
    if kind in KEYS_AND_VALUES:
        size = min(size, _kv_heads(checkpoint, name) or size)
    if kind in _COLUMNS and shape:
        rows = max(len(shape) - 2, 0)
        cut = (*shape[:rows], -(-shape[rows] // size), *shape[rows + 1 :])
        absorbed = _absorbed(checkpoint, kind, cut, width) if len(shape) >= 2 else 0
        return _bytes(name, tensor, cut, width) + absorbed * name.endswith(".weight")
    if kind in _ROWS and len(shape) >= 2:
        return _bytes(name, tensor, (*shape[:-1], -(-shape[-1] // size)), width)
    return _bytes(name, tensor, shape, width)


def _experts_share(
    checkpoint: StoredCheckpoint, name: str, tensor: Tensor, size: int, width: int
) -> int:
    """A routed experts' tensor's part of the bytes on the one of ``size`` GPUs with most experts.

    Source: determine_expert_map in vllm/model_executor/layers/fused_moe/layer.py.
    """
    experts = checkpoint.architecture.experts or size
    return -(-_bytes(name, tensor, tensor.shape, width) * -(-experts // size) // experts)


def _bytes(name: str, tensor: Tensor, shape: tuple[int, ...], width: int) -> int:
    """Bytes of the part of a tensor that has ``shape``; of floats but scales ``width`` a number."""
    elements, whole = math.prod(shape), math.prod(tensor.shape)
    stored = _FLOAT_BYTES.get(tensor.dtype)
    if stored is not None:
        return elements * (stored if "scale" in name else width)
    return -(-(tensor.end - tensor.begin) * elements // whole) if whole else 0


def _absorbed(checkpoint: StoredCheckpoint, kind: str, shape: tuple[int, ...], width: int) -> int:
    """Latent attention keeps a second, plain copy of a quantized kv_b_proj.

    Source: process_weights_after_loading in vllm/model_executor/layers/attention/mla_attention.py.
    """
    wanted = kind == "kv_b_proj" and checkpoint.architecture.latent_dim
    return math.prod(shape) * width if wanted and checkpoint.quantization.method else 0


def _kv_heads(checkpoint: StoredCheckpoint, name: str) -> int | None:
    """Heads of keys and values of the layer that a tensor is of."""
    kind = _kind(name)
    weight = checkpoint.tensors.get(f"{name[: name.rindex(kind)]}{kind}.weight")
    rows = weight.shape[0] if weight and weight.shape else 0
    group = group_of_keys(checkpoint.architecture, rows)
    known = [g.kv_heads for g in checkpoint.architecture.groups if g.kv_heads]
    return group.kv_heads if group else min(known, default=None)

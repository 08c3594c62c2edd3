"""Which tensor-parallel sizes a checkpoint allows, from its config.json and its headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp8fleet.architecture import Architecture, LayerGroup
from fp8fleet.headers import Tensor
from fp8fleet.schemes import Quantization

LARGEST = 64
LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
"""Finds a layer's number in a tensor's name."""
EXPERTS = ".experts."
"""In the names of routed experts' tensors."""
_USUAL = (1, 2, 4, 8, 16)
_TOWERS = ("vision", "visual", "audio", "image", "multi_modal", "mm_")
"""In the names of modules that are not the language model."""

KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
COLUMNS = frozenset(
    {"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3"} | KEYS_AND_VALUES
)
"""Split by rows: every GPU has some outputs."""
HALVES = frozenset({"gate_up_proj"})
"""Two matrices one above the other, each split by rows."""
ROWS = frozenset({"o_proj", "down_proj", "w2"})
"""Split by columns: every GPU has some inputs."""
_ATTENTION = frozenset({"q_proj", "k_proj", "qkv_proj"})
_LAST_OF_FUSED = frozenset({"v_proj", "up_proj", "q_b_proj", "kv_b_proj"})
"""Need not end at a block's edge while nothing is split."""


@dataclass(frozen=True)
class TensorParallel:
    """Which sizes work."""

    sizes: tuple[int, ...]
    """Empty where the headers or config.json do not tell."""
    refused: Mapping[int, str]
    """Sizes that do not work, each with one reason."""


def is_language_model(name: str) -> bool:
    """Whether a tensor belongs to the language model, by its name."""
    return not any(part in name for part in _TOWERS)


def has_attention(tensors: Iterable[str]) -> bool:
    """Whether tensors of these names are the projections of attention."""
    return any(module_of(name).rpartition(".")[2] in _ATTENTION for name in tensors)


def module_of(tensor: str) -> str:
    """The module of a tensor: ``...q_proj.weight`` is of ``...q_proj``."""
    return tensor.removesuffix(".weight")


def tensor_parallel(
    architecture: Architecture,
    quantization: Quantization,
    tensors: Mapping[str, Tensor],
    asked: tuple[int, ...] = (),
    whole_experts: bool = False,
) -> TensorParallel:
    """Try the sizes that are usual or divide the heads, and those that are asked for.

    What vLLM asks for (0.32): query heads divisible (``Total number of attention heads`` in
    vllm/config/model.py); KV heads divisible, or fewer than GPUs and then replicated
    (QKVParallelLinear); every GPU's part of a block-quantized matrix made of whole blocks
    (validate_fp8_block_shape and validate_fp8_block_shape_moe in fp8_utils.py; since 0.13 fused
    layers of DeepSeek's layout may deviate, which is not counted on here).

    Args:
        asked: sizes to try beyond the usual ones.
        whole_experts: whether every GPU has whole experts (enable-expert-parallel), so that these
            are not cut.
    """
    heads = architecture.heads
    if not heads or not tensors:
        return TensorParallel((), {})
    cut = {n: t for n, t in tensors.items() if EXPERTS not in n} if whole_experts else tensors
    cuts = _cuts(architecture, quantization, cut)
    candidates = {n for n in range(1, LARGEST + 1) if heads % n == 0} | {*_USUAL, *asked}
    refused = {}
    for size in sorted(candidates):
        reason = _why_not_heads(architecture, size) or _why_not_cuts(cuts, size)
        if reason:
            refused[size] = reason
    return TensorParallel(tuple(sorted(candidates - set(refused))), refused)


def _why_not_heads(architecture: Architecture, size: int) -> str | None:
    if (architecture.heads or 0) % size:
        return f"{architecture.heads} query heads are not divisible by {size}"
    if architecture.latent_dim:
        return None
    for group in architecture.groups:
        heads = group.kv_heads
        if heads and heads % size and size % heads:
            return f"{heads} KV heads can neither be divided among nor repeated on {size} GPUs"
    return None


@dataclass(frozen=True)
class _Cut:
    """A dimension that is split, and where it may be."""

    length: int
    block: int
    kv_heads: int | None
    """Replicated beyond that many GPUs."""
    whole_fits: bool
    """Whether nothing is asked for while one GPU has all."""


def _cuts(
    architecture: Architecture, quantization: Quantization, tensors: Mapping[str, Tensor]
) -> dict[_Cut, str]:
    """The different cuts, each with the first tensor that has it: thousands share a few."""
    cuts: dict[_Cut, str] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) in (2, 3) and is_language_model(name):
            for cut in _cuts_of(name, tensor, architecture, quantization):
                cuts.setdefault(cut, name)
    return cuts


def _cuts_of(
    name: str, tensor: Tensor, architecture: Architecture, quantization: Quantization
) -> Iterator[_Cut]:
    module = module_of(name)
    kind = module.rpartition(".")[2]
    rows, columns = tensor.shape[-2:]
    scheme = quantization.scheme_of(module)
    quantized = scheme is not None and scheme.dtype == tensor.dtype
    block_rows, block_columns = (scheme.block if scheme and quantized else None) or (1, 1)
    if kind in COLUMNS:
        group = group_of_keys(architecture, rows) if kind in KEYS_AND_VALUES else None
        kv_heads = group.kv_heads if group else None
        yield _Cut(rows, block_rows, kv_heads, kind in _LAST_OF_FUSED)
    elif kind in HALVES:
        yield _Cut(rows // 2, block_rows, None, False)
    elif kind in ROWS:
        yield _Cut(columns, block_columns, None, True)


def group_of_keys(architecture: Architecture, rows: int) -> LayerGroup | None:
    """The layers whose keys have that many rows together."""
    for group in architecture.groups:
        if group.kv_heads and group.head_dim and group.kv_heads * group.head_dim == rows:
            return group
    return None


def _why_not_cuts(cuts: Mapping[_Cut, str], size: int) -> str | None:
    for cut, name in cuts.items():
        parts = min(size, cut.kv_heads) if cut.kv_heads else size
        if cut.length % parts:
            return f"{name}: {cut.length} cannot be divided by {parts}"
        part = cut.length // parts
        if part % cut.block and not (size == 1 and cut.whole_fits):
            return f"{name}: {part} of {cut.length} a GPU are no whole blocks of {cut.block}"
    return None

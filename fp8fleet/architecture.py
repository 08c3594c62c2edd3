"""What a config.json says of a model: its layers by type, heads, RoPE and context.

The keys are those of transformers' configuration classes, read as vLLM reads them
(vllm/transformers_utils/model_arch_config_convertor.py). Models of several modalities keep their
language model under ``text_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "gemma4_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
}
"""What a config.json may leave out, by model_type, because the class has it as its default.

Source: Gemma3TextConfig and Gemma4TextConfig of transformers 5. google/gemma-3-*-it leave out most.
"""

_PRESCALED_ROPE = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""RoPE types whose factor max_position_embeddings already holds.

Source: _get_and_verify_max_len in vllm/config/model.py (0.32).
"""

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Source: derive_max_model_len_and_key in model_arch_config_convertor.py (vLLM 0.32)."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike; each group asks for its own KV cache."""

    type: str
    """As ``layer_types`` of config.json: full_attention, sliding_attention, linear_attention..."""
    count: int
    kv_heads: int | None
    """None: the layers keep no keys and values, or config.json does not say."""
    head_dim: int | None
    window: int | None
    """Tokens that a sliding layer looks back; None: all."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """RoPE parameters in transformers' 5 spelling: rope_type, rope_theta, factor, ..."""


@dataclass(frozen=True)
class Architecture:
    """What config.json says; None where it does not."""

    name: str | None
    """First of ``architectures``."""
    model_type: str | None
    dtype: str | None
    """Of what is not quantized, bfloat16 for example."""
    layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    vocabulary: int | None
    heads: int | None
    """Query heads of a layer."""
    groups: tuple[LayerGroup, ...]
    kv_shared_layers: int
    """Last layers that use the keys and values of earlier ones."""
    latent_dim: int | None
    """Numbers a token and layer of multi-head latent attention (kv_lora_rank + qk_rope_head_dim,
    cached once for all heads); None for other attention."""
    experts: int | None
    context: int | None
    """Tokens."""


def text_config(config: Config) -> Config:
    """The language model's part of a config.json, with its class's defaults filled in."""
    part = config
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping):
            part = {**nested, "model_type": nested.get("model_type", config.get("model_type"))}
            break
    given = {key: value for key, value in part.items() if value is not None}
    return {**_DEFAULTS.get(str(part.get("model_type")), {}), **given}


def read_architecture(config: Config) -> Architecture:
    """Read a config.json. Keys that hold nonsense count as missing."""
    text = text_config(config)
    names = config.get("architectures") or text.get("architectures")
    latent = _sum(count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim"))
    groups = _groups(text)
    return Architecture(
        name=str(names[0]) if isinstance(names, list) and names else None,
        model_type=_text(config, "model_type"),
        dtype=_dtype(config, text),
        layers=count(text, "num_hidden_layers"),
        hidden_size=count(text, "hidden_size"),
        intermediate_size=count(text, "intermediate_size"),
        vocabulary=count(text, "vocab_size"),
        heads=count(text, "num_attention_heads"),
        groups=groups,
        kv_shared_layers=count(text, "num_kv_shared_layers") or 0,
        latent_dim=latent,
        experts=count(
            text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"
        ),
        context=_context(text, groups),
    )


def count(config: Config, *keys: str) -> int | None:
    """The first of ``keys`` that holds a number above zero."""
    for key in keys:
        value = config.get(key)
        if type(value) is int and value > 0:
            return value
    return None


def _text(config: Config, key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None else first + (second or 0)


def _dtype(config: Config, text: Config) -> str | None:
    for part in (config, text):
        value = _text(part, "dtype") or _text(part, "torch_dtype")
        if value:
            return value.removeprefix("torch.")
    return None


# --- layers -------------------------------------------------------------------------------------


def _groups(text: Config) -> tuple[LayerGroup, ...]:
    """The layers, those that are alike together, in the order in which they first appear."""
    ropes = _ropes(text)
    found: dict[tuple[Any, ...], int] = {}
    for number, kind in enumerate(_layer_types(text)):
        key = (kind, *_heads(text, number, kind))
        found[key] = found.get(key, 0) + 1
    return tuple(
        LayerGroup(kind, size, kv_heads, head_dim, window, ropes.get(kind, ropes.get("", {})))
        for (kind, kv_heads, head_dim, window), size in found.items()
    )


def _layer_types(text: Config) -> list[str]:
    layers = count(text, "num_hidden_layers") or 0
    named = text.get("layer_types")
    if isinstance(named, list) and len(named) == layers:
        return [str(kind) for kind in named]
    pattern = count(text, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern and count(text, "sliding_window"):
        return [FULL if (n + 1) % pattern == 0 else SLIDING for n in range(layers)]
    interval = count(text, "full_attention_interval")  # Qwen3-Next
    if interval:
        return [FULL if (n + 1) % interval == 0 else LINEAR for n in range(layers)]
    slides = count(text, "sliding_window") and text.get("use_sliding_window") is not False
    return [SLIDING if slides else FULL] * layers


def _heads(text: Config, number: int, kind: str) -> tuple[int | None, int | None, int | None]:
    """KV heads, head dimension and window of layer ``number``.

    Gemma 4's full layers have their own heads (Gemma4TextConfig of transformers 5):
    ``global_head_dim``, and ``num_global_key_value_heads`` where ``attention_k_eq_v`` is not false.
    Newer files spell such differences as ``per_layer_config``.
    """
    if kind not in (FULL, SLIDING, "chunked_attention"):
        return None, None, None
    own = _own_config(text, number)
    kv_heads = count(own, "num_key_value_heads", "num_kv_heads", "n_head_kv")
    kv_heads = kv_heads or count(text, "num_attention_heads")
    head_dim = _head_dim(own)
    if kind == FULL and own is text:
        head_dim = count(text, "global_head_dim") or head_dim
        if text.get("attention_k_eq_v") is not False:
            kv_heads = count(text, "num_global_key_value_heads") or kv_heads
    window = count(own, "sliding_window") if kind == SLIDING else None
    return kv_heads, head_dim, window


def _own_config(text: Config, number: int) -> Config:
    by_layer = text.get("per_layer_config")
    own = by_layer.get(str(number)) if isinstance(by_layer, Mapping) else None
    return {**text, **own} if isinstance(own, Mapping) else text


def _head_dim(text: Config) -> int | None:
    latent = count(text, "qk_nope_head_dim")
    if latent:
        return latent + (count(text, "qk_rope_head_dim") or 0)
    stated = count(text, "head_dim", "hidden_size_per_head")
    if stated:
        return stated
    hidden, heads = count(text, "hidden_size"), count(text, "num_attention_heads")
    return hidden // heads if hidden and heads else None


# --- RoPE and context ---------------------------------------------------------------------------


def _ropes(text: Config) -> dict[str, dict[str, Any]]:
    """RoPE parameters by layer type; under ``""`` those of all layers.

    Three spellings: ``rope_parameters`` of transformers 5, flat or by layer type; before,
    ``rope_theta`` with ``rope_scaling``; in Gemma 3 these two mean the full layers, the sliding
    ones have ``rope_local_base_freq``.
    """
    parameters = text.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        by_type = {k: _rope(v) for k, v in parameters.items() if isinstance(v, Mapping)}
        return by_type or {"": _rope({"rope_theta": text.get("rope_theta"), **parameters})}
    scaling = text.get("rope_scaling")
    rope = {"rope_theta": text.get("rope_theta")}
    if isinstance(scaling, Mapping):
        rope |= scaling
    if rope == {"rope_theta": None}:
        return {}
    ropes = {"": _rope(rope)}
    if "rope_local_base_freq" in text:
        ropes[SLIDING] = _rope({"rope_theta": text["rope_local_base_freq"]})
    return ropes


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """With ``rope_type`` first; older files call it ``type``."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    rest = {k: v for k, v in parameters.items() if k not in ("rope_type", "type") and v is not None}
    return {"rope_type": kind, **rest}


def _context(text: Config, groups: tuple[LayerGroup, ...]) -> int | None:
    """Tokens that a sequence may have, as vLLM 0.32 derives them without --max-model-len.

    Source: _get_and_verify_max_len in vllm/config/model.py; older releases apply YaRN's factor to
    ``original_max_position_embeddings`` instead, which is the same where the file is consistent.
    """
    lengths = [length for key in _CONTEXT_KEYS if (length := count(text, key))]
    if not lengths:
        return None
    factor = 1.0
    if "gemma3" not in str(text.get("model_type")):
        for group in groups:
            stretch = group.rope.get("factor")
            prescaled = group.rope.get("rope_type") in _PRESCALED_ROPE
            if isinstance(stretch, int | float) and not prescaled:
                factor = stretch
    return int(min(lengths) * factor)

"""What a config.json says of a model: its layers by type, heads, RoPE and context.

The keys are those of transformers' configuration classes, read as vLLM reads them
(vllm/transformers_utils/model_arch_config_convertor.py). Models of several modalities keep their
language model under ``text_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8fleet.config_json import Config, Contexts, Model, Problem, Rope, TextModel, plain, typed

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

_INDEX_DIM = 128
"""index_head_dim of DeepseekV32Config."""

_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where models of several modalities keep their language model."""


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
    kv_shared: int = 0
    """Of them those that use the keys and values of earlier layers."""


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
    index_dim: int | None
    """Numbers of a token's key in a layer's index, by which sparse attention chooses tokens
    (DeepSeek V3.2); None: there is none."""
    compressed: bool
    """Whether layers keep one state for several tokens (DeepSeek V4)."""
    experts: int | None
    context: int | None
    """Tokens."""


def text_config(config: Config) -> Config:
    """The language model's part of a config.json, with its class's defaults filled in."""
    part = config
    for key in _PARTS:
        nested = part.get(key)
        if isinstance(nested, Mapping):
            part = {**nested, "model_type": nested.get("model_type", config.get("model_type"))}
    # Null is a class's default, or its way to say none; but no class has null layers.
    given = {k: v for k, v in part.items() if v is not None or k == "num_hidden_layers"}
    return {**_DEFAULTS.get(str(part.get("model_type")), {}), **given}


def read_architecture(config: Config) -> Architecture:
    """Read a config.json. Values that `config_problems` tells count as missing."""
    model, part = typed(Model, config)[0], text_config(config)
    text = typed(TextModel, part)[0]
    names = model.architectures or typed(Model, part)[0].architectures
    groups = _groups(text, part)
    latent = text.kv_lora_rank and text.kv_lora_rank + (text.qk_rope_head_dim or 0)
    return Architecture(
        name=names[0] if names else None,
        model_type=model.model_type,
        dtype=_dtype(model, typed(Model, part)[0]),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        vocabulary=text.vocab_size,
        heads=text.num_attention_heads,
        groups=groups,
        kv_shared_layers=text.num_kv_shared_layers or 0,
        latent_dim=latent,
        index_dim=(text.index_head_dim or _INDEX_DIM) if text.index_topk else None,
        compressed=text.compress_ratios is not None,
        experts=text.experts,
        context=_context(text, part, groups),
    )


def config_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Values of a config.json that cannot mean anything.

    Returns:
        Those with which no engine starts or answers rightly, and those about the context only,
        which the option max-model-len sets too.
    """
    part = text_config(config)
    text, problems = typed(TextModel, part)
    problems = typed(Model, config)[1] + problems
    for number in range(text.num_hidden_layers or 0):
        own = _own_config(text, part, number)
        if own is not part:
            problems += typed(TextModel, own)[1]
    shared, layers = text.num_kv_shared_layers, text.num_hidden_layers
    if shared and layers and shared >= layers:
        problems.append(Problem("num_kv_shared_layers", shared_layers_problem(shared, layers)))
    for parameters in _rope_parts(part).values():
        for problem in typed(Rope, _rope(parameters))[1]:
            problems.append(Problem(problem.key, f"RoPE's {problem.message}"))
    return list(dict.fromkeys(problems)), typed(Contexts, part)[1]


def shared_layers_problem(shared: int, layers: int) -> str:
    """Why that many layers cannot use the keys and values of earlier ones."""
    return f"num_kv_shared_layers is {shared}, expected fewer than the model's {layers} layers"


def _dtype(*parts: Model) -> str | None:
    for part in parts:
        value = part.dtype or part.torch_dtype
        if value:
            return value.removeprefix("torch.")
    return None


# --- layers -------------------------------------------------------------------------------------


def _groups(text: TextModel, part: Config) -> tuple[LayerGroup, ...]:
    """The layers, those that are alike together, in the order in which they first appear."""
    ropes = {kind: _known_rope(given) for kind, given in _rope_parts(part).items()}
    own = (text.num_hidden_layers or 0) - (text.num_kv_shared_layers or 0)
    found: dict[tuple[Any, ...], list[bool]] = {}
    for number, kind in enumerate(_layer_types(text)):
        key = (kind, *_heads(text, part, number, kind))
        found.setdefault(key, []).append(number >= own)
    return tuple(
        LayerGroup(
            kind,
            len(shared),
            kv_heads,
            head_dim,
            window,
            ropes.get(kind, ropes.get("", {})),
            sum(shared),
        )
        for (kind, kv_heads, head_dim, window), shared in found.items()
    )


def _layer_types(text: TextModel) -> list[str]:
    layers = text.num_hidden_layers or 0
    if text.layer_types is not None and len(text.layer_types) == layers:
        return text.layer_types
    pattern = text.sliding_window_pattern
    if pattern and text.sliding_window:
        return [FULL if (n + 1) % pattern == 0 else SLIDING for n in range(layers)]
    interval = text.full_attention_interval  # Qwen3-Next
    if interval:
        return [FULL if (n + 1) % interval == 0 else LINEAR for n in range(layers)]
    slides = text.sliding_window and text.use_sliding_window
    return [SLIDING if slides else FULL] * layers


def _heads(
    text: TextModel, part: Config, number: int, kind: str
) -> tuple[int | None, int | None, int | None]:
    """KV heads, head dimension and window of layer ``number``.

    Gemma 4's full layers have their own heads (Gemma4TextConfig of transformers 5):
    ``global_head_dim``, and ``num_global_key_value_heads`` where ``attention_k_eq_v`` is not false.
    Newer files spell such differences as ``per_layer_config``.
    """
    if kind not in (FULL, SLIDING, "chunked_attention"):
        return None, None, None
    own_part = _own_config(text, part, number)
    own = text if own_part is part else typed(TextModel, own_part)[0]
    kv_heads = own.num_key_value_heads or text.num_attention_heads
    head_dim = _head_dim(own)
    if kind == FULL and own is text:
        head_dim = text.global_head_dim or head_dim
        if text.attention_k_eq_v:
            kv_heads = text.num_global_key_value_heads or kv_heads
    return kv_heads, head_dim, own.sliding_window if kind == SLIDING else None


def _own_config(text: TextModel, part: Config, number: int) -> Config:
    """``part`` itself, or as layer ``number`` has it."""
    own = text.per_layer_config.get(str(number))
    return {**part, **own} if isinstance(own, Mapping) else part


def _head_dim(text: TextModel) -> int | None:
    if text.qk_nope_head_dim:
        return text.qk_nope_head_dim + (text.qk_rope_head_dim or 0)
    if text.head_dim:
        return text.head_dim
    hidden, heads = text.hidden_size, text.num_attention_heads
    return hidden // heads if hidden and heads else None


# --- RoPE and context ---------------------------------------------------------------------------


def _rope_parts(part: Config) -> dict[str, Config]:
    """RoPE parameters as they stand there, by layer type; under ``""`` those of all layers.

    Three spellings: ``rope_parameters`` of transformers 5, flat or by layer type; before,
    ``rope_theta`` with ``rope_scaling``; in Gemma 3 these two mean the full layers, the sliding
    ones have ``rope_local_base_freq``.
    """
    parameters = part.get("rope_parameters")
    if isinstance(parameters, Mapping) and parameters:
        own = Rope.model_fields.keys()
        by_type = {k: v for k, v in parameters.items() if isinstance(v, Mapping) and k not in own}
        return by_type or {"": {"rope_theta": part.get("rope_theta"), **parameters}}
    scaling = part.get("rope_scaling")
    rope = {"rope_theta": part.get("rope_theta")}
    if isinstance(scaling, Mapping):
        rope |= scaling
    if rope == {"rope_theta": None}:
        return {}
    ropes: dict[str, Config] = {"": rope}
    if "rope_local_base_freq" in part:
        ropes[SLIDING] = {"rope_theta": part["rope_local_base_freq"]}
    return ropes


def _rope(parameters: Config) -> dict[str, Any]:
    """With ``rope_type`` first; older files call it ``type``."""
    given = {key: value for key, value in parameters.items() if value is not None}
    older = given.pop("type", "default")
    return {"rope_type": given.pop("rope_type", older), **given}


def _known_rope(parameters: Config) -> dict[str, Any]:
    """What of the parameters means something."""
    rope = _rope(parameters)
    wrong = {problem.key for problem in typed(Rope, rope)[1]}
    return {key: value for key, value in rope.items() if key not in wrong and plain(value)}


def _context(text: TextModel, part: Config, groups: tuple[LayerGroup, ...]) -> int | None:
    """Tokens that a sequence may have, as vLLM 0.32 derives them without --max-model-len.

    Source: _get_and_verify_max_len in vllm/config/model.py; older releases apply YaRN's factor to
    ``original_max_position_embeddings`` instead, which is the same where the file is consistent.
    """
    lengths = [length for _, length in typed(Contexts, part)[0] if length]
    if not lengths:
        return None
    factor = 1.0
    if "gemma3" not in (text.model_type or ""):
        for group in groups:
            if "factor" in group.rope and group.rope.get("rope_type") not in _PRESCALED_ROPE:
                factor = group.rope["factor"]
    return int(min(lengths) * factor)


def longest_context(config: Config) -> int | None:
    """Tokens above which no release takes ``--max-model-len`` for a model; None: not told.

    More than its context where config.json has a larger ``model_max_length``, or where an older
    release would apply YaRN's factor to ``original_max_position_embeddings``.
    """
    architecture = read_architecture(config)
    if architecture.context is None:
        return None
    lengths = [architecture.context, typed(Contexts, config)[0].model_max_length or 0]
    for group in architecture.groups:
        rope = group.rope
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if "yarn" in str(rope.get("rope_type")) and type(original) is int and factor:
            lengths.append(int(min(original, 1 << 40) * factor))
    return max(lengths)

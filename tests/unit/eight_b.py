"""An 8B Llama and other large models, as config.json and headers alone: no weight is made."""

from __future__ import annotations

from typing import Any

from checkpoints import QUANTIZATIONS, Spec, entries_of, linear

from fp8fleet.headers import Header, header_of_entries
from fp8fleet.stored import StoredCheckpoint, stored_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
"""The shapes of Llama 3.1 8B, which were measured."""


def config(layout: str = "none", **changes: Any) -> dict[str, Any]:
    """The config.json; ``layout``: of the quantization, as tests/unit/checkpoints.py names it."""
    made = {**CONFIG, **changes}
    found = QUANTIZATIONS[layout]
    return made if found is None else {**made, "quantization_config": found}


def tensors(layout: str = "none", **changes: Any) -> dict[str, Spec]:
    """All tensors of the model that `config` describes."""
    values = {**CONFIG, **changes}
    hidden, inner, dim = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    queries, keys = values["num_attention_heads"] * dim, values["num_key_value_heads"] * dim
    vocabulary: Spec = ("BF16", (values["vocab_size"], hidden))
    made: dict[str, Spec] = {"model.embed_tokens.weight": vocabulary}
    for number in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            made |= linear(f"{prefix}.{name}", rows, columns, layout)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}.{name}.weight"] = ("BF16", (hidden,))
    return made | {"model.norm.weight": ("BF16", (hidden,)), "lm_head.weight": vocabulary}


def header(specs: dict[str, Spec]) -> Header:
    """A header with these tensors."""
    return header_of_entries(entries_of(specs), "model.safetensors")


def checkpoint(layout: str = "none", **changes: Any) -> StoredCheckpoint:
    """The model as models/<name>/ would know it."""
    return of(config(layout, **changes), tensors(layout, **changes))


def of(values: dict[str, Any], specs: dict[str, Spec]) -> StoredCheckpoint:
    """A checkpoint of a config.json and of tensors."""
    return stored_checkpoint(values, {"model.safetensors": header(specs)})

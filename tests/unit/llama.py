"""Stored checkpoints of Llama-like models of any size: headers without weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8fleet.headers import Header, Tensor
from fp8fleet.stored import StoredCheckpoint, stored_checkpoint

BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def config(layers: int = 32, hidden: int = 4096, **changes: Any) -> dict[str, Any]:
    """A config.json; by default of the 8B that was measured on an H200, with a longer context."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": hidden * 7 // 2,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **changes,
    }


def headers(config: dict[str, Any], fp8: bool = True) -> dict[str, Header]:
    """The header of its one shard; with ``fp8`` in blocks of 128, as llm-compressor writes it."""
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, dtype, shape in _tensors(config, fp8):
        begin, end = end, end + shape[0] * shape[1] * BYTES[dtype]
        tensors[name] = Tensor(dtype, shape, begin, end)
    return {"model.safetensors": Header(tensors, None)}


def _tensors(config: dict[str, Any], fp8: bool) -> Iterator[tuple[str, str, tuple[int, int]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    vocabulary = (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", "BF16", vocabulary
    for layer in range(config["num_hidden_layers"]):
        for module, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            name = f"model.layers.{layer}.{module}"
            yield f"{name}.weight", "F8_E4M3" if fp8 else "BF16", shape
            if fp8:
                yield f"{name}.weight_scale", "F32", (shape[0] // 128, shape[1] // 128)
    yield "lm_head.weight", "BF16", vocabulary


def checkpoint(fp8: bool = True, **changes: Any) -> StoredCheckpoint:
    """The stored checkpoint of such a model."""
    whole = config(**changes)
    if fp8:
        whole["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "block",
                        "block_structure": [128, 128],
                    },
                }
            },
        }
    return stored_checkpoint(whole, headers(whole, fp8))

"""Tiny real checkpoints: safetensors files with headers, data and index, made of bytes alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Spec = tuple[str, tuple[int, ...]]
"""dtype and shape"""

BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 256, 512, 4, 2, 64, 2, 384

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def _group(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if weights["type"] == "float" else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}

QUANTIZATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    # llm-compressor's FP8_BLOCK, as RedHatAI publishes
    "ct-block": _group(
        {**_FLOAT, "strategy": "block", "block_structure": [128, 128]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    # config.json of deepseek-ai/DeepSeek-V3
    "deepseek": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    # llm-compressor's FP8_DYNAMIC and FP8
    "ct-channel": _group({**_FLOAT, "strategy": "channel"}, _TOKEN),
    "ct-tensor-static": _group(
        {**_FLOAT, "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    ),
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    # quantized.w8a8
    "int8": _group({**_INT, "strategy": "channel"}, {**_TOKEN, "type": "int"}),
}
"""``quantization_config`` by the name of a layout."""


def scale_of(layout: str, rows: int, columns: int, block: int = 128) -> tuple[str, Spec] | None:
    """Ending of the scale's name, and its dtype and shape, for a weight of that layout."""
    grid = (-(-rows // block), -(-columns // block))
    return {
        "none": None,
        "ct-block": ("_scale", ("BF16", grid)),
        "deepseek": ("_scale_inv", ("F32", grid)),
        "ct-channel": ("_scale", ("BF16", (rows, 1))),
        "ct-tensor-static": ("_scale", ("BF16", (1,))),
        "fp8-tensor": ("_scale", ("F32", ())),
        "int8": ("_scale", ("BF16", (rows, 1))),
    }[layout]


def linear(name: str, rows: int, columns: int, layout: str, block: int = 128) -> dict[str, Spec]:
    """A weight with all that its layout adds."""
    scale = scale_of(layout, rows, columns, block)
    if scale is None:
        return {f"{name}.weight": ("BF16", (rows, columns))}
    ending, spec = scale
    dtype = "I8" if layout == "int8" else "F8_E4M3"
    made = {f"{name}.weight": (dtype, (rows, columns)), f"{name}.weight{ending}": spec}
    if layout == "ct-tensor-static":
        made[f"{name}.input_scale"] = ("BF16", (1,))
    return made


def llama_tensors(layout: str, block: int = 128) -> dict[str, Spec]:
    """All tensors of a small Llama."""
    made: dict[str, Spec] = {"model.embed_tokens.weight": ("BF16", (VOCABULARY, HIDDEN))}
    for number in range(LAYERS):
        prefix = f"model.layers.{number}"
        made[f"{prefix}.input_layernorm.weight"] = ("BF16", (HIDDEN,))
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", FFN, HIDDEN),
            ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):
            made |= linear(f"{prefix}.{name}", rows, columns, layout, block)
    return made | {"lm_head.weight": ("BF16", (VOCABULARY, HIDDEN))}


def entries_of(tensors: Mapping[str, Spec]) -> dict[str, Any]:
    """The header's JSON of tensors that lie one behind the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def shard_bytes(entries: Mapping[str, Any], data: int | None = None) -> bytes:
    """A safetensors file: length of the header, header padded to 8 bytes, data.

    Args:
        data: bytes of data; None: as many as the offsets ask for.
    """
    ends = [e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    size = max(ends, default=0) if data is None else data
    return len(text).to_bytes(8, "little") + text + bytes(size)


class Model:
    """A model directory that tests write, break and inspect."""

    def __init__(self, directory: Path, layout: str = "ct-block", block: int = 128) -> None:
        self.directory = directory
        self.config: dict[str, Any] = dict(LLAMA)
        quantization = QUANTIZATIONS[layout]
        if quantization is not None:
            self.config["quantization_config"] = json.loads(json.dumps(quantization))
        self.tensors = llama_tensors(layout, block)
        self.indexed = True

    @property
    def quantization(self) -> dict[str, Any]:
        """The configuration's part, to be changed before `write`."""
        part: dict[str, Any] = self.config["quantization_config"]
        return part

    @property
    def index(self) -> Path:
        """The index."""
        return self.directory / "model.safetensors.index.json"

    def shard(self, number: int) -> Path:
        """One of the two shards, from 1: the first has the embedding and layer 0."""
        return self.directory / f"model-{number:05}-of-00002.safetensors"

    def parts(self) -> list[dict[str, Spec]]:
        """The tensors of the two shards."""
        second = {n: s for n, s in self.tensors.items() if "layers.1." in n or n[:3] == "lm_"}
        first = {n: s for n, s in self.tensors.items() if n not in second}
        return [first, second]

    def write(self) -> Path:
        """Write config.json, two shards and, if `indexed`, the index; returns the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.config))
        weight_map: dict[str, str] = {}
        for number, part in enumerate(self.parts(), 1):
            self.shard(number).write_bytes(shard_bytes(entries_of(part)))
            weight_map |= dict.fromkeys(part, self.shard(number).name)
        if self.indexed:
            self.index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return self.directory

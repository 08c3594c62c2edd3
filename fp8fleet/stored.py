"""A checkpoint as models/<name>/ knows it without its files: config.json and stored headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8fleet.architecture import Architecture, read_architecture, text_config
from fp8fleet.headers import Header, Tensor
from fp8fleet.schemes import Quantization, read_quantization
from fp8fleet.tensor_parallel import module_of


@dataclass(frozen=True)
class StoredCheckpoint:
    """What the size of a checkpoint in memory depends on."""

    architecture: Architecture
    quantization: Quantization
    tensors: Mapping[str, Tensor]
    """Of all shards, by name."""
    tied: bool
    """Whether the output layer is the embedding, stored once."""


def stored_checkpoint(config: Mapping[str, Any], headers: Mapping[str, Header]) -> StoredCheckpoint:
    """Make one of a config.json and of the headers of its shards, by path."""
    tensors = {name: t for header in headers.values() for name, t in header.tensors.items()}
    return StoredCheckpoint(
        architecture=read_architecture(config),
        quantization=read_quantization(config, {module_of(name) for name in tensors}),
        tensors=tensors,
        tied=text_config(config).get("tie_word_embeddings") is True,
    )

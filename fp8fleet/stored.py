"""A checkpoint as models/<name>/ knows it without its files: config.json and stored headers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8fleet.architecture import Architecture, read_architecture, text_config
from fp8fleet.errors import OperatorError
from fp8fleet.headers import Header, Tensor
from fp8fleet.jsonfile import JsonError, parse_python_json, read_regular
from fp8fleet.schemes import Quantization, read_quantization
from fp8fleet.tensor_parallel import module_of

_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


# Compared by identity, so that what is computed of one can be kept.
@dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """What the size of a checkpoint in memory depends on."""

    architecture: Architecture
    quantization: Quantization
    tensors: Mapping[str, Tensor]
    """Of all shards, by name."""
    tied: bool
    """Whether the output layer is the embedding, stored once."""

    @functools.cached_property
    def alike(self) -> Mapping[str, int]:
        """The tensors without those that differ in the expert's number alone, with their count.

        A model of 90,000 tensors has some 2,000 of them.
        """
        counts: dict[tuple[str, str, tuple[int, ...]], tuple[str, int]] = {}
        for name, tensor in self.tensors.items():
            key = (_EXPERT.sub(".experts.", name), tensor.dtype, tensor.shape)
            first, count = counts.get(key, (name, 0))
            counts[key] = first, count + 1
        return dict(counts.values())

    @property
    def different_tensors(self) -> Mapping[str, Tensor]:
        """The tensors, of experts that are alike those of the first."""
        return {name: self.tensors[name] for name in self.alike}


def stored_checkpoint(config: Mapping[str, Any], headers: Mapping[str, Header]) -> StoredCheckpoint:
    """Make one of a config.json and of the headers of its shards, by path."""
    tensors = {name: t for header in headers.values() for name, t in header.tensors.items()}
    return StoredCheckpoint(
        architecture=read_architecture(config),
        quantization=read_quantization(config, {module_of(name) for name in tensors}),
        tensors=tensors,
        tied=text_config(config).get("tie_word_embeddings") is True,
    )


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Read a config.json of models/, as Python and so the engine reads JSON.

    Returns:
        None: there is none.

    Raises:
        OperatorError: it cannot be read, or is no JSON object.
    """
    try:
        config, _ = parse_python_json(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise OperatorError(f"{path}: is not JSON: {error}: create the manifest anew") from None
    if not isinstance(config, dict):
        raise OperatorError(f"{path}: is not a JSON object: create the manifest anew")
    return config

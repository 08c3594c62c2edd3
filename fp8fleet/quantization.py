"""The name of a checkpoint's quantization, read out of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8fleet.config_json import CompressedTensors, ConfigGroup, typed

NONE = "none"
UNKNOWN = "unknown"
COMPRESSED_TENSORS = "compressed-tensors"
_TYPES = {"float": "fp", "int": "int"}


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization part of a config.json, where vLLM looks for it.

    It stands at the top, or under ``text_config`` in models of several modalities; checkpoints of
    the first compressed-tensors releases call it ``compression_config``.

    Returns:
        The part as it stands in the file; None: the checkpoint is not quantized.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            for key in ("quantization_config", "compression_config"):
                found = part.get(key)
                if isinstance(found, Mapping) and found:
                    return found
    return None


def quantization_name(config: Mapping[str, Any]) -> str:
    """Name the quantization of a checkpoint.

    Args:
        config: its config.json.

    Returns:
        ``none``; ``fp8-block`` (DeepSeek's layout: ``quant_method`` fp8 with
        ``weight_block_size``) or ``fp8`` (per tensor); ``compressed-tensors-TYPE-STRATEGY`` such as
        ``compressed-tensors-fp8-block`` (the layout of llm-compressor's FP8_BLOCK) or
        ``compressed-tensors-int8-channel``; ``compressed-tensors-mixed`` for groups that differ;
        ``modelopt-ALGORITHM``; for any other method, the method's own name; ``unknown``.
    """
    found = quantization_config(config)
    if found is None:
        return NONE
    method = quantization_method(found)
    if method is None:
        return UNKNOWN
    if method == "fp8":
        return "fp8-block" if found.get("weight_block_size") else "fp8"
    if method == COMPRESSED_TENSORS:
        return f"{COMPRESSED_TENSORS}-{_groups_name(found)}"
    algorithm = found.get("quant_algo")
    if method == "modelopt" and isinstance(algorithm, str) and algorithm:
        return f"{method}-{algorithm.lower()}"
    return method


def quantization_method(found: Mapping[str, Any]) -> str | None:
    """The ``quant_method`` of a quantization part, in lower case as vLLM compares it.

    Files of the first compressed-tensors releases do not name it.

    Returns:
        None: what stands there is no name.
    """
    method = found.get("quant_method", COMPRESSED_TENSORS)
    if not isinstance(method, str) or not method:
        return None
    return method.lower().replace("compressed_tensors", COMPRESSED_TENSORS)


def _groups_name(found: Mapping[str, Any]) -> str:
    """``TYPE-STRATEGY`` of the weights of all groups, as compressed-tensors describes them."""
    groups = typed(CompressedTensors, found)[0].config_groups
    names = {_group_name(group) for group in groups.values()}
    if len(names) > 1:
        return "mixed"
    return names.pop() if names else UNKNOWN


def _group_name(group: ConfigGroup) -> str:
    weights = group.weights
    if weights is None:
        return UNKNOWN
    return f"{_TYPES[weights.type]}{weights.num_bits}-{weights.strategy or 'tensor'}"

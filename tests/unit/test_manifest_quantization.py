"""The names of quantizations, out of config.json as publishers write it."""

from __future__ import annotations

from typing import Any

import pytest
from hub import COMPRESSED

from fp8fleet.quantization import quantization_config, quantization_name


def compressed(*weights: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{at}": {"weights": each} for at, each in enumerate(weights)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


def named(method: str, **rest: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **rest}}


FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "none"),
        ({"quantization_config": None}, "none"),
        ({"quantization_config": {}}, "none"),
        ({"quantization_config": DEEPSEEK}, "fp8-block"),
        (named("fp8", activation_scheme="static"), "fp8"),
        (named("fp8", block_size=128), "fp8"),
        ({"quantization_config": COMPRESSED}, "compressed-tensors-fp8-block"),
        ({"compression_config": COMPRESSED}, "compressed-tensors-fp8-block"),
        ({"text_config": {"quantization_config": COMPRESSED}}, "compressed-tensors-fp8-block"),
        (compressed(FP8_CHANNEL), "compressed-tensors-fp8-channel"),
        (compressed({"num_bits": 8, "type": "float"}), "compressed-tensors-fp8-tensor"),
        (compressed(INT8_CHANNEL), "compressed-tensors-int8-channel"),
        (compressed(INT8_CHANNEL, INT8_CHANNEL), "compressed-tensors-int8-channel"),
        (compressed(INT8_CHANNEL, FP8_CHANNEL), "compressed-tensors-mixed"),
        (compressed(), "compressed-tensors-unknown"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "compressed-tensors-unknown",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            "modelopt-fp8",
        ),
        (named("AWQ", bits=4), "awq"),
    ],
)
def test_a_quantization_has_one_name(config: dict[str, Any], name: str) -> None:
    assert quantization_name(config) == name


def test_the_part_of_config_json_is_found_where_vllm_looks_for_it() -> None:
    assert quantization_config({"text_config": {"quantization_config": DEEPSEEK}}) == DEEPSEEK
    assert quantization_config({"text_config": None}) is None

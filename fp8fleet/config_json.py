"""Types what a config.json holds, once: all that reads one gets values that mean something.

What stands there is read as the engine reads it (transformers' configuration classes, vLLM's and
compressed-tensors' quantization arguments). A value that cannot mean anything is left out and told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import ErrorDetails

from fp8fleet.jsonfile import shown

Config = Mapping[str, Any]

MAX_LAYERS = 10_000
_MAX_SIZE = 2**31 - 1
_MAX_TOKENS = 2**63 - 1
"""Some files say "no limit" with a number of that order."""
_MAX_FACTOR = 1e6


@dataclass(frozen=True)
class Problem:
    """A value that cannot mean anything."""

    key: str
    message: str
    """Names the key, the value and what is expected."""


class _Part(BaseModel):
    """Keys that are not read here are of no concern."""

    model_config = ConfigDict(frozen=True, extra="ignore")


_P = TypeVar("_P", bound=_Part)


def typed(kind: type[_P], part: Config) -> tuple[_P, list[Problem]]:
    """Type a part of a config.json.

    Returns:
        The part without the keys that cannot mean anything, and what is wrong with these.
    """
    try:
        return kind.model_validate(part), []
    except ValidationError as error:
        # One a key: of a union every member complains.
        details = {str(detail["loc"][0]): detail for detail in error.errors(include_url=False)}
    problems = [Problem(key, _message(detail)) for key, detail in details.items()]
    # The same may stand there in another spelling, and be wrong too.
    rest, more = typed(kind, {key: part[key] for key in part.keys() - details.keys()})
    return rest, problems + more


def _message(detail: ErrorDetails) -> str:
    where = ".".join(str(place) for place in detail["loc"] if not str(place).endswith("]"))
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{where} is {shown(detail['input'])}, {re.sub(' or instance of .*', '', message)}"


# --- architecture -------------------------------------------------------------------------------


def _stated(value: int | None) -> int:
    if value is None:
        raise ValueError("expected a number")
    return value


def _count_or_none(value: Any) -> int | None:
    """0, -1, texts and lists are spellings of classes: of "none", or of a value for each layer."""
    return value if type(value) is int and value > 0 else None


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts_or_none(value: Any) -> list[str] | None:
    texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return value if texts else None


def _table_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _no_container(value: Any) -> Any:
    """A value for each layer, or for each type of layers, is not read here."""
    return None if isinstance(value, list | dict) else value


def _not_false(value: Any) -> bool:
    return value is not False


_Size = Annotated[int, Field(strict=True, ge=1, le=_MAX_SIZE)]
_Layers = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)] | None, AfterValidator(_stated)
]
_OptionalSize = Annotated[
    Annotated[int, Field(le=_MAX_SIZE)] | None, BeforeValidator(_count_or_none)
]
_Tokens = Annotated[Annotated[int, Field(le=_MAX_TOKENS)] | None, BeforeValidator(_count_or_none)]
_OptionalText = Annotated[str | None, BeforeValidator(_text_or_none)]
_UnlessFalse = Annotated[bool, BeforeValidator(_not_false)]


def _any_of(*keys: str) -> Any:
    return Field(default=None, validation_alias=AliasChoices(*keys))


class Model(_Part):
    """The top of a config.json."""

    architectures: list[Annotated[str, Field(strict=True)]] | None = None
    model_type: _OptionalText = None
    dtype: _OptionalText = None
    torch_dtype: _OptionalText = None


class TextModel(_Part):
    """The language model's part; None where the file does not say."""

    model_type: _OptionalText = None
    num_hidden_layers: _Layers = _any_of("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden_size: _Size | None = None
    vocab_size: _Size | None = None
    intermediate_size: _OptionalSize = None
    num_attention_heads: _OptionalSize = _any_of("num_attention_heads", "n_head", "n_heads")
    num_key_value_heads: _OptionalSize = _any_of("num_key_value_heads", "num_kv_heads", "n_head_kv")
    num_global_key_value_heads: _OptionalSize = None
    head_dim: _OptionalSize = _any_of("head_dim", "hidden_size_per_head")
    global_head_dim: _OptionalSize = None
    attention_k_eq_v: _UnlessFalse = True
    layer_types: Annotated[list[str] | None, BeforeValidator(_texts_or_none)] = None
    sliding_window: _Tokens = None
    use_sliding_window: _UnlessFalse = True
    sliding_window_pattern: _OptionalSize = _any_of(
        "sliding_window_pattern", "_sliding_window_pattern"
    )
    full_attention_interval: _OptionalSize = None
    num_kv_shared_layers: _OptionalSize = None
    kv_lora_rank: _OptionalSize = None
    qk_rope_head_dim: _OptionalSize = None
    qk_nope_head_dim: _OptionalSize = None
    index_topk: _OptionalSize = None
    index_head_dim: _OptionalSize = None
    compress_ratios: Any = None
    experts: _OptionalSize = _any_of(
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"
    )
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    per_layer_config: Annotated[dict[str, Any], BeforeValidator(_table_or_empty)] = Field(
        default_factory=dict
    )


class Contexts(_Part):
    """The keys that tell how long a sequence may be.

    Source: derive_max_model_len_and_key in model_arch_config_convertor.py (vLLM 0.32).
    """

    max_position_embeddings: _Tokens = None
    n_positions: _Tokens = None
    max_seq_len: _Tokens = None
    seq_length: _Tokens = None
    model_max_length: _Tokens = None
    max_target_positions: _Tokens = None
    max_sequence_length: _Tokens = None
    max_seq_length: _Tokens = None
    seq_len: _Tokens = None


_Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Rope(_Part):
    """What of RoPE's parameters is computed with; see `plain` for the rest."""

    rope_type: Annotated[str, Field(strict=True)] = "default"
    rope_theta: Annotated[_Positive | None, BeforeValidator(_no_container)] = None
    factor: Annotated[_Positive, Field(le=_MAX_FACTOR)] | None = None


def plain(value: Any) -> bool:
    """Whether a value is a text, a finite number or a list of these: what JSON can show again."""
    if isinstance(value, list):
        return all(not isinstance(one, list) and plain(one) for one in value)
    return isinstance(value, bool | int | str) or (
        isinstance(value, float) and math.isfinite(value)
    )


# --- quantization -------------------------------------------------------------------------------


def _pair(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if bool not in (type(rows), type(columns)):
            if 0 < rows <= _MAX_SIZE and 0 < columns <= _MAX_SIZE:
                return rows, columns
    raise ValueError("expected two numbers such as [128, 128]")


def _pair_of_text(value: Any) -> Any:
    """``"128x128"``, as early compressed-tensors releases write it."""
    if isinstance(value, str):
        return [int(part) for part in value[:40].split("x") if part.isdecimal()]
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_Block = Annotated[tuple[int, int], BeforeValidator(_pair)]
_Names = list[Annotated[str, Field(strict=True)]]


class Fp8(_Part):
    """``quant_method`` fp8, and others that list what is not quantized in the same way."""

    activation_scheme: Literal["static", "dynamic"] | None = None
    weight_block_size: _Block | None = None
    ignored_layers: _Names | None = None
    modules_to_not_convert: _Names | None = None


class WeightArguments(_Part):
    """How weights are quantized, read as leniently as compressed-tensors does.

    Source: QuantizationArgs in compressed_tensors/quantization/quant_args.py.
    """

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Annotated[Literal["int", "float"], BeforeValidator(_lower)] = "int"
    strategy: Annotated[
        Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"] | None,
        BeforeValidator(_lower),
    ] = None
    group_size: Annotated[int, Field(ge=-1, le=_MAX_SIZE)] | None = None
    block_structure: Annotated[_Block | None, BeforeValidator(_pair_of_text)] = None


class InputArguments(_Part):
    """How activations are quantized."""

    dynamic: bool | Literal["local"] | None = None


class ConfigGroup(_Part):
    """Modules that are quantized alike."""

    targets: _Names | None = None
    weights: WeightArguments | None = None
    """None: only activations or the KV cache are."""
    input_activations: InputArguments | None = None
    format: Any = None


class CompressedTensors(_Part):
    """``quant_method`` compressed-tensors."""

    config_groups: dict[str, ConfigGroup] = Field(default_factory=dict)
    ignore: _Names | None = None

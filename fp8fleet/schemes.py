"""How config.json says that weights are quantized, and the scales that it asks for.

The layouts, as vLLM 0.32 reads them (vllm/model_executor/layers/quantization/):

- ``compressed-tensors`` (llm-compressor; RedHatAI's FP8_BLOCK, FP8_DYNAMIC, quantized.w8a8 models):
  ``config_groups`` with ``targets``, ``weights {num_bits, type, strategy, block_structure}`` and
  ``input_activations``; ``ignore``; tensors X.weight and X.weight_scale (BF16 or F32).
- ``fp8`` with ``weight_block_size`` (DeepSeek-V3's config.json, Qwen3-*-FP8): tensors X.weight and
  X.weight_scale_inv (F32; F8_E8M0 with ``scale_fmt`` ue8m0); ``activation_scheme`` dynamic.
- ``fp8`` without it: one X.weight_scale a tensor, X.input_scale too where ``activation_scheme``
  is static; ``modules_to_not_convert`` or ``ignored_layers``.
- ``fbgemm_fp8``: one X.weight_scale a row, dynamic activations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8fleet.quantization import COMPRESSED_TENSORS, quantization_config

Strategy = Literal["block", "tensor", "channel"]

SCALE = "_scale"
SCALE_INV = "_scale_inv"
SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
_FROM_PUBLISHER = "take config.json from the checkpoint's publisher"


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are quantized."""

    dtype: str
    """Of the weights, in safetensors' spelling: F8_E4M3 or I8."""
    strategy: Strategy
    block: tuple[int, int] | None
    """Rows and columns that share a scale, for the block strategy."""
    scale: str
    """What a weight's name gets to name its scale."""
    static_inputs: bool
    """Whether each module has an ``input_scale`` too."""
    targets: tuple[str, ...]
    """Names of modules, ``re:`` and a regular expression for them, or classes such as Linear."""

    def scale_shapes(self, weight: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that the scale of a weight may have; the first is the usual one.

        Args:
            weight: its shape, [out, in] or [experts, out, in].
        """
        *experts, rows, columns = weight
        if self.strategy == "block":
            return [block_grid(weight, self.block or (1, 1))]
        if self.strategy == "channel":
            # Experts in one tensor may lie [in, out].
            turned = [(*experts, 1, columns), (*experts, columns)] if experts else []
            return [(*experts, rows, 1), (*experts, rows), *turned]
        return [(1,), ()] if not experts else [(*experts,), (*experts, 1), (*experts, 1, 1)]


@dataclass(frozen=True)
class Quantization:
    """What config.json says of quantization."""

    method: str | None
    """``quant_method``; None: not quantized."""
    schemes: tuple[Scheme, ...]
    """Empty where nothing is quantized, or in a way that is not checked here."""
    ignore: tuple[str, ...]
    """Modules that are not quantized: names, or ``re:`` and a regular expression."""
    problems: tuple[tuple[str, str], ...]
    """What is wrong with the configuration itself: message and remedy."""

    @property
    def checked(self) -> bool:
        """Whether the scales of this layout are known here."""
        return self.method is None or bool(self.schemes)

    def ignores(self, module: str) -> bool:
        """Whether ``module`` is named as not quantized."""
        return any(_matches(pattern, module) for pattern in self.ignore)

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module's weight: named ones win over those for all Linear layers."""
        for scheme in self.schemes:
            if any(_matches(target, module) for target in scheme.targets):
                return scheme
        return next((s for s in self.schemes if any(_is_class(t) for t in s.targets)), None)


def block_grid(weight: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight: ``[ceil(out / rows), ceil(in / columns)]``."""
    *experts, rows, columns = weight
    return (*experts, -(-rows // block[0]), -(-columns // block[1]))


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read the quantization part of a config.json."""
    found = quantization_config(config)
    if found is None:
        return Quantization(None, (), (), ())
    method = str(found.get("quant_method") or COMPRESSED_TENSORS).lower().replace("_", "-")
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(found)
    if method == "fp8":
        return _fp8(found)
    if method == "fbgemm-fp8":
        scheme = Scheme("F8_E4M3", "channel", None, SCALE, False, ("Linear",))
        return Quantization("fbgemm_fp8", (scheme,), _not_converted(found), ())
    return Quantization(str(found.get("quant_method")), (), _not_converted(found), ())


def _fp8(found: Mapping[str, Any]) -> Quantization:
    problems = []
    static = found.get("activation_scheme") == "static"
    if found.get("activation_scheme") not in ("static", "dynamic"):
        problems.append(
            (
                f"activation_scheme is {found.get('activation_scheme')!r}, vLLM needs 'dynamic' or"
                " 'static'",
                _FROM_PUBLISHER,
            )
        )
    stated = found.get("weight_block_size")
    block = _pair(stated)
    if stated is not None and block is None:
        problems.append(
            (
                f"weight_block_size is {stated!r}, expected two numbers such as [128, 128]",
                _FROM_PUBLISHER,
            )
        )
    if "block_size" in found:
        problems.append(
            (
                f"block_size = {found['block_size']!r} is a key that vLLM ignores",
                f"vLLM reads weight_block_size, such as [128, 128]: {_FROM_PUBLISHER}",
            )
        )
    strategy: Strategy = "tensor" if block is None else "block"
    scale = SCALE if block is None else SCALE_INV
    scheme = Scheme("F8_E4M3", strategy, block, scale, static, ("Linear",))
    return Quantization("fp8", (scheme,), _not_converted(found), tuple(problems))


def _not_converted(found: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("ignored_layers", "modules_to_not_convert"):
        names = found.get(key)
        if isinstance(names, list) and names:
            return tuple(str(name) for name in names)
    return ()


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    problems: list[tuple[str, str]] = []
    schemes = []
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        scheme = _group_scheme(name, group, problems)
        if scheme is not None:
            schemes.append(scheme)
    ignore = found.get("ignore")
    names = tuple(str(name) for name in ignore) if isinstance(ignore, list) else ()
    return Quantization(COMPRESSED_TENSORS, tuple(schemes), names, tuple(problems))


def _group_scheme(name: str, group: Any, problems: list[tuple[str, str]]) -> Scheme | None:
    """The scheme of a config group; None for one that is not checked here (4 bits, attention)."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    dtype = {("float", 8): "F8_E4M3", ("int", 8): "I8"}.get(
        (str(weights.get("type", "int")), weights.get("num_bits", 8))
    )
    strategy = str(weights.get("strategy") or "tensor").lower()
    if dtype is None or group.get("format") == "pack-quantized":
        return None
    if strategy not in ("block", "tensor", "channel"):
        return None
    block = _pair(weights.get("block_structure"))
    if strategy == "block" and block is None:
        problems.append(
            (
                f"config group {name}: block_structure is {weights.get('block_structure')!r},"
                " expected two numbers such as [128, 128]",
                _FROM_PUBLISHER,
            )
        )
        return None
    inputs = group.get("input_activations")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") in (False, None)
    targets = group.get("targets")
    names = tuple(str(t) for t in targets) if isinstance(targets, list) else ("Linear",)
    return Scheme(dtype, strategy, block, SCALE, static, names)  # type: ignore[arg-type]


def _pair(value: Any) -> tuple[int, int] | None:
    """``[128, 128]``, or ``"128x128"`` as early compressed-tensors releases write it."""
    if isinstance(value, str):
        value = [int(part) for part in value.split("x") if part.isdecimal()]
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def _is_class(target: str) -> bool:
    """Whether a target names a class of modules, which headers do not show, such as Linear."""
    return not target.startswith("re:") and "." not in target


def _matches(pattern: str, module: str) -> bool:
    """As compressed-tensors: equal, or a regular expression that fits from the name's start."""
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error:
        return False

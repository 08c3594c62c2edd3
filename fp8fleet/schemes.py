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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8fleet.config_json import (
    CompressedTensors,
    ConfigGroup,
    Fp8,
    Problem,
    WeightArguments,
    typed,
)
from fp8fleet.jsonfile import shown
from fp8fleet.patterns import match_all
from fp8fleet.quantization import COMPRESSED_TENSORS, quantization_config, quantization_method

Strategy = Literal["block", "tensor", "channel"]

SCALE = "_scale"
SCALE_INV = "_scale_inv"
SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
REGEX = "re:"
_FROM_PUBLISHER = "take config.json from the checkpoint's publisher"


@dataclass(frozen=True)
class Scheme:
    """How the weights of some modules are quantized."""

    dtype: str | None
    """Of the weights, in safetensors' spelling: F8_E4M3 or I8; None: another."""
    strategy: Strategy | None
    """None: of another kind (4 bits, groups), whose scales' shapes are not known here."""
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
    schemes: tuple[Scheme, ...] = ()
    """Empty where nothing is quantized, or by a method that is not known here."""
    ignore: tuple[str, ...] = ()
    """Modules that are not quantized: names, or ``re:`` and a regular expression."""
    problems: tuple[tuple[str, str], ...] = ()
    """What is wrong with the configuration itself: message and remedy."""
    fits: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The modules that each ``re:`` pattern fits."""

    @property
    def checked(self) -> bool:
        """Whether the scales of a scheme are known here."""
        return self.method is None or any(scheme.strategy for scheme in self.schemes)

    def ignores(self, module: str) -> bool:
        """Whether ``module`` is named as not quantized."""
        return any(self._fits(pattern, module) for pattern in self.ignore)

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module's weight: named ones win over those for all Linear layers."""
        for scheme in self.schemes:
            if any(self._fits(target, module) for target in scheme.targets):
                return scheme
        return next((s for s in self.schemes if any(_is_class(t) for t in s.targets)), None)

    def _fits(self, pattern: str, module: str) -> bool:
        """As compressed-tensors: equal, or a regular expression that fits from the name's start."""
        if pattern.startswith(REGEX):
            return module in self.fits.get(pattern, ())
        return pattern == module


def block_grid(weight: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight: ``[ceil(out / rows), ceil(in / columns)]``."""
    *experts, rows, columns = weight
    return (*experts, -(-rows // block[0]), -(-columns // block[1]))


def read_quantization(config: Mapping[str, Any], modules: Iterable[str]) -> Quantization:
    """Read the quantization part of a config.json.

    Args:
        modules: those that `Quantization.ignores` and `Quantization.scheme_of` will be asked about.
    """
    return _with_patterns(_read(config), modules)


def _read(config: Mapping[str, Any]) -> Quantization:
    found = quantization_config(config)
    if found is None:
        stated = config.get("quantization_config")
        if stated is None or stated == {}:
            return Quantization(None)
        message = f"quantization_config is {shown(stated)}, expected a table"
        return Quantization("unknown", problems=((message, _FROM_PUBLISHER),))
    method = quantization_method(found)
    if method is None:
        message = f"quant_method is {shown(found.get('quant_method'))}, expected a name such as fp8"
        return Quantization("unknown", problems=((message, _FROM_PUBLISHER),))
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(found)
    fp8, problems = typed(Fp8, found)
    ignore = tuple(fp8.ignored_layers or fp8.modules_to_not_convert or ())
    if method == "fp8":
        return _fp8(found, fp8, problems, ignore)
    if method.replace("_", "-") == "fbgemm-fp8":
        scheme = Scheme("F8_E4M3", "channel", None, SCALE, False, ("Linear",))
        return Quantization("fbgemm_fp8", (scheme,), ignore)
    return Quantization(method, (), ignore)


def _with_patterns(found: Quantization, modules: Iterable[str]) -> Quantization:
    """With the modules that each regular expression fits."""
    every = [*found.ignore, *(target for scheme in found.schemes for target in scheme.targets)]
    patterns = [pattern.removeprefix(REGEX) for pattern in every if pattern.startswith(REGEX)]
    fits, wrong = match_all(patterns, modules)
    problems = tuple((f"{shown(REGEX + p)} {why}", _FROM_PUBLISHER) for p, why in wrong.items())
    return replace(
        found,
        problems=found.problems + problems,
        fits={REGEX + pattern: names for pattern, names in fits.items()},
    )


def _fp8(
    found: Mapping[str, Any], fp8: Fp8, problems: list[Problem], ignore: tuple[str, ...]
) -> Quantization:
    told = [(problem.message, _FROM_PUBLISHER) for problem in problems]
    if found.get("activation_scheme") is None:
        message = "activation_scheme is not set, vLLM needs 'dynamic' or 'static'"
        told.append((message, _FROM_PUBLISHER))
    if "block_size" in found:
        told.append(
            (
                f"block_size = {shown(found['block_size'])} is a key that vLLM ignores",
                f"vLLM reads weight_block_size, such as [128, 128]: {_FROM_PUBLISHER}",
            )
        )
    block = fp8.weight_block_size
    strategy: Strategy = "tensor" if block is None else "block"
    scale = SCALE if block is None else SCALE_INV
    static = fp8.activation_scheme == "static"
    scheme = Scheme("F8_E4M3", strategy, block, scale, static, ("Linear",))
    return Quantization("fp8", (scheme,), ignore, tuple(told))


def _compressed_tensors(found: Mapping[str, Any]) -> Quantization:
    part, wrong = typed(CompressedTensors, found)
    problems = [(problem.message, _FROM_PUBLISHER) for problem in wrong]
    schemes = []
    for name, group in part.config_groups.items():
        weights = group.weights
        if weights is None:
            continue
        scheme = _group_scheme(group, weights)
        if group.targets is None:
            message = f"config_groups.{name}.targets is not set, expected such as ['Linear']"
            problems.append((message, _FROM_PUBLISHER))
        if scheme.strategy == "block" and scheme.block is None:
            message = (
                f"config_groups.{name}.weights.block_structure is not set,"
                " expected two numbers such as [128, 128]"
            )
            problems.append((message, _FROM_PUBLISHER))
        else:
            schemes.append(scheme)
    ignore = tuple(part.ignore or ())
    return Quantization(COMPRESSED_TENSORS, tuple(schemes), ignore, tuple(problems))


def _group_scheme(group: ConfigGroup, weights: WeightArguments) -> Scheme:
    """The scheme of a config group."""
    dtype = {("float", 8): "F8_E4M3", ("int", 8): "I8"}.get((weights.type, weights.num_bits))
    known: dict[str, Strategy] = {"block": "block", "tensor": "tensor", "channel": "channel"}
    strategy = known.get(weights.strategy or _inferred(weights.group_size))
    if dtype is None or group.format == "pack-quantized":
        dtype = strategy = None
    inputs = group.input_activations
    static = inputs is not None and not inputs.dynamic
    block = weights.block_structure if strategy == "block" else None
    return Scheme(dtype, strategy, block, SCALE, static, tuple(group.targets or ("Linear",)))


def _inferred(group_size: int | None) -> str:
    """The strategy where none is named, as QuantizationArgs of compressed-tensors has it."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _is_class(target: str) -> bool:
    """Whether a target names a class of modules, which headers do not show, such as Linear."""
    return not target.startswith(REGEX) and "." not in target

"""Compares a checkpoint's quantized weights and their scales with what config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping

from fp8fleet.architecture import Architecture
from fp8fleet.findings import AGAIN, SAME_REVISION, Findings, Severity
from fp8fleet.headers import Tensor
from fp8fleet.quantization import COMPRESSED_TENSORS
from fp8fleet.schemes import SCALE, SCALE_DTYPES, SCALE_INV, Quantization, Scheme, block_grid
from fp8fleet.tensor_parallel import LAYER, is_language_model, module_of

CONFIG = "config.json"
NO_WEIGHTS = (SCALE, SCALE_INV, "_zero_point", ".SCB")
"""Endings of names that are of no weight, though the dtype may be a weight's."""

_QUANTIZED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"})
_PLAIN = frozenset({"BF16", "F16", "F32"})
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LINEAR = frozenset({name for names in _FUSED for name in names} | {"o_proj", "down_proj"})


def check_quantized(
    quantization: Quantization,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, str],
    architecture: Architecture,
    findings: Findings,
    complete: bool,
) -> None:
    """Find what of the quantized weights, their scales and config.json does not fit together.

    Args:
        tensors: all, by name.
        files: the shard of each.
        complete: whether no shard's header is missing.
    """
    _Check(quantization, tensors, files, architecture, findings, complete).run()


def weight_of_scale(name: str) -> str | None:
    """The weight that a tensor is the scale of, by its name."""
    for ending in (SCALE, SCALE_INV):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


class _Check:
    """One comparison; `check_quantized` says of what."""

    def __init__(
        self,
        quantization: Quantization,
        tensors: Mapping[str, Tensor],
        files: Mapping[str, str],
        architecture: Architecture,
        findings: Findings,
        complete: bool,
    ) -> None:
        self._quantization = quantization
        self._tensors = tensors
        self._files = files
        self._architecture = architecture
        self._findings = findings
        self._complete = complete
        self._weights = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.dtype in _QUANTIZED
            and len(tensor.shape) in (2, 3)
            and not name.endswith(NO_WEIGHTS)
        }

    def run(self) -> None:
        """Find everything."""
        for message, remedy in self._quantization.problems:
            self._findings.add("quantization-config", message, remedy, CONFIG)
        if self._quantization.method is None:
            self._check_unannounced()
            return
        if not self._quantization.schemes:
            if not self._quantization.problems:
                self._check_unknown_method()
            return
        if self._quantization.checked and not self._weights:
            self._check_unused()
            return
        if any(scheme.strategy is None for scheme in self._quantization.schemes):
            self._report_unchecked()
        for name, tensor in self._weights.items():
            self._check_weight(name, tensor)
        self._check_orphans()
        self._check_fused()
        self._check_left_plain()

    def _add(
        self, code: str, name: str, message: str, remedy: str, severity: Severity = "error"
    ) -> None:
        self._findings.add(code, message, remedy, self._files[name], name, severity)

    def _check_unannounced(self) -> None:
        if not self._weights:
            return
        name, tensor = next(iter(self._weights.items()))
        message = (
            f"has no quantization_config, but {len(self._weights)} weights are {tensor.dtype},"
            f" {name} for example"
        )
        self._findings.add("quantization-missing", message, SAME_REVISION, CONFIG)

    def _report_unchecked(self) -> None:
        message = f"quantization {self._quantization.method}: not all its scales are checked here"
        remedy = "see that the model answers"
        self._findings.add("quantization-unchecked", message, remedy, CONFIG, severity="info")

    def _check_unknown_method(self) -> None:
        """Whatever the method is, F8 weights have scales."""
        name = next(iter(self._weights), None)
        if name and self._quantization.method == COMPRESSED_TENSORS:
            message = (
                f"has no config group for weights, but {len(self._weights)} weights are"
                f" {self._weights[name].dtype}, {name} for example"
            )
            self._findings.add("quantization-config", message, SAME_REVISION, CONFIG)
            return
        self._report_unchecked()
        name = next((n for n, t in self._weights.items() if t.dtype.startswith("F8")), None)
        if name and self._complete and not any("scale" in other for other in self._tensors):
            message = "has no scale: no tensor's name has `scale` in it"
            self._add("scale-missing", name, message, f"{AGAIN}, or {SAME_REVISION}")

    def _check_unused(self) -> None:
        if not self._tensors or not self._complete:
            return
        dtypes = sorted({scheme.dtype for scheme in self._quantization.schemes if scheme.dtype})
        message = (
            f"says {self._quantization.method}, but no weight is {' or '.join(dtypes)}:"
            " the shards are not quantized"
        )
        self._findings.add("quantization-unused", message, SAME_REVISION, CONFIG)

    def _check_weight(self, name: str, tensor: Tensor) -> None:
        module = module_of(name)
        if self._quantization.ignores(module):
            message = f"is {tensor.dtype}, but config.json lists its module as not quantized"
            self._add("ignored-but-quantized", name, message, SAME_REVISION)
            return
        scheme = self._quantization.scheme_of(module)
        if scheme is None:
            message = f"is {tensor.dtype}, but no config group of config.json targets it"
            self._add("not-targeted", name, message, SAME_REVISION)
            return
        if scheme.strategy is None:
            self._check_presence(name)
            return
        if tensor.dtype != scheme.dtype:
            message = f"is {tensor.dtype}, config.json asks for {scheme.dtype}"
            self._add("weight-dtype", name, message, SAME_REVISION)
            return
        self._check_scale(name, tensor, scheme)
        input_scale = f"{module}.input_scale"
        if scheme.static_inputs and input_scale not in self._tensors:
            message = f"has no {input_scale}, config.json says that activations are static"
            self._add("input-scale-missing", name, message, SAME_REVISION)

    def _check_presence(self, name: str) -> None:
        """Compressed-tensors has a scale of that name for every weight, whatever its shape is."""
        if name + SCALE not in self._tensors:
            self._report_missing(name, name + SCALE)

    def _report_missing(self, name: str, scale_name: str) -> None:
        if self._complete:
            message = f"has no scale: {scale_name} is in no shard"
            self._add("scale-missing", name, message, f"{AGAIN}, or {SAME_REVISION}")

    def _check_scale(self, name: str, weight: Tensor, scheme: Scheme) -> None:
        scale_name = name + scheme.scale
        scale = self._tensors.get(scale_name)
        if scale is None:
            other = name + (SCALE_INV if scheme.scale == SCALE else SCALE)
            if other in self._tensors:
                self._check_other_scale(name, weight, scheme, other)
            else:
                self._report_missing(name, scale_name)
            return
        if scale.dtype not in SCALE_DTYPES:
            message = f"is {scale.dtype}, expected one of {', '.join(sorted(SCALE_DTYPES))}"
            self._add("scale-dtype", scale_name, message, SAME_REVISION)
        shapes = scheme.scale_shapes(weight.shape)
        if scale.shape in shapes:
            return
        found = _block_of(weight.shape, scale.shape)
        what = f"has shape {list(scale.shape)}"
        if found is not None:
            what += f", which is of {found[0]} x {found[1]} blocks"
        if scheme.block and found:
            message = f"{what}; config.json says {scheme.block[0]} x {scheme.block[1]}"
            self._add("block-size", scale_name, message, SAME_REVISION)
        else:
            message = f"{what}; config.json asks for {scheme.strategy} scales of {list(shapes[0])}"
            self._add("scale-shape", scale_name, message, SAME_REVISION)

    def _check_other_scale(self, name: str, weight: Tensor, scheme: Scheme, other: str) -> None:
        """The scale is there in another layout's spelling."""
        shape = self._tensors[other].shape
        found = _block_of(weight.shape, shape)
        blocks = f" of {found[0]} x {found[1]} blocks" if found else ""
        expected = (name + scheme.scale).rpartition(".")[2]
        message = (
            f"has the scale {other.rpartition('.')[2]} {list(shape)}{blocks}; with quant_method"
            f" {self._quantization.method} and {scheme.strategy} scales vLLM reads"
            f" {expected} {list(scheme.scale_shapes(weight.shape)[0])}"
        )
        self._add("scale-name", name, message, SAME_REVISION)

    def _check_orphans(self) -> None:
        for name in self._tensors if self._complete else ():
            weight = weight_of_scale(name)
            if not weight or not weight.endswith(".weight"):
                continue
            # Compressed-tensors packs weights of 4 bits under a name of their own.
            if not {weight, f"{weight}_packed"} & self._tensors.keys():
                message = f"is the scale of {weight}, which is in no shard"
                self._add("weight-missing", name, message, f"{AGAIN}, or {SAME_REVISION}")

    def _check_fused(self) -> None:
        """vLLM makes one matrix of them: all are quantized or none is."""
        for name in list(self._weights):
            module = module_of(name)
            parent, _, own = module.rpartition(".")
            for names in _FUSED:
                for other in names if own in names else ():
                    twin = self._tensors.get(f"{parent}.{other}.weight")
                    if twin is not None and twin.dtype in _PLAIN:
                        message = f"is quantized, {parent}.{other}.weight is {twin.dtype}"
                        self._add("fused-mixed", name, message, SAME_REVISION)

    def _check_left_plain(self) -> None:
        """Plain weights where config.json announces quantized ones are loaded without a scale."""
        for name, tensor in self._tensors.items():
            module = module_of(name)
            plain = tensor.dtype in _PLAIN and len(tensor.shape) == 2
            if not plain or module.rpartition(".")[2] not in _LINEAR or module == name:
                continue
            match = LAYER.search(name)
            if not match or int(match[1]) >= (self._architecture.layers or 0):
                continue
            if not is_language_model(name) or self._is_ignored_by_any_name(module):
                continue
            scheme = self._quantization.scheme_of(module)
            if scheme is not None and scheme.strategy:
                message = f"is {tensor.dtype}, but config.json does not list it as not quantized"
                self._add("not-quantized", name, message, SAME_REVISION, "warning")

    def _is_ignored_by_any_name(self, module: str) -> bool:
        """Also under the names that other transformers releases give the same module."""
        short = module[module.find("layers.") :]
        return self._quantization.ignores(module) or any(
            name.endswith(short) or module.endswith(f".{name}")
            for name in self._quantization.ignore
        )


def _block_of(weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | None:
    """The usual block whose scales have that shape, the largest first; None: there is none."""
    sizes = (128, 64, 32, 16, 256, 512)
    squares = [(size, size) for size in sizes]
    for block in squares + [(rows, columns) for rows in (1, *sizes) for columns in sizes]:
        if len(scale) == len(weight) and block_grid(weight, block) == scale:
            return block
    return None

"""How fast a server will be: estimates, scaled from one measurement (catalog/speed.toml).

Prefill is bound by arithmetic, decoding by what it reads. At the measured point the estimates are
the measured values; away from it they are what the data sheets' ratios say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fp8fleet import catalog
from fp8fleet.catalog import Accelerator
from fp8fleet.stored import StoredCheckpoint
from fp8fleet.tensor_parallel import is_language_model

_OUTSIDE = ("embed_tokens", "lm_head", "wte")
"""In the names of matrices that a prompt's tokens don't pass: looked up, or for the last one."""
_SAME = 0.05
"""Parameters may differ by that share and the measurement still counts as one of that model."""


@dataclass(frozen=True)
class Work:
    """What a model asks of an accelerator."""

    parameters: float
    """That one token passes; of experts only the active ones."""
    attention: Mapping[int | None, float]
    """Layers x query heads x head size, by the window of the layers (None: all tokens)."""
    layers: int
    weight_bytes: int
    precision: str
    """Of the arithmetic: bf16 or fp8."""

    def flops(self, prompt_tokens: float) -> float:
        """Floating-point operations a prompt token; each looks back at half the prompt."""
        back = prompt_tokens / 2
        pairs = sum(width * min(back, window or back) for window, width in self.attention.items())
        return 2 * self.parameters + 4 * pairs


# The same for every host that serves the model: the headers of a large one have 100,000 tensors.
@functools.lru_cache(maxsize=256)
def work_of(
    checkpoint: StoredCheckpoint, accelerator: Accelerator, active_experts: int | None
) -> Work | None:
    """What serving ``checkpoint`` asks; None: config.json doesn't tell its size.

    Args:
        active_experts: that a token passes; None: all, or the model has none.
    """
    architecture = checkpoint.architecture
    if not architecture.heads or not architecture.layers or not checkpoint.tensors:
        return None
    share = 1.0
    if architecture.experts and active_experts:
        share = min(active_experts / architecture.experts, 1.0)
    parameters = 0.0
    for name, tensor in checkpoint.tensors.items():
        matrix = len(tensor.shape) >= 2 and "scale" not in name
        if matrix and is_language_model(name) and not any(part in name for part in _OUTSIDE):
            parameters += math.prod(tensor.shape) * (share if ".experts." in name else 1.0)
    attention: dict[int | None, float] = {}
    for group in architecture.groups:
        width = group.count * architecture.heads * (group.head_dim or 0)
        attention[group.window] = attention.get(group.window, 0.0) + width
    fp8 = any(tensor.dtype.startswith("F8_E4M3") for tensor in checkpoint.tensors.values())
    return Work(
        parameters=parameters,
        attention=attention,
        layers=architecture.layers,
        weight_bytes=sum(tensor.end - tensor.begin for tensor in checkpoint.tensors.values()),
        precision="fp8" if fp8 and accelerator.fp8_block == "native" else "bf16",
    )


@dataclass(frozen=True)
class Pace:
    """Speeds of one server."""

    prefill_tokens_per_s: float
    step_ms: float
    """A decode step of all streams."""
    measured: bool
    """Whether model, accelerator and release are those that were measured."""

    def told(self) -> str:
        """Where the numbers come from, for a reason that is shown."""
        base = catalog.measured_speed()
        where = f"one H200 with vLLM {base.engine_release}"
        return (
            f"measured on {where}" if self.measured else f"estimates, scaled from an 8B on {where}"
        )


def pace_of(
    work: Work,
    name: str,
    release: str,
    tensor_parallel: int,
    prompt_tokens: float,
    cache_bytes: float,
) -> Pace | None:
    """Speeds of a server; None: the accelerator's data sheet isn't in the catalogue.

    Args:
        name: the accelerator's.
        release: version of vLLM.
        tensor_parallel: GPUs of the server.
        prompt_tokens: of the prompt that comes in.
        cache_bytes: of the KV cache on one GPU that a decode step reads.
    """
    accelerator, base = catalog.accelerators()[name], catalog.measured_speed()
    rate = _tflops(accelerator, work.precision)
    if rate is None or accelerator.bandwidth_gb_s is None:
        return None
    before = _tflops(catalog.accelerators()[base.accelerator], base.precision)
    assert before is not None
    width = base.layers * base.attention_width
    measured_flops = 2 * base.parameters + 4 * width * base.prompt_tokens / 2
    doublings = math.log2(tensor_parallel)
    prefill = base.prefill_tokens_per_s * (rate / before) * measured_flops
    prefill *= tensor_parallel * base.tp_prefill_share**doublings / work.flops(prompt_tokens)
    per_layer = base.step_ms_per_layer + base.tp_step_ms_per_layer * doublings
    read = work.weight_bytes / tensor_parallel + cache_bytes
    bandwidth = accelerator.bandwidth_gb_s * 1e6 * base.bytes_read_share  # bytes a millisecond
    return Pace(
        prefill_tokens_per_s=prefill,
        step_ms=per_layer * work.layers + read / bandwidth,
        measured=(name, release) == (base.accelerator, base.engine_release)
        and tensor_parallel == 1
        and work.precision == base.precision
        and abs(work.parameters / base.parameters - 1) < _SAME,
    )


def _tflops(accelerator: Accelerator, precision: str) -> float | None:
    return accelerator.fp8_tflops if precision == "fp8" else accelerator.bf16_tflops

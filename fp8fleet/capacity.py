"""How much context a server's GPUs hold: the sum of what its memory is used for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8fleet.stored import StoredCheckpoint

How = Literal["headers", "measured", "estimate", "unknown"]


@dataclass(frozen=True)
class Settings:
    """What of a server's options its memory depends on."""

    memory_bytes: int
    """Of one device, as the engine sees it."""
    utilization: float
    """Share of it that the server takes."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens; None: the model's context."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None
    """vLLM's option of that name: the cache's size, whatever is left."""
    quantization: str | None = None
    """vLLM's option of that name: quantization while loading."""


@dataclass(frozen=True)
class Part:
    """A term of the sum that is shown."""

    name: str
    bytes: int
    """On the fullest GPU; negative where it is taken away."""
    how: How
    """Where it is from."""


@dataclass(frozen=True)
class Capacity:
    """What a server's KV cache holds."""

    parts: tuple[Part, ...]
    """Add up to ``kv_bytes``."""
    kv_bytes: int
    """For the KV cache on the fullest GPU; negative where the weights alone are too large."""
    kv_tokens: int
    """The estimate of what vLLM logs as ``GPU KV cache size``."""
    context: int | None
    """Tokens a sequence may have; None: neither the model nor the options say."""
    measured_kv_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds: measured where that is known."""
        return self.kv_tokens if self.measured_kv_tokens is None else self.measured_kv_tokens

    @property
    def error(self) -> float | None:
        """Of the estimate against what was measured: 0.01 is one percent too much."""
        if not self.measured_kv_tokens:
            return None
        return self.kv_tokens / self.measured_kv_tokens - 1

    def sequences(self, context: int) -> float:
        """Sequences of ``context`` tokens that the cache holds at once."""
        raise NotImplementedError

    def largest_context(self) -> int:
        """Tokens of the longest sequence that the cache holds, whatever the model allows."""
        raise NotImplementedError

    @property
    def fits(self) -> bool:
        """Whether a sequence of the asked context fits, which vLLM demands at its start."""
        raise NotImplementedError


def estimate(checkpoint: StoredCheckpoint, settings: Settings) -> Capacity | None:
    """Estimate what the KV cache of a server holds.

    Returns:
        None: config.json or the headers do not tell what is needed.
    """
    raise NotImplementedError

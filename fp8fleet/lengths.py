"""How long requests are: quantiles that the operator states, or a file of real lengths."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import JsonError, parse_json, read_regular, shown

MAX_TOKENS = 10_000_000
"""Of a prompt or an output; no model has a longer context."""
_P95 = 1.645
"""Standard deviations from the mean of a normal distribution to its 95th percentile."""

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS, strict=True)]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a workload's requests."""

    prompt_p95: int
    typical: float
    """Mean of prompt and output together: what a running request holds at its end."""
    longest: int
    """Largest prompt and output together."""
    told: str
    """How ``longest`` comes about, for a reason that is shown."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: Count
    output_tokens: Count


def stated_lengths(prompt: tuple[int, int, int], output: tuple[int, int, int]) -> Lengths:
    """Lengths of which only quantiles are known.

    Args:
        prompt: its median, 95th percentile and maximum, in tokens.
        output: the same of the output.
    """
    return Lengths(
        prompt_p95=prompt[1],
        typical=_mean(*prompt) + _mean(*output),
        longest=prompt[2] + output[2],
        told=f"largest prompt {prompt[2]:,} + largest output {output[2]:,}",
    )


def _mean(p50: int, p95: int, most: int) -> float:
    """Of the log-normal distribution with these quantiles, which lengths of requests are like."""
    spread = math.log(p95 / p50) / _P95
    return min(p50 * math.exp(min(spread, 10.0) ** 2 / 2), float(most))


def read_lengths(path: Path) -> Lengths:
    """Read a JSONL file: ``{"prompt_tokens": 812, "output_tokens": 164}``, one request a line.

    Raises:
        OperatorError: it cannot be read, is empty, or a line is something else.
    """
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror or error}") from None


# Read once for all hosts.
@functools.cache
def _read(path: Path, mtime_ns: int, size: int) -> Lengths:
    del mtime_ns, size
    content = read_regular(path)
    requests = list(_requests(path, content.removeprefix(codecs.BOM_UTF8)))
    if not requests:
        raise OperatorError(
            f"{path}: empty: one request a line is needed,"
            ' such as {"prompt_tokens": 812, "output_tokens": 164}'
        )
    prompts = sorted(line.prompt_tokens for line in requests)
    totals = [line.prompt_tokens + line.output_tokens for line in requests]
    longest = max(requests, key=lambda line: line.prompt_tokens + line.output_tokens)
    return Lengths(
        prompt_p95=prompts[math.ceil(0.95 * len(prompts)) - 1],
        typical=sum(totals) / len(totals),
        longest=max(totals),
        told=f"longest of {len(requests):,} requests in {path.name}: prompt"
        f" {longest.prompt_tokens:,} + output {longest.output_tokens:,}",
    )


def _requests(path: Path, content: bytes) -> Iterator[_Line]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield _Line.model_validate(parse_json(line))
        except JsonError as error:
            raise OperatorError(f"{where}: not JSON: {error}: one object a line") from None
        except ValidationError as error:
            detail = error.errors()[0]
            key = ".".join(str(part) for part in detail["loc"])
            named = f"{key} = {shown(detail['input'])}" if key else shown(detail["input"])
            raise OperatorError(
                f"{where}: {named}: {detail['msg']}; a line has prompt_tokens and output_tokens"
            ) from None

"""Sizes of KV caches as engines logged them: models/<name>/measured.toml.

Acceptance writes reports/measured.toml; the operator copies it beside the model's manifest.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

from fp8fleet.errors import OperatorError
from fp8fleet.jsonfile import shown
from fp8fleet.toml import read_toml

MEASURED = "measured.toml"
REPORT = Path("reports") / MEASURED
"""What acceptance writes."""

_LOGGED = re.compile(r"\bKV cache size: ([0-9][0-9,]*) tokens")
_ENTRIES = "measured"
_COMMENT = "# KV cache sizes as engines logged them: copy this file beside the model's manifest.\n"

Count = Annotated[int, Field(ge=1, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """What the size of a KV cache depends on, in the inventory's and vLLM's own terms."""

    model: str
    revision: str
    engine_release: str
    accelerator: str
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, strict=True)]
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count | None = None
    enforce_eager: StrictBool = False
    data_parallel_size: Count = 1
    enable_expert_parallel: StrictBool = False
    dtype: str = "auto"
    """``float32``, or ``auto`` for all types of two bytes."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Measurement(Combination):
    """One start of an engine."""

    kv_tokens: Count
    """``GPU KV cache size`` of its log."""
    date: Annotated[datetime.date, Field(strict=True)]

    @property
    def combination(self) -> Combination:
        """What was measured."""
        names = [field.name for field in dataclasses.fields(Combination)]
        return Combination(**{name: getattr(self, name) for name in names})


_ADAPTER = TypeAdapter(Measurement)


def read_measured(path: Path) -> tuple[Measurement, ...]:
    """Read a measured.toml.

    Returns:
        Its entries, of whatever model; empty where there is no such file.

    Raises:
        OperatorError: it is not what acceptance writes; names the file and the entry.
    """
    if not path.exists():
        return ()
    table = read_toml(path)
    entries = table.pop(_ENTRIES, [])
    if table or not isinstance(entries, list):
        found = next(iter(table), _ENTRIES)
        raise OperatorError(f"{path}: {found!r}: expected nothing but [[{_ENTRIES}]] entries")
    read: dict[Combination, int] = {}
    measurements = []
    for number, entry in enumerate(entries, 1):
        measurement = _measurement(entry, f"{path}: entry {number}")
        earlier = read.setdefault(measurement.combination, number)
        if earlier != number:
            raise OperatorError(
                f"{path}: entry {number}: has the same settings as entry {earlier}: keep one"
            )
        measurements.append(measurement)
    return tuple(measurements)


def _measurement(entry: Any, where: str) -> Measurement:
    if not isinstance(entry, dict):
        raise OperatorError(f"{where}: is {shown(entry)}, expected a table of settings")
    try:
        return _ADAPTER.validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "unexpected_keyword_argument":
            raise OperatorError(f"{where}: {key} is an unknown key: remove it") from None
        if first["type"].startswith("missing"):
            raise OperatorError(f"{where}: {key} is missing") from None
        found = shown(first["input"])
        raise OperatorError(f"{where}: {key} is {found}: {first['msg']}") from None


def measured_tokens(
    measurements: Iterable[Measurement], wanted: Combination, any_length: bool
) -> int | None:
    """The KV tokens that were measured for a combination; None: none were.

    Args:
        any_length: whether max_model_len makes no difference: every layer keeps every token.
    """
    for measurement in measurements:
        found = measurement.combination
        if any_length:
            found = dataclasses.replace(found, max_model_len=wanted.max_model_len)
        if found == wanted:
            return measurement.kv_tokens
    return None


def logged_tokens(line: str) -> int | None:
    """The KV tokens in a line of vLLM's log; None: the line tells something else."""
    match = _LOGGED.search(line)
    return int(match[1].replace(",", "")) if match and len(match[1]) < 20 else None


def note_measured(measurement: Measurement, path: Path = REPORT) -> None:
    """Add a measurement to a file, in the place of an earlier one of the same combination.

    Raises:
        OperatorError: the file is there and is no measured.toml.
    """
    others = (m for m in read_measured(path) if m.combination != measurement.combination)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(measured_text((*others, measurement)), encoding="utf-8")
    beside.replace(path)


def measured_text(measurements: Iterable[Measurement]) -> str:
    """The text of a measured.toml; what has its default is left out."""
    return _COMMENT + "".join(f"\n[[{_ENTRIES}]]\n{_lines(one)}" for one in measurements)


def _lines(measurement: Measurement) -> str:
    lines = []
    for field in dataclasses.fields(measurement):
        value = getattr(measurement, field.name)
        if value != field.default:
            date = isinstance(value, datetime.date)
            lines.append(f"{field.name} = {value if date else json.dumps(value)}\n")
    return "".join(lines)

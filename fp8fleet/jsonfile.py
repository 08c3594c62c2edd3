"""Reads JSON that anybody may have written: regular files only, bounded in size, depth, numbers."""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 100_000_000
"""Of a file; safetensors itself refuses longer headers."""
MAX_DEPTH = 100
"""Arrays and objects in each other."""
_MAX_DIGITS = 100

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120

Pairs = list[tuple[str, Any]]


class JsonError(ValueError):
    """A text that is no JSON or beyond the bounds; the message does not name the file."""


class DuplicateKey(JsonError):
    """A key stands twice in an object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"names {shown(key)} twice")
        self.key = key


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, short, without control characters."""
    return _SHORT.repr(value)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe or a device, which may never end, is refused.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a file whole.

    Args:
        limit: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file or is longer.
    """
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return content


def parse_json(content: bytes) -> Any:
    """Parse JSON as RFC 8259 has it: UTF-8, finite numbers, no key twice.

    Raises:
        DuplicateKey: a key stands twice.
        JsonError: it is anything else.
    """

    def refuse(text: str) -> Any:
        raise JsonError(f"{text} is no number")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse(text[:40])

    def table(pairs: Pairs) -> dict[str, Any]:
        for key in _twice(pairs):
            raise DuplicateKey(key)
        return dict(pairs)

    return _parse(content, table, parse_constant=refuse, parse_float=finite)


def parse_python_json(content: bytes) -> tuple[Any, list[str]]:
    """Parse JSON as Python does, and so transformers and vLLM: NaN and Infinity are numbers.

    Mamba's ``time_step_limit``, for example, is ``[0.0, Infinity]``. Of a key that stands twice the
    last counts.

    Returns:
        The value, and the keys that stand twice.

    Raises:
        JsonError: it is not JSON, or beyond the bounds.
    """
    twice: list[str] = []

    def table(pairs: Pairs) -> dict[str, Any]:
        twice.extend(_twice(pairs))
        return dict(pairs)

    return _parse(content, table), twice


def _twice(pairs: Pairs) -> list[str]:
    if len({key for key, _ in pairs}) == len(pairs):
        return []
    seen: set[str] = set()
    return [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _parse(content: bytes, table: Callable[[Pairs], Any], **hooks: Callable[[str], Any]) -> Any:
    try:
        # Decoded here: given bytes, json would read UTF-16 too, which the engine does not.
        text = content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=table, parse_int=_integer, **hooks)  # type: ignore[arg-type]
    except RecursionError:
        raise _too_deep() from None
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(str(error)) from None
    _check_depth(value)
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise JsonError(f"a number of {len(text)} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    """So that no later walk through the value has to fear for the stack."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children = (child for parent in level for child in _children(parent))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> JsonError:
    return JsonError(f"nested deeper than {MAX_DEPTH}")

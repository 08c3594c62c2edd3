"""The headers of safetensors files: read from a file or from any byte ranges, and stored.

Format (README of huggingface/safetensors, "Format"): 8 bytes, the length N of the header as an
unsigned little-endian number; N bytes of UTF-8 JSON that begin with ``{`` and may end with spaces:
``{"NAME": {"dtype": "F16", "shape": [1, 16], "data_offsets": [BEGIN, END]}, ...,
"__metadata__": {"KEY": "TEXT", ...}}``, duplicate keys forbidden; then the data, to which the
offsets refer.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8fleet.errors import CheckFailed
from fp8fleet.jsonfile import (
    MAX_BYTES,
    DuplicateKey,
    JsonError,
    open_regular,
    parse_json,
    read_regular,
    shown,
)

LENGTH_BYTES = 8
MAX_HEADER = MAX_BYTES
"""Bytes of JSON; safetensors itself refuses longer headers."""
HEADERS = "headers.json"
"""Name of the stored headers, beside a manifest."""
_METADATA = "__metadata__"
_MAX_NUMBER = 2**63 - 1

HeaderCode = Literal[
    "empty",
    "html",
    "lfs-pointer",
    "text",
    "truncated",
    "too-long",
    "not-json",
    "bad-entry",
    "duplicate",
]


class HeaderError(CheckFailed):
    """A file that does not begin with a safetensors header, named for what it is."""

    def __init__(self, code: HeaderCode, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.code: HeaderCode = code
        self.reason = message
        """The message without the file's name."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is and what it holds."""

    dtype: str
    """As the file spells it: F8_E4M3, BF16, F32, ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """The byte behind the last one, counted from the end of the header."""


@dataclass(frozen=True)
class Header:
    """A shard's header."""

    tensors: Mapping[str, Tensor]
    """By name, in the order of the file."""
    metadata: Mapping[str, str] | None
    """The ``__metadata__`` entry; None: the file has none."""
    data_start: int | None = field(default=None, compare=False)
    """Bytes in front of the data; None where the header was read from headers.json."""


ReadRange = Callable[[int, int], bytes]
"""``read(start, count)``: the file's bytes from ``start`` on, fewer only at its end."""


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        HeaderError: the file has none; the code says what it is.
        OSError: it cannot be read, or is no regular file.
    """
    with open_regular(path) as stream:

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return stream.read(count)

        return header_from(read, str(path), os.fstat(stream.fileno()).st_size)


def header_from(read: ReadRange, where: str, size: int) -> Header:
    """Read a header with two reads at most.

    Args:
        read: gives byte ranges.
        where: names the file in errors.
        size: bytes of the whole file.

    Raises:
        HeaderError: there is none; the code says what the file is.
    """
    # The headers of most shards fit in one read, so that a web server is asked once.
    head = read(0, min(size, 64 * 1024))
    foreign = what_instead(head)
    if foreign is not None:
        code, what = foreign
        raise HeaderError(code, where, f"is {what}, not a safetensors file")
    if len(head) < LENGTH_BYTES:
        message = f"has {size} bytes, too few for a safetensors header"
        raise HeaderError("truncated", where, message)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        text = _beginning_of_text(head)
        if text is not None:
            message = f"is a text that begins {shown(text)}, not a safetensors file"
            raise HeaderError("text", where, message)
        message = f"announces a header of {length} bytes (at most {MAX_HEADER}): not safetensors"
        raise HeaderError("too-long", where, message)
    end = LENGTH_BYTES + length
    if end > size:
        message = f"has {size} bytes, its header alone announces {end}: truncated"
        raise HeaderError("truncated", where, message)
    if end > len(head):
        head += read(len(head), end - len(head))
    if len(head) < end:
        message = f"ended after {len(head)} bytes of its {end} bytes of header: truncated"
        raise HeaderError("truncated", where, message)
    return _parse(head[LENGTH_BYTES:end], where, end)


def what_instead(head: bytes) -> tuple[HeaderCode, str] | None:
    """What a file is by its first bytes, if it is one of those that servers and Git really leave.

    Returns:
        Code and words, such as ``an HTML page``; None: nothing known to be wrong.
    """
    if not head:
        return "empty", "an empty file"
    start = head[:256].removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if re.match(rb"<(!doctype html|html)", start):
        return "html", "an HTML page"
    # A safetensors file may begin with any byte, but not with eight of a text.
    if re.match(rb"<[!?a-z]", start) and b"\0" not in start[:LENGTH_BYTES]:
        return "html", "an HTML page" if b"<html" in head[:4096].lower() else "an XML page"
    if start.startswith(b"version https://git-lfs"):
        return "lfs-pointer", "a Git LFS pointer"
    return None


def _beginning_of_text(head: bytes) -> str | None:
    """How a text begins, such as a server's error message in place of a file; None: no text."""
    try:
        # The 60 bytes may end within a character.
        beginning = codecs.getincrementaldecoder("utf-8")().decode(head[:60])
    except UnicodeDecodeError:
        return None
    words = " ".join(beginning.split())
    return words if words.isprintable() else None


def _parse(text: bytes, where: str, data_start: int) -> Header:
    if not text.startswith(b"{"):
        message = "has a header that does not begin with '{': not safetensors"
        raise HeaderError("not-json", where, message)
    try:
        entries = parse_json(text)
    except DuplicateKey as error:
        raise HeaderError("duplicate", where, f"{error} in its header") from None
    except JsonError as error:
        raise HeaderError("not-json", where, f"has a header that is not JSON: {error}") from None
    return header_of_entries(entries, where, data_start)


def header_of_entries(entries: Any, where: str, data_start: int | None = None) -> Header:
    """Make a `Header` of its JSON.

    Args:
        entries: name to ``{"dtype", "shape", "data_offsets"}``, and ``__metadata__``.
        where: names the file in errors.
        data_start: bytes in front of the data, where they are known.

    Raises:
        HeaderError: an entry is not what the format says.
    """
    if not isinstance(entries, dict):
        raise HeaderError("bad-entry", where, "has a header that is not a JSON object")
    metadata = entries.get(_METADATA)
    if metadata is not None and not _is_text_map(metadata):
        raise HeaderError("bad-entry", where, "has a __metadata__ that is not a map of texts")
    tensors = {
        name: _tensor(name, entry, where) for name, entry in entries.items() if name != _METADATA
    }
    return Header(tensors, metadata, data_start)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _tensor(name: str, entry: Any, where: str) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            counts = all(_is_count(number) for number in (*shape, begin, end))
            if counts and begin <= end and _elements_fit(shape):
                return Tensor(dtype, tuple(shape), begin, end)
    raise HeaderError(
        "bad-entry",
        where,
        f"describes tensor {shown(name)} as {shown(entry)}: expected dtype, shape and data_offsets",
    )


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= _MAX_NUMBER


def _elements_fit(shape: list[int]) -> bool:
    """Whether the number of elements can be counted, as safetensors demands it too."""
    elements = 1
    for length in shape:
        elements *= length
        if elements > _MAX_NUMBER:
            return False
    return True


# --- headers.json -------------------------------------------------------------------------------


def headers_text(headers: Mapping[str, Header]) -> str:
    """The text of a headers.json: shards sorted by path, each on a line, so that diffs are short.

    Args:
        headers: by the shard's path.
    """
    lines = [
        f"{json.dumps(path)}: {json.dumps(_entries(headers[path]), separators=(',', ':'))}"
        for path in sorted(headers)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entries(header: Header) -> dict[str, Any]:
    """The JSON of a header."""
    entries: dict[str, Any] = {}
    if header.metadata is not None:
        entries[_METADATA] = header.metadata
    for name, tensor in header.tensors.items():
        offsets = [tensor.begin, tensor.end]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    return entries


def read_headers(path: Path) -> dict[str, Header]:
    """Read a headers.json.

    Returns:
        The shards' headers by path, sorted.

    Raises:
        FileNotFoundError: there is none: the checkpoint's contents are unknown.
        OSError: it cannot be read, or is no regular file.
        HeaderError: it is not what `headers_text` writes.
    """
    try:
        stored = parse_json(read_regular(path))
    except JsonError as error:
        raise HeaderError("not-json", str(path), f"is not JSON: {error}") from None
    if not isinstance(stored, dict):
        raise HeaderError("bad-entry", str(path), "is not a JSON object of shards")
    return {
        shard: header_of_entries(stored[shard], f"{path}: {shown(shard)[1:-1]}")
        for shard in sorted(stored)
    }

"""Reads what comes from outside and may be anything: numbers, JSON, text, web addresses."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit


def whole_number(text: str | None) -> int | None:
    """A count of bytes or seconds in 1 to 19 ASCII digits; None for all else."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,19}", text) else None


def load_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is none, or nested deeper than can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_header_value(value: object) -> bool:
    """Whether ``value`` can be sent as a header's value: printable ASCII, and not nothing."""
    return isinstance(value, str) and value != "" and value.isascii() and value.isprintable()


def plain(text: str) -> str:
    r"""``text`` with escapes (``\x1b``) for what is not printable, so that it stays one line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def check_web_address(value: str) -> None:
    """Check that an http or https URL names a host and a port that can exist.

    Raises:
        ValueError: what is wrong with it; a login in it is not repeated.
    """
    try:
        url = urlsplit(value)
        host = url.hostname or ""
    except ValueError:
        raise ValueError("its host is no name and no address") from None
    if url.scheme not in ("http", "https") or not host:
        raise ValueError("expected http://HOST/... or https://HOST/...")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"its host {host[:60]!r} has an empty or too long part") from None
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise ValueError(f"its host {host[:60]!r} is no name and no address")
    try:
        port = url.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("its port is not one of 1 to 65535")

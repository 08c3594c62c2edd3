"""Reads lists of SHA256 digests as `sha256sum` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8fleet.errors import OperatorError
from fp8fleet.manifest import check_path, check_sha256

_LINE = re.compile(r"(\\?)([0-9A-Za-z]+) [ *](.+)")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


def parse_sums(text: str, where: str) -> dict[str, str]:
    r"""Read a SHA256SUMS file.

    Format (GNU coreutils manual, "cksum output modes", untagged): digest, a space, a space for text
    or ``*`` for binary mode, name; a line that begins with a backslash has ``\\``, ``\n`` and
    ``\r`` in its name escaped. Upper-case digests, CRLF, ``#`` lines and ``./`` before a name are
    accepted, as `sha256sum -c` accepts them.

    Args:
        text: the file.
        where: its name for errors.

    Returns:
        Digest by path, in the order of the file.

    Raises:
        OperatorError: one line with file, line and what was expected.
    """
    sums: dict[str, str] = {}
    for number, line in _lines(text):
        place = f"{where}:{number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise OperatorError(
                f"{place}: not a line of sha256sum: expected 64 hex digits, two spaces and a path"
            )
        escaped, digest, name = match.groups()
        path = _unescape(name, place) if escaped else name
        try:
            path = check_path(path.removeprefix("./"))
        except ValueError as error:
            raise OperatorError(f"{place}: the path {error}") from None
        if path in sums:
            raise OperatorError(f"{place}: {path!r} stands twice in the list: keep one of them")
        try:
            sums[path] = check_sha256(digest)
        except ValueError as error:
            raise OperatorError(f"{place}: the digest of {path} {error}") from None
    if not sums:
        raise OperatorError(f"{where}: no digests in it, expected lines as sha256sum prints them")
    return sums


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers."""
    # Not splitlines(): it would also split names at characters that are part of them.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.strip() and not line.startswith("#"):
            yield number, line


def _unescape(name: str, place: str) -> str:
    def plain(match: re.Match[str]) -> str:
        try:
            return _ESCAPES[match[0]]
        except KeyError:
            raise OperatorError(f"{place}: {match[0]!r} is not an escape of sha256sum") from None

    return re.sub(r"\\.?", plain, name)

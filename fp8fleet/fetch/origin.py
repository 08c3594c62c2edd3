"""Places that have a manifest's files: what each must do, and the one that is a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

_CHUNK = 1 << 20


class Refused(Exception):
    """A source does not have the right file; another one may."""


class Interrupted(Exception):
    """A source failed for the moment; the same one may work later."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


@dataclass
class Body:
    """A source's answer: bytes of one file from ``start`` on."""

    where: str
    """For messages: the address that answered, without its query (redirects may sign it)."""
    start: int
    total: int | None
    """Size of the whole file as the source announces it."""
    validator: str | None
    """Names this version of the file at this source (a strong ETag or a date)."""
    chunks: Iterator[bytes]
    close: Callable[[], None]

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Origin(Protocol):
    """A place that has the manifest's files."""

    name: str

    def open(self, path: str, offset: int, validator: str | None) -> Body:
        """Ask for ``path`` from byte ``offset`` on, if it is still the version ``validator``.

        Returns:
            A body that starts at ``offset``, or at 0 where that was not possible.

        Raises:
            Refused: the origin does not have it.
            Interrupted: it may have it later.
        """


class FileOrigin:
    """A directory on this host, NFS included."""

    def __init__(self, base: str) -> None:
        self.name = base
        self._directory = Path(unquote(urlsplit(base).path))

    def open(self, path: str, offset: int, validator: str | None) -> Body:
        """See `Origin.open`."""
        full = self._directory / path
        try:
            stream = full.open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise Refused("no such file") from None
        except PermissionError:
            raise Refused("may not be read: check the permissions") from None
        except OSError as error:
            raise Interrupted(f"cannot be opened: {error.strerror}") from None
        status = os.fstat(stream.fileno())
        version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
        start = offset if validator in (None, version) and offset <= status.st_size else 0
        stream.seek(start)
        return Body(str(full), start, status.st_size, version, self._chunks(stream), stream.close)

    @staticmethod
    def _chunks(stream: Any) -> Iterator[bytes]:
        try:
            while chunk := stream.read(_CHUNK):
                yield chunk
        except OSError as error:
            raise Interrupted(f"cannot be read: {error.strerror}") from None

"""Places that have a manifest's files: what each must do, and the one that is a directory."""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
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
    """Ends the answer, whole or not: use with `contextlib.closing`."""


class Origin(Protocol):
    """A place that has the manifest's files."""

    name: str

    def open(
        self, path: str, offset: int, validator: str | None, length: int | None = None
    ) -> Body:
        """Ask for ``path`` from byte ``offset`` on, if it is still the version ``validator``.

        Args:
            length: bytes wanted; None: all the rest. More may come.

        Returns:
            A body that starts at ``offset``, or at 0 where that was not possible.

        Raises:
            Refused: the origin does not have it.
            Interrupted: it may have it later.
        """


class FileOrigin:
    """A directory on this host, NFS included.

    A thread of its own reads, because a read from a server that is gone never returns: the run
    then goes on without that thread.
    """

    def __init__(self, base: str, stall_s: float) -> None:
        """``stall_s``: seconds without a byte that count as a failure."""
        self.name = base
        self._directory = Path(unquote(urlsplit(base).path))
        self._stall_s = stall_s

    def open(
        self, path: str, offset: int, validator: str | None, length: int | None = None
    ) -> Body:
        """See `Origin.open`."""
        full = self._directory / path
        reading = _Reading(full, offset, validator, length)
        threading.Thread(target=reading.run, daemon=True).start()
        try:
            opened = reading.next(self._stall_s)
        except BaseException:
            reading.closed.set()
            raise
        assert isinstance(opened, _Opened)
        chunks = self._chunks(reading)
        return Body(
            str(full), opened.start, opened.size, opened.version, chunks, reading.closed.set
        )

    def _chunks(self, reading: _Reading) -> Iterator[bytes]:
        while chunk := reading.next(self._stall_s):
            assert isinstance(chunk, bytes)
            yield chunk


@dataclass(frozen=True)
class _Opened:
    """What the reading thread found: where it starts, the whole size, the version."""

    start: int
    size: int
    version: str


class _Reading:
    """Reads one file in a thread and hands over: `_Opened`, the chunks, and ``b""`` at the end."""

    def __init__(self, path: Path, offset: int, validator: str | None, length: int | None) -> None:
        self.closed = threading.Event()
        self._path = path
        self._offset = offset
        self._validator = validator
        self._left = length
        self._handed: queue.Queue[_Opened | bytes | Exception] = queue.Queue(maxsize=2)

    def next(self, stall_s: float) -> _Opened | bytes:
        """The next thing; raises what the thread met, or `Interrupted` when nothing comes."""
        try:
            handed = self._handed.get(timeout=stall_s)
        except queue.Empty:
            why = f"stalled: no byte for {stall_s:g} s: check the mount"
            raise Interrupted(why) from None
        if isinstance(handed, Exception):
            raise handed
        return handed

    def run(self) -> None:
        """The thread."""
        try:
            with self._path.open("rb", buffering=0) as stream:
                self._read(stream)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._hand(Refused("no such file"))
        except PermissionError:
            self._hand(Refused("may not be read: check the permissions"))
        except OSError as error:
            self._hand(Interrupted(f"cannot be read: {error.strerror}"))
        except Exception as error:
            # Whatever it is, who waits for this thread has to know.
            self._hand(error)

    def _read(self, stream: io.FileIO) -> None:
        status = os.fstat(stream.fileno())
        version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
        same = self._validator in (None, version) and self._offset <= status.st_size
        start = self._offset if same else 0
        stream.seek(start)
        self._hand(_Opened(start, status.st_size, version))
        chunk = b"-"
        while chunk and not self.closed.is_set():
            wanted = _CHUNK if self._left is None else min(_CHUNK, self._left)
            chunk = stream.read(wanted) or b""
            if self._left is not None:
                self._left -= len(chunk)
            self._hand(chunk)

    def _hand(self, what: _Opened | bytes | Exception) -> None:
        while not self.closed.is_set():
            with suppress(queue.Full):
                self._handed.put(what, timeout=1)
                return

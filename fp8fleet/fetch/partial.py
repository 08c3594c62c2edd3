"""A file on its way: its bytes, their running digest, and where they came from."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from fp8fleet.fetch.disk import fsync_directory, write_beside
from fp8fleet.fetch.origin import Origin
from fp8fleet.fetch.progress import Reporter, human_bytes
from fp8fleet.manifest import PARTIAL, PARTIAL_ORIGIN, ManifestFile
from fp8fleet.outside import is_header_value, load_json

_CHUNK = 1 << 20


class Partial:
    """The bytes of one file that have arrived, with their running SHA256.

    They survive a kill: the next run hashes what is there and goes on behind it.
    """

    def __init__(self, directory: Path, file: ManifestFile, reporter: Reporter) -> None:
        self.path = directory / PARTIAL / file.path
        self._file = file
        self._reporter = reporter
        self._record_path = directory / PARTIAL_ORIGIN / file.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._record_path.parent.mkdir(parents=True, exist_ok=True)
        self._record: dict[str, str | None] = {}
        self.size = 0
        self.segments = 0
        """How many answers the bytes came from; above 1 a wrong digest may be a bad seam."""
        self._sha = hashlib.sha256()
        self._fd = self._open()
        self._adopt()

    def close(self) -> None:
        """Leave the bytes for the next run."""
        os.close(self._fd)

    @property
    def digest(self) -> str:
        """SHA256 of the bytes so far."""
        return self._sha.hexdigest()

    def head(self) -> bytes:
        """The first bytes, to tell what it is."""
        return os.pread(self._fd, 512, 0)

    def validator_for(self, origin: Origin) -> str | None:
        """The version that the bytes are of, when they came from ``origin``."""
        return self._record.get("validator") if self._record.get("source") == origin.name else None

    def note_origin(self, origin: Origin, validator: str | None) -> None:
        """Note where the following bytes come from; written before them."""
        self.segments += 1
        record = {"sha256": self._file.sha256, "source": origin.name, "validator": validator}
        if record != self._record:
            write_beside(self._record_path, json.dumps(record))
            self._record = dict(record)

    def write(self, chunk: bytes) -> None:
        """Append; nothing is buffered, so that a kill loses nothing."""
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._sha.update(chunk)
        self.size += len(chunk)
        self._reporter.advance(self._file.path, len(chunk))

    def restart(self) -> None:
        """Throw the bytes away."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._forget()

    def publish(self, final: Path) -> os.stat_result:
        """Give the file its final name; it is on the disk before."""
        os.fsync(self._fd)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(final)
        fsync_directory(final.parent)
        self._record_path.unlink(missing_ok=True)
        return os.fstat(self._fd)

    def move_to(self, target: Path) -> None:
        """Move the bytes away and go on with an empty file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(target)
        os.close(self._fd)
        self._fd = self._open()
        self._forget()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def _forget(self) -> None:
        self.size, self.segments, self._sha = 0, 0, hashlib.sha256()
        self._reporter.begin(self._file.path, self._file.size, 0)

    def _adopt(self) -> None:
        """Take over what an earlier run left, if it can be the start of this file."""
        self._reporter.begin(self._file.path, self._file.size, 0)
        with suppress(OSError, ValueError, TypeError):
            record = dict(load_json(self._record_path.read_text(encoding="utf-8")))
            self._record = {key: text for key, text in record.items() if is_header_value(text)}
        left = os.fstat(self._fd).st_size
        if not left:
            return
        if left > self._file.size or self._record.get("sha256") != self._file.sha256:
            self.restart()
            return
        self.segments = 1
        while chunk := os.read(self._fd, _CHUNK):
            self._sha.update(chunk)
            self.size += len(chunk)
            self._reporter.advance(self._file.path, len(chunk))
        # Again, so that the rate is the download's and not the hashing's.
        self._reporter.begin(self._file.path, self._file.size, self.size)
        self._reporter.note(f"{self._file.path}: resumes behind {human_bytes(self.size)}")


def describe(head: bytes) -> str | None:
    """What a body is that is not the file: the two that servers really send, and nothing."""
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    return None if head else "an empty file"

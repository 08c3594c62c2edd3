"""What is in a model directory, compared with its manifest; hashing only what changed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fp8fleet.fetch.disk import write_beside
from fp8fleet.fetch.progress import Reporter
from fp8fleet.jsonfile import JsonError, parse_python_json, read_regular
from fp8fleet.manifest import INDEX, RESERVED, STAMP, Manifest, ManifestFile
from fp8fleet.outside import load_json
from fp8fleet.workers import workers

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that a check found."""

    code: Literal["missing", "not-a-file", "size", "digest", "unreadable", "extra"]
    severity: Literal["error", "warning"]
    file: str
    """Path relative to the model directory."""
    message: str
    remedy: str
    got: str | None = None
    """SHA256 of the wrong file, where it was computed."""


class Stamp:
    """What was verified and how it looked then, so that the next check reads metadata only.

    A file whose size, mtime, inode and expected digest are the recorded ones is not hashed again.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / STAMP
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):
            stored = load_json(self._path.read_text(encoding="utf-8")).get("files")
            self._files = {str(path): dict(entry) for path, entry in stored.items()}
        self._changed = False
        self.hashed = 0
        """Files that were read and are right."""

    def covers(self, file: ManifestFile, status: os.stat_result) -> bool:
        """Whether ``file`` was verified and looks as it did then."""
        return self._files.get(file.path) == _stamp_entry(file, status)

    def record(self, file: ManifestFile, status: os.stat_result) -> None:
        """Note that ``file``, looking as ``status``, has the right digest."""
        with self._lock:
            self._changed = True
            self.hashed += 1
            self._files[file.path] = _stamp_entry(file, status)

    def forget(self, file: ManifestFile) -> None:
        """Note that ``file`` is wrong although it may look as it did when it was right."""
        with self._lock:
            self._changed |= self._files.pop(file.path, None) is not None

    def save(self, manifest: Manifest) -> None:
        """Write the stamp if anything new was recorded; what is not the manifest's goes."""
        with self._lock:
            if not self._changed:
                return
            self._files = {
                file.path: self._files[file.path]
                for file in manifest.files
                if self._files.get(file.path, {}).get("sha256") == file.sha256
            }
            whole = len(self._files) == len(manifest.files)
            stored = {"manifest": manifest.digest if whole else None, "files": self._files}
            text = json.dumps(stored, indent=1)
            write_beside(self._path, text + "\n")
            self._changed = False


def _stamp_entry(file: ManifestFile, status: os.stat_result) -> dict[str, Any]:
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "sha256": file.sha256,
    }


class Verified(NamedTuple):
    """What a check of a directory tells."""

    findings: list[Finding]
    """What is wrong, errors first. Empty: whole, and nothing else is there."""
    hashed: int
    """Files that were read, the stamp not covering them, and are right."""


def verify(
    manifest: Manifest, directory: Path, full: bool = False, reporter: Reporter | None = None
) -> list[Finding]:
    """The findings of `check_directory`."""
    return check_directory(manifest, directory, full, reporter).findings


def check_directory(
    manifest: Manifest, directory: Path, full: bool = False, reporter: Reporter | None = None
) -> Verified:
    """Check a directory against its manifest.

    Files that the stamp covers are not read; what was hashed and is right enters the stamp, where
    the directory is writable.

    Args:
        full: hash every file, the stamp notwithstanding.
        reporter: shows the hashing; nothing is shown without one.
    """
    stamp = Stamp(directory)
    found = check_files(manifest, directory, stamp, full, reporter or Reporter())
    findings = [*found.values(), *_extra_files(manifest, directory)]
    # A check by another user, or on a read-only or full disk, is still a check.
    with suppress(OSError):
        stamp.save(manifest)
    findings.sort(key=lambda finding: (finding.severity != "error", finding.file))
    return Verified(findings, stamp.hashed)


def check_files(
    manifest: Manifest, directory: Path, stamp: Stamp, full: bool, reporter: Reporter
) -> dict[ManifestFile, Finding]:
    """Check every file on as many cores as this process may use; returns those that are wrong.

    One file is hashed by one core (SHA256 is serial), the largest first, so that no core is left
    with a large one at the end. Right ones that were hashed enter the stamp.
    """
    ordered = sorted(manifest.files, key=lambda file: -file.size)
    with workers(len(os.sched_getaffinity(0))) as pool:
        checks = [
            (file, pool.submit(_check_file, directory, file, stamp, full, reporter))
            for file in ordered
        ]
        results = [(file, check.result()) for file, check in checks]
    return {file: finding for file, finding in results if finding is not None}


def _check_file(
    directory: Path, file: ManifestFile, stamp: Stamp, full: bool, reporter: Reporter
) -> Finding | None:
    fetch_it = "run `fp8fleet fetch` again"
    path = directory / file.path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Finding("not-a-file", "error", file.path, "is not a regular file", "remove it")
        if status.st_size != file.size:
            message = f"has {status.st_size} bytes, expected {file.size}"
            return Finding("size", "error", file.path, message, fetch_it)
        if not full and stamp.covers(file, status):
            return None
        got = hash_file(path, file, reporter)
    except (FileNotFoundError, NotADirectoryError):
        return Finding("missing", "error", file.path, "is missing", fetch_it)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        return Finding("unreadable", "error", file.path, message, "check the disk and permissions")
    if got != file.sha256:
        stamp.forget(file)
        message = f"has sha256 {got}, expected {file.sha256}"
        return Finding("digest", "error", file.path, message, fetch_it, got)
    # The status from before the hashing: a change in the meantime shows at the next check.
    stamp.record(file, status)
    return None


def hash_file(path: Path, file: ManifestFile, reporter: Reporter) -> str:
    label = f"checking {file.path}"
    reporter.begin(label, file.size, 0)
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    outcome = "unreadable"
    try:
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                sha.update(buffer[:count])
                reporter.advance(label, count)
        outcome = "right" if sha.hexdigest() == file.sha256 else "wrong"
    finally:
        reporter.end(label, outcome)
    return sha.hexdigest()


def _extra_weights(directory: Path, path: str) -> Finding:
    """vLLM loads the shards that the index names or, without one, all (see `fp8fleet.checkpoint`).

    ``consolidated*.safetensors`` it may load in place of the others.
    """
    indexed = _indexed(directory)
    if indexed and path not in indexed and not path.startswith("consolidated"):
        message = f"is neither in the manifest nor in {INDEX}: it is not loaded"
        return Finding("extra", "warning", path, message, "remove it")
    message = "is not in the manifest, and the engine would load it"
    return Finding("extra", "error", path, message, "move it out of the directory")


def _indexed(directory: Path) -> set[str]:
    """The shards that the directory's index names; empty without an index that can be read."""
    try:
        index, _ = parse_python_json(read_regular(directory / INDEX))
        return {file for file in index["weight_map"].values() if isinstance(file, str)}
    except (OSError, JsonError, LookupError, TypeError, AttributeError):
        return set()


def _extra_files(manifest: Manifest, directory: Path) -> Iterator[Finding]:
    named = {file.path for file in manifest.files}
    unseen: list[OSError] = []
    for root, directories, files in os.walk(directory, onerror=unseen.append):
        if Path(root) == directory:
            directories[:] = [name for name in directories if name not in RESERVED]
        for name in directories:
            if (Path(root) / name).is_symlink():
                path = (Path(root) / name).relative_to(directory).as_posix()
                message = "is a symbolic link to a directory, which is not looked into"
                yield Finding(
                    "not-a-file", "error", path, message, "put the files themselves there"
                )
        for name in files:
            path = (Path(root) / name).relative_to(directory).as_posix()
            if path in named or path in RESERVED:
                continue
            if name.endswith(".safetensors"):
                yield _extra_weights(directory, path)
            else:
                message = "is not in the manifest"
                yield Finding("extra", "warning", path, message, "remove it if it is not wanted")
    for error in unseen:
        # A directory that is not there has no files: each of the manifest's is missing.
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            path = Path(error.filename).relative_to(directory).as_posix()
            message = f"cannot be listed: {error.strerror}"
            yield Finding("unreadable", "error", path, message, "check the disk and permissions")

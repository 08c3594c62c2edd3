"""Brings a manifest's files into a directory, each checked before it gets its name."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch.check import Stamp, check_file
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import Body, FileOrigin, Interrupted, Origin, Refused
from fp8fleet.fetch.partial import Partial, describe
from fp8fleet.fetch.progress import human_bytes
from fp8fleet.fetch.web import Bearer, HttpOrigin
from fp8fleet.manifest import (
    LOCK,
    PARTIAL,
    PARTIAL_ORIGIN,
    QUARANTINE,
    Manifest,
    ManifestFile,
    check_source,
)
from fp8fleet.secrets import SecretRef

_RESET_AFTER = 1 << 20
"""New bytes after which a source's failures are forgiven: a slow link may break many times."""


class _Stopped(Exception):
    """Another file failed for good, or the operator stopped the run."""


@dataclass(frozen=True)
class FetchResult:
    """What a fetch did."""

    fetched: tuple[str, ...]
    """Files that came new, relative paths."""
    kept: tuple[str, ...]
    """Files that were there and right."""
    bytes_received: int
    seconds: float


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Keep others from fetching into ``directory``. The kernel releases it when we die.

    Raises:
        CheckFailed: another process holds it, with its pid.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise CheckFailed(
                f"{directory}: process {holder or '(unknown)'} fetches into it:"
                " wait for its end or stop it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def fetch(
    manifest: Manifest,
    directory: Path,
    sources: Iterable[str] | None = None,
    options: FetchOptions | None = None,
) -> FetchResult:
    """Bring every file of ``manifest`` into ``directory``; what is there and right stays.

    A file is written below ``.partial/``, hashed as it streams, compared, fsynced and renamed.
    Wrong bytes go to ``.quarantine/``. Run again after a kill, it goes on where it stopped.

    Args:
        sources: base URLs in the order to try, in place of the manifest's.

    Raises:
        OperatorError: no source, a bad source, a missing CA bundle or token.
        CheckFailed: a file that no source has, a full disk, a directory that another one fills.
    """
    options = options or FetchOptions()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with directory_lock(directory):
            return _Fetch(manifest, directory, options).run(
                manifest.sources if sources is None else tuple(sources)
            )
    except OSError as error:
        raise CheckFailed(_disk_error(directory, error)) from None


class _Fetch:
    """One run over one directory, which it has for itself."""

    def __init__(self, manifest: Manifest, directory: Path, options: FetchOptions) -> None:
        self._manifest = manifest
        self._directory = directory
        self._options = options
        self._reporter = options.reporter
        self._stamp = Stamp(directory)
        self._stop = threading.Event()
        self._received = 0
        self._received_lock = threading.Lock()

    def run(self, sources: tuple[str, ...]) -> FetchResult:
        began = time.monotonic()
        missing = self._missing()
        self._stamp.save(self._manifest)
        if missing:
            self._check_space(missing)
            with requests.Session() as session:
                origins = _origins(sources, session, self._options)
                self._each(missing, lambda file: self._obtain(file, origins))
        self._stamp.save(self._manifest)
        # Every file has its name: what is left here belongs to none.
        for name in (PARTIAL, PARTIAL_ORIGIN):
            shutil.rmtree(self._directory / name, ignore_errors=True)
        fetched = {file.path for file in missing}
        kept = tuple(file.path for file in self._manifest.files if file.path not in fetched)
        seconds = time.monotonic() - began
        return FetchResult(tuple(sorted(fetched)), kept, self._received, seconds)

    def _each(self, files: list[ManifestFile], action: Callable[[ManifestFile], None]) -> None:
        """Run ``action`` on several files at once, large ones first; the first failure ends all."""
        ordered = sorted(files, key=lambda file: -file.size)
        with ThreadPoolExecutor(self._options.threads) as pool:
            futures = [pool.submit(action, file) for file in ordered]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _missing(self) -> list[ManifestFile]:
        """The files to fetch. One that is there and wrong loses its name at once."""
        missing: list[ManifestFile] = []

        def check(file: ManifestFile) -> None:
            finding = check_file(self._directory, file, self._stamp, False, self._reporter)
            if finding is None:
                return
            if finding.code in ("not-a-file", "unreadable"):
                raise CheckFailed(
                    f"{self._directory / file.path}: {finding.message}: {finding.remedy}"
                )
            if finding.code != "missing":
                self._reporter.note(f"{file.path}: {finding.message}: fetched again")
                target = self._quarantine_path(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                (self._directory / file.path).replace(target)
                self._note_quarantine(file, finding.message, "found in the directory")
            missing.append(file)

        self._each(list(self._manifest.files), check)
        return missing

    def _check_space(self, files: list[ManifestFile]) -> None:
        missing = sum(file.size - self._partial_bytes(file) for file in files)
        margin = self._options.margin_bytes
        free = shutil.disk_usage(self._directory).free
        if missing + margin > free:
            raise CheckFailed(
                f"{self._directory}: not enough space: {human_bytes(missing + margin)} needed"
                f" ({human_bytes(missing)} of files, {human_bytes(margin)} spare),"
                f" {human_bytes(free)} free: remove old models, engines or {QUARANTINE}/"
            )

    def _partial_bytes(self, file: ManifestFile) -> int:
        try:
            size = (self._directory / PARTIAL / file.path).stat().st_size
        except OSError:
            return 0
        return size if size <= file.size else 0

    def _obtain(self, file: ManifestFile, origins: list[Origin]) -> None:
        """Try the sources in order until one has the file."""
        self._raise_if_stopped()
        outcome = "not fetched"
        self._reporter.begin(file.path, file.size, 0)
        try:
            part = Partial(self._directory, file, self._reporter)
            try:
                self._download_and_publish(file, part, origins)
                outcome = "verified"
            finally:
                part.close()
        except OSError as error:
            raise CheckFailed(_disk_error(self._directory / file.path, error)) from None
        finally:
            self._reporter.end(file.path, outcome)

    def _download_and_publish(
        self, file: ManifestFile, part: Partial, origins: list[Origin]
    ) -> None:
        refusals: list[str] = []
        if part.size == file.size and part.digest != file.sha256:
            part.restart()
        for origin in origins:
            if part.size == file.size and part.digest == file.sha256:
                break
            try:
                self._download(file, part, origin)
                break
            except Refused as refusal:
                refusals.append(f"{origin.name}: {refusal}")
                self._reporter.note(f"{file.path}: {refusals[-1]}")
        else:
            raise CheckFailed(_no_source(file, refusals))
        self._stamp.record(file, part.publish(self._directory / file.path))
        self._stamp.save(self._manifest)

    def _download(self, file: ManifestFile, part: Partial, origin: Origin) -> None:
        """Fill ``part`` from one source until it is whole and right."""
        failures, best, from_zero = 0, part.size, False
        while True:
            where = origin.name
            try:
                where = self._stream(file, part, origin)
            except Interrupted as error:
                # Broken behind the last byte: nothing is missing, the digest decides.
                if part.size < file.size:
                    if part.size >= best + _RESET_AFTER:
                        failures, best = 0, part.size
                    failures += 1
                    self._pause_or_refuse(file, origin, error, failures)
                    continue
            if part.digest == file.sha256:
                return
            if part.segments == 1 or from_zero:
                raise Refused(self._quarantine(file, part, where))
            # Bytes of several answers: the seam may be wrong, not the source.
            from_zero = True
            self._reporter.note(f"{file.path}: the resumed file is wrong: from zero once more")
            part.restart()

    def _pause_or_refuse(
        self, file: ManifestFile, origin: Origin, error: Interrupted, failures: int
    ) -> None:
        if failures > self._options.retries:
            raise Refused(f"{error} ({failures} tries)")
        longest = self._options.longest_backoff_s
        pause = min(longest, self._options.backoff_s * 2 ** (failures - 1))
        if error.retry_after_s is not None:
            pause = min(longest, max(pause, error.retry_after_s))
        self._reporter.note(f"{file.path}: {origin.name}: {error}: next try in {pause:g} s")
        (self._options.sleep or self._stop.wait)(pause)
        self._raise_if_stopped()

    def _stream(self, file: ManifestFile, part: Partial, origin: Origin) -> str:
        """Append one answer of ``origin`` to ``part``; returns the address that answered."""
        with origin.open(file.path, part.size, part.validator_for(origin)) as body:
            chunk = next(body.chunks, b"")
            # Checked before the bytes of earlier answers are given up for this one.
            if body.total not in (None, file.size):
                raise Refused(_wrong_size(chunk, body.total or 0, file.size, body.where))
            if body.start != part.size:
                if describe(chunk) is not None:
                    raise Refused(f"{describe(chunk)} instead of the file, from {body.where}")
                part.restart()
            part.note_origin(origin, body.validator)
            while chunk:
                self._raise_if_stopped()
                if part.size + len(chunk) > file.size:
                    what = describe(part.head() or chunk) or "more bytes"
                    part.restart()
                    raise Refused(f"sends {what} than the {file.size} expected")
                part.write(chunk)
                self._count(len(chunk))
                chunk = next(body.chunks, b"")
        if part.size < file.size:
            self._refuse_short(file, part, body)
        return body.where

    @staticmethod
    def _refuse_short(file: ManifestFile, part: Partial, body: Body) -> None:
        what = describe(part.head())
        if what is not None:
            size = part.size
            part.restart()
            raise Refused(_wrong_size(b"", size, file.size, body.where, what))
        raise Interrupted(f"truncated: ended after {part.size} of {file.size} bytes")

    def _quarantine(self, file: ManifestFile, part: Partial, where: str) -> str:
        """Move wrong bytes aside; returns what to tell."""
        got, what = part.digest, describe(part.head())
        part.move_to(self._quarantine_path(file))
        self._note_quarantine(file, f"has sha256 {got}, expected {file.sha256}", where)
        kind = f" ({what})" if what else ""
        return f"wrong bytes{kind}: sha256 {got}, from {where}, kept in {QUARANTINE}/"

    def _quarantine_path(self, file: ManifestFile) -> Path:
        """The newest bad copy only: more of them would fill the disk."""
        return self._directory / QUARANTINE / "files" / file.path

    def _note_quarantine(self, file: ManifestFile, what: str, source: str) -> None:
        note = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "path": file.path,
            "what": what,
            "expected": file.sha256,
            "source": source,
        }
        with (self._directory / QUARANTINE / "notes.jsonl").open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")

    def _count(self, received: int) -> None:
        with self._received_lock:
            self._received += received

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _origins(
    sources: tuple[str, ...], session: requests.Session, options: FetchOptions
) -> list[Origin]:
    if not sources:
        raise OperatorError("no source to fetch from: give --source or `sources` in the manifest")
    if options.ca_bundle is not None and not options.ca_bundle.is_file():
        raise OperatorError(f"CA bundle {options.ca_bundle}: no such file")
    token = None
    if options.token_file is not None:
        token = SecretRef("file", str(options.token_file)).resolve()
    session.auth = Bearer(token)
    session.max_redirects = 10
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=options.threads)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return [_origin(source, session, options) for source in sources]


def _origin(source: str, session: requests.Session, options: FetchOptions) -> Origin:
    try:
        base = check_source(source)
    except ValueError as error:
        raise OperatorError(f"source {error}") from None
    if base.startswith("file:"):
        return FileOrigin(base)
    return HttpOrigin(base, session, options)


def _wrong_size(head: bytes, got: int, expected: int, where: str, what: str | None = None) -> str:
    kind = what or (describe(head) if got else "an empty file")
    if kind is None:
        kind = "a truncated file" if got < expected else "a larger file"
    return f"{kind}: {got} bytes, expected {expected}, from {where}"


def _no_source(file: ManifestFile, refusals: list[str]) -> str:
    return (
        f"{file.path}: no source has the expected file ({file.size} bytes,"
        f" sha256 {file.sha256}): {'; '.join(refusals)}."
        " Correct what each source says here or tell its publisher, then run again"
    )


def _disk_error(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: the disk is full: free some space and run again,"
            " it goes on with what has arrived"
        )
    name = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return f"{path}: {error.strerror or error}{name}"

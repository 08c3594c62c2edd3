"""Brings a manifest's files into a directory, each checked before it gets its name."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch.check import check_files
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import Body, Interrupted, Origin, Refused
from fp8fleet.fetch.pace import Retries
from fp8fleet.fetch.partial import Partial, describe
from fp8fleet.fetch.progress import human_bytes
from fp8fleet.fetch.run import Run
from fp8fleet.manifest import LOCK, PARTIAL, PARTIAL_ORIGIN, QUARANTINE, Manifest, ManifestFile
from fp8fleet.workers import workers

_RESET_AFTER = 1 << 20
"""New bytes after which a source's failures are forgiven: a slow link may break many times."""


@dataclass(frozen=True)
class FetchResult:
    """What a fetch did."""

    fetched: tuple[str, ...]
    """Files that came new, relative paths."""
    kept: tuple[str, ...]
    """Files that were there and right."""
    bytes_received: int
    """From sources."""
    bytes_from_peers: int
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
        OperatorError: no source, a bad source, a missing CA bundle or token, a file's path in place
            of the directory's.
        CheckFailed: a file that no source has, a full disk, a directory that another one fills.
    """
    options = options or FetchOptions()
    try:
        if directory.exists() and not directory.is_dir():
            raise OperatorError(f"{directory}: is no directory, expected the model's")
        directory.mkdir(parents=True, exist_ok=True)
        with directory_lock(directory):
            return _Fetch(Run(manifest, directory, options)).run(
                manifest.sources if sources is None else tuple(sources)
            )
    except OSError as error:
        raise CheckFailed(disk_error(directory, error)) from None


class _Fetch:
    """Obtains the files of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._manifest = run.manifest
        self._directory = run.directory
        self._options = run.options
        self._reporter = run.reporter

    def run(self, sources: tuple[str, ...]) -> FetchResult:
        began = time.monotonic()
        missing = self._missing()
        self._run.stamp.save(self._manifest)
        if missing:
            self._check_space(missing)
            self._obtain_all(missing, sources)
        self._run.stamp.save(self._manifest)
        # Every file has its name: what is left here belongs to none.
        for name in (PARTIAL, PARTIAL_ORIGIN):
            shutil.rmtree(self._directory / name, ignore_errors=True)
        fetched = {file.path for file in missing}
        kept = tuple(file.path for file in self._manifest.files if file.path not in fetched)
        run, seconds = self._run, time.monotonic() - began
        return FetchResult(tuple(sorted(fetched)), kept, run.received, run.from_peers, seconds)

    def _obtain_all(self, missing: list[ManifestFile], sources: tuple[str, ...]) -> None:
        # Here, because a run that finds everything in place needs neither of them.
        from fp8fleet.fetch.sources import open_sources

        with open_sources(sources, self._options) as origins:
            left = missing
            if self._options.fan_out is not None:
                from fp8fleet.fetch.swarm import fetch_with_peers

                left = fetch_with_peers(self._run, missing, origins)
            self._each(left, lambda file: self._obtain(file, origins))

    def _each(self, files: list[ManifestFile], action: Callable[[ManifestFile], None]) -> None:
        """Run ``action`` on several files at once, large ones first; the first failure ends all."""
        ordered = sorted(files, key=lambda file: -file.size)
        with workers(self._options.threads) as pool:
            futures = [pool.submit(action, file) for file in ordered]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._run.stop.set()
                raise

    def _missing(self) -> list[ManifestFile]:
        """The files to fetch. One that is there and wrong loses its name at once."""
        run = self._run
        found = check_files(self._manifest, self._directory, run.stamp, False, run.reporter)
        for file, finding in found.items():
            self._refuse_links(file)
            path = self._directory / file.path
            if finding.code in ("not-a-file", "unreadable"):
                raise CheckFailed(f"{path}: {finding.message}: {finding.remedy}")
            if finding.code != "missing":
                run.reporter.note(f"{file.path}: {finding.message}: fetched again")
                path.replace(run.quarantine.path(file))
                run.quarantine.note(file, finding.message, finding.got, "found in the directory")
        return list(found)

    def _refuse_links(self, file: ManifestFile) -> None:
        """Nothing of ``file`` may be written or moved through a link, out of the directory."""
        for name in ("", PARTIAL, PARTIAL_ORIGIN, f"{QUARANTINE}/files"):
            for parent in Path(name, file.path).parents:
                link = self._directory / parent
                if link != self._directory and link.is_symlink():
                    raise CheckFailed(
                        f"{link}: is a symbolic link, out of which nothing may be written:"
                        " remove it, and put the files themselves there"
                    )

    def _check_space(self, files: list[ManifestFile]) -> None:
        """What the disk holds already, older models among it, stays: only the rest counts."""
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
            status = (self._directory / PARTIAL / file.path).stat()
        except OSError:
            return 0
        # With peers the pieces come in any order: the file has holes.
        size = min(status.st_size, status.st_blocks * 512)
        return size if size <= file.size else 0

    def _obtain(self, file: ManifestFile, origins: list[Origin]) -> None:
        """Try the sources in order until one has the file."""
        self._run.raise_if_stopped()
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
            raise CheckFailed(disk_error(self._directory / file.path, error)) from None
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
        self._run.stamp.record(file, part.publish(self._directory / file.path))
        self._run.stamp.save(self._manifest)

    def _download(self, file: ManifestFile, part: Partial, origin: Origin) -> None:
        """Fill ``part`` from one source until it is whole and right."""
        retries = Retries(
            self._options,
            self._run.sleep,
            lambda line: self._reporter.note(f"{file.path}: {origin.name}: {line}"),
        )
        best, from_zero = part.size, False
        while True:
            where = origin.name
            try:
                where = self._stream(file, part, origin)
            except Interrupted as error:
                # Broken behind the last byte: nothing is missing, the digest decides.
                if part.size < file.size:
                    if part.size >= best + _RESET_AFTER:
                        retries.forgive()
                        best = part.size
                    retries.failed(error)
                    continue
            if part.digest == file.sha256:
                return
            if part.segments == 1 or from_zero:
                raise Refused(self._quarantine(file, part, where))
            # Bytes of several answers: the seam may be wrong, not the source.
            from_zero = True
            self._reporter.note(f"{file.path}: the resumed file is wrong: from zero once more")
            part.restart()

    def _stream(self, file: ManifestFile, part: Partial, origin: Origin) -> str:
        """Append one answer of ``origin`` to ``part``; returns the address that answered."""
        with closing(origin.open(file.path, part.size, part.validator_for(origin))) as body:
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
                self._run.raise_if_stopped()
                if part.size + len(chunk) > file.size:
                    what = describe(part.head() or chunk) or "more bytes"
                    part.restart()
                    raise Refused(f"sends {what} than the {file.size} expected")
                part.write(chunk)
                self._run.count(len(chunk))
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
        part.move_to(self._run.quarantine.path(file))
        message = f"has sha256 {got}, expected {file.sha256}"
        self._run.quarantine.note(file, message, got, where)
        kind = f" ({what})" if what else ""
        return f"wrong bytes{kind}: sha256 {got}, from {where}, kept in {QUARANTINE}/"


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


def disk_error(path: Path, error: OSError) -> str:
    """What to tell of a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: the disk is full: free some space and run again,"
            " it goes on with what has arrived"
        )
    name = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return f"{path}: {error.strerror or error}{name}"

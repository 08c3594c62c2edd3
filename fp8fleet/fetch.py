"""Brings a manifest's files into a directory, each checked before it gets its name."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import requests
import urllib3

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.manifest import (
    LOCK,
    PARTIAL,
    PARTIAL_ORIGIN,
    QUARANTINE,
    RESERVED,
    STAMP,
    Manifest,
    ManifestFile,
    check_source,
)
from fp8fleet.secrets import SecretRef

_CHUNK = 1 << 20
_RESET_AFTER = 1 << 20
"""New bytes after which a source's failures are forgiven: a slow link may break many times."""


# --- progress -----------------------------------------------------------------------------------


def human_bytes(count: float) -> str:
    """``4900000000`` as ``4.9 GB`` (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Reporter:
    """Is told what happens, from several threads. This one shows nothing."""

    def begin(self, label: str, size: int, done: int) -> None:
        """``label`` has ``done`` of ``size`` bytes; called again when it starts over."""

    def advance(self, label: str, count: int) -> None:
        """``count`` more bytes of ``label`` are done."""

    def end(self, label: str, outcome: str) -> None:
        """``label`` ended: ``verified``, or why not."""

    def note(self, line: str) -> None:
        """Something that an operator should see."""


@dataclass
class _Shown:
    """What the plain reporter knows of one file; bytes and monotonic seconds."""

    size: int
    done: int
    begun: float
    begun_done: int
    last: float
    last_done: int


class PlainReporter(Reporter):
    """One line a running file every ``interval_s`` seconds and at each end, flushed at once.

    For pipes and SSH, where a progress bar would be noise and silence a defect.
    """

    def __init__(self, stream: TextIO, interval_s: float = 10.0) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._files: dict[str, _Shown] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> PlainReporter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, label: str, size: int, done: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._files[label] = _Shown(size, done, now, done, now, done)

    def advance(self, label: str, count: int) -> None:
        with self._lock:
            self._files[label].done += count

    def end(self, label: str, outcome: str) -> None:
        with self._lock:
            shown = self._files.pop(label)
            rate = _rate(shown.done - shown.begun_done, time.monotonic() - shown.begun)
            self._print(_progress_line(label, shown, rate) + f", {outcome}")

    def note(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def _tick(self) -> None:
        while not self._stop.wait(self._interval_s):
            now = time.monotonic()
            with self._lock:
                for label, shown in self._files.items():
                    rate = _rate(shown.done - shown.last_done, now - shown.last)
                    self._print(_progress_line(label, shown, rate))
                    shown.last, shown.last_done = now, shown.done

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _rate(count: int, seconds: float) -> str:
    return f"{human_bytes(count / max(seconds, 1e-3))}/s"


def _progress_line(label: str, shown: _Shown, rate: str) -> str:
    return f"{label} {human_bytes(shown.done)} of {human_bytes(shown.size)} ({rate})"


class RichReporter(Reporter):
    """A progress bar a file, for terminals."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def begin(self, label: str, size: int, done: int) -> None:
        if label in self._tasks:
            self._progress.remove_task(self._tasks[label])
        self._tasks[label] = self._progress.add_task(label, total=size, completed=done)

    def advance(self, label: str, count: int) -> None:
        self._progress.advance(self._tasks[label], count)

    def end(self, label: str, outcome: str) -> None:
        self._progress.remove_task(self._tasks.pop(label))
        self.note(f"{label} {outcome}")

    def note(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def standard_reporter() -> Iterator[Reporter]:
    """Progress bars when stdout is a terminal, else plain lines."""
    with RichReporter() if sys.stdout.isatty() else PlainReporter(sys.stdout) as reporter:
        yield reporter


# --- what is in a directory ---------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing that a check found."""

    code: Literal["missing", "not-a-file", "size", "digest", "unreadable", "extra"]
    severity: Literal["error", "warning"]
    file: str
    """Path relative to the model directory."""
    message: str
    remedy: str


class Stamp:
    """What was verified and how it looked then, so that the next check reads metadata only.

    A file whose size, mtime, inode and expected digest are the recorded ones is not hashed again.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / STAMP
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):
            stored = json.loads(self._path.read_text(encoding="utf-8")).get("files")
            self._files = {str(path): dict(entry) for path, entry in stored.items()}
        self._changed = False

    def covers(self, file: ManifestFile, status: os.stat_result) -> bool:
        """Whether ``file`` was verified and looks as it did then."""
        return self._files.get(file.path) == _stamp_entry(file, status)

    def record(self, file: ManifestFile, status: os.stat_result) -> None:
        """Note that ``file``, looking as ``status``, has the right digest."""
        with self._lock:
            self._changed = True
            self._files[file.path] = _stamp_entry(file, status)

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
            _write_beside(self._path, text + "\n")
            self._changed = False


def _stamp_entry(file: ManifestFile, status: os.stat_result) -> dict[str, Any]:
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "sha256": file.sha256,
    }


def verify(
    manifest: Manifest, directory: Path, full: bool = False, reporter: Reporter | None = None
) -> list[Finding]:
    """Check a directory against its manifest.

    Files that the stamp covers are not read; what was hashed and is right enters the stamp, where
    the directory is writable.

    Args:
        full: hash every file, the stamp notwithstanding.
        reporter: shows the hashing; nothing is shown without one.

    Returns:
        What is wrong, errors first. Empty: whole, and nothing else is there.
    """
    stamp = Stamp(directory)
    shown = reporter or Reporter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        checks = pool.map(
            lambda file: _check_file(directory, file, stamp, full, shown), manifest.files
        )
        findings = [finding for finding in checks if finding is not None]
    findings += _extra_files(manifest, directory)
    # A check by another user, or on a read-only or full disk, is still a check.
    with suppress(OSError):
        stamp.save(manifest)
    return sorted(findings, key=lambda finding: (finding.severity != "error", finding.file))


def _check_file(
    directory: Path, file: ManifestFile, stamp: Stamp, full: bool, reporter: Reporter
) -> Finding | None:
    """Check one file; a right one that was hashed enters the stamp."""
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
        got = _hash_file(path, file, reporter)
    except (FileNotFoundError, NotADirectoryError):
        return Finding("missing", "error", file.path, "is missing", fetch_it)
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        return Finding("unreadable", "error", file.path, message, "check the disk and permissions")
    if got != file.sha256:
        message = f"has sha256 {got}, expected {file.sha256}"
        return Finding("digest", "error", file.path, message, fetch_it)
    # The status from before the hashing: a change in the meantime shows at the next check.
    stamp.record(file, status)
    return None


def _hash_file(path: Path, file: ManifestFile, reporter: Reporter) -> str:
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


def _extra_files(manifest: Manifest, directory: Path) -> Iterator[Finding]:
    named = {file.path for file in manifest.files}
    for root, directories, files in os.walk(directory):
        if Path(root) == directory:
            directories[:] = [name for name in directories if name not in RESERVED]
        for name in files:
            path = (Path(root) / name).relative_to(directory).as_posix()
            if path in named or path in RESERVED:
                continue
            if name.endswith(".safetensors"):
                message = "is not in the manifest, and the engine would load it"
                yield Finding("extra", "error", path, message, "move it out of the directory")
            else:
                message = "is not in the manifest"
                yield Finding("extra", "warning", path, message, "remove it if it is not wanted")


# --- where bytes come from ----------------------------------------------------------------------


class _Refused(Exception):
    """A source does not have the right file; another one may."""


class _Interrupted(Exception):
    """A source failed for the moment; the same one may work later."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class _Stopped(Exception):
    """Another file failed for good, or the operator stopped the run."""


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
            _Refused: the origin does not have it.
            _Interrupted: it may have it later.
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
            raise _Refused("no such file") from None
        except PermissionError:
            raise _Refused("may not be read: check the permissions") from None
        except OSError as error:
            raise _Interrupted(f"cannot be opened: {error.strerror}") from None
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
            raise _Interrupted(f"cannot be read: {error.strerror}") from None


class HttpOrigin:
    """A web server, with byte ranges where it has them."""

    def __init__(self, base: str, session: requests.Session, options: FetchOptions) -> None:
        self.name = base
        self._session = session
        self._options = options

    def open(self, path: str, offset: int, validator: str | None) -> Body:
        """See `Origin.open`."""
        # Compressed answers have other offsets than the file.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        response = self._get(f"{self.name}/{quote(path)}", headers)
        try:
            _raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise _Refused("a compressed answer, though none was asked for")
            start, total = 0, _integer(response.headers.get("Content-Length"))
            if response.status_code == 206 and _continues(response, offset, validator):
                start, total = offset, _content_range(response)[1]
            elif response.status_code != 200:
                return self._open_from_zero(path, offset, response)
        except BaseException:
            response.close()
            raise
        where = _without_query(response.url)
        return Body(
            where, start, total, _validator(response), self._chunks(response), response.close
        )

    def _open_from_zero(self, path: str, offset: int, response: requests.Response) -> Body:
        """The range was not answered, or with another range or version: ask for all."""
        if not offset:
            raise _Refused(f"{response.status_code} {response.reason} to a plain request")
        response.close()
        return self.open(path, 0, None)

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        options = self._options
        proxies = {"http": options.proxy, "https": options.proxy} if options.proxy else None
        try:
            return self._session.get(
                url,
                headers=headers,
                stream=True,
                timeout=(options.connect_timeout_s, options.stall_s),
                proxies=proxies,
                # Given with each request: a session's own setting loses against the environment.
                verify=str(options.ca_bundle) if options.ca_bundle else True,
            )
        except requests.exceptions.SSLError as error:
            why = f"TLS: {_root_cause(error)}; a site's own authority needs --ca-bundle"
            raise _Refused(why) from None
        except requests.exceptions.TooManyRedirects:
            raise _Refused("redirects without end") from None
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise _Refused(f"redirects to what is no web address: {error}") from None
        except requests.exceptions.RequestException as error:
            raise _Interrupted(_root_cause(error)) from None

    def _chunks(self, response: requests.Response) -> Iterator[bytes]:
        """The body as it arrives; a silent or a trickling server is cut off."""
        stall_s, least = self._options.stall_s, self._options.least_bytes_per_s
        began, count = time.monotonic(), 0
        try:
            while chunk := response.raw.read1(_CHUNK, decode_content=False):
                yield chunk
                count += len(chunk)
                elapsed = time.monotonic() - began
                if elapsed >= stall_s:
                    if count < least * elapsed:
                        raise _Interrupted(f"stalled: {count} bytes in {elapsed:.0f} s")
                    began, count = time.monotonic(), 0
        except urllib3.exceptions.ReadTimeoutError:
            raise _Interrupted(f"stalled: no byte for {stall_s:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _Interrupted(f"connection broken: {_root_cause(error)}") from None


def _raise_for_status(response: requests.Response) -> None:
    status = response.status_code
    said = f"{status} {response.reason}".strip()
    if status in (200, 206, 416):
        return
    if status in (408, 425, 429) or status >= 500:
        raise _Interrupted(said, _retry_after(response))
    if status in (401, 403, 407):
        raise _Refused(f"{said}: check the token file and the proxy's login")
    raise _Refused(said)


def _retry_after(response: requests.Response) -> float | None:
    seconds = _integer(response.headers.get("Retry-After"))
    return None if seconds is None else float(seconds)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """First byte and whole size of ``Content-Range: bytes FIRST-LAST/SIZE`` (RFC 9110, 14.4)."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, size = rest.partition("/")
    return (_integer(span.split("-")[0]) if unit == "bytes" else None), _integer(size)


def _continues(response: requests.Response, offset: int, validator: str | None) -> bool:
    """Whether a 206 answer is the range and the version that were asked for."""
    now = _validator(response)
    same_version = validator is None or now is None or now == validator
    return same_version and _content_range(response)[0] == offset


def _validator(response: requests.Response) -> str | None:
    """What If-Range may name: a strong ETag, else the date (RFC 9110, 13.1.5)."""
    etag = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return etag
    return response.headers.get("Last-Modified")


def _without_query(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def _root_cause(error: BaseException) -> str:
    """The innermost reason of a stack of wrapped errors, on one line."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or seen.__cause__ or next(iter(seen.args), None)
        if not isinstance(inner, BaseException):
            break
        seen = inner
    if isinstance(seen, ssl.SSLError):
        return getattr(seen, "verify_message", "") or str(seen.reason or seen)
    text = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
    return " ".join(text.split()) or type(seen).__name__


class _Bearer(requests.auth.AuthBase):
    """The token, or nothing: either way requests then leaves ~/.netrc alone."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


# --- a file on its way --------------------------------------------------------------------------


class _Partial:
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
            _write_beside(self._record_path, json.dumps(record))
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
        _fsync_directory(final.parent)
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
            self._record = dict(json.loads(self._record_path.read_text(encoding="utf-8")))
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


def _write_beside(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(head: bytes) -> str | None:
    """What a body is that is not the file: the two that servers really send, and nothing."""
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    return None if head else "an empty file"


# --- fetch --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchOptions:
    """How to fetch."""

    ca_bundle: Path | None = None
    """PEM file of the authorities to trust; None: the machine's own."""
    proxy: str | None = None
    """URL of the proxy; None: what the environment says."""
    token_file: Path | None = None
    """0600 file with the bearer token, sent to every web source but not to where it redirects."""
    threads: int = 4
    retries: int = 5
    """Failures of one source in a row that are tried again."""
    backoff_s: float = 1.0
    """Pause after the first failure; doubles with each, up to ``longest_backoff_s``."""
    longest_backoff_s: float = 60.0
    connect_timeout_s: float = 10.0
    stall_s: float = 30.0
    """Silence, or a rate below ``least_bytes_per_s``, that counts as a broken connection."""
    least_bytes_per_s: float = 1024.0
    margin_bytes: int = 1 << 30
    """Bytes that must stay free on the disk."""
    sleep: Callable[[float], object] | None = None
    """Pauses between tries; None: a wait that the end of the run interrupts."""
    reporter: Reporter = field(default_factory=Reporter)


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
            finding = _check_file(self._directory, file, self._stamp, False, self._reporter)
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
            part = _Partial(self._directory, file, self._reporter)
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
        self, file: ManifestFile, part: _Partial, origins: list[Origin]
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
            except _Refused as refusal:
                refusals.append(f"{origin.name}: {refusal}")
                self._reporter.note(f"{file.path}: {refusals[-1]}")
        else:
            raise CheckFailed(_no_source(file, refusals))
        self._stamp.record(file, part.publish(self._directory / file.path))
        self._stamp.save(self._manifest)

    def _download(self, file: ManifestFile, part: _Partial, origin: Origin) -> None:
        """Fill ``part`` from one source until it is whole and right."""
        failures, best, from_zero = 0, part.size, False
        while True:
            where = origin.name
            try:
                where = self._stream(file, part, origin)
            except _Interrupted as error:
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
                raise _Refused(self._quarantine(file, part, where))
            # Bytes of several answers: the seam may be wrong, not the source.
            from_zero = True
            self._reporter.note(f"{file.path}: the resumed file is wrong: from zero once more")
            part.restart()

    def _pause_or_refuse(
        self, file: ManifestFile, origin: Origin, error: _Interrupted, failures: int
    ) -> None:
        if failures > self._options.retries:
            raise _Refused(f"{error} ({failures} tries)")
        longest = self._options.longest_backoff_s
        pause = min(longest, self._options.backoff_s * 2 ** (failures - 1))
        if error.retry_after_s is not None:
            pause = min(longest, max(pause, error.retry_after_s))
        self._reporter.note(f"{file.path}: {origin.name}: {error}: next try in {pause:g} s")
        (self._options.sleep or self._stop.wait)(pause)
        self._raise_if_stopped()

    def _stream(self, file: ManifestFile, part: _Partial, origin: Origin) -> str:
        """Append one answer of ``origin`` to ``part``; returns the address that answered."""
        with origin.open(file.path, part.size, part.validator_for(origin)) as body:
            chunk = next(body.chunks, b"")
            # Checked before the bytes of earlier answers are given up for this one.
            if body.total not in (None, file.size):
                raise _Refused(_wrong_size(chunk, body.total or 0, file.size, body.where))
            if body.start != part.size:
                if _describe(chunk) is not None:
                    raise _Refused(f"{_describe(chunk)} instead of the file, from {body.where}")
                part.restart()
            part.note_origin(origin, body.validator)
            while chunk:
                self._raise_if_stopped()
                if part.size + len(chunk) > file.size:
                    what = _describe(part.head() or chunk) or "more bytes"
                    part.restart()
                    raise _Refused(f"sends {what} than the {file.size} expected")
                part.write(chunk)
                self._count(len(chunk))
                chunk = next(body.chunks, b"")
        if part.size < file.size:
            self._refuse_short(file, part, body)
        return body.where

    @staticmethod
    def _refuse_short(file: ManifestFile, part: _Partial, body: Body) -> None:
        what = _describe(part.head())
        if what is not None:
            size = part.size
            part.restart()
            raise _Refused(_wrong_size(b"", size, file.size, body.where, what))
        raise _Interrupted(f"truncated: ended after {part.size} of {file.size} bytes")

    def _quarantine(self, file: ManifestFile, part: _Partial, where: str) -> str:
        """Move wrong bytes aside; returns what to tell."""
        got, what = part.digest, _describe(part.head())
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
    session.auth = _Bearer(token)
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
    kind = what or (_describe(head) if got else "an empty file")
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

"""Makes a manifest, and what is known of the checkpoint, without a host: models/NAME/."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from fp8fleet import hub
from fp8fleet.checkpoint import Checkpoint, inspect_directory, inspect_known
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch import Reporter
from fp8fleet.findings import Finding
from fp8fleet.headers import HEADERS, Header, header_from, headers_text
from fp8fleet.manifest import (
    INDEX,
    TORRENT,
    Manifest,
    ManifestFile,
    check_component,
    check_path,
    check_source,
    load_manifest,
    manifest_text,
)
from fp8fleet.outside import load_json
from fp8fleet.quantization import quantization_name
from fp8fleet.sums import parse_sums
from fp8fleet.tokens import token_origin
from fp8fleet.web import NoRanges, Web
from fp8fleet.workers import workers

MANIFEST = "manifest.toml"
CONFIG = "config.json"
STORED = (CONFIG, "generation_config.json")
"""Files of the model that are stored beside the manifest."""
MODELOPT = "hf_quant_config.json"
READ = (*STORED, INDEX, MODELOPT)
"""Files of the model whose content is needed, to store or to inspect it."""

INCLUDED = (
    "*.safetensors",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
    "tokenizer*",
)
"""What an engine reads: weights, configuration, tokenizer."""
LEFT_OUT = (
    ".*",
    "*/.*",
    "*.lock",
    "README*",
    "original/*",
    "*.pth",
    "*.py",
    "*.bin.index.json",
    HEADERS,
)
"""Left out although a pattern above may match: rubbish, pages, weights a second time, code, and
what this module itself writes beside a model's files."""

_CHUNK = 1 << 20
_MAX_READ = 64 << 20
_WEB_THREADS = 8
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class CreateOptions:
    """What to make a manifest of; exactly one of directory, sums, hub and modelscope leads."""

    name: str
    models: Path = Path("models")
    """The folder in which NAME/ is written."""
    directory: Path | None = None
    """Holds the files; with ``sums``, they are compared with the list."""
    sums: str | None = None
    """A SHA256SUMS file or its URL."""
    base: str | None = None
    """URL under which the files of ``sums`` are."""
    hub: str | None = None
    """ORG/MODEL on Hugging Face or the mirror in HF_ENDPOINT."""
    modelscope: str | None = None
    """ORG/MODEL on ModelScope."""
    revision: str | None = None
    """With a hub: branch, tag or commit. Else: the manifest's revision."""
    sources: tuple[str, ...] = ()
    """Base URLs in front of the hub's or of ``base``."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    token: str | None = None
    """Bearer token for the hub or for ``sums`` and ``base``."""
    token_for: str | None = None
    """URL on the host that gets the token; None: the only one that is asked, by https."""
    force: bool = False
    """Write over a manifest that exists."""


@dataclass(frozen=True)
class Created:
    """What was written."""

    path: Path
    manifest: Manifest
    has_headers: bool
    notes: tuple[str, ...]
    """What an operator should know."""


class NotServable(CheckFailed):
    """The files are as they were listed, but a host's inspection would refuse them."""

    def __init__(self, where: str, findings: Sequence[Finding]) -> None:
        errors = sum(finding.severity == "error" for finding in findings)
        super().__init__(
            f"{where}: {errors} error{'s' if errors > 1 else ''}: not to be served, so no manifest"
            " is written"
        )
        self.findings = tuple(findings)
        """Errors first, and warnings."""


@dataclass(frozen=True)
class _Listed:
    """A file and what its list says about it."""

    path: str
    size: int | None = None
    sha256: str | None = None
    blob_sha1: str | None = None


class _Place(Protocol):
    """Where the files are while the manifest is made."""

    threads: int
    near: bool
    """Whether every file is read and hashed, although its list may tell the digest."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def read_range(self, path: str, start: int, count: int) -> bytes:
        """Some bytes of a file; may raise `NoRanges`."""

    def stream(self, path: str, size: int) -> Iterator[bytes]:
        """A file's bytes, with progress."""

    def where(self, path: str) -> str:
        """Names a file in errors."""


@dataclass(frozen=True)
class _Found:
    """What a source of manifests found."""

    place: _Place
    listed: tuple[_Listed, ...]
    sources: tuple[str, ...]
    revision: str | None
    """None: of the content."""
    origin: str
    """For the manifest's comment."""
    where: str
    """Names the source in errors."""


def create_manifest(options: CreateOptions, reporter: Reporter) -> Created:
    """Make models/NAME/ with manifest.toml, config.json, generation_config.json and headers.json.

    Nothing is written before everything is known, and manifest.toml last. The same files give the
    same bytes.

    Raises:
        OperatorError: an input that cannot mean anything, or a manifest that exists.
        NotServable: files that a host's inspection would refuse.
        CheckFailed: a source that fails, or files that contradict their list.
    """
    folder = _folder(options)
    found = _find(options, reporter)
    notes: list[str] = []
    files = _selected(options, found, notes)
    reporter.note(f"{found.where}: {len(files)} files")
    settled = _parallel(found.place.threads, lambda file: _settle(found.place, file), files)
    manifest_files = [file for file, _ in settled]
    read = {file.path: content for file, content in settled if content is not None}
    _check_index(found.place, read, manifest_files)
    config = _json_object(found.place, read, CONFIG)
    quantization: str | None = quantization_name(config)
    if quantization is not None and not quantization.isprintable():
        raise CheckFailed(f"{found.place.where(CONFIG)}: quantization {quantization!r}: no name")
    place = _Noted(found.place)
    headers = _headers(place, manifest_files, reporter, notes)
    if headers is None:
        inspected = inspect_known(config, {})
        notes.append("only config.json was inspected: hosts will inspect the shards")
    else:
        inspected = _inspect(place, manifest_files, read)
        quantization = inspected.quantization
    _judge(inspected, found.where, notes)
    manifest = Manifest(
        name=options.name,
        revision=found.revision or _content_revision(manifest_files),
        quantization=quantization,
        sources=found.sources,
        files=tuple(manifest_files),
    )
    comment = f"Written by `fp8fleet manifest create` {found.origin}."
    texts = {path: read[path] for path in STORED if path in read}
    texts[MANIFEST] = manifest_text(manifest, comment).encode()
    if headers is not None:
        texts[HEADERS] = headers_text(headers).encode()
    _write(folder, texts, manifest, notes)
    return Created(folder / MANIFEST, manifest, headers is not None, tuple(notes))


def _folder(options: CreateOptions) -> Path:
    """The folder to write; refuses a bad name and a manifest that exists."""
    try:
        check_component(options.name)
    except ValueError as error:
        raise OperatorError(f"NAME {options.name!r}: {error}") from None
    root = options.models.parent
    if not options.models.is_dir() and not (root / "pyproject.toml").is_file():
        raise OperatorError(
            f"{root.resolve()}: is no checkout of this project, it has no {options.models.name}/"
            " and no pyproject.toml: change into the checkout's root"
        )
    folder = options.models / options.name
    if (folder / MANIFEST).exists() and not options.force:
        raise OperatorError(
            f"{folder / MANIFEST}: exists: give --force to write it anew, or another NAME"
        )
    return folder


# --- where the files are ------------------------------------------------------------------------


def _find(options: CreateOptions, reporter: Reporter) -> _Found:
    leads = [options.sums, options.hub, options.modelscope]
    if options.sums is None:
        leads.append(str(options.directory) if options.directory else None)
    if sum(lead is not None for lead in leads) != 1:
        raise OperatorError(
            "give one of --directory DIR, --sums FILE, --hub ORG/MODEL and --modelscope ORG/MODEL"
        )
    if options.base is not None and options.sums is None:
        raise OperatorError("--base goes with --sums")
    sources = tuple(_source(url) for url in options.sources)
    options = replace(options, sources=sources)
    if options.sums is not None:
        return _find_sums(options, options.sums, reporter)
    if options.directory is not None:
        return _find_directory(options, options.directory, reporter)
    return _find_hub(options, reporter)


def _source(url: str) -> str:
    try:
        return check_source(url)
    except ValueError as error:
        raise OperatorError(f"source {error}") from None


def _own_revision(options: CreateOptions) -> str | None:
    if options.revision is not None:
        try:
            check_component(options.revision)
        except ValueError as error:
            raise OperatorError(f"--revision {options.revision!r}: {error}") from None
    return options.revision


def _find_directory(options: CreateOptions, directory: Path, reporter: Reporter) -> _Found:
    place = _Directory(directory, reporter)
    listed = tuple(_Listed(path) for path in place.paths())
    revision = _own_revision(options)
    origin = "from a directory"
    return _Found(place, listed, options.sources, revision, origin, str(directory))


def _find_sums(options: CreateOptions, sums: str, reporter: Reporter) -> _Found:
    if (options.base is None) == (options.directory is None):
        raise OperatorError("--sums needs the files too: give --base URL or --directory DIR")
    is_url = sums.startswith(("http://", "https://"))
    asked = [sums] if is_url else []
    web = _web(options, reporter, *asked, *filter(None, [options.base]))
    text = web.text(sums) if is_url else _read_text(Path(sums))
    listed = tuple(_Listed(path, None, digest) for path, digest in parse_sums(text, sums).items())
    revision = _own_revision(options)
    origin = "from a list of digests"
    if options.directory is not None:
        place = _Directory(options.directory, reporter)
        return _Found(place, listed, options.sources, revision, origin, sums)
    base = _source(options.base or "")
    if base.startswith("file:"):
        raise OperatorError("--base: expected http or https; give --directory for a directory")
    site = _Site(web, base)
    return _Found(site, listed, (*options.sources, base), revision, origin, sums)


def _find_hub(options: CreateOptions, reporter: Reporter) -> _Found:
    model = hub.check_model(options.hub or options.modelscope or "")
    if options.hub is not None:
        web = _web(options, reporter, hub.hugging_face_endpoint())
        revision = options.revision or "main"
        reporter.note(f"listing {model}, revision {revision}")
        listing = hub.hugging_face(web, model, revision)
    else:
        web = _web(options, reporter, hub.modelscope_endpoint())
        revision = options.revision or "master"
        reporter.note(f"listing {model}, revision {revision}")
        listing = hub.modelscope(web, model, revision)
    place = _Site(web, listing.base, (model, revision, listing.endpoint))
    listed = tuple(
        _Listed(file.path, file.size, file.sha256, file.blob_sha1) for file in listing.files
    )
    where = f"{model} at {listing.endpoint}"
    origin = f"from {where}, revision {json.dumps(revision)}"
    sources = (*options.sources, listing.base)
    return _Found(place, listed, sources, listing.commit, origin, where)


def _web(options: CreateOptions, reporter: Reporter, *asked: str) -> Web:
    """The client; the token is for one of the addresses that are asked."""
    if options.token is None:
        if options.token_for is not None:
            raise OperatorError("--token-for goes with --token")
        return Web(reporter)
    try:
        trusted = token_origin(asked, options.token_for, "--token-for")
    except ValueError as error:
        raise OperatorError(str(error)) from None
    return Web(reporter, options.token, trusted)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OperatorError(f"{path}: not UTF-8 text") from None


class _Directory:
    """Files in a directory of this machine."""

    near = True

    def __init__(self, root: Path, reporter: Reporter) -> None:
        if not root.is_dir():
            raise OperatorError(f"{root}: no such directory")
        self.threads = os.cpu_count() or 1
        self._root = root
        self._real = root.resolve()
        self._reporter = reporter

    def paths(self) -> Iterator[str]:
        """All files but hidden ones, in order; links to directories are refused."""
        for folder, directories, files in os.walk(self._root, onerror=_raise):
            directories[:] = sorted(name for name in directories if not name.startswith("."))
            for name in directories:
                if (Path(folder) / name).is_symlink():
                    raise OperatorError(
                        f"{Path(folder) / name}: a symbolic link to a directory:"
                        " put the files themselves there"
                    )
            for name in sorted(files):
                yield (Path(folder) / name).relative_to(self._root).as_posix()

    def size(self, path: str) -> int:
        """See `_Place.size`."""
        return self._status(path).st_size

    def _status(self, path: str) -> os.stat_result:
        full = self._root / path
        try:
            real = full.resolve(strict=True)
            status = real.stat()
        except OSError as error:
            raise CheckFailed(f"{full}: cannot be read: {error.strerror}") from None
        if not real.is_relative_to(self._real):
            raise CheckFailed(
                f"{full}: a symbolic link out of the directory, to {real}:"
                " copy the files themselves with `cp -rL`"
            )
        if not stat.S_ISREG(status.st_mode):
            raise CheckFailed(f"{full}: is not a regular file")
        return status

    def read_range(self, path: str, start: int, count: int) -> bytes:
        """See `_Place.read_range`."""
        try:
            with (self._root / path).open("rb") as stream:
                stream.seek(start)
                return stream.read(count)
        except OSError as error:
            raise CheckFailed(f"{self.where(path)}: cannot be read: {error.strerror}") from None

    def stream(self, path: str, size: int) -> Iterator[bytes]:
        """See `_Place.stream`; a file that changes meanwhile is refused."""
        before = self._status(path)
        label, outcome = f"hashing {path}", "not read"
        self._reporter.begin(label, size, 0)
        try:
            with (self._root / path).open("rb", buffering=0) as stream:
                while chunk := stream.read(_CHUNK):
                    self._reporter.advance(label, len(chunk))
                    yield chunk
            after = self._status(path)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise CheckFailed(f"{self.where(path)}: changed while it was read: run it again")
            outcome = "read"
        except OSError as error:
            raise CheckFailed(f"{self.where(path)}: cannot be read: {error.strerror}") from None
        finally:
            self._reporter.end(label, outcome)

    def where(self, path: str) -> str:
        """See `_Place.where`."""
        return str(self._root / path)


def _raise(error: OSError) -> None:
    raise CheckFailed(f"{error.filename}: cannot be read: {error.strerror}")


class _Site:
    """Files under a URL."""

    threads = _WEB_THREADS
    near = False

    def __init__(self, web: Web, base: str, told: tuple[str, str, str] | None = None) -> None:
        """``told``: model, revision and endpoint, where a hub's refusals are to be explained."""
        self._web = web
        self._base = base
        self._told = told

    def size(self, path: str) -> int:
        """See `_Place.size`."""
        return self._web.size(self.where(path))

    def read_range(self, path: str, start: int, count: int) -> bytes:
        """See `_Place.read_range`."""
        with self._explained():
            return self._web.read_range(self.where(path), start, count)

    def stream(self, path: str, size: int) -> Iterator[bytes]:
        """See `_Place.stream`."""
        with self._explained():
            yield from self._web.download(self.where(path), path, size)

    def where(self, path: str) -> str:
        """See `_Place.where`."""
        return f"{self._base}/{quote(path)}"

    def _explained(self) -> AbstractContextManager[None]:
        return hub.explained(*self._told) if self._told else nullcontext()


class _Noted:
    """A place that keeps the ranges that were read."""

    def __init__(self, place: _Place) -> None:
        self.threads = place.threads
        self.where = place.where
        self.pieces: dict[str, list[tuple[int, bytes]]] = {}
        """Offset and bytes, by path."""
        self._place = place

    def read_range(self, path: str, start: int, count: int) -> bytes:
        """See `_Place.read_range`."""
        content = self._place.read_range(path, start, count)
        self.pieces.setdefault(path, []).append((start, content))
        return content


# --- which files, and what they are -------------------------------------------------------------


def _selected(options: CreateOptions, found: _Found, notes: list[str]) -> list[_Listed]:
    """The files that become the manifest's, sorted by path."""
    chosen: dict[str, _Listed] = {}
    left_out = []
    for file in found.listed:
        if not is_wanted(file.path, options.include, options.exclude):
            left_out.append(file.path)
            continue
        try:
            check_path(file.path)
        except ValueError as error:
            raise CheckFailed(f"{found.where}: a file's path {error}") from None
        if file.path in chosen:
            raise CheckFailed(f"{found.where}: lists {file.path!r} twice")
        chosen[file.path] = file
    if CONFIG not in chosen:
        raise CheckFailed(f"{found.where}: no {CONFIG} among its {_without_config(found)}")
    if left_out:
        more = f" and {len(left_out) - 10} more" if len(left_out) > 10 else ""
        notes.append(f"left out: {', '.join(sorted(left_out)[:10])}{more}")
    return [chosen[path] for path in sorted(chosen)]


def _without_config(found: _Found) -> str:
    """How many files there are, and where config.json is instead of at their top."""
    count = f"{len(found.listed)} files"
    below = [file.path for file in found.listed if file.path.endswith(f"/{CONFIG}")]
    if not below:
        return f"{count}: not a model that vLLM can serve"
    path = min(below, key=lambda path: (path.count("/"), path))
    folder = path.rpartition("/")[0]
    return f"{count}, but {path}: give {folder}/ itself, and a list of digests made inside it"


def is_wanted(path: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> bool:
    """Whether a file belongs to the manifest.

    A pattern is compared with the whole path, where ``*`` also matches ``/``, and with the name.

    Args:
        include: patterns beyond the usual ones; they win over what is usually left out.
        exclude: patterns of what is left out in any case.
    """
    if _matches(path, exclude):
        return False
    return _matches(path, include) or (_matches(path, INCLUDED) and not _matches(path, LEFT_OUT))


def _matches(path: str, patterns: Iterable[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


def _settle(place: _Place, file: _Listed) -> tuple[ManifestFile, bytes | None]:
    """Size and digest of a file; its content, too, where the manifest needs it.

    A file elsewhere is read only where its digest is not known yet or its content is needed.
    """
    size = place.size(file.path) if file.size is None else file.size
    needed = file.path in READ
    if file.sha256 is not None and not needed and not place.near:
        return ManifestFile(path=file.path, size=size, sha256=file.sha256), None
    if needed and size > _MAX_READ:
        raise CheckFailed(f"{place.where(file.path)}: has {size} bytes: too many for what it is")
    sha256 = hashlib.sha256()
    # Git's name of a blob: SHA1 of "blob", its length, NUL, its bytes (gitformat-pack).
    sha1 = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    content = bytearray()
    for chunk in place.stream(file.path, size):
        sha256.update(chunk)
        sha1.update(chunk)
        if needed:
            content += chunk
    _compare(place.where(file.path), "sha256", sha256.hexdigest(), file.sha256)
    _compare(place.where(file.path), "Git blob SHA1", sha1.hexdigest(), file.blob_sha1)
    settled = ManifestFile(path=file.path, size=size, sha256=sha256.hexdigest())
    return settled, bytes(content) if needed else None


def _compare(where: str, kind: str, got: str, expected: str | None) -> None:
    if expected is not None and got != expected:
        raise CheckFailed(
            f"{where}: has {kind} {got}, its list says {expected}: tell the publisher or the mirror"
        )


def _json_object(place: _Place, read: dict[str, bytes], path: str) -> dict[str, Any]:
    try:
        value = load_json(read[path])
    except ValueError as error:
        raise CheckFailed(f"{place.where(path)}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckFailed(f"{place.where(path)}: is not a JSON object")
    return value


def _check_index(place: _Place, read: dict[str, bytes], files: Sequence[ManifestFile]) -> None:
    """Refuse a model whose index names a shard that is not there."""
    if INDEX not in read:
        return
    placed = _json_object(place, read, INDEX).get("weight_map")
    if not isinstance(placed, dict):
        raise CheckFailed(f"{place.where(INDEX)}: has no weight_map")
    missing = sorted({str(shard) for shard in placed.values()} - {file.path for file in files})
    if missing:
        raise CheckFailed(
            f"{place.where(INDEX)}: names {len(missing)} shards that are not there, such as"
            f" {missing[0]}: complete the model, or take back the --exclude"
        )


def _headers(
    place: _Noted, files: Sequence[ManifestFile], reporter: Reporter, notes: list[str]
) -> dict[str, Header] | None:
    """The headers of all shards; None where they cannot be read."""
    shards = [file for file in files if file.path.endswith(".safetensors")]
    try:
        headers = _parallel(place.threads, lambda shard: _header(place, shard, reporter), shards)
    except NoRanges:
        notes.append("the server has no byte ranges: without headers, capacity will be 'unknown'")
        return None
    return {shard.path: header for shard, header in zip(shards, headers, strict=True)}


def _header(place: _Noted, shard: ManifestFile, reporter: Reporter) -> Header:
    def read(start: int, count: int) -> bytes:
        return place.read_range(shard.path, start, count)

    header = header_from(read, place.where(shard.path), shard.size)
    described = (header.data_start or 0) + max(
        (tensor.end for tensor in header.tensors.values()), default=0
    )
    if described != shard.size:
        kind = "truncated" if shard.size < described else "with trailing bytes"
        raise CheckFailed(
            f"{place.where(shard.path)}: {kind}: has {shard.size} bytes, its header describes"
            f" {described}: get it again"
        )
    reporter.note(f"header of {shard.path}: {len(header.tensors)} tensors")
    return header


def _inspect(place: _Noted, files: Sequence[ManifestFile], read: dict[str, bytes]) -> Checkpoint:
    """What `fp8fleet inspect` says of these files.

    It gets a directory that has what was read of them and is empty (sparse) for the rest: the same
    rules as on a host, without the weights.
    """
    with tempfile.TemporaryDirectory(prefix="fp8fleet-") as folder:
        # An engine looks at no file of a folder within.
        for file in (file for file in files if "/" not in file.path):
            path = Path(folder) / file.path
            try:
                path.write_bytes(read.get(file.path, b""))
                if file.path not in place.pieces:
                    continue
                with path.open("r+b") as stream:
                    for start, content in place.pieces[file.path]:
                        stream.seek(start)
                        stream.write(content)
                    stream.truncate(file.size)
            except OSError as error:
                raise CheckFailed(f"{path}: cannot be written: {error.strerror}") from None
        return inspect_directory(Path(folder))


def _judge(inspected: Checkpoint, where: str, notes: list[str]) -> None:
    """Refuse what no host would serve; the rest of what was found is noted."""
    findings = [finding for finding in inspected.findings if finding.severity != "info"]
    if not inspected.whole:
        raise NotServable(where, findings)
    notes += [finding.line for finding in findings]


def _content_revision(files: Sequence[ManifestFile]) -> str:
    """A revision for content that has no other name: 12 digits of its digest."""
    content = [[file.path, file.size, file.sha256] for file in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _parallel(threads: int, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """The results in the order of the items; the first failure keeps the rest from starting."""
    with workers(threads) as pool:
        futures = [pool.submit(function, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception()]
        return [future.result() for future in failed or futures]


# --- writing ------------------------------------------------------------------------------------


def _write(folder: Path, texts: dict[str, bytes], manifest: Manifest, notes: list[str]) -> None:
    """Write all files beside their places, then give them their names, the manifest's last."""
    obsolete = [name for name in (*STORED, HEADERS) if name not in texts]
    if (folder / TORRENT).exists() and _old_digest(folder) != manifest.digest:
        obsolete.append(TORRENT)
        notes.append(f"{folder / TORRENT} was of other files and is removed: make it anew")
    order = sorted(texts, key=lambda name: name == MANIFEST)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in order:
            with _beside(folder, name).open("wb") as stream:
                stream.write(texts[name])
                stream.flush()
                os.fsync(stream.fileno())
        load_manifest(_beside(folder, MANIFEST))
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
        for name in order:
            _beside(folder, name).replace(folder / name)
    except OSError as error:
        raise CheckFailed(f"{folder}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            for name in order:
                _beside(folder, name).unlink(missing_ok=True)
            folder.rmdir()  # only where nothing was written


def _beside(folder: Path, name: str) -> Path:
    return folder / f".{name}.new"


def _old_digest(folder: Path) -> str | None:
    try:
        return load_manifest(folder / MANIFEST).digest
    except OperatorError:
        return None

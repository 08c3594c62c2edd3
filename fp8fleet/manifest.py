"""The manifest of a model: its files with size and SHA256, and where they come from."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fp8fleet.errors import OperatorError
from fp8fleet.outside import check_web_address
from fp8fleet.toml import parse_toml

PARTIAL = ".partial"
PARTIAL_ORIGIN = ".partial-origin"
QUARANTINE = ".quarantine"
TORRENT = "model.torrent"
"""Beside a manifest: how hosts share its files, made where the bytes are."""
STAMP = ".fp8fleet-stamp.json"
INDEX = "model.safetensors.index.json"
"""Of the publisher's: which shard has which tensor."""
LOCK = ".fp8fleet-lock"
INSPECTED = ".fp8fleet-inspected"
_WRITTEN = (STAMP, INSPECTED)
RESERVED = frozenset(
    {PARTIAL, PARTIAL_ORIGIN, QUARANTINE, LOCK, *_WRITTEN, *(f"{name}.new" for name in _WRITTEN)}
)
"""Names at the top of a model directory that belong to the fetcher, not to the model."""


def check_component(value: str) -> str:
    """Check a name or a revision, which become directories on hosts.

    Raises:
        ValueError: what is wrong with it.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", value):
        raise ValueError(
            "it becomes a directory's name: expected 1 to 128 of A-Z a-z 0-9 . _ + -,"
            " starting with a letter or digit"
        )
    return value


def check_sha256(value: str) -> str:
    """Check a digest.

    Returns:
        It in lower case.

    Raises:
        ValueError: it is not 64 hex digits; says how many it has.
    """
    if not re.fullmatch(r"[0-9a-fA-F]*", value):
        raise ValueError("is not hexadecimal, expected 64 hex digits as `sha256sum` prints them")
    if len(value) != 64:
        raise ValueError(f"has {len(value)} digits, expected 64: take it from the publisher again")
    return value.lower()


def check_path(value: str) -> str:
    """Check the path of a model's file: relative, plain, and not one of the fetcher's names.

    Raises:
        ValueError: what is wrong with it.
    """
    if not value:
        raise ValueError("is empty, expected a path relative to the model directory")
    if not value.isprintable() or "\\" in value:
        raise ValueError("holds a backslash or a control character")
    parts = value.split("/")
    if value.startswith("/"):
        raise ValueError(f"{value!r} is absolute, expected a path relative to the model directory")
    if ".." in parts:
        raise ValueError(f"{value!r} leaves the model directory: '..' is not allowed")
    if "" in parts or "." in parts:
        raise ValueError(f"{value!r} has an empty or '.' component: write it plainly")
    if parts[0] in RESERVED:
        raise ValueError(f"{value!r}: the name {parts[0]} is reserved for the fetcher")
    return value


def check_source(value: str) -> str:
    """Check the base URL of a source: http, https or file, without login, query or fragment.

    Returns:
        The URL without slashes at its end.

    Raises:
        ValueError: what is wrong with it. A login in the URL is not repeated.
    """
    if not re.fullmatch(r"[\w.~:/?#@!&*+,;=%\[\]-]+", value, re.ASCII):
        raise ValueError(
            "a source URL must not hold spaces, quotes, control characters or letters that are not"
            " ASCII: write those as %XX"
        )
    try:
        url = urlsplit(value)
    except ValueError:
        raise ValueError(f"{value!r}: its host is no name and no address") from None
    if "@" in url.netloc:
        raise ValueError("a source URL must not hold a login: use a token file")
    if url.query or url.fragment:
        raise ValueError(f"{value!r}: a source is a base URL, without '?' and '#'")
    if url.scheme in ("http", "https") and url.hostname:
        try:
            check_web_address(value)
        except ValueError as error:
            raise ValueError(f"{value!r}: {error}") from None
        return value.rstrip("/")
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path.startswith("/"):
        if "\0" in unquote(url.path):
            raise ValueError(f"{value!r}: no path holds a %00")
        return value.rstrip("/")
    raise ValueError(f"{value!r}: expected http://HOST/..., https://HOST/... or file:///PATH")


LARGEST = 2**63 - 1
"""Bytes that a file of Linux can have."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ManifestFile(_Strict):
    """One file of the model."""

    path: Annotated[str, AfterValidator(check_path)]
    """Path relative to the model directory and to every source."""
    size: Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
    """Bytes."""
    sha256: Annotated[str, AfterValidator(check_sha256)]
    """64 lower-case hex digits."""


def _not_empty(value: tuple[ManifestFile, ...]) -> tuple[ManifestFile, ...]:
    if not value:
        raise ValueError("is empty, expected at least one [[files]] table")
    return value


class Manifest(_Strict):
    """What a model consists of."""

    name: Annotated[str, AfterValidator(check_component)]
    revision: Annotated[str, AfterValidator(check_component)]
    quantization: str | None = None
    """The expected quantization, as config.json names it; None when the manifest does not say."""
    sources: tuple[Annotated[str, AfterValidator(check_source)], ...] = ()
    """Base URLs in the order in which they are tried."""
    files: Annotated[tuple[ManifestFile, ...], AfterValidator(_not_empty)]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """SHA256 over name, revision and files: what the model is, not where it comes from."""
        files = sorted((file.path, file.size, file.sha256) for file in self.files)
        text = json.dumps([self.name, self.revision, files], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest.toml.

    Raises:
        OperatorError: one line with file, line (where it is known), key, and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OperatorError(f"{path}: no such manifest") from None
    except IsADirectoryError:
        raise OperatorError(f"{path}: is a directory, expected its manifest.toml") from None
    except UnicodeDecodeError:
        raise OperatorError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        manifest = Manifest.model_validate(parse_toml(text, str(path)))
    except ValidationError as error:
        raise OperatorError(_explain(path, text, error)) from None
    _check_paths(path, text, manifest)
    return manifest


def manifest_text(manifest: Manifest, comment: str) -> str:
    """The text of a manifest.toml.

    Args:
        comment: its first line, without ``#``.
    """
    lines = [f"# {comment}"]
    lines.append(f"name = {_toml_string(manifest.name)}")
    lines.append(f"revision = {_toml_string(manifest.revision)}")
    if manifest.quantization:
        lines.append(f"quantization = {_toml_string(manifest.quantization)}")
    lines.append("sources = [" + ", ".join(_toml_string(url) for url in manifest.sources) + "]")
    for file in manifest.files:
        lines += ["", "[[files]]", f"path = {_toml_string(file.path)}"]
        lines += [f"size = {file.size}", f'sha256 = "{file.sha256}"']
    return "\n".join(lines) + "\n"


def _toml_string(value: str) -> str:
    # A JSON string is a TOML basic string.
    return json.dumps(value, ensure_ascii=False)


def _check_paths(path: Path, text: str, manifest: Manifest) -> None:
    """Refuse a path that stands twice, or once as a file and once as a directory."""
    files: dict[str, int] = {}
    directories = {
        "/".join(file.path.split("/")[:depth])
        for file in manifest.files
        for depth in range(1, file.path.count("/") + 1)
    }
    for index, file in enumerate(manifest.files):
        where = _where(path, _line_of(text, ("files", index, "path")))
        if file.path in files:
            raise OperatorError(
                f"{where}: files[{index}]: path {file.path!r} is a duplicate of"
                f" files[{files[file.path]}]: keep one of them"
            )
        if file.path in directories:
            raise OperatorError(
                f"{where}: files[{index}]: path {file.path!r} is also the directory of another file"
            )
        files[file.path] = index


def _explain(path: Path, text: str, error: ValidationError) -> str:
    """One error of a validation as one line, with the number of the others.

    An unknown key first: mistyped, it is why another one is missing.
    """
    errors = error.errors(include_url=False, include_input=False)
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    others = len(errors) - 1
    more = f" (and {others} more error{'s' if others > 1 else ''})" if others else ""
    where = _where(path, _line_of(text, location))
    return f"{where}: {_name(location)} {_message(first)}{more}"


def _message(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return "is an unknown key: remove it or correct its name"
    if error["type"] == "greater_than_equal":
        return "is negative, expected bytes"
    if error["type"] == "less_than_equal":
        return "is larger than any file, expected bytes"
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:] if message.startswith("Input") else message


def _name(location: tuple[int | str, ...]) -> str:
    """``('files', 3, 'sha256')`` as ``files[3].sha256``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).lstrip(".")


def _where(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}:{line}"


def _line_of(text: str, location: tuple[Any, ...]) -> int | None:
    """The line (from 1) on which the key at ``location`` stands, or its table's header.

    None where the text is not written as plain ``key = value`` lines and ``[[files]]`` tables.
    """
    index = location[1] if location[:1] == ("files",) and len(location) > 1 else None
    key = location[2] if index is not None and len(location) > 2 else location[0]
    table, header = -1, None
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*files\s*\]\]", line):
            table += 1
            if table == (index or 0):
                header = number
        in_table = table == index if index is not None else table == -1
        if in_table and re.match(rf"""\s*["']?{re.escape(str(key))}["']?\s*=""", line):
            return number
    return header if location[:1] == ("files",) else None

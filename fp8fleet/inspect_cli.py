"""The command that inspects a model directory, on hosts and on the control machine.

With a manifest it is the gate in front of a server: the files are the manifest's, the headers those
that were stored with it, and the inspection finds no error. A pass is noted in the directory, so
that asking again reads metadata only.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
from contextlib import suppress
from pathlib import Path

from fp8fleet import (
    architecture,
    checkpoint,
    config_json,
    findings,
    headers,
    jsonfile,
    patterns,
    quantization,
    quantized,
    schemes,
    tensor_parallel,
)
from fp8fleet.architecture import Architecture, LayerGroup
from fp8fleet.checkpoint import Checkpoint, inspect_directory
from fp8fleet.errors import OperatorError
from fp8fleet.fetch import human_bytes, standard_reporter, verify
from fp8fleet.findings import SAME_REVISION, Finding
from fp8fleet.headers import Header, HeaderError, read_headers
from fp8fleet.jsonfile import read_regular
from fp8fleet.manifest import INSPECTED, Manifest, load_manifest
from fp8fleet.output import say
from fp8fleet.quantized import CONFIG

_RULES = (
    architecture,
    checkpoint,
    config_json,
    findings,
    headers,
    jsonfile,
    patterns,
    quantization,
    quantized,
    schemes,
    tensor_parallel,
)
"""Modules that decide; when they change, noted passes count no more."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``inspect``; it sets ``func(Namespace) -> exit code``."""
    parser = subparsers.add_parser("inspect", help="check a model directory by its headers")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--headers", type=Path, metavar="FILE", help="headers.json that the shards must agree with"
    )
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="verify the files first, and note a pass"
    )
    parser.add_argument("--full", action="store_true", help="with --manifest: hash every file")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(func=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.manifest is not None:
        return _inspect_with_manifest(arguments, load_manifest(arguments.manifest))
    if arguments.full:
        raise OperatorError("inspect --full needs --manifest FILE")
    return _show(arguments, inspect_directory(arguments.directory, _stored(arguments.headers)))


def _inspect_with_manifest(arguments: argparse.Namespace, manifest: Manifest) -> int:
    files = _verify(arguments, manifest)
    if any(finding.severity == "error" for finding in files):
        # Wrong files are told by name; what their headers say would only hide it.
        return _show_findings(arguments, files)
    note = arguments.directory / INSPECTED
    key = _key(manifest, arguments.headers)
    # A file beside the manifest's may be one that the engine reads, so nothing is noted then.
    if not files and not arguments.json and _read_note(note) == key:
        say(f"{arguments.directory}: whole, as inspected before")
        return 0
    inspected = inspect_directory(arguments.directory, _stored(arguments.headers))
    more = (*_unexpected(manifest, inspected), *files)
    inspected = dataclasses.replace(inspected, findings=(*more, *inspected.findings))
    if inspected.whole and not files:
        # A check by another user, or on a read-only or full disk, is still a check.
        with suppress(OSError):
            note.unlink(missing_ok=True)
            note.write_text(key + "\n", encoding="utf-8")
    return _show(arguments, inspected)


def _stored(path: Path | None) -> dict[str, Header] | None:
    if path is None:
        return None
    try:
        return read_headers(path)
    except HeaderError as error:
        message = f"{error}: expected the headers.json that lies beside the manifest"
        raise OperatorError(message) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> OperatorError:
    return OperatorError(f"{path}: cannot be read: {error.strerror}")


def _verify(arguments: argparse.Namespace, manifest: Manifest) -> tuple[Finding, ...]:
    if arguments.json:
        found = verify(manifest, arguments.directory, arguments.full)
    else:
        with standard_reporter() as reporter:
            found = verify(manifest, arguments.directory, arguments.full, reporter)
    return tuple(Finding(f.code, f.severity, f.file, None, f.message, f.remedy) for f in found)


def _unexpected(manifest: Manifest, inspected: Checkpoint) -> list[Finding]:
    expected, got = manifest.quantization, inspected.quantization
    if expected is None or got is None or expected == got:
        return []
    message = f"has quantization {got}, the manifest expects {expected}"
    return [Finding("quantization-unexpected", "error", CONFIG, None, message, SAME_REVISION)]


# --- the note of a pass -------------------------------------------------------------------------


def _key(manifest: Manifest, headers_file: Path | None) -> str:
    """What a pass depends on, once the files are known to be the manifest's: SHA256."""
    try:
        stored = read_regular(headers_file) if headers_file else b""
    except OSError as error:
        raise _unreadable(headers_file or Path(), error) from None
    parts = [manifest.digest, manifest.quantization or "", hashlib.sha256(stored).hexdigest()]
    parts += [inspect.getsource(module) for module in _RULES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read_note(path: Path) -> str | None:
    try:
        return read_regular(path, 1000).decode("utf-8").strip()
    except (OSError, ValueError):
        return None


# --- what is shown ------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace, inspected: Checkpoint) -> int:
    if arguments.json:
        report = {"directory": str(arguments.directory), "whole": inspected.whole}
        print(json.dumps(report | dataclasses.asdict(inspected), indent=1))
        return 0 if inspected.whole else 1
    for label, text in _summary(inspected):
        say(f"{label and label + ':':17}{text}")
    return _show_findings(arguments, inspected.findings)


def _show_findings(arguments: argparse.Namespace, found: tuple[Finding, ...]) -> int:
    whole = all(finding.severity != "error" for finding in found)
    if arguments.json:
        report = {"directory": str(arguments.directory), "whole": whole}
        print(json.dumps(report | {"findings": list(map(dataclasses.asdict, found))}, indent=1))
        return 0 if whole else 1
    for finding in found:
        say(finding.line)
    errors = sum(finding.severity == "error" for finding in found)
    outcome = "whole" if whole else f"{errors} error{'s' if errors > 1 else ''}: not to be served"
    say(f"{arguments.directory}: {outcome}")
    return 0 if whole else 1


def _summary(inspected: Checkpoint) -> list[tuple[str, str]]:
    lines = []
    if inspected.architecture is not None:
        lines += _architecture_lines(inspected.architecture)
    block = f", blocks of {inspected.block[0]} x {inspected.block[1]}" if inspected.block else ""
    lines.append(("quantization", f"{inspected.quantization or 'unknown'}{block}"))
    contents = inspected.contents
    by_dtype = ", ".join(f"{d} {human_bytes(n)}" for d, n in contents.bytes_by_dtype.items())
    lines.append(
        (
            "weights",
            f"{contents.parameters:,} parameters in {contents.tensors:,} tensors,"
            f" {contents.shards} shards: {human_bytes(contents.bytes)} ({by_dtype})",
        )
    )
    if contents.scale_tensors:
        scales = f"{contents.scales:,} in {contents.scale_tensors:,} tensors"
        lines.append(("scales", f"{scales}: {human_bytes(contents.scale_bytes)}"))
    parallel = inspected.tensor_parallel
    if parallel.sizes or parallel.refused:
        sizes = ", ".join(map(str, parallel.sizes)) or "none"
        lines.append(("tensor parallel", sizes))
    lines += [(f"  not {size}", reason) for size, reason in parallel.refused.items()]
    return lines


def _architecture_lines(found: Architecture) -> list[tuple[str, str]]:
    known = [
        (found.layers, "{:,} layers"),
        (found.hidden_size, "hidden {:,}"),
        (found.intermediate_size, "FFN {:,}"),
        (found.heads, "{:,} heads"),
        (found.experts, "{:,} experts"),
        (found.vocabulary, "vocabulary {:,}"),
        (found.context, "context {:,}"),
    ]
    sizes = ", ".join(text.format(value) for value, text in known if value)
    lines = [("architecture", f"{found.name or 'unknown'} ({found.dtype or 'dtype unknown'})")]
    lines.append(("", sizes))
    lines += [("  layers", _group_line(group)) for group in found.groups]
    if found.latent_dim:
        lines.append(("  latent", f"{found.latent_dim} numbers a token and layer"))
    return lines


def _group_line(group: LayerGroup) -> str:
    parts = [f"{group.count} x {group.type}"]
    if group.kv_heads and group.head_dim:
        parts.append(f"{group.kv_heads} KV heads x {group.head_dim}")
    if group.window:
        parts.append(f"window {group.window}")
    parts += [f"{key} {value}" for key, value in group.rope.items()]
    return ", ".join(parts)

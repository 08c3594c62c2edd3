"""The commands that run on hosts, out of the zipapp; each loads only what it needs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8fleet import inspect_cli
from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.fetch import (
    FanOut,
    FetchOptions,
    Finding,
    check_directory,
    fetch,
    human_bytes,
    standard_reporter,
    verify,
)
from fp8fleet.manifest import TORRENT, load_manifest
from fp8fleet.output import leave, run, say
from fp8fleet.secrets import SecretRef

if TYPE_CHECKING:
    from fp8fleet import ready

COMMANDS = ("fetch", "verify", "seed", "ready")
TORRENT_COMMAND = ["manifest", "torrent"]


class Parser(argparse.ArgumentParser):
    """Options are written out; a prefix of one is a mistake, here and in subcommands."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the host's commands to a command line; each sets ``func(Namespace) -> exit code``."""
    _register_fetch(subparsers)
    register_verify(subparsers)
    inspect_cli.register(subparsers)
    _register_seed(subparsers)
    _register_ready(subparsers)


def _register_fetch(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("fetch", help="bring a manifest's files into a directory")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--source",
        action="append",
        metavar="URL",
        help="base URL in place of the manifest's; several are tried in order",
    )
    parser.add_argument("--ca-bundle", type=Path, metavar="FILE", help="authorities to trust (PEM)")
    parser.add_argument("--proxy", metavar="URL", help="HTTP proxy; unset: the environment's")
    add_token(parser)
    _add_rate_limit(parser)
    parser.add_argument(
        "--torrent", type=Path, metavar="FILE", help="share the download with the --peer hosts"
    )
    parser.add_argument("--listen", metavar="ADDRESS:PORT", help="of this host, for its peers")
    _add_peers(parser)
    parser.set_defaults(func=_fetch)


def add_token(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add ``--token`` and ``--token-for``, of which the first is a `SecretRef`."""
    parser.add_argument(
        "--token",
        type=_secret,
        metavar="REF",
        help=f"env:NAME or file:/PATH (0600) with the bearer token{more}",
    )
    parser.add_argument(
        "--token-for",
        metavar="URL",
        help="on the host that gets the token; unset: the only one that is asked, by https",
    )


def _secret(text: str) -> SecretRef:
    try:
        return SecretRef.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_rate_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate-limit", type=_megabytes, metavar="MB/S", help="megabytes a second, of all threads"
    )


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ADDRESS:PORT",
        help="a host to exchange with; this host may be among them",
    )


def _megabytes(text: str) -> float:
    """``12.5`` (MB/s) as bytes a second."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.1 <= rate < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected megabytes a second, at least 0.1")
    return rate * 1e6


def _register_seed(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("seed", help="give a verified directory to peers until SIGTERM")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torrent", type=Path, metavar="FILE", required=True)
    parser.add_argument("--listen", metavar="ADDRESS:PORT", required=True)
    _add_peers(parser)
    _add_rate_limit(parser)
    parser.set_defaults(func=_seed)


def register_torrent(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``torrent MANIFEST DIRECTORY``."""
    parser = subparsers.add_parser(
        "torrent", help="write model.torrent beside the manifest, for --torrent"
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("directory", type=Path, help="holds the model's files")
    parser.set_defaults(func=_torrent)


def register_verify(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``verify MANIFEST DIRECTORY``."""
    parser = subparsers.add_parser("verify", help="check a directory against its manifest")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--full", action="store_true", help="hash every file")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(func=_verify)


def _register_ready(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("ready", help="wait until a server answers, then warm it up")
    parser.add_argument("--unit", required=True, metavar="NAME.service")
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", required=True, metavar="ID")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument(
        "--warm-up", type=int, default=0, metavar="STREAMS", help="largest batch to warm; 0: none"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="0600 API key")
    parser.add_argument("--marker", type=Path, metavar="FILE", help="written when ready and warm")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only ask whether the marker still holds: exit 0 or 1 at once",
    )
    parser.set_defaults(func=_ready)


def _fetch(arguments: argparse.Namespace) -> int:
    manifest = load_manifest(arguments.manifest)
    # The server runs as another user and has to read what sudo's umask may hide.
    os.umask(0o022)
    with standard_reporter() as reporter:
        options = FetchOptions(
            ca_bundle=arguments.ca_bundle,
            proxy=arguments.proxy,
            token=arguments.token,
            token_for=_token_for(arguments),
            rate_limit=arguments.rate_limit,
            fan_out=_fan_out(arguments),
            reporter=reporter,
        )
        result = fetch(manifest, arguments.directory, arguments.source, options)
        findings = verify(manifest, arguments.directory, reporter=reporter)
    peers = f" and {human_bytes(result.bytes_from_peers)} from peers" if arguments.torrent else ""
    say(
        f"{arguments.directory}: {len(result.fetched)} files fetched"
        f" ({human_bytes(result.bytes_received)} from sources{peers}"
        f" in {result.seconds:.0f} s), {len(result.kept)} kept"
    )
    return _show(findings)


def _token_for(arguments: argparse.Namespace) -> str | None:
    if arguments.token_for is not None and arguments.token is None:
        raise OperatorError("--token-for goes with --token")
    named: str | None = arguments.token_for
    return named


def _fan_out(arguments: argparse.Namespace) -> FanOut | None:
    if arguments.torrent is None and arguments.listen is None and not arguments.peer:
        return None
    if arguments.torrent is None or arguments.listen is None or not arguments.peer:
        raise OperatorError("fetch: --torrent, --listen and --peer belong together: give all three")
    return FanOut(arguments.torrent, arguments.listen, tuple(arguments.peer))


def _seed(arguments: argparse.Namespace) -> int:
    from fp8fleet.seed import seed

    manifest = load_manifest(arguments.manifest)
    _require_directory(arguments.directory)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    seed(
        manifest,
        arguments.directory,
        FanOut(arguments.torrent, arguments.listen, tuple(arguments.peer)),
        arguments.rate_limit,
        stop,
        say,
    )
    return 0


def _torrent(arguments: argparse.Namespace) -> int:
    from fp8fleet.seed import write_torrent

    manifest = load_manifest(arguments.manifest)
    _require_directory(arguments.directory)
    path = arguments.manifest.with_name(TORRENT)
    with standard_reporter() as reporter:
        write_torrent(manifest, arguments.directory, path, reporter)
    say(str(path))
    return 0


def _require_directory(path: Path) -> None:
    """Refuse a mistyped directory, of which every single file would be missing."""
    if not path.is_dir():
        what = "is no directory" if path.exists() else "no such directory"
        raise OperatorError(f"{path}: {what}, expected that of the model's files")


def _verify(arguments: argparse.Namespace) -> int:
    manifest = load_manifest(arguments.manifest)
    _require_directory(arguments.directory)
    if arguments.json:
        findings = verify(manifest, arguments.directory, arguments.full)
        report = {
            "manifest": manifest.digest,
            "directory": str(arguments.directory),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=1))
        return _exit_code(findings)
    with standard_reporter() as reporter:
        verified = check_directory(manifest, arguments.directory, arguments.full, reporter)
    code = _show(verified.findings)
    if code == 0:
        say(f"{arguments.directory}: whole, {len(manifest.files)} files, {verified.hashed} hashed")
    return code


def _show(findings: list[Finding]) -> int:
    for finding in findings:
        say(f"{finding.severity}: {finding.file} {finding.message}: {finding.remedy}")
    return _exit_code(findings)


def _exit_code(findings: list[Finding]) -> int:
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _ready(arguments: argparse.Namespace) -> int:
    from fp8fleet import ready

    unit = ready.Unit(arguments.unit)
    if arguments.check:
        return _check_marker(arguments, unit)
    key = None
    if arguments.api_key_file is not None:
        key = SecretRef("file", str(arguments.api_key_file)).resolve()
    url, model = arguments.url, arguments.model
    ready.wait_ready(
        url, model, arguments.timeout, key, unit.why_dead, say, last_line=unit.last_line
    )
    ready.warm_up(url, model, arguments.warm_up, key, unit.why_dead, say)
    if arguments.marker is not None:
        ready.write_marker(arguments.marker, unit, model)
    return 0


def _check_marker(arguments: argparse.Namespace, unit: ready.Unit) -> int:
    if arguments.marker is None:
        raise OperatorError("ready --check needs --marker FILE")
    from fp8fleet import ready

    why = ready.why_not_still_ready(arguments.marker, unit, arguments.url, arguments.model)
    if why is not None:
        raise CheckFailed(why)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see `fp8fleet.output.run`)."""
    parser = Parser(prog="fp8fleet", description=__doc__)
    subparsers: argparse._SubParsersAction[Any] = parser.add_subparsers(
        required=True, metavar="COMMAND"
    )
    register(subparsers)
    group = subparsers.add_parser("manifest", help="what is made where a model's bytes are")
    made: argparse._SubParsersAction[Any] = group.add_subparsers(required=True, metavar="COMMAND")
    register_torrent(made)

    def command() -> int:
        arguments = parser.parse_args(argv)
        return int(arguments.func(arguments))

    return run(command)


if __name__ == "__main__":
    leave(main())

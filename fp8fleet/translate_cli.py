"""The command that turns a `vllm serve` command line into options for the inventory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fp8fleet import catalog
from fp8fleet.errors import OperatorError
from fp8fleet.manifest import check_component, load_manifest
from fp8fleet.outside import plain
from fp8fleet.quantized import CONFIG
from fp8fleet.render import yaml_text
from fp8fleet.serve_options import Checkpoint, checkpoint_of
from fp8fleet.stored import read_config
from fp8fleet.translate import translate


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command ``translate``; it sets ``func(Namespace) -> exit code``."""
    parser = subparsers.add_parser(
        "translate", help="a `vllm serve` command line as corrected YAML, what was wrong on stderr"
    )
    parser.add_argument("line", metavar="'vllm serve ...'", help="the command line, in quotes")
    newest = catalog.newest_first("vllm")[0]
    parser.add_argument(
        "--release", default=newest, metavar="R", help=f"release that shall run it ({newest})"
    )
    parser.add_argument("--model", metavar="NAME", help="what it serves: models/NAME")
    parser.set_defaults(func=_translate)


def _translate(arguments: argparse.Namespace) -> int:
    if arguments.release not in catalog.releases():
        known = ", ".join(catalog.releases())
        raise OperatorError(f"--release {arguments.release}: unknown; known are {known}")
    checkpoint = _checkpoint(arguments.model) if arguments.model is not None else None
    done = translate(arguments.line, arguments.release, checkpoint)
    for finding in done.findings:
        print(plain(finding.line), file=sys.stderr)
    sys.stdout.write(yaml_text(done.options))
    return 1 if done.corrected else 0


def _checkpoint(name: str) -> Checkpoint:
    try:
        check_component(name)
    except ValueError as error:
        raise OperatorError(f"--model {name!r}: {error}") from None
    path = Path("models") / name / "manifest.toml"
    return checkpoint_of(load_manifest(path), read_config(path.with_name(CONFIG)))

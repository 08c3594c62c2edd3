"""conda's command line: ``conda create``, ``conda install``, ``conda list``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import rattler

FRONTEND = Path(__file__).resolve().parents[4]  # PREFIX/lib/python3.11/site-packages/conda_frontend


class CondaError(Exception):
    """What conda says in one line before it exits with 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, or 1 with one line on standard error.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            _list(options.prefix, options.json)
        else:
            asyncio.run(_put(options, fresh=options.command == "create"))
    except Exception as error:  # py-rattler's errors have no common class
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("conda", description=__doc__)
    version = f"conda {rattler.__version__} (fp8fleet lab, on py-rattler)"
    parser.add_argument("-V", "--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("create", "install"):
        command = commands.add_parser(name)
        command.add_argument("-p", "--prefix", type=Path, required=True)
        command.add_argument("-c", "--channel", action="append", required=True)
        command.add_argument("--override-channels", action="store_true", required=True)
        command.add_argument("-y", "--yes", action="store_true", required=True)
        command.add_argument("-q", "--quiet", action="store_true")
        command.add_argument("specs", nargs="+", metavar="SPEC")
    command = commands.add_parser("list")
    command.add_argument("-p", "--prefix", type=Path, required=True)
    command.add_argument("--json", action="store_true")
    return parser


async def _put(options: argparse.Namespace, fresh: bool) -> None:
    """Solve the specs and link the packages into the prefix; ``fresh`` replaces what is there."""
    prefix = options.prefix.absolute()
    if fresh:
        _refuse_foreign(prefix)
    installed = [] if fresh else _records(prefix)
    packages = Path(os.environ.get("CONDA_PKGS_DIRS") or FRONTEND / "pkgs")
    records = await rattler.solve(
        sources=[_channel(name) for name in options.channel],
        specs=[rattler.MatchSpec(spec) for spec in options.specs],
        gateway=rattler.Gateway(cache_dir=packages / "cache"),
        platforms=["linux-64", "noarch"],
        locked_packages=installed,
        virtual_packages=rattler.VirtualPackage.detect(),
    )
    if fresh and prefix.exists():
        shutil.rmtree(prefix)
    await rattler.install(
        records,
        prefix,
        cache_dir=packages,
        installed_packages=installed,
        show_progress=not options.quiet,
    )
    (prefix / "conda-meta" / "history").touch()  # by this file conda knows an environment
    if not options.quiet:
        _list(prefix, as_json=False)


def _channel(name: str) -> str:
    """A URL, or the path of a folder, which py-rattler wants without ``file://``."""
    return name.removeprefix("file://")


def _refuse_foreign(prefix: Path) -> None:
    """Refuse to replace a folder with content that is no conda environment."""
    if not (prefix / "conda-meta").is_dir() and prefix.exists() and any(prefix.iterdir()):
        raise CondaError(f"{prefix} has files but is no conda environment")


def _records(prefix: Path) -> list[rattler.PrefixRecord]:
    metadata = prefix / "conda-meta"
    if not metadata.is_dir():
        raise CondaError(f"{prefix} is no conda environment")
    return [rattler.PrefixRecord.from_path(path) for path in sorted(metadata.glob("*.json"))]


def _list(prefix: Path, as_json: bool) -> None:
    """Print the packages of an environment, with ``--json`` in the keys that conda uses."""
    rows = [
        {
            "base_url": record.channel,
            "build_number": record.build_number,
            "build_string": str(record.build),
            "channel": record.channel,
            "dist_name": f"{record.name.normalized}-{record.version}-{record.build}",
            "name": record.name.normalized,
            "platform": record.subdir,
            "version": str(record.version),
        }
        for record in _records(prefix)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"# packages in environment at {prefix}:")
    for row in rows:
        print(f"{row['name']:<24} {row['version']:<16} {row['build_string']}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Skips the interpreter's end, at which py-rattler's threads, still running, can crash it.
    os._exit(code)

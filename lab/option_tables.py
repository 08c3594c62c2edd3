"""Writes fp8fleet/catalog/serve/RELEASE.toml from the argument parser of each vLLM release.

`make tables`. The releases' packages (about 340 MB each) are taken from the package index into a
folder that is removed again. Only their Python code is unpacked: a parser needs no kernels, and one
environment without CUDA, that of the lab's engine, serves all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata

from fp8fleet import catalog
from fp8fleet.errors import CheckFailed
from fp8fleet.output import leave, run
from lab import wheels
from lab.processes import say
from lab.site import cache_dir

WITHOUT = ("0.6.3",)
"""Its parser is another, and its YAML files cannot switch a flag on."""
RELEASES = [name for name in catalog.newest_first("vllm") if name not in WITHOUT]
TABLES = Path(__file__).resolve().parent.parent / "fp8fleet" / "catalog" / "serve"
READER = Path(__file__).with_name("option_reader.py")

PARSER_NEEDS = (
    "compressed-tensors",
    "diskcache",
    "gguf",
    "ijson",
    "llguidance",
    "mistral-common",
    "openai-harmony",
    "orjson",
    "outlines-core",
)
"""What the parsers import beside the base environment, in the versions that a release asks for."""

BESIDE = ("pycountry",)
"""What some versions of those import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of the named releases, or of all."""
    parser = argparse.ArgumentParser(prog="python -m lab.option_tables", description=__doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    releases = parser.parse_args(argv).releases
    with tempfile.TemporaryDirectory(prefix="option-tables-") as name:
        folder = Path(name)
        python = _base_environment(folder / "base")
        for release in releases:
            code = folder / release
            wheel = _fetch(release, code)
            table = _read(python, code)
            path = TABLES / f"{release}.toml"
            path.write_text(table_text(release, wheel, table))
            say(f"{path.name}: {len(table['options'])} options of {wheel}")
    return 0


def table_text(release: str, wheel: str, table: dict[str, Any]) -> str:
    """The table as TOML: one line an option, in the order of names."""
    lines = [
        f"# Options of `vllm serve` {release}, read from its own argument parser by `make tables`.",
        f"source = {_toml(f'argument parser and config classes of {wheel}')}",
        f"false = {_toml(table['false'])}",
        f"transformers = {table['transformers']}",
        "",
        "[options]",
    ]
    lines += [f"{name} = {_toml(entry)}" for name, entry in sorted(table["options"].items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value on one line; TOML's strings, numbers and arrays are written as JSON's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=True)


def _base_environment(folder: Path) -> Path:
    """The lab's engine environment: torch for the CPU, transformers and the rest."""
    house = wheels.build_wheelhouse(cache_dir())
    _output([sys.executable, "-m", "uv", "venv", "-q", "-p", wheels.PYTHON_VERSION, str(folder)])
    python = folder / "bin" / "python"
    names = [str(path) for path in sorted(house.glob("*.whl")) if "+stub" not in path.name]
    names = [name for name in names if not Path(name).name.startswith("vllm")]
    _install(python, ["--no-index", *names])
    return python


def _fetch(release: str, code: Path) -> str:
    """The Python code of a release and what its parser needs, in one folder.

    Returns:
        The wheel's file name.
    """
    with tempfile.TemporaryDirectory(dir=code.parent) as name:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name]
        _output([*command, "--only-binary=:all:", f"vllm=={release}"])
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if not m.endswith((".so", "/vllm-rs"))]
            archive.extractall(code, members)
        own = next(code.glob("vllm-*.dist-info")) / "METADATA"
    wanted = Metadata.from_email(own.read_bytes(), validate=False).requires_dist or []
    needs = [
        str(requirement)
        for requirement in wanted
        if requirement.name.replace("_", "-") in PARSER_NEEDS
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    _install(code.parent / "base" / "bin" / "python", ["--target", str(code), *needs, *BESIDE])
    return wheel.name


def _install(python: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps"]
    _output([*command, "--python", str(python), *arguments])


def _read(python: Path, code: Path) -> dict[str, Any]:
    """Run the reader with the release's code."""
    environment = {"PYTHONPATH": str(code), "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONSAFEPATH": "1"}
    environment["HF_HUB_OFFLINE"] = "1"
    output = _output([str(python), str(READER)], os.environ | environment)
    table: dict[str, Any] = json.loads(output.splitlines()[-1])
    return table


def _output(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckFailed(f"{' '.join(command[:6])} ... failed: {last}")
    return done.stdout


if __name__ == "__main__":
    leave(run(main))

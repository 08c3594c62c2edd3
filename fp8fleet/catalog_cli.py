"""`fp8fleet catalog`: the catalogue as tables, and whether a release fits."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8fleet import catalog
from fp8fleet.catalog_check import Target, Verdict, advice, check, is_version, title
from fp8fleet.errors import OperatorError
from fp8fleet.spec import HostSpec


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``catalog`` and ``catalog check`` to a command line."""
    parser = subparsers.add_parser("catalog", help="what is known of releases and hardware")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(func=_list)
    actions = parser.add_subparsers(metavar="ACTION")
    checker = actions.add_parser("check", help="whether a release fits, and why not")
    checker.add_argument("release", metavar="RELEASE", help="such as 0.33.0")
    checker.add_argument("--platform", required=True, metavar="P", help="such as kylin-v10")
    checker.add_argument("--arch", default="x86_64", choices=["x86_64", "aarch64"])
    checker.add_argument("--driver", metavar="V", help="NVIDIA's driver, such as 535.104.05")
    checker.add_argument("--gpu", metavar="NAME", help="accelerator, such as a100-80g")
    checker.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION")
    checker.add_argument("--python", default=_default("engine_python"), metavar="V")
    checker.add_argument(
        "--build", default="wheel", choices=["wheel", "source"], help="as engine_build (wheel)"
    )
    checker.add_argument(
        "--checkpoint",
        default="fp8-block",
        choices=["fp8-block", "other"],
        help="what is served (fp8-block)",
    )
    checker.add_argument("--kv-cache-dtype", metavar="TYPE", help="as the option of vllm serve")
    checker.add_argument("--json", action="store_true", help="for programs")
    checker.set_defaults(func=_check)


def _default(key: str) -> str:
    return str(HostSpec.model_fields[key].default)


def _known(kind: str, name: str, table: Mapping[str, Any]) -> str:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(table))}"
        raise OperatorError(f"{kind} {name}: unknown; {hint}")
    return name


def _check(arguments: argparse.Namespace) -> int:
    name = _known("release", arguments.release, catalog.releases())
    _known("--platform", arguments.platform, catalog.platforms())
    if arguments.gpu is not None:
        _known("--gpu", arguments.gpu, catalog.accelerators())
    for pin in arguments.pin:
        package, equals, version = pin.partition("==")
        if not (package and equals and is_version(version)):
            raise OperatorError(f"--pin {pin}: expected NAME==VERSION, such as pydantic==2.12.5")
    if arguments.driver is not None and not is_version(arguments.driver):
        raise OperatorError(f"--driver {arguments.driver}: expected a version such as 580.95.05")
    target = Target(
        platform=arguments.platform,
        architecture=arguments.arch,
        python=arguments.python,
        accelerator=arguments.gpu,
        driver=arguments.driver,
        pins=tuple(arguments.pin),
        build=arguments.build,
        fp8_block=arguments.checkpoint == "fp8-block",
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    verdicts = check(name, target)
    refused = any(verdict.severity == "error" for verdict in verdicts)
    _say(name, verdicts, advice(name, target), refused, arguments.json)
    return 1 if refused else 0


def _say(name: str, verdicts: Iterable[Verdict], newest: str, refused: bool, as_json: bool) -> None:
    if as_json:
        report = {
            "release": name,
            "fits": not refused,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
            "advice": newest,
        }
        print(json.dumps(report, indent=1))
        return
    print(f"{title(name)} {'does not fit' if refused else 'fits'}")
    for verdict in verdicts:
        print(f"{verdict.severity}: {verdict}")
    print(newest)


def _list(arguments: argparse.Namespace) -> int:
    tables: dict[str, Mapping[str, Any]] = {
        "releases": catalog.releases(),
        "accelerators": catalog.accelerators(),
        "platforms": catalog.platforms(),
        "options": catalog.serve_options(),
    }
    if arguments.json:
        plain = {
            title: {name: entry.model_dump() for name, entry in table.items()}
            for title, table in tables.items()
        }
        print(json.dumps(plain, indent=1))
        return 0
    console = Console(highlight=False)
    for heading, columns, rows in _tables():
        table = Table(title=heading, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return 0


def _tables() -> Iterable[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Heading, columns and rows of each table."""
    releases: list[tuple[str, ...]] = [
        (n, r.python, r.torch, r.cuda or "-", r.glibc, r.pydantic, r.transformers_gemma4 or "no",
         "; ".join(trap.reason for trap in r.traps), r.source)
        for n, r in catalog.releases().items()
    ]  # fmt: skip
    yield (
        "engine_release",
        ("Name", "Python", "torch", "CUDA", "glibc", "pydantic", "Gemma 4", "Traps", "Source"),
        releases,
    )
    accelerators: list[tuple[str, ...]] = [
        (n, a.vendor, a.compute_capability or "-", str(a.memory_mib or "-"), a.fp8_block,
         " ".join(a.pci), a.source)
        for n, a in catalog.accelerators().items()
    ]  # fmt: skip
    yield (
        "accelerator",
        ("Name", "Vendor", "Capability", "MiB", "Block FP8", "PCI ids", "Source"),
        accelerators,
    )
    platforms: list[tuple[str, ...]] = [
        (n, p.family, p.glibc, " ".join(p.packages), p.source)
        for n, p in catalog.platforms().items()
    ]
    yield ("platform", ("Name", "Packages by", "glibc", "Packages", "Source"), platforms)
    options: list[tuple[str, ...]] = [
        (n, ", ".join(o.accepted) or "never", o.instead, o.source)
        for n, o in catalog.serve_options().items()
    ]
    yield ("options", ("Option", "Accepted by", "Instead", "Source"), options)

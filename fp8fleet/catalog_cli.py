"""`fp8fleet catalog`: the catalogue as tables, and whether a release fits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console

from fp8fleet import catalog
from fp8fleet.catalog_check import (
    Target,
    Verdict,
    advice,
    check,
    is_driver_version,
    is_version,
    not_judged,
    title,
)
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
    checker.add_argument("--arch", choices=["x86_64", "aarch64"], help="(x86_64)")
    checker.add_argument("--driver", metavar="V", help="NVIDIA's driver, such as 535.104.05")
    checker.add_argument("--gpu", metavar="NAME", help="accelerator, such as a100-80g")
    checker.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION")
    checker.add_argument("--python", metavar="V", help=f"({_default('engine_python')})")
    checker.add_argument(
        "--build", default="wheel", choices=["wheel", "source"], help="as engine_build (wheel)"
    )
    checker.add_argument(
        "--checkpoint",
        choices=["fp8-block", "other"],
        help="what is served (fp8-block); other: BF16, INT8",
    )
    checker.add_argument("--kv-cache-dtype", metavar="TYPE", help="as the option of vllm serve")
    # without a default of its own, so that `catalog --json check` stays what it says
    checker.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="for programs"
    )
    checker.set_defaults(func=_check)


def _default(key: str) -> str:
    return str(HostSpec.model_fields[key].default)


def _known(kind: str, name: str, table: Mapping[str, Any]) -> str:
    if name not in table:
        raise OperatorError(f"{kind} {name}: unknown; known are {', '.join(table)}")
    return name


def _pin(text: str) -> str:
    """A pin as the gates read it: no spaces, no extras, which change nothing of the version."""
    refused = OperatorError(f"--pin {text}: expected NAME==VERSION, such as pydantic==2.12.5")
    try:
        pin = Requirement(text)
    except InvalidRequirement:
        raise refused from None
    (only, *others) = pin.specifier or [None]
    if only is None or others or pin.url or pin.marker or only.operator != "==":
        raise refused
    if not is_version(only.version):  # such as 1.*
        raise refused
    return f"{pin.name}=={only.version}"


def _check(arguments: argparse.Namespace) -> int:
    name = _known("release", arguments.release, catalog.releases())
    _known("--platform", arguments.platform, catalog.platforms())
    if arguments.gpu is not None:
        _known("--gpu", arguments.gpu, catalog.accelerators())
    pins = tuple(map(_pin, arguments.pin))
    if arguments.driver is not None and not is_driver_version(arguments.driver):
        raise OperatorError(f"--driver {arguments.driver}: expected a version such as 580.95.05")
    python = _default("engine_python") if arguments.python is None else arguments.python
    if not re.fullmatch(r"3\.[0-9]{1,2}(\.[0-9]{1,2})?", python):
        raise OperatorError(f"--python {arguments.python}: expected a version such as 3.12")
    target = Target(
        platform=arguments.platform,
        architecture=arguments.arch or "x86_64",
        python=python,
        accelerator=arguments.gpu,
        driver=arguments.driver,
        pins=pins,
        build=arguments.build,
        fp8_block=arguments.checkpoint != "other",
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    verdicts = check(name, target)
    refused = any(verdict.severity == "error" for verdict in verdicts)
    report = {
        "release": name,
        "fits": not refused,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        "assumed": list(_assumed(arguments, target)),
        "not_judged": list(not_judged(name, target)),
        "advice": advice(name, target),
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        _say(name, verdicts, report)
    return 1 if refused else 0


def _assumed(arguments: argparse.Namespace, target: Target) -> Iterator[str]:
    """What stands for the options that were left out."""
    if arguments.checkpoint is None:
        yield "a block-FP8 checkpoint (--checkpoint other for BF16 or INT8)"
    if arguments.arch is None:
        yield target.architecture
    if arguments.python is None:
        yield f"Python {target.python}"


def _say(name: str, verdicts: Iterable[Verdict], report: Mapping[str, Any]) -> None:
    print(f"{title(name)} {'fits' if report['fits'] else 'does not fit'}")
    for verdict in verdicts:
        print(f"{verdict.severity}: {verdict}")
    for words, key in (("assumed", "assumed"), ("not judged", "not_judged")):
        if report[key]:
            print(f"{words}: {', '.join(report[key])}")
    print(report["advice"])


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
    console = Console(soft_wrap=True, highlight=False)
    for heading, entries in _texts():
        console.print(f"[bold]{heading}[/bold]")
        for name, facts in entries:
            console.print(f"  {name:<24} {facts[0]}", markup=False)
            for fact in facts[1:]:
                console.print(f"  {'':<24} {fact}", markup=False)
    return 0


_Texts = list[tuple[str, list[str]]]


def _texts() -> Iterable[tuple[str, _Texts]]:
    """Headings with their entries: name and lines."""
    yield "engine_release", [(n, _release(r)) for n, r in catalog.releases().items()]
    yield "accelerator", [(n, _accelerator(a)) for n, a in catalog.accelerators().items()]
    platforms: _Texts = [
        (n, [f"{p.family}, glibc {p.glibc}: {' '.join(p.packages)}", f"source: {p.source}"])
        for n, p in catalog.platforms().items()
    ]
    yield "platform", platforms
    options: _Texts = [(n, _past(n, o)) for n, o in catalog.serve_options().items()]
    yield "options of vllm serve that come and go", options


def _past(name: str, option: catalog.ServeOption) -> list[str]:
    having = [v for v, table in catalog.option_tables().items() if name in table.names]
    lines = [f"releases whose table has it: {', '.join(having) or 'none'}"]
    return [*lines, option.remedy] if option.remedy else lines


def _release(release: catalog.Release) -> list[str]:
    cuda = f"CUDA {release.cuda}" if release.cuda else f"CANN {release.cann}"
    gemma4 = f"Gemma 4 with transformers{release.transformers_gemma4}"
    lines = [
        f"Python {release.python}, torch {release.torch}, {cuda}, pydantic {release.pydantic}",
        f"wheels: {', '.join(release.architectures) or 'none'}, glibc {release.glibc};"
        f" {gemma4 if release.transformers_gemma4 else 'no Gemma 4'};"
        f" {'block FP8' if release.fp8_block else 'no block FP8'}",
    ]
    for trap in release.traps:
        where = trap.architecture or "all architectures"
        lines.append(f"below glibc {trap.glibc}, {where}: {trap.reason}")
    if release.lock_needs:
        lines.append(f"its lock needs {release.lock_needs}")
    return [*lines, f"source: {release.source}"]


def _accelerator(accelerator: catalog.Accelerator) -> list[str]:
    capability = accelerator.compute_capability
    memory = accelerator.memory_mib
    facts = [accelerator.vendor, f"block FP8: {accelerator.fp8_block}"]
    facts += [f"compute capability {capability}"] if capability else []
    facts += [f"{memory} MiB"] if memory else []
    facts += [f"PCI {' '.join(accelerator.pci)}"] if accelerator.pci else []
    return [", ".join(facts), f"source: {accelerator.source}"]

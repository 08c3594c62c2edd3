"""The fp8fleet command of the control machine."""

from __future__ import annotations

import pyinfra_cli  # noqa: F401  isort: skip - it patches the standard library: before all others

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fp8fleet import catalog_cli, hostcli, probe_cli, translate_cli
from fp8fleet.errors import OperatorError
from fp8fleet.fetch import human_bytes, standard_reporter
from fp8fleet.inventory import load_fleet, parse_data
from fp8fleet.locks import make_lock
from fp8fleet.manifest_create import (
    CreateOptions,
    NotServable,
    create_manifest,
)
from fp8fleet.output import run, say
from fp8fleet.plan import FleetPlan, HostPlan, InstancePlan, PlannedFile
from fp8fleet.planner import make_plan
from fp8fleet.secrets import SecretRef
from fp8fleet.session import limited


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code (see `fp8fleet.output.run`)."""

    def command() -> int:
        arguments = _parser().parse_args(argv)
        handler: Callable[[argparse.Namespace], int] = arguments.func
        return handler(arguments)

    return run(command)


def _parser() -> argparse.ArgumentParser:
    parser = hostcli.Parser(prog="fp8fleet", description=__doc__)
    subparsers: argparse._SubParsersAction[Any] = parser.add_subparsers(
        required=True, metavar="COMMAND"
    )
    plan = subparsers.add_parser("plan", help="print what every host shall be")
    _inventory_arguments(plan)
    plan.add_argument("--limit", action="append", default=[], metavar="HOST", help="host or group")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.set_defaults(func=_plan)
    render = subparsers.add_parser("render", help="write every file as it would land on the hosts")
    _inventory_arguments(render)
    render.add_argument("--out", required=True, type=Path, metavar="DIR", help="DIR/<host>/<path>")
    render.set_defaults(func=_render)
    lock = subparsers.add_parser("lock", help="hash-lock an engine release for a platform")
    lock.add_argument("release", metavar="RELEASE", help="vLLM release, such as 0.33.0")
    lock.add_argument("--platform", required=True, metavar="P", help="such as ubuntu-22.04")
    lock.add_argument("--arch", default="x86_64", metavar="A", choices=["x86_64", "aarch64"])
    lock.add_argument("--python", default="3.12", metavar="V", help="Python version (3.12)")
    lock.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION")
    lock.add_argument(
        "--build", default="wheel", choices=["wheel", "source"], help="as engine_build (wheel)"
    )
    lock.add_argument(
        "--output", type=Path, help="default: locks/vllm-RELEASE-P-A.txt (vllm-ascend-...)"
    )
    lock.set_defaults(func=_lock)
    catalog_cli.register(subparsers)
    probe_cli.register(subparsers)
    translate_cli.register(subparsers)
    hostcli.register(subparsers)
    _register_manifest(subparsers)
    _register_lab(subparsers)
    return parser


def _register_lab(subparsers: Any) -> None:
    """The lab is part of a checkout, not of an installed package."""
    try:
        from lab import cli as lab_cli
    except ModuleNotFoundError as error:
        if error.name != "lab":
            raise
    else:
        lab_cli.register(subparsers)


def _register_manifest(subparsers: argparse._SubParsersAction[Any]) -> None:
    manifest = subparsers.add_parser("manifest", help="make and check manifests of models")
    commands: argparse._SubParsersAction[Any] = manifest.add_subparsers(
        required=True, metavar="COMMAND"
    )
    hostcli.register_verify(commands)
    hostcli.register_torrent(commands)
    create = commands.add_parser("create", help="make models/NAME/ of files somewhere")
    create.add_argument("name", metavar="NAME", help="models/NAME/ is written")
    create.add_argument("--directory", type=Path, metavar="DIR", help="a directory with the files")
    create.add_argument("--sums", metavar="FILE", help="a SHA256SUMS file or its URL")
    create.add_argument("--base", metavar="URL", help="with --sums: where the files are")
    create.add_argument("--hub", metavar="ORG/MODEL", help="Hugging Face, or HF_ENDPOINT's mirror")
    create.add_argument("--modelscope", metavar="ORG/MODEL", help="ModelScope")
    create.add_argument(
        "--revision",
        metavar="REV",
        help="with a hub: branch, tag or commit (main, master); else: the manifest's own name of it"
        " (digits of the content's digest)",
    )
    create.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="URL",
        help="where hosts fetch the files, in front of the hub or --base; several in order",
    )
    create.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="beyond the usual files"
    )
    create.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="leave out")
    hostcli.add_token(create, "; --hub also reads HF_TOKEN")
    create.add_argument("--force", action="store_true", help="write over a manifest that exists")
    create.set_defaults(func=_manifest_create)


def _manifest_create(arguments: argparse.Namespace) -> int:
    token: SecretRef | None = arguments.token
    if token is None and arguments.hub and os.environ.get("HF_TOKEN"):
        token = SecretRef("env", "HF_TOKEN")
    options = CreateOptions(
        arguments.name,
        directory=arguments.directory,
        sums=arguments.sums,
        base=arguments.base,
        hub=arguments.hub,
        modelscope=arguments.modelscope,
        revision=arguments.revision,
        sources=tuple(arguments.source),
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        token=token.resolve() if token else None,
        token_for=arguments.token_for,
        force=arguments.force,
    )
    with standard_reporter() as reporter:
        try:
            created = create_manifest(options, reporter)
        except NotServable as refusal:
            for finding in refusal.findings:
                say(finding.line)
            raise
    for note in created.notes:
        say(f"note: {note}")
    manifest = created.manifest
    say(
        f"{created.path}: {len(manifest.files)} files, {human_bytes(manifest.total_bytes)},"
        f" revision {manifest.revision}, quantization {manifest.quantization}"
    )
    return 0


def _inventory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inventory", metavar="INVENTORY", help="such as inventories/prod.py")
    parser.add_argument(
        "--data", action="append", default=[], metavar="KEY=VALUE", help="as pyinfra's --data"
    )


def _plan(arguments: argparse.Namespace) -> int:
    fleet = load_fleet(arguments.inventory, parse_data(arguments.data))
    names = limited(fleet, arguments.limit)
    plan = make_plan(fleet)
    if arguments.json:
        print(json.dumps(_plan_json(plan, names), indent=2))
        return 0
    console = Console(soft_wrap=True, highlight=False)
    for name in names:
        _print_host(console, plan.hosts[name])
    return 0


def _plan_json(plan: FleetPlan, names: Sequence[str]) -> dict[str, Any]:
    hosts = {name: dataclasses.asdict(plan.hosts[name]) for name in names}
    for name, host in hosts.items():
        host["files"] = [_file_json(file) for file in plan.hosts[name].files]
    return {"inventory": plan.inventory, "hosts": hosts}


def _file_json(file: PlannedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": file.role, "path": file.path, "mode": file.mode}
    entry |= {"owner": file.owner, "group": file.group, "bytes": len(file.content)}
    # with secrets in it, of the text with placeholders
    return entry | {"sha256": hashlib.sha256(file.content).hexdigest()}


def _print_host(console: Console, host: HostPlan) -> None:
    console.print(f"[bold]{host.name}[/bold]  {host.platform}")
    rows: list[tuple[str, str]] = [("note", note) for note in host.notes]
    packages = (*host.packages, *host.firewall.packages)
    pins = host.preparation.versions
    shown = (f"{name}={pins[name]}" if name in pins else name for name in packages)
    rows.append(("packages", " ".join(shown)))
    rows.append(("  if absent", f"{host.preparation.time.package} (where no time service runs)"))
    rows.append(("held packages", " ".join(host.preparation.held) or "none"))
    rows += _driver_rows(host)
    if host.cmake:
        archive = host.cmake.url or "no archive is named (cmake_archive_url)"
        rows.append(("cmake", f"{host.cmake.minimum} or newer: the host's own, else {archive}"))
    for environment in host.environments:
        conda = f" + {' '.join(environment.conda_packages)}" if environment.conda_packages else ""
        rows.append(
            (environment.name, f"{environment.prefix}  (Python {environment.python}{conda})")
        )
    if host.model:
        gigabytes = host.model.size / 1e9
        text = f"{host.model.directory}  ({host.model.files} files, {gigabytes:.3g} GB)"
        rows.append((f"model {host.model.name}", text))
        if host.model.peer:
            rows.append(("  shared with", " ".join(host.model.peer.peers)))
        if host.model.note:
            rows.append(("  note", host.model.note))
    for alike in _alike(host.instances):
        rows += _server_rows(alike)
    if host.proxy:
        upstreams = " ".join(host.proxy.upstreams)
        rows.append(("proxy", f"{host.proxy.url} -> {upstreams}  (model {host.proxy.model_id})"))
    let_in = (f"{rule.ports()} from {rule.source or 'all'}" for rule in host.firewall.rules)
    rows.append(("firewall", f"{host.firewall.tool}: {', '.join(let_in)}"))
    if host.selinux:
        parts: list[str] = [host.selinux.mode]
        parts += [f"{name}={int(value)}" for name, value in host.selinux.booleans.items()]
        parts += [f"http_port_t:{port}" for port in host.selinux.ports]
        rows.append(("SELinux", " ".join(parts)))
    rows.append(("files", f"{len(host.files)}, see: fp8fleet render"))
    for label, text in rows:
        console.print(f"  {label:<18} {text}", markup=False)


def _alike(instances: Sequence[InstancePlan]) -> list[list[InstancePlan]]:
    """Servers in groups that differ in name, port, place and notes alone."""
    groups: dict[str, list[InstancePlan]] = {}
    for instance in instances:
        options = {k: v for k, v in instance.options.items() if k != "port"}
        same = (options, instance.node, instance.choices, instance.sampling, instance.capacity)
        groups.setdefault(repr((*same, instance.capacity_unknown)), []).append(instance)
    return list(groups.values())


def _server_rows(alike: Sequence[InstancePlan]) -> list[tuple[str, str]]:
    """Servers that are alike: a line each, and once what they have in common.

    What counts for all nodes of a server stands with the one that has the API.
    """
    rows = []
    first = alike[0]
    for instance in alike:
        devices = ",".join(str(device) for device in instance.devices) or "none"
        options = " ".join(f"{key}={value}" for key, value in instance.options.items())
        told = options if instance is first else f"else as {first.name}"
        text = f"devices {devices}  {told}"
        if instance.has_api:
            rows.append((f"server {instance.name}", f"{instance.url}  {text}"))
        else:
            rows.append((f"node of {instance.name}", text))
    if first.node:
        part = f"{first.node.rank + 1} of {len(first.node.hosts)}"
        rows.append(("  node", f"{part}: {' '.join(first.node.hosts)}"))
    if first.has_api:
        rows += [("  workload", f"{c.option} {c.value}: {c.reason}") for c in first.choices]
        rows.append(("  sampling", str(first.sampling)))
        rows += _capacity_rows(first)
    holders: dict[str, list[str]] = {}
    for instance in alike:
        for note in instance.notes:
            holders.setdefault(note, []).append(instance.name)
    for note, names in holders.items():
        whose = "" if len(names) == len(alike) else f"{' '.join(names)}: "
        rows.append(("  note", f"{whose}{note}"))
    return rows


def _driver_rows(host: HostPlan) -> list[tuple[str, str]]:
    """Where drivers come from, and the packages that their installers need."""
    rows = []
    for driver in host.drivers.items:
        rows.append((f"driver {driver.name}", driver.url or " ".join(driver.packages)))
        if driver.needs:
            needs = " ".join(driver.needs).replace("{kernel}", "$(uname -r)")
            rows.append(("  if absent", needs))
    return rows


def _capacity_rows(instance: InstancePlan) -> list[tuple[str, str]]:
    """What a server's KV cache holds, and the sum that says so."""
    capacity = instance.capacity
    if capacity is None:
        why = instance.capacity_unknown
        return [("  KV cache", f"unknown: {why}")] if why else []
    if capacity.measured_kv_tokens is None:
        tokens = f"about {capacity.kv_tokens:,} tokens (estimate)"
    else:
        error = f"{100 * (capacity.error or 0):+.2f} %"
        tokens = f"{capacity.measured_kv_tokens:,} tokens (measured; the estimate is {error} off)"
    if capacity.context:
        tokens += f", {capacity.sequences:,.1f} sequences of {capacity.context:,}"
    if capacity.combination.data_parallel_size > 1:
        tokens += f", in each of {capacity.combination.data_parallel_size} ranks"
    largest = f"the largest context is {capacity.largest_context:,}"
    (lent, *taken) = capacity.parts
    terms = " - ".join(
        [
            f"{_binary(lent.bytes)} ({lent.name}, {lent.how})",
            *(f"{_binary(part.bytes)} {part.name} ({part.how})" for part in taken),
        ]
    )
    return [
        ("  KV cache", f"{tokens}; {largest}"),
        ("  a device", f"{_binary(capacity.kv_bytes)} = {terms}"),
    ]


def _binary(size: int) -> str:
    """Bytes without their sign, in GiB or MiB: ``240 MiB``."""
    size = abs(size)
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _render(arguments: argparse.Namespace) -> int:
    plan = make_plan(load_fleet(arguments.inventory, parse_data(arguments.data)))
    count = 0
    try:
        _clear(arguments.out)
        for name, host in plan.hosts.items():
            for file in host.files:
                target = arguments.out / name / file.path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.content)
                target.chmod(int(file.mode, 8))
                count += 1
    except OSError as error:
        raise OperatorError(f"--out {arguments.out}: cannot be written: {error}") from None
    print(f"{count} files of {len(plan.hosts)} hosts in {arguments.out}")
    return 0


RENDERED = ".fp8fleet-rendered"
"""Marks a folder that ``render`` wrote and may therefore replace."""


def _clear(folder: Path) -> None:
    """An empty ``folder``: nothing of an earlier rendering may look like part of this one."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / RENDERED).is_file():
            raise OperatorError(
                f"--out {folder}: not empty and not written by render: name another"
            )
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != RENDERED:
                entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RENDERED).touch()


def _lock(arguments: argparse.Namespace) -> int:
    release = "vllm-" + arguments.release.removeprefix("vllm-")
    name = f"{release}-{arguments.platform}-{arguments.arch}.txt"
    output = arguments.output or Path("locks") / name
    pins = tuple(arguments.pin)
    make_lock(
        arguments.release,
        arguments.platform,
        arguments.arch,
        arguments.python,
        pins,
        output,
        arguments.build,
    )
    print(output)
    return 0

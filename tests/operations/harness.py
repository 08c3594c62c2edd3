"""Runs operations of roles/ against recorded facts, and facts' commands in a real shell.

pyinfra-testing's JSON files cannot hold our plans and fact dataclasses, so that this small harness
stands in: a host whose facts are given as Python values, and the commands that come out.
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyinfra.api import FactBase, FunctionCommand, StringCommand
from pyinfra.context import ctx_host, ctx_state

from fp8fleet.inventory import load_fleet
from fp8fleet.plan import HostPlan, PlannedFile
from fp8fleet.planner import make_plan
from roles.operations import Streamed

Facts = Mapping[type[FactBase[Any]], Any]
"""A fact's value, or a function of the fact's arguments, by fact."""


@dataclass(frozen=True)
class Command:
    """One command that an operation asks for."""

    text: str
    stdin: str | None = None
    streamed: bool = False


@dataclass(eq=False)
class RecordedHost:
    """A host whose facts are known."""

    facts: Facts
    name: str = "gpu-1"
    print_prefix: str = "[gpu-1] "
    connector: Any = None
    connector_data: dict[str, Any] = field(default_factory=dict)
    current_op_global_arguments: dict[str, Any] | None = None
    asked: list[tuple[type[FactBase[Any]], dict[str, Any]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    state: Any = None

    def get_fact(self, fact: type[FactBase[Any]], **arguments: Any) -> Any:
        """The recorded value; arguments that the fact doesn't take are an error."""
        inspect.signature(fact().command).bind(**arguments)
        self.asked.append((fact, arguments))
        value = self.facts[fact]
        return value(**arguments) if callable(value) else value

    def log_styled(self, message: str, **style: Any) -> None:
        """What the operator would read."""
        del style
        self.said.append(message)


@contextmanager
def context(
    host: RecordedHost, executing: bool = False, run: Sequence[str] | None = None
) -> Iterator[SimpleNamespace]:
    """pyinfra's ``host`` and ``state`` within the block; ``run``: the hosts that the run is on."""
    active = [SimpleNamespace(name=name) for name in run or [host.name]]
    inventory = SimpleNamespace(get_active_hosts=lambda: active)
    state = SimpleNamespace(is_executing=executing, print_input=False, inventory=inventory)
    host.state = state
    with ctx_state.use(state), ctx_host.use(host):
        yield state


def commands(
    operation: Callable[..., Any],
    facts: Facts | None = None,
    run: Sequence[str] | None = None,
    **arguments: Any,
) -> list[Command]:
    """The commands that ``operation`` asks for on a host with these facts, in a run on ``run``."""
    host = RecordedHost(facts or {})
    with context(host, run=run):
        inner: Callable[..., Iterator[StringCommand]] = operation._inner  # type: ignore[attr-defined]
        return [_command(command) for command in inner(**arguments)]


def lines(operation: Callable[..., Any], facts: Facts | None = None, **arguments: Any) -> list[str]:
    """The texts of the commands."""
    return [command.text for command in commands(operation, facts, **arguments)]


def _command(command: StringCommand | FunctionCommand) -> Command:
    assert isinstance(command, StringCommand)
    text = str(command.get_raw_value())
    stdin = command.connector_arguments.get("_stdin")
    return Command(text, stdin, isinstance(command, Streamed))


def run(command: Command | str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a host would: by POSIX sh."""
    text, stdin = (command, None) if isinstance(command, str) else (command.text, command.stdin)
    return subprocess.run(
        ["/bin/sh", "-c", text],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def asked(fact: type[FactBase[Any]], **arguments: Any) -> Any:
    """The fact's value on this machine: its command run by sh, its output read."""
    made = fact()
    result = run(str(made.command(**arguments)))
    assert result.returncode == 0, result.stderr
    return made.process(result.stdout.splitlines())


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program of the host, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


# A host's plan: the worked example's, its parts with short paths.

REPO = Path(__file__).resolve().parents[2]
_FLEET = make_plan(load_fleet(str(REPO / "inventories/prod.py")), REPO)
_HOST = _FLEET.hosts["gpu-h100-1"]
assert _HOST.engine
assert _HOST.model
_PROXY = _FLEET.hosts["gw-1"].proxy
assert _PROXY

FRONTEND = replace(
    _HOST.frontend,
    program="/opt/f/frontend/d1/bin/conda",
    prefix="/opt/f/frontend/d1",
    url="https://m.example.com/Miniforge3.sh",
    sha256="d1" * 32,
)

TOOLS = replace(_HOST.tools, prefix="/opt/f/tools/t1")

ENGINE = replace(
    _HOST.engine,
    prefix="/opt/f/engines/e1",
    conda_packages=("cuda-nvcc=13.0", "ninja"),
    channels=("https://m.example.com/conda", "a b"),
    requirements="/etc/f/engine.txt",
    proof_environment={"VLLM_TARGET_DEVICE": "cpu"},
)

MODEL = replace(
    _HOST.model,
    manifest="/etc/f/models/tiny-1.toml",
    directory="/models/tiny/1",
    headers=None,
)

INSTANCE = replace(
    _HOST.instances[0],
    name="main",
    unit="fp8fleet-main.service",
    address="127.0.0.1",
    port=8000,
    model_id="tiny",
    key_file=None,
    marker="/run/fp8fleet/main.ready",
)

PROXY = replace(_PROXY, digest="0123456789ab", api_key=None, address="10.0.0.1")


def host_plan(**changes: Any) -> HostPlan:
    """The plan of a serving host."""
    values: dict[str, Any] = {
        "package_options": ("--index-url=https://m.example.com/simple?a&b",),
        "ca_bundle": None,
        "frontend": FRONTEND,
        "tools": TOOLS,
        "program": "/opt/f/bin/fp8fleet.pyz",
        "engine": ENGINE,
        "model": MODEL,
        "instances": (INSTANCE,),
        "proxy": PROXY,
        "gateways": (),
    }
    return replace(_HOST, **(values | changes))


def planned_file(path: Path | str, content: bytes = b"text\n", **changes: Any) -> PlannedFile:
    """A planned file that belongs to whoever runs the tests."""
    values: dict[str, Any] = {"role": "host", "owner": owner(), "group": group()}
    return PlannedFile(path=str(path), content=content, **(values | changes))


def owner() -> str:
    """The user that runs the tests."""
    return run("id -un").stdout.strip()


def group() -> str:
    """Its group."""
    return run("id -gn").stdout.strip()

"""A small site on disk (inventory, group data, locks, a manifest) that tests can break."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, check_secrets, load_fleet, parse_data
from fp8fleet.plan import FleetPlan, HostPlan
from fp8fleet.planner import make_plan

REPO = Path(__file__).resolve().parents[2]
PROD = "inventories/prod.py"
DIGEST = "0123456789abcdef" * 4

INSTANCE: dict[str, Any] = {"name": "main", "port": 8000, "devices": [0]}

SERVING: dict[str, Any] = {
    "platform": "ubuntu-22.04",
    "accelerator": "h100-80g",
    "conda_frontend_url": "https://mirror.example.com/Miniforge3.sh",
    "conda_frontend_sha256": DIGEST,
    "engine_release": "0.33.0",
    "engine_requirements": "locks/engine.txt",
    "model_manifest": "models/tiny/manifest.toml",
    "instances": [INSTANCE],
}
"""Group data of a serving host that is right."""

GATEWAY: dict[str, Any] = {
    "platform": "ubuntu-22.04",
    "conda_frontend_path": "/opt/conda/bin/conda",
    "service_address": "10.30.0.100",
}
"""Host data of a gateway that is right."""

MANIFEST = f"""\
name = "tiny"
revision = "1"
sources = ["https://mirror.example.com/models/tiny"]

[[files]]
path = "config.json"
size = 2
sha256 = "{DIGEST}"
"""


def lock_text(**versions: str) -> str:
    """A lock with one made-up hash a requirement; ``_`` in a name stands for ``-``."""
    lines = [
        f"{name.replace('_', '-')}=={version} \\\n    --hash=sha256:{DIGEST}"
        for name, version in versions.items()
    ]
    return "# a comment\n" + "\n".join(lines) + "\n"


@dataclass
class Site:
    """Files of a project under ``root``; change the fields, then load, plan or run it."""

    root: Path
    hosts: dict[str, dict[str, Any]] = field(default_factory=lambda: {"gpu-1": {}})
    """The hosts of the group ``serving`` with their own data."""
    serving: dict[str, Any] = field(default_factory=lambda: dict(SERVING))
    """Group data of ``serving``."""
    everyone: dict[str, Any] = field(default_factory=dict)
    """Group data of ``all``."""
    gateways: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The hosts of the group ``gateway`` with their own data."""
    written: int = 0

    def __post_init__(self) -> None:
        self.file("locks/engine.txt", lock_text(vllm="0.33.0", pydantic="2.12.5"))
        self.file("locks/tools.txt", lock_text(requests="2.34.2"))
        self.file("models/tiny/manifest.toml", MANIFEST)

    def file(self, name: str, text: str) -> Path:
        """Write a file of the project."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def inventory(self, text: str | None = None) -> str:
        """Write inventory and group data; returns the inventory's path.

        Every call writes another folder: pyinfra reads a file once a process.
        """
        self.written += 1
        base = f"inventories-{self.written}"
        self.file(f"{base}/group_data/serving.py", _module(self.serving))
        self.file(f"{base}/group_data/all.py", _module(self.everyone))
        lines = [f"serving = {list(self.hosts.items())!r}"]
        if self.gateways:
            lines.append(f"gateway = {list(self.gateways.items())!r}")
        return str(self.file(f"{base}/site.py", text if text is not None else "\n".join(lines)))

    def fleet(self, *data: str) -> Fleet:
        """The validated inventory; ``data``: ``--data`` arguments."""
        return load_fleet(self.inventory(), parse_data(data))

    def plan(self, *data: str) -> FleetPlan:
        """The plan of the whole fleet."""
        return make_plan(self.fleet(*data), self.root)

    def host_plan(self, name: str = "gpu-1") -> HostPlan:
        """The plan of one host."""
        return self.plan().hosts[name]

    def content(self, path: str, name: str = "gpu-1") -> str:
        """A planned file's text."""
        return file_text(self.host_plan(name), path)

    def refusal(self, *data: str) -> str:
        """The one line with which the inventory or its plan is refused."""
        return refusal(lambda: self.plan(*data))

    def secret_refusal(self) -> str:
        """The one line with which a deploy is refused for its secrets."""
        fleet = self.fleet()
        return refusal(lambda: check_secrets(fleet))


def _module(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


def file_text(host: HostPlan, path: str) -> str:
    """The text of the planned file at ``path``."""
    return next(file.content for file in host.files if file.path == path).decode()


def refusal(call: Callable[[], object]) -> str:
    """The message of the OperatorError that ``call`` raises: one line, exit code 2."""
    try:
        call()
    except OperatorError as error:
        message = str(error)
        assert error.exit_code == 2
        assert "\n" not in message
        assert "Traceback" not in message
        return message
    raise AssertionError("not refused")


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """``values`` less ``keys``."""
    return {key: value for key, value in values.items() if key not in keys}


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str


def fp8fleet(*arguments: str, cwd: Path = REPO, **environment: str) -> Ran:
    """Run the fp8fleet command in a process of its own."""
    start = "import sys; from fp8fleet.cli import main; sys.exit(main())"
    return _run([sys.executable, "-c", start, *arguments], cwd, environment)


def pyinfra(*arguments: str, cwd: Path = REPO, **environment: str) -> Ran:
    """Run pyinfra in a process of its own, by default in the project's root."""
    return _run([sys.executable, "-m", "pyinfra", *arguments], cwd, environment)


def _run(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Ran:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FP8FLEET_", "PYINFRA"))}
    run = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(REPO), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(run.returncode, run.stdout, run.stderr)

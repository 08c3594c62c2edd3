"""`make bench`: what a run costs on this machine, measured in one go on a lab host of its own.

Prints one line a figure. Times are of this machine at this moment; shares and counts carry over.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed, OperatorError
from lab.machine import missing
from lab.processes import say
from lab.site import named, repository

HOST = "lab-7"
INVENTORY = """
from runpy import run_path
serving = ([({name!r}, {{"ssh_hostname": {address!r}}})], run_path({lab!r})["_data"])
"""


@dataclass(frozen=True)
class Run:
    """One deploy: its wall time, its remote commands, and the server's own start in it."""

    seconds: float
    commands: int
    start_seconds: float


def main() -> int:
    """Measure and print; returns the exit code."""
    try:
        if reason := missing():
            raise OperatorError(f"the bench cannot run here: {reason}")
        _fp8fleet("lab", "up")
        _fp8fleet("lab", "destroy", HOST)
        _fp8fleet("lab", "create", HOST)
        try:
            _measure(_inventory())
        finally:
            _fp8fleet("lab", "destroy", HOST)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measure(inventory: Path) -> None:
    rebuild = _full(inventory)
    again = [_full(inventory) for _ in range(3)]
    no_op = sorted(run.seconds for run in again)[1]
    share = rebuild.start_seconds / rebuild.seconds
    print(f"rebuild of a destroyed host, warm caches  {rebuild.seconds:6.1f} s")
    print(f"  of which the server's own start         {rebuild.start_seconds:6.1f} s = {share:.0%}")
    print(f"full.py without changes, median of 3      {no_op:6.1f} s")
    print(f"  against the rebuild                     {no_op / rebuild.seconds:6.1%}")
    print(f"  remote commands                         {again[0].commands:6d}")


def _full(inventory: Path) -> Run:
    say(f"pyinfra -y {inventory.name} deploys/full.py")
    started = time.monotonic()
    done = subprocess.run(
        [
            *(f"{sys.prefix}/bin/pyinfra", "-y", "--debug"),
            *("--group-data", "inventories/group_data", str(inventory), "deploys/full.py"),
        ],
        cwd=repository(),
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    text = done.stdout + done.stderr
    if done.returncode:
        raise CheckFailed("full.py failed: " + " | ".join(text.splitlines()[-5:]))
    ready = re.search(r"ready after (\d+) s", text)
    return Run(seconds, text.count("Running command on"), float(ready[1]) if ready else 0.0)


def _inventory() -> Path:
    path = repository() / ".lab" / "bench.py"
    lab = str(repository() / "inventories/lab.py")
    path.write_text(INVENTORY.format(name=HOST, address=named(HOST).address, lab=lab))
    return path


def _fp8fleet(*arguments: str) -> None:
    command = [f"{sys.prefix}/bin/fp8fleet", *arguments]
    if subprocess.run(command, cwd=repository(), check=False).returncode:
        raise CheckFailed(f"fp8fleet {' '.join(arguments)} failed")


if __name__ == "__main__":
    sys.exit(main())

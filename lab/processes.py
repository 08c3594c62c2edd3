"""Programs the lab runs: short ones, long ones that show what they do, and background ones.

A background process writes down itself before it becomes what it is, so none can run unrecorded;
the record holds its start time and the machine's boot, so no other process is ever taken for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from fp8fleet.errors import CheckFailed

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SECONDS_BETWEEN_LINES = 3.0
_TAIL_LINES = 8

# $1 is the record; the arguments up to "--" are cgroup.procs files to enter; the rest is run.
_RECORDED = (
    f'cat "/proc/$$/stat" {_BOOT_ID} >"$1" || exit 1; shift; '
    'while [ "$1" != -- ]; do echo "$$" >"$1" || exit 1; shift; done; shift; exec "$@"'
)

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Tell the person at the terminal what happens now."""
    _console.print(line, markup=False)


def run(command: Sequence[str]) -> str:
    """Run a short command and return its output.

    Raises:
        CheckFailed: the command failed; the message holds the end of what it said.
    """
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise _failure(command, done.returncode, (done.stdout + done.stderr).splitlines())
    return done.stdout


def stream(command: Sequence[str], label: str, env: dict[str, str] | None = None) -> None:
    """Run a long command and show, every few seconds, the line that it is at.

    The command ends with this process, however this process ends.

    Args:
        command: the program and its arguments.
        label: stands before each line shown.
        env: the command's environment; None is this process's own.

    Raises:
        CheckFailed: the command failed; the message holds the end of what it said.
    """
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    )
    lines: list[str] = []
    shown_at = time.monotonic()
    assert process.stdout is not None
    with process, process.stdout as output:
        try:
            for line in output:
                lines.append(line.rstrip())
                if time.monotonic() - shown_at >= _SECONDS_BETWEEN_LINES:
                    shown_at = time.monotonic()
                    say(f"{label}: {lines[-1]}")
        except BaseException:
            process.kill()  # init of a pid namespace does not hear Ctrl-C
            raise
    if process.returncode != 0:
        raise _failure(command, process.returncode, lines)


def recorded(command: Sequence[str], record: Path, cgroups: Sequence[Path] = ()) -> list[str]:
    """Return the command that writes itself to ``record``, enters ``cgroups`` and runs ``command``.

    Args:
        command: the program and its arguments.
        record: the file that ``alive`` reads.
        cgroups: cgroup folders to enter first.
    """
    procs = [str(cgroup / "cgroup.procs") for cgroup in cgroups]
    return ["sh", "-c", _RECORDED, "sh", str(record), *procs, "--", *command]


def background(command: Sequence[str], record: Path, log: Path, cwd: Path | None = None) -> None:
    """Start a process that outlives this one and return when its pid stands in ``record``.

    Args:
        command: the program and its arguments.
        record: the file that ``alive`` reads.
        log: replaced by the process's output.
        cwd: the folder it starts in; None is this process's own.
    """
    record.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            recorded(command, record),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
        )
    while not alive(record) and process.poll() is None:
        time.sleep(0.01)


def alive(record: Path) -> int | None:
    """Return the pid in ``record`` while that very process runs, otherwise None.

    Format of the record: /proc/PID/stat (proc(5): pid, command, state, ..., start time as field 22
    in ticks since boot) and the boot's id. A zombie counts as ended.
    """
    try:
        stat, boot = record.read_text().rsplit("\n", 2)[:2]
        pid = int(stat.split(" ", 1)[0])
        now = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    same = boot == _BOOT_ID.read_text().strip() and _start_time(now) == _start_time(stat)
    return pid if same and _state(now) not in "ZX" else None


def wait_ended(records: Sequence[Path], seconds: float) -> bool:
    """Wait until none of the recorded processes runs; return False when one still does."""
    until = time.monotonic() + seconds
    while any(alive(record) for record in records):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def kill(record: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to the recorded process; nothing happens when it ended already."""
    if pid := alive(record):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(record: Path, seconds: float) -> None:
    """End the recorded process, by force where it does not within ``seconds``; nothing otherwise.

    The record is gone afterwards.
    """
    kill(record, signal.SIGTERM)
    if not wait_ended([record], seconds):
        kill(record)
        wait_ended([record], seconds)
    record.unlink(missing_ok=True)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, none when it ended."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (OSError, ValueError):
        return []


def _start_time(stat: str) -> str:
    return stat.rpartition(")")[2].split()[19]


def _state(stat: str) -> str:
    return stat.rpartition(")")[2].split()[0]


def _failure(command: Sequence[str], code: int, lines: list[str]) -> CheckFailed:
    said = " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())
    return CheckFailed(f"{command[0]} failed with exit code {code}: {said or 'it said nothing'}")

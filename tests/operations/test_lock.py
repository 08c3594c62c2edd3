"""The run lock, held by a real shell on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RecordedHost, context
from pyinfra.api import FunctionCommand

from roles.lock import operations as lock_operations
from roles.lock.operations import hold_lock


class Channel:
    """A paramiko client whose host is this machine."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def exec_command(self, command: str) -> tuple[Any, Any, Any]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process.stdin, process.stdout, Errors(process)

    def close(self) -> None:
        """End of the connection, as when the control machine dies."""
        for process in self.processes:
            process.communicate(timeout=30)


class Errors:
    """A stderr that gives bytes, as paramiko's does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> bytes:
        assert self.process.stderr
        return self.process.stderr.read().encode()


class Holder(RecordedHost):
    """A host that one run works on."""

    def __init__(self) -> None:
        super().__init__({})
        self.channel = Channel()
        self.connector = type("Connector", (), {"client": self.channel})()

    def hold(self, executing: bool = True) -> list[FunctionCommand]:
        """Run the operation."""
        with context(self, executing):
            return list(hold_lock._inner())

    @property
    def holds(self) -> bool:
        return "fp8fleet_lock" in self.connector_data

    def die(self) -> None:
        """The run ends, however."""
        if self.holds:
            self.connector_data["fp8fleet_lock"].kill()
        self.channel.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Holder]]:
    """Two runs on one host."""
    monkeypatch.setattr(lock_operations, "LOCK_FILE", str(tmp_path / "lock"))
    monkeypatch.setattr(lock_operations, "_unix_command", lambda script: script)
    runs = [Holder(), Holder()]
    yield runs
    for run in runs:
        run.die()


def refused(holder: Holder) -> str:
    """The line with which a run is refused."""
    (command,) = holder.hold()
    assert command.function(None, holder, *command.args, **command.kwargs) is False
    assert not holder.holds
    return holder.said[0]


def test_the_first_run_holds_the_lock_and_changes_nothing(runs: list[Holder]) -> None:
    assert runs[0].hold() == []
    assert runs[0].holds


def test_a_second_run_is_refused_with_who_holds_the_lock(runs: list[Holder]) -> None:
    runs[0].hold()
    line = refused(runs[1])
    assert "another run works on this host" in line
    assert f"process {os.getpid()}" in line
    assert "@" in line


def test_a_shell_that_prints_at_login_takes_the_lock_and_names_its_holder(
    runs: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = "echo Welcome; echo; echo held; "
    monkeypatch.setattr(lock_operations, "_unix_command", lambda script: loud + script)
    assert runs[0].hold() == []
    assert runs[0].holds
    line = refused(runs[1])
    assert f"process {os.getpid()}" in line
    assert "Welcome" not in line


def test_a_host_without_flock_says_that_the_lock_cannot_be_taken(
    runs: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_operations, "_unix_command", lambda script: f"PATH=/no; {script}")
    line = refused(runs[0])
    assert "the run lock" in line
    assert "cannot be taken:" in line
    assert "flock" in line
    assert "another run" not in line


def test_a_dead_runs_lock_is_released(runs: list[Holder]) -> None:
    runs[0].hold()
    runs[0].die()
    assert runs[1].hold() == []
    assert runs[1].holds


def test_a_silent_runs_lock_is_released(
    runs: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stands, but no sign of life comes through it."""
    monkeypatch.setattr(lock_operations, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock_operations, "_beat", lambda stdin, stdout: None)
    runs[0].hold()
    assert runs[0].channel.processes[0].wait(timeout=30) == 0
    assert runs[1].hold() == []


def test_a_run_that_gives_signs_of_life_keeps_its_lock(
    runs: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_operations, "HEARTBEAT_S", 0.5)
    runs[0].hold()
    with pytest.raises(subprocess.TimeoutExpired):
        runs[0].channel.processes[0].wait(timeout=4)
    assert "another run" in refused(runs[1])


def test_one_run_takes_the_lock_once(runs: list[Holder]) -> None:
    runs[0].hold()
    runs[0].hold()
    assert len(runs[0].channel.processes) == 1


def test_a_dry_run_takes_no_lock(runs: list[Holder]) -> None:
    assert runs[0].hold(executing=False) == []
    assert runs[0].channel.processes == []

"""The host's run lock: an flock held by a command whose stdin is this run's SSH channel."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import gevent
from pyinfra import host, state
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.connectors.util import make_unix_command_for_host

from roles.operations import failed

LOCK_FILE = "/run/fp8fleet.lock"
ANSWER = "fp8fleet-lock: "
HEARTBEAT_S = 15
"""Seconds between signs of life; the host gives the lock up after four without one."""


@operation()
def hold_lock() -> Iterator[FunctionCommand]:
    """Take the host's lock and hold it until this process ends.

    The kernel releases an flock when its holder ends, and the holder on the host ends when the
    channel closes or no heartbeat comes: a dead control machine's lock is released by itself.
    Nothing is changed on the host, so this operation never counts as a change.
    """
    client = getattr(host.connector, "client", None)
    if not state.is_executing or client is None or "fp8fleet_lock" in host.connector_data:
        return
    command = _unix_command(_hold_script())
    stdin, stdout, stderr = client.exec_command(command)
    # a shell's start-up files may print lines of their own
    answers = (line.strip() for line in stdout)
    answer = next((line for line in answers if line.startswith(ANSWER)), "")
    answer = answer.removeprefix(ANSWER)
    if answer != "held":
        yield failed(
            f"another run works on this host: {answer}; wait until it ends"
            " (the lock of a dead run is released within a minute)"
            if answer
            else f"the run lock {LOCK_FILE} cannot be taken:"
            f" {' '.join(stderr.read().decode(errors='replace').split())}"
        )
        return
    host.connector_data["fp8fleet_lock"] = gevent.spawn(_beat, stdin, stdout)


def _hold_script() -> str:
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    holder = f"{getpass.getuser()}@{platform.node()}, process {os.getpid()}, since {now}"
    alive = f'while [ -n "$(timeout {4 * HEARTBEAT_S} head -n 1)" ]; do :; done'
    inner = (
        f"echo {shlex.quote(holder)} >{LOCK_FILE}.holder; echo {shlex.quote(ANSWER)}held; {alive}"
    )
    held = f"flock --nonblock --conflict-exit-code 75 {LOCK_FILE} sh -c {shlex.quote(inner)}"
    return f"{held} || {{ [ $? -eq 75 ] && sed 's/^/{ANSWER}/' {LOCK_FILE}.holder; }}"


def _unix_command(script: str) -> str:
    arguments = {
        key: value
        for key, value in (host.current_op_global_arguments or {}).items()
        if key.startswith(("_sudo", "_su_", "_use_su", "_doas", "_dzdo", "_preserve"))
    }
    command = make_unix_command_for_host(state, host, StringCommand(script), **arguments)
    return str(command.get_raw_value())


def _beat(stdin: Any, stdout: Any) -> None:
    del stdout  # kept by the greenlet's arguments: a closed channel would end the lock
    while True:
        gevent.sleep(HEARTBEAT_S)
        try:
            stdin.write("alive\n")
            stdin.flush()
        except OSError:
            return

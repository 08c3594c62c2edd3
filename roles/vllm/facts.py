"""The state of servers: units, what they were started from, whether they were proved ready."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from pyinfra.api import FactBase

from fp8fleet.plan import RUN_DIRECTORY, UNIT_DIRECTORY, UNIT_PREFIX


@dataclass(frozen=True)
class ServerState:
    """A server as systemd sees it."""

    active: bool
    enabled: bool
    needs_reload: bool
    """systemd has not read the unit file as it is now."""
    started_from_present_files: bool
    ready: bool
    """This very start was proved ready, and /health answers."""


class Server(FactBase[ServerState]):
    """The state of the server ``unit``, whose health is at ``url``."""

    def command(self, unit: str, instance: str, url: str) -> str:
        properties = "ActiveState,SubState,UnitFileState,NeedDaemonReload,InvocationID"
        started = f"{RUN_DIRECTORY}/{instance}.started"
        health = f"curl -s -o /dev/null -w '%{{http_code}}' --max-time 5 --noproxy '*' {url}/health"
        return (
            f"systemctl show {shlex.quote(unit)} -p {properties}; "
            f'sha256sum -c --status {started} 2>/dev/null && echo "Started=present"; '
            f'echo "Health=$({health} 2>/dev/null)"; '
            f'echo "Marker=$(tr -d "\\n" <{RUN_DIRECTORY}/{instance}.ready 2>/dev/null)"'
        )

    @staticmethod
    def default() -> ServerState:
        return ServerState(False, False, False, False, False)

    def process(self, output: list[str]) -> ServerState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        active = (values.get("ActiveState"), values.get("SubState")) == ("active", "running")
        invocation = values.get("InvocationID")
        marked = _marked_invocation(values.get("Marker", ""))
        return ServerState(
            active=active,
            enabled=values.get("UnitFileState") == "enabled",
            needs_reload=values.get("NeedDaemonReload") == "yes",
            started_from_present_files=values.get("Started") == "present",
            ready=bool(active and invocation and marked == invocation)
            and values.get("Health") == "200",
        )


def _marked_invocation(marker: str) -> str | None:
    try:
        value = json.loads(marker)["invocation_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(value)


class UnitNames(FactBase[list[str]]):
    """The unit files of servers that lie on the host, planned or not."""

    def command(self) -> str:
        pattern = f"{UNIT_PREFIX}*.service"
        return f"cd {UNIT_DIRECTORY} && for u in {pattern}; do [ -e $u ] && echo $u; done; true"

    @staticmethod
    def default() -> list[str]:
        return []

    def process(self, output: list[str]) -> list[str]:
        return sorted(line.strip() for line in output if line.strip())

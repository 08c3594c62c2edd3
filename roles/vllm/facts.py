"""The state of servers: units, what they were started from, whether they were proved ready."""

from __future__ import annotations

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
    started_from: dict[str, str]
    """SHA256 of the files that the present start was made of, by path."""
    ready: bool
    """This very start was proved ready, and /health answers."""
    port_holder: str | None
    """Another unit of fp8fleet that listens on the server's port."""


class Server(FactBase[ServerState]):
    """The state of the server ``unit``; ``check`` is the command that says whether it is ready."""

    def command(self, unit: str, instance: str, port: int, check: str) -> str:
        properties = "ActiveState,SubState,UnitFileState,NeedDaemonReload"
        started = f"{RUN_DIRECTORY}/{instance}.started"
        return (
            f"systemctl show {shlex.quote(unit)} -p {properties}; "
            f"sed 's/^/Started=/' {started} 2>/dev/null; "
            f"{check} >/dev/null 2>&1 && echo Ready=yes; "
            f"for p in $(ss -Hltnp 'sport = :{port}' 2>/dev/null | grep -o 'pid=[0-9]*'); do "
            "grep -o 'fp8fleet-[^/]*[.]service' /proc/${p#pid=}/cgroup | head -n 1 | "
            "sed 's/^/Holder=/'; done; true"
        )

    @staticmethod
    def default() -> ServerState:
        return ServerState(False, False, False, {}, False, None)

    def process(self, output: list[str]) -> ServerState:
        pairs = [line.split("=", 1) for line in output if "=" in line]
        values = dict(pairs)
        started = [value.split(None, 1) for key, value in pairs if key == "Started"]
        return ServerState(
            active=(values.get("ActiveState"), values.get("SubState")) == ("active", "running"),
            enabled=values.get("UnitFileState") == "enabled",
            needs_reload=values.get("NeedDaemonReload") == "yes",
            started_from={entry[1]: entry[0] for entry in started if len(entry) == 2},
            ready=values.get("Ready") == "yes",
            port_holder=values.get("Holder"),
        )


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

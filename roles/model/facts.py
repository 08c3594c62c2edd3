"""Whether a model directory is whole."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

from fp8fleet.plan import PEER_UNIT, UNIT_DIRECTORY


class ModelIsWhole(FactBase[bool]):
    """Whether a model directory passes ``inspect``, the command that the operation ends with.

    It reads metadata only where it passed before and no file has changed.
    """

    def command(self, inspect: str) -> str:
        return f"{inspect} >/dev/null 2>&1 && echo whole || true"

    @staticmethod
    def default() -> bool:
        return False

    def process(self, output: list[str]) -> bool:
        return "whole" in output


@dataclass(frozen=True)
class PeerUnitState:
    """The unit that gives the model to other hosts, as systemd sees it."""

    exists: bool
    active: bool
    enabled: bool
    needs_reload: bool
    """systemd has not read the unit file as it is now."""


class PeerUnit(FactBase[PeerUnitState]):
    """The state of the unit that shares the model."""

    def command(self) -> str:
        properties = "ActiveState,UnitFileState,NeedDaemonReload"
        exists = f"[ -e {UNIT_DIRECTORY}/{PEER_UNIT} ] && echo Exists=yes"
        return f"systemctl show {PEER_UNIT} -p {properties}; {exists}; true"

    @staticmethod
    def default() -> PeerUnitState:
        return PeerUnitState(False, False, False, False)

    def process(self, output: list[str]) -> PeerUnitState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return PeerUnitState(
            exists=values.get("Exists") == "yes",
            active=values.get("ActiveState") == "active",
            enabled=values.get("UnitFileState") == "enabled",
            needs_reload=values.get("NeedDaemonReload") == "yes",
        )

"""What checks of a checkpoint find, and how many equal findings become one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

AGAIN = "fetch the file again"
SAME_REVISION = "take config.json, the index and all shards from one revision of the model"

Severity = Literal["error", "warning", "info"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Finding:
    """One thing that the inspection found."""

    code: str
    severity: Severity
    """``error``: the engine would die of it or answer wrongly."""
    file: str | None
    """Relative to the model directory."""
    tensor: str | None
    """The first one that has it."""
    message: str
    remedy: str
    count: int = 1
    """How many tensors of the file have it."""

    @property
    def line(self) -> str:
        """All of it on one line."""
        where = " ".join(part for part in (self.file, self.tensor) if part)
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        text = f"{where} {self.message}" if where else self.message
        return f"{self.severity}: {text}{more} [{self.code}]: {self.remedy}"


class Findings:
    """Collects findings; equal ones of a file's many tensors become one."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], Finding] = {}

    def add(
        self,
        code: str,
        message: str,
        remedy: str,
        file: str | None = None,
        tensor: str | None = None,
        severity: Severity = "error",
    ) -> None:
        """Note a finding; ``message`` says of ``tensor``, or else of ``file``, what is wrong."""
        # Without a tensor every finding counts for itself.
        key = (code, file) if tensor else (f"{code} {message}", file)
        first = self._found.get(key)
        if first is None:
            self._found[key] = Finding(code, severity, file, tensor, message, remedy)
        else:
            self._found[key] = replace(first, count=first.count + 1)

    def has(self, code: str) -> bool:
        """Whether there is one with that code."""
        return any(finding.code == code for finding in self._found.values())

    def sorted(self) -> tuple[Finding, ...]:
        """All, errors first."""
        return tuple(
            sorted(
                self._found.values(),
                key=lambda f: (_ORDER[f.severity], f.file or "", f.tensor or "", f.code),
            )
        )

"""Whether a model directory is whole."""

from __future__ import annotations

from pyinfra.api import FactBase


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

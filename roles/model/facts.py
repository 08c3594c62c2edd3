"""Whether a model directory is whole."""

from __future__ import annotations

from pyinfra.api import FactBase


class ModelIsWhole(FactBase[bool]):
    """Whether ``directory`` holds what ``manifest`` names; ``full`` hashes every file again."""

    def command(
        self, interpreter: str, program: str, manifest: str, directory: str, full: bool
    ) -> str:
        verify = f"{interpreter} {program} verify {manifest} {directory}{' --full' if full else ''}"
        return f"{verify} >/dev/null 2>&1 && echo whole || true"

    @staticmethod
    def default() -> bool:
        return False

    def process(self, output: list[str]) -> bool:
        return "whole" in output

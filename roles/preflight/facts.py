"""The probe as one command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra.api import FactBase

from fp8fleet.preflight.facts import probe_script


def probe_command(arguments: Sequence[str]) -> str:
    """The probe with its arguments, for a host's shell."""
    words = ["sh", "-c", probe_script(), "fp8fleet-probe", *arguments]
    return " ".join(map(shlex.quote, words))


class HostProbe(FactBase[list[str]]):
    """The lines of the probe's answer; `fp8fleet.preflight.facts` reads them."""

    def command(self, arguments: Sequence[str]) -> str:
        return probe_command(arguments)

    @staticmethod
    def default() -> list[str]:
        return []

    def process(self, output: list[str]) -> list[str]:
        return list(output)

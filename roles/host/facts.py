"""What a host has of packages and kernel parameters."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pyinfra.api import FactBase


class InstalledPackages(FactBase[set[str]]):
    """Those of ``names`` that are installed, asked from dpkg or rpm."""

    def command(self, names: Sequence[str], family: str) -> str:
        quoted = " ".join(shlex.quote(name) for name in names)
        if family == "apt":
            status = "${db:Status-Status} ${Package}\\n"
            return f"dpkg-query -W -f '{status}' {quoted} 2>/dev/null || true"
        known = "rpm -q --quiet --whatprovides $p && echo installed $p"
        return f"for p in {quoted}; do {known}; done; true"

    @staticmethod
    def default() -> set[str]:
        return set()

    def process(self, output: list[str]) -> set[str]:
        return {line.split()[1] for line in output if line.startswith("installed ")}


@dataclass(frozen=True)
class KernelParameter:
    """A kernel parameter's value, whitespace normalised; None where the kernel lacks it."""

    value: str | None
    writable: bool


class KernelParameters(FactBase[dict[str, KernelParameter]]):
    """The values of kernel parameters by name, and whether this host may set them."""

    def command(self, names: Sequence[str]) -> str:
        quoted = " ".join(shlex.quote(name) for name in names)
        return (
            f"for n in {quoted}; do f=/proc/sys/$(echo $n | tr . /); "
            'if [ ! -e $f ]; then echo "$n - -"; '
            'else [ -w $f ] && w=rw || w=ro; echo "$n $w $(cat $f)"; fi; done'
        )

    @staticmethod
    def default() -> dict[str, KernelParameter]:
        return {}

    def process(self, output: list[str]) -> dict[str, KernelParameter]:
        found = {}
        for line in output:
            name, access, *value = line.split()
            known = None if access == "-" else " ".join(value)
            found[name] = KernelParameter(known, access == "rw")
        return found

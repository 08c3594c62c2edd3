"""What a host has of cmake."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from pyinfra.api import FactBase


@dataclass(frozen=True)
class CmakeState:
    """The host's own cmake, and where the link to ours leads."""

    own: str | None
    """Version of the cmake that a login finds; None: there is none that runs."""
    link: str | None
    """What the link names; None: there is no link."""
    taken: bool
    """Something that is no link stands in its place."""
    whole: bool
    """The planned prefix is there."""


class Cmake(FactBase[CmakeState]):
    """The host's own cmake, the link to ours, and whether the planned prefix is there."""

    def command(self, link: str, prefix: str | None) -> str:
        at = shlex.quote(link)
        whole = f"[ -x {shlex.quote(prefix)}/bin/cmake ] && echo whole=yes; " if prefix else ""
        return (
            'PATH="$PATH:/usr/local/bin" cmake --version 2>/dev/null | sed -n "1s/^/own=/p"; '
            f"if [ -L {at} ]; then echo link=$(readlink {at}); "
            f"elif [ -e {at} ]; then echo taken=yes; fi; {whole}true"
        )

    @staticmethod
    def default() -> CmakeState:
        return CmakeState(None, None, False, False)

    def process(self, output: list[str]) -> CmakeState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        own = re.search(r"\bversion (\d+(?:\.\d+)+)", values.get("own", ""))
        return CmakeState(
            own=own[1] if own else None,
            link=values.get("link"),
            taken="taken" in values,
            whole="whole" in values,
        )

"""Whether KySec controls what may be executed on a host, and which programs it does not trust."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pyinfra.api import FactBase

TRUSTED = ("verified", "original", "trusted")
"""Values of a file's exectl label that let it be executed; ``unknown`` does not."""


@dataclass(frozen=True)
class KysecState:
    """KySec on a host."""

    enabled: bool
    control: str | None
    """Its exec control, such as ``on``, ``warning`` or ``off``."""
    untrusted: tuple[str, ...]
    """Those of the programs asked for that exist and that it does not trust."""


class Kysec(FactBase[KysecState]):
    """KySec's status and its trust in ``programs``."""

    def command(self, programs: Sequence[str]) -> str:
        names = " ".join(shlex.quote(program) for program in programs)
        return (
            "command -v getstatus >/dev/null || exit 0; getstatus; "
            f'for p in {names}; do [ ! -e "$p" ] ||'
            ' echo "program $p $(kysec_get -n exectl "$p" 2>/dev/null)"; done; true'
        )

    @staticmethod
    def default() -> KysecState:
        return KysecState(False, None, ())

    def process(self, output: list[str]) -> KysecState:
        values = {}
        untrusted = []
        for line in output:
            words = line.split()
            if len(words) > 1 and words[0] == "program":
                _, program, *label = words
                if not any(word.strip(":") in TRUSTED for word in label):
                    untrusted.append(program)
            elif ":" in line:
                key, _, value = line.partition(":")
                values[key.strip().lower()] = value.strip().lower()
        return KysecState(
            values.get("kysec status") == "enabled", values.get("exec control"), tuple(untrusted)
        )

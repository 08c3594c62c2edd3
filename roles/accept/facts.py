"""What servers logged when they started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra.api import FactBase

from fp8fleet.measured import logged_tokens


class LoggedKvCaches(FactBase[dict[str, int]]):
    """Tokens of the KV caches of ``units``, by unit; only starts that go on count."""

    def command(self, units: Sequence[str]) -> str:
        names = " ".join(shlex.quote(unit) for unit in units)
        return (
            f"for u in {names}; do "
            'start=$(systemctl show "$u" -p InvocationID | cut -d= -f2); '
            'echo "unit $u"; '
            '[ -z "$start" ] || journalctl --no-pager -o cat "_SYSTEMD_INVOCATION_ID=$start" '
            "2>/dev/null | grep -m 1 'KV cache size: '; done; true"
        )

    @staticmethod
    def default() -> dict[str, int]:
        return {}

    def process(self, output: list[str]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        unit = ""
        for line in output:
            if line.startswith("unit "):
                unit = line.removeprefix("unit ")
            else:
                tokens = logged_tokens(line)
                if tokens:
                    sizes[unit] = tokens
        return sizes

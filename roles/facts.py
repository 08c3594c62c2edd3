"""Facts that several roles ask: the state of files and directories, many in one command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pyinfra.api import FactBase


@dataclass(frozen=True)
class PathState:
    """A path of a host: ``kind`` is ``absent``, ``directory``, ``other`` or ``file``."""

    kind: str
    mode: str = ""
    owner: str = ""
    group: str = ""
    sha256: str = ""


class PathStates(FactBase[dict[str, PathState]]):
    """The states of ``paths``, by path. One command, whatever their number."""

    def command(self, paths: Sequence[str]) -> str:
        names = " ".join(shlex.quote(path) for path in paths)
        return (
            f"for p in {names}; do "
            # a link to a directory (to a larger disk) is as good as one; a link to a file is not
            'f=; if [ -d "$p" ]; then k=directory; s=; f=-L; '
            'elif [ -L "$p" ]; then k=other; s=; '
            'elif [ -f "$p" ]; then k=file; s=$(sha256sum <"$p"); '
            'elif [ -e "$p" ]; then k=other; s=; else k=absent; s=; fi; '
            'a=$(stat $f -c "%a %U %G" "$p" 2>/dev/null || echo "- - -"); '
            'echo "$k $a ${s%% *} $p"; done'
        )

    @staticmethod
    def default() -> dict[str, PathState]:
        return {}

    def process(self, output: list[str]) -> dict[str, PathState]:
        states = {}
        for line in output:
            words = line.split(" ", 4)
            if len(words) < 5:
                continue  # what a login prints
            kind, mode, owner, group, rest = words
            sha256, _, path = rest.partition(" ")
            states[path] = PathState(kind, mode, owner, group, sha256)
        return states

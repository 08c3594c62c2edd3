"""Matches regular expressions that others wrote, in a time that is bounded.

Python's own matching may take for ever (``(.+)+z``) and cannot be stopped from within: a process of
its own does it, which can.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

SECONDS = 20.0
"""For all; a hundred patterns on as many thousand names take about ten."""

_SCRIPT = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        match = re.compile(pattern).match
        found = [number for number, name in enumerate(names) if match(name)]
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)
"""


def match_all(
    patterns: Iterable[str], names: Iterable[str]
) -> tuple[Mapping[str, frozenset[str]], Mapping[str, str]]:
    """Find the names that each pattern fits from their start.

    Args:
        patterns: regular expressions, as `re` has them.
        names: what they are tried on.

    Returns:
        The names by pattern, and by pattern why it could not be tried. What comes behind a pattern
        that took too long is in neither.
    """
    wanted, tried = list(dict.fromkeys(patterns)), list(dict.fromkeys(names))
    fits: dict[str, frozenset[str]] = {}
    problems: dict[str, str] = {}
    if not wanted:
        return fits, problems
    answers, why = _answers(json.dumps([wanted, tried]).encode())
    for pattern, answer in zip(wanted, answers, strict=False):
        if isinstance(answer, str):
            problems[pattern] = f"is no regular expression: {answer}"
        else:
            fits[pattern] = frozenset(tried[number] for number in answer)
    if len(answers) < len(wanted):
        problems[wanted[len(answers)]] = f"cannot be matched with {len(tried)} names: {why}"
    return fits, problems


def _answers(question: bytes) -> tuple[list[list[int] | str], str]:
    """The answers until the process ended, and why it did."""
    command = [sys.executable, "-I", "-W", "ignore", "-c", _SCRIPT]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, timeout=SECONDS, check=False
        )
        output, why = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, why = error.stdout or b"", f"it takes more than {SECONDS:g} s"
    # The last line may be cut.
    return [json.loads(line) for line in output.split(b"\n")[:-1]], why

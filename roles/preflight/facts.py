"""The probe as one command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from pyinfra import host
from pyinfra.api import FactBase

from fp8fleet.preflight.facts import parts_of, probe_script, user_of

TIME_LIMIT_S = 300
"""For the whole probe; its parts have shorter ones of their own."""


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


def probe(arguments: Sequence[str], wants_sudo: bool) -> list[str]:
    """The current host's answer: one command as root, two with sudo, which need not work.

    Args:
        arguments: from `probe_arguments`, with ``need_root`` where sudo is wanted.
        wants_sudo: whether to ask again by sudo where the login is not root.
    """
    lines = _ask(arguments, sudo=False)
    parts = parts_of(lines)
    if wants_sudo and parts is not None and "time" not in parts and _may_sudo(user_of(parts).sudo):
        # where sudo does not let us in after all, the first answer says who we are
        lines = _ask(arguments, sudo=True) or lines
    return lines


def _ask(arguments: Sequence[str], sudo: bool) -> list[str]:
    lines: list[str] = host.get_fact(
        HostProbe, arguments=arguments, _sudo=sudo, _ignore_errors=True, _timeout=TIME_LIMIT_S
    )
    return lines


def _may_sudo(unasked: bool | None) -> bool:
    """Whether sudo works unasked, or its password is known, or pyinfra can ask a person for it."""
    return bool(unasked or "prompted_sudo_password" in host.connector_data or sys.stdin.isatty())

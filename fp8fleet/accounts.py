"""The service user's account on a host, and whether fp8fleet made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COMMENT = "fp8fleet"
"""What the accounts that fp8fleet makes have as their comment (passwd(5), GECOS)."""


@dataclass(frozen=True)
class Account:
    """A user as passwd(5) has it."""

    gid: str
    comment: str
    home: str
    shell: str


def passwd_account(lines: Iterable[str]) -> Account | None:
    """The account of ``getent passwd USER``; None: no such user.

    What a line lacks is empty, so that an odd line is nobody of ours.
    """
    line = next((line.strip() for line in lines if line.strip()), None)
    if line is None:
        return None
    fields = [*line.split(":"), *[""] * 7]
    return Account(fields[3], fields[4], fields[5], fields[6])


def group_id(lines: Iterable[str]) -> str | None:
    """The id of ``getent group NAME``; None: no such group."""
    line = next((line.strip() for line in lines if line.strip()), None)
    return None if line is None else [*line.split(":"), "", ""][2]


def whose(account: Account | None, group: str | None, home: str) -> str | None:
    """What there is in the service user's place that fp8fleet did not make; None: nothing.

    Args:
        account: of that name; None: there is none.
        group: id of the group of that name; None: there is none.
        home: the planned home.
    """
    if account is None:
        return None if group is None else f"a group of that name (id {group or '?'})"
    if account.home == home or account.comment == COMMENT:
        return None
    return f"an account with the home {account.home or '?'} and the shell {account.shell or '?'}"


REMEDY = (
    "set service_user to a name that the host does not have: fp8fleet makes that user"
    f" (if fp8fleet made it for another cache_directory: usermod --comment {COMMENT} USER)"
)

"""One pyinfra run: the command line's inventory validated, the plan computed once for all hosts."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from fp8fleet.errors import OperatorError
from fp8fleet.inventory import Fleet, check_secrets, ignored_codes, load_fleet, parse_data
from fp8fleet.plan import FleetPlan, HostPlan
from fp8fleet.planner import make_plan
from fp8fleet.secrets import SecretRef


@dataclass(frozen=True)
class Session:
    """What one run works from."""

    fleet: Fleet
    plan: FleetPlan
    verify_full: bool
    preflight_full: bool = False
    ignored: frozenset[str] = frozenset()
    """Codes of preflight's findings that stop nothing in this run."""
    started: float = field(default_factory=time.monotonic)
    """By this process's monotonic clock."""


_session: Session | None = None


def begin() -> None:
    """Validate the inventory that pyinfra was called with and compute the plan; from ``config.py``.

    Ends the process with exit code 2 and one line on stderr where the inventory cannot mean
    anything, before pyinfra connects to any host.
    """
    global _session
    context = click.get_current_context()
    signal.signal(signal.SIGINT, _interrupted)
    quiet_ssh()
    try:
        _session = _begin(context.params)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def quiet_ssh() -> None:
    """Keep paramiko's tracebacks off the screen: pyinfra tells of a lost host in one line."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def _interrupted(*_: object) -> None:
    """pyinfra would exit with 0, as if the hosts were done.

    An exception would do no better: it rises in whichever greenlet runs, such as SSH's, which
    prints a traceback, or in the inventory's reader, which takes it for the inventory's own.
    """
    print("interrupted; run the same command again to go on", file=sys.__stderr__, flush=True)
    os._exit(130)


def current() -> Session:
    """The session of this process.

    Raises:
        OperatorError: pyinfra was not started in the project's root on an inventory file.
    """
    if _session is None:
        raise OperatorError(
            "no inventory was validated: run pyinfra in the project's root, on an inventory file"
        )
    return _session


def host_plan(host: Any) -> HostPlan:
    """The plan of a pyinfra host; also hands pyinfra the host's sudo password."""
    session = current()
    spec = next(h.spec for h in session.fleet.hosts if h.name == host.name)
    hand_sudo_password(host, spec.sudo_password)
    return session.plan.hosts[host.name]


def hand_sudo_password(host: Any, password: SecretRef | None) -> None:
    """Give pyinfra a host's sudo password, where it has one.

    Raises:
        OperatorError: the secret cannot be read.
    """
    if password:
        # where pyinfra keeps a password that it asked for; it reaches sudo through an askpass file
        host.connector_data["prompted_sudo_password"] = password.resolve()


def _begin(params: dict[str, Any]) -> Session | None:
    path = str(params["inventory"])
    operations = params.get("operations") or ()
    if not path.endswith(".py"):
        if _is_deploy(operations):
            raise OperatorError(f"{path}: not an inventory file (.py): deploys need one")
        return None
    data = parse_data(params.get("data") or ())
    for key in ("ssh_user", "ssh_port", "ssh_key"):
        if params.get(key):
            data[key] = params[key]
    fleet = load_fleet(path, data, params.get("group_data") or ())
    names = limited(fleet, params.get("limit") or ())
    plan = make_plan(fleet)
    if _is_deploy(operations):
        excluded = [name for e in params.get("exclude") or () for name in _matching(fleet, e)]
        check_secrets(fleet, [name for name in names if name not in excluded])
    return Session(
        fleet,
        plan,
        verify_full=data.get("verify") == "full",
        preflight_full=data.get("preflight") == "full",
        ignored=ignored_codes(data.get("ignore")),
    )


def limited(fleet: Fleet, limit: Iterable[str]) -> list[str]:
    """Names of the hosts that ``--limit`` selects: host names, groups and wildcards.

    Raises:
        OperatorError: an entry selects nothing; pyinfra itself would do nothing and report success.
    """
    chosen: list[str] = []
    entries = list(limit)
    for entry in entries:
        found = _matching(fleet, entry)
        if not found:
            hosts = ", ".join(host.name for host in fleet.hosts)
            raise OperatorError(
                f"--limit {entry}: matches no host of {fleet.path}; it has: {hosts}"
            )
        chosen += [name for name in found if name not in chosen]
    return chosen if entries else [host.name for host in fleet.hosts]


def _matching(fleet: Fleet, entry: str) -> list[str]:
    return [h.name for h in fleet.hosts if fnmatch(h.name, entry) or entry in h.groups]


def _is_deploy(operations: Iterable[str]) -> bool:
    return any(str(operation).endswith(".py") for operation in operations) and all(
        Path(operation).exists() for operation in operations
    )

"""Operations that several roles use: files put in place whole, long commands shown as they run."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.connectors.util import CommandOutput

from fp8fleet.plan import HostPlan, PlannedDirectory, PlannedFile
from roles.facts import PathState, PathStates

WORK_LOCK = "/run/fp8fleet.work"
"""Held by every long command, so that a run never races what a killed run left working."""


class Streamed(StringCommand):
    """A command that may take long: its output is printed as it comes."""

    def execute(self, state: Any, host: Any, connector_arguments: Any) -> Any:
        connector_arguments.update(self.connector_arguments)
        status, _ = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        return status, CommandOutput([])  # pyinfra would print a failed command's output again


def streamed(command: str, env: Mapping[str, str] | None = None) -> Streamed:
    """``command`` with visible output, waiting for whatever a killed run left working."""
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in (env or {}).items())
    return Streamed(f"umask 022; flock --timeout 1800 {WORK_LOCK} env {variables} {command}")


def curl_command(path: str) -> str:
    """Fetch to ``path``; options and the URL follow."""
    return f"curl --fail --location --silent --show-error --retry 3 -o {path}"


def sha256_command(digest: str, path: str) -> str:
    """Succeed, without a word, where the file has the digest."""
    return f"printf '%s  %s\\n' {digest} {path} | sha256sum -c --status"


def failed(message: str) -> FunctionCommand:
    """A command that fails the host with one line for the operator."""

    def fail(state: Any, host: Any) -> bool:
        del state
        host.log_styled(message, fg="red", log_func=logger.error)
        return False

    return FunctionCommand(fail, [], {})


def admitted(plan: HostPlan, prefix: str) -> Iterator[StringCommand]:
    """Have SELinux and KySec, where a host has them, know what was just written to ``prefix``.

    A new file has its directory's SELinux label, not the one that the policy has for its path, and
    KySec refuses to execute it.
    """
    path = shlex.quote(prefix)
    if plan.selinux:
        yield StringCommand(relabel_command(path))
    if plan.kysec:
        yield streamed(trust_command(path))


def relabel_command(path: str) -> str:
    """Give all of a tree the SELinux labels that the policy has for it.

    Not to be streamed: SELinux's tools may not have the work lock's file open, and the denial would
    stand in the log.
    """
    return f"sh -c '[ ! -e /sys/fs/selinux/enforce ] || [ ! -e {path} ] || restorecon -R {path}'"


def trust_command(path: str) -> str:
    """Have KySec, where it is enabled, allow that what is below ``path`` is executed."""
    enabled = 'getstatus 2>/dev/null | grep -q -i "kysec status: *enabled"'
    return f"sh -c '! {enabled} || kysec_set -r -n exectl -v verified {path}'"


@operation()
def place(
    files: Sequence[PlannedFile] = (),
    directories: Sequence[PlannedDirectory] = (),
    absent: Sequence[str] = (),
    check: str | None = None,
    known: Callable[[], Mapping[str, PathState]] | None = None,
) -> Iterator[StringCommand]:
    """Put files and directories in place; one fact for all of them.

    A file is written beside its place, checked, synced and renamed. Contents go through stdin, so
    that a secret never lies in a temporary file.

    Args:
        files: the files as they shall be.
        directories: the directories as they shall be, parents first.
        absent: paths of files that must not be there, such as a secret that is no longer used.
        check: command that must accept a new file before it gets its name; ``{}`` is its path.
        known: gives the states of these paths, where a role asks them with more in one fact.
    """
    paths = [directory.path for directory in directories] + [file.path for file in files]
    paths += absent
    ask = known or (lambda: host.get_fact(PathStates, paths=paths))
    states = ask() if paths else {}
    for directory in directories:
        state = states.get(directory.path)
        have = (state.kind, state.mode, state.owner, state.group) if state else None
        if have != ("directory", directory.mode, directory.owner, directory.group):
            yield _directory_command(directory)
    for file in files:
        state = states.get(file.path)
        content = file.resolved()
        have = (state.sha256, state.mode, state.owner, state.group) if state else None
        if have != (hashlib.sha256(content).hexdigest(), file.mode, file.owner, file.group):
            _say(f"{file.path}: {'changed' if state and state.kind == 'file' else 'new'}")
            yield _file_command(file, content, check)
    for path in absent:
        if path in states and states[path].kind != "absent":
            yield StringCommand(f"rm -f {shlex.quote(path)}")


def _say(text: str) -> None:
    """One line for the operator while operations run."""
    if host.state.is_executing:
        logger.info(f"{host.print_prefix}{text}")


def _directory_command(directory: PlannedDirectory) -> StringCommand:
    path = shlex.quote(directory.path)
    return StringCommand(
        f"umask 022; mkdir -p {path} && chown {directory.owner}:{directory.group} {path}"
        f" && chmod {directory.mode} {path}"
    )


def _file_command(file: PlannedFile, content: bytes, check: str | None) -> StringCommand:
    path = shlex.quote(file.path)
    new = shlex.quote(f"{file.path}.fp8fleet-new")
    accept = f"{check.format(new)} && " if check else ""
    return StringCommand(
        f"umask 077; base64 -d >{new} && chown {file.owner}:{file.group} {new}"
        f" && chmod {file.mode} {new} && {accept}sync {new} && mv -fT {new} {path}"
        f" || {{ rm -f {new}; exit 1; }}",
        _stdin=base64.b64encode(content).decode(),
    )

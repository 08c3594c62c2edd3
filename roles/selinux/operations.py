"""SELinux set as planned, and its audit log asked; pyinfra's own operations fall short.

pyinfra has none for the mode; its boolean is satisfied by a value in force that a reboot loses; its
port label never converges where the policy has one already.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import PurePosixPath

from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, StringCommand, operation

from fp8fleet import catalog
from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    PEER_UNIT,
    RUN_DIRECTORY,
    HostPlan,
    SelinuxPlan,
)
from fp8fleet.session import current
from roles.operations import failed, relabel_command
from roles.selinux.facts import (
    CONFIG,
    AllowRules,
    Denial,
    Denials,
    Selinux,
    SelinuxState,
)

_SET = "fp8fleet_selinux_set"
"""When this run had SELinux as planned, by this process's monotonic clock."""
WEB = catalog.selinux()["http"]


@operation()
def selinux_as_planned(selinux: SelinuxPlan | None) -> Iterator[StringCommand]:
    """Set booleans, port labels, file labels, and last the mode; one fact for all of them.

    Args:
        selinux: what it shall be; None leaves it alone.
    """
    if selinux is None:
        return
    paths = [*selinux.programs, *selinux.paths]
    found = host.get_fact(Selinux, booleans=list(selinux.booleans), paths=paths)
    if found.mode is None:
        _warn("SELinux is off on this host, so nothing of it is set: docs/selinux.md")
        return
    if selinux.mode == "permissive":
        _warn("SELinux is permissive as planned: it logs and denies nothing")
    booleans = [*_booleans(selinux, found)]
    yield from booleans
    yield from _ports(selinux, found)
    yield from _labels(selinux, found)
    if booleans:
        # Nginx asks for its limit of open files once, when its workers start
        yield StringCommand("systemctl try-reload-or-restart nginx.service || true")
    yield from _mode(selinux, found)
    if state.is_executing:
        host.connector_data[_SET] = time.monotonic()


def _booleans(selinux: SelinuxPlan, found: SelinuxState) -> Iterator[StringCommand]:
    """A boolean has a value in force and one for the next boot: `setsebool -P` sets both."""
    wrong = [
        f"{name}={int(value)}"
        for name, value in selinux.booleans.items()
        if found.booleans.get(name) is not value or found.persistent.get(name) is not value
    ]
    if wrong:
        yield StringCommand(f"setsebool -P {' '.join(wrong)}")


def _ports(selinux: SelinuxPlan, found: SelinuxState) -> Iterator[StringCommand]:
    """A port that the policy labels can only be modified, another one only be added."""
    for port in selinux.ports:
        types = [kind for ports, kind in found.ports if port in ports]
        fine = types[0] in WEB.port_types if types else port in WEB.ports
        if not fine:
            label = f"-t {WEB.port_types[0]} -p tcp {port}"
            both = f"semanage port -a {label} 2>/dev/null || semanage port -m {label}"
            yield StringCommand(f"sh -c {shlex.quote(both)}")


def _labels(selinux: SelinuxPlan, found: SelinuxState) -> Iterator[StringCommand]:
    """Paths that exist already; what is installed later is labelled when it is made."""
    trees = [str(PurePosixPath(program).parents[1]) for program in selinux.programs]
    wrong = [
        tree
        for tree, program in zip(trees, selinux.programs, strict=True)
        if program in found.mislabelled
    ]
    for path, like in selinux.equivalences.items():
        if found.equivalences.get(path) != like:
            words = f"-e {shlex.quote(like)} {shlex.quote(path)}"
            both = f"semanage fcontext -a {words} 2>/dev/null || semanage fcontext -m {words}"
            yield StringCommand(f"sh -c {shlex.quote(both)}")
            wrong = [path]
    for tree in wrong:
        yield StringCommand(relabel_command(shlex.quote(tree)))
    files = [shlex.quote(path) for path in selinux.paths if path in found.mislabelled]
    if files:
        yield StringCommand(f"restorecon {' '.join(files)}")


def _mode(selinux: SelinuxPlan, found: SelinuxState) -> Iterator[StringCommand]:
    """The mode now and after a reboot. Whoever serves starts anew in it.

    A server without its note of what it was started from is restarted by the vllm role, drained,
    ready and warm; the notes go first, so that a killed run leaves no server of the old mode.
    """
    if found.configured != selinux.mode:
        new = f"{CONFIG}.fp8fleet-new"
        yield StringCommand(
            f"{{ grep -v '^SELINUX=' {CONFIG}; echo SELINUX={selinux.mode}; }} >{new}"
            f" && chmod --reference={CONFIG} {new} && sync {new} && mv -fT {new} {CONFIG}"
        )
    if found.mode != selinux.mode:
        yield StringCommand(
            f"rm -f {RUN_DIRECTORY}/*.started && setenforce {int(selinux.mode == 'enforcing')}"
        )
        # a start that fails is the nginx role's to explain
        yield StringCommand(f"systemctl try-restart nginx.service {PEER_UNIT} || true")


@operation()
def no_denials(plan: HostPlan) -> Iterator[FunctionCommand]:
    """Fail where SELinux denied something to Nginx or to a server in this run.

    What was denied before the run had set what allows it, to a client of the old configuration
    perhaps, does not count. Asked when operations are executed; nothing is changed.
    """
    if plan.selinux is None or not state.is_executing:
        return
    seconds = time.monotonic() - host.connector_data.get(_SET, current().started)
    ours = [denial for denial in host.get_fact(Denials, seconds=seconds) if is_ours(plan, denial)]
    if not ours:
        return
    for line in host.get_fact(AllowRules, lines=[denial.line for denial in ours]):
        logger.warning(f"{host.print_prefix}audit2allow: {line}")
    for denial in ours:
        if denial.enforced:
            yield failed(f"SELinux denied {_told(denial)}")
            return
    _warn(f"enforcing, SELinux would have denied {_told(ours[0])}")


def is_ours(plan: HostPlan, denial: Denial) -> bool:
    """Whether Nginx or a server was denied something, or something of ours was denied to others."""
    top = plan.requirements.directories
    places = [f"{path}/" for path in (*top, CONFIG_DIRECTORY, RUN_DIRECTORY)]
    return (
        denial.source == "httpd_t"
        or denial.program == "nginx"
        or bool(denial.unit)
        or any(place in denial.event for place in places)
    )


def _told(denial: Denial) -> str:
    who = denial.unit or denial.program
    what = f"{' '.join(denial.permissions)} on {denial.kind} {denial.target}"
    return f"{who} ({denial.source}) {what}; this would allow it: {denial.rule}"


def _warn(text: str) -> None:
    if state.is_executing:
        logger.warning(f"{host.print_prefix}{text}")

"""preflight: the host judged against its plan before anything is changed; errors stop it."""

from __future__ import annotations

import sys
import time

from gevent import GreenletExit
from pyinfra import host, logger, state
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_host

from fp8fleet.plan import HostPlan
from fp8fleet.preflight.facts import parts_of, probe_arguments, user_of
from fp8fleet.preflight.judge import judge
from fp8fleet.preflight.report import show, stopping, summary, write_report
from fp8fleet.session import current, host_plan
from roles.preflight.facts import HostProbe

TIME_LIMIT_S = 300
"""For the whole probe; its parts have shorter ones of their own."""


@deploy("Preflight")
def check() -> None:
    """Probe and judge the host when the run is prepared, with ``--dry`` too."""
    plan = host_plan(host)
    session = current()
    lines = _probe(plan, session.preflight_full)
    judgement = judge(plan, lines, time.time())
    report = write_report(
        plan.name, judgement, full=session.preflight_full, ignored=session.ignored
    )
    if judgement.findings:
        show(plan.name, judgement, session.ignored)
    logger.info(f"{host.print_prefix}{summary(plan.name, judgement, session.ignored)} ({report})")
    if errors := stopping(judgement.findings, session.ignored):
        codes = ",".join(dict.fromkeys(finding.code for finding in errors))
        logger.error(
            f"{host.print_prefix}stopped before any change: {codes}"
            f" (--data ignore={codes} goes on all the same)"
        )
        _stop()


def _probe(plan: HostPlan, full: bool) -> list[str]:
    """The probe's answer: one command as root, two with sudo, which need not work."""
    needs = plan.requirements
    wants_sudo = bool(host.data.get("_sudo"))
    arguments = probe_arguments(
        full=full,
        need_root=wants_sudo,
        paths=[*needs.directories, *(space.path for space in needs.spaces)],
        stamps=[space.stamp for space in needs.spaces if space.stamp],
        sizes=[space.path for space in needs.spaces if not space.stamp],
        ports=[planned.port for planned in needs.ports],
        account=needs.service_user,
    )
    lines = _ask(arguments, sudo=False)
    parts = parts_of(lines)
    if wants_sudo and parts is not None and "time" not in parts and _may_sudo(user_of(parts).sudo):
        # where sudo does not let us in after all, the first answer says who we are
        lines = _ask(arguments, sudo=True) or lines
    return lines


def _ask(arguments: list[str], sudo: bool) -> list[str]:
    lines: list[str] = host.get_fact(
        HostProbe, arguments=arguments, _sudo=sudo, _ignore_errors=True, _timeout=TIME_LIMIT_S
    )
    return lines


def _may_sudo(unasked: bool | None) -> bool:
    """Whether sudo works unasked, or its password is known, or pyinfra can ask a person for it."""
    return bool(unasked or "prompted_sudo_password" in host.connector_data or sys.stdin.isatty())


def _stop() -> None:
    """Take the host out of the run; the others go on, and pyinfra's exit code is 1."""
    try:
        state.fail_hosts({ctx_host.get()})
    except PyinfraError:
        if state.active_hosts:  # beyond --fail-percent
            raise
    # ends the preparation of this host alone: no further role asks it anything
    raise GreenletExit

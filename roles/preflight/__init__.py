"""preflight: the host judged against its plan before anything is changed; errors stop it."""

from __future__ import annotations

import time

from gevent import GreenletExit
from pyinfra import host, logger, state
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_host

from fp8fleet.outside import plain
from fp8fleet.plan import HostPlan
from fp8fleet.preflight.facts import probe_arguments
from fp8fleet.preflight.findings import Finding, Judgement
from fp8fleet.preflight.judge import judge
from fp8fleet.preflight.report import show, stopping, summary, write_report
from fp8fleet.session import Session, current, host_plan
from roles.preflight.facts import probe


@deploy("Preflight")
def check() -> None:
    """Probe and judge the host when the run is prepared, with ``--dry`` too."""
    plan = host_plan(host)
    session = current()
    asked = time.time()
    lines = _probe(plan, session.preflight_full)
    errors: list[Finding] = []
    try:
        judgement = judge(plan, lines, time.time(), asked)
        errors = _told(plan.name, judgement, session)
    except Exception as error:  # else it would end the run for every host
        logger.error(
            f"{host.print_prefix}preflight: {plain(repr(error))}: a fault of fp8fleet or an answer"
            " that it does not expect; this host is left as it is"
        )
        _stop()
    if errors:
        codes = ",".join(dict.fromkeys(finding.code for finding in errors))
        logger.error(
            f"{host.print_prefix}stopped before any change: {codes}"
            f" (--data ignore={codes} goes on all the same)"
        )
        _stop()


def _told(name: str, judgement: Judgement, session: Session) -> list[Finding]:
    """Report and show a judgement; returns the errors that stop the host."""
    ignored = session.ignored
    report = write_report(name, judgement, full=session.preflight_full, ignored=ignored)
    if judgement.findings:
        show(name, judgement, ignored)
    logger.info(f"{host.print_prefix}{summary(name, judgement, ignored)} ({report})")
    return stopping(judgement.findings, ignored)


def _probe(plan: HostPlan, full: bool) -> list[str]:
    """The probe's answer."""
    needs = plan.requirements
    wants_sudo = bool(host.data.get("_sudo"))
    arguments = probe_arguments(
        full=full,
        need_root=wants_sudo,
        paths=needs.paths,
        stamps=[space.stamp for space in needs.spaces if space.stamp],
        sizes=[space.path for space in needs.spaces if not space.stamp],
        ports=[planned.port for planned in needs.ports],
        account=needs.service_user,
    )
    return probe(arguments, wants_sudo)


def _stop() -> None:
    """Take the host out of the run; the others go on, and pyinfra's exit code is 1."""
    try:
        state.fail_hosts({ctx_host.get()})
    except PyinfraError:
        if state.active_hosts:  # beyond --fail-percent
            raise
    # ends the preparation of this host alone: no further role asks it anything
    raise GreenletExit

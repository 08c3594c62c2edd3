"""The service user, kernel parameters, and what has to be in force besides lying on the disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, StringCommand, operation

from fp8fleet.accounts import COMMENT, REMEDY, Account, whose
from fp8fleet.plan import NVIDIA_UNIT, PERSISTENCE_UNIT, STATE_DIRECTORY, UNIT_DIRECTORY, HostPlan
from roles.host.distribution import install_command, refreshed
from roles.host.facts import NOUVEAU, NvidiaState
from roles.host.state import forget, host_facts
from roles.operations import failed, streamed

_REBUILD_INITRAMFS = {
    "apt": ("update-initramfs", "update-initramfs -u -k all"),
    "dnf": ("dracut", "dracut --force --regenerate-all"),
}


def _warn(text: str) -> None:
    logger.warning(f"{host.print_prefix}{text}")


def _note(name: str, digest: str) -> str:
    """Note what is in force now."""
    file = f"{STATE_DIRECTORY}/{name}.applied"
    return f"echo {digest} >{file}.new && mv -fT {file}.new {file}"


@operation()
def service_user(plan: HostPlan) -> Iterator[StringCommand | FunctionCommand]:
    """Have the system user that runs the servers, with a group of its name and no shell.

    Somebody else's account or group of that name fails the host. pyinfra's own operations ask five
    facts for it.
    """
    facts = host_facts(plan)
    user = plan.service_user
    if others := whose(facts.user, facts.group, plan.home):
        yield failed(f"service_user = {user!r}: the host has {others}: {REMEDY}")
        return
    settings = f"--comment {COMMENT} --shell {plan.no_login_shell}"
    if facts.user is None:
        forget()
        # user and group at once: a killed run leaves no group that looks like another's
        create = "useradd --system --user-group --no-create-home"
        yield StringCommand(f"{create} --home-dir {plan.home} {settings} {user}")
        return
    if facts.group is None:
        forget()
        yield StringCommand(f"groupadd --system {user}")
    if facts.user != Account(facts.group or "", COMMENT, plan.home, plan.no_login_shell):
        forget()
        yield StringCommand(f"usermod --gid {user} --home {plan.home} {settings} {user}")


@operation()
def kernel_parameters(plan: HostPlan) -> Iterator[StringCommand]:
    """Bring kernel parameters in force; the file that keeps them is placed before.

    A parameter that this host may not set (in a container) is reported and left.
    """
    if not plan.sysctl:
        return
    found = host_facts(plan).parameters
    for name, value in plan.sysctl.items():
        have = found.get(name)
        if have is None or have.value is None:
            _warn(f"kernel parameter {name}: this kernel lacks it; left")
        elif have.value != " ".join(value.split()):
            if have.writable:
                forget()
                yield StringCommand(f"sysctl -q -w {shlex.quote(f'{name}={value}')}")
            else:
                _warn(
                    f"kernel parameter {name} is {have.value}, not {value};"
                    " this host may not set it (a container?): set it on the machine below"
                )


@operation()
def services(plan: HostPlan) -> Iterator[StringCommand]:
    """Have the system's services run with our files; remove units that are no longer planned.

    It is noted with which files a service was started, so that a run that was killed in between
    still restarts it.
    """
    facts = host_facts(plan)
    for service in plan.preparation.services:
        unit = facts.unit(service.unit)
        stale = facts.applied.get(service.unit) != service.digest or not unit.active
        if not stale and (not service.enable or unit.starts_at_boot):
            continue
        forget()
        start = f"systemctl daemon-reload && systemctl restart {service.unit}"
        if service.enable:
            start += f" && systemctl enable --quiet {service.unit}"
        then = f" && {service.then}" if service.then else ""
        yield streamed(f"sh -c {shlex.quote(start + then)}")
        yield StringCommand(_note(service.unit, service.digest))
    for name in plan.preparation.retired:
        if facts.unit(name).exists:
            forget()
            base = name.partition(".")[0]
            yield StringCommand(
                f"systemctl disable --now --quiet {name}; rm -f {UNIT_DIRECTORY}/{base}.timer"
                f" {UNIT_DIRECTORY}/{base}.service && systemctl daemon-reload"
            )


@operation()
def clock(plan: HostPlan) -> Iterator[StringCommand]:
    """Have one service keep the clock: the one that does, else the platform's.

    A container has the clock of the machine below; nothing is done there.
    """
    facts = host_facts(plan)
    time = plan.preparation.time
    if facts.container:
        if time.digest:
            _warn("ntp_servers: a container has the clock of the machine below; nothing started")
        return
    unit = facts.unit(time.unit)
    if facts.clocks and not unit.active:
        if time.digest:
            _warn(
                f"{facts.clocks[0]} keeps this host's clock, not {time.unit}: ntp_servers is not in"
                " force; set its servers by hand, or stop it and run again"
            )
        return
    if not unit.exists:
        forget()
        yield from refreshed(plan)
        yield streamed(install_command(plan, [time.package]))
    if (
        unit.active
        and unit.starts_at_boot
        and facts.applied.get(time.unit, "none") == (time.digest or "none")
    ):
        return
    forget()
    yield StringCommand(
        f"systemctl enable --quiet {time.unit} && systemctl restart {time.unit}"
        f" && {_note(time.unit, time.digest or 'none')}"
    )


@operation()
def nvidia_devices(plan: HostPlan) -> Iterator[StringCommand]:
    """Keep nouveau off, and the driver's devices ready before the servers, after a reboot too.

    Where the driver is not loaded its units are only enabled: preflight judges drivers.
    """
    digest = plan.preparation.nouveau_digest
    if digest is None:
        return
    facts = host.get_fact(NvidiaState)
    if facts.nouveau_digest != digest:
        tool, rebuild = _REBUILD_INITRAMFS[plan.family]
        script = f"if command -v {tool} >/dev/null; then {rebuild}; fi"
        yield streamed(f"sh -c {shlex.quote(script)}")
        yield StringCommand(_note(NOUVEAU, digest))
    if "nouveau" in facts.modules:
        _warn("nouveau is loaded until the next boot: reboot this host, then run again")
    loaded = "nvidia" in facts.modules
    for name, unit in ((PERSISTENCE_UNIT, facts.persistence), (NVIDIA_UNIT, facts.devices)):
        if name == PERSISTENCE_UNIT and not unit.exists:
            continue  # a driver from a runfile may lack it
        if not unit.starts_at_boot or unit.needs_reload:
            yield StringCommand(f"systemctl daemon-reload && systemctl enable --quiet {name}")
        if loaded and (not unit.active or unit.needs_reload):
            yield StringCommand(f"systemctl restart {name}")

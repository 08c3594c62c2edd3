"""Installing drivers: checked before use, in force afterwards, of one version everywhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any

import gevent
from paramiko import SSHException
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.connectors.util import clear_askpass_cache, remove_any_sudo_askpass_file

from fp8fleet import catalog
from fp8fleet.plan import DriverPlan, DriversPlan, HostPlan
from roles.driver.facts import INSTALLED, REBOOT, UNFINISHED, Drivers, DriversState
from roles.host.distribution import APT, dnf_command, dnf_options, refreshed
from roles.lock.operations import hold_lock
from roles.operations import curl_command, failed, place, sha256_command, streamed

REBOOT_POLL_S = 3
REBOOT_TIMEOUT_S = 1800
"""Large hosts test their memory for minutes when they boot."""

Commands = Iterator[StringCommand | FunctionCommand]

# A module that nobody uses goes, so that the new one needs no reboot; one in use stays.
_UNLOAD = (
    "systemctl stop nvidia-persistenced.service nvidia-fabricmanager.service 2>/dev/null;"
    " for m in nvidia_uvm nvidia_drm nvidia_modeset nvidia; do modprobe -q -r $m 2>/dev/null; done"
)
_LOAD = (
    "modprobe -q nvidia 2>/dev/null; for u in nvidia-persistenced nvidia-fabricmanager; do"
    " systemctl -q is-enabled $u.service 2>/dev/null && systemctl start $u.service; done; true"
)


@operation()
def drivers(plan: HostPlan) -> Commands:
    """Install the planned drivers, bring them in force, compare all their versions.

    Refuses to touch the driver of a host whose servers run. One fact where nothing is to be done,
    none where nothing is asked for.
    """
    asked = plan.drivers
    if not asked.items:
        return
    state = host.get_fact(Drivers)
    due = [item for item in asked.items if _is_due(item, state)]
    if due and state.servers:
        yield _servers_run(f"{due[0].name} {due[0].version} is to be installed", state)
        return
    for item in due:
        yield from _install(plan, item, state)
    if due and not host.state.is_executing:
        return
    yield from _in_force(asked, host.get_fact(Drivers) if due else state)


def _is_due(item: DriverPlan, state: DriversState) -> bool:
    return state.versions.get(item.name) != item.version or item.name in state.unfinished


# Installation


def _install(plan: HostPlan, item: DriverPlan, state: DriversState) -> Commands:
    entry = catalog.installers()[item.name]
    mark = UNFINISHED.replace("NAME", item.name)
    yield StringCommand(f"touch {mark} && sync {mark}")
    if entry.reboots:
        yield StringCommand(f"echo {item.name} >>{REBOOT}")
    if item.name == "nvidia":
        yield StringCommand(f"{_UNLOAD}; true")
    if item.url:
        yield from _run_installer(plan, item, state)
    else:
        yield from place._inner(files=plan.role_files("driver"))
        yield from _from_packages(plan, item.packages)
    if item.name == "nvidia":
        yield StringCommand(_LOAD)
    if entry.stamped:
        note = INSTALLED.replace("NAME", item.name)
        yield StringCommand(f"echo {item.version} >{note}.new && mv -f {note}.new {note}")
    yield StringCommand(f"sync && rm -f {mark}")


def _from_packages(plan: HostPlan, packages: tuple[str, ...]) -> Iterator[StringCommand]:
    """Also over holds and version locks, which keep others from changing the driver, not us."""
    names = " ".join(_with_kernel(name) for name in packages)
    yield from refreshed(plan)
    if plan.family == "apt":
        options = "--no-install-recommends --allow-downgrades --allow-change-held-packages"
        yield streamed(f"{APT} {options} install {names}")
        return
    options = f"{dnf_options(plan)} --disableexcludes=main --disableplugin=versionlock"
    yield streamed(dnf_command(f"{options} install {names}"))


def _with_kernel(name: str) -> str:
    return '"' + name.replace("{kernel}", "$(uname -r)") + '"'


def _run_installer(plan: HostPlan, item: DriverPlan, state: DriversState) -> Commands:
    entry = catalog.installers()[item.name]
    if item.needs:
        yield from _from_packages(plan, item.needs)
    assert item.url and item.sha256
    folder = plan.drivers.downloads
    file = f"{folder}/{item.name}-{item.version}-{item.sha256[:12]}.run"
    yield streamed(
        f"sh -c {shlex.quote(_fetch_script(item, folder, file))}", plan.download_environment
    )
    options = entry.options
    if entry.upgrade and item.name in state.versions:
        options = entry.upgrade
    yield streamed(f"sh -c {shlex.quote(_install_script(item, file, options))}")


def _checked(item: DriverPlan, path: str) -> str:
    assert item.sha256
    return f"{sha256_command(item.sha256, path)} 2>/dev/null"


def _fetch_script(item: DriverPlan, folder: str, file: str) -> str:
    """Fetch to another name, going on where an earlier run stopped; the name means: checked."""
    part, url = f"{file}.part", shlex.quote(item.url or "")
    curl = curl_command(part)
    return (
        f"umask 022; mkdir -p {folder} || exit 1; for f in {file} {part}; do [ ! -d $f ] ||"
        ' { echo "driver: $f is a directory: move it away" >&2; exit 1; }; done; '
        f"[ -f {file} ] && exit 0; "
        f"{_checked(item, part)} || {curl} -C - {url} || {{ "
        # 33: the server gives no ranges; 22, of a file 36: nothing is left to give, the part is as
        # long or longer
        f"case $? in 22|33|36) rm -f {part}; {curl} {url} ;; *) false ;; esac; }} || exit 1; "
        f'{_checked(item, part)} || {{ echo "driver: {item.name}: expected SHA256 {item.sha256},'
        f' got $(sha256sum <{part} | cut -c1-64): {item.url} gives another file, or a part of it"'
        f" >&2; rm -f {part}; exit 1; }}; sync {part} && mv -fT {part} {file}"
    )


def _install_script(item: DriverPlan, file: str, options: str) -> str:
    """Check again, run, judge the exit code, say what the installer's log says."""
    entry = catalog.installers()[item.name]
    fine = " ".join(f"[ $r -eq {code} ] ||" for code in entry.fine)
    log = f"tail -n 5 {entry.log} >&2 2>/dev/null; " if entry.log else ""
    before = f"{{ {entry.before}; }} && " if entry.before else ""
    return (
        f"{_checked(item, file)} || {{ rm -f {file}; echo 'driver: {file} has changed since it was"
        f" fetched: run again' >&2; exit 1; }}; {before}sh {file} {options} </dev/null; r=$?; "
        f'{fine} {{ {log}echo "driver: the installer of {item.name} {item.version} ended with exit'
        f' code $r" >&2; exit 1; }}; rm -f {file}'
    )


# In force


def _in_force(asked: DriversPlan, state: DriversState) -> Commands:
    """Compare what was asked for with disk, kernel, libraries and fabric manager."""
    planned = {item.name: item.version for item in asked.items}
    for name, version in planned.items():
        have = state.versions.get(name)
        if have != version:
            yield failed(
                f"driver: {name} is {have or 'missing'} after its installation, not {version}"
            )
            return
    if why := _reboot_reason(planned, state):
        if state.servers:
            yield _servers_run(f"{why}, which asks for a reboot", state)
            return
        if not asked.reboot:
            yield failed(
                f"driver: {why}: reboot this host (or set driver_reboot = True), then run again"
            )
            return
        yield from _rebooted()
        if not host.state.is_executing:
            return
        state = host.get_fact(Drivers)
        if why := _reboot_reason(planned, state):
            yield failed(f"driver: after a reboot still: {why}: look at dmesg and `dkms status`")
            return
    module = planned.get("nvidia")
    if module and state.library not in (None, module):
        yield failed(
            f"driver: NVIDIA's libraries are {state.library}, its module is {module}: remove the"
            " other driver's packages"
        )
    fabric = planned.get("fabric-manager")
    if fabric and state.loaded and fabric != state.loaded:
        yield failed(
            f"driver: fabric manager {fabric}, driver {state.loaded}: both need one version"
        )
    elif fabric and not state.fabric_active:
        yield StringCommand("systemctl enable --quiet --now nvidia-fabricmanager.service")


def _reboot_reason(planned: dict[str, str], state: DriversState) -> str | None:
    module = planned.get("nvidia")
    if module and state.loaded != module:
        return f"nvidia {module} is installed, the kernel runs {state.loaded or 'none'}"
    if state.reboot:
        return "what was installed is in force after a reboot only"
    return None


def _servers_run(why: str, state: DriversState) -> FunctionCommand:
    units = " ".join(state.servers)
    return failed(
        f"driver: {why}, and servers run on this host: stop them first (systemctl stop {units};"
        " their requests end), then run again"
    )


def _rebooted() -> Commands:
    """As pyinfra's server.reboot, which goes by the uptime: a container's is its machine's."""
    before: list[str] = []
    yield FunctionCommand(_note_boot, [before], {})
    # detached, so that the channel closes before the connection breaks
    yield StringCommand("( sleep 1; systemctl reboot ) </dev/null >/dev/null 2>&1 &")
    yield FunctionCommand(_wait_for_boot, [before], {})
    # the lock was held through the connection that the reboot ended
    yield from hold_lock._inner()


def _note_boot(state: Any, host: Any, before: list[str]) -> bool:
    del state
    remove_any_sudo_askpass_file(host)
    boot = _boot_id(host)
    before += [boot] if boot else []
    return bool(boot)


def _wait_for_boot(state: Any, host: Any, before: list[str]) -> bool:
    del state
    host.connector_data.pop("fp8fleet_lock", None)
    logger.info(f"{host.print_prefix}rebooting; waiting for SSH, at most {REBOOT_TIMEOUT_S} s")
    end = time.monotonic() + REBOOT_TIMEOUT_S
    while time.monotonic() < end:
        gevent.sleep(REBOOT_POLL_S)
        clear_askpass_cache(host)
        host.disconnect()
        host.connect(show_errors=False)
        if host.connected and _boot_id(host) not in (None, *before):
            return True
    host.log_styled(
        f"driver: SSH is not back {REBOOT_TIMEOUT_S} s after the reboot: look at the console",
        fg="red",
        log_func=logger.error,
    )
    return False


def _boot_id(host: Any) -> str | None:
    """Another one after every boot; None where the connection breaks."""
    try:
        done, output = host.run_shell_command(
            StringCommand("cat /proc/sys/kernel/random/boot_id"), _timeout=30
        )
    except (OSError, EOFError, SSHException):
        return None
    return output.stdout.strip() if done else None

"""Lab hosts: each a disk over the shared base image and a booted systemd container with sshd.

A host's folder ``.lab/hosts/NAME/`` holds its disk (upper, work, base: the image under it; whole:
the stamp of a finished disk), the mount point ``root`` and the records of its processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed, OperatorError
from lab import network
from lab.image import build_base
from lab.machine import own_cgroups
from lab.processes import (
    alive,
    background,
    children,
    kill,
    recorded,
    run,
    say,
    wait_ended,
)
from lab.rpm.image import build_rpm
from lab.site import (
    BRIDGE,
    PREFIX_LENGTH,
    RPM,
    LabHost,
    cache_dir,
    client_key,
    known_hosts,
    lab_dir,
    named,
    ssh_config,
    write_whole,
)

_BOOT_SECONDS = 120
_POWEROFF_SECONDS = 30
_KILL_SECONDS = 10
_POWEROFF = signal.SIGRTMIN + 4  # systemd(1): start poweroff.target
# Without a scope unit of its own nspawn ends with 133 when the guest asks for a reboot.
_BOOT_AGAIN_AFTER_REBOOT = 'while "$@"; [ $? -eq 133 ]; do :; done'


@dataclass(frozen=True)
class HostStatus:
    """What a lab host is now.

    ``state`` is "running" (booted, ssh answers), "booting" (its processes run, ssh does not
    answer), "stopped" (it has a disk) or "no disk".
    """

    name: str
    address: str
    state: str


def up(hosts: Sequence[LabHost]) -> None:
    """Make every one of ``hosts`` run: new ones are created, stopped ones booted with their disk.

    Raises:
        CheckFailed: a host does not boot; the message names its console log.
    """
    network.up()
    _write_ssh_files(hosts)
    to_boot = [one for one in hosts if _state(one) != "running"]
    for one in to_boot:
        _halt(one)
        _ensure_disk(one)
        _boot(one)
    for one in to_boot:
        _wait_booted(one)


def down() -> None:
    """Stop every lab host of this checkout; the disks stay. Nothing to stop is fine."""
    hosts = existing()
    for one in hosts:
        _power_off(_folder(one))
    for one in hosts:
        _halt(one)


def create(name: str, *, new_host_key: bool = False) -> None:
    """Make a host with a fresh disk and boot it.

    Args:
        name: lab-1, lab-2, ...
        new_host_key: give it another SSH host key than the one this name had before.

    Raises:
        OperatorError: the name is no lab host's, or the host has a disk already.
        CheckFailed: it does not boot.
    """
    one = named(name)
    if (_folder(one) / "whole").exists():
        raise OperatorError(f"{name} exists: run fp8fleet lab destroy {name} first")
    if new_host_key:
        _host_key(one).unlink(missing_ok=True)
    up([one])


def start(name: str) -> None:
    """Boot a host with the disk it has, or a fresh one; a running host is left alone.

    Raises:
        CheckFailed: it does not boot.
    """
    up([named(name)])


def stop(name: str) -> None:
    """Shut a host down cleanly; its disk stays."""
    _halt(named(name))


def destroy(name: str) -> None:
    """Stop a host and throw its disk away; its SSH host key stays for the next of that name.

    Raises:
        OperatorError: the name is no lab host's.
    """
    one = named(name)
    _halt(one)
    shutil.rmtree(_folder(one), ignore_errors=True)


def existing() -> list[LabHost]:
    """Return the hosts that have a folder, whole or not, in order."""
    return in_order(folder.name for folder in (lab_dir() / "hosts").glob("lab-*"))


def in_order(names: Iterable[str]) -> list[LabHost]:
    """Return the hosts of these names by family and number: lab-2 before lab-10."""
    return sorted(map(named, names), key=lambda one: (one.family, one.number))


def status(hosts: Sequence[LabHost]) -> list[HostStatus]:
    """Return what each of ``hosts`` is now."""
    return [HostStatus(one.name, one.address, _state(one)) for one in hosts]


def ssh_command(name: str, *command: str) -> list[str]:
    """Return the ssh command line that opens a shell, or runs ``command``, as root on a host."""
    return ["ssh", "-F", str(ssh_config()), named(name).name, *command]


def _state(one: LabHost) -> str:
    folder = _folder(one)
    if alive(folder / "nspawn"):
        return "running" if _answers(one) else "booting"
    return "stopped" if (folder / "whole").exists() else "no disk"


def _answers(one: LabHost) -> bool:
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
    command = ["ssh", "-F", str(ssh_config()), *options, one.name, "true"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _image(one: LabHost) -> Path:
    """The root folder under the disk of a host of this family, built the first time."""
    return build_rpm(cache_dir()) / "root" if one.family == RPM else build_base(cache_dir())


def _ensure_disk(one: LabHost) -> None:
    """Give the host a whole, mounted disk: the one it has, or a fresh one."""
    folder = _folder(one)
    if (folder / "whole").exists():
        base = Path((folder / "base").read_text())
        if base.is_dir():
            _mount(folder, base)
            return
        say(f"{one.name}: the base image under its disk is gone, so it gets a fresh disk")
    base = _image(one)
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
    (folder / "base").write_text(str(base))
    _mount(folder, base)
    _personalize(one, folder / "root")
    (folder / "whole").touch()


def _mount(folder: Path, base: Path) -> None:
    options = f"lowerdir={base},upperdir={folder / 'upper'},workdir={folder / 'work'}"
    run(["mount", "-t", "overlay", "overlay", "-o", options, str(folder / "root")])


def _personalize(one: LabHost, root: Path) -> None:
    """Write what makes a copy of the base image this host: name, address, keys."""
    write_whole(root / "etc/hostname", f"{one.name}\n")
    write_whole(root / "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {one.name}\n")
    # Without the last two lines the network counts as online only after 12 s of asking for an
    # IPv6 router, and nginx starts as late.
    write_whole(
        root / "etc/systemd/network/10-lab.network",
        f"[Match]\nName=host0\n\n[Network]\nAddress={one.address}/{PREFIX_LENGTH}\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
    )
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    write_whole(root / "root/.ssh/authorized_keys", _public(client_key()), 0o600)
    write_whole(root / "etc/ssh/ssh_host_ed25519_key", _host_key(one).read_text(), 0o600)
    write_whole(root / "etc/ssh/ssh_host_ed25519_key.pub", _public(_host_key(one)))


def _boot(one: LabHost) -> None:
    """Start the host's container in cgroups of its own, so that no two guests share one."""
    folder = _folder(one)
    say(f"{one.name}: booting")
    cgroups = [cgroup / f"fp8lab-{one.name}" for cgroup in own_cgroups()]
    write_whole(folder / "cgroups", "\n".join(map(str, cgroups)))
    for cgroup in cgroups:
        cgroup.mkdir(exist_ok=True)
    # /tmp on the disk, as a bare machine has it, not in a tenth of the memory.
    nspawn = ["env", "SYSTEMD_NSPAWN_TMPFS_TMP=0"]
    nspawn += ["systemd-nspawn", "--quiet", f"--directory={folder / 'root'}"]
    nspawn += [f"--machine={one.name}", "--boot", f"--network-bridge={BRIDGE}"]
    nspawn += ["--register=no", "--keep-unit", "--link-journal=no"]
    nspawn += ["--resolv-conf=off", "--timezone=off"]
    again = ["sh", "-c", _BOOT_AGAIN_AFTER_REBOOT, "sh"]
    background(
        [*again, *recorded(nspawn, folder / "nspawn", cgroups)],
        folder / "supervisor",
        folder / "console.log",
    )


def _wait_booted(one: LabHost) -> None:
    """Wait until ssh answers and systemd has started everything."""
    folder = _folder(one)
    started = time.monotonic()
    while not _answers(one):
        if not alive(folder / "supervisor") or time.monotonic() - started > _BOOT_SECONDS:
            raise CheckFailed(
                f"{one.name} does not boot: ssh at {one.address} does not answer; "
                f"its console is in {folder / 'console.log'}"
            )
        time.sleep(0.2)
    waited = subprocess.run(
        ssh_command(one.name, "systemctl is-system-running --wait; systemctl --failed --plain"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BOOT_SECONDS,
    )
    reached, *failed = waited.stdout.splitlines() or ["unreachable"]
    if reached not in ("running", "degraded"):
        raise CheckFailed(f"{one.name} does not boot: systemd says {reached}")
    say(f"{one.name}: {reached} at {one.address} after {time.monotonic() - started:.1f} s")
    for line in failed if reached == "degraded" else ():
        say(f"{one.name}: {line}")


def _power_off(folder: Path) -> None:
    """Ask the guest's init, the child of nspawn, to shut down."""
    nspawn = alive(folder / "nspawn")
    for init in children(nspawn) if nspawn else ():
        with suppress(ProcessLookupError):
            os.kill(init, _POWEROFF)


def _halt(one: LabHost) -> None:
    """End the host's processes, the guest's own way first, and unmount its disk."""
    folder = _folder(one)
    records = [folder / "supervisor", folder / "nspawn"]
    _power_off(folder)
    if not wait_ended(records, _POWEROFF_SECONDS):
        say(f"{one.name}: does not shut down, so it is ended")
        kill(folder / "supervisor")
    _empty_cgroups(one.name, folder / "cgroups")
    for record in records:
        record.unlink(missing_ok=True)
    _unmount(folder / "root")


def _unmount(root: Path) -> None:
    while root.is_mount():
        run(["umount", str(root)])


def _empty_cgroups(name: str, listed: Path) -> None:
    """End what runs in the cgroups that the lab made for this host, and remove them.

    Who is in them was started by the lab: also a guest whose nspawn was killed.
    """
    roots = [Path(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    until = time.monotonic() + _KILL_SECONDS
    while any(not _try_remove(root) for root in roots):
        if time.monotonic() > until:
            raise CheckFailed(f"{name} does not stop: see the processes in {roots[0]}")
        time.sleep(0.05)
    listed.unlink(missing_ok=True)


def _try_remove(root: Path) -> bool:
    """Kill a cgroup's members and remove it, innermost first; False while one is still ending."""
    if not root.exists():
        return True
    folders = sorted((folder for folder in root.rglob("*") if folder.is_dir()), reverse=True)
    for folder in [*folders, root]:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            return False
    return True


def _write_ssh_files(hosts: Sequence[LabHost]) -> None:
    """Make the keys that are not there, and list every host that has one for ssh."""
    for key in (client_key(), *map(_host_key, hosts)):
        _make_key(key)
    all_hosts = in_order(key.stem for key in client_key().parent.glob("lab-*.pub"))
    known = [f"{one.name},{one.address} {_public(_host_key(one))}" for one in all_hosts]
    write_whole(known_hosts(), "".join(known))
    write_whole(ssh_config(), "\n".join(map(_ssh_entry, all_hosts)))


def _ssh_entry(one: LabHost) -> str:
    return (
        f"Host {one.name}\n  HostName {one.address}\n  User root\n"
        f"  IdentityFile {client_key()}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known_hosts()}\n  StrictHostKeyChecking yes\n  ConnectTimeout 10\n"
    )


def _make_key(path: Path) -> None:
    if path.exists() and path.with_suffix(".pub").exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)])


def _public(key: Path) -> str:
    return key.with_suffix(".pub").read_text()


def _host_key(one: LabHost) -> Path:
    return lab_dir() / "keys" / one.name


def _folder(one: LabHost) -> Path:
    return lab_dir() / "hosts" / one.name

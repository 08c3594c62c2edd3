"""A host with SELinux enforcing: Debian in an emulated machine, frozen after its first boot.

Containers share this machine's kernel and its policy, so SELinux needs a machine of its own. It is
emulated (no KVM is needed), its only network is a loopback address of this machine on which some of
its ports are, and every start resumes the frozen first boot over a throw-away disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8fleet.catalog import platforms
from fp8fleet.errors import CheckFailed, OperatorError
from lab import apt
from lab.image import build_base
from lab.machine import install_tools
from lab.processes import alive, background, run, say, stop, stream
from lab.site import build_once, cache_dir, lab_dir, locked, write_whole

NAME = "lab-selinux"
ADDRESS = "10.0.2.15"
"""The machine's own address, which only itself reaches."""
_PORTS = (22, 8000, 8080, 8081)
"""Its TCP ports that are reached from here."""

_TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs"}
# Beside what a host installs: kernel and what boots it, the policy and its tools, the audit log.
# semanage cannot read /etc/protocols without netbase.
_PACKAGES = (
    *("linux-image-cloud-amd64", "initramfs-tools", "udev", "kmod", "e2fsprogs", "netbase"),
    *("selinux-policy-default", "auditd", "python3", "openssh-server", "sudo"),
)
# Raise it when the steps below change: images of another recipe are then not used any more.
_RECIPE = 2
_DISK_MIB = 2048
_MEMORY_MIB = 1024
_BOOT_SECONDS = 600
_STOP_SECONDS = 20
_KERNEL_ARGUMENTS = (
    "root=/dev/vda rw console=ttyS0 quiet security=selinux selinux=1 enforcing=1 audit=1"
    " net.ifnames=0 mitigations=off random.trust_cpu=on"
)

# Every change of a boolean or a port label rebuilds the whole policy: with these modules alone an
# emulated machine does that in seconds.
_POLICY_MODULES = (
    "apache application apt auditadm authlogin backup base bootloader certbot chronyd clock "
    "cockpit cron dbadm dbus dhcp dmesg dpkg fstools games gdm getty gpg guest hostname "
    "hotplug init ipsec iptables kerberos ldap libraries locallogin logadm logging logrotate "
    "lvm memcached miscfiles modutils mount mta mysql netutils nscd ntp policykit portage "
    "postfix postgresql redis rpc rsync sddm secadm selinuxutil setrans ssh staff storage su "
    "sudo sysadm sysnetwork systemd tmpreaper udev unconfined unprivuser userdomain "
    "usermanage vlock webadm xdg xguest xserver"
)
_NETWORK = f"""\
[Match]
Name=e*

[Network]
Address={ADDRESS}/24
LinkLocalAddressing=no
IPv6AcceptRA=no
"""
_SSHD = """\
UseDNS no
PrintMotd no
PrintLastLog no
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
"""
# What a machine that lives for minutes does without; each unit costs seconds of its first boot.
_MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "systemd-pstore.service"),
    *("dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-debug.mount"),
    *("sys-kernel-tracing.mount", "modprobe@drm.service", "getty@tty1.service"),
    "systemd-networkd-wait-online.service",
)


def image(cache: Path) -> Path:
    """Return the folder of the frozen machine, made the first time (some minutes, 1.5 GB).

    Args:
        cache: the lab's cache folder; callers hold the lab's lock.

    Raises:
        CheckFailed: the machine cannot be built or does not boot.
    """
    base = build_base(cache)
    # A frozen machine resumes only in the emulator that froze it.
    emulator = run(["qemu-system-x86_64", "--version"])
    recipe = json.dumps([base.name, _packages(), _KERNEL_ARGUMENTS, emulator, _RECIPE])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return build_once(cache / f"selinux-{digest}", lambda folder: _build(folder, cache, base))


def up() -> None:
    """Have the machine run, as its first boot left it; a running one is replaced.

    Raises:
        OperatorError: this machine cannot run it.
        CheckFailed: it does not answer.
    """
    install_tools(_TOOLS)
    with locked():
        made = image(cache_dir())
    down()
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    address = _free_address()
    write_whole(folder / "address", address)
    config = _write_ssh_files(folder, made, address)
    say(f"{NAME}: resuming")
    resumed = ["-monitor", "none", "-incoming", f"exec:cat {made / 'memory'}"]
    machine = _machine(made, address, "snapshot=on")
    # the throw-away disk grows in a file without a name in this folder
    temporary = ["env", f"TMPDIR={folder}"]
    background([*temporary, *machine, *resumed], _record(), folder / "qemu.log")
    _wait_for_ssh(config, lambda: alive(_record()) is not None)
    set_clock()


def down() -> None:
    """Stop the machine; its disk is gone with it. Nothing happens where it does not run."""
    stop(_record(), _STOP_SECONDS)


def ssh_command(*command: str) -> list[str]:
    """Return the ssh command line that opens a shell, or runs ``command``, as root."""
    return ["ssh", "-F", str(_folder() / "ssh_config"), NAME, *command]


def connection() -> dict[str, Any]:
    """Return the inventory's keys with which SSH reaches the machine."""
    folder = _folder()
    return {
        "ssh_hostname": address(),
        "ssh_user": "root",
        "ssh_key": str(folder / "client"),
        "ssh_known_hosts_file": str(folder / "known_hosts"),
    }


def address() -> str:
    """Return the running machine's address on this machine."""
    return (_folder() / "address").read_text()


def set_clock() -> None:
    """Give the machine this machine's time: it was frozen in the past."""
    run(ssh_command(f"date -s @{time.time():.0f}"))


def reboot() -> None:
    """Reboot the machine and wait until ssh answers and systemd has started everything.

    Raises:
        CheckFailed: it does not come back.
    """
    before = run(ssh_command("cat /proc/sys/kernel/random/boot_id"))
    subprocess.run(ssh_command("systemctl reboot"), capture_output=True, check=False)
    until = time.monotonic() + _BOOT_SECONDS
    while True:
        asked = ssh_command("cat /proc/sys/kernel/random/boot_id")
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout != before:
            break
        if time.monotonic() > until:
            raise CheckFailed(f"{NAME} does not come back: see {_console()}")
        time.sleep(1)
    run(ssh_command("systemctl is-system-running --wait || true"))
    set_clock()


def _packages() -> list[str]:
    debian = platforms()["debian-12"]
    theirs = (*debian.packages, *debian.proxy_packages, *debian.selinux_packages)
    return sorted({*_PACKAGES, *theirs, debian.time_package})


def _build(folder: Path, cache: Path, base: Path) -> None:
    packages = apt.build_repository(cache, base, _packages())
    root = folder / "root"
    say("SELinux machine: installing, once")
    run(["cp", "-a", str(base), str(root)])
    _install(root, packages)
    for key in ("client", "host_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", NAME, "-f", str(folder / key)])
    _configure(root, folder)
    _trim_policy(root)
    say("SELinux machine: labelling and writing the disk, once")
    contexts = "/etc/selinux/default/contexts/files/file_contexts"
    _chroot(root, f"setfiles -F -e /proc {contexts} /")
    for name in ("vmlinuz", "initrd.img"):
        shutil.copyfile(root / name, folder / name)
    disk = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root)]
    stream([*disk, str(folder / "disk"), f"{_DISK_MIB}M"], "SELinux machine")
    shutil.rmtree(root)
    _freeze(folder)


def _install(root: Path, repository: Path) -> None:
    denied = root / "usr/sbin/policy-rc.d"
    denied.write_text("#!/bin/sh\nexit 101\n")
    denied.chmod(0o755)
    inside = root / "repository"
    shutil.copytree(repository, inside)
    (root / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/repository ./\n")
    install = "apt-get -y -q -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root"
    names = " ".join(_packages())
    _chroot(root, f"{install} update && {install} --no-install-recommends install {names}")
    shutil.rmtree(inside)
    denied.unlink()
    (root / "etc/apt/sources.list").write_text("")
    _chroot(root, "apt-get clean; rm -rf /var/lib/apt/lists/*")


def _configure(root: Path, folder: Path) -> None:
    """Write what makes the installed tree this machine: name, address, keys, enforcing."""
    texts = {
        "etc/hostname": f"{NAME}\n",
        "etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {NAME}\n",
        "etc/fstab": "/dev/vda / ext4 defaults,noatime 0 0\n",
        "etc/systemd/network/10-lab.network": _NETWORK,
        "etc/ssh/sshd_config.d/lab.conf": _SSHD,
        "etc/selinux/config": "SELINUX=enforcing\nSELINUXTYPE=default\nSETLOCALDEFS=0\n",
    }
    for path, text in texts.items():
        write_whole(root / path, text)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    write_whole(ssh / "authorized_keys", (folder / "client.pub").read_text(), 0o600)
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    write_whole(host_key, (folder / "host_key").read_text(), 0o600)
    write_whole(host_key.with_suffix(".pub"), (folder / "host_key.pub").read_text())
    run(["systemctl", f"--root={root}", "mask", "-q", *_MASKED])


def _trim_policy(root: Path) -> None:
    modules = root / "var/lib/selinux/default/active/modules/100"
    surplus = sorted({entry.name for entry in modules.iterdir()} - {*_POLICY_MODULES.split()})
    _chroot(root, f"semodule -s default -n -X 100 -r {' '.join(surplus)}")


def _chroot(root: Path, script: str) -> None:
    """Run a script in the tree, in namespaces of its own: nothing of it stays behind."""
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    inside = f"mount -t proc proc {root}/proc && exec chroot {root} /bin/sh -ec '{script}'"
    env = {"PATH": os.environ["PATH"], "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    stream([*namespaces, "sh", "-c", inside], "SELinux machine", env)


def _freeze(folder: Path) -> None:
    """Boot for the first time; when everything has started, write the memory to a file."""
    say("SELinux machine: its first boot, once")
    _folder().mkdir(parents=True, exist_ok=True)
    address = _free_address()
    config = _write_ssh_files(_folder(), folder, address)
    command = [*_machine(folder, address, "snapshot=off"), "-qmp", "stdio"]
    machine = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:
        _wait_for_ssh(config, lambda: machine.poll() is None)
        started = ["systemctl is-system-running --wait; systemctl --failed --plain --no-legend"]
        reached = run(["ssh", "-F", str(config), NAME, *started]).split()
        if reached != ["running"]:
            raise CheckFailed(f"{NAME} does not boot: {' '.join(reached)}")
        _ask(machine, "qmp_capabilities")
        _ask(machine, "migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        _ask(machine, "migrate", uri=f"exec:cat >{folder / 'memory'}")
        while (state := _ask(machine, "query-migrate")["status"]) not in ("completed", "failed"):
            time.sleep(0.2)
        if state == "failed":
            raise CheckFailed(f"{NAME}: its memory cannot be written to {folder}")
        _ask(machine, "quit")
        machine.wait(timeout=60)
    finally:
        machine.kill()
        machine.wait()


def _ask(machine: subprocess.Popen[str], command: str, **arguments: Any) -> dict[str, Any]:
    """One command of the emulator's monitor (QMP, one JSON object a line)."""
    assert machine.stdin
    assert machine.stdout
    machine.stdin.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
    machine.stdin.flush()
    for line in machine.stdout:
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CheckFailed(f"qemu: {command}: {answer['error'].get('desc')}")
        if "return" in answer:
            return dict(answer["return"])
    raise CheckFailed(f"qemu ended at {command}")


def _machine(folder: Path, address: str, disk: str) -> list[str]:
    """The emulated machine. A processor that is the same everywhere: the frozen one knows it."""
    ports = ",".join(f"hostfwd=tcp:{address}:{port}-:{port}" for port in _PORTS)
    return [
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi"),
        *("-cpu", "Nehalem-v1", "-smp", "2", "-m", str(_MEMORY_MIB), "-nodefaults"),
        *("-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.img")),
        *("-append", _KERNEL_ARGUMENTS),
        *("-drive", f"file={folder / 'disk'},format=raw,if=virtio,cache=unsafe,{disk}"),
        # no way out: from the guest nothing is reached
        *("-netdev", f"user,id=net,restrict=on,{ports}"),
        *("-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci"),
        *("-display", "none", "-serial", f"file:{_console()}"),
    ]


def _wait_for_ssh(config: Path, runs: Any) -> None:
    until = time.monotonic() + _BOOT_SECONDS
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    command = ["ssh", "-F", str(config), *options, NAME, "true"]
    while subprocess.run(command, capture_output=True, check=False).returncode != 0:
        if not runs() or time.monotonic() > until:
            raise CheckFailed(f"{NAME} does not answer: see {_console()}")
        time.sleep(0.5)


def _write_ssh_files(folder: Path, made: Path, address: str) -> Path:
    """Write what ssh needs to reach a machine made in ``made``; returns its ssh_config."""
    public = " ".join((made / "host_key.pub").read_text().split()[:2])
    known = folder / "known_hosts"
    write_whole(known, f"{address} {public}\n")
    key = folder / "client"
    key.unlink(missing_ok=True)
    key.symlink_to(made / "client")
    config = folder / "ssh_config"
    write_whole(
        config,
        f"Host {NAME}\n  HostName {address}\n  User root\n"
        f"  IdentityFile {made / 'client'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n",
    )
    return config


def _free_address() -> str:
    """A loopback address that no other lab of this machine uses: all of 127.0.0.0/8 is one."""
    return f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"


def _folder() -> Path:
    return lab_dir() / "selinux"


def _console() -> Path:
    return _folder() / "console.log"


def _record() -> Path:
    return _folder() / "qemu"


def main(arguments: Sequence[str]) -> int:
    """``python -m lab.selinux_vm up|down|ssh [COMMAND]``."""
    try:
        if arguments[:1] == ["up"]:
            up()
        elif arguments[:1] == ["down"]:
            down()
        elif arguments[:1] == ["ssh"]:
            return subprocess.run(ssh_command(*arguments[1:]), check=False).returncode
        else:
            raise OperatorError("usage: python -m lab.selinux_vm up|down|ssh [COMMAND]")
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

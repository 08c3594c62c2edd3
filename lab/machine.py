"""What the machine that runs the lab must be, and the Debian packages the lab adds to it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fp8fleet.errors import OperatorError
from lab.apt import MIRROR_VARIABLE, SUITE, debian_mirror
from lab.processes import say, stream
from lab.site import lab_dir

# The program that shows that a package is there, and the package.
_TOOLS = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "apt-ftparchive": "apt-utils",
    "ssh": "openssh-client",
}
# On cgroup v1 a process may enter this one only after settings; systemd does not use it there.
_UNUSED_CONTROLLER = "cpuset"


def missing() -> str | None:
    """Return one line that says why the lab cannot run on this machine, None when it can.

    Debian packages that ``install_tools`` adds do not count as missing.
    """
    if sys.platform != "linux":
        return f"the lab needs Linux: this is {sys.platform}"
    if os.geteuid() != 0:
        return "the lab needs root (mounts, containers, a bridge): run it as root or with sudo"
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "the lab needs a Debian-family machine: there is no apt-get or dpkg here"
    return _debian_fault() or _overlay_fault() or _cgroup_fault()


def install_tools(tools: Mapping[str, str] = _TOOLS) -> None:
    """Install the Debian packages that the lab's own programs come from, if any is missing.

    Args:
        tools: the packages by a program of each, which shows that it is there.

    Raises:
        OperatorError: the lab cannot run on this machine at all.
        CheckFailed: apt-get failed.
    """
    if fault := missing():
        raise OperatorError(fault)
    packages = [package for tool, package in tools.items() if shutil.which(tool) is None]
    if not packages:
        return
    say(f"installing the Debian packages that the lab needs: {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt_get = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    stream([*apt_get, "update"], "apt-get update", env)
    stream(
        [*apt_get, "install", "-y", "--no-install-recommends", *packages], "apt-get install", env
    )


def own_cgroups() -> list[Path]:
    """Return the folder of this process's cgroup in each hierarchy that a guest's systemd uses."""
    return cgroup_folders(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )


def cgroup_folders(cgroups: str, mountinfo: str) -> list[Path]:
    """Return the cgroup folders that two files of /proc/PID describe.

    Args:
        cgroups: /proc/PID/cgroup, lines of ``hierarchy:controllers:path``; version 2 names no
            controllers (cgroups(7)).
        mountinfo: /proc/PID/mountinfo; field 5 is the mount point, and after " - " stand the type,
            the source and the options, which name a version 1 hierarchy's controllers (proc(5)).
    """
    mounts = []
    for line in mountinfo.splitlines():
        before, after = line.split(" - ", 1)
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            hierarchy = {""} if kind == "cgroup2" else set(options.split(","))
            mounts.append((Path(before.split()[4]), hierarchy))
    folders = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        wanted = set(controllers.split(","))
        if wanted == {_UNUSED_CONTROLLER}:
            continue
        folders += [at / path.lstrip("/") for at, hierarchy in mounts if wanted <= hierarchy][:1]
    return folders


def _debian_fault() -> str | None:
    mirror = debian_mirror()
    if mirror and not re.fullmatch(r"https?://\S+", mirror):
        return f"{MIRROR_VARIABLE} is {mirror!r}: expected a URL such as http://MIRROR/debian"
    release = platform.freedesktop_os_release()
    if not mirror and (release["ID"], release.get("VERSION_CODENAME")) != ("debian", SUITE):
        return (
            f"the lab's hosts are Debian 12 and this machine is {release['PRETTY_NAME']}: "
            f"set {MIRROR_VARIABLE} to a Debian mirror, such as http://MIRROR/debian"
        )
    return None


def _overlay_fault() -> str | None:
    lab_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="overlay-", dir=lab_dir()) as folder:
        parts = {part: Path(folder) / part for part in ("lower", "upper", "work", "root")}
        for part in parts.values():
            part.mkdir()
        options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["root"])]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no reason"
            return f"the lab needs overlay mounts in {lab_dir()}: {reason}"
        subprocess.run(["umount", str(parts["root"])], check=True)
    return None


def _cgroup_fault() -> str | None:
    folders = own_cgroups()
    if not folders:
        return "the lab needs control groups: no cgroup hierarchy is mounted at /sys/fs/cgroup"
    for folder in folders:
        if not os.access(folder, os.W_OK):
            return f"the lab needs writable control groups: cannot write in {folder}"
    return None

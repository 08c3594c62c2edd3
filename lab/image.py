"""The base image of lab hosts: a bare Debian 12 machine, without Python."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from pathlib import Path

from fp8fleet.errors import CheckFailed
from lab.apt import SUITE, debian_mirror, keyring
from lab.processes import run, say, stream
from lab.site import build_once

_PACKAGES = ("systemd", "systemd-sysv", "dbus", "openssh-server", "iproute2", "sudo")
# Raise it when the steps below change: images of another recipe are then not used any more.
_RECIPE = 1


def build_base(cache: Path) -> Path:
    """Return the root folder of the base image, built the first time (about 1 minute, 0.3 GB).

    Args:
        cache: the lab's cache folder.
    """
    recipe = json.dumps([SUITE, platform.machine(), _PACKAGES, _RECIPE])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return build_once(cache / f"base-{SUITE}-{digest}", lambda root: _build(root, cache))


def _build(root: Path, cache: Path) -> None:
    say(f"base image: {SUITE}, minimal, with systemd and sshd, once")
    # In its own mount and pid namespaces an interrupted debootstrap leaves no mount and no process.
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}"]
    mirror = debian_mirror()
    if mirror:
        bootstrap.append(f"--keyring={keyring(mirror, cache)}")
    stream(
        [*namespaces, *bootstrap, SUITE, str(root), mirror or _own_archive()],
        "base image",
        {**os.environ, **_apt_proxies(), "DEBIAN_FRONTEND": "noninteractive"},
    )
    _strip(root)
    run(["systemctl", f"--root={root}", "enable", "systemd-networkd.service"])


def _strip(root: Path) -> None:
    """Take out what belongs to one machine only, or to the machine that built the image."""
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for leftover in ("etc/resolv.conf", "etc/hostname", "var/lib/dbus/machine-id"):
        (root / leftover).unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")
    (root / "etc/apt/sources.list").write_text("")
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log"):
        for entry in (root / folder).iterdir():
            if entry.is_file():
                entry.unlink()
            elif folder.startswith("var/lib"):
                shutil.rmtree(entry)


def _own_archive() -> str:
    """Return the address that this machine's own apt configuration has for Debian 12."""
    listed = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    )
    for line in listed.splitlines():
        address, release = line.rsplit(" ", 1)
        if release == SUITE:
            return address
    raise CheckFailed(
        f"this machine's apt has no package source for its release {SUITE}: "
        "add one to /etc/apt/sources.list and run apt-get update"
    )


def _apt_proxies() -> dict[str, str]:
    """Return apt's proxies as the environment variables that debootstrap's wget reads."""
    proxies = {}
    for scheme in ("http", "https"):
        line = run(["apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy"]).strip()
        if line:
            proxies[f"{scheme}_proxy"] = line.removeprefix("PROXY=").strip("'")
    return proxies

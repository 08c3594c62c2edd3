"""Debian 12's packages: where the lab gets them, and the apt repository it makes for its hosts.

The hosts are Debian 12. So a Debian 12 machine's own apt sources serve, and everywhere else (or
when asked) a private apt configuration with a Debian mirror, whose signatures are checked.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lab.processes import run, say, stream
from lab.site import build_once

SUITE = "bookworm"
MIRROR_VARIABLE = "FP8FLEET_LAB_DEBIAN"
# Debian 12's signing keys. This digest vouches for them, since a machine's own package of this
# name may be older than they are (as in Ubuntu 22.04).
_KEYS = "pool/main/d/debian-archive-keyring/debian-archive-keyring_2023.3+deb12u2_all.deb"
_KEYS_SHA256 = "f699e2f88dca05212f2a452b58475f2993cb6993dfbafb1d0205a3291eb8b4b8"


def debian_mirror() -> str | None:
    """Return the URL of the Debian mirror to use, None for this machine's own apt sources."""
    return os.environ.get(MIRROR_VARIABLE, "").rstrip("/") or None


def keyring(mirror: str, cache: Path) -> Path:
    """Return the file with the keys that sign Debian 12, fetched the first time.

    Args:
        mirror: URL of a Debian mirror.
        cache: the lab's cache folder.

    Raises:
        CheckFailed: the mirror does not have the keys, or has other bytes under their name.
    """

    def build(folder: Path) -> None:
        package = folder / "package"
        fetch = ["/usr/lib/apt/apt-helper", "-o", "APT::Sandbox::User=root", "download-file"]
        run([*fetch, f"{mirror}/{_KEYS}", str(package), f"SHA256:{_KEYS_SHA256}"])
        run(["dpkg-deb", "--extract", str(package), str(folder)])

    keys = build_once(cache / f"debian-keys-{_KEYS_SHA256[:12]}", build)
    return keys / "usr/share/keyrings/debian-archive-keyring.gpg"


def private_options(scratch: Path, cache: Path) -> list[str]:
    """Return options with which apt offers Debian 12's packages and keeps its state to itself.

    Args:
        scratch: a folder for the state; state/status in it, empty at first, is dpkg's status file.
        cache: the lab's cache folder.
    """
    for part in ("state/lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    (scratch / "state/status").touch()
    settings: dict[str, str | Path] = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "state/status",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    if mirror := debian_mirror():
        sources = scratch / "sources.list"
        sources.write_text(f"deb [signed-by={keyring(mirror, cache)}] {mirror} {SUITE} main\n")
        others = ("sourceparts", "preferences", "preferencesparts")
        settings |= {f"Dir::Etc::{name}": "/dev/null" for name in others}
        settings["Dir::Etc::sourcelist"] = sources
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def build_repository(cache: Path, base: Path, packages: Sequence[str]) -> Path:
    """Return a folder that apt uses as ``deb [trusted=yes] URL ./``, built the first time.

    It holds the packages and every dependency that the base image lacks.

    Args:
        cache: the lab's cache folder.
        base: the base image's root folder, whose dpkg status says what hosts have.
        packages: Debian package names.
    """
    key = json.dumps([base.name, sorted(packages)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    target = cache / f"debian-{digest}"
    return build_once(target, lambda folder: _build(folder, cache, base, packages))


def _build(folder: Path, cache: Path, base: Path, packages: Sequence[str]) -> None:
    say(f"apt repository: {' '.join(packages)} with their dependencies, once")
    scratch = folder.with_name(folder.name + ".apt")
    shutil.rmtree(scratch, ignore_errors=True)
    apt_get = ["apt-get", *private_options(scratch, cache)]
    # apt locks beside the status file: a copy keeps the base image untouched.
    shutil.copyfile(base / "var/lib/dpkg/status", scratch / "state/status")
    env = {**os.environ, "LC_ALL": "C"}
    stream([*apt_get, "update"], "apt repository", env)
    install = ["install", "-y", "--download-only", "--no-install-recommends"]
    stream([*apt_get, *install, *packages], "apt repository", env)
    for package in (scratch / "cache/archives").glob("*.deb"):
        package.rename(folder / package.name)
    _index(folder)
    shutil.rmtree(scratch)
    debs = [deb.stat().st_size for deb in folder.glob("*.deb")]
    say(f"apt repository: {len(debs)} packages, {sum(debs) / 1e6:.0f} MB")


def _index(folder: Path) -> None:
    """Write Packages, Packages.gz and Release, the index of a flat repository."""
    packages = run(["sh", "-c", 'cd "$1" && apt-ftparchive packages .', "sh", str(folder)])
    (folder / "Packages").write_text(packages)
    (folder / "Packages.gz").write_bytes(gzip.compress(packages.encode()))
    (folder / "Release").write_text(run(["apt-ftparchive", "release", str(folder)]))

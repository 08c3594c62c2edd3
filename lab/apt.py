"""The apt repository of the lab's mirror: packages for hosts, with all that they depend on."""

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


def build_repository(cache: Path, base: Path, packages: Sequence[str]) -> Path:
    """Return a folder that apt uses as ``deb [trusted=yes] URL ./``, built the first time.

    It holds the packages and every dependency that the base image lacks. They come with this
    machine's own apt configuration.

    Args:
        cache: the lab's cache folder.
        base: the base image's root folder, whose dpkg status says what hosts have.
        packages: Debian package names.
    """
    key = json.dumps([base.name, sorted(packages)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return build_once(cache / f"debian-{digest}", lambda folder: _build(folder, base, packages))


def _build(folder: Path, base: Path, packages: Sequence[str]) -> None:
    say(f"apt repository: {' '.join(packages)} with their dependencies, once")
    scratch = folder.with_name(folder.name + ".apt")
    shutil.rmtree(scratch, ignore_errors=True)
    for part in ("state/lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    # apt locks beside the status file: a copy keeps the base image untouched.
    shutil.copyfile(base / "var/lib/dpkg/status", scratch / "state/status")
    apt_get = ["apt-get", *_private_state(scratch)]
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


def _private_state(scratch: Path) -> list[str]:
    """Return apt options that keep its sources and take the installed packages from ``scratch``."""
    settings = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "state/status",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def _index(folder: Path) -> None:
    """Write Packages, Packages.gz and Release, the index of a flat repository."""
    packages = run(["sh", "-c", 'cd "$1" && apt-ftparchive packages .', "sh", str(folder)])
    (folder / "Packages").write_text(packages)
    (folder / "Packages.gz").write_bytes(gzip.compress(packages.encode()))
    (folder / "Release").write_text(run(["apt-ftparchive", "release", str(folder)]))

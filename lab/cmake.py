"""The lab's cmake: an archive as Kitware publishes them, out of the package index's wheel.

Both hold the same programs, linked for any Linux; only the folders around them differ.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

from lab import wheels
from lab.processes import say
from lab.site import build_once

LOCK = wheels.LOCKS / "cmake.txt"
TIMESTAMP_S = 1_700_000_000  # of every file: the archive depends on content only
_DATA = "cmake/data/"
# Raise it when the archive changes: one of another recipe is then not used any more.
_RECIPE = 1


def build_archive(cache: Path) -> Path:
    """Return ``cmake-VERSION-linux-x86_64.tar.gz``, built the first time.

    Args:
        cache: the lab's cache folder.

    Raises:
        CheckFailed: pip cannot get the wheel.
    """
    digest = hashlib.sha256(f"{_RECIPE} {LOCK.read_text()}".encode()).hexdigest()[:12]
    version = wheels.read_lock(LOCK)[0].version
    name = f"cmake-{version}-linux-x86_64"
    folder = build_once(cache / f"cmake-{digest}", lambda folder: _build(folder, name, cache))
    return folder / f"{name}.tar.gz"


def _build(folder: Path, name: str, cache: Path) -> None:
    say(f"cmake: {name}.tar.gz, once")
    wheel = next(wheels.fetch(LOCK, cache).glob("cmake-*.whl"))
    with (
        zipfile.ZipFile(wheel) as source,
        gzip.GzipFile(
            folder / f"{name}.tar.gz", "wb", compresslevel=1, mtime=TIMESTAMP_S
        ) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for member in sorted(source.namelist()):
            if re.match(rf"{_DATA}(bin|share)/.*[^/]$", member):
                content = source.read(member)
                entry = tarfile.TarInfo(f"{name}/{member.removeprefix(_DATA)}")
                entry.size, entry.mtime = len(content), TIMESTAMP_S
                entry.mode = 0o755 if member.startswith(f"{_DATA}bin/") else 0o644
                archive.addfile(entry, io.BytesIO(content))

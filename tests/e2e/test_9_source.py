"""engine_build = "source": what has no wheel in the lock is built on the host."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clients import complete
from cmake_project import proof, write_source
from fleet import MAIN, REPO, Fleet, command, served_folder, ssh, url

from lab.site import mirror_root

pytestmark = [pytest.mark.lab, pytest.mark.long]
PACKAGE = "setproctitle"
"""A dependency of vLLM with a C extension; the host gets only its source."""
OLD_CMAKE = "#!/bin/sh\\necho cmake version 3.18.4\\n"
"""printf's format of a program that stands for the distribution's, which is too old."""


def source_lock(folder: Path) -> tuple[Path, Path]:
    """The lab's lock with the source archive in place of the package's wheels, and that archive.

    It also has a package that only cmake builds.
    """
    lock = (REPO / "locks/vllm-0.32.0-cpu-x86_64.txt").read_text()
    entry = re.search(rf"^{PACKAGE}==([0-9.]+)(?: \\\n    --hash=\S+)+", lock, re.MULTILINE)
    assert entry
    download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", *download, f"{PACKAGE}=={entry[1]}"], check=True, timeout=300
    )
    archive = next(folder.glob(f"{PACKAGE}*.tar.gz"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    changed = lock.replace(entry[0], f"{PACKAGE}=={entry[1]} \\\n    --hash=sha256:{digest}")
    path = folder / "source.txt"
    path.write_text(changed + write_source(folder))
    return path, archive


def test_a_package_without_a_wheel_is_built_on_the_host(fleet: Fleet, tmp_path: Path) -> None:
    command("fp8fleet", "lab", "create", MAIN)
    ssh(MAIN, f"printf '{OLD_CMAKE}' >/usr/bin/cmake && chmod 755 /usr/bin/cmake")
    lock, _ = source_lock(tmp_path)
    for wheel in (mirror_root() / "wheels").iterdir():
        if not wheel.name.startswith(PACKAGE):
            (tmp_path / wheel.name).symlink_to(wheel.resolve())
    with served_folder(tmp_path) as folder:
        links = [folder]
        wheels_only = fleet.inventory(engine_requirements=str(lock), package_find_links=links)
        refused = fleet.full(wheels_only)
        assert refused.code == 1
        assert PACKAGE in refused.text
        assert ssh(MAIN, "ls -d /opt/fp8fleet/cmake || true") == ""
        inventory = fleet.inventory(
            engine_requirements=str(lock), package_find_links=links, engine_build="source"
        )
        done = fleet.full(inventory)
    assert done.code == 0, done.text
    python = ssh(MAIN, "readlink /proc/$(systemctl show -P MainPID fp8fleet-tiny.service)/exe")
    packages = f"{Path(python).parent.parent}/lib/python3*/site-packages"
    tags = ssh(MAIN, f"grep -h ^Tag: {packages}/{PACKAGE}-*/WHEEL")
    assert tags == "Tag: cp311-cp311-linux_x86_64"
    assert complete(url(MAIN)).status_code == 200
    assert ssh(MAIN, proof()) == "42 /opt/fp8fleet/cmake/current/bin/cmake"
    assert ssh(MAIN, "cat /usr/bin/cmake") == ssh(MAIN, f"printf '{OLD_CMAKE}'")

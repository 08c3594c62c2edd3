"""engine_build = "source": what has no wheel in the lock is built on the host."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from clients import complete
from fleet import MAIN, REPO, Fleet, command, ssh, url

from lab.site import GATEWAY, mirror_root

pytestmark = [pytest.mark.lab, pytest.mark.long]
PACKAGE = "setproctitle"
"""A dependency of vLLM with a C extension; the host gets only its source."""


@contextmanager
def served_folder(folder: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer((GATEWAY, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{GATEWAY}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def source_lock(folder: Path) -> tuple[Path, Path]:
    """The lab's lock with the source archive in place of the package's wheels, and that archive."""
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
    path.write_text(changed)
    return path, archive


def test_a_package_without_a_wheel_is_built_on_the_host(fleet: Fleet, tmp_path: Path) -> None:
    command("fp8fleet", "lab", "create", MAIN)
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

"""The lab's site mirror: what hosts without a way out need, over HTTP on the bridge's address."""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

from fp8fleet.errors import CheckFailed
from lab.processes import alive, background, say, stop
from lab.site import (
    GATEWAY,
    MIRROR_PORT,
    MIRROR_URL,
    lab_dir,
    mirror_log,
    mirror_root,
    repository,
)

_START_SECONDS = 20
_STOP_SECONDS = 10


def up(folders: dict[str, Path]) -> None:
    """Serve ``folders`` and make sure that the mirror answers.

    Args:
        folders: what stands under the mirror's root: path without a leading slash, such as
            ``wheels`` or ``models/tiny-llama``, and the folder or file served there.

    Raises:
        CheckFailed: the mirror does not answer; the message names its log.
    """
    _link(folders)
    if alive(_record()) and _answers():
        return
    down()
    # Without sendfile, which aiohttp does not count, so that the log has the bytes that went out.
    server = ["env", "AIOHTTP_NOSENDFILE=1", sys.executable, "-m", "lab.webserver"]
    server += ["--root", str(mirror_root())]
    server += ["--address", GATEWAY, "--port", str(MIRROR_PORT), "--access-log", str(mirror_log())]
    background(server, _record(), _output(), cwd=repository())
    until = time.monotonic() + _START_SECONDS
    while not _answers():
        if time.monotonic() > until or not alive(_record()):
            raise CheckFailed(f"the mirror does not answer at {MIRROR_URL}: see {_output()}")
        time.sleep(0.1)
    say(f"mirror: {MIRROR_URL}/ serves {', '.join(sorted(folders))}")


def down() -> None:
    """Stop the mirror; nothing happens when it does not run."""
    stop(_record(), _STOP_SECONDS)


def is_up() -> bool:
    """Tell whether the mirror runs and answers."""
    return alive(_record()) is not None and _answers()


def _link(folders: dict[str, Path]) -> None:
    """Make the mirror's root hold exactly these links."""
    root = mirror_root()
    for old in root.rglob("*"):
        if old.is_symlink() and old.relative_to(root).as_posix() not in folders:
            old.unlink()
    for place, target in folders.items():
        link = root / place
        link.parent.mkdir(parents=True, exist_ok=True)
        beside = link.with_name(link.name + ".new")
        beside.unlink(missing_ok=True)
        beside.symlink_to(target)
        beside.replace(link)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"{MIRROR_URL}/", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _record() -> Path:
    return lab_dir() / "mirror.pid"


def _output() -> Path:
    return lab_dir() / "mirror.out"

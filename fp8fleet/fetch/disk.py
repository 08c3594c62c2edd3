"""Small writes that are whole on the disk or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_beside(path: Path, content: str | bytes) -> None:
    """Replace a small file as a whole."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

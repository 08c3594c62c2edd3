"""Wrong bytes, kept aside with what is known of them, for the operator and the publisher."""

from __future__ import annotations

import json
import time
from pathlib import Path

from fp8fleet.manifest import QUARANTINE, ManifestFile


class Quarantine:
    """A model directory's wrong files: the newest bad copy of each, or they would fill the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / QUARANTINE

    def path(self, file: ManifestFile) -> Path:
        """Where a bad copy goes; its directory exists."""
        path = self._directory / "files" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def note(self, file: ManifestFile, what: str, got: str | None, source: str) -> None:
        """Add a line to ``notes.jsonl``.

        Args:
            what: what is wrong, for people.
            got: the bad copy's SHA256, where it was computed.
            source: the address that the bytes came from.
        """
        note = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "path": file.path,
            "what": what,
            "expected": file.sha256,
            "got": got,
            "source": source,
        }
        with (self._directory / "notes.jsonl").open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")

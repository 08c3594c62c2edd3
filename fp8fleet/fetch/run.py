"""What the parts of one fetch share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from fp8fleet.fetch.check import Stamp
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.pace import RateLimit
from fp8fleet.fetch.quarantine import Quarantine
from fp8fleet.manifest import Manifest


class Stopped(Exception):
    """Another file failed for good, or the operator stopped the run."""


@dataclass
class Run:
    """One run over one directory, which it has for itself."""

    manifest: Manifest
    directory: Path
    options: FetchOptions
    stop: threading.Event = field(default_factory=threading.Event)
    received: int = 0
    """Bytes from sources."""
    from_peers: int = 0
    """Bytes from other hosts of the site."""

    def __post_init__(self) -> None:
        self.reporter = self.options.reporter
        self.stamp = Stamp(self.directory)
        self.quarantine = Quarantine(self.directory)
        self.limit = RateLimit(self.options.rate_limit, self.sleep)
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """Pause; the end of the run interrupts it."""
        (self.options.sleep or self.stop.wait)(seconds)
        self.raise_if_stopped()

    def count(self, received: int) -> None:
        """``received`` more bytes came from a source; pauses where the rate limit says so."""
        with self._lock:
            self.received += received
        self.limit.wait_for(received)

    def raise_if_stopped(self) -> None:
        """Raises `Stopped` when the run ends."""
        if self.stop.is_set():
            raise Stopped

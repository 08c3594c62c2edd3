"""How fast a fetch may go, and how often it asks a source again that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import Interrupted, Refused


class RateLimit:
    """Bytes a second that all threads of a run share."""

    def __init__(
        self,
        bytes_per_s: float | None,
        sleep: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``bytes_per_s``: None is no limit."""
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, count: int) -> None:
        """``count`` bytes came: pause until as many may come again."""
        pause = self.charge(count)
        if pause > 0:
            self._sleep(pause)

    def charge(self, count: int) -> float:
        """``count`` bytes came that nobody pauses for; returns the seconds they are worth."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            return self._free_at - now


class Retries:
    """Counts one source's failures in a row and pauses after each, longer every time."""

    def __init__(
        self,
        options: FetchOptions,
        sleep: Callable[[float], object],
        note: Callable[[str], None],
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._note = note
        self._failures = 0

    def forgive(self) -> None:
        """It works again."""
        self._failures = 0

    def failed(self, error: Interrupted) -> None:
        """Pause before the next try.

        Raises:
            Refused: it failed too often.
        """
        self._failures += 1
        if self._failures > self._options.retries:
            raise Refused(f"{error} ({self._failures} tries)")
        longest = self._options.longest_backoff_s
        pause = min(longest, self._options.backoff_s * 2 ** (self._failures - 1))
        if error.retry_after_s is not None:
            pause = min(longest, max(pause, error.retry_after_s))
        self._note(f"{error}: next try in {pause:g} s")
        self._sleep(pause)

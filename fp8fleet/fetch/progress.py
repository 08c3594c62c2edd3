"""What an operator sees of a long run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from fp8fleet.outside import plain

_READER_CHECK_S = 0.5


def human_bytes(count: float) -> str:
    """``4900000000`` as ``4.9 GB`` (decimal units)."""
    if count >= 10**21:
        # An integer from outside may be larger than any float.
        return "over 1000000000 TB"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Reporter:
    """Is told what happens, from several threads. This one shows nothing.

    None of them raises where nothing can be shown: the work goes on.
    """

    def begin(self, label: str, size: int, done: int) -> None:
        """``label`` has ``done`` of ``size`` bytes; called again when it starts over."""

    def advance(self, label: str, count: int) -> None:
        """``count`` more bytes of ``label`` are done."""

    def end(self, label: str, outcome: str) -> None:
        """``label`` ended: ``verified``, or why not."""

    def note(self, line: str) -> None:
        """Something that an operator should see."""


@dataclass
class _Shown:
    """What the plain reporter knows of one file; bytes and monotonic seconds."""

    size: int
    done: int
    begun: float
    begun_done: int
    last: float
    last_done: int


class PlainReporter(Reporter):
    """One line a running file every ``interval_s`` seconds and at each end, flushed at once.

    For pipes and SSH, where a progress bar would be noise and silence a defect. When the reader
    leaves, as a killed run does, the process is interrupted: nobody is told of the work any more,
    and the next run resumes it instead of waiting for its end.
    """

    def __init__(self, stream: TextIO, interval_s: float = 10.0) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._files: dict[str, _Shown] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> PlainReporter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, label: str, size: int, done: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._files[label] = _Shown(size, done, now, done, now, done)

    def advance(self, label: str, count: int) -> None:
        with self._lock:
            self._files[label].done += count

    def end(self, label: str, outcome: str) -> None:
        with self._lock:
            shown = self._files.pop(label)
            rate = _rate(shown.done - shown.begun_done, time.monotonic() - shown.begun)
            self._print(_progress_line(label, shown, rate) + f", {outcome}")

    def note(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def _tick(self) -> None:
        shown_at = time.monotonic()
        while not self._stop.wait(min(self._interval_s, _READER_CHECK_S)):
            if _reader_left(self._stream):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return
            now = time.monotonic()
            if now - shown_at >= self._interval_s:
                shown_at = now
                self._show(now)

    def _show(self, now: float) -> None:
        with self._lock:
            for label, shown in self._files.items():
                rate = _rate(shown.done - shown.last_done, now - shown.last)
                self._print(_progress_line(label, shown, rate))
                shown.last, shown.last_done = now, shown.done

    def _print(self, line: str) -> None:
        with suppress(OSError):
            print(plain(line), file=self._stream, flush=True)


def _reader_left(stream: TextIO) -> bool:
    """Whether the other end of a pipe or socket was closed; never of a file or a terminal."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        # No descriptor, or one that was closed.
        return False


def _rate(count: int, seconds: float) -> str:
    return f"{human_bytes(count / max(seconds, 1e-3))}/s"


def _progress_line(label: str, shown: _Shown, rate: str) -> str:
    return f"{label} {human_bytes(shown.done)} of {human_bytes(shown.size)} ({rate})"


class RichReporter(Reporter):
    """A progress bar a file, for terminals."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._progress.stop()

    def begin(self, label: str, size: int, done: int) -> None:
        if label in self._tasks:
            self._progress.remove_task(self._tasks[label])
        self._tasks[label] = self._progress.add_task(label, total=size, completed=done)

    def advance(self, label: str, count: int) -> None:
        self._progress.advance(self._tasks[label], count)

    def end(self, label: str, outcome: str) -> None:
        self._progress.remove_task(self._tasks.pop(label))
        self.note(f"{label} {outcome}")

    def note(self, line: str) -> None:
        with suppress(OSError):
            self._progress.console.print(plain(line), markup=False, highlight=False)


@contextmanager
def standard_reporter() -> Iterator[Reporter]:
    """Progress bars when stdout is a terminal, else plain lines."""
    with RichReporter() if sys.stdout.isatty() else PlainReporter(sys.stdout) as reporter:
        yield reporter

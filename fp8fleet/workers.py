"""Threads that do one thing to several files at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that starts nothing new after a failure, and is then waited for.

    Not after an interrupt: a thread may wait long for a silent server, and the process ends anyway
    (`fp8fleet.output.leave`).
    """
    pool, wait = ThreadPoolExecutor(threads), True
    try:
        yield pool
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)

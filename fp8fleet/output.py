"""Runs commands whose output may fail: a reader that left, a full disk, odd characters, none."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from fp8fleet.errors import OperatorError
from fp8fleet.outside import plain

INTERRUPTED = 130


def run(command: Callable[[], int]) -> int:
    """Run a command; every command line of this package goes through here.

    Returns:
        Its exit code: 0 fine, 1 a failed check or an output that cannot be written, 2 a wrong
        input, 130 interrupted.
    """
    _prepare()
    try:
        try:
            return command()
        except OperatorError as error:
            _complain(f"error: {error}")
            return error.exit_code
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted: run the same command again to go on")
        return INTERRUPTED
    except OSError as error:
        return _failed(error)


def leave(code: int) -> NoReturn:
    """End the process. An interrupt waits for no thread: what has arrived is on the disk."""
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def say(line: str) -> None:
    """Print a line at once; what is not printable in it comes as its escape."""
    print(plain(line), flush=True)


def _prepare() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Closed by who started us (`>&-`): else the next file opened would get its number.
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper):
            # File names need not be text, and terminals need not have every letter.
            stream.reconfigure(errors="backslashreplace")


def _complain(line: str) -> None:
    try:
        print(plain(line), file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _failed(error: OSError) -> int:
    if error.filename is not None:
        _complain(f"error: {error.filename}: {error.strerror}")
        return 1
    # A command checks its files where it reads and writes them: this is its output.
    if not isinstance(error, BrokenPipeError):
        _complain(f"error: the output cannot be written: {error.strerror or error}")
    _silence(sys.stdout)
    return 1


def _silence(stream: TextIO) -> None:
    """What is left in the buffer of a stream that failed would fail once more at the exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Brings a manifest's files into a directory, each checked before it gets its name."""

from fp8fleet.fetch.check import Finding, Stamp, Verified, check_directory, verify
from fp8fleet.fetch.engine import FetchResult, directory_lock, fetch
from fp8fleet.fetch.options import FanOut, FetchOptions
from fp8fleet.fetch.progress import (
    PlainReporter,
    Reporter,
    RichReporter,
    human_bytes,
    standard_reporter,
)

__all__ = [
    "FanOut",
    "FetchOptions",
    "FetchResult",
    "Finding",
    "PlainReporter",
    "Reporter",
    "RichReporter",
    "Stamp",
    "Verified",
    "check_directory",
    "directory_lock",
    "fetch",
    "human_bytes",
    "standard_reporter",
    "verify",
]

"""How to fetch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fp8fleet.fetch.progress import Reporter
from fp8fleet.secrets import SecretRef


@dataclass(frozen=True)
class FanOut:
    """Other hosts that want the same files or have them."""

    torrent: Path
    """Made by `fp8fleet manifest torrent`."""
    listen: str
    """``ADDRESS:PORT`` of this host; nothing else is bound."""
    peers: tuple[str, ...]
    """``ADDRESS:PORT`` of the others; this host may be among them."""


@dataclass(frozen=True)
class FetchOptions:
    """How to fetch."""

    ca_bundle: Path | None = None
    """PEM file of the authorities to trust; None: the machine's own."""
    proxy: str | None = None
    """URL of the proxy; None: what the environment says."""
    token: SecretRef | None = None
    """Where the bearer token is, sent to one host and not to where it redirects."""
    token_for: str | None = None
    """URL on the host that gets the token; None: that of the sources, if it is one, by https."""
    threads: int = 4
    retries: int = 5
    """Failures of one source in a row that are tried again."""
    backoff_s: float = 1.0
    """Pause after the first failure; doubles with each, up to ``longest_backoff_s``."""
    longest_backoff_s: float = 60.0
    connect_timeout_s: float = 10.0
    stall_s: float = 30.0
    """Silence, or a rate below ``least_bytes_per_s``, that counts as a broken connection."""
    least_bytes_per_s: float = 1024.0
    rate_limit: float | None = None
    """Bytes a second of all threads together, and of what peers send; None: no limit."""
    margin_bytes: int = 1 << 30
    """Bytes that must stay free on the disk."""
    sleep: Callable[[float], object] | None = None
    """Pauses between tries; None: a wait that the end of the run interrupts."""
    reporter: Reporter = field(default_factory=Reporter)
    fan_out: FanOut | None = None
    """Which hosts to share the download with; None: every byte comes from the sources."""

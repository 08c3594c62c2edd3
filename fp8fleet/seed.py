"""Makes a model's torrent, and gives a verified model directory to the other hosts of a site."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fp8fleet.errors import CheckFailed
from fp8fleet.fetch import FanOut, Reporter, human_bytes, verify
from fp8fleet.fetch.disk import write_beside
from fp8fleet.manifest import Manifest
from fp8fleet.peers import Exchange, Site, load_torrent, make_torrent

_TOLD_EVERY_S = 60.0


def write_torrent(manifest: Manifest, directory: Path, path: Path, reporter: Reporter) -> None:
    """Write the torrent of a directory to ``path``, after the directory is verified.

    Raises:
        CheckFailed: the directory is not what the manifest says.
    """
    _require_whole(manifest, directory, reporter)
    label, shown = f"hashing pieces of {manifest.name}", 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        reporter.advance(label, done - shown)
        shown = done

    reporter.begin(label, manifest.total_bytes, 0)
    try:
        write_beside(path, make_torrent(manifest, directory, progress))
    finally:
        reporter.end(label, "done")


def seed(
    manifest: Manifest,
    directory: Path,
    fan_out: FanOut,
    rate_limit: float | None,
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Give ``directory`` to the peers until ``stop`` is set; nothing is written into it.

    Args:
        rate_limit: bytes a second; None: no limit.

    Raises:
        CheckFailed: the directory is not what the manifest says, or the address is not free.
        OperatorError: the torrent is not of this manifest, or an address is none.
    """
    torrent = load_torrent(fan_out.torrent, manifest)
    site = Site.parse(fan_out.listen, fan_out.peers)
    _require_whole(manifest, directory, Reporter())
    places = {path: path for path in torrent.files}
    with Exchange(torrent, directory, site, places, set(places), rate_limit) as exchange:
        say(
            f"gives {directory} ({human_bytes(manifest.total_bytes)}) to"
            f" {len(site.peers)} peers on {site.listen}"
        )
        told, seconds = 0, 0.0
        while not stop.wait(1.0):
            error = exchange.look(0).error
            exchange.count()
            if exchange.cannot_listen:
                raise CheckFailed(f"{site.listen}: cannot be listened on: {exchange.cannot_listen}")
            if error is not None:
                raise CheckFailed(f"{directory}: {error.strerror}: fetch it again")
            seconds += 1.0
            if exchange.sent > told and seconds >= _TOLD_EVERY_S:
                say(
                    f"{human_bytes(exchange.sent)} given, {len(exchange.connected)} peers connected"
                )
                told, seconds = exchange.sent, 0.0


def _require_whole(manifest: Manifest, directory: Path, reporter: Reporter) -> None:
    for finding in verify(manifest, directory, reporter=reporter):
        if finding.severity == "error":
            raise CheckFailed(f"{directory / finding.file}: {finding.message}: {finding.remedy}")

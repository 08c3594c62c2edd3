"""Fetches with other hosts: a share of the pieces from the sources, the others from the peers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Literal

from fp8fleet.fetch.check import hash_file
from fp8fleet.fetch.disk import fsync_directory
from fp8fleet.fetch.origin import Interrupted, Origin, Refused
from fp8fleet.fetch.pace import Retries
from fp8fleet.fetch.progress import human_bytes
from fp8fleet.fetch.run import Run, Stopped
from fp8fleet.fetch.shares import GRACE_S, PATIENCE_S, Shares
from fp8fleet.manifest import PARTIAL, PARTIAL_ORIGIN, QUARANTINE, ManifestFile
from fp8fleet.peers import Exchange, Piece, Site, load_torrent
from fp8fleet.workers import workers

_TICK_S = 0.2
_RECONNECT_S = 2.0
_TELL_S = 10.0
_SETTLE_S = 1.0
"""At most so long the peers' answers are awaited before the first question to a source."""
_LINGER_S = 3.0
"""A host that is done stays as long as somebody takes pieces from it, and so much longer."""


def fetch_with_peers(
    run: Run, missing: list[ManifestFile], origins: list[Origin]
) -> list[ManifestFile]:
    """Bring ``missing`` into the run's directory together with the hosts of its `FanOut`.

    Every file is compared with the manifest's SHA256 before it gets its name, as without peers.

    Returns:
        The files that are still missing, for the sources alone: empty ones, and those that came
        wrong or not at all.

    Raises:
        OperatorError: the torrent is not of this manifest, or an address is none.
        OSError: the disk failed.
    """
    swarm = _Swarm(run, missing, origins)
    return swarm.run()


State = Literal["coming", "flushing", "hashing", "renaming", "here", "wrong"]


class _Swarm:
    """One run with peers."""

    def __init__(self, run: Run, missing: list[ManifestFile], origins: list[Origin]) -> None:
        fan_out = run.options.fan_out
        assert fan_out is not None
        self._run = run
        self._reporter = run.reporter
        self._missing = missing
        self._torrent = load_torrent(fan_out.torrent, run.manifest)
        self._site = Site.parse(fan_out.listen, fan_out.peers)
        self._files = {file.path: file for file in missing if file.path in self._torrent.files}
        self._state: dict[str, State] = dict.fromkeys(self._files, "coming")
        self._hashing: dict[str, Future[str]] = {}
        self._doubted: set[str] = set()
        self._shown = dict.fromkeys(self._files, 0)
        self._began = time.monotonic()
        # shared with the threads that ask the sources
        self._lock = threading.Condition()
        self._shares = Shares(
            len(self._torrent.pieces),
            self._site.listen.ip,
            [peer.ip for peer in self._site.peers],
            self._began,
        )
        self._sources = _Sources(run, origins)
        self._asked: set[int] = set()
        """Pieces that a source is asked for now."""
        self._given: dict[int, str] = {}
        """Pieces given to the session and not yet written, with their source's name."""
        self._from_sources = 0
        self._lost: list[BaseException] = []
        """What ended a thread."""
        self._settled = self._over = False

    def run(self) -> list[ManifestFile]:
        if not self._files:
            return self._missing
        with self._exchange() as exchange:
            self._wait_for_check(exchange)
            for file in self._files.values():
                self._reporter.begin(file.path, file.size, 0)
            try:
                self._with_sources(exchange)
            finally:
                exchange.count()
                self._run.from_peers = exchange.received
                self._end_files()
            self._linger(exchange)
        return [file for file in self._missing if self._state.get(file.path) != "here"]

    def _with_sources(self, exchange: Exchange) -> None:
        threads = self._run.options.threads
        with workers(threads) as asking, workers(len(os.sched_getaffinity(0))) as pool:
            for _ in range(threads):
                asking.submit(self._ask_sources, exchange)
            try:
                self._until_here(exchange, pool)
            except BaseException:
                self._run.stop.set()
                raise
            finally:
                with self._lock:
                    self._over = True
                    self._lock.notify_all()

    def _exchange(self) -> Exchange:
        directory = self._run.directory
        places = {
            path: f"{PARTIAL}/{path}" if path in self._files else path
            for path in self._torrent.files
        }
        # These say how many bytes of a partial file follow each other: not so any more.
        shutil.rmtree(directory / PARTIAL_ORIGIN, ignore_errors=True)
        left = any((directory / places[path]).exists() for path in self._files)
        whole = set() if left else set(self._torrent.files) - set(self._files)
        return Exchange(
            self._torrent, directory, self._site, places, whole, self._run.options.rate_limit
        )

    def _wait_for_check(self, exchange: Exchange) -> None:
        """What a killed run left is hashed piece by piece before it counts."""
        if exchange.checking:
            self._reporter.note("hashing what an earlier run left")
        while exchange.checking:
            exchange.look(_TICK_S)

    # --- the main thread --------------------------------------------------------------------

    def _until_here(self, exchange: Exchange, pool: ThreadPoolExecutor) -> None:
        now = time.monotonic()
        reconnect_at, tell_at = now + _RECONNECT_S, now + _TELL_S
        tick_at = progress_at = now
        here = 0
        while any(state not in ("here", "wrong") for state in self._state.values()):
            if self._lost:
                raise self._lost[0]
            events = exchange.look(_TICK_S)
            if events.error is not None:
                raise events.error
            self._note_pieces(exchange, events.failed_pieces)
            self._finish_files(exchange, pool, events.flushed, events.renamed)
            now = time.monotonic()
            if now < tick_at:
                continue
            tick_at = now + _TICK_S
            self._count(exchange)
            self._share(exchange, now)
            if sum(exchange.have) > here or self._asked:
                here, progress_at = sum(exchange.have), now
            if now > reconnect_at:
                exchange.reconnect()
                reconnect_at = now + _RECONNECT_S
            if now > tell_at:
                self._tell(exchange)
                tell_at = now + _TELL_S
            longest = 2 * (PATIENCE_S if exchange.connected else GRACE_S)
            if now - progress_at > longest and self._only_waits():
                self._reporter.note("neither peers nor sources give more pieces: sources alone")
                return

    def _only_waits(self) -> bool:
        """Whether no file is being written, hashed or renamed."""
        return all(state in ("coming", "here", "wrong") for state in self._state.values())

    def _note_pieces(self, exchange: Exchange, failed: list[int]) -> None:
        with self._lock:
            for piece in failed:
                # Wrong pieces of peers are the session's business.
                if name := self._given.pop(piece, None):
                    path = self._torrent.pieces[piece].path
                    self._sources.refuse(path, name, "sends other bytes than the torrent's")
            done = [piece for piece in self._given if exchange.have[piece]]
            for piece in done:
                del self._given[piece]
            self._from_sources += len(done)
            if done or failed:
                self._lock.notify_all()

    def _count(self, exchange: Exchange) -> None:
        taken = exchange.received
        exchange.count()
        self._run.limit.charge(exchange.received - taken)
        for path, done in exchange.progress().items():
            if path in self._files and done > self._shown[path]:
                self._reporter.advance(path, done - self._shown[path])
                self._shown[path] = done

    def _share(self, exchange: Exchange, now: float) -> None:
        """Let the threads know what is left to ask for."""
        all_connected = len(exchange.connected) == len(self._site.peers)
        with self._lock:
            self._settled |= all_connected or now - self._began > _SETTLE_S
            self._shares.observe(
                exchange.have,
                exchange.available,
                exchange.connected,
                len(self._asked),
                self._from_sources,
                now,
            )
            self._lock.notify_all()

    def _finish_files(
        self, exchange: Exchange, pool: ThreadPoolExecutor, flushed: bool, renamed: list[str]
    ) -> None:
        """Move every whole file on: written, hashed, renamed."""
        for path, state in self._state.items():
            file = self._files[path]
            if state == "coming" and self._is_whole(exchange, path):
                self._state[path] = "flushing"
                exchange.flush()
            elif state == "flushing" and flushed:
                self._state[path] = "hashing"
                self._hashing[path] = pool.submit(self._hash, file)
            elif state == "hashing" and self._hashing[path].done():
                self._judge(exchange, file, self._hashing[path].result())
            elif state == "renaming" and path in renamed:
                self._renamed(file, self._hashing[path].result())

    def _is_whole(self, exchange: Exchange, path: str) -> bool:
        return all(exchange.have[piece] for piece in self._torrent.pieces_of[path])

    def _hash(self, file: ManifestFile) -> str:
        path = self._run.directory / PARTIAL / file.path
        digest = hash_file(path, file, self._reporter)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return digest

    def _judge(self, exchange: Exchange, file: ManifestFile, digest: str) -> None:
        place = file.path
        if digest != file.sha256:
            if file.path not in self._doubted:
                # The session tells that something was flushed, not what: hash once more.
                self._doubted.add(file.path)
                self._state[file.path] = "flushing"
                exchange.flush()
                return
            kept = self._run.quarantine.path(file)
            place = kept.relative_to(self._run.directory).as_posix()
        self._state[file.path] = "renaming"
        exchange.rename(file.path, place)

    def _renamed(self, file: ManifestFile, digest: str) -> None:
        if digest == file.sha256:
            final = self._run.directory / file.path
            fsync_directory(final.parent)
            self._run.stamp.record(file, final.stat())
            self._run.stamp.save(self._run.manifest)
            self._state[file.path] = "here"
            return
        message = f"has sha256 {digest}, expected {file.sha256}"
        self._run.quarantine.note(file, message, digest, "the torrent's pieces")
        self._reporter.note(
            f"{file.path}: came as the torrent says, but {message}, kept in {QUARANTINE}/:"
            " make the torrent again; from the sources alone"
        )
        self._state[file.path] = "wrong"

    def _end_files(self) -> None:
        for path, state in self._state.items():
            self._reporter.end(path, "verified" if state == "here" else "not fetched")

    def _tell(self, exchange: Exchange) -> None:
        self._reporter.note(
            f"{len(exchange.connected)} of {len(self._site.peers)} peers connected,"
            f" {human_bytes(exchange.received)} from them,"
            f" {human_bytes(self._run.received)} from sources,"
            f" {human_bytes(exchange.sent)} given"
        )
        if exchange.cannot_listen:
            self._reporter.note(
                f"cannot listen on {self._site.listen}: {exchange.cannot_listen}:"
                " only peers that this host reaches exchange with it"
            )

    def _linger(self, exchange: Exchange) -> None:
        """Give what others still want; what only this host has would be lost to them."""
        sent, sent_at = exchange.sent, time.monotonic()
        while exchange.starving and time.monotonic() - sent_at < _LINGER_S:
            self._run.raise_if_stopped()
            exchange.look(_TICK_S)
            exchange.count()
            if exchange.sent > sent:
                sent, sent_at = exchange.sent, time.monotonic()

    # --- the threads that ask the sources ---------------------------------------------------

    def _ask_sources(self, exchange: Exchange) -> None:
        while (number := self._next_piece()) is not None:
            piece = self._torrent.pieces[number]
            try:
                content, name = self._sources.ask(piece)
                with self._lock:
                    self._given[number] = name
                exchange.add(number, content)
            except (Refused, Stopped):
                pass
            except BaseException as error:
                self._lost.append(error)
                return
            finally:
                with self._lock:
                    self._asked.discard(number)

    def _next_piece(self) -> int | None:
        """The next piece of this host's share, when there is one; None: the run is over."""
        most = 4 * self._run.options.threads
        with self._lock:
            while not self._over:
                piece = None
                # More would pile up in memory where the disk is slower than the network.
                if self._settled and len(self._asked) + len(self._given) < most:
                    piece = self._shares.next(self._may_ask)
                if piece is not None:
                    self._asked.add(piece)
                    return piece
                self._lock.wait(1)
        return None

    def _may_ask(self, piece: int) -> bool:
        path = self._torrent.pieces[piece].path
        return (
            piece not in self._asked
            and piece not in self._given
            and path in self._files
            and self._sources.has(path)
        )


class _Sources:
    """Pieces from the first source that has the file; a source that fails for good is left out."""

    def __init__(self, run: Run, origins: list[Origin]) -> None:
        self._run = run
        self._origins = origins
        self._refused: set[tuple[str, str]] = set()
        """Paths, and the names of the sources that do not have them."""

    def has(self, path: str) -> bool:
        """Whether a source may have the file."""
        return any((path, origin.name) not in self._refused for origin in self._origins)

    def refuse(self, path: str, name: str, why: str) -> None:
        """Do not ask the source ``name`` for ``path`` again."""
        if (path, name) not in self._refused:
            self._refused.add((path, name))
            self._run.reporter.note(f"{path}: {name}: {why}")

    def ask(self, piece: Piece) -> tuple[bytes, str]:
        """The bytes of ``piece``, and the source's name.

        Raises:
            Refused: no source has them.
        """
        for origin in self._origins:
            if (piece.path, origin.name) in self._refused:
                continue
            try:
                return self._ask_one(origin, piece), origin.name
            except Refused as refusal:
                self.refuse(piece.path, origin.name, str(refusal))
        raise Refused("no source has it")

    def _ask_one(self, origin: Origin, piece: Piece) -> bytes:
        retries = Retries(
            self._run.options,
            self._run.sleep,
            lambda line: self._run.reporter.note(f"{piece.path}: {origin.name}: {line}"),
        )
        while True:
            try:
                return self._read(origin, piece)
            except Interrupted as error:
                retries.failed(error)

    def _read(self, origin: Origin, piece: Piece) -> bytes:
        content = bytearray()
        with closing(origin.open(piece.path, piece.offset, None, piece.size)) as body:
            if body.start != piece.offset:
                raise Refused("does not answer ranges: no pieces from it")
            for chunk in body.chunks:
                self._run.raise_if_stopped()
                content += chunk
                self._run.count(len(chunk))
                if len(content) >= piece.size:
                    break
        if len(content) < piece.size:
            raise Interrupted(f"truncated: {len(content)} of {piece.size} bytes of a piece")
        return bytes(content[: piece.size])

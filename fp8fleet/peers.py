"""Files between the hosts of a site: a model's torrent, and the session that exchanges pieces."""

from __future__ import annotations

import errno
import ipaddress
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import libtorrent as lt

from fp8fleet.errors import OperatorError
from fp8fleet.manifest import Manifest

_ROOT = "model"
"""The directory's name inside the torrent; on hosts it is stripped, so that any name does."""
_SMALLEST_PIECE, _LARGEST_PIECE = 256 << 10, 4 << 20
_PIECES = 4096
"""About how many pieces a model shall have: enough to spread, few enough to keep in git."""


@dataclass(frozen=True, order=True)
class Address:
    """Where a host exchanges pieces."""

    ip: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``198.18.0.11:6881`` or ``[fd00::11]:6881``.

        Raises:
            ValueError: another form; names are refused, because the filter is of addresses.
        """
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r}: expected ADDRESS:PORT with a port from 1 to 65535")
        try:
            ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ValueError(f"{text!r}: expected ADDRESS:PORT with an IP address") from None
        return cls(str(ip), int(port))

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True)
class Piece:
    """A part of one file."""

    path: str
    offset: int
    size: int


class Torrent:
    """The pieces of a manifest's files and what they hash to."""

    def __init__(self, content: bytes, manifest: Manifest, where: str) -> None:
        """``content``: the torrent file's bytes; ``where`` names it in messages.

        Raises:
            OperatorError: no torrent, or not of this manifest.
        """
        self.content = content
        try:
            parsed = self.parameters()
        except RuntimeError as error:
            raise OperatorError(f"{where}: no torrent: {error}") from None
        # Always there in a torrent file; None only for magnet links.
        info: Any = parsed.ti
        layout = info.layout()
        self.files: dict[str, int] = {}
        """Path relative to the model directory -> its number in the torrent."""
        self.pieces: list[Piece] = []
        self.pieces_of: dict[str, range] = {}
        for number in range(layout.num_files()):
            if not layout.file_flags(number) & lt.file_storage.flag_pad_file:
                path = layout.file_path(number).removeprefix(f"{_ROOT}/")
                self.files[path] = number
                self._add_pieces(path, layout.file_size(number), info.piece_length())
        sizes = {path: layout.file_size(number) for path, number in self.files.items()}
        wanted = {file.path: file.size for file in manifest.files if file.size}
        if parsed.comment != _comment(manifest) or sizes != wanted:
            raise OperatorError(
                f"{where}: is not of this manifest ({manifest.name} {manifest.revision}):"
                " make it again with `fp8fleet manifest torrent`"
            )

    def _add_pieces(self, path: str, size: int, length: int) -> None:
        first = len(self.pieces)
        self.pieces += [
            Piece(path, offset, min(length, size - offset)) for offset in range(0, size, length)
        ]
        self.pieces_of[path] = range(first, len(self.pieces))

    def parameters(self) -> lt.add_torrent_params:
        """What a session needs to add it; a new object each time."""
        return lt.load_torrent_buffer(self.content)


def load_torrent(path: Path, manifest: Manifest) -> Torrent:
    """Read a torrent that `make_torrent` made.

    Raises:
        OperatorError: unreadable, no torrent, or of another manifest.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error.strerror}") from None
    return Torrent(content, manifest, str(path))


def make_torrent(
    manifest: Manifest, directory: Path, progress: Callable[[int, int], None]
) -> bytes:
    """Hash the pieces of a directory that was verified against ``manifest``.

    A torrent of version 2 (BEP 52): pieces are SHA256 trees and never cross files. Empty files
    are left out. The same files make the same bytes.

    Args:
        progress: is told the bytes done and the bytes in all.
    """
    files = sorted((file for file in manifest.files if file.size), key=lambda file: file.path)
    if not files:
        raise OperatorError(f"{manifest.name}: every file is empty: a torrent has nothing to hold")
    total = sum(file.size for file in files)
    length = _SMALLEST_PIECE
    while length < _LARGEST_PIECE and length * _PIECES < total:
        length *= 2
    entries = [lt.create_file_entry(f"{_ROOT}/{file.path}", file.size) for file in files]
    torrent = lt.create_torrent(entries, length, lt.create_torrent_flags_t.v2_only)
    torrent.set_comment(_comment(manifest))
    torrent.set_creation_date(0)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / _ROOT).symlink_to(directory.absolute())
        lt.set_piece_hashes(
            torrent, scratch, lambda piece: progress(min(total, (piece + 1) * length), total)
        )
    return lt.bencode(torrent.generate())


def _comment(manifest: Manifest) -> str:
    return f"fp8fleet manifest {manifest.digest}"


@dataclass(frozen=True)
class Site:
    """Who exchanges pieces with whom. Nothing else is connected to or let in."""

    listen: Address
    """The only address that is bound, for incoming and outgoing connections."""
    peers: tuple[Address, ...]
    """The other hosts, this one left out."""

    @classmethod
    def parse(cls, listen: str, peers: Iterable[str]) -> Site:
        """Read addresses; ``peers`` may name this host too, so that all can be given one list.

        Raises:
            OperatorError: an address that is none, or two peers on one that can't be told apart.
        """
        try:
            here = Address.parse(listen)
            others = sorted({Address.parse(peer) for peer in peers})
        except ValueError as error:
            raise OperatorError(f"--listen, --peer: {error}") from None
        others = [peer for peer in others if peer.ip != here.ip]
        for one, next_one in pairwise(others):
            if one.ip == next_one.ip:
                raise OperatorError(f"--peer {one.ip}: is given with two ports, expected one")
        return cls(here, tuple(others))


@dataclass
class Events:
    """What happened since the last look."""

    failed_pieces: list[int] = field(default_factory=list)
    """Their bytes were wrong and are thrown away."""
    flushed: bool = False
    renamed: list[str] = field(default_factory=list)
    """Paths relative to the model directory."""
    error: OSError | None = None
    """The disk, or a file, failed: nothing more will come."""


class Exchange:
    """A session with one torrent: gets pieces from the peers and gives them what is here.

    Speaks TCP with the listed peers only, in clear text. No DHT, local discovery, port mapping,
    tracker or peer exchange.
    """

    def __init__(
        self,
        torrent: Torrent,
        directory: Path,
        site: Site,
        places: Mapping[str, str],
        whole: Collection[str],
        rate_limit: float | None = None,
    ) -> None:
        """Start.

        Args:
            places: where each file of the torrent lies, relative to ``directory``.
            whole: paths of files that were verified: not hashed again, only given.
            rate_limit: bytes a second, for each direction; None: no limit.
        """
        self._torrent = torrent
        self._site = site
        self.have = [False] * len(torrent.pieces)
        self.available: Sequence[int] = [0] * len(torrent.pieces)
        """How many connected peers have each piece."""
        self.connected: set[str] = set()
        """Addresses of the peers that are connected now."""
        self.starving = 0
        """Connected peers that do not have everything yet."""
        self.received = self.sent = 0
        """Bytes of files, from and to peers."""
        self.cannot_listen: str | None = None
        self._paths = {number: path for path, number in torrent.files.items()}
        self._session = lt.session(_settings(site.listen, rate_limit))
        self._session.set_ip_filter(_only(site.peers))
        self._handle = self._session.add_torrent(self._parameters(directory, places, whole))
        for peer in site.peers:
            self._handle.connect_peer((peer.ip, peer.port))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.remove_torrent(self._handle)
        # The destructor waits for the disk's threads.
        del self._handle, self._session

    def _parameters(
        self, directory: Path, places: Mapping[str, str], whole: Collection[str]
    ) -> lt.add_torrent_params:
        parameters = self._torrent.parameters()
        parameters.save_path = str(directory)
        parameters.renamed_files = {
            number: places[path] for path, number in self._torrent.files.items()
        }
        flags = lt.torrent_flags
        parameters.flags = (
            flags.disable_dht | flags.disable_lsd | flags.disable_pex | flags.apply_ip_filter
        )
        if len(whole) == len(self._torrent.files):
            # Upload mode: bytes that rot on the disk must not be replaced behind the stamp.
            parameters.flags |= flags.seed_mode | flags.upload_mode
        elif whole:
            have = [piece.path in whole for piece in self._torrent.pieces]
            parameters.have_pieces = have
        return parameters

    @property
    def checking(self) -> bool:
        """Whether what is on the disk is still being hashed."""
        states = lt.torrent_status.states
        return self._handle.status().state in (
            states.checking_files,
            states.checking_resume_data,
            states.queued_for_checking,
        )

    def look(self, wait_s: float) -> Events:
        """Wait up to ``wait_s`` seconds for something to happen, a piece that is here among it."""
        self._session.wait_for_alert(int(wait_s * 1000))
        events = Events()
        for alert in self._session.pop_alerts():
            self._note(alert, events)
        return events

    def count(self) -> None:
        """Bring all counters up to date; what costs too much to do for every piece."""
        status = self._handle.status(lt.torrent_handle.query_pieces)
        # Both lists are empty where the session has nothing to pick: everything is here.
        self.have = status.pieces or [status.is_seeding] * len(self._torrent.pieces)
        self.available = self._handle.piece_availability() or [0] * len(self._torrent.pieces)
        self.received, self.sent = status.total_payload_download, status.total_payload_upload
        peers = [peer for peer in self._handle.get_peer_info() if not _opening(peer)]
        self.connected = {peer.ip[0] for peer in peers}
        self.starving = sum(not peer.flags & lt.peer_info.seed for peer in peers)

    def _note(self, alert: lt.alert, events: Events) -> None:
        if isinstance(alert, lt.piece_finished_alert):
            self.have[alert.piece_index] = True
        elif isinstance(alert, lt.hash_failed_alert):
            events.failed_pieces.append(alert.piece_index)
        elif isinstance(alert, lt.cache_flushed_alert):
            events.flushed = True
        elif isinstance(alert, lt.file_renamed_alert):
            events.renamed.append(self._paths[alert.index])
        elif isinstance(alert, lt.listen_failed_alert):
            self.cannot_listen = alert.error.message()
        elif isinstance(alert, lt.file_error_alert):
            events.error = OSError(_errno(alert.error), alert.error.message(), alert.filename())
        elif isinstance(alert, lt.torrent_error_alert | lt.file_rename_failed_alert):
            events.error = OSError(_errno(alert.error), alert.error.message())

    def reconnect(self) -> None:
        """Try the peers that are not connected once more."""
        for peer in self._site.peers:
            if peer.ip not in self.connected:
                self._handle.connect_peer((peer.ip, peer.port))

    def add(self, piece: int, content: bytes) -> None:
        """Give a piece that came from elsewhere; it is hashed like any other."""
        self._handle.add_piece(piece, content, 0)

    def progress(self) -> dict[str, int]:
        """Bytes of each file that are here, by path."""
        done = self._handle.file_progress()
        return {path: done[number] for path, number in self._torrent.files.items()}

    def flush(self) -> None:
        """Have everything written; `Events.flushed` tells when it is."""
        self._handle.flush_cache()

    def rename(self, path: str, place: str) -> None:
        """Move a file to ``place``, relative to the directory; `Events.renamed` tells when."""
        self._handle.rename_file(self._torrent.files[path], place)


def _settings(listen: Address, rate_limit: float | None) -> lt.settings_pack:
    limit = 0 if rate_limit is None else max(1, int(rate_limit))
    alerts = lt.alert_category
    cores = min(4, len(os.sched_getaffinity(0)))
    return {
        "listen_interfaces": str(listen),
        "outgoing_interfaces": listen.ip,
        "listen_system_port_fallback": False,
        "max_retry_port_bind": 0,
        # only the peers that are given, only TCP, in clear text
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        "in_enc_policy": lt.enc_policy.pe_disabled,
        "out_enc_policy": lt.enc_policy.pe_disabled,
        # a peer may start later, or go and come again
        "min_reconnect_time": 1,
        "max_failcount": 1000,
        "peer_connect_timeout": 5,
        "connections_limit": 1000,
        # every peer is served at once: all want the same, and the network is the site's
        "unchoke_slots_limit": -1,
        "download_rate_limit": limit,
        "upload_rate_limit": limit,
        "local_download_rate_limit": limit,
        "local_upload_rate_limit": limit,
        # memory: mapped files would count as ours
        "mmap_file_size_cutoff": 1 << 30,
        "max_queued_disk_bytes": 16 << 20,
        "aio_threads": cores,
        "hashing_threads": cores,
        # fewer and larger writes to the sockets
        "send_not_sent_low_watermark": 256 << 10,
        "alert_mask": alerts.error | alerts.status | alerts.storage | alerts.piece_progress,
        "alert_queue_size": 100_000,
    }


def _only(peers: Iterable[Address]) -> lt.ip_filter:
    """A filter that lets nobody else in."""
    allowed = lt.ip_filter()
    allowed.add_rule("0.0.0.0", "255.255.255.255", 1)
    allowed.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1)
    for peer in peers:
        allowed.add_rule(peer.ip, peer.ip, 0)
    return allowed


def _opening(peer: lt.peer_info) -> bool:
    return bool(peer.flags & (lt.peer_info.connecting | lt.peer_info.handshake))


def _errno(error: Any) -> int:
    """libtorrent's own errors have numbers of their own."""
    return int(error.value()) if error.category() != lt.libtorrent_category() else errno.EIO

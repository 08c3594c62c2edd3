"""Hosts that share one download: real sessions on addresses of 127.0.0.0/8, a process a host."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpd
import pytest

from fp8fleet import hostcli
from fp8fleet.errors import OperatorError
from fp8fleet.manifest import Manifest, load_manifest
from fp8fleet.peers import Address, Exchange, Site, Torrent, load_torrent, make_torrent

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {
    "a.safetensors": os.urandom(3_000_001),
    "sub/b.safetensors": os.urandom(1_500_000),
    "config.json": b"{}",
    "empty.txt": b"",
}
TOTAL = sum(map(len, FILES.values()))
NOWHERE = "http://127.0.0.1:1"


class Fleet:
    """Hosts of one site: each an address, a directory and, while it fetches, a process."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.origin = folder / "origin"
        write(self.origin, FILES)
        self.manifest = write_manifest(folder, FILES)
        self.port = free_port()
        self.addresses = [f"127.0.0.{2 + host}" for host in range(hosts)]
        self.started = ExitStack()

    @property
    def loaded(self) -> Manifest:
        return load_manifest(self.manifest)

    def make_torrent(self) -> None:
        assert hostcli.main(["manifest", "torrent", str(self.manifest), str(self.origin)]) == 0

    def directory(self, host: int) -> Path:
        return self.folder / f"host-{host}"

    def site(self, host: int) -> list[str]:
        arguments = ["--torrent", str(self.folder / "model.torrent")]
        arguments += ["--listen", f"{self.addresses[host]}:{self.port}"]
        for address in self.addresses:
            arguments += ["--peer", f"{address}:{self.port}"]
        return arguments

    def start(self, command: str, host: int, *arguments: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "fp8fleet.hostcli", command, str(self.manifest)]
        line += [str(self.directory(host)), *self.site(host), *arguments]
        proxies = ("http_proxy", "https_proxy", "all_proxy")
        environment = {k: v for k, v in os.environ.items() if k.lower() not in proxies}
        process = subprocess.Popen(
            line,
            env={**environment, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.callback(end, process)
        return process

    def fetch(self, host: int, source: str) -> subprocess.Popen[str]:
        return self.start("fetch", host, "--source", source)

    def has_all(self, host: int) -> bool:
        """Right files under their names, and nothing beside them."""
        directory = self.directory(host)
        left = {path.name for path in directory.iterdir()} - {path.split("/")[0] for path in FILES}
        same = all((directory / path).read_bytes() == body for path, body in FILES.items())
        return same and left <= {".fp8fleet-stamp.json", ".fp8fleet-lock", ".quarantine"}


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def said(process: subprocess.Popen[str], code: int = 0) -> str:
    text, _ = process.communicate(timeout=100)
    assert process.returncode == code, text
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write(directory: Path, files: dict[str, bytes]) -> None:
    for path, body in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(body)


def write_manifest(folder: Path, files: dict[str, bytes]) -> Path:
    lines = ['name = "tiny"', 'revision = "r1"']
    for path, body in files.items():
        lines += ["[[files]]", f'path = "{path}"', f"size = {len(body)}"]
        lines.append(f'sha256 = "{hashlib.sha256(body).hexdigest()}"')
    manifest = folder / "manifest.toml"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    fleet.make_torrent()
    with fleet.started:
        yield fleet


@pytest.fixture
def server() -> Iterator[httpd.Server]:
    with httpd.Server(dict(FILES)) as running:
        yield running


# --- the torrent --------------------------------------------------------------------------------


def test_the_same_files_make_the_same_torrent(fleet: Fleet) -> None:
    first = (fleet.folder / "model.torrent").read_bytes()
    elsewhere = fleet.folder / "another name"
    write(elsewhere, FILES)
    assert make_torrent(fleet.loaded, elsewhere, lambda done, total: None) == first


def test_pieces_never_cross_files_and_cover_them(fleet: Fleet) -> None:
    torrent = load_torrent(fleet.folder / "model.torrent", fleet.loaded)
    for path, body in FILES.items():
        pieces = [piece for piece in torrent.pieces if piece.path == path]
        assert sum(piece.size for piece in pieces) == len(body)
        assert [piece.offset for piece in pieces] == [256 * 1024 * n for n in range(len(pieces))]
    assert "empty.txt" not in torrent.files


def test_a_torrent_is_made_only_of_what_the_manifest_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(tmp_path, 1)
    (fleet.origin / "config.json").write_bytes(b"[]")
    assert hostcli.main(["manifest", "torrent", str(fleet.manifest), str(fleet.origin)]) == 1
    assert "config.json: has sha256" in capsys.readouterr().err
    assert not (tmp_path / "model.torrent").exists()


def test_a_torrent_of_another_manifest_is_refused(fleet: Fleet) -> None:
    manifest = fleet.loaded.model_copy(update={"revision": "r2"})
    with pytest.raises(OperatorError, match=r"is not of this manifest \(tiny r2\)"):
        load_torrent(fleet.folder / "model.torrent", manifest)


def test_what_is_no_torrent_is_refused(fleet: Fleet) -> None:
    with pytest.raises(OperatorError, match=r"manifest\.toml: no torrent"):
        load_torrent(fleet.manifest, fleet.loaded)
    with pytest.raises(OperatorError, match="nowhere: cannot be read: No such file"):
        load_torrent(fleet.folder / "nowhere", fleet.loaded)


# --- who exchanges with whom --------------------------------------------------------------------


def test_addresses_are_read_and_this_host_is_not_its_own_peer() -> None:
    site = Site.parse("10.0.0.2:7000", ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::1]:7000"])
    assert site.peers == (Address("10.0.0.1", 7000), Address("fd00::1", 7000))
    assert [str(peer) for peer in site.peers] == ["10.0.0.1:7000", "[fd00::1]:7000"]


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000", "gpu-1:7000", ":7"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(OperatorError, match="expected ADDRESS:PORT"):
        Site.parse("10.0.0.9:7000", [text])


def test_a_peer_with_two_ports_is_refused() -> None:
    with pytest.raises(OperatorError, match="is given with two ports"):
        Site.parse("10.0.0.9:7000", ["10.0.0.1:7000", "10.0.0.1:7001"])


def test_the_three_options_belong_together(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fetch", str(fleet.manifest), str(fleet.folder / "m"), "--peer", "10.0.0.1:7000"]
    assert hostcli.main(arguments) == 2
    assert "--torrent, --listen and --peer belong together" in capsys.readouterr().err


# --- fetching together --------------------------------------------------------------------------


def test_hosts_that_start_together_cost_the_source_one_copy(
    fleet: Fleet, server: httpd.Server
) -> None:
    fetchers = [fleet.fetch(host, server.url) for host in range(3)]
    shown = [said(fetcher) for fetcher in fetchers]
    assert all(fleet.has_all(host) for host in range(3))
    assert server.sent <= 1.2 * TOTAL
    assert all(" from peers in " in text and " 0 B from peers" not in text for text in shown)


def test_what_came_from_peers_is_stamped_like_all_else(fleet: Fleet, server: httpd.Server) -> None:
    for fetcher in [fleet.fetch(host, server.url) for host in range(2)]:
        said(fetcher)
    assert "checking" not in said(fleet.fetch(0, NOWHERE))
    stamp = json.loads((fleet.directory(1) / ".fp8fleet-stamp.json").read_text())
    assert stamp["manifest"] == fleet.loaded.digest


def test_without_any_peer_everything_comes_from_the_source_once(
    fleet: Fleet, server: httpd.Server
) -> None:
    said(fleet.fetch(0, server.url))
    assert fleet.has_all(0)
    assert server.sent == TOTAL


def test_hosts_that_come_later_cost_the_source_next_to_nothing(
    fleet: Fleet, server: httpd.Server
) -> None:
    write(fleet.directory(0), FILES)
    seeder = fleet.start("seed", 0)
    wait_for_seed(seeder)
    said(fleet.fetch(1, server.url))
    assert fleet.has_all(1)
    assert server.sent == 0
    seeder.send_signal(signal.SIGTERM)
    assert "gives" not in said(seeder)


def wait_for_seed(seeder: subprocess.Popen[str]) -> None:
    assert seeder.stdout is not None
    line = seeder.stdout.readline()
    assert "to 2 peers on 127.0.0." in line, line


def test_files_that_a_host_has_are_kept_and_given(fleet: Fleet, server: httpd.Server) -> None:
    del server.files["a.safetensors"]
    write(fleet.directory(0), {"a.safetensors": FILES["a.safetensors"]})
    fetchers = [fleet.fetch(host, server.url) for host in range(2)]
    assert "1 kept" in said(fetchers[0])
    said(fetchers[1])
    assert fleet.has_all(0)
    assert fleet.has_all(1)


def test_pieces_of_a_killed_run_are_hashed_and_kept(fleet: Fleet, server: httpd.Server) -> None:
    name = "a.safetensors"
    left = bytearray(len(FILES[name]))
    left[1 << 20 : 2 << 20] = FILES[name][1 << 20 : 2 << 20]
    write(fleet.directory(0), {f".partial/{name}": bytes(left)})
    said(fleet.fetch(0, server.url))
    assert fleet.has_all(0)
    assert server.sent == TOTAL - (1 << 20)


def test_a_server_that_ignores_ranges_is_used_without_peers(
    fleet: Fleet, server: httpd.Server
) -> None:
    server.always = dict.fromkeys(FILES, httpd.ignoring_ranges)
    text = said(fleet.fetch(0, server.url))
    assert "does not answer ranges: no pieces from it" in text
    assert fleet.has_all(0)


def test_a_source_that_breaks_is_asked_again(fleet: Fleet, server: httpd.Server) -> None:
    server.answers["a.safetensors"] = [httpd.status(503), httpd.cut_after(1000)]
    said(fleet.fetch(0, server.url))
    assert fleet.has_all(0)


def test_a_source_with_wrong_bytes_is_left_for_the_next(fleet: Fleet, server: httpd.Server) -> None:
    wrong = {"a.safetensors": os.urandom(len(FILES["a.safetensors"]))}
    with httpd.Server({**FILES, **wrong}) as bad:
        fetcher = fleet.start("fetch", 0, "--source", bad.url, "--source", server.url)
        assert "sends other bytes than the torrent's" in said(fetcher)
        assert bad.sent < 1.5 * TOTAL
    assert fleet.has_all(0)


def test_when_no_source_has_the_file_the_message_is_the_plain_fetchers(
    fleet: Fleet, server: httpd.Server
) -> None:
    del server.files["a.safetensors"]
    text = said(fleet.fetch(0, server.url), code=1)
    assert "a.safetensors: no source has the expected file" in text
    assert "404 Not Found" in text
    assert not (fleet.directory(0) / "a.safetensors").exists()


def test_bytes_that_only_the_torrent_vouches_for_go_to_quarantine(
    fleet: Fleet, server: httpd.Server
) -> None:
    """A torrent made of other bytes than the manifest's, and a host that gives them."""
    wrong = {**FILES, "a.safetensors": os.urandom(len(FILES["a.safetensors"]))}
    write(fleet.folder / "wrong", wrong)
    content = make_torrent(fleet.loaded, fleet.folder / "wrong", lambda done, total: None)
    (fleet.folder / "model.torrent").write_bytes(content)
    torrent = Torrent(content, fleet.loaded, "wrong")
    places = {path: path for path in torrent.files}
    site = Site.parse(f"{fleet.addresses[1]}:{fleet.port}", [f"{fleet.addresses[0]}:{fleet.port}"])
    with Exchange(torrent, fleet.folder / "wrong", site, places, set(places)):
        text = said(fleet.fetch(0, server.url))
    assert "came as the torrent says, but has sha256" in text
    assert fleet.has_all(0)
    kept = fleet.directory(0) / ".quarantine"
    assert (kept / "files/a.safetensors").read_bytes() == wrong["a.safetensors"]
    note = json.loads((kept / "notes.jsonl").read_text())
    assert note["got"] == hashlib.sha256(wrong["a.safetensors"]).hexdigest()
    assert note["expected"] == hashlib.sha256(FILES["a.safetensors"]).hexdigest()


def test_a_host_that_is_not_listed_gets_nothing(fleet: Fleet, server: httpd.Server) -> None:
    write(fleet.directory(0), FILES)
    fleet.addresses = fleet.addresses[:2]
    seeder = fleet.start("seed", 0)
    assert seeder.stdout is not None
    seeder.stdout.readline()
    fleet.addresses = [fleet.addresses[0], "127.0.0.9"]
    said(fleet.fetch(1, server.url))
    assert server.sent == TOTAL


def test_an_address_in_use_costs_only_the_peers(fleet: Fleet, server: httpd.Server) -> None:
    with socket.socket() as taken:
        taken.bind((fleet.addresses[0], fleet.port))
        taken.listen()
        said(fleet.fetch(0, server.url))
    assert fleet.has_all(0)


def test_a_disk_that_fails_is_one_line(fleet: Fleet, server: httpd.Server) -> None:
    (fleet.directory(0) / ".partial/a.safetensors").mkdir(parents=True)
    text = said(fleet.fetch(0, server.url), code=1)
    error = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "Traceback" not in text


# --- seeding ------------------------------------------------------------------------------------


def test_a_directory_that_is_not_whole_is_not_given(fleet: Fleet) -> None:
    write(fleet.directory(0), {**FILES, "config.json": b"[]"})
    assert "config.json: has sha256" in said(fleet.start("seed", 0), code=1)


def test_seeding_on_an_address_in_use_fails_and_says_so(fleet: Fleet) -> None:
    write(fleet.directory(0), FILES)
    with socket.socket() as taken:
        taken.bind((fleet.addresses[0], fleet.port))
        taken.listen()
        text = said(fleet.start("seed", 0), code=1)
    assert f"{fleet.addresses[0]}:{fleet.port}: cannot be listened on: Address already" in text


def test_seeding_writes_nothing_even_where_bytes_rot(fleet: Fleet, server: httpd.Server) -> None:
    """Rot that the stamp does not show: the receivers see it, and take those bytes elsewhere."""
    write(fleet.directory(0), FILES)
    assert hostcli.main(["verify", str(fleet.manifest), str(fleet.directory(0))]) == 0
    path = fleet.directory(0) / "a.safetensors"
    before = path.stat()
    with path.open("r+b") as stream:
        stream.write(b"rotten")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    wait_for_seed(fleet.start("seed", 0))
    said(fleet.fetch(1, server.url))
    assert fleet.has_all(1)
    assert path.read_bytes().startswith(b"rotten")
    assert path.stat().st_mtime_ns == before.st_mtime_ns

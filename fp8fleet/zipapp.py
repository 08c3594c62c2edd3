"""Packs the modules that hosts run into one file, the same bytes for the same sources."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from pathlib import Path

HOST_MODULES = (
    "architecture",
    "checkpoint",
    "client",
    "config_json",
    "errors",
    "fetch/__init__",
    "fetch/check",
    "fetch/disk",
    "fetch/engine",
    "fetch/options",
    "fetch/origin",
    "fetch/pace",
    "fetch/partial",
    "fetch/progress",
    "fetch/quarantine",
    "fetch/run",
    "fetch/shares",
    "fetch/sources",
    "fetch/swarm",
    "fetch/web",
    "findings",
    "headers",
    "hostcli",
    "inspect_cli",
    "jsonfile",
    "manifest",
    "output",
    "outside",
    "patterns",
    "peers",
    "quantization",
    "quantized",
    "ready",
    "schemes",
    "secrets",
    "seed",
    "tensor_parallel",
    "tokens",
    "toml",
    "workers",
)
"""What `hostcli` imports, no more: a change of another module gives hosts no new file."""

_MAIN = b"""import sys

try:
    from fp8fleet.hostcli import main
    from fp8fleet.output import leave
except KeyboardInterrupt:
    sys.exit(130)
leave(main())
"""


@functools.cache
def zipapp_bytes() -> bytes:
    """The archive: sorted, stored and without dates, so that it depends on the sources only."""
    package = Path(__file__).parent
    contents = {
        f"fp8fleet/{name}.py": (package / f"{name}.py").read_bytes() for name in HOST_MODULES
    }
    contents["fp8fleet/__init__.py"] = b""
    contents["__main__.py"] = _MAIN
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, contents[name])
    return packed.getvalue()


@functools.cache
def zipapp_digest() -> str:
    """SHA256 of the archive, 64 hex digits."""
    return hashlib.sha256(zipapp_bytes()).hexdigest()


def zipapp_name() -> str:
    """The archive's file name: ``fp8fleet-<first 12 digits>.pyz``."""
    return f"fp8fleet-{zipapp_digest()[:12]}.pyz"


def build_zipapp(dest_dir: Path) -> Path:
    """Write the archive into ``dest_dir``; run it as ``python fp8fleet-<digest>.pyz COMMAND``.

    Returns:
        Its path.
    """
    path = dest_dir / zipapp_name()
    dest_dir.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(zipapp_bytes())
    beside.replace(path)
    return path

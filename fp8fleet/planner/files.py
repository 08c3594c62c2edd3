"""Where things lie on a host, and the files that a plan puts there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fp8fleet import render
from fp8fleet.plan import CONFIG_DIRECTORY, PlannedFile
from fp8fleet.secrets import SecretRef
from fp8fleet.spec import HostSpec


def digest_of(*parts: str) -> str:
    """A short digest of ``parts``, for names that change when any of them does."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def planned_file(
    role: str, path: str, values: dict[str, Any], template: str | None = None
) -> PlannedFile:
    """A file rendered from ``templates/ROLE/``, from a template of its name or another."""
    source = template or Path(path).name
    return PlannedFile(role, path, render.template(f"{role}/{source}.j2", values).encode())


def secret_file(role: str, path: str, secret: SecretRef) -> PlannedFile:
    """A 0600 file that holds one secret."""
    content = f"{secret.placeholder}\n".encode()
    return PlannedFile(role, path, content, mode="600", secrets=(secret,))


def key_file(instance: str) -> str:
    """Path of a server's API key."""
    return f"{CONFIG_DIRECTORY}/instances/{instance}.key"


def token_file(model: str, revision: str) -> str:
    """Path of the bearer token for a model's sources."""
    return f"{CONFIG_DIRECTORY}/models/{model}-{revision}.token"


def home_directory(spec: HostSpec) -> str:
    """Home of the service user."""
    return f"{spec.cache_directory}/home"


def cache_directory(spec: HostSpec) -> str:
    """Compile caches of the host's engine release."""
    return f"{spec.cache_directory}/vllm-{spec.engine_release}"

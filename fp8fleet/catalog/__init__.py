"""What is known of releases, accelerators and platforms: TOML data, each entry with its source."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fp8fleet.errors import OperatorError
from fp8fleet.toml import parse_toml


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str


class Release(_Entry):
    """A vLLM release: what its environment needs and which options it lacks."""

    python: str
    cuda: str
    glibc: str
    shutdown_timeout: bool
    constraints: tuple[str, ...] = ()


class Accelerator(_Entry):
    """An accelerator as the inventory names it."""

    vendor: str
    compute_capability: str | None = None


class Platform(_Entry):
    """A distribution release: its package manager, C library version and package names."""

    family: str
    glibc: str
    packages: tuple[str, ...]
    """On every host."""
    serving_packages: tuple[str, ...]
    """On hosts with servers: a C++ compiler for kernels compiled at run time, NUMA."""
    proxy_packages: tuple[str, ...]
    """On hosts with the proxy."""


class CudaCompiler(_Entry):
    """The conda packages that bring the CUDA compiler matching a wheel."""

    conda: tuple[str, ...]


E = TypeVar("E", bound=_Entry)


def _load(name: str, kind: type[E]) -> dict[str, E]:
    text = (resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = parse_toml(text, f"catalog/{name}.toml")
    try:
        return {key: kind.model_validate(value) for key, value in table.items()}
    except ValidationError as error:
        raise OperatorError(f"catalog/{name}.toml: {error}") from None


@cache
def releases() -> dict[str, Release]:
    """All known vLLM releases by version."""
    return _load("releases", Release)


@cache
def accelerators() -> dict[str, Accelerator]:
    """All known accelerators by inventory name."""
    return _load("accelerators", Accelerator)


@cache
def platforms() -> dict[str, Platform]:
    """All known platforms by inventory name."""
    return _load("platforms", Platform)


@cache
def cuda_compilers() -> dict[str, CudaCompiler]:
    """Conda packages of the CUDA compiler by the CUDA version of a wheel."""
    return _load("cuda", CudaCompiler)

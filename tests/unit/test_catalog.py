"""The catalogue: data that is whole, typed and has its sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from fp8fleet import catalog

TABLES: list[Callable[[], Mapping[str, Any]]] = [
    catalog.releases,
    catalog.accelerators,
    catalog.platforms,
    catalog.cuda_compilers,
]


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_names_its_source(table: Callable[[], Mapping[str, Any]]) -> None:
    entries = table()
    assert entries
    for name, entry in entries.items():
        assert isinstance(entry, BaseModel)
        assert entry.source, name  # type: ignore[attr-defined]


def test_every_release_has_a_compiler_for_its_cuda() -> None:
    assert {release.cuda for release in catalog.releases().values()} <= set(
        catalog.cuda_compilers()
    )


def test_every_compiler_brings_what_the_engine_compiles_with_at_run_time() -> None:
    for cuda, compiler in catalog.cuda_compilers().items():
        packages = " ".join(compiler.conda)
        assert f"cuda-nvcc={cuda}" in packages
        assert "gxx" in packages
        assert "ninja" in packages


def test_every_platform_has_a_known_package_family_and_a_c_library() -> None:
    for name, platform in catalog.platforms().items():
        assert platform.family in ("apt", "dnf"), name
        assert re.fullmatch(r"2\.\d\d", platform.glibc), name
        assert platform.proxy_packages == ("nginx",), name
        compiler = "g++" if platform.family == "apt" else "gcc-c++"
        assert {compiler, "numactl"} <= set(platform.serving_packages), name
        assert {"ca-certificates", "curl"} <= set(platform.packages), name


def test_a_package_has_one_purpose() -> None:
    for name, platform in catalog.platforms().items():
        named = [*platform.packages, *platform.serving_packages, *platform.proxy_packages]
        assert len(named) == len(set(named)), name


def test_releases_before_0_18_cannot_drain() -> None:
    for name, release in catalog.releases().items():
        numbers = tuple(int(part) for part in name.split(".")[:2])
        assert release.shutdown_timeout == (numbers >= (0, 18)), name


def test_the_facts_that_other_modules_rest_on() -> None:
    assert catalog.platforms()["kylin-v10"].glibc == "2.28"
    assert catalog.platforms()["kylin-v10"].family == "dnf"
    assert catalog.accelerators()["a100-80g"].compute_capability == "8.0"
    assert catalog.accelerators()["cpu"].compute_capability is None
    assert "transformers>=5.5.1,<5.13" in catalog.releases()["0.21.0"].constraints

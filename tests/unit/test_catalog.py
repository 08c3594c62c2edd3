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
    catalog.vendors,
    catalog.cuda_versions,
    catalog.driver_branches,
    catalog.serve_options,
]


@pytest.mark.parametrize("table", TABLES)
def test_every_entry_names_its_source(table: Callable[[], Mapping[str, Any]]) -> None:
    entries = table()
    assert entries
    for name, entry in entries.items():
        assert isinstance(entry, BaseModel)
        assert entry.source, name  # type: ignore[attr-defined]


def test_every_release_has_a_compiler_for_its_cuda() -> None:
    needed = {release.cuda for release in catalog.releases().values() if release.cuda}
    assert needed <= set(catalog.cuda_versions())


def test_every_compiler_brings_what_the_engine_compiles_with_at_run_time() -> None:
    for cuda, compiler in catalog.cuda_versions().items():
        packages = " ".join(compiler.conda)
        assert f"cuda-nvcc={cuda}" in packages
        assert "gxx" in packages
        assert "ninja" in packages


def test_every_platform_has_a_known_package_family_and_a_c_library() -> None:
    for name, platform in catalog.platforms().items():
        assert platform.family in ("apt", "dnf"), name
        assert re.fullmatch(r"2\.\d\d", platform.glibc), name
        assert platform.proxy_packages == ("logrotate", "nginx"), name
        compiler = "g++" if platform.family == "apt" else "gcc-c++"
        assert {compiler, "ninja-build", "numactl"} <= set(platform.serving_packages), name
        clocks = {"apt": "systemd-timesyncd.service", "dnf": "chronyd.service"}
        assert platform.time_service == clocks[platform.family], name
        assert platform.time_service in catalog.clock_units(), name
        assert platform.kernel_packages, name
        assert {"ca-certificates", "curl"} <= set(platform.packages), name


def test_a_package_has_one_purpose() -> None:
    for name, platform in catalog.platforms().items():
        named = [*platform.packages, *platform.serving_packages, *platform.proxy_packages]
        named += [*platform.accelerator_packages, platform.time_package]
        assert len(named) == len(set(named)), name


def test_releases_before_0_18_cannot_drain() -> None:
    for name, release in catalog.releases().items():
        numbers = tuple(int(part) for part in catalog.release_version(name).split(".")[:2])
        assert release.shutdown_timeout == (numbers >= (0, 18)), name


def test_the_facts_that_other_modules_rest_on() -> None:
    assert catalog.platforms()["kylin-v10"].glibc == "2.28"
    assert catalog.platforms()["kylin-v10"].family == "dnf"
    assert catalog.accelerators()["a100-80g"].compute_capability == "8.0"
    assert catalog.accelerators()["cpu"].compute_capability is None
    assert "transformers>=5.5.1,<5.13" in catalog.releases()["0.21.0"].constraints


def test_every_vendor_that_a_release_or_an_accelerator_names_is_known() -> None:
    named = {vendor for release in catalog.releases().values() for vendor in release.vendors}
    named |= {accelerator.vendor for accelerator in catalog.accelerators().values()}
    assert named == set(catalog.vendors())


def test_a_pci_id_stands_for_one_accelerator() -> None:
    ids = [pci for accelerator in catalog.accelerators().values() for pci in accelerator.pci]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", pci) for pci in ids)


def test_an_accelerator_without_block_fp8_names_an_alternative() -> None:
    for name, accelerator in catalog.accelerators().items():
        assert (accelerator.fp8_block == "none") == (accelerator.alternative is not None), name


def test_block_fp8_follows_the_compute_capability() -> None:
    for name, accelerator in catalog.accelerators().items():
        if accelerator.compute_capability:
            capability = float(accelerator.compute_capability)
            expected = (
                "native" if capability >= 8.9 else "weight-only" if capability >= 7.5 else "none"
            )
            assert accelerator.fp8_block == expected, name


@pytest.mark.parametrize(
    ("os_id", "version", "like", "platform"),
    [
        ("ubuntu", "22.04", "debian", "ubuntu-22.04"),
        ("debian", "12", "", "debian-12"),
        ("kylin", "V10", "", "kylin-v10"),
        ("kylin", "v10", "debian", "kylin-desktop-v10"),
        ("kylin", "V11", "", "kylin-v11"),
        ("openEuler", "22.03", "", "openeuler-22.03"),
        ("openEuler", "24.03", "", "openeuler-24.03"),
        ("anolis", "8.8", "rhel fedora centos", "anolis-8"),
        ("anolis", "23.2", "anolis", "anolis-23"),
        ("uos", "20", "", "uos-20"),
        ("uos", "20", "debian", None),
        ("ubuntu", "22.10", "debian", None),
        ("anolis", "80", "", None),
        ("arch", "", "", None),
    ],
)
def test_os_release_tells_the_platform(
    os_id: str, version: str, like: str, platform: str | None
) -> None:
    assert catalog.platform_of(os_id, version, like) == platform


def test_releases_are_sorted_by_version_not_by_text() -> None:
    names = catalog.newest_first("vllm")
    assert names[0] == "0.33.0"
    assert names[-1] == "0.6.3"
    assert catalog.newest_first("vllm-ascend")[0] == "vllm-ascend-0.23.0.post1"

"""Drivers of a plan: what is asked for, from where, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import DIGEST, Site, lock_text, refusal

from fp8fleet import catalog
from fp8fleet.plan import DriverPlan, DriversPlan

URL = "https://mirror.example.com/NVIDIA-Linux-x86_64-580.95.05.run"
NVIDIA: dict[str, Any] = {"name": "nvidia", "version": "580.95.05"}
FABRIC: dict[str, Any] = {"name": "fabric-manager", "version": "580.95.05"}
RUN: dict[str, Any] = {**NVIDIA, "source": URL, "sha256": DIGEST}


def planned(site: Site, *drivers: dict[str, Any], **data: Any) -> DriversPlan:
    site.serving |= {"drivers": list(drivers), **data}
    return site.host_plan().drivers


def refused(site: Site, *drivers: dict[str, Any], **data: Any) -> str:
    site.serving |= {"drivers": list(drivers), **data}
    return refusal(site.plan)


def ascend(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm_ascend="0.23.0.post1"))
    site.serving |= {
        "accelerator": "ascend-910b",
        "engine_release": "vllm-ascend-0.23.0.post1",
        "engine_build": "source",
    }


def test_nothing_is_installed_that_nobody_asks_for(site: Site) -> None:
    plan = site.host_plan().drivers
    assert (plan.items, plan.reboot) == ((), False)
    assert site.host_plan().role_files("driver") == ()


def test_packages_are_the_catalogues_at_the_version_and_pinned(site: Site) -> None:
    plan = planned(site, FABRIC, NVIDIA)
    assert [item.name for item in plan.items] == ["nvidia", "fabric-manager"]
    assert plan.items[0].packages == (
        "nvidia-headless-580-server=580.95.05-*",
        "nvidia-utils-580-server=580.95.05-*",
    )
    assert plan.items[1].packages == ("nvidia-fabricmanager-580=580.95.05-*",)
    (pin,) = site.host_plan().role_files("driver")
    assert pin.path == "/etc/apt/preferences.d/90fp8fleet-driver"
    assert b"Pin: version 580.95.05-*\n" in pin.content


def test_packages_of_the_other_family_are_named_with_their_version(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.21.0"))
    plan = planned(site, NVIDIA, platform="kylin-v10", engine_release="0.21.0")
    assert plan.items[0].packages[0] == "nvidia-driver-580.95.05"
    assert site.host_plan().role_files("driver") == ()


def test_a_site_may_name_its_own_packages(site: Site) -> None:
    plan = planned(site, {**NVIDIA, "packages": [f"nvidia-open-{580}"]})
    assert plan.items[0].packages == ("nvidia-open-580=580.95.05-*",)


def test_an_installer_is_named_with_its_digest(site: Site) -> None:
    plan = planned(site, RUN, driver_reboot=True)
    needs = ("dkms", "gcc", "make", "linux-headers-{kernel}")
    assert plan.items == (DriverPlan("nvidia", "580.95.05", (), URL, DIGEST, needs),)
    assert plan.reboot
    assert site.host_plan().role_files("driver") == ()


def test_the_order_is_the_catalogues_whatever_the_inventorys(site: Site) -> None:
    ascend(site)
    versions = {"cann-toolkit": "9.1.0", "ascend-firmware": "7.8.0", "ascend-driver": "25.5.0"}
    asked = [
        {"name": n, "version": v, "source": f"https://m.example.com/{n}.run", "sha256": DIGEST}
        for n, v in versions.items()
    ]
    found = [item.name for item in planned(site, *asked).items]
    assert found == ["ascend-driver", "ascend-firmware", "cann-toolkit"]


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ({**NVIDIA, "name": "nvidea"}, "unknown driver"),
        ({**NVIDIA, "version": 580.95}, "write it in quotes"),
        ({**NVIDIA, "version": "latest"}, "version"),
        ({**NVIDIA, "source": URL}, "sha256 is needed with the URL"),
        ({**RUN, "sha256": "ab" * 33}, "64 hex digits"),
        ({**RUN, "source": "ftp://m.example.com/x.run"}, "URL is needed"),
        ({**NVIDIA, "sha256": DIGEST}, "sha256 belongs to a URL"),
        ({**RUN, "packages": ["x"]}, "packages belong to source = 'packages'"),
        ({**RUN, "name": "fabric-manager"}, "comes in packages only"),
        ({**NVIDIA, "packages": ["a b"]}, "packages"),
        ({**RUN, "version": "535.104.05", "source": "file:///mnt/x.run"}, "550 or newer"),
        (
            {**RUN, "source": URL.replace("x86_64", "aarch64")},
            "drivers: nvidia: source is for aarch64, arch is x86_64",
        ),
        (
            {**RUN, "source": URL.replace("580.95.05", "570.1")},
            "drivers.0: nvidia: source has version 570.1, version is 580.95.05",
        ),
        *(
            ({**NVIDIA, "version": version}, "drivers.0.version = ")
            for version in (
                "580.95.05\u00e9",
                "580.95.05_1",
                "580..",
                "580.",
                ".1",
                "5" * 60,
                "\uff15",
            )
        ),
        ({**NVIDIA, "version": "580.rc1"}, "version '580.rc1': numbers and dots are needed"),
        ({"name": "cann-toolkit", "version": "9.1.0"}, "is for ascend accelerators"),
        ({**NVIDIA, "version": "570.86.15"}, "580.65.06"),
    ],
)
def test_what_cannot_be_installed_is_refused(
    site: Site, driver: dict[str, Any], message: str
) -> None:
    assert message in refused(site, driver)


def test_one_driver_twice_and_a_fabric_manager_of_another_version_are_refused(site: Site) -> None:
    assert "nvidia is listed twice" in refused(site, NVIDIA, NVIDIA)
    other = {**FABRIC, "version": "580.82.07"}
    assert "both need one version" in refused(site, NVIDIA, other)


def test_huaweis_software_comes_by_installer_only_and_in_the_engines_version(site: Site) -> None:
    ascend(site)
    toolkit = {"name": "cann-toolkit", "version": "8.5.0"}
    assert "no packages for it with apt" in refused(site, toolkit)
    installer = {**toolkit, "source": "https://m.example.com/cann.run", "sha256": DIGEST}
    for version in ("8.5.0", "9.1.0.RC1", "9.1.0.alpha001", "9.1.01"):
        assert "needs 9.1.0" in refused(site, {**installer, "version": version})


HUAWEI = "https://m.example.com/Ascend-hdk-910b-npu-"


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ({"source": f"{HUAWEI}driver_25.5.0_linux-x86-64.run"}, None),
        ({"source": f"{HUAWEI}driver_25.5.0_linux-x86-64.run?a=b"}, None),
        ({"source": "https://m.example.com/ascend.run"}, None),
        ({"source": f"{HUAWEI}driver_25.5.0_linux-aarch64.run"}, "source is for aarch64"),
        ({"source": f"{HUAWEI}driver_24.1.rc2_linux-x86-64.run"}, "has version 24.1.rc2"),
        (
            {"name": "ascend-firmware", "source": f"{HUAWEI}firmware_7.1.0.run"},
            "has version 7.1.0, version is 25.5.0",
        ),
    ],
)
def test_huaweis_installers_are_told_by_their_names(
    site: Site, driver: dict[str, Any], message: str | None
) -> None:
    ascend(site)
    asked = {"name": "ascend-driver", "version": "25.5.0", "sha256": DIGEST, **driver}
    if message is None:
        assert [item.url for item in planned(site, asked).items] == [driver["source"]]
    else:
        assert message in refused(site, asked)


def test_a_driver_whose_branch_has_ended_is_a_note(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.19.1"))
    site.serving |= {"engine_release": "0.19.1", "drivers": [{**NVIDIA, "version": "535.104.05"}]}
    assert any("535" in note for note in site.host_plan().notes)


def test_every_installer_of_the_catalogue_can_be_installed_somehow() -> None:
    vendors = {accelerator.vendor for accelerator in catalog.accelerators().values()}
    for name, entry in catalog.installers().items():
        assert entry.runs or entry.packages, name
        assert entry.vendor in vendors, name

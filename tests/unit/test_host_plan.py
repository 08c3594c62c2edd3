"""How a host is prepared: packages, sources, holds, clock, logs, NVIDIA's devices."""

from __future__ import annotations

import configparser
import fnmatch
import re

import pytest
from fleets import Site

from fp8fleet import catalog
from fp8fleet.plan import FleetPlan

REPOSITORIES = [
    {
        "name": "base",
        "base_url": "https://mirror.example.com/kylin/$basearch/",
        "gpg_key": "file:///etc/pki/k",
    },
    {"name": "disk", "base_url": "file:///mnt/packages", "gpgcheck": False},
]
REPO = "/etc/fp8fleet/yum.repos.d/fp8fleet.repo"
ROTATION = "/etc/logrotate.d/nginx"


@pytest.fixture
def kylin(site: Site) -> Site:
    site.serving["platform"] = "kylin-v11"
    return site


# Package sources


def test_dnfs_repositories_stand_in_a_folder_of_their_own_that_replaces_the_hosts(
    kylin: Site,
) -> None:
    kylin.serving["dnf_repositories"] = REPOSITORIES
    host = kylin.host_plan()
    assert host.preparation.dnf_sources == ("reposdir=/etc/fp8fleet/yum.repos.d",)
    read = configparser.ConfigParser()
    read.read_string(kylin.content(REPO))
    assert dict(read["fp8fleet-base"]) == {
        "name": "base",
        "baseurl": "https://mirror.example.com/kylin/$basearch/",
        "enabled": "1",
        "gpgcheck": "1",
        "gpgkey": "file:///etc/pki/k",
    }
    assert read["fp8fleet-disk"]["baseurl"] == "file:///mnt/packages"
    assert read["fp8fleet-disk"]["gpgcheck"] == "0"
    assert read.sections() == ["fp8fleet-base", "fp8fleet-disk"]


def test_without_repositories_the_hosts_own_are_used(kylin: Site) -> None:
    host = kylin.host_plan()
    assert host.preparation.dnf_sources == ()
    assert host.role_absent("host") == (REPO,)


def test_the_other_familys_sources_are_left_out(site: Site) -> None:
    site.serving["dnf_repositories"] = REPOSITORIES
    host = site.host_plan()
    assert host.preparation.dnf_sources == ()
    assert REPO not in [file.path for file in host.files]
    assert "/etc/apt/sources.list.d/fp8fleet.list" in host.role_absent("host")


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        ({"name": "a", "base_url": "file:///x"}, "gpg_key is needed, or gpgcheck = False"),
        (
            {"name": "a", "base_url": "file:///x", "gpg_key": "file:///k", "gpgcheck": False},
            "gpg_key says nothing",
        ),
        ({"name": "a", "base_url": "ftp://x/", "gpgcheck": False}, "http://"),
        ({"name": "a", "base_url": "file:///a b", "gpgcheck": False}, "without quotes and spaces"),
        ({"name": "a b", "base_url": "file:///x", "gpgcheck": False}, "name"),
        ({"name": "a", "url": "file:///x", "gpgcheck": False}, "base_url"),
    ],
)
def test_a_repository_that_cannot_be_is_refused(
    kylin: Site, repository: dict[str, object], said: str
) -> None:
    kylin.serving["dnf_repositories"] = [repository]
    assert said in kylin.refusal()


def test_two_repositories_of_one_name_are_refused(kylin: Site) -> None:
    kylin.serving["dnf_repositories"] = [REPOSITORIES[1], REPOSITORIES[1]]
    assert "the name disk is used twice" in kylin.refusal()


# Packages


def test_a_pinned_package_is_one_of_the_hosts_packages(site: Site) -> None:
    site.serving["package_versions"] = {"nginx": "1.24.0-2", "htop": "3.2"}
    host = site.host_plan()
    assert host.preparation.versions == {"nginx": "1.24.0-2", "htop": "3.2"}
    assert {"nginx", "htop"} <= set(host.packages)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"nginx": 1.24}, "in quotes"),
        ({"nginx": "1.24 "}, "nginx"),
        ({"nginx; rm": "1"}, "nginx; rm"),
        ({"nginx": "$(id)"}, "nginx"),
        ({"nginx": "-1"}, "nginx"),
    ],
)
def test_a_version_that_is_none_is_refused(site: Site, pins: dict[str, object], said: str) -> None:
    site.serving["package_versions"] = pins
    assert said in site.refusal()


def test_nvtop_is_installed_only_where_the_distribution_has_it_and_a_gpu_is(site: Site) -> None:
    site.serving["platform"] = "ubuntu-24.04"
    assert "nvtop" in site.host_plan().packages
    site.serving["platform"] = "ubuntu-22.04"
    assert "nvtop" not in site.host_plan().packages
    rpm = [p for p in catalog.platforms().values() if p.family == "dnf"]
    assert not [p for p in rpm if p.accelerator_packages]


# Holds


def test_kernel_and_driver_are_held_where_an_accelerator_is(site: Site) -> None:
    held = site.host_plan().preparation.held
    assert {"linux-generic*", "nvidia-driver*", "nvidia-fabricmanager*"} <= set(held)
    site.serving["platform"] = "kylin-v11"
    held = site.host_plan().preparation.held
    assert {"kernel", "kernel-devel*", "nvidia-driver*"} <= set(held)


def test_headers_that_compilers_need_are_never_excluded() -> None:
    for name, platform in catalog.platforms().items():
        if platform.family == "dnf":
            held = platform.kernel_packages
            assert not any(fnmatch.fnmatch("kernel-headers", pattern) for pattern in held), name


def test_a_gateway_holds_nothing_and_the_inventory_has_the_last_word(gateway_site: Site) -> None:
    assert gateway_site.plan().hosts["gw-1"].preparation.held == ()
    gateway_site.serving["hold_packages"] = ["linux-*", "nginx"]
    assert gateway_site.host_plan().preparation.held == ("linux-*", "nginx")
    gateway_site.serving["hold_packages"] = []
    assert gateway_site.host_plan().preparation.held == ()


@pytest.mark.parametrize("pattern", ["a b", "$x", "-x", "a;b", ""])
def test_a_pattern_that_a_shell_could_misread_is_refused(site: Site, pattern: str) -> None:
    site.serving["hold_packages"] = [pattern]
    assert "hold_packages" in site.refusal()


# Clock


def test_the_sites_time_servers_go_to_the_platforms_service(site: Site) -> None:
    site.serving["ntp_servers"] = ["ntp1.example.com", "10.0.0.1", "fd00::1"]
    path = "/etc/systemd/timesyncd.conf.d/90-fp8fleet.conf"
    assert "\nNTP=ntp1.example.com 10.0.0.1 fd00::1\nFallbackNTP=\n" in site.content(path)
    time = site.host_plan().preparation.time
    assert time.unit == "systemd-timesyncd.service"
    assert time.digest
    site.serving["platform"] = "kylin-v11"
    text = site.content("/etc/chrony.conf")
    assert re.findall(r"^server (\S+) iburst$", text, re.M) == [*site.serving["ntp_servers"]]
    assert site.host_plan().preparation.time.unit == "chronyd.service"


def test_without_time_servers_no_configuration_of_the_clock_is_touched(site: Site) -> None:
    host = site.host_plan()
    assert host.preparation.time.digest is None
    assert not [f.path for f in host.files if "timesyncd" in f.path or "chrony" in f.path]
    assert "/etc/systemd/timesyncd.conf.d/90-fp8fleet.conf" in host.role_absent("host")


@pytest.mark.parametrize("server", ["a b", "x\ny", "-x", "$(id)", ""])
def test_a_time_server_that_is_none_is_refused(site: Site, server: str) -> None:
    site.serving["ntp_servers"] = [server]
    assert "ntp_servers" in site.refusal()


# Logs


def test_the_journal_and_nginxs_logs_are_kept_for_180_days_and_capped(site: Site) -> None:
    journal = site.content("/etc/systemd/journald.conf.d/90-fp8fleet.conf").splitlines()
    assert journal[1:] == [
        "[Journal]",
        "Storage=persistent",
        "SystemMaxUse=4G",
        "MaxRetentionSec=180day",
    ]
    rotation = site.content(ROTATION)
    assert "rotate 180\n" in rotation
    assert "maxage 180\n" in rotation
    (size,) = re.findall(r"maxsize (\d+)k\n", rotation)
    assert int(size) * 180 <= 4 * 1024 * 1024 < (int(size) + 1) * 180


def test_the_inventory_sets_days_and_size(site: Site) -> None:
    site.serving |= {"log_retention_days": 30, "log_max_size": "600m"}
    assert "SystemMaxUse=600M" in site.content("/etc/systemd/journald.conf.d/90-fp8fleet.conf")
    assert "rotate 30\n" in site.content(ROTATION)
    assert "maxsize 20480k\n" in site.content(ROTATION)


def test_a_file_is_never_rotated_below_a_mebibyte(site: Site) -> None:
    site.serving |= {"log_retention_days": 3650, "log_max_size": "10m"}
    assert "maxsize 1024k\n" in site.content(ROTATION)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_retention_days", 0),
        ("log_retention_days", "180"),
        ("log_max_size", "4"),
        ("log_max_size", "4t"),
    ],
)
def test_days_and_sizes_that_cannot_be_are_refused(site: Site, key: str, value: object) -> None:
    site.serving[key] = value
    assert key in site.refusal()


def test_new_logs_belong_to_the_distributions_nginx(kylin: Site) -> None:
    assert "create 0640 nginx root\n" in kylin.content(ROTATION)
    kylin.serving["platform"] = "ubuntu-22.04"
    assert "create 0640 www-data adm\n" in kylin.content(ROTATION)


def test_only_hosts_with_the_proxy_rotate_its_logs(gateway_site: Site) -> None:
    hosts = gateway_site.plan().hosts
    timer = "fp8fleet-logrotate.timer"
    assert timer in [service.unit for service in hosts["gw-1"].preparation.services]
    behind = hosts["gpu-1"]
    assert behind.preparation.retired == (timer,)
    assert not [file.path for file in behind.files if "logrotate" in file.path]


# NVIDIA


def test_nouveau_is_off_and_the_devices_come_before_the_servers_on_nvidia_hosts_only(
    gateway_site: Site,
) -> None:
    hosts = gateway_site.plan().hosts
    paths = [file.path for file in hosts["gpu-1"].files]
    assert "/etc/modprobe.d/fp8fleet-nouveau.conf" in paths
    assert "/etc/systemd/system/fp8fleet-nvidia.service" in paths
    assert hosts["gpu-1"].preparation.nouveau_digest
    assert hosts["gw-1"].preparation.nouveau_digest is None
    assert not [file.path for file in hosts["gw-1"].files if "nvidia" in file.path]


def test_a_server_waits_for_nvidias_devices_but_starts_without_them_too(site: Site) -> None:
    unit = site.content("/etc/systemd/system/fp8fleet-main.service")
    after = [line for line in unit.splitlines() if line.startswith("After=")]
    assert "fp8fleet-nvidia.service nvidia-persistenced.service" in after[-1]
    assert "Wants=fp8fleet-nvidia.service" in unit
    assert "Requires=fp8fleet-nvidia.service" not in unit


def test_the_worked_examples_hosts_are_prepared(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        listed = [directory.path for directory in host.preparation.directories]
        assert "/var/lib/fp8fleet/host" in listed
        assert len(listed) == len(set(listed))

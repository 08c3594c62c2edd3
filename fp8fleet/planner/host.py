"""A host's packages, directories and system files, and what of the system has to be in force."""

from __future__ import annotations

import hashlib

from fp8fleet import catalog
from fp8fleet.catalog import Platform
from fp8fleet.plan import (
    CONFIG_DIRECTORY,
    NVIDIA_UNIT,
    STATE_DIRECTORY,
    UNIT_DIRECTORY,
    UNIT_PREFIX,
    ModelPlan,
    PlannedDirectory,
    PlannedFile,
    Preparation,
    ServicePlan,
    TimePlan,
)
from fp8fleet.planner.files import (
    cache_directory,
    home_directory,
    key_file,
    planned_file,
    token_file,
)
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import HostSpec

_APT_SOURCES = "/etc/apt/sources.list.d/fp8fleet.list"
_DNF_DIRECTORY = f"{CONFIG_DIRECTORY}/yum.repos.d"
_DNF_SOURCES = f"{_DNF_DIRECTORY}/fp8fleet.repo"
_JOURNAL = "/etc/systemd/journald.conf.d/90-fp8fleet.conf"
_NOUVEAU = "/etc/modprobe.d/fp8fleet-nouveau.conf"
_ROTATION_UNITS = f"{UNIT_DIRECTORY}/{UNIT_PREFIX}logrotate"
_ROTATION_TIMER = f"{UNIT_PREFIX}logrotate.timer"

_ROTATION = "/etc/logrotate.d/nginx"
"""The distribution's own entry: its package leaves it alone once it was changed, and a second one
for the same logs would be an error of logrotate's."""

_TIME_FILES = {
    "apt": "/etc/systemd/timesyncd.conf.d/90-fp8fleet.conf",
    "dnf": "/etc/chrony.conf",
}

_MIB = {"m": 1, "g": 1024}


def host_packages(
    spec: HostSpec, platform: Platform, serves: bool, proxies: bool, selinux: bool
) -> tuple[str, ...]:
    """The distribution's packages that a host needs, those with a set version among them."""
    names = {*platform.packages, *spec.package_versions}
    names |= {*platform.serving_packages} if serves else set()
    names |= {*platform.accelerator_packages} if _is_accelerated(spec) else set()
    names |= {*platform.proxy_packages} if proxies else set()
    names |= {*platform.selinux_packages} if selinux else set()
    return tuple(sorted(names))


def _is_accelerated(spec: HostSpec) -> bool:
    return spec.vendor not in (None, "cpu")


def preparation(
    spec: HostSpec, platform: Platform, files: list[PlannedFile], proxies: bool
) -> Preparation:
    """What has to be in force on a host besides its system ``files``."""
    services = [
        ServicePlan(
            "systemd-journald.service",
            _digest(files, _JOURNAL),
            enable=False,
            then="journalctl --flush",
        )
    ]
    if proxies:
        timer = _digest(files, f"{_ROTATION_UNITS}.timer", f"{_ROTATION_UNITS}.service")
        services.append(ServicePlan(_ROTATION_TIMER, timer, enable=True))
    sources = platform.family == "dnf" and spec.dnf_repositories is not None
    is_nvidia = spec.vendor == "nvidia"
    return Preparation(
        directories=_system_directories(files),
        versions=dict(spec.package_versions),
        held=_held(spec, platform),
        dnf_sources=(f"reposdir={_DNF_DIRECTORY}",) if sources else (),
        services=tuple(services),
        retired=() if proxies else (_ROTATION_TIMER,),
        time=TimePlan(
            platform.time_service,
            platform.time_package,
            _digest(files, _TIME_FILES[platform.family]) if spec.ntp_servers else None,
        ),
        nouveau_digest=_digest(files, _NOUVEAU) if is_nvidia else None,
    )


def _held(spec: HostSpec, platform: Platform) -> tuple[str, ...]:
    """Patterns of the packages that upgrades leave: kernel and driver belong together."""
    if spec.hold_packages is not None:
        return spec.hold_packages
    if spec.vendor is None or not _is_accelerated(spec):
        return ()
    drivers = catalog.vendors()[spec.vendor].driver_packages.get(platform.family, ())
    return (*platform.kernel_packages, *drivers)


def _digest(files: list[PlannedFile], *paths: str) -> str:
    contents = [file.content for file in files if file.path in paths]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


def _system_directories(files: list[PlannedFile]) -> tuple[PlannedDirectory, ...]:
    """Where the system files go; a bare system has some of them only."""
    paths = {file.path.rpartition("/")[0] for file in files} - {"/etc", UNIT_DIRECTORY}
    return tuple(PlannedDirectory(path) for path in sorted({*paths, STATE_DIRECTORY}))


def absent_files(
    spec: HostSpec, platform: Platform, own: Serving | None, model: ModelPlan | None
) -> dict[str, tuple[str, ...]]:
    """What the inventory no longer asks for, by role: secrets, package sources, time servers."""
    absent: dict[str, tuple[str, ...]] = {}
    if own and not spec.api_key:
        absent["vllm"] = tuple(key_file(instance.name) for instance in own.instances)
    if model and not spec.model_token:
        absent["model"] = (token_file(model.name, model.revision),)
    if platform.family == "apt":
        unasked = {_APT_SOURCES: spec.apt_sources is None, _TIME_FILES["apt"]: not spec.ntp_servers}
    else:
        # chrony's configuration stays: without any it would not start
        unasked = {_DNF_SOURCES: spec.dnf_repositories is None}
    absent["host"] = tuple(path for path, gone in unasked.items() if gone)
    return absent


def host_directories(spec: HostSpec, model: ModelPlan | None) -> tuple[PlannedDirectory, ...]:
    """Directories of ours, parents first."""
    plain = [CONFIG_DIRECTORY, f"{CONFIG_DIRECTORY}/requirements", spec.install_directory]
    plain += [f"{spec.install_directory}/bin"]
    if model is None:
        return tuple(PlannedDirectory(path) for path in plain)
    plain += [f"{CONFIG_DIRECTORY}/instances", f"{CONFIG_DIRECTORY}/models"]
    plain += [spec.model_directory, spec.cache_directory]
    owned = [home_directory(spec), cache_directory(spec)]
    user = spec.service_user
    return tuple(PlannedDirectory(path) for path in plain) + tuple(
        PlannedDirectory(path, "750", user, user) for path in owned
    )


def host_files(spec: HostSpec, platform: Platform, proxies: bool) -> list[PlannedFile]:
    """System files: limits, kernel parameters, package sources, clock, logs, NVIDIA's devices."""
    values = {"spec": spec}
    templates = {
        "/etc/sysctl.d/90-fp8fleet.conf": "sysctl.conf",
        "/etc/security/limits.d/90-fp8fleet.conf": "limits.conf",
        _JOURNAL: "journald.conf",
    }
    if platform.family == "apt":
        templates["/etc/apt/apt.conf.d/90fp8fleet"] = "90fp8fleet"
        if spec.apt_sources is not None:
            templates[_APT_SOURCES] = "fp8fleet.list"
    elif spec.dnf_repositories is not None:
        templates[_DNF_SOURCES] = "fp8fleet.repo"
    if spec.ntp_servers:
        path = _TIME_FILES[platform.family]
        templates[path] = "timesyncd.conf" if platform.family == "apt" else "chrony.conf"
    if spec.vendor == "nvidia":
        templates[_NOUVEAU] = "fp8fleet-nouveau.conf"
        templates[f"{UNIT_DIRECTORY}/{NVIDIA_UNIT}"] = NVIDIA_UNIT
    if proxies:
        templates[f"{_ROTATION_UNITS}.service"] = "fp8fleet-logrotate.service"
        templates[f"{_ROTATION_UNITS}.timer"] = "fp8fleet-logrotate.timer"
    files = [planned_file("host", path, values, name) for path, name in templates.items()]
    if proxies:
        owner = "www-data adm" if platform.family == "apt" else "nginx root"
        rotation = {"days": spec.log_retention_days, "size": _log_size(spec), "owner": owner}
        files.append(planned_file("host", _ROTATION, rotation, "logrotate-nginx"))
    return files


def _log_size(spec: HostSpec) -> int:
    """KiB of one of the log files that are kept: all of them together make log_max_size."""
    total = int(spec.log_max_size[:-1]) * _MIB[spec.log_max_size[-1]] * 1024
    return max(total // spec.log_retention_days, 1024)

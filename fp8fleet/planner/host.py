"""A host's packages, directories and system files."""

from __future__ import annotations

from fp8fleet.catalog import Platform
from fp8fleet.plan import CONFIG_DIRECTORY, ModelPlan, PlannedDirectory, PlannedFile
from fp8fleet.planner.files import (
    cache_directory,
    home_directory,
    key_file,
    planned_file,
    token_file,
)
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import HostSpec


def host_packages(
    platform: Platform, serves: bool, proxies: bool, selinux: bool
) -> tuple[str, ...]:
    """The distribution's packages that a host needs."""
    names = [*platform.packages]
    names += platform.serving_packages if serves else ()
    names += platform.proxy_packages if proxies else ()
    names += platform.selinux_packages if selinux else ()
    return tuple(sorted(names))


def absent_files(
    spec: HostSpec, own: Serving | None, model: ModelPlan | None
) -> dict[str, tuple[str, ...]]:
    """Secrets that the inventory no longer has, by role."""
    absent: dict[str, tuple[str, ...]] = {}
    if own and not spec.api_key:
        absent["vllm"] = tuple(key_file(instance.name) for instance in own.instances)
    if model and not spec.model_token:
        absent["model"] = (token_file(model.name, model.revision),)
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


def host_files(spec: HostSpec, platform: Platform) -> list[PlannedFile]:
    """System files: limits, kernel parameters, package sources."""
    values = {"spec": spec}
    files = [
        planned_file("host", "/etc/sysctl.d/90-fp8fleet.conf", values, "sysctl.conf"),
        planned_file("host", "/etc/security/limits.d/90-fp8fleet.conf", values, "limits.conf"),
    ]
    if platform.family == "apt":
        files.append(planned_file("host", "/etc/apt/apt.conf.d/90fp8fleet", values))
        if spec.apt_sources is not None:
            files.append(planned_file("host", "/etc/apt/sources.list.d/fp8fleet.list", values))
    return files

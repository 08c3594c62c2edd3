"""The cmake of hosts that build what has no wheel."""

from __future__ import annotations

from dataclasses import replace

from fp8fleet.plan import CmakePlan
from fp8fleet.spec import CMAKE_ARCHIVE, HostSpec


def cmake_plan(spec: HostSpec) -> CmakePlan:
    """The oldest cmake that will do, and the archive to take it from."""
    directory = f"{spec.install_directory}/cmake"
    plan = CmakePlan(
        minimum=spec.cmake_version, link=f"{directory}/current", architecture=spec.arch
    )
    named = CMAKE_ARCHIVE.search(spec.cmake_archive_url or "")
    if named is None or spec.cmake_sha256 is None:
        return plan
    return replace(
        plan,
        prefix=f"{directory}/{named['version']}-{spec.cmake_sha256[:12]}",
        url=spec.cmake_archive_url,
        sha256=spec.cmake_sha256,
    )

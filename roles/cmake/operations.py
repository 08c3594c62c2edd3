"""cmake from an archive, to a prefix of its own; the distribution's package stays as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from packaging.version import Version
from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, operation

from fp8fleet.plan import CmakePlan, HostPlan
from roles.cmake.facts import Cmake, CmakeState
from roles.operations import curl_command, failed, sha256_command, streamed

ELF_MACHINES = {"x86_64": "3e00", "aarch64": "b700"}
"""e_machine of an ELF header (elf(5)), as its bytes 18 and 19 stand in the file."""


@operation()
def cmake(plan: HostPlan) -> Iterator[StringCommand | FunctionCommand]:
    """Have a cmake that is new enough: the host's own, else the archive's behind a link.

    Hosts on which nothing is built are not even asked.
    """
    planned = plan.cmake
    if planned is None:
        return
    state = host.get_fact(Cmake, link=planned.link, prefix=planned.prefix)
    if state.whole and state.link == planned.prefix:
        return
    if state.own and Version(state.own) >= Version(planned.minimum):
        return
    if fault := _fault(planned, state):
        yield failed(fault)
        return
    if not state.whole:
        yield from _install(planned, plan.download_environment)
    link = shlex.quote(planned.link)
    new = shlex.quote(f"{planned.link}.new")
    yield StringCommand(f"ln -sfn {planned.prefix} {new} && mv -fT {new} {link}")


def _fault(planned: CmakePlan, state: CmakeState) -> str | None:
    if planned.url is None:
        have = f"has {state.own}" if state.own else "has none"
        return (
            f"engine_build = 'source' needs cmake {planned.minimum} or newer, the host {have}:"
            " set cmake_archive_url and cmake_sha256, or install one"
        )
    if state.taken:
        return f"{planned.link} is no link of fp8fleet: move it away; nothing was changed"
    return None


def _install(planned: CmakePlan, environment: Mapping[str, str]) -> Iterator[StringCommand]:
    """Fetch, check, unpack beside, check again, rename; whatever fails leaves nothing behind.

    A killed run's rests are thrown away: the archive is fetched in seconds.
    """
    assert planned.url and planned.prefix and planned.sha256
    prefix, download, new = planned.prefix, f"{planned.prefix}.download", f"{planned.prefix}.new"
    directory = planned.prefix.rpartition("/")[0]
    clear = f"rm -rf {download} {new}"

    def check(script: str, found: str) -> StringCommand:
        """Run ``script``; where it fails, say in one line what was found, and clear."""
        return StringCommand(
            f'umask 022; {script} || {{ echo "cmake_archive_url: {found}" >&2; {clear}; exit 1; }}'
        )

    yield StringCommand(f"umask 022; mkdir -p {directory} && {clear}")
    yield streamed(f"{curl_command(download)} {shlex.quote(planned.url)}", environment)
    yield check(
        sha256_command(planned.sha256, download),
        f"expected SHA256 {planned.sha256}, got $(sha256sum <{download} | cut -c -64)"
        f"$(head -c 99 {download} | grep -aqi -e '<html' -e '<!doctype' && echo ', an HTML page')",
    )
    yield check(
        f"mkdir {new} && tar -xzf {download} -C {new} --strip-components=1 --no-same-owner"
        f" && [ -f {new}/bin/cmake ]",
        "is no archive of cmake that tar can unpack here",
    )
    machine = f"$(od -An -tx1 -j18 -N2 {new}/bin/cmake | tr -d ' ')"
    yield check(
        f'[ "{machine}" = {ELF_MACHINES[planned.architecture]} ]',
        f"its bin/cmake is not for {planned.architecture} (ELF machine {machine}):"
        " take the archive of that architecture",
    )
    yield check(f"{new}/bin/cmake --version >/dev/null", "its bin/cmake does not run here")
    yield StringCommand(f"sync && rm -rf {prefix} && mv -T {new} {prefix} && rm -f {download}")

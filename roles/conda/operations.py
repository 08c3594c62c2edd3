"""Conda environments filled from hash-locked requirements; a stamp is the last thing written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from fp8fleet.plan import STAMP, EnvironmentPlan, HostPlan
from roles.facts import PathStates
from roles.operations import admitted, curl_command, sha256_command, streamed


@operation()
def frontend(plan: HostPlan) -> Iterator[StringCommand]:
    """Fetch the conda frontend, check its SHA256, install it to its versioned prefix."""
    front = plan.frontend
    if front.prefix is None or front.url is None or _is_whole(front.prefix, front.program):
        return
    assert front.sha256
    prefix, download = front.prefix, f"{front.prefix}.download"
    yield streamed(f"sh -c 'rm -rf {prefix} && mkdir -p {prefix}/bin'")
    fetch = f"{curl_command(download)} {shlex.quote(front.url)}"
    yield streamed(fetch, plan.download_environment)
    yield StringCommand(
        f"{sha256_command(front.sha256, download)}"
        f" || {{ echo 'conda_frontend_url: expected SHA256 {front.sha256}, got:'"
        f' "$(sha256sum {download})" >&2; rm -f {download}; exit 1; }}'
    )
    if front.is_installer:
        yield streamed(f"sh -c 'rm -rf {prefix} && sh {download} -b -p {prefix}'")
    else:
        yield StringCommand(f"install -m 755 {download} {front.program}")
    yield StringCommand(f"rm -f {download}")
    yield from admitted(plan, prefix)
    yield _stamp(prefix)


@operation()
def tools_environment(plan: HostPlan) -> Iterator[StringCommand]:
    """Make the tools environment; its uv then fills the engine's."""
    environment = plan.tools
    if _is_whole(environment.prefix, environment.interpreter):
        return
    yield from _create(plan, environment)
    trusted = [f"--trusted-host={name}" for name in plan.trusted_hosts]
    options = " ".join(shlex.quote(option) for option in (*plan.package_options, *trusted))
    yield streamed(
        f"{environment.interpreter} -m pip install --no-input --disable-pip-version-check"
        f" --no-cache-dir --root-user-action=ignore --progress-bar=off --require-hashes {options}"
        f" -r {environment.requirements}",
        plan.download_environment,
    )
    yield from _prove(plan, environment)


@operation()
def engine_environment(plan: HostPlan) -> Iterator[StringCommand]:
    """Make the engine's environment: pins first, then everything that the lock names."""
    environment = plan.engine
    if environment is None or _is_whole(environment.prefix, environment.interpreter):
        return
    yield from _create(plan, environment)
    uv = f"{plan.tools.prefix}/bin/uv pip install --python {environment.interpreter}"
    if plan.cmake:
        uv = f'PATH={plan.cmake.link}/bin:"$PATH" {uv}'
    options = [*plan.package_options, "--require-hashes", "--compile-bytecode"]
    if environment.build == "wheel":
        options += ["--only-binary", ":all:"]
    install = f"{uv} {' '.join(shlex.quote(option) for option in options)}"
    if environment.pins:
        yield streamed(f"{install} --no-deps -r {environment.pins}", plan.download_environment)
    yield streamed(f"{install} -r {environment.requirements}", plan.download_environment)
    yield from _prove(plan, environment)


def _is_whole(prefix: str, program: str) -> bool:
    """Whether the stamp is there, and ``program``, without which the prefix is damaged."""
    states = host.get_fact(PathStates, paths=[f"{prefix}/{STAMP}", program])
    return len(states) == 2 and all(state.kind != "absent" for state in states.values())


def _stamp(prefix: str) -> StringCommand:
    return StringCommand(f"sync && touch {prefix}/{STAMP}")


def _create(plan: HostPlan, environment: EnvironmentPlan) -> Iterator[StringCommand]:
    """What a killed run left is thrown away: conda bakes the prefix in, nothing can be renamed."""
    yield streamed(f"rm -rf {environment.prefix}")
    channels = " ".join(f"-c {shlex.quote(channel)}" for channel in environment.channels)
    wanted = [f"python={environment.python}", *environment.conda_packages]
    packages = " ".join(shlex.quote(package) for package in wanted)
    yield streamed(
        f"{plan.frontend.program} create -y -q -p {environment.prefix}"
        f" --override-channels {channels} {packages}",
        plan.download_environment,
    )
    yield from admitted(plan, environment.prefix)


def _prove(plan: HostPlan, environment: EnvironmentPlan) -> Iterator[StringCommand]:
    """Wheel tags can lie about the C library: only the import shows that the environment works."""
    yield from admitted(plan, environment.prefix)
    yield streamed(
        f"{environment.interpreter} -c 'import {environment.proof}'",
        {"HOME": plan.home, "LC_ALL": "C.UTF-8", **environment.proof_environment},
    )
    caches = (plan.download_environment[name] for name in ("CONDA_PKGS_DIRS", "UV_CACHE_DIR"))
    yield StringCommand(f"rm -rf {' '.join(caches)}")
    yield _stamp(environment.prefix)

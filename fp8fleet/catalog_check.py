"""The gates: what a release needs, held against a platform, an accelerator, a driver and pins.

Pure: the catalogue and the arguments are all that counts. The plan passes through the same gates,
preflight again with the driver that a host really has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from fp8fleet import catalog
from fp8fleet.catalog import Release

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Combination:
    """A line of a site's table of driver, CUDA and engine versions that it has validated."""

    driver: str
    engine: str
    cuda: str | None = None


@dataclass(frozen=True)
class Target:
    """Where a release is to run; None: not known, and not judged."""

    platform: str
    architecture: str = "x86_64"
    python: str | None = None
    accelerator: str | None = None
    driver: str | None = None
    """Version of NVIDIA's driver."""
    pins: tuple[str, ...] = ()
    build: str = "wheel"
    fp8_block: bool = False
    """Whether a block-FP8 checkpoint is served."""
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    """``vllm serve``'s option of that name, or the manifest's name of what is not block FP8."""
    validated: tuple[Combination, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a release and a target."""

    gate: str
    severity: Severity
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}"


Gate = Callable[[str, Release, Target], Iterator[Verdict]]


def is_fp8_block(quantization: str | None) -> bool:
    """Whether a manifest's ``quantization`` names one of the two block-FP8 layouts."""
    return quantization is not None and quantization.endswith("fp8-block")


def check(name: str, target: Target) -> tuple[Verdict, ...]:
    """All that speaks against release ``name`` on ``target``; errors first.

    Args:
        name: a release of the catalogue.
        target: platform and accelerator are names of the catalogue.
    """
    release = catalog.releases()[name]
    verdicts = [verdict for gate in GATES for verdict in gate(name, release, target)]
    return tuple(sorted(verdicts, key=lambda verdict: verdict.severity != "error"))


def fits(name: str, target: Target) -> bool:
    """Whether no gate refuses."""
    return all(verdict.severity != "error" for verdict in check(name, target))


def newest_fitting(distribution: str, target: Target) -> str | None:
    """The newest release of ``distribution`` that no gate refuses."""
    return next((n for n in catalog.newest_first(distribution) if fits(n, target)), None)


def advice(name: str, target: Target) -> str:
    """One line: the newest release that fits, or what would have to change for one to fit."""
    distribution = _distribution_for(name, target)
    found = newest_fitting(distribution, target)
    if found:
        return f"the newest that fits is {found}"
    without = ""
    if any(_kv_cache(name, catalog.releases()[name], target)):  # whatever the release
        without = f"without kv-cache-dtype = {target.kv_cache_dtype!r}"
        target = replace(target, kv_cache_dtype=None)
    for words, easier in [("", target), *_easier(target)]:
        found = newest_fitting(distribution, easier)
        if found:
            change = " and ".join(filter(None, (without, words)))
            return f"nothing fits as it is; {change} it would be {found}"
    return f"nothing in the catalogue fits {target.platform} {target.architecture}"


def not_judged(name: str, target: Target) -> Iterator[str]:
    """What the gates say nothing of, though it matters: it is not told, or not NVIDIA's.

    Args:
        name: a release of the catalogue.
        target: the accelerator is a name of the catalogue, or None.
    """
    nvidia = catalog.releases()[name].cuda is not None and _may_be_nvidia(target)
    if nvidia and not target.driver:
        yield "driver"
    if not nvidia and target.driver:
        yield f"driver {target.driver} (only NVIDIA's is)"
    if not target.accelerator:
        yield "accelerator"


def _distribution_for(name: str, target: Target) -> str:
    """The engine that serves the target's accelerator, whatever was asked for."""
    if target.accelerator:
        vendor = catalog.accelerators()[target.accelerator].vendor
        for release in catalog.releases().values():
            if vendor in release.vendors:
                return release.distribution
    return catalog.releases()[name].distribution


def _easier(target: Target) -> Iterator[tuple[str, Target]]:
    """What an operator could change, the cheapest first."""
    without = f"without {' '.join(target.pins)}"
    floors = [cuda.driver for cuda in catalog.cuda_versions().values()]
    newer = f"with driver {max(floors, key=Version)} or newer"
    if target.pins:
        yield without, replace(target, pins=())
    if target.driver:
        yield newer, replace(target, driver=None)
    if target.driver and target.pins:
        yield f"{newer} and {without}", replace(target, driver=None, pins=())
    if target.python:
        yield "with another Python", replace(target, python=None)
    if _is_fp8(target.quantization) and not target.fp8_block:
        yield "without FP8", replace(target, quantization=None)
    if target.fp8_block:
        yield "with a BF16 checkpoint", replace(target, fp8_block=False)
    if target.build == "wheel":
        words = [newer] if target.driver else []
        words += [without] if target.pins else []
        words.append("built on the host (engine_build = 'source', untested)")
        yield " and ".join(words), replace(target, build="source", driver=None, pins=())


def _error(gate: str, message: str, remedy: str) -> Verdict:
    return Verdict(gate, "error", message, remedy)


def _warning(gate: str, message: str, remedy: str) -> Verdict:
    return Verdict(gate, "warning", message, remedy)


def title(name: str) -> str:
    """A release as messages name it, such as ``vLLM 0.33.0``."""
    release = catalog.releases()[name]
    shown = "vLLM" if release.distribution == "vllm" else release.distribution
    return f"{shown} {catalog.release_version(name)}"


def _python(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    if target.python and not SpecifierSet(release.python).contains(target.python):
        yield _error(
            "python",
            f"engine_python = {target.python!r}: {title(name)} needs Python {release.python}",
            "set a version within that range",
        )


def _wheel(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    """The C library against the wheel's tag, and against what is known of its requirements."""
    if target.build != "wheel":
        return
    glibc = catalog.platforms()[target.platform].glibc
    remedy = "choose another release, or engine_build = 'source' (untested)"
    if target.architecture not in release.architectures:
        has = ", ".join(release.architectures) or "no architecture"
        yield _error(
            "wheel", f"engine_release = {name!r}: has wheels for {has}, not for"
            f" {target.architecture}", remedy,
        )  # fmt: skip
        return
    if Version(glibc) < Version(release.glibc):
        yield _error(
            "wheel", f"engine_release = {name!r}: its wheel needs glibc {release.glibc},"
            f" {target.platform} has {glibc}", remedy,
        )  # fmt: skip
        return
    for trap in release.traps:
        concerns = trap.architecture in (None, target.architecture)
        if concerns and Version(glibc) < Version(trap.glibc):
            yield _error(
                "resolution",
                f"engine_release = {name!r}: does not resolve on {target.platform}"
                f" {target.architecture} (glibc {glibc}): {trap.reason}",
                remedy,
            )
            return


def _source(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    del release
    if target.build == "source":
        yield _warning(
            "source",
            f"engine_build = 'source': nobody has built {title(name)} on a host with fp8fleet",
            "docs/host.md, 'Building from source', says what that needs; try one host first",
        )


def _pins(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    wanted = {"pydantic": release.pydantic, "torch": f"=={release.torch}"}
    wanted[release.distribution] = f"=={catalog.release_version(name)}"
    for constraint in release.constraints:
        requirement = Requirement(constraint)
        wanted[requirement.name] = str(requirement.specifier)
    for pin in target.pins:
        package, _, version = pin.partition("==")
        needed = wanted.get(canonicalize_name(package))
        if needed and not SpecifierSet(needed).contains(version, prereleases=True):
            yield _error(
                "pin",
                f"engine_pins = {pin!r}: {title(name)} needs {package}{needed},"
                " so that nothing resolves",
                "drop the pin, or choose a version in that range",
            )


def _gemma4(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    floor = release.transformers_gemma4
    for pin in target.pins:
        package, _, version = pin.partition("==")
        if not floor or canonicalize_name(package) != "transformers":
            continue
        if not SpecifierSet(floor).contains(version, prereleases=True):
            yield _warning(
                "gemma4",
                f"engine_pins = {pin!r}: Gemma 4 needs transformers{floor} with {title(name)}",
                "drop the pin where Gemma 4 is served",
            )


def _driver(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    if not target.driver or not _may_be_nvidia(target):
        return
    branch = target.driver.split(".")[0]
    ended = catalog.driver_branches().get(branch)
    if ended:
        yield _warning(
            "driver-life",
            f"driver {target.driver}: NVIDIA's branch {branch} ended in {ended.end_of_life}",
            "plan an update to a living branch",
        )
    floor = catalog.cuda_versions()[release.cuda].driver if release.cuda else None
    if floor and Version(target.driver) < Version(floor):
        yield _error(
            "driver",
            f"driver {target.driver}: the CUDA {release.cuda} of {title(name)} needs driver"
            f" {floor} or newer",
            "update the driver, or choose a release for an older CUDA",
        )


def _may_be_nvidia(target: Target) -> bool:
    if target.accelerator is None:
        return True
    return catalog.accelerators()[target.accelerator].vendor == "nvidia"


def _accelerator(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    if target.accelerator:
        vendor = catalog.accelerators()[target.accelerator].vendor
        if vendor not in release.vendors:
            yield _error(
                "accelerator",
                f"accelerator = {target.accelerator!r}: {title(name)} runs on"
                f" {' and '.join(release.vendors)}, not on {vendor}",
                "choose an engine release for that accelerator",
            )


def _fp8_block(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    if not target.fp8_block:
        return
    if not release.fp8_block:
        yield _error(
            "fp8-block",
            f"{title(name)} does not read block-FP8 checkpoints",
            "choose a release that does, or serve a BF16 checkpoint",
        )
        return
    if not target.accelerator:
        return
    accelerator = catalog.accelerators()[target.accelerator]
    if accelerator.fp8_block == "none":
        yield _error(
            "fp8-block",
            f"accelerator = {target.accelerator!r}: cannot serve block-FP8 checkpoints",
            f"serve {accelerator.alternative}",
        )
    elif accelerator.fp8_block == "weight-only":
        yield _warning(
            "fp8-block",
            f"accelerator = {target.accelerator!r}: block-FP8 weights are decompressed when used"
            " (W8A16): memory is saved, arithmetic is not faster",
            "expect the speed of BF16",
        )
    elif accelerator.fp8_block == "amx":
        yield _warning(
            "fp8-block",
            f"accelerator = {target.accelerator!r}: block-FP8 checkpoints need a CPU with AMX",
            "serve a BF16 checkpoint where the CPU lacks it; preflight looks",
        )


def _fp8(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    """FP8 of other layouts, and BF16 checkpoints that are quantized while they are loaded."""
    del name, release
    if target.fp8_block or not target.accelerator or not _is_fp8(target.quantization):
        return
    accelerator = catalog.accelerators()[target.accelerator]
    if accelerator.fp8_block == "none":
        yield _error(
            "fp8",
            f"quantization {target.quantization!r}: {target.accelerator} has no FP8",
            f"serve {accelerator.alternative}, without that option",
        )
    elif accelerator.fp8_block == "weight-only":
        yield _warning(
            "fp8",
            f"quantization {target.quantization!r}: {target.accelerator} decompresses FP8 weights"
            " when they are used (W8A16): memory is saved, arithmetic is not faster",
            "expect the speed of BF16",
        )


def _is_fp8(quantization: str | None) -> bool:
    return quantization is not None and "fp8" in quantization


def _kv_cache(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    del name, release
    dtype = target.kv_cache_dtype
    if dtype is not None and dtype not in catalog.kv_cache_types():
        yield _error(
            "kv-cache",
            f"kv-cache-dtype = {dtype!r}: vLLM has no such type",
            f"leave it out (auto), or write one of {', '.join(catalog.kv_cache_types())}; float16"
            " where the model's own type is that",
        )
    if not dtype or not dtype.startswith("fp8") or not target.accelerator:
        return
    accelerator = catalog.accelerators()[target.accelerator]
    capability = accelerator.compute_capability
    too_old = capability is not None and Version(capability) < Version("8.9")
    if accelerator.vendor == "ascend" or too_old:
        what = f"compute capability {capability}" if too_old else "no FP8"
        yield _error(
            "kv-cache",
            f"kv-cache-dtype = {dtype!r}: needs compute capability 8.9,"
            f" {target.accelerator} has {what}",
            "leave it out: the cache then has the model's type",
        )


def _validated(name: str, release: Release, target: Target) -> Iterator[Verdict]:
    """A site's own table; it only warns, since nobody outside the site can verify it."""
    if not target.validated:
        return
    for line in target.validated:
        if line.engine != name or (line.cuda and line.cuda != release.cuda):
            continue
        if target.driver is None or line.driver == target.driver:
            return
    driver = f"driver {target.driver} and " if target.driver else ""
    yield _warning(
        "validated",
        f"validated_combinations has no line for {driver}{title(name)}"
        f" (CUDA {release.cuda or 'none'})",
        "validate it and add the line, or choose a combination of the table",
    )


GATES: tuple[Gate, ...] = (
    _python,
    _wheel,
    _source,
    _accelerator,
    _driver,
    _pins,
    _gemma4,
    _fp8_block,
    _fp8,
    _kv_cache,
    _validated,
)


def is_driver_version(text: str) -> bool:
    """Whether ``text`` is a version as NVIDIA's drivers have them, such as 580.95.05."""
    return re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*", text) is not None


def is_version(text: str) -> bool:
    """Whether ``text`` is a version that can be compared."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def serves_cann(version: str, needed: str) -> bool:
    """Whether a CANN version is the needed release or a patch of it; a preview of it is not."""
    return re.fullmatch(rf"{re.escape(needed)}(\.[0-9]+)*", version) is not None

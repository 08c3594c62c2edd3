"""Drivers that a host shall get: only what the inventory asks for."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from fp8fleet import catalog
from fp8fleet.catalog import Platform
from fp8fleet.catalog_check import check, is_version, serves_cann
from fp8fleet.errors import OperatorError
from fp8fleet.plan import DriverPlan, DriversPlan, PlannedFile
from fp8fleet.planner.files import planned_file
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import DriverSpec, HostSpec

PIN_FILE = "/etc/apt/preferences.d/90fp8fleet-driver"


def drivers_plan(
    spec: HostSpec, platform: Platform, own: Serving | None
) -> tuple[DriversPlan, list[PlannedFile], tuple[str, ...]]:
    """The drivers of a host, the files for them, and what the operator should know of them.

    Raises:
        OperatorError: a driver for other accelerators, or one that the engine cannot use.
    """
    asked = {driver.name: driver for driver in spec.drivers}
    known = [name for name in catalog.installers() if name in asked]
    items = tuple(_driver_plan(spec, platform, asked[name]) for name in known)
    plan = DriversPlan(
        items=items,
        reboot=spec.driver_reboot,
        downloads=f"{spec.install_directory}/downloads",
    )
    return plan, _pin(platform, items), _judged(spec, own, asked)


def _driver_plan(spec: HostSpec, platform: Platform, driver: DriverSpec) -> DriverPlan:
    entry = catalog.installers()[driver.name]
    where = f"drivers: {driver.name} {driver.version}"
    if spec.vendor != entry.vendor:
        raise OperatorError(
            f"{where}: is for {entry.vendor} accelerators, the host's is {spec.accelerator!r}"
        )
    if driver.source != "packages":
        if entry.oldest and not _at_least(driver.version, entry.oldest):
            raise OperatorError(
                f"{where}: its installer lacks options that fp8fleet needs: {entry.oldest} or"
                " newer, or source = 'packages'"
            )
        needs = entry.needs.get(platform.family, ())
        return DriverPlan(driver.name, driver.version, (), driver.source, driver.sha256, needs)
    names = driver.packages or entry.packages.get(platform.family, ())
    if not names:
        raise OperatorError(
            f"{where}: the catalogue has no packages for it with {platform.family}: set source to"
            " the URL of its installer, or packages to your repository's names"
        )
    joint = "={version}-*" if platform.family == "apt" else "-{version}"
    branch = driver.version.split(".")[0]
    packages = tuple(
        name.format(branch=branch) + joint.format(version=driver.version) for name in names
    )
    return DriverPlan(driver.name, driver.version, packages, None, None)


def _at_least(version: str, oldest: str) -> bool:
    return is_version(version) and Version(version) >= Version(oldest)


def _pin(platform: Platform, items: tuple[DriverPlan, ...]) -> list[PlannedFile]:
    """Without it apt would take the newest of the packages that those asked for depend on."""
    pinned = [item for item in items if item.packages]
    if platform.family != "apt" or not pinned:
        return []
    return [planned_file("driver", PIN_FILE, {"version": pinned[0].version})]


def _judged(spec: HostSpec, own: Serving | None, asked: dict[str, DriverSpec]) -> tuple[str, ...]:
    """The catalogue's gates with the driver that the host will have."""
    notes: list[str] = []
    if own is None or spec.engine_release is None:
        return ()
    if driver := asked.get("nvidia"):
        for verdict in check(spec.engine_release, replace(own.target, driver=driver.version)):
            if verdict.gate not in ("driver", "driver-life", "validated"):
                continue
            if verdict.severity == "error":
                raise OperatorError(f"drivers: nvidia: {verdict}")
            notes.append(str(verdict))
    cann, needed = asked.get("cann-toolkit"), own.release.cann
    if cann and needed and not serves_cann(cann.version, needed):
        raise OperatorError(
            f"drivers: cann-toolkit {cann.version}: engine_release = {spec.engine_release!r} needs"
            f" {needed}"
        )
    return tuple(notes)

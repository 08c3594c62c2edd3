"""Findings about the driver: its tool, kernel modules, version, fabric manager, CANN."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fp8fleet import catalog
from fp8fleet.catalog_check import check, is_version, serves_cann
from fp8fleet.preflight.findings import (
    Case,
    Check,
    Finding,
    planned_accelerator,
    some,
)


def _driver(case: Case) -> Iterator[Finding]:
    planned = planned_accelerator(case)
    if planned is None:
        return
    vendor = planned[1].vendor
    facts = case.facts.accelerators
    state, tool = (
        (facts.nvidia_tool, "nvidia-smi") if vendor == "nvidia" else (facts.npu_tool, "npu-smi")
    )
    if state == "missing":
        yield Finding(
            "driver-missing",
            f"no {tool}",
            _driver_needed(case),
            "install the driver from the site's repository, then run the deploy again",
        )
    elif state == "hung":
        yield Finding(
            "driver-hung",
            f"{tool} does not end",
            f"an answer from {tool}",
            "look at dmesg for Xid or driver errors; reset the device or reboot the host",
        )
    elif state != "ok":
        module = f" (module in the kernel: {facts.module_version})" if facts.module_version else ""
        yield Finding(
            "driver-broken",
            f"{tool}: {state}{module}",
            "a driver whose module and libraries have one version",
            "reboot after a driver update; otherwise install the driver again",
        )
    if vendor == "nvidia":
        yield from _modules(case)
    else:
        yield from _cann(case)


def _driver_needed(case: Case) -> str:
    release = catalog.releases().get(case.needs.release or "")
    if release and release.cuda:
        floor = catalog.cuda_versions()[release.cuda].driver
        return f"NVIDIA's driver {floor} or newer (CUDA {release.cuda})"
    return "the accelerator's driver"


def _modules(case: Case) -> Iterator[Finding]:
    facts = case.facts.accelerators
    running = case.facts.system.kernel
    if "nouveau" in facts.modules:
        yield Finding(
            "nouveau-loaded",
            "the kernel module nouveau is loaded",
            "NVIDIA's own module",
            "let the host role switch it off (--data ignore=driver-missing where that stops the"
            " run), reboot, install NVIDIA's driver",
        )
    have = [kernel for kernel, module in facts.kernels.items() if module]
    if have and "nvidia" not in facts.modules and not facts.kernels.get(running, True):
        yield Finding(
            "driver-module",
            f"kernel {running} runs, NVIDIA's module is there for {some(have)}",
            "a module for the running kernel",
            "install the kernel's headers and `dkms autoinstall`, or boot the older kernel",
        )
    newer = [
        kernel
        for kernel, module in facts.kernels.items()
        if not module and facts.kernels.get(running) and _kernel_key(kernel) > _kernel_key(running)
    ]
    if newer:
        yield Finding(
            "driver-next-kernel",
            f"kernel {some(newer)} is installed without NVIDIA's module",
            "a module for every kernel that may boot",
            "install its headers and `dkms autoinstall` before the next reboot; hold the kernel",
        )


def _kernel_key(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _cann(case: Case) -> Iterator[Finding]:
    release = catalog.releases().get(case.needs.release or "")
    if release is None or release.cann is None:
        return
    have = case.facts.accelerators.cann
    if have is None or not serves_cann(have, release.cann):
        yield Finding(
            "cann-missing",
            f"CANN {have}" if have else "no CANN toolkit",
            f"CANN {release.cann}",
            "install that version from the site's repository",
        )


_GATE_CODES = {
    "driver": "driver-old",
    "driver-life": "driver-ended",
    "validated": "driver-unvalidated",
}


def _driver_gates(case: Case) -> Iterator[Finding]:
    """The catalogue's gates again, with the driver that the host has."""
    planned = planned_accelerator(case)
    if planned is None or planned[1].vendor != "nvidia" or case.needs.release is None:
        return
    driver = _loaded(case)
    if not driver or not is_version(driver):
        return
    for verdict in check(case.needs.release, replace(case.needs.target, driver=driver)):
        code = _GATE_CODES.get(verdict.gate)
        if code == "driver-old":
            yield Finding(code, f"driver {driver}", _driver_needed(case), verdict.remedy)
        elif code:
            yield Finding(code, f"driver {driver}", verdict.message, verdict.remedy)


def _fabric(case: Case) -> Iterator[Finding]:
    facts = case.facts.accelerators
    if planned_accelerator(case) is None or not any(device.is_switch for device in facts.pci):
        return
    if not facts.fabric_active:
        have = "is not active" if facts.fabric_loaded else "is not installed"
        yield Finding(
            "fabric-manager-down",
            f"NVSwitches on the bus, nvidia-fabricmanager {have}",
            "the fabric manager, running",
            "install it in the driver's version; systemctl enable --now nvidia-fabricmanager",
        )
    driver, driver_planned = _version(case, "nvidia", _loaded(case))
    manager, manager_planned = _version(case, "fabric-manager", facts.fabric_version)
    if driver and manager and driver != manager:
        yield Finding(
            "fabric-manager-version",
            f"fabric manager {manager}{manager_planned}, driver {driver}{driver_planned}",
            "one version of both",
            "set both in drivers, to one version"
            if manager_planned or driver_planned
            else f"install fabric manager {driver}, and hold both packages",
        )


def _version(case: Case, name: str, have: str | None) -> tuple[str | None, str]:
    """What a driver's version will be, and a remark where that is the run's doing."""
    planned = case.drivers.get(name)
    return (planned, " (planned)") if planned else (have, "")


def _loaded(case: Case) -> str | None:
    """NVIDIA's driver on the host, as a device shows it or else as the kernel has it."""
    facts = case.facts.accelerators
    return next((d.driver for d in facts.devices if d.driver), facts.module_version)


_MENDED = {
    "nvidia": (
        *("driver-missing", "driver-broken", "driver-module", "driver-old", "driver-ended"),
        *("driver-unvalidated", "nouveau-loaded"),
    ),
    "fabric-manager": ("fabric-manager-down",),
    "ascend-driver": ("driver-missing", "driver-broken"),
    "cann-toolkit": ("cann-missing",),
}


def mended(drivers: Iterable[str]) -> frozenset[str]:
    """Codes of what the run itself sets right: it installs these drivers, then compares again."""
    return frozenset(code for name in drivers for code in _MENDED.get(name, ()))


CHECKS: tuple[Check, ...] = (_driver, _driver_gates, _fabric)

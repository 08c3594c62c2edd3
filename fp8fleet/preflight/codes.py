"""The codes of preflight's findings: severity and meaning; docs/preflight.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Code:
    """What a finding's code stands for; an error stops the host, a warning is shown."""

    severity: Severity
    meaning: str


def _error(meaning: str) -> Code:
    return Code("error", meaning)


def _warning(meaning: str) -> Code:
    return Code("warning", meaning)


CODES: dict[str, Code] = {
    # The probe itself
    "probe-failed": _error("The probe gave no whole answer: the host's shell or a driver hangs."),
    "probe-incomplete": _warning(
        "A part of the probe ran into its time limit; what it asks for was not judged."
    ),
    "unread": _warning(
        "A part of the probe's answer cannot be read; what it asks for was not judged."
    ),
    "no-root": _error(
        "Commands cannot run as root: no sudo, or it wants a password that is not set."
    ),
    # Operating system
    "os-unknown": _error("The distribution is not in the catalogue."),
    "os-mismatch": _error(
        "The host runs another platform than the inventory says (Kylin desktop for server, too)."
    ),
    "arch-mismatch": _error("The processor architecture differs from the inventory's."),
    "glibc-old": _error("The C library is older than the engine's wheel needs."),
    "glibc-differs": _warning("The C library differs from the catalogue's for this platform."),
    "init-missing": _error("systemd is not the init process: servers are systemd units."),
    "tool-missing": _error("A base utility that every role uses is missing."),
    "container": _warning(
        "The host is a container: kernel parameters and modules belong to the machine below."
    ),
    "locale-not-utf8": _warning(
        "The system's locale is not UTF-8; fp8fleet sets its own, other tools may stumble."
    ),
    "clock-wrong": _error(
        "The clock is off by more than an hour: certificates and signatures fail."
    ),
    "clock-skew": _warning("The clock is off by more than ten seconds."),
    "clock-unsynced": _warning(
        "The host is a container, and nothing keeps the clock of the machine below in time."
    ),
    "reboot-pending": _warning("An update waits for a reboot."),
    "user-taken": _error("The service user is an account or a group that fp8fleet did not make."),
    # Packages
    "packages-broken": _error(
        "The package database is broken or locked: half-installed packages, dpkg or rpm that cannot"
        " read it or hangs."
    ),
    "packages-unfinished": _warning(
        "Packages wait for their configuration; the host role finishes that."
    ),
    "packages-busy": _warning("Another package manager is at work; the run waits for it."),
    "cmake-old": _error(
        "A source build is planned, the host's cmake is too old or missing, and the inventory names"
        " no archive."
    ),
    "upgrades-unattended": _warning(
        "Unattended upgrades may replace the driver or kernel under running servers."
    ),
    # Processor, memory, disk
    "cpu-lacks-amx": _error("A block-FP8 checkpoint on a CPU without AMX."),
    "cpu-lacks-avx2": _error("vLLM's CPU build needs AVX2."),
    "memory-short": _warning(
        "The host has less memory than the model has bytes: loading will be slow or fail."
    ),
    "disk-short": _error(
        "Too little disk is free for environments and model beside what is there, or hardly any."
    ),
    "disk-unknown": _error("A path that has to be written to: its file system does not answer."),
    "disk-read-only": _error("A file system that has to be written to is mounted read-only."),
    # Accelerators
    "gpu-missing": _error("Fewer accelerators on the PCI bus than the plan uses."),
    "gpu-fewer": _error("Fewer accelerators on the PCI bus than the inventory declares."),
    "gpu-other": _error("The accelerators are not those that the inventory names."),
    "gpu-unknown": _warning("An accelerator's PCI id is not in the catalogue."),
    "gpu-lost": _error("The driver shows fewer devices than the PCI bus has: one has fallen off."),
    "gpu-ecc-errors": _error(
        "A device counts uncorrected memory errors, or a memory row waits for repair."
    ),
    "gpu-ecc-off": _warning("Error correction of a device's memory is off."),
    "gpu-mig": _error("A device is split by MIG: the server would see a slice."),
    "gpu-busy": _error(
        "Another program holds so much device memory that the server would not start."
    ),
    "gpu-shared": _warning("Another program uses a device of the plan."),
    "gpu-unhealthy": _error(
        "The vendor's tool reports a device as not healthy, or an error in place of its values."
    ),
    "gpu-kernel-errors": _warning("The kernel's log has GPU errors (Xid) since the boot."),
    "persistence-off": _warning(
        "Persistence mode is off: the driver unloads devices that nobody uses."
    ),
    # Driver
    "driver-missing": _error("The accelerator's driver or its tool is not installed."),
    "driver-broken": _error(
        "The driver's tool prints an error, such as a driver/library mismatch, or no device."
    ),
    "driver-hung": _error("The driver's tool does not end: a device or the driver hangs."),
    "driver-module": _error(
        "The running kernel has no NVIDIA module: a kernel upgrade left it behind."
    ),
    "driver-next-kernel": _warning(
        "A newer installed kernel has no NVIDIA module: the next reboot loses the GPUs."
    ),
    "driver-old": _error("The driver is older than the engine's CUDA needs."),
    "driver-ended": _warning("The driver's branch gets no fixes any more."),
    "driver-unvalidated": _warning("Driver, CUDA and engine are not in the site's own table."),
    "nouveau-loaded": _warning(
        "The kernel's nouveau driver holds the GPUs; the host role keeps it off after a reboot."
    ),
    "fabric-manager-down": _error(
        "The board has NVSwitches and the fabric manager does not run: CUDA does not start."
    ),
    "fabric-manager-version": _error(
        "The fabric manager's version is not the driver's, as they are or as drivers asks for them."
    ),
    "cann-missing": _error("Huawei's CANN is not installed, or its version is not the engine's."),
    "nvlink-missing": _warning("Devices that share a model are not linked directly."),
    "topology-differs": _error(
        "Links or CPUs of the devices are not those that the inventory declares."
    ),
    "topology-unread": _warning(
        "The host prints no link matrix, so that the declared one was not compared."
    ),
    "numa-split": _warning("Devices that share a model belong to several NUMA nodes."),
    # Network and security
    "port-taken": _error("Another program listens on a port of the plan."),
    "firewall-other": _error("Another firewall is active than the inventory asks for."),
    "firewall-cuts": _error(
        "The firewall will be switched on, and something listens that no rule lets in."
    ),
    "firewall-open": _warning(
        "A port that is for gateways, other hosts or some clients only is open to everybody, or"
        " the firewall lets in what no rule names."
    ),
    "firewall-ipv6": _error("The plan lets in IPv6 addresses, and ufw on the host takes none."),
    "firewall-closed": _warning(
        "A firewall runs, fp8fleet does not manage it, and a port of the plan is not open."
    ),
    "proxy-differs": _warning("The host is set to an HTTP proxy that the inventory does not name."),
    "selinux-disabled": _error("The inventory asks for SELinux and it is off: a reboot is needed."),
    "selinux-off": _warning("SELinux is disabled on a distribution that has it."),
    "selinux-permissive": _warning("SELinux only logs, now or as the inventory has it."),
    "selinux-pending": _warning("SELinux's mode now and its mode after a reboot differ."),
    "kysec-exec": _warning("KySec controls what may be executed: new programs may be denied."),
}

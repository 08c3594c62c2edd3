"""What checks look at and what they say: a case, findings, a judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fp8fleet import catalog
from fp8fleet.plan import CmakePlan, FirewallPlan, Requirements, SelinuxPlan
from fp8fleet.preflight.codes import CODES, Severity
from fp8fleet.preflight.facts import HostFacts, PciDevice


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    code: str
    found: str
    needed: str
    remedy: str

    @property
    def severity(self) -> Severity:
        """``error`` stops the host, ``warning`` is shown."""
        return CODES[self.code].severity


@dataclass(frozen=True)
class Judgement:
    """What a probe says of a host; ``facts`` is None where it gave no whole answer."""

    facts: HostFacts | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Case:
    """What every check looks at."""

    needs: Requirements
    platform: str
    selinux: SelinuxPlan | None
    facts: HostFacts
    asked: float
    """This machine's clock before the probe, seconds since the epoch."""
    now: float
    """The same, after it."""
    firewall: FirewallPlan
    cmake: CmakePlan | None
    """Of a source build, where no package of the plan brings cmake."""
    drivers: dict[str, str]
    """Versions of the drivers that the run installs, by their names in the catalogue."""


Check = Callable[[Case], Iterator[Finding]]
"""Says what is not as it should be; of one subject."""


def some(names: Iterable[str], most: int = 5) -> str:
    """The first of ``names``, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def human_bytes(number: int) -> str:
    """A number of bytes for people."""
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def planned_accelerator(case: Case) -> tuple[str, catalog.Accelerator] | None:
    """Name and entry of the accelerator of the plan, where it is a device."""
    name = case.needs.target.accelerator
    if name is None or name == "cpu":
        return None
    return name, catalog.accelerators()[name]


def planned_indices(needs: Requirements) -> list[int]:
    """The devices of all servers, in order."""
    return sorted({index for devices in needs.devices for index in devices.indices})


_PCI_VENDORS = {"nvidia": "10de", "ascend": "19e5"}


def on_bus(case: Case, vendor: str) -> list[PciDevice]:
    """The vendor's accelerators on the PCI bus, switches and other functions left out."""
    prefix = f"{_PCI_VENDORS[vendor]}:"
    pci = case.facts.accelerators.pci
    return [
        device
        for device in pci
        if device.id.startswith(prefix)
        and not device.is_switch
        and (vendor != "ascend" or device.pci_class.startswith("12"))
    ]


def numbers(values: Iterable[int]) -> str:
    """Numbers, separated by commas."""
    return ",".join(map(str, values))


def is_ours(unit: str) -> bool:
    """Whether a systemd unit is one of our servers."""
    return unit.startswith("fp8fleet-")

"""The compound fact: a probe's answer, read into one object; nothing is judged here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

from fp8fleet import catalog
from fp8fleet.accounts import Account, group_id, passwd_account
from fp8fleet.errors import OperatorError
from fp8fleet.firewalls import (
    OPEN_TARGET,
    Firewall,
    read_zones,
    service_ports,
    ssh_ports,
    ufw_rule,
    zones_in_use,
)
from fp8fleet.topology import Topology, parse_topology

TIMED_OUT = (124, 137)
"""Exit codes of a part that ran into its limit."""
MISSING = 127
"""Exit code of a part whose tool the host lacks."""


@dataclass(frozen=True)
class Part:
    """A section of the probe's answer."""

    lines: tuple[str, ...]
    code: int

    @property
    def text(self) -> str:
        """All lines, stripped."""
        return "\n".join(self.lines).strip()

    @property
    def first(self) -> str:
        """The first line that has something."""
        return next((line.strip() for line in self.lines if line.strip()), "")


@dataclass(frozen=True)
class User:
    """Who the commands run as; ``sudo``: None not asked (root), else whether it works unasked."""

    uid: int
    name: str
    sudo: bool | None
    sudo_missing: bool = False


@dataclass(frozen=True)
class System:
    """The distribution and what boots it."""

    os_id: str
    version_id: str
    id_like: str
    name: str
    service_pack: str | None
    """Of Kylin: SP1, SP2, SP3, ..., from .productinfo, else the code name of the version."""
    kernel: str
    architecture: str
    glibc: str | None
    init: str
    container: str | None
    locale: str | None
    """LANG or LC_ALL of the system's locale file."""
    missing_tools: tuple[str, ...]
    reboot_pending: bool
    earlier_run: bool
    """Whether fp8fleet worked on this host since its boot."""


@dataclass(frozen=True)
class Clock:
    """Seconds since the epoch (UTC) at the probe, and who keeps them right."""

    time: int | None
    synchronized: bool | None
    services: tuple[str, ...]


@dataclass(frozen=True)
class Hardware:
    """Processor and memory."""

    processors: int
    model: str
    flags: frozenset[str]
    memory: int
    """Bytes."""
    memory_available: int
    swap: int
    numa: dict[int, str]
    """CPU list by node."""


@dataclass(frozen=True)
class Disk:
    """The file system under a path, which need not exist yet."""

    path: str
    free: int
    size: int
    mount: str
    read_only: bool


@dataclass(frozen=True)
class Packages:
    """The package database and what changes it."""

    family: str | None
    broken: tuple[str, ...]
    """Packages that need to be installed again."""
    unfinished: tuple[str, ...]
    """Packages that wait for their configuration."""
    error: str | None
    """What the package manager says in place of an answer."""
    managers: tuple[str, ...]
    """Package managers at work, with their process ids."""
    unattended: tuple[str, ...]
    """What upgrades by itself."""
    held: tuple[str, ...]
    drivers: tuple[str, ...]
    """Installed packages of the driver."""


@dataclass(frozen=True)
class PciDevice:
    """An accelerator or a switch on the PCI bus."""

    slot: str
    id: str
    """``vendor:device``, hexadecimal."""
    pci_class: str
    numa: int
    driver: str

    @property
    def is_switch(self) -> bool:
        """Whether it is an NVSwitch."""
        return self.pci_class.startswith("0680")

    @property
    def is_display(self) -> bool:
        """Whether a screen can be attached to it: a card beside those that compute."""
        return self.pci_class.startswith("0300")


@dataclass(frozen=True)
class Device:
    """A device as the vendor's tool shows it."""

    index: int
    uuid: str
    name: str
    slot: str
    memory_mib: int | None
    used_mib: int | None
    driver: str
    compute_capability: str | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    health: str | None = None


@dataclass(frozen=True)
class Holder:
    """A process that holds device memory."""

    uuid: str
    pid: int
    memory_mib: int | None
    program: str
    unit: str


@dataclass(frozen=True)
class Accelerators:
    """Everything about GPUs and NPUs."""

    pci: tuple[PciDevice, ...]
    modules: tuple[str, ...]
    """Loaded kernel modules of drivers."""
    module_version: str | None
    """NVIDIA's module in the running kernel."""
    kernels: dict[str, bool]
    """Installed kernels, and whether each has an NVIDIA module."""
    nvidia_tool: str
    """``missing``, ``hung``, ``ok``, or what nvidia-smi says in place of an answer."""
    npu_tool: str
    """The same, of npu-smi."""
    devices: tuple[Device, ...]
    holders: tuple[Holder, ...]
    cuda: str | None
    """Newest CUDA that the driver serves."""
    topology: Topology | None
    """The links between the devices; None: not known."""
    matrix: tuple[str, ...]
    """What it was read from, as the tool printed it."""
    device_numa: dict[int, int]
    fabric_loaded: bool
    fabric_active: bool
    fabric_version: str | None
    ascend_driver: str | None
    cann: str | None
    kernel_errors: tuple[str, ...]
    bad_rows: tuple[str, ...]
    """Slots of devices with memory rows that wait for repair or could not be repaired."""

    @property
    def links(self) -> tuple[tuple[str, ...], ...]:
        """Between devices, by index: NV12, SYS, HCCS, ...; empty: not known."""
        return self.topology.links if self.topology else ()


@dataclass(frozen=True)
class Listener:
    """Who listens on a port of the plan, or on any that is not on loopback alone."""

    port: int
    pid: int | None
    program: str
    unit: str


@dataclass(frozen=True)
class Security:
    """SELinux, KySec, firewalls."""

    selinux: str
    """``enforcing``, ``permissive``, ``disabled`` or ``absent``."""
    selinux_configured: str | None
    selinux_kernel: tuple[str, ...]
    """The kernel's arguments about SELinux, such as ``enforcing=0``, stronger than the above."""
    kysec: bool
    kysec_exec: str | None
    """KySec's exec control, such as ``off`` or ``warning``; None: no KySec."""
    firewalls: tuple[Firewall, ...]
    """Those that are installed, on or off."""
    ssh_ports: tuple[int, ...]
    """Ports on which SSH comes in."""

    @property
    def firewall(self) -> Firewall | None:
        """The active one."""
        return next((one for one in self.firewalls if one.active), None)


@dataclass(frozen=True)
class HostFacts:
    """One compound fact of a host."""

    user: User
    account: Account | None
    """Of the planned service user; None: there is none."""
    account_group: str | None
    """Id of the group of its name."""
    system: System
    clock: Clock
    hardware: Hardware
    disks: tuple[Disk, ...]
    present: frozenset[str]
    """Those of the asked stamps that exist."""
    sizes: dict[str, int]
    """Bytes by directory."""
    packages: Packages
    cmake: str | None
    """Version of the host's own; None: there is none that runs."""
    accelerators: Accelerators
    listeners: tuple[Listener, ...]
    security: Security
    proxies: tuple[str, ...]
    timed_out: tuple[str, ...]
    """Names of the probe's parts that ran into their limit."""
    unread: dict[str, str]
    """The first line of a part that is not what the part prints; empty where it says too little."""


def probe_script() -> str:
    """The probe for the host's shell, without comments and blank lines."""
    text = (resources.files(__package__) / "probe.sh").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return "\n".join(lines)


def probe_arguments(
    *,
    full: bool,
    need_root: bool,
    paths: Iterable[str] = (),
    stamps: Iterable[str] = (),
    sizes: Iterable[str] = (),
    ports: Iterable[int] = (),
    account: str | None = None,
) -> list[str]:
    """The probe's arguments.

    Args:
        full: also what takes longer: the kernel's GPU errors, repaired memory rows, sizes.
        need_root: only who the user is, where that is not root.
        paths: directories whose file systems matter; they need not exist.
        stamps: files whose existence matters.
        sizes: directories whose size matters.
        ports: TCP ports whose listeners matter.
        account: the user that shall run the servers.
    """
    arguments = [f"mode={'full' if full else 'fast'}", f"root={int(need_root)}"]
    arguments += [f"path={path}" for path in paths]
    arguments += [f"stamp={path}" for path in stamps]
    arguments += [f"size={path}" for path in sizes]
    arguments += [f"port={port}" for port in ports]
    arguments += [f"clock={unit}" for unit in catalog.clock_units()]
    return [*arguments, f"account={account}"] if account else arguments


_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[@-~]|.)?")


def parts_of(lines: Iterable[str]) -> dict[str, Part] | None:
    """The sections of a probe's answer by name, or None where its end is missing."""
    parts: dict[str, Part] = {}
    name, held, code = "", list[str](), 0
    for raw in lines:
        line = _ESCAPE.sub("", raw.rstrip("\n"))
        if line.startswith("@"):
            if name:
                parts[name] = Part(tuple(held), code)
            name, held, code = line[1:].strip(), [], 0
        elif match := re.fullmatch(r" =(\d{1,9})", line):
            code = int(match[1])
        elif name:
            held.append(line[1:])
    return parts if name == "end" else None


def user_of(parts: Mapping[str, Part]) -> User:
    """Who the probe ran as."""
    lines = [line for line in _part(parts, "user").lines if line]
    sudo = next((line[5:].strip() for line in lines if line.startswith("sudo ")), None)
    uid = int(lines[0]) if lines and re.fullmatch(r"\d{1,10}", lines[0]) else -1
    name = lines[1] if len(lines) > 1 else "?"
    return User(uid, name, None if sudo is None else sudo == "0", sudo == "missing")


def read_facts(parts: Mapping[str, Part]) -> HostFacts:
    """Read a whole probe.

    Args:
        parts: the sections, from `parts_of`; a missing one counts as empty.
    """
    parts, unread = _readable(parts)
    gpus, odd = _gpus(_part(parts, "smi"))
    if odd:
        unread["smi"] = odd
    return HostFacts(
        user=user_of(parts),
        account=passwd_account(_after(parts, "account", "user")),
        account_group=group_id(_after(parts, "account", "group")),
        system=_system(parts),
        clock=_clock(parts),
        hardware=_hardware(parts),
        disks=tuple(map(_disk, _rows(parts, "disk"))),
        present=frozenset(line for line in _part(parts, "stamps").lines if line),
        sizes={row[1]: int(row[0]) * 1024 for row in _rows(parts, "sizes")},
        packages=_packages(parts),
        cmake=_cmake(_part(parts, "cmake")),
        accelerators=_accelerators(parts, gpus),
        listeners=tuple(map(_listener, _part(parts, "ports").lines)),
        security=_security(parts),
        proxies=tuple(line.strip() for line in _part(parts, "proxy").lines if line.strip()),
        timed_out=tuple(name for name, part in parts.items() if part.code in TIMED_OUT),
        unread=unread,
    )


_LINES = {
    "time": r"-?\d{1,15}",
    "kernel": r"\S+",
    "tools": r"[a-z][a-z0-9]{0,20}",
    "cmake": r".*version \d+(\.\d+)+.*",
    "reboot": r"/\S+",
    "cpu": r"\d{1,9}|(model name|Model Name|CPU part|flags|Features)\s*:.*",
    "memory": r"\w+:\s+\d{1,15} kB",
    "numa": r"\d{1,9}( \S+)?",
    "disk": r"/\S* \d{1,15} \d{1,15} /\S* \S+",
    "stamps": r"/\S+",
    "sizes": r"\d{1,15}\s+/\S+",
    "packages": r"family (apt|dnf)|journal dpkg|(ok|reinstreq) [a-z-]+ \S+",
    "managers": r"\S+ \d{1,10}",
    "pci": r"\S+ 0x[0-9a-f]+ 0x[0-9a-f]+ 0x[0-9a-f]+ -?\d{1,9}( \S+)?",
    "modules": r"loaded \S+|version .*|kernel \S+( nvidia)?",
    "ports": r"\d{1,5} (-|\d{1,10}) (-|/\S*) .+",
}
"""What a line of a part looks like. All else, such as a tool's message, is set aside and told."""

_LEAST = {"time": 1, "kernel": 3, "cpu": 1, "memory": 1}
"""Lines without which a part says nothing."""


def _readable(parts: Mapping[str, Part]) -> tuple[dict[str, Part], dict[str, str]]:
    """The parts with the lines that can be read, and what cannot be, by part."""
    kept, unread = dict(parts), dict[str, str]()
    for name, pattern in _LINES.items():
        part = parts.get(name)
        if part is None or (name == "packages" and part.code):  # then it says why
            continue
        lines = [line.strip() for line in part.lines if line.strip()]
        good = tuple(line for line in lines if re.fullmatch(pattern, line))
        kept[name] = Part(good, part.code)
        if part.code not in TIMED_OUT and len(good) < max(len(lines), _LEAST.get(name, 0)):
            unread[name] = next((line for line in lines if line not in good), "")
    return kept, unread


_EMPTY = Part((), MISSING)
T = TypeVar("T")


def _part(parts: Mapping[str, Part], name: str) -> Part:
    return parts.get(name, _EMPTY)


def _rows(parts: Mapping[str, Part], name: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in _part(parts, name).lines]


def _after(parts: Mapping[str, Part], name: str, label: str) -> list[str]:
    """The rest of each line that begins with ``label`` and a space."""
    lines = _part(parts, name).lines
    return [line[len(label) + 1 :].strip() for line in lines if line.startswith(f"{label} ")]


def _one(values: Sequence[T]) -> T | None:
    return values[0] if values else None


def _settings(part: Part) -> dict[str, str]:
    """``KEY=value`` lines, quotes removed."""
    pairs = (line.partition("=") for line in part.lines if "=" in line)
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def _service_pack(product: str, version: str) -> str | None:
    """Kylin's service pack; 2403 has the code name Halberd and calls itself SP3 in .productinfo."""
    names = catalog.platforms()["kylin-v10"].code_names
    named = next((pack for n, pack in names.items() if f"({n})" in f"{product} {version}"), None)
    told = re.search(r"\((SP\d[\w-]*)\)", product)
    if told and not (named and named.startswith(told[1])):
        return told[1]
    return named


def _system(parts: Mapping[str, Part]) -> System:
    release = _settings(_part(parts, "os"))
    kernel = [line.strip() for line in _part(parts, "kernel").lines if line.strip()]
    libc = re.search(r"(?:glibc|GLIBC|libc\)).*?(\d+\.\d+)", _part(parts, "libc").text)
    init = [line.strip() for line in _part(parts, "init").lines if line.strip()]
    locale = _settings(_part(parts, "locale"))
    return System(
        os_id=release.get("ID", ""),
        version_id=release.get("VERSION_ID", ""),
        id_like=release.get("ID_LIKE", ""),
        name=release.get("PRETTY_NAME") or release.get("NAME", ""),
        service_pack=_service_pack(_part(parts, "product").text, release.get("VERSION", "")),
        kernel=kernel[1] if len(kernel) > 1 else "",
        architecture=kernel[2] if len(kernel) > 2 else "",
        glibc=libc[1] if libc else None,
        init=init[0] if init else "",
        container=_one(init[1:]),
        locale=locale.get("LC_ALL") or locale.get("LANG") or None,
        missing_tools=tuple(_part(parts, "tools").text.split()),
        reboot_pending=bool(_part(parts, "reboot").text),
        earlier_run=_part(parts, "earlier").text == "yes",
    )


def _cmake(part: Part) -> str | None:
    told = re.search(r"\bversion (\d+(?:\.\d+)+)", part.first)
    return told[1] if told else None


def _clock(parts: Mapping[str, Part]) -> Clock:
    now = _part(parts, "time").first
    told = _settings(_part(parts, "clock")).get("NTPSynchronized")
    return Clock(
        time=int(now) if now else None,
        synchronized=None if told is None else told == "yes",
        services=tuple(_after(parts, "clock", "service")),
    )


def _hardware(parts: Mapping[str, Part]) -> Hardware:
    cpu = _part(parts, "cpu")
    named = {
        key.strip().lower(): value.strip()
        for key, _, value in (line.partition(":") for line in cpu.lines)
    }
    memory = {row[0].rstrip(":"): int(row[1]) * 1024 for row in _rows(parts, "memory")}
    return Hardware(
        processors=int(cpu.first) if cpu.first.isdigit() else 0,
        model=named.get("model name") or named.get("cpu part", ""),
        flags=frozenset((named.get("flags") or named.get("features", "")).split()),
        memory=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        swap=memory.get("SwapTotal", 0),
        numa={int(row[0]): row[1] for row in _rows(parts, "numa") if len(row) > 1},
    )


def _disk(row: list[str]) -> Disk:
    path, free, size, mount, options = row
    mount = mount.replace("\\040", " ")
    return Disk(path, int(free) * 1024, int(size) * 1024, mount, "ro" in options.split(","))


def _packages(parts: Mapping[str, Part]) -> Packages:
    part = _part(parts, "packages")
    broken: list[str] = []
    unfinished: list[str] = []
    for row in _rows(parts, "packages"):
        if len(row) != 3 or part.code:
            continue
        flag, status, name = row
        again = flag == "reinstreq" or status == "half-installed"
        (broken if again else unfinished).append(name)
    if _after(parts, "packages", "journal"):
        unfinished.append("dpkg's journal")
    error = None
    if part.code in TIMED_OUT:
        error = "it does not answer"
    elif part.code not in (0, MISSING):
        ours = ("family ", "journal ")
        error = next((ln.strip() for ln in part.lines if ln and not ln.startswith(ours)), "?")
    return Packages(
        family=_one(_after(parts, "packages", "family")),
        broken=tuple(broken),
        unfinished=tuple(unfinished),
        error=error,
        managers=tuple(f"{row[0]} ({row[1]})" for row in _rows(parts, "managers")),
        unattended=_unattended(parts),
        held=tuple(_after(parts, "upgrades", "held") + _excluded(parts)),
        drivers=tuple(_after(parts, "upgrades", "package")),
    )


def _unattended(parts: Mapping[str, Part]) -> tuple[str, ...]:
    """What would upgrade packages by itself; apt's timer does so only where it is told to."""
    settings = dict(re.findall(r'APT::Periodic::([\w-]+) "(\d+)"', _part(parts, "upgrades").text))
    enabled = _after(parts, "upgrades", "enabled")
    dnf = [unit for unit in enabled if unit.startswith("dnf-automatic")]
    on = settings.get("Unattended-Upgrade", "0") != "0" and settings.get("Enable", "1") != "0"
    timer = "apt-daily-upgrade.timer"
    return tuple(dnf + ([timer] if on and timer in enabled else []))


def _excluded(parts: Mapping[str, Part]) -> list[str]:
    lines = _part(parts, "upgrades").lines
    return [
        name
        for line in lines
        if line.lower().startswith("exclude")
        for name in re.split(r"[,\s]+", line.partition("=")[2].strip())
        if name
    ]


def _accelerators(parts: Mapping[str, Part], gpus: tuple[Device, ...]) -> Accelerators:
    npus, npu_holders = _npus(parts)
    devices = gpus or npus
    matrix = _part(parts, "topology" if gpus else "nputopo")
    topology = _topology(matrix, len(devices))
    pci = tuple(map(_pci_device, _rows(parts, "pci")))
    version = re.search(r"Module(?: for \w+)?\s+(\d[\d.]+)", _part(parts, "modules").text)
    fabric = _settings(_part(parts, "fabric"))
    told = re.search(r"Fabric Manager version is\s*:\s*(\S+)", _part(parts, "fabric").text)
    ascend = dict(line.split("=", 1) for line in _after(parts, "ascend", "driver") if "=" in line)
    return Accelerators(
        pci=pci,
        modules=tuple(_after(parts, "modules", "loaded")),
        module_version=version[1] if version else None,
        kernels={
            row[0]: len(row) > 1 for row in map(str.split, _after(parts, "modules", "kernel"))
        },
        nvidia_tool=_tool(_part(parts, "smi"), gpus),
        npu_tool=_tool(_part(parts, "npu"), npus),
        devices=devices,
        holders=_holders(parts) + npu_holders,
        cuda=_part(parts, "cuda").first or None,
        topology=topology,
        matrix=matrix.lines if topology else (),
        device_numa=_numa_by_matrix(topology) or _numa_by_slot(devices, pci),
        fabric_loaded=fabric.get("LoadState") == "loaded",
        fabric_active=fabric.get("ActiveState") == "active",
        fabric_version=told[1] if told else None,
        ascend_driver=ascend.get("Version"),
        cann=_one(_after(parts, "ascend", "cann")),
        kernel_errors=tuple(line.strip() for line in _part(parts, "xid").lines if "Xid" in line),
        bad_rows=_bad_rows(_part(parts, "rows")),
    )


def _tool(part: Part, devices: Sequence[Device]) -> str:
    """The state of a vendor's tool, which may end well and show no device."""
    if part.code == MISSING:
        return "missing"
    if part.code in TIMED_OUT:
        return "hung"
    if part.code:
        return part.first or f"exit code {part.code}"
    if devices:
        return "ok"
    head = re.compile(r"index,|\W*(NPU|Chip|npu-smi)\b|\W*$")  # the table's, and its frame
    said = next((line.strip("| ") for line in part.lines if not head.match(line.strip())), "")
    return said or "it lists no device"


def _pci_device(row: list[str]) -> PciDevice:
    slot, vendor, device, kind, numa = row[:5]
    return PciDevice(
        slot=slot.lower(),
        id=f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}".lower(),
        pci_class=kind.removeprefix("0x"),
        numa=int(numa),
        driver=row[5] if len(row) > 5 else "",
    )


def _short_slot(slot: str) -> str:
    """nvidia-smi writes the PCI domain with eight digits, sysfs with four or as many as needed."""
    return re.sub(r"^0{1,4}(?=[0-9a-f]{4,}:)", "", slot.lower())


def _number(text: str) -> int | None:
    match = re.match(r"\s*(\d{1,15})(?!\d)", text)
    return int(match[1]) if match else None


def _switch(text: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(text.strip().lower())


def _gpus(part: Part) -> tuple[tuple[Device, ...], str]:
    """From nvidia-smi's CSV: columns by their names, units behind the values.

    Returns:
        The devices, and the first line under the head that is none, such as a warning.
    """
    lines = [line.strip() for line in part.lines if line.strip()]
    head = next((i for i, line in enumerate(lines) if line.startswith("index,")), None)
    if part.code or head is None:
        return (), ""
    names = [re.sub(r" \[.*", "", name.strip()) for name in lines[head].split(",")]
    devices, odd = [], ""
    for line in lines[head + 1 :]:
        cells = [cell.strip() for cell in line.split(",")]
        if re.fullmatch(r"\d{1,4}", cells[0]) and len(cells) == len(names):
            devices.append(_gpu(dict(zip(names, cells, strict=True))))
        elif not line.startswith("["):  # the row of a lost device: [GPU is lost], ...
            odd = odd or line
    return tuple(devices), odd


_NOT_TOLD = ("[n/a]", "[not supported]", "[not found]", "[insufficient permissions]")
"""What nvidia-smi writes for a value that a sound device does not have or show."""


def _gpu(row: Mapping[str, str]) -> Device:
    capability = row.get("compute_cap", "")
    driver = row.get("driver_version", "")
    memory = (row.get("memory.total", ""), row.get("memory.used", ""))
    # [GPU requires reset], [Unknown Error], ...
    trouble = [v.strip("[]") for v in memory if v.startswith("[") and v.lower() not in _NOT_TOLD]
    return Device(
        index=int(row["index"]),
        uuid=row.get("uuid", ""),
        name=row.get("name", ""),
        slot=_short_slot(row.get("pci.bus_id", "")),
        memory_mib=_number(memory[0]),
        used_mib=_number(memory[1]),
        driver="" if driver.startswith("[") else driver,
        compute_capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
        ecc=_switch(row.get("ecc.mode.current", "")),
        ecc_errors=_number(row.get("ecc.errors.uncorrected.volatile.total", "")),
        mig=_switch(row.get("mig.mode.current", "")),
        persistence=_switch(row.get("persistence_mode", "")),
        health=_one(trouble),
    )


def _unit(path: str) -> str:
    """The systemd unit of a control group's path."""
    units = re.findall(r"[\w@:.\\-]+\.(?:service|scope)", path)
    return units[-1] if units else ""


def _holders(parts: Mapping[str, Part]) -> tuple[Holder, ...]:
    holders = []
    for line in _part(parts, "holders").lines:
        entry, _, group = line.rpartition(" | ")
        values = [value.strip() for value in entry.split(",", 3)]
        if len(values) == 4 and re.fullmatch(r"\d{1,10}", values[1]):
            holders.append(
                Holder(values[0], int(values[1]), _number(values[2]), values[3], _unit(group))
            )
    return tuple(holders)


def _topology(part: Part, count: int) -> Topology | None:
    """The matrix of all devices; None: the tool printed none."""
    try:
        topology = parse_topology("\n".join(part.lines))
    except OperatorError:
        return None
    return topology if len(topology.devices) == count else None


def _numa_by_matrix(topology: Topology | None) -> dict[int, int]:
    devices = topology.devices if topology else ()
    return {index: d.numa[0] for index, d in enumerate(devices) if len(d.numa) == 1}


def _numa_by_slot(devices: Sequence[Device], pci: Sequence[PciDevice]) -> dict[int, int]:
    nodes = {device.slot: device.numa for device in pci}
    found = ((d.index, nodes.get(d.slot, -1)) for d in devices)
    return {index: node for index, node in found if node >= 0}


def _npus(parts: Mapping[str, Part]) -> tuple[tuple[Device, ...], tuple[Holder, ...]]:
    """From npu-smi's table: two lines a chip, then the processes."""
    part = _part(parts, "npu")
    version = re.search(r"npu-smi\s+(\S+)", part.text)
    devices: list[Device] = []
    holders: list[Holder] = []
    name, health, in_processes = "", "", False
    for line in part.lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            in_processes = True
        elif in_processes and len(cells) == 4 and re.fullmatch(r"\d{1,10}", cells[1]):
            npu = _number(cells[0])
            holders.append(Holder(f"npu-{npu}", int(cells[1]), _number(cells[3]), cells[2], ""))
        elif len(cells) == 3 and re.fullmatch(r"\d+\s+\S+", cells[0]) and ":" not in cells[1]:
            name, health = cells[0].split()[1], cells[1]
        elif len(cells) == 3 and re.fullmatch(r"[0-9A-Fa-f]{4}:\S+", cells[1]):
            devices.append(_npu(len(devices), name, health, cells, version))
    return tuple(devices), tuple(holders)


def _npu(
    index: int, name: str, health: str, cells: list[str], version: re.Match[str] | None
) -> Device:
    usages = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
    used, total = usages[-1] if usages else ("", "")
    return Device(
        index=index,
        uuid=f"npu-{index}",
        name=name,
        slot=cells[1].lower(),
        memory_mib=_number(total),
        used_mib=_number(used),
        driver=version[1] if version else "",
        health=health,
    )


def _bad_rows(part: Part) -> tuple[str, ...]:
    rows = ([cell.strip() for cell in line.split(",")] for line in part.lines)
    bad = ("1", "yes")
    return tuple(r[0] for r in rows if len(r) == 3 and (r[1].lower() in bad or r[2].lower() in bad))


def _listener(line: str) -> Listener:
    """``PORT PID CONTROL-GROUP NAME``: a process may have blanks in its name."""
    port, pid, group, name = line.split(" ", 3)
    return Listener(int(port), None if pid == "-" else int(pid), name, _unit(group))


def _security(parts: Mapping[str, Part]) -> Security:
    now = _one(_after(parts, "selinux", "enforce"))
    configured = _one(_after(parts, "selinux", "config"))
    mode = {"1": "enforcing", "0": "permissive"}.get(now or "")
    kysec = _part(parts, "kysec")
    control = re.search(r"exec control\s*:\s*(\S+)", kysec.text)
    enabled = re.search(r"kysec status\s*:\s*enabled", kysec.text, re.IGNORECASE) is not None
    return Security(
        selinux=mode or ("disabled" if configured else "absent"),
        selinux_configured=configured,
        selinux_kernel=tuple(_after(parts, "selinux", "kernel")),
        kysec=enabled,
        kysec_exec=control[1] if control else None,
        firewalls=(*_firewalld(parts), *_ufw(parts)),
        ssh_ports=ssh_ports(_part(parts, "firewall").lines),
    )


def _firewalld(parts: Mapping[str, Part]) -> Iterator[Firewall]:
    state = _one(_after(parts, "firewall", "firewalld"))
    if state is None:
        return
    # with their indent, which tells names from values
    lines = [line[5:] for line in _part(parts, "firewall").lines if line.startswith("zone ")]
    zones = read_zones(lines)
    services = service_ports(_after(parts, "firewall", "service"))
    default = _one(_after(parts, "firewall", "default")) or "public"
    bound = [name.strip("\"'") for name in _after(parts, "firewall", "bound")]
    used = [zones[name] for name in zones_in_use(zones, default, bound) if name in zones]
    yield Firewall(
        "firewalld",
        state == "running",
        tuple(zone.chain(services) for zone in used),
        lets_all_in=default in zones and zones[default].target == OPEN_TARGET,
    )


def _ufw(parts: Mapping[str, Part]) -> Iterator[Firewall]:
    state = _one(_after(parts, "firewall", "ufw"))
    if state is None:
        return
    rules = (ufw_rule(line) for line in _part(parts, "firewall").lines)
    yield Firewall(
        "ufw",
        state == "active",
        (tuple(rule for rule in rules if rule),),
        lets_all_in="ACCEPT" in "".join(_after(parts, "firewall", "policy")),
        ipv6="no" not in "".join(_after(parts, "firewall", "ipv6")).lower(),
    )

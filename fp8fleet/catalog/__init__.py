"""What is known of releases, accelerators and platforms: TOML data, each entry with its source."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, ValidationError

from fp8fleet.errors import OperatorError
from fp8fleet.toml import parse_toml

FP8 = Literal["native", "weight-only", "amx", "none"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str


class Trap(BaseModel):
    """Why a release does not resolve where its own wheel tag would allow it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    glibc: str
    """The C library from which on it does not hold."""
    reason: str
    architecture: str | None = None
    """None: every architecture."""


class Release(_Entry):
    """An engine release: what its environment needs and which options it lacks."""

    distribution: str = "vllm"
    version: str | None = None
    """Of the distribution; None: the entry's name."""
    vendors: tuple[str, ...] = ("nvidia", "cpu")
    python: str
    torch: str
    cuda: str | None = None
    cann: str | None = None
    glibc: str
    architectures: tuple[str, ...] = ("x86_64", "aarch64")
    pydantic: str
    transformers_gemma4: str | None = None
    fp8_block: bool = True
    shutdown_timeout: bool
    constraints: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()


class Accelerator(_Entry):
    """An accelerator as the inventory names it."""

    vendor: str
    pci: tuple[str, ...] = ()
    compute_capability: str | None = None
    memory_mib: int | None = None
    fp8_block: FP8
    alternative: str | None = None


class Vendor(_Entry):
    """What all accelerators of a vendor have in common."""

    device_variable: str | None = None
    environment_gib: int
    driver_packages: dict[Literal["apt", "dnf"], tuple[str, ...]] = {}
    """Patterns of the driver's packages by package family; held on such hosts."""


class Platform(_Entry):
    """A distribution release: its package manager, C library version and package names."""

    family: Literal["apt", "dnf"]
    glibc: str
    os_ids: tuple[str, ...]
    version_ids: tuple[str, ...]
    like: str | None = None
    code_names: dict[str, str] = {}
    packages: tuple[str, ...]
    """On every host."""
    serving_packages: tuple[str, ...]
    """On hosts with servers: a C++ compiler for kernels compiled at run time, NUMA."""
    proxy_packages: tuple[str, ...]
    """On hosts with the proxy."""
    accelerator_packages: tuple[str, ...] = ()
    """On hosts with an accelerator: conveniences that the distribution's own sources have."""
    time_service: str
    """The unit that keeps the clock where nothing else does."""
    time_package: str
    kernel_packages: tuple[str, ...]
    """Patterns of what upgrades the kernel; held on hosts with an accelerator."""
    selinux: bool = False
    """Whether the distribution comes with SELinux."""
    selinux_packages: tuple[str, ...]
    """On hosts whose SELinux is managed: what sets it and what explains a denial."""
    kysec: bool = False
    """Whether the distribution comes with KySec."""


class SelinuxService(_Entry):
    """What SELinux's policy lets a service do without anyone's doing."""

    port_types: tuple[str, ...]
    ports: tuple[int, ...]


class Cuda(_Entry):
    """A CUDA version: its oldest driver, the conda packages of its compiler."""

    driver: str
    conda: tuple[str, ...]


class DriverBranch(_Entry):
    """A branch of NVIDIA's driver that has ended."""

    end_of_life: str


class Installer(_Entry):
    """A driver, or what belongs to one: how it is installed without questions."""

    vendor: str
    oldest: str | None = None
    """The oldest version whose installer knows ``options``."""
    options: str = ""
    """Of the installer (``.run``); empty: it comes in packages only."""
    upgrade: str | None = None
    """Options where another version is installed; None: the same."""
    file: str | None = None
    """Regular expression on the name of the installer: its groups are ``version`` and ``arch``."""
    fine: tuple[int, ...] = (0,)
    """Exit codes of an installer that did its work."""
    before: str | None = None
    """Shell command that has to succeed first."""
    log: str | None = None
    """Where the installer says why it failed."""
    needs: dict[str, tuple[str, ...]] = {}
    """Packages that the installer needs, by family; ``{kernel}`` is the running kernel."""
    packages: dict[str, tuple[str, ...]] = {}
    """Packages by family; ``{branch}`` is the first number of the version."""
    reboots: bool = False
    """Whether only a reboot brings it in force."""
    stamped: bool = False
    """Whether it leaves no version that is documented, so that we note what we installed."""

    @property
    def runs(self) -> bool:
        """Whether there is an installer to run."""
        return bool(self.options)


class Clock(_Entry):
    """A program that keeps a host's clock."""

    units: tuple[str, ...]
    """Its units, by the names that distributions have for them; ``*`` stands for anything."""


class KvCache(_Entry):
    """What an engine's KV cache may be made of."""

    types: tuple[str, ...]


class ServeOption(_Entry):
    """An option of ``vllm serve`` that not every release has."""

    accepted: tuple[str, ...] = ()
    instead: str

    def is_accepted(self, release: str) -> bool:
        """Whether vLLM ``release`` takes the option."""
        return any(SpecifierSet(part).contains(release) for part in self.accepted)


E = TypeVar("E", bound=_Entry)


def _load(name: str, kind: type[E]) -> dict[str, E]:
    text = (resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = parse_toml(text, f"catalog/{name}.toml")
    try:
        return {key: kind.model_validate(value) for key, value in table.items()}
    except ValidationError as error:
        raise OperatorError(f"catalog/{name}.toml: {error}") from None


@cache
def releases() -> dict[str, Release]:
    """All known engine releases by the name that ``engine_release`` has for them."""
    return _load("releases", Release)


@cache
def accelerators() -> dict[str, Accelerator]:
    """All known accelerators by inventory name."""
    return _load("accelerators", Accelerator)


@cache
def vendors() -> dict[str, Vendor]:
    """All known vendors of accelerators by name."""
    return _load("vendors", Vendor)


@cache
def platforms() -> dict[str, Platform]:
    """All known platforms by inventory name."""
    return _load("platforms", Platform)


@cache
def selinux() -> dict[str, SelinuxService]:
    """What SELinux's policies of all platforms have in common, by service."""
    return _load("selinux", SelinuxService)


@cache
def cuda_versions() -> dict[str, Cuda]:
    """Driver floor and compiler packages by the CUDA version of a wheel."""
    return _load("cuda", Cuda)


@cache
def driver_branches() -> dict[str, DriverBranch]:
    """The driver branches that have ended, by the driver's first number."""
    return _load("drivers", DriverBranch)


@cache
def installers() -> dict[str, Installer]:
    """Drivers and what belongs to them, in the order in which they are installed."""
    return _load("installers", Installer)


@cache
def clock_units() -> tuple[str, ...]:
    """Units of all known programs that keep the clock; ``*`` stands for anything."""
    return tuple(unit for clock in _load("clocks", Clock).values() for unit in clock.units)


@cache
def kv_cache_types() -> tuple[str, ...]:
    """All types of a KV cache that any release has."""
    return tuple(name for engine in _load("kv_cache", KvCache).values() for name in engine.types)


@cache
def serve_options() -> dict[str, ServeOption]:
    """Options of ``vllm serve`` that come and go, by their long names without dashes."""
    return _load("options", ServeOption)


def release_version(name: str) -> str:
    """The version of a release's Python package."""
    return releases()[name].version or name


def newest_first(distribution: str) -> list[str]:
    """Names of the known releases of ``distribution``, the newest first."""
    names = [n for n, release in releases().items() if release.distribution == distribution]
    return sorted(names, key=lambda name: Version(release_version(name)), reverse=True)


def platform_of(os_id: str, version_id: str, id_like: str) -> str | None:
    """The platform that an os-release file tells, or None.

    Args:
        os_id: its ID, in any case.
        version_id: its VERSION_ID; of versions such as 8.8 only the first number may count.
        id_like: its ID_LIKE, empty where it has none.
    """
    likes = id_like.lower().split()
    version = version_id.lower()
    for name, platform in platforms().items():
        if os_id.lower() not in platform.os_ids:
            continue
        if version not in platform.version_ids and not version.startswith(
            tuple(f"{known}." for known in platform.version_ids)
        ):
            continue
        # Kylin's server and desktop share ID and VERSION_ID, UOS's too; desktops are like Debian.
        if platform.like and platform.like not in likes:
            continue
        if platform.family == "dnf" and "debian" in likes:
            continue
        return name
    return None


def accelerator_of(pci_id: str) -> str | None:
    """The accelerator with a PCI id (``vendor:device``, hexadecimal), or None."""
    for name, accelerator in accelerators().items():
        if pci_id.lower() in accelerator.pci:
            return name
    return None

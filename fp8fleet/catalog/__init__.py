"""What is known of releases, accelerators and platforms: TOML data, each entry with its source."""

from __future__ import annotations

from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal, TypeVar

from packaging.requirements import Requirement
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
    multi_node: bool = True
    """One server over several hosts without Ray."""
    gpu_memory_utilization: float = 0.92
    """Default of ``serve --gpu-memory-utilization``."""
    constraints: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()
    lock_needs: str | None = None
    """What a package index has to hold for a lock; None: PyPI suffices."""


class Accelerator(_Entry):
    """An accelerator as the inventory names it."""

    vendor: str
    pci: tuple[str, ...] = ()
    compute_capability: str | None = None
    memory_mib: int | None = None
    engine_memory_mib: int | None = None
    fp8_block: FP8
    alternative: str | None = None
    bandwidth_gb_s: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    batched_tokens: int
    sequences: int

    @property
    def engine_bytes(self) -> int | None:
        """Memory of a device as the engine sees it; None: the catalogue does not know it."""
        if self.memory_mib is None:
            return None
        return (self.engine_memory_mib or self.memory_mib * 99 // 100) << 20


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
    """What no table says of an option of ``vllm serve``: its past, what to write instead."""

    accepted: tuple[str, ...] | None = None
    """Releases that take it, any of the ranges; it tells of those without a table. Empty: none,
    missing: not known."""
    instead: str | None = None
    """What to write in its place, or ``nothing: `` and why."""
    values: dict[str, str] = {}
    """What to do in place of a value that no release takes."""
    map: bool = False
    """Whether it takes a map only, where the parser takes any text without braces."""

    @property
    def remedy(self) -> str | None:
        """What to do in place of the option."""
        if self.instead is None:
            return None
        head, nothing, why = self.instead.partition("nothing: ")
        return f"leave it out: {why}" if nothing and not head else f"write instead {self.instead}"

    def is_accepted(self, release: str) -> bool:
        """Whether vLLM ``release`` takes the option, as far as is known."""
        if self.accepted is None:
            return True
        return any(SpecifierSet(part).contains(release) for part in self.accepted)


class Quantiles(BaseModel):
    """Tokens of the prompts, or of the outputs, of a workload."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    p50: int
    p95: int
    max: int


class NamedWorkload(_Entry):
    """A workload that the inventory can name."""

    prompt: Quantiles
    output: Quantiles
    concurrency: int
    latency_goal_ms: float | None = None


class Speed(_Entry):
    """How fast a server was where it was measured; the file says what each number means."""

    accelerator: str
    engine_release: str
    precision: Literal["bf16", "fp8"]
    parameters: int
    layers: int
    attention_width: int
    prompt_tokens: int
    prefill_tokens_per_s: float
    bytes_read_share: float
    step_ms_per_layer: float
    tp_step_ms_per_layer: float
    tp_prefill_share: float
    budget_share: float
    confirmed_budget: int
    smallest_budget: int
    short_prompt: int


class OptionFacts(BaseModel):
    """An option of ``vllm serve`` as a release's parser and config classes have it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: tuple[str, ...] = ()
    """Further long names, without dashes."""
    denials: tuple[str, ...] = ()
    """Long names that set the flag to the contrary."""
    short: tuple[str, ...] = ()
    flag: bool = False
    """It takes no value."""
    takes: tuple[str, ...] = ()
    """Kinds of values (see lab/option_reader.py); empty: any text."""
    choices: tuple[int | str, ...] = ()
    optional: bool = False
    """Whether ``None`` is one of the choices."""
    nargs: int | str | None = None
    default: bool | int | float | str | tuple[str, ...] | None = None
    """None: none, or one that is found when the server starts."""
    deprecated: bool = False
    later: tuple[str, ...] = ()
    """Values that the config accepts, where the parser takes any text."""
    keys: tuple[str, ...] = ()
    """All that a map may have as keys; empty: anything."""
    deprecated_values: tuple[str, ...] = ()
    online: tuple[str, ...] = ()
    """Methods that quantize a BF16 checkpoint while it is loaded."""
    replacing: tuple[str, ...] = ()
    """Methods that may take the place of the one that a checkpoint names."""
    above: int | float | None = None
    at_least: int | float | None = None
    below: int | float | None = None
    at_most: int | float | None = None


class OptionTable(_Entry):
    """The options of ``vllm serve`` of one release."""

    false: Literal["denied", "ignored"]
    """What becomes of ``x: false`` in a file of options: ``--no-x``, or nothing."""
    transformers: int
    """First number of the transformers release that is installed with it."""
    options: dict[str, OptionFacts]

    @cached_property
    def names(self) -> dict[str, str]:
        """Every long name, aliases and denials too, and the option it belongs to."""
        return {
            spelling: name
            for name, facts in self.options.items()
            for spelling in (name, *facts.aliases, *facts.denials)
        }

    @cached_property
    def short_names(self) -> dict[str, str]:
        """The names after one dash, and the option each belongs to."""
        return {short: name for name, facts in self.options.items() for short in facts.short}


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
    """Options of ``vllm serve`` with a history, by their long names, leading dashes left out."""
    return _load("options", ServeOption)


@cache
def workloads() -> dict[str, NamedWorkload]:
    """The workloads that an inventory can name."""
    return _load("workloads", NamedWorkload)


@cache
def measured_speed() -> Speed:
    """The measurement that all estimates of speed start from."""
    (speed,) = _load("speed", Speed).values()
    return speed


@cache
def option_tables() -> dict[str, OptionTable]:
    """The options of ``vllm serve`` by vLLM version, the oldest first."""
    tables = {}
    for file in (resources.files(__package__) / "serve").iterdir():
        where = f"catalog/serve/{file.name}"
        try:
            table = OptionTable.model_validate(parse_toml(file.read_text(encoding="utf-8"), where))
        except ValidationError as error:
            raise OperatorError(f"{where}: {error}") from None
        tables[file.name.removesuffix(".toml")] = table
    return dict(sorted(tables.items(), key=lambda item: Version(item[0])))


def option_tables_for(version: str) -> tuple[dict[str, OptionTable], bool]:
    """The tables by which the options of a vLLM version are judged.

    Returns:
        Its own; or the nearest older and the nearest newer one, as far as there are any; and
        whether it is its own.
    """
    tables = option_tables()
    if version in tables:
        return {version: tables[version]}, True
    older = [name for name in tables if Version(name) < Version(version)]
    newer = [name for name in tables if Version(name) > Version(version)]
    return {name: tables[name] for name in (*older[-1:], *newer[:1])}, False


def vllm_version(name: str) -> str:
    """The version of vLLM itself in a release; a plugin's release names it as a requirement."""
    for constraint in releases()[name].constraints:
        requirement = Requirement(constraint)
        if requirement.name == "vllm":
            return next(iter(requirement.specifier)).version
    return release_version(name)


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

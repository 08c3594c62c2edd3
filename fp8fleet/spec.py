"""What the operator wrote, made typed: one object a host, refused here if it cannot mean anything.

The inventory's keys are flat, since pyinfra replaces a nested value whole. Every key of
``HostSpec`` is one inventory key; ``docs/inventory.md`` is generated from this module.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from packaging.version import Version
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from fp8fleet import catalog
from fp8fleet.addresses import parse_network, short
from fp8fleet.catalog_check import is_driver_version
from fp8fleet.lengths import MAX_TOKENS, Count
from fp8fleet.manifest import check_source
from fp8fleet.secrets import SecretRef
from fp8fleet.topology import MAX_DEVICES

SECRET_KEYS = ("api_key", "model_token", "sudo_password")
"""Keys that refer to secrets; their values are never shown."""

CMAKE_ARCHIVE = re.compile(
    r"/cmake-(?P<version>\d+\.\d+\.\d+)[\w.-]*?(-linux-(?P<arch>\w+))?\.tar\.gz$",
    re.IGNORECASE | re.ASCII,
)
"""A URL of an archive of cmake, named as Kitware does; the architecture may be missing."""

GENERATION_CONFIG = "override-generation-config"
"""vLLM's option that `sampling` becomes."""

GATEWAY_GROUP = "gateway"
"""Hosts of this group run Nginx over the serving hosts and no engine."""


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError(
            f"a SHA256 has 64 hex digits, this has {len(value)} characters;"
            " take it from `sha256sum FILE`"
        )
    return value.lower()


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/") or value.endswith("/"):
        raise ValueError("an absolute path without '..' and without a slash at its end is needed")
    if not re.fullmatch(r"(/\w[\w.@+-]*)+", value, re.ASCII):
        raise ValueError("only ASCII letters, digits and .@+-_ may stand in a path, letters first")
    return value


_SHARED = (
    *("/opt", "/var", "/var/lib", "/var/cache", "/var/opt", "/var/local"),
    *("/srv", "/mnt", "/media", "/data"),
)
_UNSEEN = ("/home", "/root", "/tmp", "/run", "/var/tmp", "/var/run")
"""What ProtectHome and PrivateTmp hide from the servers."""
_SYSTEM = re.compile(
    "/(bin|boot|dev|etc|lib(|32|64|x32|o32)|lost[+]found|proc|sbin|snap|sys|usr"
    # below /var only lib, cache, opt and local are for others (hier(7), FHS 3.0 chapter 5)
    "|var/(?!lib(/|$)|cache(/|$)|opt(/|$)|local(/|$))[^/]+"
    # and there these are package managers', services' and container engines' own
    "|var/(lib|cache)/(alternatives|apparmor|apt|aptitude|authselect|chrony|cloud|containerd"
    "|containers|dbus|debconf|dhclient|dhcp|dkms|dnf|docker|dpkg|fontconfig|initramfs-tools|kubelet"
    "|ldconfig|libvirt|logrotate|man|man-db|misc|mysql|NetworkManager|nfs|nginx|ntp|os-prober"
    "|PackageKit|pam|pgsql|polkit-1|postgresql|private|rpm|samba|selinux|snapd|sss|sudo|swcatalog"
    "|systemd|tpm|ubuntu-advantage|ucf|ufw|unattended-upgrades|update-notifier|yum))(?=/|$)"
)
"""What belongs to the distribution."""


def _own_directory(value: str) -> str:
    if value in _SHARED:
        raise ValueError("a directory of its own is needed below that one")
    for top in _UNSEEN:
        if _is_within(value, top):
            raise ValueError(f"the servers cannot see {top} (ProtectHome, PrivateTmp): use another")
    if system := _SYSTEM.match(value):
        raise ValueError(f"{system[0]} belongs to the system: use another")
    return value


def _is_within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies in it."""
    return f"{path}/".startswith(f"{directory}/")


def _url(value: str) -> str:
    if not re.fullmatch(r"(https?|file)://[\w.~:/?#@!&*+,;=%\[\]-]+", value, re.ASCII):
        raise ValueError("a http://, https:// or file:// URL is needed, without quotes and spaces")
    try:
        urlsplit(value)
    except ValueError as error:
        raise ValueError(f"{error}: an IPv6 address stands in brackets") from None
    return value


def _repository_url(value: str) -> str:
    """dnf fills in $basearch and $releasever."""
    _url(re.sub(r"\$[a-z]+", "x", value))
    return value


def _web(value: str) -> str:
    if value.startswith("file:"):
        raise ValueError("a http:// or https:// URL is needed")
    return value


def _driver_source(value: str) -> str:
    return value if value == "packages" else _url(value)


def _address(value: str) -> str:
    """An address at which other hosts reach this one."""
    try:
        network = parse_network(str(ipaddress.ip_address(value)))
    except ValueError as error:
        why = "" if "%" not in value else f"{error}: "
        raise ValueError(
            f"{why}an IP address is needed (a name may resolve to the SSH network)"
        ) from None
    address = network.network_address
    nobody = _nobody(address)
    if address.is_loopback:
        nobody = "is a host's own: no other host reaches it"
    elif address.version == 6 and address.is_link_local:
        nobody = "is link-local: it says nothing without an interface"
    if nobody:
        raise ValueError(f"{address} {nobody}; name the address of one of its interfaces")
    return str(address)


def _network(value: str) -> str:
    """A network, or a single address without its length."""
    try:
        network = parse_network(value)
    except ValueError as error:
        raise ValueError(f"{error}: a network such as 10.0.0.0/8 or an address is needed") from None
    if network.prefixlen == 0:
        raise ValueError(f"{value} is everybody: leave client_networks empty, then everybody may")
    nobody = _nobody(network.network_address)
    if nobody and (network.is_multicast or network.num_addresses == 1):
        raise ValueError(f"{value} {nobody}: nobody connects from there")
    return short(network)


def _nobody(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Why no host has this address; None: one may."""
    if address.is_unspecified:
        return "is no host's address"
    if address.is_multicast:
        return "is a multicast address"
    if address == ipaddress.IPv4Address("255.255.255.255"):
        return "is the broadcast address"
    return None


def _no_root(value: str) -> str:
    if value == "root":
        raise ValueError("the servers run without privileges: name another user")
    return value


def _cmake_archive(value: str) -> str:
    if not CMAKE_ARCHIVE.search(value):
        raise ValueError(
            "the name of Kitware's archive is needed, such as cmake-3.28.4-linux-x86_64.tar.gz:"
            " the version in it is compared with cmake_version"
        )
    return value


def _kernel_value(value: Any) -> Any:
    """A number or numbers in 64 bits, or another text; a float or a list is neither."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a whole number or a text is needed")
    if isinstance(value, str):
        words = re.findall(r"(?<!\S)-?[0-9]+(?!\S)", value)
        numbers = [int(word) if len(word) <= 20 else 2**64 for word in words]
    else:
        numbers = [value]
    if any(not -(2**63) <= number < 2**64 for number in numbers):
        raise ValueError("the kernel's numbers have 64 bits")
    return value


def _known(kind: str, table: dict[str, Any]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in table:
            raise ValueError(f"unknown {kind}; the catalogue has: {', '.join(sorted(table))}")
        return value

    return AfterValidator(check)


def _quoted(value: Any) -> Any:
    if isinstance(value, float):
        raise ValueError('write it in quotes, such as "3.12": as a number 3.10 would be 3.1')
    return value


Sha256 = Annotated[str, AfterValidator(_sha256)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
OwnDirectory = Annotated[str, AfterValidator(_absolute), AfterValidator(_own_directory)]
Url = Annotated[str, AfterValidator(_url)]
PythonVersion = Annotated[
    str, BeforeValidator(_quoted), StringConstraints(pattern=r"^3\.[0-9]{1,2}$")
]
CmakeVersion = Annotated[
    str, BeforeValidator(_quoted), StringConstraints(pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+)?$")
]
CmakeArchive = Annotated[str, AfterValidator(_url), AfterValidator(_cmake_archive)]
# a name for clients: the letters of any script, unlike all that a host's shell or DNS gets
ModelId = Annotated[str, StringConstraints(pattern=r"^\w[\w.@+-]*(/[\w.@+-]+)*$")]
Source = Annotated[str, AfterValidator(_url), AfterValidator(check_source)]
Address = Annotated[str, AfterValidator(_address)]
Network = Annotated[str, AfterValidator(_network)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]
LinuxUser = Annotated[
    str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,30}$"), AfterValidator(_no_root)
]
Seconds = Annotated[int, Field(ge=1, le=604800, strict=True)]
OneLine = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]*$")]
KernelParameter = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+([./][a-z0-9_-]+)+$")]
KernelValue = Annotated[int | OneLine, BeforeValidator(_kernel_value)]
ProjectFile = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
AptSource = Annotated[str, StringConstraints(pattern=r"^deb [^\x00-\x1f\x7f]+$")]
RepositoryUrl = Annotated[str, AfterValidator(_repository_url)]
PackageName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
PackagePattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_*?-]*$")]
PackageVersion = Annotated[
    str, BeforeValidator(_quoted), StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+~^_:-]*$")
]
TimeServer = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$")]
Channel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9/][A-Za-z0-9_.:/@+~-]*$")]
WebUrl = Annotated[str, AfterValidator(_url), AfterValidator(_web)]
DriverVersion = Annotated[
    str,
    BeforeValidator(_quoted),
    StringConstraints(pattern=r"^[0-9]+([.][0-9A-Za-z]+)*$", max_length=41),
]
Milliseconds = Annotated[float, Field(gt=0, le=600_000, strict=True, allow_inf_nan=False)]
DeviceCount = Annotated[int, Field(ge=1, le=MAX_DEVICES, strict=True)]
DevicePair = tuple[
    Annotated[int, Field(ge=0, strict=True)], Annotated[int, Field(ge=0, strict=True)]
]
Option = bool | int | float | str | list[Any] | dict[str, Any] | None


class Spec(BaseModel):
    """Base of what the inventory holds: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceSpec(Spec):
    """One vLLM server of a host."""

    name: Name = Field(description="Name of the server: of its unit, files and upstream.")
    port: Annotated[int, Field(ge=1024, le=65535, strict=True)] = Field(
        description="TCP port it listens on; an ordinary user's, at least 1024."
    )
    devices: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(
        default=(),
        description="Indices of the devices it may use. Empty on a CPU host, and where the plan"
        " places it.",
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="Number of devices that share each layer's weights."
    )
    pipeline_parallel_size: Annotated[int, Field(ge=1, strict=True)] = Field(
        default=1, description="Number of parts of the model's layers, one after the other."
    )
    group: Annotated[str, StringConstraints(pattern=r"^\w[\w-]*$")] | None = Field(
        default=None,
        description="Inventory group whose hosts run this server together, the first with its API;"
        " for a model larger than a host. Unset: each host has a server of its own.",
    )
    master_port: Annotated[int, Field(ge=1024, le=65534, strict=True)] = Field(
        default=29501,
        description="With group: port of the first host where the others meet; the next port is"
        " taken too.",
    )
    options: dict[str, Option] = Field(
        default_factory=dict,
        description="Options of `vllm serve` by their long names without the leading dashes, as in"
        " its YAML.",
    )

    @model_validator(mode="after")
    def _sane(self) -> InstanceSpec:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices {list(self.devices)} names one device twice")
        alone = self.options.get("enable-expert-parallel") is not True
        if alone and not self.group and _stated(self.options.get("data-parallel-size")) > 1:
            raise ValueError(
                "option 'data-parallel-size': without enable-expert-parallel a server's ranks share"
                " nothing: list more instances in its place, Nginx shares the load among them"
            )
        if self.devices and not self.group and self.ranks > len(self.devices):
            size = f"tensor_parallel_size {self.tensor_parallel_size}"
            if self.pipeline_parallel_size > 1:
                size += f" x pipeline_parallel_size {self.pipeline_parallel_size}"
            size += "".join(f" x {key} {count}" for key, count in self._group_sizes.items())
            raise ValueError(
                f"{size} needs as many devices,"
                f" {len(self.devices)} are listed: list more or lower it"
            )
        for key in self.options:
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key):
                long = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
                meant = f"write {long}" if long else "write a long option of vLLM"
                raise ValueError(f"option {key!r}: {meant}, the name without the leading dashes")
        owned = sorted(OWNED_OPTIONS.keys() & self.options.keys())
        if owned:
            raise ValueError(f"option {owned[0]!r} is set from {OWNED_OPTIONS[owned[0]]}")
        return self

    @property
    def _group_sizes(self) -> dict[str, int]:
        """Options that make several groups of devices of a server, with how many on this host."""
        own = "data-parallel-size-local"
        local = own if own in self.options else "data-parallel-size"
        if "data-parallel-rank" in self.options:
            local = ""  # a rank alone; the others are servers elsewhere
        sizes = {key: _stated(self.options.get(key)) for key in (local, _CONTEXT_PARALLEL)}
        return {key: size for key, size in sizes.items() if size > 1}

    @property
    def ranks(self) -> int:
        """Processes of the server, each with a device of its own.

        Source: world_size and data_parallel_size_local in vllm/config/parallel.py.
        """
        groups = math.prod(self._group_sizes.values())
        return self.tensor_parallel_size * self.pipeline_parallel_size * groups


_CONTEXT_PARALLEL = "prefill-context-parallel-size"


def _stated(value: Option) -> int:
    """A size in the options, 1 where there is none; others than numbers are judged elsewhere."""
    text = str(value)
    return max(int(text), 1) if re.fullmatch(r"[0-9]{1,9}", text) else 1


OWNED_OPTIONS = {
    "model": "model_manifest",
    "config": "the instance itself",
    "host": "service_address",
    "port": "the instance's port",
    "api-key": "api_key",
    "hf-token": "model_token",
    "tensor-parallel-size": "the instance's tensor_parallel_size",
    "pipeline-parallel-size": "the instance's pipeline_parallel_size",
    "nnodes": "the instance's group",
    "node-rank": "the instance's group",
    "master-addr": "the instance's group",
    "master-port": "the instance's master_port",
    "served-model-name": "served_model_name",
    "shutdown-timeout": "drain_timeout",
    "uds": "the instance's port",
    "headless": "the instance itself",
}


OWNED_VARIABLES = {
    "VLLM_API_KEY": "api_key",
    "HF_TOKEN": "model_token",
    "HUGGING_FACE_HUB_TOKEN": "model_token",
    "CUDA_VISIBLE_DEVICES": "the instances' devices",
    "ASCEND_RT_VISIBLE_DEVICES": "the instances' devices",
}


class RepositorySpec(Spec):
    """A package repository for dnf."""

    name: Name = Field(description="Its name; dnf shows it as fp8fleet-NAME.")
    base_url: RepositoryUrl = Field(description="Its URL, perhaps with $basearch, $releasever.")
    gpg_key: RepositoryUrl | None = Field(
        default=None, description="URL of the key that signs its packages."
    )
    gpgcheck: bool = Field(
        default=True, description="False: packages are installed without a signature check."
    )

    @model_validator(mode="after")
    def _sane(self) -> RepositorySpec:
        if self.gpgcheck and not self.gpg_key:
            raise ValueError(
                f"repository {self.name}: gpg_key is needed, or gpgcheck = False if its packages"
                " are not signed"
            )
        if self.gpg_key and not self.gpgcheck:
            raise ValueError(f"repository {self.name}: gpg_key says nothing with gpgcheck = False")
        return self


class CombinationSpec(Spec):
    """Versions that a site has validated together."""

    driver: OneLine = Field(description="Version of NVIDIA's driver, all of it.")
    engine: Annotated[str, _known("release", catalog.releases())] = Field(
        description="Engine release, a name from the catalogue."
    )
    cuda: OneLine | None = Field(default=None, description="CUDA version; unset: any.")


class DriverSpec(Spec):
    """A driver, or what belongs to one, that a host shall have."""

    name: Annotated[str, _known("driver", catalog.installers())] = Field(
        description="What to install, a name from the catalogue."
    )
    version: DriverVersion = Field(description="Its version, whole.")
    source: Annotated[str, AfterValidator(_driver_source)] = Field(
        default="packages",
        description="`packages`: from the host's package sources. A URL: an installer (`.run`).",
    )
    sha256: Sha256 | None = Field(
        default=None, description="SHA256 of the installer, needed with its URL."
    )
    packages: tuple[PackageName, ...] = Field(
        default=(), description="Names of the packages. Empty: the catalogue's."
    )

    @model_validator(mode="after")
    def _sane(self) -> DriverSpec:
        entry = catalog.installers()[self.name]
        if entry.vendor == "nvidia" and not is_driver_version(self.version):
            raise ValueError(
                f"{self.name}: version {self.version!r}: numbers and dots are needed, such as"
                " 580.95.05"
            )
        if self.source == "packages":
            if self.sha256:
                raise ValueError(f"{self.name}: sha256 belongs to a URL in source")
        elif not self.sha256:
            raise ValueError(f"{self.name}: sha256 is needed with the URL in source")
        elif self.packages:
            raise ValueError(f"{self.name}: packages belong to source = 'packages'")
        elif not entry.runs:
            raise ValueError(f"{self.name}: comes in packages only: leave source out")
        named = self.named()
        if named.get("version") not in (None, self.version):
            raise ValueError(
                f"{self.name}: source has version {named['version']}, version is {self.version}:"
                " name the installer of that version"
            )
        return self

    def named(self) -> dict[str, str]:
        """What the name of the installer tells: ``version`` and ``arch`` (as ``uname -m``)."""
        pattern = catalog.installers()[self.name].file
        match = re.search(pattern, urlsplit(self.source).path) if pattern else None
        told = {key: value for key, value in match.groupdict().items() if value} if match else {}
        return {key: value.replace("-", "_") for key, value in told.items()}


class TokensSpec(Spec):
    """Lengths of prompts or outputs, as quantiles."""

    p50: Count = Field(description="Half of them have at most as many tokens.")
    p95: Count = Field(description="95 % of them have at most as many tokens.")
    max: Count = Field(description="None has more tokens.")

    @model_validator(mode="after")
    def _sane(self) -> TokensSpec:
        if not self.p50 <= self.p95 <= self.max:
            raise ValueError(
                f"p50 {self.p50}, p95 {self.p95}, max {self.max}: each must be at least the one"
                " before"
            )
        return self


_Factor = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class SamplingSpec(Spec):
    """What a request gets that does not say otherwise.

    Ranges: SamplingParams in vllm/sampling_params.py. These are the parameters that every release
    takes from the generation config (get_diff_sampling_param in vllm/config/model.py).
    """

    temperature: Annotated[_Factor, Field(ge=0, le=2)] | None = Field(
        default=None, description="0: always the likeliest token."
    )
    top_p: Annotated[_Factor, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of the likeliest tokens, above 0, up to 1."
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS, strict=True)] | None = Field(
        default=None, description="Number of the likeliest tokens; 0 or -1: all."
    )
    min_p: Annotated[_Factor, Field(ge=0, le=1)] | None = Field(
        default=None, description="Least share of the likeliest token's probability, 0 to 1."
    )
    repetition_penalty: Annotated[_Factor, Field(gt=0, le=100)] | None = Field(
        default=None, description="Above 1: repeated tokens get less likely. 1: nothing."
    )
    max_tokens: Count | None = Field(
        default=None, description="Most tokens of an answer, whatever the request asks."
    )

    @model_validator(mode="after")
    def _sane(self) -> SamplingSpec:
        if not self.model_fields_set or self.values() == {}:
            raise ValueError("nothing is set: name a parameter, or leave sampling out")
        return self

    def values(self) -> dict[str, int | float]:
        """What is set, by vLLM's names."""
        return self.model_dump(exclude_none=True)


class HostSpec(Spec):
    """One host: everything the inventory may say of it."""

    # Host
    platform: Annotated[str, _known("platform", catalog.platforms())] = Field(
        description="Distribution release of the host, a name from the catalogue."
    )
    arch: Literal["x86_64", "aarch64"] = Field(
        default="x86_64", description="Processor architecture, as `uname -m` prints it."
    )
    accelerator: Annotated[str, _known("accelerator", catalog.accelerators())] | None = Field(
        default=None, description="Accelerator of the host, a name from the catalogue, or `cpu`."
    )
    device_count: DeviceCount | None = Field(
        default=None,
        description="Number of devices of the host. With it, or with topology, servers may leave"
        " their devices out: the plan places them.",
    )
    topology: ProjectFile | None = Field(
        default=None,
        description="File with the link matrix of the devices (`fp8fleet probe --topology` writes"
        " it), relative to the project.",
    )
    device_pairs: tuple[DevicePair, ...] = Field(
        default=(),
        description="Pairs of devices that are linked directly, such as `[[0, 1], [2, 3]]`, with"
        " device_count; not used where topology is set.",
    )
    service_user: LinuxUser = Field(
        default="vllm",
        description="System user, without a shell, that runs the servers: one that fp8fleet makes,"
        " nobody else's account.",
    )
    install_directory: OwnDirectory = Field(
        default="/opt/fp8fleet", description="Where environments and tools are installed."
    )
    model_directory: OwnDirectory = Field(
        default="/var/lib/fp8fleet/models",
        description="Where models lie: a folder a model, in it one a revision.",
    )
    cache_directory: OwnDirectory = Field(
        default="/var/cache/fp8fleet",
        description="Compile caches of the engine, one folder a release; keep it on a local disk.",
    )
    service_address: Address | None = Field(
        default=None,
        description="Address under which gateways reach this host's servers, on a gateway the one"
        " that it reaches them from. The SSH name is never an upstream.",
    )
    storage_address: Address | None = Field(
        default=None, description="Address in the storage network, for transfers between hosts."
    )
    sysctl: dict[KernelParameter, KernelValue] = Field(
        default={"net.core.somaxconn": 4096},
        description="Kernel parameters, written to /etc/sysctl.d/90-fp8fleet.conf.",
    )
    nofile_limit: Annotated[int, Field(ge=1024, le=1073741816, strict=True)] = Field(
        default=1048576, description="Open files a server may have."
    )

    ntp_servers: tuple[TimeServer, ...] = Field(
        default=(),
        description="Time servers of the site, for chrony (dnf) or systemd-timesyncd (apt). Unset:"
        " the distribution's own; a time service that runs is left as it is.",
    )
    hold_packages: tuple[PackagePattern, ...] | None = Field(
        default=None,
        description="Packages (`*` for any letters) that upgrades leave as they are. Unset: kernel"
        " and driver, on hosts with an accelerator. `[]`: none.",
    )
    log_retention_days: Annotated[int, Field(ge=1, le=3650, strict=True)] = Field(
        default=180, description="Days that the journal and Nginx's logs are kept."
    )
    log_max_size: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,6}[mg]$")] = Field(
        default="4g",
        description="Disk that the journal may take, and each of Nginx's logs before compression;"
        " it goes before log_retention_days.",
    )
    selinux: Literal["enforcing", "permissive", "unmanaged"] | None = Field(
        default=None,
        description="SELinux's mode. Unset: `enforcing` on platforms that come with SELinux,"
        " `unmanaged` on others.",
    )
    selinux_network: Literal["connect", "relay"] = Field(
        default="connect",
        description="Where SELinux lets Nginx connect to. `connect`: any port. `relay`: web ports"
        " and the servers' ports only.",
    )

    sudo_password: SecretRef | None = Field(
        default=None,
        description="sudo's password (`env:NAME`, `file:PATH`), used with `_sudo = True`.",
    )

    # Drivers
    drivers: tuple[DriverSpec, ...] = Field(
        default=(),
        description="Drivers to install, a list of the keys below. Empty: preflight judges what the"
        " host has.",
    )
    driver_reboot: bool = Field(
        default=False,
        description="Whether the host may be rebooted when a driver needs it. `False`: the run"
        " stops there and says so.",
    )

    # Firewall
    firewall: Literal["auto", "ufw", "firewalld", "unmanaged"] = Field(
        default="auto",
        description="Firewall that lets in clients, gateways and other hosts of the fleet, and SSH."
        " `auto`: ufw where packages come by apt, firewalld where by dnf. `unmanaged`: none is"
        " touched.",
    )
    client_networks: tuple[Network, ...] = Field(
        default=(),
        description="Networks (`10.0.0.0/8`) or addresses of clients, which alone may connect to"
        " the proxy. Empty: everybody may.",
    )

    # Package sources
    apt_sources: tuple[AptSource, ...] | None = Field(
        default=None,
        description="Lines of an apt source list (`deb ...`) that replaces the host's own sources:"
        " a site mirror. Unset: the host's own are used.",
    )
    dnf_repositories: tuple[RepositorySpec, ...] | None = Field(
        default=None,
        description="Repositories for dnf that replace the host's own, a list of tables."
        " Unset: the host's own are used.",
    )
    package_versions: dict[PackageName, PackageVersion] = Field(
        default_factory=dict,
        description="Distribution packages that are installed at exactly this version, by name:"
        " `{'nginx': '1.24.0-2'}`; of an RPM the epoch and the release may be left out.",
    )
    conda_frontend_url: Url | None = Field(
        default=None,
        description="Where hosts get the conda frontend: a Miniforge-like installer (`.sh`) or a"
        " micromamba binary.",
    )
    conda_frontend_sha256: Sha256 | None = Field(
        default=None, description="SHA256 of the conda frontend, needed with its URL."
    )
    conda_frontend_path: AbsolutePath | None = Field(
        default=None, description="A conda frontend (conda or micromamba) that hosts already have."
    )
    conda_channels: tuple[Channel, ...] = Field(
        default=("conda-forge",),
        min_length=1,
        description="Conda channels, in order; no other is used.",
    )
    package_index: Url | None = Field(
        default=None,
        description="Python package index (`.../simple`). Unset with find-links: none is asked.",
    )
    package_find_links: tuple[Url, ...] = Field(
        default=(), description="Folders of Python wheels: pages of links or file:// paths."
    )
    ca_bundle: AbsolutePath | None = Field(
        default=None, description="CA bundle on the hosts for every download."
    )
    proxy: WebUrl | None = Field(
        default=None, description="HTTP proxy for every download of the hosts."
    )
    no_proxy: tuple[OneLine, ...] = Field(
        default=("localhost", "127.0.0.1"), description="Names and addresses reached directly."
    )

    # Engine
    tools_requirements: ProjectFile = Field(
        default="locks/tools.txt",
        description="Hash-locked requirements of the tools environment, relative to the project.",
    )
    tools_python: PythonVersion = Field(
        default="3.11", description="Python version of the tools environment."
    )
    engine_release: Annotated[str, _known("release", catalog.releases())] | None = Field(
        default=None, description="vLLM release, a name from the catalogue."
    )
    engine_python: PythonVersion = Field(
        default="3.12", description="Python version of the engine's environment, in quotes."
    )
    engine_build: Literal["wheel", "source"] = Field(
        default="wheel",
        description="`wheel`: nothing is compiled. `source`: what has no wheel in the lock is"
        " built on the host.",
    )
    engine_requirements: ProjectFile | None = Field(
        default=None,
        description="Hash-locked requirements of the engine, relative to the project"
        " (`fp8fleet lock`).",
    )
    engine_pins: tuple[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+$")], ...
    ] = Field(
        default=(),
        description="Versions that must be in the lock, installed before the engine, such as"
        " `pydantic==2.12.5`.",
    )
    engine_environment: dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")], OneLine
    ] = Field(default_factory=dict, description="Further environment variables of the servers.")

    # 3.26.1 stands in vLLM's requirements/build.txt and pyproject.toml, build-system.requires
    cmake_version: CmakeVersion = Field(
        default="3.26.1",
        description="Oldest cmake that will do where engine_build is `source`; vLLM's own build"
        " asks for this one.",
    )
    cmake_archive_url: CmakeArchive | None = Field(
        default=None,
        description="Kitware's archive of cmake for the host's architecture, installed where the"
        " host's own cmake is older or missing and engine_build is `source`.",
    )
    cmake_sha256: Sha256 | None = Field(
        default=None, description="SHA256 of the archive of cmake, needed with its URL."
    )

    validated_combinations: tuple[CombinationSpec, ...] = Field(
        default=(),
        description="The site's own table of driver, engine and CUDA versions; what is not in it"
        " is warned of, never refused.",
    )

    # Model
    model_manifest: ProjectFile | None = Field(
        default=None, description="Manifest of the model, relative to the project."
    )
    model_sources: tuple[Source, ...] = Field(
        default=(),
        description="Base URLs of the model's files, tried in order. Unset: the manifest's.",
    )
    model_token: SecretRef | None = Field(
        default=None,
        description="Bearer token for one host of the model's sources (`env:NAME`, `file:PATH`).",
    )
    model_token_for: Source | None = Field(
        default=None,
        description="URL on the host that gets model_token; needed where the sources are on several"
        " hosts, or the token shall go over plain http. Unset: the only host, by https.",
    )
    model_rate_limit: Annotated[float, Field(ge=0.1)] | None = Field(
        default=None, description="Megabytes a second that a host fetches, and gives. Unset: all."
    )
    peer_transfer: bool = Field(
        default=True,
        description="Hosts with a storage_address give each other the files of a model that has a"
        " `model.torrent` beside its manifest: many hosts cost its source about one copy.",
    )
    peer_port: Port = Field(
        default=6881, description="Port on storage_address for transfers between hosts."
    )
    served_model_name: ModelId | None = Field(
        default=None, description="Model id that clients name. Unset: the manifest's name."
    )

    # Workload
    workload: Annotated[str, _known("workload", catalog.workloads())] | None = Field(
        default=None,
        description="What the servers shall do, a name from the catalogue. The plan then chooses"
        " the servers' options, and the servers where instances are unset; the other `workload_`"
        " keys override its values.",
    )
    workload_prompt_tokens: TokensSpec | None = Field(
        default=None,
        description="Lengths of the prompts: `{'p50': 800, 'p95': 4000, 'max': 8000}`.",
    )
    workload_output_tokens: TokensSpec | None = Field(
        default=None, description="Lengths of the outputs, as quantiles."
    )
    workload_lengths: ProjectFile | None = Field(
        default=None,
        description="JSONL file of real lengths, relative to the project, instead of the two keys"
        ' before: `{"prompt_tokens": 812, "output_tokens": 164}`, one request a line.',
    )
    workload_concurrency: Annotated[int, Field(ge=1, le=65536, strict=True)] | None = Field(
        default=None, description="Streams at once over the host."
    )
    workload_latency_goal_ms: Milliseconds | None = Field(
        default=None,
        description="Milliseconds between two tokens of a stream that 99 % of them keep.",
    )
    sampling: SamplingSpec | None = Field(
        default=None,
        description="Sampling parameters of requests that name none, a table of the keys below."
        " Unset: the model's generation_config.json.",
    )

    # Servers
    instances: tuple[InstanceSpec, ...] = Field(
        default=(), description="The vLLM servers of the host, a list of the keys below."
    )
    api_key: SecretRef | None = Field(
        default=None, description="API key that clients must send (`env:NAME`, `file:PATH`)."
    )
    start_timeout: Seconds = Field(
        default=1800,
        description="Seconds a server may take until it is ready; cold caches need minutes.",
    )
    drain_timeout: Seconds = Field(
        default=120, description="Seconds a stopping server may use to end running requests."
    )
    warm_up_concurrency: Annotated[int, Field(ge=0, le=4096, strict=True)] = Field(
        default=16,
        description="Largest batch sent to a started server before it takes traffic; 0: none.",
    )

    # Nginx
    nginx_listen: Port = Field(default=8080, description="Port on which clients reach the proxy.")
    nginx_server_name: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_.*-]+( [A-Za-z0-9_.*-]+)*$")
    ] = Field(default="_", description="Host names of the proxy, `_` for any.")
    nginx_read_timeout: Annotated[int, Field(ge=300, le=604800, strict=True)] = Field(
        default=600, description="Seconds between two bytes of an answer; at least 300."
    )
    nginx_connect_timeout: Seconds = Field(default=5, description="Seconds to connect to a server.")
    nginx_body_size: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,6}[kmg]$")] = Field(
        default="64m", description="Largest request body; images in requests need megabytes."
    )
    nginx_status_port: Port = Field(
        default=8089, description="Loopback port on which Nginx tells its configuration."
    )

    @model_validator(mode="after")
    def _sane(self) -> HostSpec:
        self._check_frontend()
        self._check_environment()
        self._check_cmake()
        self._check_ports()
        self._check_devices()
        self._check_repositories()
        self._check_drivers()
        self._check_workload()
        self._check_sampling()
        self._check_directories()
        return self

    def _check_workload(self) -> None:
        stated = self.workload_prompt_tokens or self.workload_output_tokens
        if self.workload_lengths and stated:
            raise ValueError(
                "workload_lengths has the lengths of prompts and outputs: leave out"
                " workload_prompt_tokens and workload_output_tokens, or it"
            )
        if self.workload or not self.has_workload:
            return
        missing = []
        if not self.workload_lengths:
            missing += [] if self.workload_prompt_tokens else ["workload_prompt_tokens"]
            missing += [] if self.workload_output_tokens else ["workload_output_tokens"]
        missing += [] if self.workload_concurrency else ["workload_concurrency"]
        if missing:
            raise ValueError(
                f"{missing[0]} is not set: a workload needs it, or a name"
                f" (workload = one of {', '.join(catalog.workloads())})"
            )

    def _check_sampling(self) -> None:
        for instance in self.instances:
            if self.sampling and GENERATION_CONFIG in instance.options:
                raise ValueError(
                    f"sampling and instances: {instance.name}: option {GENERATION_CONFIG!r} both"
                    " set sampling parameters: leave one out"
                )

    def _check_directories(self) -> None:
        keys = ("install_directory", "model_directory", "cache_directory")
        for inner, outer in itertools.permutations(keys, 2):
            path, other = getattr(self, inner), getattr(self, outer)
            if _is_within(path, other):
                raise ValueError(
                    f"{inner} = {path!r}: {'is' if path == other else 'lies in'} {outer}"
                    f" ({other!r}): each needs a directory of its own"
                )

    def _check_repositories(self) -> None:
        names = [repository.name for repository in self.dnf_repositories or ()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"dnf_repositories: the name {name} is used twice")

    def _check_frontend(self) -> None:
        if self.conda_frontend_url and not self.conda_frontend_sha256:
            raise ValueError("conda_frontend_sha256 is needed with conda_frontend_url")
        if bool(self.conda_frontend_url) == bool(self.conda_frontend_path):
            raise ValueError("one of conda_frontend_url and conda_frontend_path is needed")

    def _check_environment(self) -> None:
        for name in sorted(OWNED_VARIABLES.keys() & self.engine_environment.keys()):
            raise ValueError(f"engine_environment: {name} is set from {OWNED_VARIABLES[name]}")

    def _check_cmake(self) -> None:
        if bool(self.cmake_archive_url) != bool(self.cmake_sha256):
            raise ValueError("cmake_archive_url and cmake_sha256 are needed together")
        named = CMAKE_ARCHIVE.search(self.cmake_archive_url or "")
        if named is None:
            return
        if Version(named["version"]) < Version(self.cmake_version):
            raise ValueError(
                f"cmake_archive_url has cmake {named['version']}, cmake_version asks for"
                f" {self.cmake_version}: name a newer archive"
            )
        if named["arch"] not in (None, self.arch):
            raise ValueError(
                f"cmake_archive_url is for {named['arch']}, arch is {self.arch}: name the archive"
                " of that architecture"
            )

    @property
    def ports(self) -> list[tuple[str, int]]:
        """The TCP ports that the host shall listen on: for what, and the number."""
        ports = [(f"instance {i.name}", i.port) for i in self.instances]
        for instance in self.instances:
            if instance.group:
                ports.append((f"instance {instance.name}'s master_port", instance.master_port))
                link = f"instance {instance.name}'s nodes (master_port + 1)"
                ports.append((link, instance.master_port + 1))
        if self.storage_address and self.peer_transfer:
            ports.append(("peer_port", self.peer_port))
        return [
            *ports,
            ("nginx_listen", self.nginx_listen),
            ("nginx_status_port", self.nginx_status_port),
        ]

    def _check_ports(self) -> None:
        users: dict[int, str] = {}
        for user, port in self.ports:
            if port in users:
                raise ValueError(f"port {port} is used twice: by {users[port]} and by {user}")
            users[port] = user

    def _check_devices(self) -> None:
        names = [instance.name for instance in self.instances]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"instances: the name {name} is used twice")
        if "peer" in names:
            raise ValueError("instances: the name peer is taken by the unit that shares models")
        for instance in self.instances:
            if self.accelerator in (None, "cpu") or instance.devices:
                continue
            if instance.group:
                raise ValueError(
                    f"instances: {instance.name}: devices must be listed with group: this host's"
                    " part of the server's"
                )
            if not self.device_count and not self.topology:
                raise ValueError(
                    f"instances: {instance.name}: devices must list at least one, or device_count"
                    " or topology must be set: then the plan places it"
                )
        self._check_declared_devices()

    def _check_declared_devices(self) -> None:
        if self.accelerator == "cpu" and (self.device_count or self.topology):
            key = "topology" if self.topology else "device_count"
            raise ValueError(f"{key}: a CPU host has no devices: leave it out")
        if self.device_pairs and not self.topology and not self.device_count:
            raise ValueError("device_pairs: device_count is needed with it")
        for first, second in self.device_pairs:
            if first == second:
                raise ValueError(f"device_pairs: [{first}, {second}] is one device, no pair")
        if self.device_count is None:
            return
        named = [("device_pairs", index) for pair in self.device_pairs for index in pair]
        named += [(f"instances: {i.name}", index) for i in self.instances for index in i.devices]
        for where, index in named:
            if index >= self.device_count:
                raise ValueError(
                    f"{where}: device {index} is outside device_count = {self.device_count}"
                    f" (0-{self.device_count - 1})"
                )

    def _check_drivers(self) -> None:
        versions: dict[str, str] = {}
        for driver in self.drivers:
            if driver.name in versions:
                raise ValueError(f"drivers: {driver.name} is listed twice")
            versions[driver.name] = driver.version
            arch = driver.named().get("arch", self.arch)
            if arch != self.arch:
                raise ValueError(
                    f"drivers: {driver.name}: source is for {arch}, arch is {self.arch}: name the"
                    " installer of that architecture"
                )
        fabric, module = versions.get("fabric-manager"), versions.get("nvidia")
        if fabric and module and fabric != module:
            raise ValueError(
                f"drivers: fabric-manager {fabric} and nvidia {module}: both need one version"
            )

    @property
    def has_workload(self) -> bool:
        """Whether any key says what the servers shall do."""
        return any(
            (
                self.workload,
                self.workload_prompt_tokens,
                self.workload_output_tokens,
                self.workload_lengths,
                self.workload_concurrency,
                self.workload_latency_goal_ms,
            )
        )

    @property
    def vendor(self) -> str | None:
        """The catalogue's vendor of the accelerator; None: no accelerator is named."""
        return catalog.accelerators()[self.accelerator].vendor if self.accelerator else None

    def required_to_serve(self) -> list[str]:
        """Names of the keys that a serving host needs and that are not set."""
        keys = ("accelerator", "engine_release", "engine_requirements", "model_manifest")
        missing = [key for key in keys if getattr(self, key) is None]
        if self.instances:
            return missing
        if not self.has_workload or self.accelerator == "cpu":
            return [*missing, "instances"]
        return missing if self.device_count or self.topology else [*missing, "device_count"]

    def secrets(self) -> dict[str, SecretRef]:
        """The secrets that this host's deploy needs, by inventory key."""
        refs = {key: getattr(self, key) for key in SECRET_KEYS}
        return {key: ref for key, ref in refs.items() if ref is not None}

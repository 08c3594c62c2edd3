"""The plan: what every host shall be. Computed by `fp8fleet.planner`.

Roles make it so, `fp8fleet plan` and `fp8fleet render` print it, acceptance proves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fp8fleet.capacity import Part
from fp8fleet.catalog_check import Target
from fp8fleet.measured import Combination
from fp8fleet.sampling import Sampling
from fp8fleet.secrets import SecretRef
from fp8fleet.topology import Topology
from fp8fleet.workload import Choice

CONFIG_DIRECTORY = "/etc/fp8fleet"


RUN_DIRECTORY = "/run/fp8fleet"


UNIT_DIRECTORY = "/etc/systemd/system"


UNIT_PREFIX = "fp8fleet-"


STATE_DIRECTORY = "/var/lib/fp8fleet/host"
SYSTEM_DIRECTORIES = ("/etc", "/run", "/usr", "/var/cache", "/var/lib", "/var/log")
"""Of the distribution: packages, units, settings, locks and logs go there."""
"""What fp8fleet notes on a host of its own changes: packages held, services' files in force."""


STAMP = ".fp8fleet-whole"
"""The last file that is written into an environment; without it the environment is made anew."""


PEER_UNIT = f"{UNIT_PREFIX}peer.service"
"""Gives a host's model to the other hosts."""


NVIDIA_UNIT = f"{UNIT_PREFIX}nvidia.service"
"""Makes NVIDIA's device files at boot, before the servers."""


PERSISTENCE_UNIT = "nvidia-persistenced.service"
"""NVIDIA's own: keeps the driver's state while nobody uses a device."""


NGINX_KEEPALIVE_S = 60
"""Nginx's default for idle upstream connections; the servers keep theirs open longer."""


def bracketed(address: str) -> str:
    """An IPv6 address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True)
class PlannedFile:
    """A file as it lands on a host.

    ``content`` holds ``<secret NAME>`` where a secret goes; ``secrets`` are those references.
    """

    role: str
    path: str
    content: bytes
    mode: str = "644"
    owner: str = "root"
    group: str = "root"
    secrets: tuple[SecretRef, ...] = ()

    def resolved(self) -> bytes:
        """The content with its secrets filled in.

        Raises:
            OperatorError: a secret is missing.
        """
        content = self.content
        for secret in self.secrets:
            content = content.replace(secret.placeholder.encode(), secret.resolve().encode())
        return content


@dataclass(frozen=True)
class PlannedDirectory:
    """A directory of a host with its owner and mode."""

    path: str
    mode: str = "755"
    owner: str = "root"
    group: str = "root"


@dataclass(frozen=True)
class ServicePlan:
    """A service of the system that runs with files of ours."""

    unit: str
    digest: str
    """Of the files that ask for a restart when they change."""
    enable: bool
    """Whether it has to be enabled; what the system starts by itself need not."""
    then: str | None = None
    """Command after a restart."""


@dataclass(frozen=True)
class TimePlan:
    """What keeps the clock of a host where nothing else does."""

    unit: str
    package: str
    digest: str | None
    """Of the file with the inventory's servers; None: the distribution's own servers."""


@dataclass(frozen=True)
class Preparation:
    """How a host is made ready besides its files, packages, user and directories."""

    directories: tuple[PlannedDirectory, ...]
    """The system's own and ours, for files that come before the service user."""
    versions: dict[str, str]
    """Exact versions of packages."""
    held: tuple[str, ...]
    """Patterns of the packages that upgrades leave."""
    dnf_sources: tuple[str, ...]
    """Lines of dnf's main configuration that name the package sources."""
    services: tuple[ServicePlan, ...]
    retired: tuple[str, ...]
    """Units of ours that are removed."""
    time: TimePlan
    nouveau_digest: str | None
    """Of the file that keeps nouveau off; None: no NVIDIA host."""


@dataclass(frozen=True)
class FrontendPlan:
    """The conda frontend: fetched to ``prefix`` unless the host has it at ``program`` already."""

    program: str
    prefix: str | None = None
    url: str | None = None
    sha256: str | None = None

    @property
    def is_installer(self) -> bool:
        """Whether the download is a shell installer rather than the program itself."""
        return bool(self.url and self.url.endswith(".sh"))


@dataclass(frozen=True)
class CmakePlan:
    """The cmake of a source build: the host's own where that will do, else one from an archive."""

    minimum: str
    link: str
    """Leads to the prefix in use; its ``bin`` stands first in a build's PATH."""
    architecture: str
    prefix: str | None = None
    """None: the inventory names no archive."""
    url: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class EnvironmentPlan:
    """A conda environment filled from hash-locked requirements."""

    name: str
    prefix: str
    python: str
    conda_packages: tuple[str, ...]
    channels: tuple[str, ...]
    requirements: str
    pins: str | None
    build: str
    proof: str
    """Module whose import proves the environment."""
    proof_environment: dict[str, str]

    @property
    def interpreter(self) -> str:
        """Path of the environment's Python."""
        return f"{self.prefix}/bin/python"


def programs_of(
    frontend: FrontendPlan, environments: tuple[EnvironmentPlan, ...]
) -> tuple[str, ...]:
    """One program of all that is installed; a label or a trust that it lacks, the rest lacks."""
    own = (frontend.program,) if frontend.prefix else ()
    return (*own, *(environment.interpreter for environment in environments))


@dataclass(frozen=True)
class PeerPlan:
    """How a host shares a model's files with the other hosts that have the model."""

    torrent: str
    listen: str
    """``ADDRESS:PORT`` on the storage network."""
    peers: tuple[str, ...]
    """``ADDRESS:PORT`` of all of them, this host included."""


@dataclass(frozen=True)
class ModelPlan:
    """A model's files: where they lie and what they must be."""

    name: str
    revision: str
    manifest: str
    directory: str
    size: int
    """Bytes of all files."""
    files: int
    token: str | None
    token_for: str | None
    """URL on the host that gets the token; None: the only one of the sources."""
    headers: str | None
    """The stored headers that the shards must have; None: models/ has none."""
    rate_limit: float | None
    """Megabytes a second."""
    peer: PeerPlan | None
    note: str | None
    """Why the host does not share, where the inventory would have it."""


@dataclass(frozen=True)
class NodePlan:
    """A host's node of one server over several hosts."""

    group: str
    """The inventory group."""
    rank: int
    """0: the head, which has the API."""
    hosts: tuple[str, ...]
    """Names of the group's hosts by rank."""
    addresses: tuple[str, ...]
    """Their service addresses."""
    master_port: int
    """On the head, for torch's rendezvous."""
    digest: str
    """Of what all nodes are made of: a change of one restarts all."""

    @property
    def link_port(self) -> int:
        """On the head, for the programs that start and end the nodes together."""
        return self.master_port + 1

    @property
    def others(self) -> tuple[str, ...]:
        """Addresses of the other nodes."""
        return tuple(a for rank, a in enumerate(self.addresses) if rank != self.rank)


@dataclass(frozen=True)
class CapacityPlan:
    """What a server's KV cache holds, computed from the stored headers."""

    parts: tuple[Part, ...]
    """Of a device's memory, the fullest's; they add up to ``kv_bytes``."""
    kv_bytes: int
    kv_tokens: int
    """The estimate."""
    measured_kv_tokens: int | None
    """Counts in its place where it is known."""
    error: float | None
    """Of the estimate: 0.01 is one percent too much."""
    context: int | None
    """Tokens that a sequence may have."""
    sequences: float | None
    """Of that many tokens, at once."""
    largest_context: int
    """Tokens of the longest sequence that fits and that the model takes."""
    device_bytes: int
    """That the server takes of a device, with its weights."""
    combination: Combination
    """What a measurement has to have in common with it."""


@dataclass(frozen=True)
class Binding:
    """The CPUs and the memory that a server is bound to."""

    cpus: str
    """Such as ``0-51,104-155``."""
    numa_node: int | None
    """Whose memory is taken first; None: that beside the CPU that asks for it."""


@dataclass(frozen=True)
class InstancePlan:
    """One vLLM server as a systemd unit."""

    name: str
    unit: str
    address: str
    port: int
    devices: tuple[int, ...]
    binding: Binding | None
    """None: it may run on every CPU."""
    model_id: str
    options: dict[str, Any]
    options_file: str
    environment_file: str
    key_file: str | None
    marker: str
    start_timeout_s: int
    warm_up_concurrency: int
    files: tuple[str, ...]
    """Files whose change asks for a restart."""
    notes: tuple[str, ...]
    choices: tuple[Choice, ...]
    """What the workload chose, and why; empty: the inventory has no workload."""
    sampling: Sampling
    node: NodePlan | None = None
    """None: the server is this host's alone."""
    capacity: CapacityPlan | None = None
    """None: not known."""
    capacity_unknown: str | None = None
    """Why; None too where nothing can be known, as of a CPU."""

    @property
    def has_api(self) -> bool:
        """Whether clients ask it: not a node that follows another one."""
        return self.node is None or self.node.rank == 0

    @property
    def upstream(self) -> str:
        """``address:port`` under which the proxy reaches the server."""
        return f"{bracketed(self.address)}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://{self.upstream}"


@dataclass(frozen=True)
class ProxyPlan:
    """Nginx over the servers of a model."""

    listen: int
    status_port: int
    model_id: str
    upstreams: tuple[str, ...]
    digest: str
    """Of the whole configuration; Nginx tells it on ``status_port``: a proof that it is live."""
    api_key: SecretRef | None
    address: str
    """Name or address by which the control machine reaches the host."""

    @property
    def url(self) -> str:
        """Base URL as the control machine reaches it."""
        return f"http://{bracketed(self.address)}:{self.listen}"


@dataclass(frozen=True)
class FirewallRule:
    """Who may connect to a TCP port of a host, or to a range of them."""

    port: int
    source: str | None
    """An address, or a network as ``ADDRESS/BITS``; None: everybody."""
    last: int | None = None
    """Last port of a range that begins with ``port``."""

    def ports(self, separator: str = "-") -> str:
        """The port, or the range's ends."""
        return f"{self.port}{separator}{self.last}" if self.last else str(self.port)


@dataclass(frozen=True)
class FirewallPlan:
    """The host's firewall: which one, and what it lets in beside SSH and what the operator has."""

    tool: str
    """``ufw``, ``firewalld`` or ``unmanaged``: nothing is asked and nothing is changed."""
    packages: tuple[str, ...]
    """That it comes in."""
    rules: tuple[FirewallRule, ...]
    ssh_port: int
    """The port that this run connects to."""

    @property
    def guarded(self) -> tuple[int, ...]:
        """Ports that not everybody may reach."""
        return tuple(sorted({rule.port for rule in self.rules if rule.source and not rule.last}))


@dataclass(frozen=True)
class DriverPlan:
    """A driver, or what belongs to one, in the version that the host shall have."""

    name: str
    """Its entry in the catalogue."""
    version: str
    packages: tuple[str, ...]
    """As the package manager takes them, with their versions; empty: by ``url``."""
    url: str | None
    sha256: str | None
    needs: tuple[str, ...] = ()
    """Packages that its installer needs; ``{kernel}`` stands for the running kernel."""


@dataclass(frozen=True)
class DriversPlan:
    """All that the inventory asks for, in the order of installation."""

    items: tuple[DriverPlan, ...]
    reboot: bool
    """Whether the host may be rebooted for them."""
    downloads: str
    """Directory of installers."""

    @property
    def names(self) -> frozenset[str]:
        """Entries of the catalogue that are asked for."""
        return frozenset(item.name for item in self.items)


@dataclass(frozen=True)
class SelinuxPlan:
    """What SELinux shall be set to on a host where it is managed."""

    mode: Literal["enforcing", "permissive"]
    asked: bool
    """The inventory names the mode; a host that cannot have it is then refused."""
    booleans: dict[str, bool]
    """Values of the policy's booleans by name, in force and after a reboot."""
    ports: tuple[int, ...]
    """TCP ports on which Nginx listens, or to which alone it may connect."""
    equivalences: dict[str, str]
    """Directories that are labelled like another one, by path."""
    programs: tuple[str, ...]
    """A program of each environment; the environment is labelled anew where its label is wrong."""
    paths: tuple[str, ...]
    """Further paths that have to have their labels."""


@dataclass(frozen=True)
class PlannedPort:
    """A TCP port that something of ours listens on."""

    port: int
    user: str
    unit: str


@dataclass(frozen=True)
class Space:
    """Disk that a part of the plan takes."""

    what: str
    path: str
    size: int
    """Bytes; of environments an estimate."""
    stamp: str | None
    """A file that is there once the part is; None: what lies in ``path`` counts."""


@dataclass(frozen=True)
class Devices:
    """The devices of one server."""

    instance: str
    indices: tuple[int, ...]
    tensor_parallel: int
    memory_fraction: float
    """Of each device's memory, which the server takes."""


@dataclass(frozen=True)
class Requirements:
    """What a host has to bring: preflight judges by it before anything is changed."""

    target: Target
    """What the catalogue's gates go by; the driver is the host's to tell."""
    release: str | None
    devices: tuple[Devices, ...]
    topology: Topology | None
    """The host's devices and their links as the inventory declares them."""
    ports: tuple[PlannedPort, ...]
    spaces: tuple[Space, ...]
    directories: tuple[str, ...]
    """Paths that must be writable."""
    model_bytes: int
    proxy: str | None
    """HTTP proxy that the inventory names."""
    service_user: str
    home: str
    """Of the service user."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All whose file systems have to be writable and to have room."""
        spaces = (space.path for space in self.spaces)
        return tuple(dict.fromkeys((*SYSTEM_DIRECTORIES, *self.directories, *spaces)))


@dataclass(frozen=True)
class HostPlan:
    """All that one host shall be."""

    name: str
    platform: str
    family: str
    packages: tuple[str, ...]
    preparation: Preparation
    service_user: str
    no_login_shell: str
    sysctl: dict[str, str]
    home: str
    directories: tuple[PlannedDirectory, ...]
    files: tuple[PlannedFile, ...]
    absent: dict[str, tuple[str, ...]]
    """Paths of files that must not be there, by role."""
    download_environment: dict[str, str]
    proxy_url: str | None
    ca_bundle: str | None
    package_options: tuple[str, ...]
    """Options of pip and uv that name the package sources."""
    trusted_hosts: tuple[str, ...]
    """Package sources without TLS, which pip has to be told of; the hashes guard what they give."""
    frontend: FrontendPlan
    cmake: CmakePlan | None
    """None: nothing is built on the host."""
    tools: EnvironmentPlan
    program: str
    """Path of the fp8fleet zipapp on the host."""
    engine: EnvironmentPlan | None
    model: ModelPlan | None
    instances: tuple[InstancePlan, ...]
    proxy: ProxyPlan | None
    requirements: Requirements
    drivers: DriversPlan
    firewall: FirewallPlan
    selinux: SelinuxPlan | None
    """None: SELinux is left alone."""
    kysec: bool
    """The platform comes with KySec, which has to trust what is installed."""
    notes: tuple[str, ...]
    """What the operator should know of this plan."""
    gateways: tuple[str, ...]
    """Names of the hosts that send requests here."""

    def role_absent(self, role: str) -> tuple[str, ...]:
        """Paths of the files that ``role`` removes: secrets that the inventory no longer has."""
        return self.absent.get(role, ())

    def role_files(self, role: str) -> tuple[PlannedFile, ...]:
        """The files that ``role`` puts in place."""
        return tuple(file for file in self.files if file.role == role)

    @property
    def servers(self) -> tuple[InstancePlan, ...]:
        """The servers with an API: not the nodes that follow another host's."""
        return tuple(instance for instance in self.instances if instance.has_api)

    @property
    def environments(self) -> tuple[EnvironmentPlan, ...]:
        """The environments in the order in which they are made."""
        return (self.tools, self.engine) if self.engine else (self.tools,)


@dataclass(frozen=True)
class FleetPlan:
    """The plan of the whole fleet, by host name."""

    inventory: str
    hosts: dict[str, HostPlan]

"""The plan: what every host shall be, computed from the inventory, the catalogue and models/ alone.

Pure: no host, no secret and no network is needed, and the same input gives the same plan. Roles
make it so, `fp8fleet plan` and `fp8fleet render` print it, acceptance proves it.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.version import Version
from yaml import YAMLError

from fp8fleet import catalog, render
from fp8fleet.catalog import Platform, Release
from fp8fleet.catalog_check import Combination, Target, advice, check, is_fp8_block
from fp8fleet.errors import OperatorError
from fp8fleet.headers import HEADERS, HeaderError, read_headers
from fp8fleet.inventory import Fleet, FleetHost
from fp8fleet.locks import Lock, pinned_part, read_lock
from fp8fleet.manifest import TORRENT, Manifest, load_manifest
from fp8fleet.secrets import SecretRef
from fp8fleet.spec import HostSpec, InstanceSpec
from fp8fleet.zipapp import zipapp_bytes, zipapp_name

CONFIG_DIRECTORY = "/etc/fp8fleet"
RUN_DIRECTORY = "/run/fp8fleet"
UNIT_DIRECTORY = "/etc/systemd/system"
UNIT_PREFIX = "fp8fleet-"
STAMP = ".fp8fleet-whole"
"""The last file that is written into an environment; without it the environment is made anew."""
PEER_UNIT = f"{UNIT_PREFIX}peer.service"
"""Gives a host's model to the other hosts."""
NGINX_KEEPALIVE_S = 60
"""Nginx's default for idle upstream connections; the servers keep theirs open longer."""


def _bracketed(address: str) -> str:
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
    headers: str | None
    """The stored headers that the shards must have; None: models/ has none."""
    rate_limit: float | None
    """Megabytes a second."""
    peer: PeerPlan | None
    note: str | None
    """Why the host does not share, where the inventory would have it."""


@dataclass(frozen=True)
class InstancePlan:
    """One vLLM server as a systemd unit."""

    name: str
    unit: str
    address: str
    port: int
    devices: tuple[int, ...]
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

    @property
    def upstream(self) -> str:
        """``address:port`` under which the proxy reaches the server."""
        return f"{_bracketed(self.address)}:{self.port}"

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
        return f"http://{_bracketed(self.address)}:{self.listen}"


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
    ports: tuple[PlannedPort, ...]
    spaces: tuple[Space, ...]
    directories: tuple[str, ...]
    """Paths that must be writable."""
    model_bytes: int
    proxy: str | None
    """HTTP proxy that the inventory names."""


@dataclass(frozen=True)
class HostPlan:
    """All that one host shall be."""

    name: str
    platform: str
    family: str
    packages: tuple[str, ...]
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
    tools: EnvironmentPlan
    program: str
    """Path of the fp8fleet zipapp on the host."""
    engine: EnvironmentPlan | None
    model: ModelPlan | None
    instances: tuple[InstancePlan, ...]
    proxy: ProxyPlan | None
    requirements: Requirements
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
    def environments(self) -> tuple[EnvironmentPlan, ...]:
        """The environments in the order in which they are made."""
        return (self.tools, self.engine) if self.engine else (self.tools,)


@dataclass(frozen=True)
class FleetPlan:
    """The plan of the whole fleet, by host name."""

    inventory: str
    hosts: dict[str, HostPlan]


def make_plan(fleet: Fleet, root: Path = Path()) -> FleetPlan:
    """Compute what every host of ``fleet`` shall be.

    Args:
        fleet: the validated inventory.
        root: folder to which the inventory's file names (locks, manifests) are relative.

    Raises:
        OperatorError: a named file is missing or broken, or two settings contradict each other.
    """
    serving = {h.name: _serving(fleet, h, root) for h in fleet.hosts if not h.is_gateway}
    _check_addresses(fleet, serving)
    plans = {}
    for host in fleet.hosts:
        try:
            plans[host.name] = _host_plan(fleet, host, serving, root)
        except OperatorError as error:
            raise OperatorError(f"{fleet.path}: host {host.name}: {error}") from None
        except _BEYOND_MEANING as error:
            text = f"{fleet.path}: host {host.name}: {type(error).__name__}: {error}"
            raise OperatorError(f"{text}; no value of an inventory file can be that") from None
    return FleetPlan(fleet.path, plans)


_BEYOND_MEANING = (YAMLError, UnicodeError, RecursionError, ValueError)
"""What odd Python objects in an inventory, which is code, lead to when they are written out."""


@dataclass(frozen=True)
class _Serving:
    """What a serving host contributes to its own plan and to the gateways'."""

    release: Release
    lock: Lock
    pins: str
    manifest: Manifest
    headers: bytes | None
    """The model's headers.json."""
    torrent: bytes | None
    """The model's model.torrent."""
    model_id: str
    engine: EnvironmentPlan
    instances: tuple[InstancePlan, ...]
    target: Target
    notes: tuple[str, ...]


def _serving(fleet: Fleet, host: FleetHost, root: Path) -> _Serving:
    spec = host.spec
    try:
        assert spec.engine_release and spec.engine_requirements and spec.model_manifest
        release = catalog.releases()[spec.engine_release]
        manifest = load_manifest(root / spec.model_manifest)
        target = _target_of(spec, manifest)
        notes = _check_release(spec, target)
        lock = read_lock(root / spec.engine_requirements)
        have = lock.versions.get(release.distribution)
        if have != catalog.release_version(spec.engine_release):
            raise OperatorError(
                f"engine_requirements = {spec.engine_requirements!r}: has {release.distribution}"
                f" {have}, engine_release is {spec.engine_release}"
            )
        model_id = spec.served_model_name or manifest.name
        engine = _engine(spec, release, lock)
        address = _listen_address(fleet, host)
        instances = tuple(
            _instance(spec, release, instance, address, model_id) for instance in spec.instances
        )
        return _Serving(
            release,
            lock,
            pinned_part(lock, spec.engine_pins),
            manifest,
            _headers(root / spec.model_manifest),
            _torrent(root / spec.model_manifest),
            model_id,
            engine,
            instances,
            target,
            notes,
        )
    except OperatorError as error:
        raise OperatorError(f"{fleet.path}: host {host.name}: {error}") from None
    except _BEYOND_MEANING as error:
        text = f"{fleet.path}: host {host.name}: {type(error).__name__}: {error}"
        raise OperatorError(f"{text}; no value of an inventory file can be that") from None


def _torrent(manifest: Path) -> bytes | None:
    path = manifest.with_name(TORRENT)
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise OperatorError(f"{path}: cannot be read: {error}") from None


def _headers(manifest: Path) -> bytes | None:
    """The headers that are stored beside a manifest; None: there are none."""
    path = manifest.with_name(HEADERS)
    try:
        status = path.stat()
        return _checked_headers(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, HeaderError) as error:
        raise OperatorError(f"{error}: create the manifest anew, or remove {path}") from None


@functools.cache
def _checked_headers(path: Path, mtime_ns: int, size: int) -> bytes:
    """Read and check a headers.json: once for all hosts, a large model's are some 10 MB."""
    del mtime_ns, size
    read_headers(path)
    return path.read_bytes()


def _target_of(spec: HostSpec, manifest: Manifest) -> Target:
    return Target(
        platform=spec.platform,
        architecture=spec.arch,
        python=spec.engine_python,
        accelerator=spec.accelerator,
        pins=spec.engine_pins,
        build=spec.engine_build,
        fp8_block=is_fp8_block(manifest.quantization),
        validated=tuple(
            Combination(line.driver, line.engine, line.cuda) for line in spec.validated_combinations
        ),
    )


def _check_release(spec: HostSpec, target: Target) -> tuple[str, ...]:
    """Refuse what the catalogue knows to be impossible, before hours of installation show it.

    Returns:
        The gates' warnings.
    """
    assert spec.engine_release
    notes: dict[str, None] = {}
    for instance in spec.instances:
        dtype = instance.options.get("kv-cache-dtype")
        own = replace(
            target, kv_cache_dtype=str(dtype) if dtype else None, options=instance.options
        )
        for verdict in check(spec.engine_release, own):
            if verdict.severity == "error":
                raise OperatorError(f"{verdict} ({advice(spec.engine_release, own)})")
            notes[str(verdict)] = None
    return tuple(notes)


def _check_addresses(fleet: Fleet, serving: dict[str, _Serving]) -> None:
    """One upstream twice would send a server twice its share."""
    if not any(host.is_gateway for host in fleet.hosts):
        return
    holders: dict[str, str] = {}
    for name, own in serving.items():
        for instance in own.instances:
            other = holders.setdefault(instance.upstream, name)
            if other != name:
                raise OperatorError(
                    f"{fleet.path}: host {name}: {instance.upstream} is also an address of host"
                    f" {other}: give each host its own service_address"
                )


def _listen_address(fleet: Fleet, host: FleetHost) -> str:
    if not any(other.is_gateway for other in fleet.hosts):
        return "127.0.0.1"
    if host.spec.service_address is None:
        raise OperatorError(
            "service_address is not set: the gateway needs it to reach this host's servers"
        )
    return host.spec.service_address


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _engine(spec: HostSpec, release: Release, lock: Lock) -> EnvironmentPlan:
    assert spec.accelerator and spec.engine_release
    conda: tuple[str, ...] = ()
    if release.cuda and catalog.accelerators()[spec.accelerator].vendor == "nvidia":
        conda = catalog.cuda_versions()[release.cuda].conda
    digest = _digest(lock.digest, spec.engine_python, spec.engine_build, *conda, *spec.engine_pins)
    name = f"{spec.engine_release}-{digest}"
    return EnvironmentPlan(
        name=f"engine {spec.engine_release}",
        prefix=f"{spec.install_directory}/engines/{name}",
        python=spec.engine_python,
        conda_packages=conda,
        channels=spec.conda_channels,
        requirements=f"{CONFIG_DIRECTORY}/requirements/engine-{name}.txt",
        pins=f"{CONFIG_DIRECTORY}/requirements/pins-{name}.txt" if spec.engine_pins else None,
        build=spec.engine_build,
        proof="vllm",
        proof_environment=_target(spec),
    )


def _target(spec: HostSpec) -> dict[str, str]:
    """vLLM's CPU build has to be told what it is (VLLM_TARGET_DEVICE in vllm/envs.py)."""
    return {"VLLM_TARGET_DEVICE": "cpu"} if spec.accelerator == "cpu" else {}


def _tools(spec: HostSpec, lock: Lock) -> EnvironmentPlan:
    digest = _digest(lock.digest, spec.tools_python)
    return EnvironmentPlan(
        name="tools",
        prefix=f"{spec.install_directory}/tools/{digest}",
        python=spec.tools_python,
        conda_packages=("pip",),
        channels=spec.conda_channels,
        requirements=f"{CONFIG_DIRECTORY}/requirements/tools-{digest}.txt",
        pins=None,
        build="wheel",
        proof="pydantic",
        proof_environment={},
    )


def _frontend(spec: HostSpec) -> FrontendPlan:
    if spec.conda_frontend_path:
        return FrontendPlan(program=spec.conda_frontend_path)
    assert spec.conda_frontend_sha256 and spec.conda_frontend_url
    prefix = f"{spec.install_directory}/frontend/{spec.conda_frontend_sha256[:12]}"
    return FrontendPlan(
        program=f"{prefix}/bin/conda",
        prefix=prefix,
        url=spec.conda_frontend_url,
        sha256=spec.conda_frontend_sha256,
    )


def _instance(
    spec: HostSpec, release: Release, instance: InstanceSpec, address: str, model_id: str
) -> InstancePlan:
    base = f"{CONFIG_DIRECTORY}/instances/{instance.name}"
    unit = f"{UNIT_PREFIX}{instance.name}.service"
    options: dict[str, Any] = {
        "host": address,
        "port": instance.port,
        "served-model-name": model_id,
        "tensor-parallel-size": instance.tensor_parallel_size,
    }
    notes = []
    if release.shutdown_timeout:
        options["shutdown-timeout"] = spec.drain_timeout
    else:
        notes.append(
            f"vLLM {spec.engine_release} has no --shutdown-timeout:"
            " requests that run when it stops are aborted"
        )
    options.update(instance.options)
    return InstancePlan(
        name=instance.name,
        unit=unit,
        address=address,
        port=instance.port,
        devices=instance.devices,
        model_id=model_id,
        options=options,
        options_file=f"{base}.yaml",
        environment_file=f"{base}.env",
        key_file=_key_file(instance.name) if spec.api_key else None,
        marker=f"{RUN_DIRECTORY}/{instance.name}.ready",
        start_timeout_s=spec.start_timeout,
        warm_up_concurrency=spec.warm_up_concurrency,
        files=(f"{UNIT_DIRECTORY}/{unit}", f"{base}.yaml", f"{base}.env"),
        notes=tuple(notes),
    )


def _host_plan(fleet: Fleet, host: FleetHost, serving: dict[str, _Serving], root: Path) -> HostPlan:
    spec = host.spec
    platform = catalog.platforms()[spec.platform]
    own = serving.get(host.name)
    gateways = tuple(other.name for other in fleet.hosts if other.is_gateway)
    tools_lock = read_lock(root / spec.tools_requirements)
    tools = _tools(spec, tools_lock)
    program = f"{spec.install_directory}/bin/{zipapp_name()}"
    peer, note = _peer(fleet, host, serving) if own else (None, None)
    model = _model(spec, own, peer, note) if own else None
    files = [*_host_files(spec, platform)]
    files += _conda_files(own, tools, tools_lock, program)
    if own and model:
        files += _model_files(spec, own, model, tools, program)
        files += [f for i in own.instances for f in _instance_files(spec, own, i, model)]
    proxy, proxy_files = _proxy(fleet, host, platform, serving)
    files += proxy_files
    return HostPlan(
        name=host.name,
        platform=spec.platform,
        family=platform.family,
        packages=_packages(platform, own is not None, proxy is not None),
        service_user=spec.service_user,
        no_login_shell="/usr/sbin/nologin" if platform.family == "apt" else "/sbin/nologin",
        sysctl={key: str(value) for key, value in spec.sysctl.items()},
        home=_home(spec),
        directories=_directories(spec, model),
        files=tuple(files),
        absent=_absent(spec, own, model),
        download_environment=_download_environment(spec),
        proxy_url=spec.proxy,
        ca_bundle=spec.ca_bundle,
        package_options=_package_options(spec),
        trusted_hosts=_trusted_hosts(spec),
        frontend=_frontend(spec),
        tools=tools,
        program=program,
        engine=own.engine if own else None,
        model=model,
        instances=own.instances if own else (),
        proxy=proxy,
        requirements=_requirements(spec, own, tools, model, proxy),
        notes=own.notes if own else (),
        gateways=() if host.is_gateway else gateways,
    )


TOOLS_BYTES = 400 << 20
"""Disk that the tools environment takes with its Python, rounded up from a lab host's."""


def _requirements(
    spec: HostSpec,
    own: _Serving | None,
    tools: EnvironmentPlan,
    model: ModelPlan | None,
    proxy: ProxyPlan | None,
) -> Requirements:
    spaces = [_environment_space(tools, TOOLS_BYTES)]
    if own and model and spec.accelerator:
        vendor = catalog.vendors()[catalog.accelerators()[spec.accelerator].vendor]
        spaces.append(_environment_space(own.engine, vendor.environment_gib << 30))
        spaces.append(Space(f"model {model.name}", model.directory, model.size, None))
    paths = [spec.install_directory]
    if own:
        paths += [spec.model_directory, spec.cache_directory]
    return Requirements(
        target=own.target if own else Target(spec.platform, spec.arch),
        release=spec.engine_release if own else None,
        devices=tuple(_devices(spec, i) for i in spec.instances) if own else (),
        ports=_ports(own, proxy),
        spaces=tuple(spaces),
        directories=tuple(paths),
        model_bytes=model.size if model else 0,
        proxy=spec.proxy,
    )


def _environment_space(environment: EnvironmentPlan, size: int) -> Space:
    prefix = environment.prefix
    return Space(f"environment {environment.name}", prefix, size, f"{prefix}/{STAMP}")


def _devices(spec: HostSpec, instance: InstanceSpec) -> Devices:
    """vLLM's default share of a device's memory is 0.92 since 0.20, 0.9 before."""
    new = Version(catalog.release_version(spec.engine_release or "")) >= Version("0.20")
    share = instance.options.get("gpu-memory-utilization", 0.92 if new else 0.9)
    fraction = float(share) if isinstance(share, int | float) else 1.0
    return Devices(instance.name, instance.devices, instance.tensor_parallel_size, fraction)


def _ports(own: _Serving | None, proxy: ProxyPlan | None) -> tuple[PlannedPort, ...]:
    ports = [PlannedPort(i.port, f"server {i.name}", i.unit) for i in own.instances] if own else []
    if proxy:
        ports.append(PlannedPort(proxy.listen, "the proxy", "nginx.service"))
        ports.append(PlannedPort(proxy.status_port, "the proxy's status", "nginx.service"))
    return tuple(ports)


def _packages(platform: Platform, serves: bool, proxies: bool) -> tuple[str, ...]:
    names = [*platform.packages]
    names += platform.serving_packages if serves else ()
    names += platform.proxy_packages if proxies else ()
    return tuple(sorted(names))


def _absent(
    spec: HostSpec, own: _Serving | None, model: ModelPlan | None
) -> dict[str, tuple[str, ...]]:
    absent: dict[str, tuple[str, ...]] = {}
    if own and not spec.api_key:
        absent["vllm"] = tuple(_key_file(instance.name) for instance in own.instances)
    if model and not spec.model_token:
        absent["model"] = (_token_file(model.name, model.revision),)
    return absent


def _key_file(instance: str) -> str:
    return f"{CONFIG_DIRECTORY}/instances/{instance}.key"


def _token_file(model: str, revision: str) -> str:
    return f"{CONFIG_DIRECTORY}/models/{model}-{revision}.token"


def _home(spec: HostSpec) -> str:
    return f"{spec.cache_directory}/home"


def _caches(spec: HostSpec) -> str:
    return f"{spec.cache_directory}/vllm-{spec.engine_release}"


def _directories(spec: HostSpec, model: ModelPlan | None) -> tuple[PlannedDirectory, ...]:
    plain = [CONFIG_DIRECTORY, f"{CONFIG_DIRECTORY}/requirements", spec.install_directory]
    plain += [f"{spec.install_directory}/bin"]
    if model is None:
        return tuple(PlannedDirectory(path) for path in plain)
    plain += [f"{CONFIG_DIRECTORY}/instances", f"{CONFIG_DIRECTORY}/models"]
    plain += [spec.model_directory, spec.cache_directory]
    owned = [_home(spec), _caches(spec)]
    user = spec.service_user
    return tuple(PlannedDirectory(path) for path in plain) + tuple(
        PlannedDirectory(path, "750", user, user) for path in owned
    )


def _download_environment(spec: HostSpec) -> dict[str, str]:
    """Variables that curl, conda, pip and uv read: proxy and CA bundle."""
    variables = {"CONDA_PKGS_DIRS": f"{spec.install_directory}/.cache/conda"}
    variables["UV_CACHE_DIR"] = f"{spec.install_directory}/.cache/uv"
    if spec.proxy:
        for name in ("http_proxy", "https_proxy"):
            variables[name] = spec.proxy
        variables["no_proxy"] = ",".join(spec.no_proxy)
    if spec.ca_bundle:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
            variables[name] = spec.ca_bundle
    return variables


def _package_options(spec: HostSpec) -> tuple[str, ...]:
    options = [f"--find-links={link}" for link in spec.package_find_links]
    if spec.package_index:
        options.append(f"--index-url={spec.package_index}")
    elif options:
        options.append("--no-index")
    return tuple(options)


def _trusted_hosts(spec: HostSpec) -> tuple[str, ...]:
    urls = [*spec.package_find_links, *([spec.package_index] if spec.package_index else [])]
    plain = (urlsplit(url) for url in urls if url.startswith("http://"))
    return tuple(sorted({url.netloc.rpartition("@")[2] for url in plain}))


def _host_files(spec: HostSpec, platform: Platform) -> list[PlannedFile]:
    values = {"spec": spec}
    files = [
        _file("host", "/etc/sysctl.d/90-fp8fleet.conf", values, "sysctl.conf"),
        _file("host", "/etc/security/limits.d/90-fp8fleet.conf", values, "limits.conf"),
    ]
    if platform.family == "apt":
        files.append(_file("host", "/etc/apt/apt.conf.d/90fp8fleet", values))
        if spec.apt_sources is not None:
            files.append(_file("host", "/etc/apt/sources.list.d/fp8fleet.list", values))
    return files


def _conda_files(
    own: _Serving | None, tools: EnvironmentPlan, tools_lock: Lock, program: str
) -> list[PlannedFile]:
    files = [
        PlannedFile("conda", tools.requirements, tools_lock.text.encode()),
        PlannedFile("conda", program, zipapp_bytes()),
    ]
    if own:
        files.append(PlannedFile("conda", own.engine.requirements, own.lock.text.encode()))
        if own.engine.pins:
            files.append(PlannedFile("conda", own.engine.pins, own.pins.encode()))
    return files


def _model(spec: HostSpec, own: _Serving, peer: PeerPlan | None, note: str | None) -> ModelPlan:
    manifest = own.manifest
    name = f"{manifest.name}-{manifest.revision}"
    return ModelPlan(
        name=manifest.name,
        revision=manifest.revision,
        manifest=f"{CONFIG_DIRECTORY}/models/{name}.toml",
        directory=f"{spec.model_directory}/{manifest.name}/{manifest.revision}",
        size=manifest.total_bytes,
        files=len(manifest.files),
        token=_token_file(manifest.name, manifest.revision) if spec.model_token else None,
        headers=f"{CONFIG_DIRECTORY}/models/{name}.headers.json" if own.headers else None,
        rate_limit=spec.model_rate_limit,
        peer=peer,
        note=note,
    )


def _peer(
    fleet: Fleet, host: FleetHost, serving: dict[str, _Serving]
) -> tuple[PeerPlan | None, str | None]:
    """How ``host`` shares its model, or why it does not; neither where it is not asked for."""
    own = serving[host.name]
    shares = [
        f"{_bracketed(other.spec.storage_address)}:{other.spec.peer_port}"
        for other in fleet.hosts
        if other.spec.peer_transfer
        and other.spec.storage_address
        and other.name in serving
        and serving[other.name].manifest.digest == own.manifest.digest
    ]
    if not host.spec.peer_transfer or not host.spec.storage_address or len(shares) < 2:
        return None, None
    if own.torrent is None:
        return None, "not shared between hosts: make model.torrent (fp8fleet manifest torrent)"
    name = f"{own.manifest.name}-{own.manifest.revision}"
    listen = f"{_bracketed(host.spec.storage_address)}:{host.spec.peer_port}"
    return PeerPlan(f"{CONFIG_DIRECTORY}/models/{name}.torrent", listen, tuple(shares)), None


def _model_files(
    spec: HostSpec, own: _Serving, model: ModelPlan, tools: EnvironmentPlan, program: str
) -> list[PlannedFile]:
    sources = spec.model_sources or tuple(own.manifest.sources)
    if not sources:
        raise OperatorError(
            f"model_sources is not set and {spec.model_manifest} names no sources: set one"
        )
    text = render.manifest_text(own.manifest, sources)
    files = [PlannedFile("model", model.manifest, text.encode())]
    if own.headers and model.headers:
        files.append(PlannedFile("model", model.headers, own.headers))
    if own.torrent and model.peer:
        files.append(PlannedFile("model", model.peer.torrent, own.torrent))
        values = {
            "spec": spec,
            "model": model,
            "peer": model.peer,
            "digest": hashlib.sha256(own.torrent).hexdigest(),
            "run": f"{tools.interpreter} {program}",
        }
        files.append(_file("model", f"{UNIT_DIRECTORY}/{PEER_UNIT}", values))
    if spec.model_token and model.token:
        files.append(_secret_file("model", model.token, spec.model_token))
    return files


def _instance_files(
    spec: HostSpec, own: _Serving, instance: InstancePlan, model: ModelPlan
) -> list[PlannedFile]:
    secrets = (spec.api_key,) if spec.api_key else ()
    variables = _instance_environment(spec, own, instance)
    values = {
        "spec": spec,
        "instance": instance,
        "engine": own.engine,
        "model": model,
        "caches": spec.cache_directory,
        "nvidia": catalog.accelerators()[spec.accelerator or ""].vendor == "nvidia",
        "stop_timeout": spec.drain_timeout + 30,
        "run_directory": RUN_DIRECTORY,
    }
    files = [
        PlannedFile("vllm", instance.options_file, render.yaml_text(instance.options).encode()),
        PlannedFile(
            "vllm",
            instance.environment_file,
            render.environment_text(variables).encode(),
            mode="600",
            secrets=secrets,
        ),
        _file("vllm", f"{UNIT_DIRECTORY}/{instance.unit}", values, "fp8fleet-instance.service"),
    ]
    if spec.api_key and instance.key_file:
        files.append(_secret_file("vllm", instance.key_file, spec.api_key))
    return files


def _instance_environment(spec: HostSpec, own: _Serving, instance: InstancePlan) -> dict[str, str]:
    """Variables of a server. Sources: vllm/envs.py; FlashInfer's, DeepGEMM's and Triton's docs."""
    caches = _caches(spec)
    variables = {
        "HOME": _home(spec),
        "PATH": f"{own.engine.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "XDG_CACHE_HOME": f"{caches}/xdg",
        "VLLM_CACHE_ROOT": f"{caches}/vllm",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{caches}/flashinfer",
        "DG_JIT_CACHE_DIR": f"{caches}/deep_gemm",
        # longer than Nginx keeps idle upstream connections, or requests meet a closed one: 502
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(NGINX_KEEPALIVE_S + 15),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(spec.start_timeout),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert spec.accelerator
    vendor = catalog.accelerators()[spec.accelerator].vendor
    if vendor == "nvidia":
        variables["CUDA_HOME"] = own.engine.prefix
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    select = catalog.vendors()[vendor].device_variable
    if select:
        variables[select] = ",".join(str(device) for device in instance.devices)
    variables |= _target(spec)
    if spec.api_key:
        variables["VLLM_API_KEY"] = spec.api_key.placeholder
    return variables | spec.engine_environment


def _proxy(
    fleet: Fleet, host: FleetHost, platform: Platform, serving: dict[str, _Serving]
) -> tuple[ProxyPlan | None, list[PlannedFile]]:
    has_gateway = any(other.is_gateway for other in fleet.hosts)
    if has_gateway and not host.is_gateway:
        return None, []
    behind = list(serving.values()) if host.is_gateway else [serving[host.name]]
    models = sorted({s.model_id for s in behind})
    if len(models) != 1:
        raise OperatorError(
            f"the gateway's hosts serve {len(models)} models ({', '.join(models) or 'none'});"
            " one is needed: give them one served_model_name"
        )
    upstreams = tuple(i.upstream for s in behind for i in s.instances)
    values: dict[str, Any] = {
        "spec": host.spec,
        "upstreams": upstreams,
        "keepalive_timeout": NGINX_KEEPALIVE_S,
        "user": "www-data" if platform.family == "apt" else "nginx",
    }
    digest = _digest(render.template("nginx/nginx.conf.j2", values | {"digest": ""}))
    files = [_file("nginx", "/etc/nginx/nginx.conf", values | {"digest": digest})]
    proxy = ProxyPlan(
        listen=host.spec.nginx_listen,
        status_port=host.spec.nginx_status_port,
        model_id=models[0],
        upstreams=upstreams,
        digest=digest,
        api_key=host.spec.api_key,
        address=host.ssh_hostname,
    )
    return proxy, files


def _file(role: str, path: str, values: dict[str, Any], template: str | None = None) -> PlannedFile:
    source = template or Path(path).name
    return PlannedFile(role, path, render.template(f"{role}/{source}.j2", values).encode())


def _secret_file(role: str, path: str, secret: SecretRef) -> PlannedFile:
    content = f"{secret.placeholder}\n".encode()
    return PlannedFile(role, path, content, mode="600", secrets=(secret,))

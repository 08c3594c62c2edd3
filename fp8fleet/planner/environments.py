"""The environments of a host: tools, engine, and where their packages come from."""

from __future__ import annotations

from urllib.parse import urlsplit

from fp8fleet import catalog
from fp8fleet.catalog import Release
from fp8fleet.locks import Lock
from fp8fleet.plan import CONFIG_DIRECTORY, EnvironmentPlan, FrontendPlan, PlannedFile
from fp8fleet.planner.files import digest_of
from fp8fleet.planner.serving import Serving
from fp8fleet.spec import HostSpec
from fp8fleet.zipapp import zipapp_bytes


def engine_environment(spec: HostSpec, release: Release, lock: Lock) -> EnvironmentPlan:
    """The engine's environment; its path names what it is made of."""
    assert spec.engine_release
    conda: tuple[str, ...] = ()
    if release.cuda and spec.vendor == "nvidia":
        conda = catalog.cuda_versions()[release.cuda].conda
    digest = digest_of(
        lock.digest, spec.engine_python, spec.engine_build, *conda, *spec.engine_pins
    )
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
        proof_environment=target_variables(spec),
    )


def target_variables(spec: HostSpec) -> dict[str, str]:
    """vLLM's CPU build has to be told what it is (VLLM_TARGET_DEVICE in vllm/envs.py)."""
    return {"VLLM_TARGET_DEVICE": "cpu"} if spec.accelerator == "cpu" else {}


def tools_environment(spec: HostSpec, lock: Lock) -> EnvironmentPlan:
    """The environment that runs fp8fleet on the host."""
    digest = digest_of(lock.digest, spec.tools_python)
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


def frontend_plan(spec: HostSpec) -> FrontendPlan:
    """The conda frontend, the host's own or one to fetch."""
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


def conda_files(
    own: Serving | None, tools: EnvironmentPlan, tools_lock: Lock, program: str
) -> list[PlannedFile]:
    """Requirements of the environments, and the fp8fleet program."""
    files = [
        PlannedFile("conda", tools.requirements, tools_lock.text.encode()),
        PlannedFile("conda", program, zipapp_bytes()),
    ]
    if own:
        files.append(PlannedFile("conda", own.engine.requirements, own.lock.text.encode()))
        if own.engine.pins:
            files.append(PlannedFile("conda", own.engine.pins, own.pins.encode()))
    return files


def download_environment(spec: HostSpec) -> dict[str, str]:
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


def package_options(spec: HostSpec) -> tuple[str, ...]:
    """Options of pip and uv that name the package sources."""
    options = [f"--find-links={link}" for link in spec.package_find_links]
    if spec.package_index:
        options.append(f"--index-url={spec.package_index}")
    elif options:
        options.append("--no-index")
    return tuple(options)


def trusted_hosts(spec: HostSpec) -> tuple[str, ...]:
    """Package sources without TLS."""
    urls = [*spec.package_find_links, *([spec.package_index] if spec.package_index else [])]
    plain = (urlsplit(url) for url in urls if url.startswith("http://"))
    return tuple(sorted({url.netloc.rpartition("@")[2] for url in plain}))

"""The plan: pure, and for every host what the inventory means."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import DIGEST, GATEWAY, INSTANCE, MANIFEST, REPO, Site, file_text, lock_text, refusal

from fp8fleet import secrets
from fp8fleet.inventory import load_fleet
from fp8fleet.manifest import load_manifest
from fp8fleet.plan import NGINX_KEEPALIVE_S, FleetPlan, HostPlan, PlannedFile, SelinuxPlan
from fp8fleet.planner import make_plan
from fp8fleet.secrets import SecretRef

SERVING_HOSTS = ["gpu-h100-1", "gpu-h100-2", "gpu-a100-1", "gpu-kylin-1"]
UNIT = "/etc/systemd/system/fp8fleet-main.service"
OPTIONS = "/etc/fp8fleet/instances/main.yaml"
ENVIRONMENT = "/etc/fp8fleet/instances/main.env"
NGINX = "/etc/nginx/nginx.conf"


@dataclass(frozen=True)
class Section:
    """A section of a unit, in which a setting may stand several times."""

    settings: dict[str, list[str]]

    def __getitem__(self, name: str) -> str:
        """The value of a setting that stands once."""
        (value,) = self.settings[name]
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.settings


def unit_of(host: HostPlan, name: str = "main") -> dict[str, Section]:
    sections: dict[str, Section] = {}
    for line in file_text(host, f"/etc/systemd/system/fp8fleet-{name}.service").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), Section({}))
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            section.settings.setdefault(key, []).append(value)
    return sections


def options_of(host: HostPlan, name: str = "main") -> dict[str, Any]:
    options = yaml.safe_load(file_text(host, f"/etc/fp8fleet/instances/{name}.yaml"))
    assert isinstance(options, dict)
    return options


def environment_of(host: HostPlan, name: str = "main") -> dict[str, str]:
    lines = file_text(host, f"/etc/fp8fleet/instances/{name}.env").splitlines()
    pairs = [line.partition("=")[::2] for line in lines if not line.startswith("#")]
    return {key: value.strip('"') for key, value in pairs}


# Purity


def test_the_same_input_gives_the_same_plan(prod: FleetPlan) -> None:
    again = make_plan(load_fleet(str(REPO / "inventories/prod.py")), REPO)
    assert again.hosts == prod.hosts


def test_a_plan_opens_no_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection: {arguments}")

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert site.host_plan().instances


def test_a_plan_reads_no_secret_and_no_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SecretRef) -> str:
        raise AssertionError(f"{self} was read")

    monkeypatch.setattr(secrets.SecretRef, "resolve", refuse)
    site.serving |= {"api_key": "env:FP8FLEET_TEST_KEY", "model_token": "file:/no/token"}
    first = site.host_plan()
    monkeypatch.setenv("FP8FLEET_TEST_KEY", "sk-5ecre7")
    assert site.host_plan() == first


def test_a_plan_does_not_depend_on_where_it_is_made(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.host_plan()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert site.host_plan() == first


def test_a_plan_writes_nothing(site: Site, tmp_path: Path) -> None:
    fleet = site.fleet()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    make_plan(fleet, tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


# Listen addresses, upstreams, proxies


def test_servers_listen_on_loopback_where_their_host_has_the_proxy(site: Site) -> None:
    site.hosts = {"gpu-1": {"ssh_hostname": "10.20.0.1"}}
    host = site.host_plan()
    assert options_of(host)["host"] == "127.0.0.1"
    assert host.proxy
    assert host.proxy.upstreams == ("127.0.0.1:8000",)
    assert host.proxy.url == "http://10.20.0.1:8080"


def test_servers_listen_on_loopback_even_with_a_service_address_when_no_gateway_is_there(
    site: Site,
) -> None:
    site.hosts = {"gpu-1": {"ssh_hostname": "10.20.0.1", "service_address": "10.30.0.1"}}
    host = site.host_plan()
    assert options_of(host)["host"] == "127.0.0.1"
    assert host.proxy
    # the control machine knows the host by its SSH name; the service network may not be its own
    assert host.proxy.url == "http://10.20.0.1:8080"


def test_servers_listen_on_the_service_address_behind_a_gateway(gateway_site: Site) -> None:
    plan = gateway_site.plan()
    for name, address in (("gpu-1", "10.30.0.1"), ("gpu-2", "10.30.0.2")):
        assert options_of(plan.hosts[name])["host"] == address
        assert plan.hosts[name].proxy is None
        assert plan.hosts[name].role_files("nginx") == ()
    gateway = plan.hosts["gw-1"]
    assert gateway.proxy
    assert gateway.proxy.upstreams == ("10.30.0.1:8000", "10.30.0.2:8000")


def test_the_ssh_name_is_never_an_upstream(gateway_site: Site) -> None:
    text = file_text(gateway_site.plan().hosts["gw-1"], NGINX)
    assert "10.20.0." not in text
    assert "gpu-" not in text


def test_a_gateway_runs_no_engine_and_has_no_model(gateway_site: Site) -> None:
    gateway = gateway_site.plan().hosts["gw-1"]
    assert gateway.engine is None
    assert gateway.model is None
    assert gateway.instances == ()
    assert {file.role for file in gateway.files} == {"host", "conda", "nginx"}


def test_behind_a_gateway_a_host_without_service_address_is_refused(gateway_site: Site) -> None:
    gateway_site.hosts["gpu-2"] = {}
    message = gateway_site.refusal()
    assert "host gpu-2: service_address is not set: the gateway needs it" in message


def test_an_ipv6_upstream_stands_in_brackets(gateway_site: Site) -> None:
    gateway_site.hosts = {"gpu-1": {"service_address": "fd00::1"}}
    plan = gateway_site.plan()
    gateway = plan.hosts["gw-1"].proxy
    assert gateway
    assert gateway.upstreams == ("[fd00::1]:8000",)
    assert options_of(plan.hosts["gpu-1"])["host"] == "fd00::1"


def test_one_service_address_on_two_hosts_is_refused_with_both(gateway_site: Site) -> None:
    """The gateway would list one upstream twice."""
    gateway_site.hosts["gpu-2"]["service_address"] = "10.30.0.1"
    assert gateway_site.refusal().endswith(
        "host gpu-2: service_address: 10.30.0.1 is also that of host gpu-1: give each host its own"
    )


@pytest.mark.parametrize(
    ("first", "second"), [("fd00::1", "fd00:0:0::0001"), ("10.0.0.1", "::ffff:10.0.0.1")]
)
def test_one_service_address_written_in_two_ways_is_refused(
    gateway_site: Site, first: str, second: str
) -> None:
    gateway_site.hosts["gpu-1"]["service_address"] = first
    gateway_site.hosts["gpu-2"]["service_address"] = second
    assert f"host gpu-2: service_address: {first} is also that of host gpu-1" in (
        gateway_site.refusal()
    )


def test_a_gateway_has_an_address_of_its_own(gateway_site: Site) -> None:
    """A rule for one of two gateways would let in the other, too."""
    gateway_site.gateways["gw-2"] = dict(GATEWAY)
    assert "host gw-2: service_address: 10.30.0.100 is also that of host gw-1" in (
        gateway_site.refusal()
    )
    gateway_site.gateways = {"gw-1": {**GATEWAY, "service_address": "10.30.0.1"}}
    assert "10.30.0.1 is also that of host gpu-1" in gateway_site.refusal()


def test_hosts_that_share_a_model_have_a_storage_address_each(site: Site) -> None:
    site.hosts = {"gpu-1": {"storage_address": "10.40.0.1"}}
    site.hosts["gpu-2"] = {"storage_address": "::ffff:10.40.0.1"}
    assert "host gpu-2: storage_address: 10.40.0.1 is also that of host gpu-1" in site.refusal()
    site.serving["peer_transfer"] = False
    assert set(site.plan().hosts) == {"gpu-1", "gpu-2"}


def test_hosts_with_a_proxy_of_their_own_all_listen_on_loopback(site: Site) -> None:
    site.hosts = {"gpu-1": {}, "gpu-2": {}}
    plans = site.plan().hosts.values()
    assert [i.upstream for plan in plans for i in plan.instances] == ["127.0.0.1:8000"] * 2


def test_a_gateway_over_two_models_is_refused(gateway_site: Site) -> None:
    gateway_site.hosts["gpu-2"]["served_model_name"] = "other"
    message = gateway_site.refusal()
    assert "host gw-1: the gateway's hosts serve 2 models (other, tiny)" in message
    assert "one gateway serves one model: serve one model, or give each a gateway" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "tiny"', 'name = "huge"'),
        ('revision = "1"', 'revision = "2"'),
        ("size = 2", "size = 3"),
    ],
)
def test_a_gateway_over_two_models_of_one_name_is_refused(
    gateway_site: Site, old: str, new: str
) -> None:
    gateway_site.serving["served_model_name"] = "assistant"
    gateway_site.file("models/other/manifest.toml", MANIFEST.replace(old, new))
    assert gateway_site.plan().hosts["gw-1"].proxy
    gateway_site.hosts["gpu-2"]["model_manifest"] = "models/other/manifest.toml"
    message = gateway_site.refusal()
    assert "the gateway's hosts serve 2 models as 'assistant' (tiny 1, digest " in message
    assert ": gpu-1; " in message
    assert message.endswith("or give each a gateway (an inventory of its own)")


def test_one_model_from_other_sources_is_one_model(gateway_site: Site) -> None:
    gateway_site.file("models/other/manifest.toml", MANIFEST.replace("mirror", "other"))
    gateway_site.hosts["gpu-2"]["model_manifest"] = "models/other/manifest.toml"
    assert gateway_site.plan().hosts["gw-1"].proxy


def test_hosts_with_proxies_of_their_own_may_serve_different_models(site: Site) -> None:
    site.file("models/other/manifest.toml", MANIFEST.replace("tiny", "huge"))
    site.hosts = {"gpu-1": {}, "gpu-2": {"model_manifest": "models/other/manifest.toml"}}
    assert {host.proxy.model_id for host in site.plan().hosts.values() if host.proxy} == {
        "tiny",
        "huge",
    }


def test_a_gateway_over_nothing_is_refused(gateway_site: Site) -> None:
    gateway_site.hosts = {}
    assert "serve 0 models (none)" in gateway_site.refusal()


def test_a_proxys_digest_changes_with_its_configuration(site: Site) -> None:
    first = site.host_plan().proxy
    site.serving["nginx_read_timeout"] = 900
    second = site.host_plan().proxy
    assert first
    assert second
    assert first.digest != second.digest


# The engine's environment


def engine_prefix(site: Site) -> str:
    engine = site.host_plan().engine
    assert engine
    return engine.prefix


def test_the_engines_prefix_names_release_and_content(site: Site) -> None:
    assert re.fullmatch(r"/opt/fp8fleet/engines/0\.33\.0-[0-9a-f]{12}", engine_prefix(site))


@pytest.mark.parametrize(
    "change",
    [
        {"engine_python": "3.13"},
        {"engine_build": "source"},
        {"engine_pins": ["pydantic==2.12.5"]},
        {"accelerator": "cpu", "instances": [{"name": "main", "port": 8000}]},
        {"install_directory": "/data/fp8fleet"},
    ],
)
def test_the_engines_prefix_changes_with_what_it_is_made_of(
    site: Site, change: dict[str, Any]
) -> None:
    first = engine_prefix(site)
    site.serving |= change
    assert engine_prefix(site) != first


def test_the_engines_prefix_changes_with_the_lock(site: Site) -> None:
    first = engine_prefix(site)
    site.file("locks/engine.txt", lock_text(vllm="0.33.0", pydantic="2.12.6"))
    assert engine_prefix(site) != first


def test_the_engines_prefix_does_not_change_with_comments_or_with_options(site: Site) -> None:
    first = engine_prefix(site)
    site.file("locks/engine.txt", "# new\n" + lock_text(vllm="0.33.0", pydantic="2.12.5"))
    site.serving["instances"] = [{**INSTANCE, "options": {"max-model-len": 1024}}]
    assert engine_prefix(site) == first


def test_hosts_of_one_kind_share_prefix_and_lock(prod: FleetPlan) -> None:
    engines = [prod.hosts[name].engine for name in ("gpu-h100-1", "gpu-h100-2", "gpu-a100-1")]
    assert engines == [engines[0]] * 3


def test_pins_are_installed_from_their_own_hashed_lines(site: Site) -> None:
    site.serving["engine_pins"] = ["Pydantic==2.12.5"]
    host = site.host_plan()
    assert host.engine
    assert host.engine.pins
    assert file_text(host, host.engine.pins) == f"pydantic==2.12.5 --hash=sha256:{DIGEST}\n"
    assert file_text(host, host.engine.requirements) == lock_text(vllm="0.33.0", pydantic="2.12.5")


def test_without_pins_no_file_of_them_lands(site: Site) -> None:
    host = site.host_plan()
    assert host.engine
    assert host.engine.pins is None
    assert not [file.path for file in host.files if "pins" in file.path]


@pytest.mark.parametrize("name", ["gpu-h100-1", "gpu-a100-1", "gpu-kylin-1"])
def test_gpu_hosts_get_the_compiler_of_their_wheel(prod: FleetPlan, name: str) -> None:
    engine = prod.hosts[name].engine
    assert engine
    assert "cuda-nvcc=13.0" in engine.conda_packages
    assert "ninja" in engine.conda_packages


def test_cpu_hosts_get_no_compiler_and_no_cuda(site: Site) -> None:
    site.serving |= {"accelerator": "cpu", "instances": [{"name": "main", "port": 8000}]}
    host = site.host_plan()
    assert host.engine
    assert host.engine.conda_packages == ()
    assert host.engine.proof_environment == {"VLLM_TARGET_DEVICE": "cpu"}
    environment = environment_of(host)
    assert environment["VLLM_TARGET_DEVICE"] == "cpu"
    assert not [key for key in environment if key.startswith("CUDA")]


def test_the_tools_never_mix_with_the_engine(site: Site) -> None:
    host = site.host_plan()
    assert host.engine
    assert host.tools.prefix.startswith("/opt/fp8fleet/tools/")
    assert host.tools.requirements != host.engine.requirements
    assert [environment.name for environment in host.environments] == ["tools", "engine 0.33.0"]


def test_a_lock_of_another_vllm_is_refused_with_both_versions(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.32.0"))
    message = site.refusal()
    assert "host gpu-1: engine_requirements = 'locks/engine.txt': has vllm 0.32.0" in message
    assert "engine_release is 0.33.0" in message


def test_a_lock_without_vllm_is_refused(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(torch="2"))
    assert "has vllm None, engine_release is 0.33.0" in site.refusal()


@pytest.mark.parametrize("lock", ["locks/engine.txt", "locks/tools.txt"])
def test_a_missing_lock_is_refused_with_host_and_file(site: Site, lock: str) -> None:
    (site.root / lock).unlink()
    message = site.refusal()
    assert "host gpu-1" in message
    assert f"{lock}: no such lock" in message


def test_a_lock_without_hashes_is_refused(site: Site) -> None:
    site.file("locks/engine.txt", "vllm==0.33.0\n")
    assert "vllm: has no hash" in site.refusal()


def test_a_pin_that_contradicts_the_lock_is_refused(site: Site) -> None:
    site.serving["engine_pins"] = ["pydantic==2.14.0"]
    message = site.refusal()
    assert "host gpu-1: engine_pins = 'pydantic==2.14.0'" in message
    assert "has pydantic==2.12.5" in message


OLD_C_LIBRARY = {"engine_release": "0.19.1", "platform": "kylin-v10"}
"""A release whose wheel needs glibc 2.31, on a platform that has 2.28."""


def test_a_wheel_that_needs_a_newer_c_library_than_the_platform_has_is_refused_with_both(
    site: Site,
) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.19.1"))
    site.serving |= OLD_C_LIBRARY
    message = site.refusal()
    assert "host gpu-1: engine_release = '0.19.1': its wheel needs glibc 2.31" in message
    assert "kylin-v10 has 2.28" in message


def test_a_release_built_from_source_takes_the_platforms_c_library(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.19.1"))
    site.serving |= {**OLD_C_LIBRARY, "engine_build": "source"}
    assert site.host_plan().engine


def test_a_wheel_that_needs_the_very_c_library_of_the_platform_is_taken(site: Site) -> None:
    """0.20.0's wheel needs glibc 2.35, Ubuntu 22.04 has it."""
    site.file("locks/engine.txt", lock_text(vllm="0.20.0"))
    site.serving["engine_release"] = "0.20.0"
    assert site.host_plan().engine


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.15"])
def test_a_python_that_the_release_does_not_support_is_refused_with_what_it_does(
    site: Site, version: str
) -> None:
    site.serving["engine_python"] = version
    message = site.refusal()
    needed = f"host gpu-1: engine_python = '{version}': vLLM 0.33.0 needs Python >=3.11,<3.15"
    assert needed in message


def test_a_release_that_does_not_resolve_on_the_platform_is_refused_with_the_newest_that_does(
    site: Site,
) -> None:
    """0.33.0's own wheel would do on Kylin V10; one that it requires does not."""
    site.serving |= {"platform": "kylin-v10", "accelerator": "a100-80g"}
    message = site.refusal()
    assert "engine_release = '0.33.0': does not resolve on kylin-v10 x86_64" in message
    assert "llguidance" in message
    assert message.endswith("(the newest that fits is 0.21.0)")


def test_a_pin_that_the_release_cannot_take_is_refused_with_what_it_needs(site: Site) -> None:
    site.serving["engine_pins"] = ["pydantic==1.10.17"]
    message = site.refusal()
    assert "engine_pins = 'pydantic==1.10.17': vLLM 0.33.0 needs pydantic>=2.12" in message
    assert "without pydantic==1.10.17 it would be 0.33.0" in message


def fp8_site(site: Site, **serving: Any) -> Site:
    """A site that serves a block-FP8 checkpoint."""
    manifest = MANIFEST.replace(
        'revision = "1"', 'revision = "1"\nquantization = "compressed-tensors-fp8-block"'
    )
    site.file("models/tiny/manifest.toml", manifest)
    site.serving |= serving
    return site


def test_what_the_gates_warn_of_becomes_a_note_of_the_plan(site: Site) -> None:
    (note,) = fp8_site(site, accelerator="a100-80g").host_plan().notes
    assert "decompressed when used (W8A16)" in note


@pytest.mark.parametrize(
    ("header", "noted"),
    [
        ("# vLLM 0.33.0 for ubuntu-22.04 x86_64, Python 3.12; made by: fp8fleet lock\n", False),
        ("# made by hand\n", False),
        ("# vLLM 0.33.0 for kylin-v10 x86_64, Python 3.12; made by: fp8fleet lock\n", True),
        ("# vLLM 0.33.0 for ubuntu-22.04 aarch64, Python 3.12; made by: fp8fleet lock\n", True),
    ],
)
def test_a_lock_that_was_made_for_another_platform_or_architecture_is_noted(
    site: Site, header: str, noted: bool
) -> None:
    site.file("locks/engine.txt", header + lock_text(vllm="0.33.0"))
    notes = site.host_plan().notes
    assert [note for note in notes if "the host is ubuntu-22.04 x86_64" in note] == [*notes]
    assert len(notes) == noted


def test_native_block_fp8_has_no_note(site: Site) -> None:
    assert fp8_site(site).host_plan().notes == ()


def test_block_fp8_where_it_cannot_work_is_refused_with_the_alternative(site: Site) -> None:
    message = fp8_site(site, accelerator="v100-32g").refusal()
    assert "accelerator = 'v100-32g': cannot serve block-FP8 checkpoints" in message
    assert "BF16 or INT8" in message


def test_an_fp8_cache_below_capability_8_9_is_refused(site: Site) -> None:
    site.serving["accelerator"] = "a100-80g"
    site.serving["instances"] = [{**INSTANCE, "options": {"kv-cache-dtype": "fp8"}}]
    assert "kv-cache-dtype = 'fp8': needs compute capability 8.9" in site.refusal()


def ascend_site(site: Site, **options: Any) -> Site:
    site.file("locks/engine.txt", lock_text(vllm_ascend="0.23.0", vllm="0.23.0"))
    site.serving |= {
        "platform": "openeuler-22.03",
        "arch": "aarch64",
        "accelerator": "ascend-910b",
        "engine_release": "vllm-ascend-0.23.0",
        "engine_python": "3.11",
        "instances": [{**INSTANCE, "options": options}],
    }
    return site


def test_fp8_is_refused_where_the_accelerator_has_none(site: Site) -> None:
    ascend_site(site, quantization="fp8")
    message = site.refusal()
    assert "quantization 'fp8': ascend-910b has no FP8: serve a BF16 checkpoint" in message
    assert "without FP8 it would be vllm-ascend-0.23.0" in message
    ascend_site(site)
    assert site.plan()
    site.file("models/tiny/manifest.toml", 'quantization = "fp8"\n' + MANIFEST)
    assert "quantization 'fp8': ascend-910b has no FP8" in site.refusal()


@pytest.mark.parametrize("method", ["fp8_per_tensor", "fp8_per_channel"])
def test_online_fp8_below_its_capability_is_refused_or_told(site: Site, method: str) -> None:
    site.serving["instances"] = [{**INSTANCE, "options": {"quantization": method}}]
    assert not site.host_plan().notes
    site.serving["accelerator"] = "a100-80g"
    assert "decompresses FP8 weights when they are used" in "".join(site.host_plan().notes)
    site.serving["accelerator"] = "v100-32g"
    assert f"quantization '{method}': v100-32g has no FP8" in site.refusal()


def test_an_option_that_the_release_lacks_is_refused_with_what_to_write(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "options": {"rope-theta": 500000}}]
    message = site.refusal()
    assert "option 'rope-theta': vLLM 0.33.0 has no --rope-theta" in message
    assert "leave it out: the checkpoint has the right value" in message


def test_a_sites_table_of_combinations_only_warns(site: Site) -> None:
    line = {"driver": "580.95.05", "engine": "0.32.0"}
    site.serving["validated_combinations"] = [line]
    (note,) = site.host_plan().notes
    assert "validated_combinations has no line for vLLM 0.33.0" in note


def test_preflight_gets_ports_disk_and_devices_of_the_plan(site: Site) -> None:
    needs = site.host_plan().requirements
    assert [(p.port, p.unit) for p in needs.ports] == [
        (8000, "fp8fleet-main.service"),
        (8080, "nginx.service"),
        (8089, "nginx.service"),
    ]
    assert [space.what for space in needs.spaces] == [
        "environment tools",
        "environment engine 0.33.0",
        "model tiny",
    ]
    assert [(d.indices, d.memory_fraction) for d in needs.devices] == [((0,), 0.92)]


def test_preflight_of_a_gateway_needs_no_device_and_no_model(gateway_site: Site) -> None:
    needs = gateway_site.plan().hosts["gw-1"].requirements
    assert needs.release is None
    assert needs.devices == ()
    assert [space.what for space in needs.spaces] == ["environment tools"]
    assert [port.port for port in needs.ports] == [8080, 8089]


@pytest.mark.parametrize(
    ("release", "version"),
    [("0.33.0", "3.11"), ("0.33.0", "3.14"), ("0.21.0", "3.10"), ("0.6.3", "3.8")],
)
def test_a_python_that_the_release_supports_is_taken(
    site: Site, release: str, version: str
) -> None:
    site.file("locks/engine.txt", lock_text(vllm=release))
    site.serving |= {"engine_release": release, "engine_python": version}
    engine = site.host_plan().engine
    assert engine
    assert engine.python == version


# The model


def test_a_missing_manifest_is_refused(site: Site) -> None:
    site.serving["model_manifest"] = "models/none/manifest.toml"
    message = site.refusal()
    assert "host gpu-1" in message
    assert "models/none/manifest.toml: no such manifest" in message


@pytest.mark.parametrize("length", [63, 66])
def test_a_manifests_digest_of_another_length_is_refused_with_it(site: Site, length: int) -> None:
    path = site.root / "models/tiny/manifest.toml"
    path.write_text(path.read_text().replace(DIGEST, (DIGEST + DIGEST)[:length]))
    message = site.refusal()
    assert "host gpu-1" in message
    assert "manifest.toml:8: files[0].sha256" in message
    assert f"{length} digits" in message


def test_a_broken_manifest_is_refused(site: Site) -> None:
    site.file("models/tiny/manifest.toml", "name = ")
    assert "manifest.toml: not TOML" in site.refusal()


def test_a_model_without_sources_is_refused(site: Site) -> None:
    path = site.root / "models/tiny/manifest.toml"
    path.write_text(re.sub("sources = .*\n", "", path.read_text()))
    message = site.refusal()
    assert "model_sources is not set" in message
    assert "names no sources" in message


def test_a_model_lies_in_a_folder_of_its_name_and_revision(site: Site) -> None:
    site.serving["model_directory"] = "/data/models"
    host = site.host_plan()
    assert host.model
    assert host.model.directory == "/data/models/tiny/1"
    assert (host.model.files, host.model.size) == (1, 2)


def test_the_inventorys_sources_replace_the_manifests(site: Site, tmp_path: Path) -> None:
    site.serving["model_sources"] = ["http://a.example.com/x", "file:///mnt/models/"]
    host = site.host_plan()
    assert host.model
    landed = tmp_path / "landed.toml"
    landed.write_text(file_text(host, host.model.manifest))
    manifest = load_manifest(landed)
    assert manifest.sources == ("http://a.example.com/x", "file:///mnt/models")


def test_the_landed_manifest_says_the_same_as_the_projects(prod: FleetPlan, tmp_path: Path) -> None:
    host = prod.hosts["gpu-h100-1"]
    assert host.model
    landed = tmp_path / "landed.toml"
    landed.write_text(file_text(host, host.model.manifest))
    own = load_manifest(REPO / "models/tiny-llama/manifest.toml")
    assert load_manifest(landed).digest == own.digest
    assert load_manifest(landed).quantization == own.quantization


HEADERS = '{"a.safetensors": {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}}\n'


def test_stored_headers_land_beside_the_manifest_as_they_are(site: Site) -> None:
    site.file("models/tiny/headers.json", HEADERS)
    host = site.host_plan()
    assert host.model
    assert host.model.headers == "/etc/fp8fleet/models/tiny-1.headers.json"
    assert file_text(host, host.model.headers) == HEADERS


def test_without_stored_headers_none_land(site: Site) -> None:
    host = site.host_plan()
    assert host.model
    assert host.model.headers is None
    assert [file.path for file in host.role_files("model")] == [host.model.manifest]


@pytest.mark.parametrize("text", ["{", "[]", '{"a.safetensors": {"x": 1}}'])
def test_broken_stored_headers_are_refused(site: Site, text: str) -> None:
    site.file("models/tiny/headers.json", text)
    message = site.refusal()
    assert "host gpu-1" in message
    assert "models/tiny/headers.json" in message
    assert "create the manifest anew" in message


# Servers


@pytest.mark.parametrize("name", SERVING_HOSTS)
def test_every_server_of_the_example_is_a_unit_that_runs_its_options(
    prod: FleetPlan, name: str
) -> None:
    host = prod.hosts[name]
    assert host.engine
    assert host.model
    for instance in host.instances:
        unit = unit_of(host, instance.name)
        service = unit["Service"]
        assert service["ExecStart"] == (
            f"{host.engine.prefix}/bin/vllm serve {host.model.directory}"
            f" --config {instance.options_file}"
        )
        assert service["User"] == "vllm"
        assert service["EnvironmentFile"] == instance.environment_file
        assert service["Restart"] == "always"
        assert service["KillMode"] == "mixed"
        assert service["LimitMEMLOCK"] == "infinity"
        assert int(service["LimitNOFILE"]) >= 65536
        assert service["StandardOutput"] == "journal"
        assert unit["Unit"]["RequiresMountsFor"] == host.model.directory
        assert int(unit["Unit"]["StartLimitBurst"]) > 0
        assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize("name", SERVING_HOSTS)
def test_a_stopping_server_has_longer_than_it_needs_to_drain(prod: FleetPlan, name: str) -> None:
    host = prod.hosts[name]
    for instance in host.instances:
        stop = int(unit_of(host, instance.name)["Service"]["TimeoutStopSec"])
        assert stop > options_of(host, instance.name)["shutdown-timeout"]


def test_the_drain_time_is_a_setting(site: Site) -> None:
    site.serving["drain_timeout"] = 900
    host = site.host_plan()
    assert options_of(host)["shutdown-timeout"] == 900
    assert int(unit_of(host)["Service"]["TimeoutStopSec"]) > 900


def test_a_release_that_cannot_drain_gets_no_such_option_and_the_plan_says_so(site: Site) -> None:
    site.file("locks/engine.txt", lock_text(vllm="0.6.3"))
    site.serving["engine_release"] = "0.6.3"
    host = site.host_plan()
    assert "shutdown-timeout" not in options_of(host)
    assert host.instances[0].notes == (
        "vLLM 0.6.3 has no --shutdown-timeout: requests that run when it stops are aborted",
    )


def test_a_release_that_can_drain_has_no_note(prod: FleetPlan) -> None:
    assert [i.notes for host in prod.hosts.values() for i in host.instances] == [()] * 6


STARTED = (
    "+/bin/sh -c 'mkdir -p /run/fp8fleet && exec sha256sum"
    " /etc/systemd/system/fp8fleet-main.service /etc/fp8fleet/instances/main.yaml"
    " /etc/fp8fleet/instances/main.env >/run/fp8fleet/main.started'"
)


def test_a_start_on_an_nvidia_host_makes_cudas_device_files_first(site: Site) -> None:
    """Where the tool is absent (`-`) the server starts nevertheless."""
    assert unit_of(site.host_plan())["Service"].settings["ExecStartPre"] == [
        "+-/usr/bin/nvidia-modprobe -u -c=0",
        STARTED,
    ]


def test_a_start_on_a_cpu_host_only_records_what_it_was_made_of(site: Site) -> None:
    site.serving |= {"accelerator": "cpu", "instances": [{"name": "main", "port": 8000}]}
    assert unit_of(site.host_plan())["Service"]["ExecStartPre"] == STARTED


@pytest.mark.parametrize("name", SERVING_HOSTS)
def test_hardening_leaves_devices_and_run_time_compilers_alone(prod: FleetPlan, name: str) -> None:
    for instance in prod.hosts[name].instances:
        service = unit_of(prod.hosts[name], instance.name)["Service"]
        assert service["NoNewPrivileges"] == "yes"
        assert service["ProtectSystem"] == "strict"
        # ProtectClock implies DeviceAllow=, which before systemd 253 hides every other device.
        for hiding in ("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"):
            assert hiding not in service
        assert "MemoryDenyWriteExecute" not in service


def test_a_server_may_write_only_its_caches(site: Site) -> None:
    host = site.host_plan()
    caches = unit_of(host)["Service"]["ReadWritePaths"]
    environment = environment_of(host)
    for name in (
        "HOME",
        "XDG_CACHE_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "DG_JIT_CACHE_DIR",
    ):
        assert environment[name].startswith(f"{caches}/"), name


def test_caches_lie_in_a_folder_of_the_release_that_the_server_owns(site: Site) -> None:
    host = site.host_plan()
    environment = environment_of(host)
    folder = "/var/cache/fp8fleet/vllm-0.33.0"
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"):
        assert environment[name].startswith(f"{folder}/")
    owners = {directory.path: directory.owner for directory in host.directories}
    assert owners[folder] == owners[environment["HOME"]] == "vllm"
    assert owners["/var/cache/fp8fleet"] == owners[host_model_root(host)] == "root"


def host_model_root(host: HostPlan) -> str:
    assert host.model
    return str(Path(host.model.directory).parents[1])


def test_directories_come_parents_first(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        seen: list[str] = []
        for directory in host.directories:
            assert not [path for path in seen if path.startswith(f"{directory.path}/")]
            seen.append(directory.path)
        assert len(set(seen)) == len(seen)


def test_every_file_has_a_directory_that_is_planned_or_the_systems(prod: FleetPlan) -> None:
    system = {"/etc/sysctl.d", "/etc/security/limits.d", "/etc/systemd/system", "/etc/nginx"}
    for host in prod.hosts.values():
        planned = {directory.path for directory in host.directories}
        planned |= {directory.path for directory in host.preparation.directories}
        for file in host.files:
            assert str(Path(file.path).parent) in planned | system, file.path


def test_no_two_files_of_a_host_have_one_path(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        paths = [file.path for file in host.files]
        assert len(paths) == len(set(paths))


def test_the_environment_of_a_gpu_server(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "devices": [2, 3]}]
    host = site.host_plan()
    assert host.engine
    environment = environment_of(host)
    assert environment["CUDA_HOME"] == host.engine.prefix
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["PATH"].startswith(f"{host.engine.prefix}/bin:")
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert "VLLM_API_KEY" not in environment


@pytest.mark.parametrize("name", SERVING_HOSTS)
def test_servers_keep_connections_longer_than_the_proxy_does(prod: FleetPlan, name: str) -> None:
    assert NGINX_KEEPALIVE_S == 60
    for instance in prod.hosts[name].instances:
        environment = environment_of(prod.hosts[name], instance.name)
        assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > NGINX_KEEPALIVE_S


def test_the_inventorys_variables_are_added(site: Site) -> None:
    site.serving["engine_environment"] = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "0"}
    environment = environment_of(site.host_plan())
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["HF_HUB_OFFLINE"] == "0"


def test_options_are_those_of_the_inventory_and_what_the_plan_owns(site: Site) -> None:
    site.serving["served_model_name"] = "assistant"
    site.serving["instances"] = [
        {
            **INSTANCE,
            "devices": [0, 1],
            "tensor_parallel_size": 2,
            "options": {"max-model-len": 4096, "enable-prefix-caching": True},
        }
    ]
    assert options_of(site.host_plan()) == {
        "host": "127.0.0.1",
        "port": 8000,
        "served-model-name": "assistant",
        "tensor-parallel-size": 2,
        "shutdown-timeout": 120,
        "max-model-len": 4096,
        "enable-prefix-caching": True,
    }


def test_the_model_id_is_the_manifests_name_unless_set(site: Site) -> None:
    assert options_of(site.host_plan())["served-model-name"] == "tiny"


NEVER = ["rope-theta", "dry-run", "swap-space", "task", "disable-log-requests", "quantization"]


@pytest.mark.parametrize("name", SERVING_HOSTS)
def test_options_that_vllm_refuses_or_ignores_are_never_emitted(prod: FleetPlan, name: str) -> None:
    host = prod.hosts[name]
    for instance in host.instances:
        assert not set(NEVER) & options_of(host, instance.name).keys()
        assert "--config=" not in unit_of(host, instance.name)["Service"]["ExecStart"]


def test_changing_an_option_changes_one_file_of_one_server(site: Site) -> None:
    two: list[dict[str, Any]] = [
        {"name": "a", "port": 8000, "devices": [0]},
        {"name": "b", "port": 8001, "devices": [1]},
    ]
    site.serving["instances"] = two
    before = {file.path: file.content for file in site.host_plan().files}
    site.serving["instances"] = [two[0], {**two[1], "options": {"max-model-len": 1024}}]
    after = {file.path: file.content for file in site.host_plan().files}
    assert [path for path in after if after[path] != before[path]] == [
        "/etc/fp8fleet/instances/b.yaml"
    ]


def test_changing_the_proxy_changes_one_file(site: Site) -> None:
    before = {file.path: file.content for file in site.host_plan().files}
    site.serving["nginx_body_size"] = "128m"
    after = {file.path: file.content for file in site.host_plan().files}
    assert [path for path in after if after[path] != before[path]] == [NGINX]


def test_a_changed_file_that_needs_a_restart_is_among_the_servers_files(site: Site) -> None:
    host = site.host_plan()
    assert set(host.instances[0].files) == {UNIT, OPTIONS, ENVIRONMENT}


# Secrets


def test_files_hold_placeholders_and_only_a_deploy_fills_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serving |= {"api_key": "env:FP8FLEET_TEST_KEY", "model_token": "env:FP8FLEET_TEST_TOKEN"}
    host = site.host_plan()
    monkeypatch.setenv("FP8FLEET_TEST_KEY", "sk-5ecre7")
    monkeypatch.setenv("FP8FLEET_TEST_TOKEN", "hf-5ecre7")
    assert environment_of(host)["VLLM_API_KEY"] == "<secret FP8FLEET_TEST_KEY>"
    secret = {file.path: file for file in host.files if file.secrets}
    assert set(secret) == {
        ENVIRONMENT,
        "/etc/fp8fleet/instances/main.key",
        "/etc/fp8fleet/models/tiny-1.token",
    }
    for file in secret.values():
        assert (file.mode, file.owner, file.group) == ("600", "root", "root")
        assert b"5ecre7" not in file.content
        assert b"<secret" not in file.resolved()
    assert b'VLLM_API_KEY="sk-5ecre7"\n' in secret[ENVIRONMENT].resolved()
    assert secret["/etc/fp8fleet/instances/main.key"].resolved() == b"sk-5ecre7\n"
    assert secret["/etc/fp8fleet/models/tiny-1.token"].resolved() == b"hf-5ecre7\n"


def test_a_missing_secret_stops_the_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8FLEET_TEST_KEY", raising=False)
    reference = SecretRef.parse("env:FP8FLEET_TEST_KEY")
    file = PlannedFile("vllm", "/x", reference.placeholder.encode(), secrets=(reference,))
    assert "FP8FLEET_TEST_KEY is not set" in refusal(file.resolved)


def test_a_file_without_secrets_is_what_it_is() -> None:
    assert PlannedFile("host", "/x", b"<secret A>").resolved() == b"<secret A>"


def test_a_secret_in_a_file_with_every_character_that_its_path_may_have_is_filled_in(
    site: Site, tmp_path: Path
) -> None:
    key = tmp_path / "Key-1_a.b@c+d"
    key.write_text("sk-5ecre7\n")
    key.chmod(0o600)
    site.serving["api_key"] = f"file:{key}"
    host = site.host_plan()
    file = next(file for file in host.files if file.path == ENVIRONMENT)
    assert b'VLLM_API_KEY="sk-5ecre7"' in file.resolved()


# Host


def test_package_sources_become_options_of_pip_and_uv(site: Site) -> None:
    assert site.host_plan().package_options == ()
    site.serving["package_index"] = "https://m.example.com/simple"
    assert site.host_plan().package_options == ("--index-url=https://m.example.com/simple",)
    site.serving["package_find_links"] = ["file:///mnt/wheels"]
    assert site.host_plan().package_options == (
        "--find-links=file:///mnt/wheels",
        "--index-url=https://m.example.com/simple",
    )
    del site.serving["package_index"]
    assert site.host_plan().package_options == ("--find-links=file:///mnt/wheels", "--no-index")


def test_proxy_and_ca_bundle_reach_every_download(site: Site) -> None:
    site.serving |= {"proxy": "http://proxy:3128", "ca_bundle": "/etc/ssl/site.pem"}
    environment = site.host_plan().download_environment
    assert environment["https_proxy"] == environment["http_proxy"] == "http://proxy:3128"
    assert environment["no_proxy"] == "localhost,127.0.0.1"
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        assert environment[name] == "/etc/ssl/site.pem"


APT_LIST = "/etc/apt/sources.list.d/fp8fleet.list"
APT_CONF = "/etc/apt/apt.conf.d/90fp8fleet"


def test_apt_sources_replace_the_hosts_own(site: Site) -> None:
    site.serving["apt_sources"] = ["deb http://m.example.com/debian ./"]
    host = site.host_plan()
    assert "deb http://m.example.com/debian ./\n" in file_text(host, APT_LIST)
    assert f'Dir::Etc::sourcelist "{APT_LIST}";' in file_text(host, APT_CONF)
    assert 'Dir::Etc::sourceparts "-";' in file_text(host, APT_CONF)


def test_without_apt_sources_the_hosts_own_are_used(site: Site) -> None:
    host = site.host_plan()
    assert APT_LIST not in [file.path for file in host.files]
    assert "Dir::Etc" not in file_text(host, APT_CONF)


def test_apt_gets_the_proxy_and_the_ca_bundle(site: Site) -> None:
    site.serving |= {"proxy": "http://proxy:3128", "ca_bundle": "/etc/ssl/site.pem"}
    text = site.content(APT_CONF)
    assert 'Acquire::https::Proxy "http://proxy:3128";' in text
    assert 'Acquire::https::CaInfo "/etc/ssl/site.pem";' in text


def test_a_kylin_host_has_rpm_packages_and_no_apt_files(prod: FleetPlan) -> None:
    host = prod.hosts["gpu-kylin-1"]
    assert host.family == "dnf"
    assert host.no_login_shell == "/sbin/nologin"
    assert not [file.path for file in host.files if "/apt/" in file.path]


ALL = {"ca-certificates", "curl"}
SERVER = {"g++", "libnuma1", "ninja-build", "numactl"}
PROXY = {"logrotate", "nginx"}


def test_a_host_with_servers_and_proxy_has_the_packages_of_both(site: Site) -> None:
    assert set(site.host_plan().packages) == ALL | SERVER | PROXY
    site.serving["platform"] = "kylin-v11"
    kylin = {"gcc-c++", "ninja-build", "numactl", "numactl-libs"}
    selinux = {"libselinux-utils", "policycoreutils", "policycoreutils-python-utils"}
    assert set(site.host_plan().packages) == ALL | kylin | selinux | PROXY


def test_a_gateway_has_no_compiler_and_the_hosts_behind_it_no_nginx(gateway_site: Site) -> None:
    hosts = gateway_site.plan().hosts
    assert set(hosts["gw-1"].packages) == ALL | PROXY
    for name in ("gpu-1", "gpu-2"):
        assert set(hosts[name].packages) == ALL | SERVER


def test_packages_are_listed_once_and_sorted(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        assert list(host.packages) == sorted(set(host.packages))


def test_nginx_runs_as_its_distributions_user(site: Site) -> None:
    assert "\nuser www-data;\n" in site.content(NGINX)
    site.serving["platform"] = "kylin-v11"
    assert "\nuser nginx;\n" in site.content(NGINX)


def test_a_frontend_is_fetched_to_a_prefix_of_its_digest_or_used_where_it_is(site: Site) -> None:
    frontend = site.host_plan().frontend
    assert frontend.prefix == f"/opt/fp8fleet/frontend/{DIGEST[:12]}"
    assert frontend.is_installer
    site.serving["conda_frontend_url"] = "https://mirror.example.com/micromamba"
    program = site.host_plan().frontend
    assert not program.is_installer
    site.serving = {
        key: value for key, value in site.serving.items() if not key.startswith("conda_frontend")
    } | {"conda_frontend_path": "/opt/conda/bin/conda"}
    present = site.host_plan().frontend
    assert (present.program, present.prefix, present.url) == ("/opt/conda/bin/conda", None, None)


def test_only_a_host_that_builds_from_source_has_a_cmake(site: Site) -> None:
    site.serving |= {
        "cmake_archive_url": "https://mirror.example.com/cmake-3.28.4-linux-x86_64.tar.gz",
        "cmake_sha256": DIGEST,
    }
    site.gateways = {"gw-1": GATEWAY}
    site.hosts["gpu-1"]["service_address"] = "10.0.0.1"
    assert site.host_plan().cmake is None
    site.serving["engine_build"] = "source"
    planned = site.host_plan().cmake
    assert planned
    assert planned.minimum == "3.26.1"
    assert planned.prefix == f"/opt/fp8fleet/cmake/3.28.4-{DIGEST[:12]}"
    assert planned.link == "/opt/fp8fleet/cmake/current"
    assert site.host_plan("gw-1").cmake is None


def test_without_an_archive_only_the_hosts_own_cmake_can_do(site: Site) -> None:
    site.serving |= {"engine_build": "source", "cmake_version": "3.28"}
    planned = site.host_plan().cmake
    assert planned
    assert (planned.minimum, planned.prefix, planned.url) == ("3.28", None, None)


def test_kernel_parameters_and_limits_land_in_files_of_their_own(site: Site) -> None:
    site.serving |= {"sysctl": {"net.core.somaxconn": 1024, "vm.swappiness": "10"}}
    host = site.host_plan()
    lines = file_text(host, "/etc/sysctl.d/90-fp8fleet.conf").splitlines()
    assert lines[1:] == ["net.core.somaxconn = 1024", "vm.swappiness = 10"]
    assert "vllm hard memlock unlimited" in file_text(
        host, "/etc/security/limits.d/90-fp8fleet.conf"
    )


# What must not be there


KEY = "/etc/fp8fleet/instances/main.key"
TOKEN = "/etc/fp8fleet/models/tiny-1.token"


@pytest.mark.parametrize(
    ("setting", "role", "path"), [("api_key", "vllm", KEY), ("model_token", "model", TOKEN)]
)
def test_a_secrets_file_is_planned_or_removed(
    site: Site, setting: str, role: str, path: str
) -> None:
    without = site.host_plan()
    assert without.role_absent(role) == (path,)
    assert path not in [file.path for file in without.files]
    site.serving[setting] = "env:FP8FLEET_TEST_KEY"
    having = site.host_plan()
    assert having.role_absent(role) == ()
    assert path in [file.path for file in having.role_files(role)]


def test_a_models_token_is_for_one_host_only(site: Site) -> None:
    site.serving["model_token"] = "env:FP8FLEET_TEST_TOKEN"
    site.serving["model_sources"] = ["http://mirror.example/tiny", "https://hub.example/tiny"]
    message = refusal(site.plan)
    assert "host gpu-1: model_token: one token and several hosts" in message
    assert "say with model_token_for" in message
    site.serving["model_token_for"] = "https://hub.example"
    model = site.host_plan().model
    assert model is not None
    assert model.token_for == "https://hub.example"
    del site.serving["model_token"]
    assert "model_token_for is set, but no model_token" in refusal(site.plan)


def test_the_plan_says_why_hosts_do_not_share_a_model(gateway_site: Site) -> None:
    def notes() -> list[str | None]:
        hosts = gateway_site.plan().hosts
        return [host.model.note for host in hosts.values() if host.model]

    assert notes() == ["not shared between hosts: set storage_address"] * 2
    gateway_site.hosts["gpu-1"]["storage_address"] = "10.40.0.1"
    alone = "not shared between hosts: no other host of it has a storage_address"
    assert notes() == [alone, "not shared between hosts: set storage_address"]
    gateway_site.hosts["gpu-2"]["storage_address"] = "10.40.0.2"
    assert all("make model.torrent" in (note or "") for note in notes())
    gateway_site.serving["peer_transfer"] = False
    assert notes() == [None, None]


def test_every_server_without_a_key_loses_its_file(site: Site) -> None:
    site.serving["instances"] = [INSTANCE, {"name": "more", "port": 8001, "devices": [1]}]
    keys = ("/etc/fp8fleet/instances/main.key", "/etc/fp8fleet/instances/more.key")
    assert site.host_plan().role_absent("vllm") == keys


def test_a_gateway_removes_no_secrets(gateway_site: Site) -> None:
    assert set(gateway_site.plan().hosts["gw-1"].absent) == {"host"}


def test_no_file_is_planned_and_removed(prod: FleetPlan) -> None:
    for host in prod.hosts.values():
        removed = {path for paths in host.absent.values() for path in paths}
        assert not removed & {file.path for file in host.files}


def test_hosts_know_the_gateways_that_ask_them(gateway_site: Site, prod: FleetPlan) -> None:
    gateway_site.gateways["gw-2"] = {**GATEWAY, "service_address": "10.30.0.101"}
    gateways = {name: host.gateways for name, host in gateway_site.plan().hosts.items()}
    both = ("gw-1", "gw-2")
    assert gateways == {"gpu-1": both, "gpu-2": both, "gw-1": (), "gw-2": ()}
    assert prod.hosts["gpu-h100-1"].gateways == ("gw-1",)


def test_a_host_with_its_own_proxy_has_no_gateway(site: Site) -> None:
    assert site.host_plan().gateways == ()


# The worked example


def test_the_example_has_every_kind_of_host(prod: FleetPlan) -> None:
    assert list(prod.hosts) == [*SERVING_HOSTS, "gw-1"]
    assert [host.platform for host in prod.hosts.values()] == [
        "ubuntu-22.04",
        "ubuntu-22.04",
        "ubuntu-22.04",
        "kylin-v10",
        "ubuntu-22.04",
    ]


def test_the_examples_gateway_balances_over_every_server(prod: FleetPlan) -> None:
    gateway = prod.hosts["gw-1"].proxy
    assert gateway
    assert list(gateway.upstreams) == [
        instance.upstream for name in SERVING_HOSTS for instance in prod.hosts[name].instances
    ]
    assert gateway.model_id == "assistant"


def test_no_content_shows_the_environments_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FLEET_API_KEY", "sk-5ecre7")
    plan = make_plan(load_fleet(str(REPO / "inventories/prod.py")), REPO)
    assert "sk-5ecre7" not in repr(plan)


def test_acceptance_sends_the_gateways_own_key(gateway_site: Site) -> None:
    gateway_site.gateways = {"gw-1": {**GATEWAY, "api_key": "env:FP8FLEET_TEST_KEY"}}
    proxy = gateway_site.plan().hosts["gw-1"].proxy
    assert proxy
    assert proxy.api_key == SecretRef.parse("env:FP8FLEET_TEST_KEY")


# SELinux and KySec


def test_selinux_is_enforced_where_the_platform_has_it_and_left_alone_elsewhere(
    prod: FleetPlan,
) -> None:
    kylin = prod.hosts["gpu-kylin-1"].selinux
    assert kylin
    assert (kylin.mode, kylin.asked) == ("enforcing", False)
    assert prod.hosts["gpu-h100-1"].selinux is None
    assert "policycoreutils-python-utils" in prod.hosts["gpu-kylin-1"].packages
    assert "policycoreutils-python-utils" not in prod.hosts["gpu-h100-1"].packages


def selinux_of(site: Site, **data: Any) -> SelinuxPlan:
    site.serving |= {"selinux": "enforcing", **data}
    plan = site.host_plan().selinux
    assert plan
    return plan


def test_nginx_may_connect_and_listen(site: Site) -> None:
    plan = selinux_of(site)
    assert plan.booleans == {
        "httpd_can_network_connect": True,
        "httpd_setrlimit": True,
    }
    assert plan.ports == (8080, 8089)


def test_the_tight_variant_closes_the_wide_one_and_labels_the_servers_ports(site: Site) -> None:
    plan = selinux_of(site, selinux_network="relay")
    assert plan.booleans == {
        "httpd_can_network_connect": False,
        "httpd_can_network_relay": True,
        "httpd_setrlimit": True,
    }
    assert plan.ports == (8000, 8080, 8089)


def test_hosts_behind_a_gateway_need_no_boolean_and_no_port(gateway_site: Site) -> None:
    gateway_site.serving |= {"selinux": "permissive"}
    plan = gateway_site.plan().hosts["gpu-1"].selinux
    assert plan
    assert (plan.mode, plan.booleans, plan.ports) == ("permissive", {}, ())
    assert any(path.endswith(".service") for path in plan.paths)


def test_a_mode_that_the_inventory_names_is_asked_for_and_unmanaged_is_nothing(site: Site) -> None:
    assert selinux_of(site).asked
    site.serving["selinux"] = "unmanaged"
    assert site.host_plan().selinux is None


def test_an_install_directory_elsewhere_is_labelled_like_opt(site: Site) -> None:
    assert selinux_of(site).equivalences == {}
    plan = selinux_of(site, install_directory="/data/fp8fleet")
    assert plan.equivalences == {"/data/fp8fleet": "/opt"}
    assert all(program.startswith("/data/fp8fleet/") for program in plan.programs)


def test_kysec_is_looked_for_on_kylin_alone(prod: FleetPlan) -> None:
    assert {name for name, plan in prod.hosts.items() if plan.kysec} == {"gpu-kylin-1"}

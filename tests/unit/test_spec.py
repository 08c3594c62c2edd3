"""What one host's keys may hold, and what is refused because it cannot mean anything."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import DIGEST, GATEWAY, INSTANCE, SERVING, without
from pydantic import ValidationError

from fp8fleet.spec import HostSpec


def spec(**changes: Any) -> HostSpec:
    return HostSpec.model_validate({**SERVING, **changes})


def refused(**changes: Any) -> str:
    """The first message with which a host's data is refused."""
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    return caught.value.errors()[0]["msg"]


def instances(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**INSTANCE, **change} for change in changes]


def test_a_serving_host_needs_few_keys_and_gets_defaults_for_the_rest() -> None:
    host = spec()
    assert host.service_user == "vllm"
    assert host.model_directory == "/var/lib/fp8fleet/models"
    assert host.instances[0].tensor_parallel_size == 1
    assert host.required_to_serve() == []
    assert host.secrets() == {}


def test_a_spec_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        spec().service_user = "root"


@pytest.mark.parametrize(
    "key", ["accelerator", "engine_release", "engine_requirements", "model_manifest", "instances"]
)
def test_a_key_that_a_serving_host_lacks_is_named(key: str) -> None:
    host = HostSpec.model_validate(without(SERVING, key))
    assert host.required_to_serve() == [key]


def test_a_gateway_needs_no_engine_and_no_model() -> None:
    host = HostSpec.model_validate(GATEWAY)
    assert host.accelerator is None
    assert host.instances == ()


@pytest.mark.parametrize("length", [0, 1, 63, 65, 66, 128])
def test_a_digest_of_another_length_is_refused_with_its_length(length: int) -> None:
    message = refused(conda_frontend_sha256=("0123456789abcdef" * 8)[:length])
    assert "64 hex digits" in message
    assert f"this has {length} characters" in message


@pytest.mark.parametrize("digest", ["g" * 64, " " + "a" * 63, "a" * 63 + "\n", "\u0660" * 64])
def test_a_digest_with_anything_but_hex_digits_is_refused(digest: str) -> None:
    assert "64 hex digits" in refused(conda_frontend_sha256=digest)


def test_an_upper_case_digest_means_the_same() -> None:
    assert spec(conda_frontend_sha256=DIGEST.upper()).conda_frontend_sha256 == DIGEST


CMAKE = {
    "cmake_archive_url": "https://mirror.example.com/cmake-3.28.4-linux-x86_64.tar.gz",
    "cmake_sha256": DIGEST,
}


@pytest.mark.parametrize(
    "url",
    [
        "https://mirror.example.com/v3.31/cmake-3.31.10-linux-x86_64.tar.gz",
        "https://mirror.example.com/cmake-3.28.0-rc1-Linux-x86_64.tar.gz",
        "file:///srv/mirror/cmake-4.0.2.tar.gz",
    ],
)
def test_an_archive_of_cmake_has_the_name_that_kitware_gives_it(url: str) -> None:
    assert spec(**CMAKE | {"cmake_archive_url": url}).cmake_archive_url == url


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cmake_sha256": None}, "needed together"),
        ({"cmake_archive_url": None}, "needed together"),
        ({"cmake_archive_url": "https://m.example.com/cmake.tar.gz"}, "Kitware's archive"),
        ({"cmake_archive_url": "https://m.example.com/cmake-3.28.4.zip"}, "Kitware's archive"),
        ({"cmake_version": "3.30"}, "has cmake 3.28.4, cmake_version asks for 3.30"),
        ({"arch": "aarch64"}, "is for x86_64, arch is aarch64"),
        ({"cmake_version": 3.3}, "in quotes"),
        ({"cmake_version": "3"}, "pattern"),
    ],
)
def test_an_archive_of_cmake_that_cannot_be_right_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    assert said in refused(**CMAKE | changes)


PATH_KEYS = [
    "install_directory",
    "model_directory",
    "cache_directory",
    "ca_bundle",
]


@pytest.mark.parametrize("key", PATH_KEYS)
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "relative/path",
        "~/models",
        "/opt/../etc",
        "/opt/fp8fleet/",
        "/opt/a b",
        "/opt/a\nb",
        "/opt/a$HOME",
        "/opt/a'b",
        '/opt/a"b',
        "/opt/a;b",
        "/opt/%n",
        "/数据/fp8",
        "/opt/²",
    ],
)
def test_a_path_that_a_shell_or_systemd_could_misread_is_refused(key: str, path: str) -> None:
    assert "path" in refused(**{key: path})


@pytest.mark.parametrize(
    "path",
    [
        "/opt/fp8fleet",
        "/data/a-b_c.d+e@f",
        "/a",
        "/library",
        "/var/lib/x",
        "/var/opt/x",
        "/media/x",
    ],
)
def test_an_ordinary_absolute_path_is_taken(path: str) -> None:
    assert spec(install_directory=path).install_directory == path


@pytest.mark.parametrize("key", ["package_index", "proxy", "conda_frontend_url"])
@pytest.mark.parametrize(
    "url",
    ["", "mirror.example.com/simple", "ftp://mirror/x", "http://", "https://a b", "http://\n"],
)
def test_what_is_no_url_is_refused(key: str, url: str) -> None:
    assert "http://, https:// or file:// URL is needed" in refused(**{key: url})


URL_KEYS = ["package_index", "proxy", "conda_frontend_url"]


@pytest.mark.parametrize("key", URL_KEYS)
@pytest.mark.parametrize("character", ['"', "'", " ", "\t", "\\", "$", "`", "(", "<", "{", "\x07"])
def test_a_character_that_a_shell_or_apt_could_misread_is_refused_in_a_url(
    key: str, character: str
) -> None:
    message = refused(**{key: f"http://mirror.example.com/a{character}b"})
    assert message.endswith("URL is needed, without quotes and spaces")


@pytest.mark.parametrize("key", URL_KEYS)
@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:3128",
        "http://[fd00::1]:8080/simple",
        "https://user:p%24ss@mirror.example.com/a-b_c.d~e/f+g,h;i=j&k?l=m!n*#o",
    ],
)
def test_an_ordinary_url_is_taken(key: str, url: str) -> None:
    assert getattr(spec(**{key: url}), key) == url


@pytest.mark.parametrize("key", [key for key in URL_KEYS if key != "proxy"])
def test_a_folder_of_the_host_is_taken_where_files_are_fetched(key: str) -> None:
    assert getattr(spec(**{key: "file:///mnt/mirror"}), key) == "file:///mnt/mirror"


def test_what_is_no_url_is_refused_in_a_list_too() -> None:
    message = refused(package_find_links=["https://mirror.example.com/a", "wheels"])
    assert "URL is needed" in message


@pytest.mark.parametrize("source", ["wheels", "", "ftp://m/x", "https://", "file:relative", "/mnt"])
def test_what_is_no_source_of_a_model_is_refused(source: str) -> None:
    message = refused(model_sources=["https://mirror.example.com/a", source])
    assert "http://" in message and "https://" in message and "file://" in message


@pytest.mark.parametrize("source", ["file://host/x", "https://m/x?a=b", "https://me@m/x"])
def test_a_models_source_is_refused_as_the_hosts_tool_would(source: str) -> None:
    refused(model_sources=["https://mirror.example.com/a", source])


def test_a_models_source_loses_the_slash_at_its_end() -> None:
    host = spec(model_sources=["https://m.example.com/x/", "file:///mnt/x"])
    assert host.model_sources == ("https://m.example.com/x", "file:///mnt/x")


@pytest.mark.parametrize("character", ["\n", "\r", "\x07"])
def test_a_models_source_with_a_control_character_is_refused(character: str) -> None:
    refused(model_sources=[f"https://m.example.com/a{character}b"])


@pytest.mark.parametrize("key", ["service_address", "storage_address"])
@pytest.mark.parametrize("address", ["gpu-1", "10.0.0", "10.0.0.256", "10.0.0.1/24", "", "::g"])
def test_a_name_or_a_broken_address_is_refused(key: str, address: str) -> None:
    assert "an IP address is needed" in refused(**{key: address})


@pytest.mark.parametrize(
    ("address", "expected"), [("fd00:0:0::0011", "fd00::11"), ("::ffff:10.0.0.1", "10.0.0.1")]
)
def test_an_address_is_taken_in_one_form(address: str, expected: str) -> None:
    assert spec(service_address=address).service_address == expected
    assert spec(client_networks=[address]).client_networks == (expected,)


@pytest.mark.parametrize("key", ["service_address", "storage_address"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "a host's own"),
        ("127.8.0.1", "a host's own"),
        ("::1", "a host's own"),
        ("::ffff:127.0.0.1", "a host's own"),
        ("0.0.0.0", "no host's address"),
        ("::", "no host's address"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "broadcast"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "has a zone"),
        ("fd00::1%eth0", "has a zone"),
    ],
)
def test_an_address_that_no_other_host_could_reach_is_refused(
    key: str, address: str, why: str
) -> None:
    assert why in refused(**{key: address})


@pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0", "::ffff:0:0/96"])
def test_a_network_of_everybody_is_refused(network: str) -> None:
    """It would be one family's everybody, where no network at all means both."""
    assert "leave client_networks empty, then everybody may" in refused(client_networks=[network])


@pytest.mark.parametrize(
    "network", ["0.0.0.0", "::", "224.0.0.0/4", "ff02::1", "255.255.255.255", "fe80::1%eth0"]
)
def test_a_network_that_nobody_connects_from_is_refused(network: str) -> None:
    refused(client_networks=[network])


def test_a_mapped_network_is_the_ipv4_network_in_it() -> None:
    assert spec(client_networks=["::ffff:10.0.0.0/104", "fe80::/10"]).client_networks == (
        "10.0.0.0/8",
        "fe80::/10",
    )


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("platform", "ubuntu-20.04", "ubuntu-22.04"),
        ("accelerator", "b300", "h100-80g"),
        ("engine_release", "9.9.9", "0.33.0"),
    ],
)
def test_what_the_catalogue_lacks_is_refused_with_what_it_has(
    key: str, value: str, known: str
) -> None:
    message = refused(**{key: value})
    assert message.startswith("Value error, unknown ")
    assert known in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arch", "riscv64"),
        ("engine_build", "docker"),
        ("service_user", "Root"),
        ("service_user", "a b"),
        ("service_user", "x" * 32),
        ("nofile_limit", 100),
        ("nofile_limit", "1048576"),
        ("start_timeout", 0),
        ("start_timeout", "600"),
        ("start_timeout", 1.5),
        ("drain_timeout", -1),
        ("warm_up_concurrency", -1),
        ("nginx_listen", 0),
        ("nginx_listen", 65536),
        ("nginx_listen", "8080"),
        ("nginx_listen", True),
        ("nginx_read_timeout", 299),
        ("nginx_body_size", "64"),
        ("nginx_body_size", "64 m"),
        ("nginx_body_size", "0m"),
        ("nginx_server_name", "a;b"),
        ("nginx_server_name", ""),
        ("nginx_server_name", "模型.example.com"),
        ("package_index", "https://镜像.example.com/simple"),
        ("conda_channels", ["通道"]),
        ("drivers", [{"name": "nvidia", "version": "580.95.05é"}]),
        ("cmake_archive_url", "https://m.example.com/cmake-٣.28.4-linux-x86_64.tar.gz"),
        ("engine_pins", ["pydantic"]),
        ("engine_pins", ["pydantic>=2"]),
        ("engine_pins", "pydantic==2.12.5"),
        ("engine_environment", {"lower": "x"}),
        ("engine_environment", {"A B": "x"}),
        ("engine_environment", {"NAME": 1}),
        ("sysctl", {"net.core.somaxconn; reboot": 1}),
        ("sysctl", {"net.core.somaxconn": "1\n2"}),
        ("apt_sources", ["deb http://a ./\ndeb http://b ./"]),
        ("conda_channels", ["a\nb"]),
        ("instances", "main"),
        ("instances", {"name": "main"}),
    ],
)
def test_a_value_of_the_wrong_type_or_outside_its_range_is_refused(key: str, value: Any) -> None:
    refused(**{key: value})


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Main"},
        {"name": "a b"},
        {"name": "../x"},
        {"name": "-x"},
        {"name": ""},
        {"name": "x" * 42},
        {"port": 0},
        {"port": 70000},
        {"port": "8000"},
        {"devices": [-1]},
        {"devices": ["0"]},
        {"devices": [True]},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": 1.0},
        {"options": ["max-model-len"]},
    ],
)
def test_an_instance_with_a_wrong_value_is_refused(change: dict[str, Any]) -> None:
    refused(instances=instances(change))


def test_more_tensor_parallel_devices_than_listed_are_refused() -> None:
    message = refused(instances=instances({"devices": [0, 1], "tensor_parallel_size": 4}))
    assert "tensor_parallel_size 4 needs as many devices, 2 are listed" in message


def test_as_many_tensor_parallel_devices_as_listed_are_taken() -> None:
    host = spec(instances=instances({"devices": [0, 1], "tensor_parallel_size": 2}))
    assert host.instances[0].devices == (0, 1)


def test_one_device_listed_twice_is_refused() -> None:
    assert "names one device twice" in refused(instances=instances({"devices": [1, 1]}))


def test_two_servers_may_share_a_device() -> None:
    host = spec(instances=instances({"name": "a"}, {"name": "b", "port": 8001}))
    assert [instance.devices for instance in host.instances] == [(0,), (0,)]


def test_a_server_on_an_accelerator_must_list_its_devices() -> None:
    message = refused(instances=instances({"devices": []}))
    assert "main: devices must list at least one" in message


def test_a_server_on_cpus_lists_no_devices() -> None:
    assert spec(accelerator="cpu", instances=instances({"devices": []})).instances[0].devices == ()


def test_a_port_used_by_two_servers_is_refused_with_both_names() -> None:
    message = refused(instances=instances({"name": "a"}, {"name": "b"}))
    assert "port 8000 is used twice: by instance a and by instance b" in message


@pytest.mark.parametrize("key", ["nginx_listen", "nginx_status_port"])
def test_a_port_used_by_a_server_and_the_proxy_is_refused_with_both(key: str) -> None:
    assert f"port 8000 is used twice: by instance main and by {key}" in refused(**{key: 8000})


def test_a_port_that_the_proxy_uses_twice_is_refused() -> None:
    message = refused(nginx_listen=9000, nginx_status_port=9000)
    assert "port 9000 is used twice: by nginx_listen and by nginx_status_port" in message


def test_two_servers_of_one_name_are_refused() -> None:
    message = refused(instances=instances({"port": 8000}, {"port": 8001}))
    assert "the name main is used twice" in message


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("model", "model_manifest"),
        ("host", "service_address"),
        ("port", "the instance's port"),
        ("api-key", "api_key"),
        ("tensor-parallel-size", "tensor_parallel_size"),
        ("served-model-name", "served_model_name"),
        ("shutdown-timeout", "drain_timeout"),
    ],
)
def test_an_option_that_has_a_key_of_its_own_is_refused(option: str, instead: str) -> None:
    message = refused(instances=instances({"options": {option: "x"}}))
    assert f"option {option!r} is set from" in message
    assert instead in message


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--max-model-len", "write max-model-len, the name without the leading dashes"),
        ("max_model_len", "write max-model-len"),
        ("Max-Model-Len", "write max-model-len"),
        ("a=", "write a, "),
        ("", "write a long option of vLLM"),
        ("--", "write a long option of vLLM"),
    ],
)
def test_an_option_not_written_as_vllms_long_name_is_told_as_that(option: str, meant: str) -> None:
    message = refused(instances=instances({"options": {option: 1}}))
    assert f"option {option!r}: {meant}" in message


@pytest.mark.parametrize(
    "value", [True, False, 0, 3, 0.9, "auto", "yes", "1", None, [1, "a"], {"a": {"b": [1]}}]
)
def test_an_options_value_keeps_its_type(value: Any) -> None:
    host = spec(instances=instances({"options": {"x": value}}))
    kept = host.instances[0].options["x"]
    assert kept == value
    assert type(kept) is type(value)


def test_the_conda_frontend_has_a_digest_with_its_url() -> None:
    with pytest.raises(ValidationError, match="conda_frontend_sha256 is needed"):
        HostSpec.model_validate(without(SERVING, "conda_frontend_sha256"))


def test_the_conda_frontend_is_fetched_or_there_not_both_and_not_neither() -> None:
    assert "one of conda_frontend_url and conda_frontend_path is needed" in refused(
        conda_frontend_path="/opt/conda/bin/conda"
    )
    with pytest.raises(ValidationError, match="one of conda_frontend_url and conda_frontend_path"):
        HostSpec.model_validate(without(SERVING, "conda_frontend_url", "conda_frontend_sha256"))


PYTHON_KEYS = pytest.mark.parametrize("key", ["engine_python", "tools_python"])


@PYTHON_KEYS
@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12"])
def test_a_python_version_is_a_text(key: str, version: str) -> None:
    assert getattr(spec(**{key: version}), key) == version


@PYTHON_KEYS
@pytest.mark.parametrize("version", [3.12, 3.10])
def test_a_python_version_written_as_a_number_is_refused(key: str, version: float) -> None:
    """The number 3.10 is 3.1."""
    assert "write it in quotes" in refused(**{key: version})


@PYTHON_KEYS
@pytest.mark.parametrize("version", [3, True, None])
def test_what_is_no_python_version_is_refused(key: str, version: Any) -> None:
    assert refused(**{key: version}) == "Input should be a valid string"


@PYTHON_KEYS
@pytest.mark.parametrize(
    "version", ["banana", "", "3", "2.7", "3.12.1", "3.123", "v3.12", " 3.12", "3.12\n", "3.x"]
)
def test_a_python_version_is_two_numbers(key: str, version: str) -> None:
    refused(**{key: version})


@pytest.mark.parametrize("number", [*range(9), *range(10, 32), 127])
def test_an_environment_variable_with_a_control_character_is_refused(number: int) -> None:
    """It would end the line, or systemd would drop the variable."""
    refused(engine_environment={"NAME": f"a{chr(number)}b"})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("VLLM_API_KEY", "api_key"), ("CUDA_VISIBLE_DEVICES", "the instances' devices")],
)
def test_a_variable_that_has_a_key_of_its_own_is_refused(name: str, instead: str) -> None:
    message = refused(engine_environment={"NCCL_DEBUG": "INFO", name: "x"})
    assert f"engine_environment: {name} is set from {instead}" in message


@pytest.mark.parametrize("name", ["assistant", "org/tiny-llama_v1.0@fp8+x", "Qwen3", "模型"])
def test_a_model_id_is_a_name_with_or_without_an_owner(name: str) -> None:
    assert spec(served_model_name=name).served_model_name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "100%nice",
        'a"b',
        "a'b",
        "a b",
        "two\nlines",
        "a\n",
        "a$b",
        "a\\b",
        "a//b",
        "/a",
        "a/",
        7,
    ],
)
def test_a_model_id_that_a_unit_or_a_shell_could_misread_is_refused(name: Any) -> None:
    refused(served_model_name=name)


@pytest.mark.parametrize("name", ["-x", "--help"])
def test_a_model_id_that_looks_like_an_option_is_refused(name: str) -> None:
    refused(served_model_name=name)


@pytest.mark.parametrize("reference", ["env:KEY", "file:/run/secrets/key"])
def test_secrets_are_references(reference: str) -> None:
    host = spec(api_key=reference, sudo_password=reference)
    assert {key: str(ref) for key, ref in host.secrets().items()} == {
        "api_key": reference,
        "sudo_password": reference,
    }


@pytest.mark.parametrize("key", ["api_key", "model_token", "sudo_password"])
@pytest.mark.parametrize(
    "value",
    [
        "sk-pasted",
        "",
        "env:",
        "env:A B",
        "file:relative",
        "file:/x/a$b",
        "file:/x/a b",
        "file:/",
        7,
    ],
)
def test_what_is_no_reference_to_a_secret_is_refused(key: str, value: Any) -> None:
    assert "expected env:VARIABLE or file:/absolute/path" in refused(**{key: value})

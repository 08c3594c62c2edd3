"""Reading an inventory: each refusal is one line that names file, group or host, key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fleets import DIGEST, GATEWAY, INSTANCE, SERVING, Site, refusal, without
from pyinfra.api.arguments import all_global_arguments
from pyinfra.connectors.ssh import ConnectorData, connector_data_meta

from fp8fleet.inventory import check_secrets, load_fleet, parse_data

PASTED = "sk-live-5ecre7"


def test_hosts_come_with_groups_address_and_spec(gateway_site: Site) -> None:
    fleet = gateway_site.fleet()
    assert [host.name for host in fleet.hosts] == ["gpu-1", "gpu-2", "gw-1"]
    assert [host.is_gateway for host in fleet.hosts] == [False, False, True]
    assert [host.ssh_hostname for host in fleet.hosts] == ["10.20.0.1", "10.20.0.2", "10.20.0.9"]
    assert fleet.hosts[0].groups == ("serving", "site")
    assert fleet.hosts[0].spec.service_address == "10.30.0.1"


def test_a_host_without_ssh_hostname_is_reached_by_its_name(site: Site) -> None:
    assert site.fleet().hosts[0].ssh_hostname == "gpu-1"


def test_data_of_the_command_line_wins_over_host_over_group_over_all(site: Site) -> None:
    site.everyone = {
        "start_timeout": 1,
        "drain_timeout": 1,
        "nofile_limit": 2001,
        "nginx_listen": 1,
    }
    site.serving |= {"start_timeout": 2, "drain_timeout": 2, "nofile_limit": 2002}
    site.hosts = {"gpu-1": {"start_timeout": 3, "drain_timeout": 3}}
    spec = site.fleet("start_timeout=4").hosts[0].spec
    assert (spec.start_timeout, spec.drain_timeout, spec.nofile_limit, spec.nginx_listen) == (
        4,
        3,
        2002,
        1,
    )


def test_keys_of_pyinfra_itself_and_our_switches_are_no_keys_of_a_host(site: Site) -> None:
    site.everyone = {"_sudo": True, "_env": {"LC_ALL": "C"}, "ssh_user": "deploy"}
    site.hosts = {"gpu-1": {"ssh_port": 2222, "ssh_known_hosts_file": "/x"}}
    assert site.fleet("verify=full").hosts[0].name == "gpu-1"


def test_the_user_that_ssh_logs_in_as_is_no_service_user(site: Site) -> None:
    site.everyone["ssh_user"] = "deploy"
    site.serving["service_user"] = "deploy"
    assert site.refusal().endswith(
        "group all: ssh_user = 'deploy': is service_user too, which fp8fleet makes without a shell:"
        " name another service_user"
    )
    site.serving.pop("service_user")
    assert "--data: ssh_user = 'vllm': is service_user too" in site.refusal("ssh_user=vllm")


def test_an_unknown_key_of_a_group_is_refused_with_the_likely_one(site: Site) -> None:
    site.serving["engine_relese"] = "0.33.0"
    message = site.refusal()
    assert message.endswith(
        "site.py: group serving: engine_relese: unknown key; did you mean engine_release?"
    )


def test_an_unknown_key_of_all_hosts_is_refused(site: Site) -> None:
    site.everyone["model_manifests"] = "x"
    assert site.refusal().endswith(
        "group all: model_manifests: unknown key; did you mean model_manifest?"
    )


def test_an_unknown_key_of_a_host_is_refused(site: Site) -> None:
    site.hosts = {"gpu-1": {"service_addres": "10.0.0.1"}}
    assert "host gpu-1: service_addres: unknown key; did you mean service_address?" in (
        site.refusal()
    )


def test_an_unknown_key_of_the_command_line_is_refused(site: Site) -> None:
    assert "--data: verfy: unknown key; did you mean verify?" in site.refusal("verfy=full")


def test_an_unknown_key_like_no_other_is_refused_with_the_page_that_lists_them(site: Site) -> None:
    site.serving["quux"] = 1
    assert "group serving: quux: unknown key; docs/inventory.md lists the keys" in site.refusal()


def test_the_value_of_an_unknown_key_is_not_repeated(site: Site) -> None:
    site.serving["api_kye"] = PASTED
    message = site.refusal()
    assert "did you mean api_key?" in message
    assert PASTED not in message


def test_an_unknown_key_of_an_instance_is_refused(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "prot": 1}]
    assert "group serving: instances.0.prot = 1: Extra inputs are not permitted" in site.refusal()


def test_a_misspelt_key_of_pyinfra_is_refused_with_the_likely_one(site: Site) -> None:
    site.hosts = {"gpu-1": {"ssh_hostnmae": "10.0.0.1"}}
    assert site.refusal().endswith(
        "host gpu-1: ssh_hostnmae: unknown key; did you mean ssh_hostname?"
    )


def test_a_key_like_none_of_pyinfras_is_refused_with_those_it_has(site: Site) -> None:
    site.everyone["ssh_zzz"] = PASTED
    message = site.refusal()
    assert "group all: ssh_zzz: unknown key; pyinfra has " in message
    assert "ssh_hostname, " in message
    assert PASTED not in message


def test_a_misspelt_key_of_pyinfra_on_the_command_line_is_refused(site: Site) -> None:
    assert "--data: ssh_usr: unknown key; did you mean ssh_user?" in site.refusal("ssh_usr=x")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("_sud", "did you mean _sudo?"),
        ("_sudo_usr", "did you mean _sudo_user?"),
        ("_zzz", "pyinfra has _chdir, "),
    ],
)
def test_a_misspelt_argument_of_pyinfras_operations_is_refused(
    site: Site, key: str, hint: str
) -> None:
    site.everyone[key] = PASTED
    message = site.refusal()
    assert f"group all: {key}: unknown key; {hint}" in message
    assert PASTED not in message


def test_a_misspelt_argument_of_pyinfra_on_the_command_line_is_refused(site: Site) -> None:
    assert "--data: _sud: unknown key; did you mean _sudo?" in site.refusal("_sud=True")


def test_every_argument_of_pyinfras_operations_is_taken(site: Site) -> None:
    known = [name for name, _ in all_global_arguments() if name.startswith("_")]
    assert {"_sudo", "_env", "_su_user", "_parallel"} <= set(known)
    site.everyone = dict.fromkeys(known)
    assert site.fleet().hosts[0].name == "gpu-1"


@pytest.mark.parametrize("name", ["gpü-1", "节点-1", "gpu-\u0661", "a/../b", "a b"])
def test_a_hosts_name_is_of_ascii_letters_and_digits(site: Site, name: str) -> None:
    site.hosts = {name: {"ssh_hostname": "10.20.0.1"}}
    assert "a host's name has letters, digits and . - _ only, all of them ASCII" in site.refusal()


def test_every_key_of_pyinfras_connection_is_taken(site: Site) -> None:
    examples = {str: "x", int: 2, float: 0.5, bool: True, dict: {}}
    types = get_type_hints(ConnectorData)
    assert types.keys() == connector_data_meta.keys()
    site.everyone = {key: examples[kind] for key, kind in types.items()}
    assert len(site.everyone) > 10
    assert site.fleet().hosts[0].ssh_hostname == "x"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ssh_user", 5, "a text"),
        ("ssh_key", None, "a text"),
        ("ssh_password", ["hunter2"], "a text"),
        ("ssh_allow_agent", "yes", "True or False"),
        ("ssh_connect_retries", True, "a number"),
        ("ssh_connect_retry_max_delay", "1", "a number"),
        ("ssh_paramiko_connect_kwargs", "x", "a table"),
    ],
)
def test_a_connections_key_of_another_type_is_refused_and_its_value_not_repeated(
    site: Site, key: str, value: Any, expected: str
) -> None:
    site.everyone[key] = value
    assert site.refusal().endswith(f"site.py: group all: {key}: expected {expected}")


def test_a_wrong_value_of_the_last_group_names_that_group(site: Site) -> None:
    site.everyone["start_timeout"] = 600
    site.serving["start_timeout"] = "long"
    message = site.refusal()
    assert "group serving: start_timeout = 'long': Input should be a valid integer" in message


def test_a_wrong_value_of_a_host_names_the_host(site: Site) -> None:
    site.hosts = {"gpu-1": {"service_address": "gpu-1.example.com"}}
    assert "host gpu-1: service_address = 'gpu-1.example.com': an IP address" in site.refusal()


def test_a_wrong_value_of_the_command_line_names_it(site: Site) -> None:
    assert "--data: nginx_listen = 'eighty': Input should be a valid integer" in site.refusal(
        "nginx_listen=eighty"
    )


def test_a_digest_of_66_digits_is_refused_with_its_length(site: Site) -> None:
    site.serving["conda_frontend_sha256"] = DIGEST + "ab"
    message = site.refusal()
    assert "group serving: conda_frontend_sha256 = " in message
    assert "a SHA256 has 64 hex digits, this has 66 characters" in message


def test_a_port_used_twice_is_refused_with_its_users(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "name": "a"}, {**INSTANCE, "name": "b"}]
    assert site.refusal().endswith(
        "host gpu-1: port 8000 is used twice: by instance a and by instance b"
    )


def test_more_tensor_parallel_devices_than_listed_are_refused(site: Site) -> None:
    site.serving["instances"] = [{**INSTANCE, "devices": [0], "tensor_parallel_size": 2}]
    message = site.refusal()
    assert "group serving: instances.0: tensor_parallel_size 2 needs as many devices" in message
    assert "1 are listed" in message


def test_a_long_value_is_cut(site: Site) -> None:
    site.serving["platform"] = "x" * 5000
    assert len(site.refusal()) < 500


@pytest.mark.parametrize("key", sorted(without(SERVING, "instances", "platform")))
def test_a_serving_host_without_a_needed_key_is_refused_with_its_name(site: Site, key: str) -> None:
    site.serving = without(site.serving, key)
    message = site.refusal()
    assert "host gpu-1" in message
    assert key in message


def test_a_host_without_platform_is_refused(site: Site) -> None:
    site.serving = without(site.serving, "platform")
    assert site.refusal().endswith("host gpu-1: platform: Field required")


def test_a_serving_host_without_instances_is_refused(site: Site) -> None:
    site.serving = without(site.serving, "instances")
    assert "instances is not set: a serving host needs it" in site.refusal()


def test_a_gateway_needs_no_engine(gateway_site: Site) -> None:
    gateway = gateway_site.fleet().hosts[-1]
    assert gateway.spec.engine_release is None


@pytest.mark.parametrize("port", ["22", 0, -1, 65536, 22.0, True, None])
def test_an_ssh_port_that_is_none_is_refused(site: Site, port: Any) -> None:
    site.hosts = {"gpu-1": {"ssh_port": port}}
    assert f"host gpu-1: ssh_port: {port!r} is not a port number (1-65535)" in site.refusal()


def test_a_switch_with_an_unknown_value_is_refused_with_the_known_ones(site: Site) -> None:
    assert "--data verify=fast: expected one of stamp, full" in site.refusal("verify=fast")


@pytest.mark.parametrize("pair", ["verify", "", "a b"])
def test_data_that_is_no_pair_is_refused(pair: str) -> None:
    assert refusal(lambda: parse_data([pair])) == f"--data {pair}: expected key=value"


def test_data_values_are_read_as_pyinfra_reads_them() -> None:
    assert parse_data(["a=1", "b=x=y", "c=true", "d=[1, 2]"]) == {
        "a": 1,
        "b": "x=y",
        "c": True,
        "d": [1, 2],
    }


def test_a_missing_inventory_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing.py")
    assert refusal(lambda: load_fleet(path)) == f"{path}: no such inventory file"
    assert refusal(lambda: load_fleet(str(tmp_path))) == f"{tmp_path}: no such inventory file"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("serving = [", "SyntaxError"),
        ("serving = [undefined]", "NameError"),
        ("import nonexistent_module_x", "ModuleNotFoundError"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("1 / 0", "ZeroDivisionError"),
        ("serving = ['@nosuch/x']", "nosuch"),
    ],
)
def test_a_broken_inventory_is_refused_with_file_and_error(
    site: Site, text: str, error: str
) -> None:
    path = site.inventory(text)
    message = refusal(lambda: load_fleet(path))
    assert path in message
    assert error in message


@pytest.mark.parametrize(
    ("text", "error"),
    [("platform = \n", "SyntaxError"), ("raise ValueError('boom')\n", "ValueError: boom")],
)
def test_a_broken_group_data_file_is_refused_with_its_own_name(
    site: Site, text: str, error: str
) -> None:
    path = site.inventory()
    (Path(path).parent / "group_data/serving.py").write_text(text)
    message = refusal(lambda: load_fleet(path))
    assert "serving.py" in message
    assert error in message


def test_reading_a_broken_inventory_prints_nothing(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    path = site.inventory("raise ValueError('boom')")
    refusal(lambda: load_fleet(path))
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


@pytest.mark.parametrize("text", ["", "_hidden = ['a']", "x = 'gpu-1'", "serving = []"])
def test_an_inventory_without_hosts_is_refused(site: Site, text: str) -> None:
    path = site.inventory(text)
    assert refusal(lambda: load_fleet(path)).startswith(f"{path}: no hosts")


def test_a_group_that_is_no_list_of_hosts_is_refused(site: Site) -> None:
    path = site.inventory("serving = [1, 2]")
    assert path in refusal(lambda: load_fleet(path))


def test_plain_data_besides_the_groups_makes_no_hosts(site: Site) -> None:
    path = site.inventory("serving = [('gpu-1', {})]\n_devices = [0, 1]\n")
    assert [host.name for host in load_fleet(path).hosts] == ["gpu-1"]


@pytest.mark.parametrize("key", ["api_key", "model_token", "sudo_password"])
def test_a_pasted_secret_is_refused_and_not_repeated(site: Site, key: str) -> None:
    site.serving[key] = PASTED
    message = site.refusal()
    assert f"group serving: {key}: expected env:VARIABLE or file:/absolute/path" in message
    assert PASTED not in message


def test_a_secret_pasted_on_the_command_line_is_not_repeated(site: Site) -> None:
    message = site.refusal(f"api_key={PASTED}")
    assert "--data: api_key:" in message
    assert PASTED not in message


@pytest.mark.parametrize(
    "change",
    [
        {"sysctl": [PASTED]},
        {"conda_channels": {"a": PASTED}},
        {"engine_environment": {"A": [PASTED]}},
        {"engine_environment": {"A": {"B": PASTED}}},
        {"instances": {"a": PASTED}},
        {"instances": [[PASTED]]},
        {"instances": [{**INSTANCE, "devices": {"a": PASTED}}]},
        {"instances": [{**INSTANCE, "options": [PASTED]}]},
        {"instances": [{**INSTANCE, "optoins": {"a": PASTED}}]},
        {"platform": PASTED.encode()},
        {"served_model_name": (PASTED,)},
    ],
    ids=str,
)
def test_a_value_that_is_no_plain_one_is_never_repeated(site: Site, change: dict[str, Any]) -> None:
    site.serving |= change
    message = site.refusal()
    assert f"group serving: {next(iter(change))}" in message
    assert PASTED not in message


@pytest.mark.parametrize(
    "change",
    [
        {"instances": [{**INSTANCE, "api_key": PASTED}]},
        {"instances": [{**INSTANCE, "Token": PASTED}]},
        {"engine_environment": {"HF_TOKEN": f"{PASTED}\x07"}},
        {"engine_environment": {"A_SECRET": f"{PASTED}\n"}},
        {"engine_environment": {"PASSWORD_OF_X": f"{PASTED}\x00"}},
        {"engine_environment": {"VLLM_API_KEY": PASTED}},
    ],
    ids=str,
)
def test_a_value_whose_place_speaks_of_a_secret_is_never_repeated(
    site: Site, change: dict[str, Any]
) -> None:
    site.serving |= change
    assert PASTED not in site.refusal()


@pytest.mark.parametrize(
    "change",
    [
        {"model_sources": [f"https://me:{PASTED}@m.example.com/x"]},
        {"proxy": f"http://me:{PASTED}$@proxy:3128"},
        {"package_index": f"https://{PASTED}@m.example.com/a b"},
    ],
    ids=str,
)
def test_the_login_of_a_refused_url_is_not_repeated(site: Site, change: dict[str, Any]) -> None:
    site.serving |= change
    assert PASTED not in site.refusal()


def test_a_secret_file_with_an_odd_path_is_refused_with_the_forms(site: Site) -> None:
    site.serving["api_key"] = "file:/x/a$b"
    assert "group serving: api_key: expected env:VARIABLE or file:/absolute/path" in site.refusal()


def test_a_python_version_written_as_a_number_is_refused_with_its_group(site: Site) -> None:
    site.serving["engine_python"] = 3.10
    assert "group serving: engine_python: write it in quotes" in site.refusal()


@pytest.mark.parametrize(("option", "key"), [("api-key", "api_key"), ("hf-token", "model_token")])
def test_a_secret_pasted_as_an_option_is_refused_and_not_repeated(
    site: Site, option: str, key: str
) -> None:
    site.serving["instances"] = [{"name": "m", "port": 8000, "options": {option: PASTED}}]
    message = site.refusal()
    assert f"option {option!r} is set from {key}" in message
    assert PASTED not in message


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_hubs_token_pasted_as_a_variable_is_refused_and_not_repeated(
    site: Site, variable: str
) -> None:
    site.serving["engine_environment"] = {variable: PASTED}
    message = site.refusal()
    assert f"engine_environment: {variable} is set from model_token" in message
    assert PASTED not in message


def test_a_missing_secret_is_refused_with_host_key_and_variable(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8FLEET_TEST_KEY", raising=False)
    site.serving["api_key"] = "env:FP8FLEET_TEST_KEY"
    message = site.secret_refusal()
    assert "host gpu-1: api_key: env:FP8FLEET_TEST_KEY" in message
    assert "not set" in message


def test_a_missing_secret_file_is_refused(site: Site, tmp_path: Path) -> None:
    site.serving["model_token"] = f"file:{tmp_path}/token"
    assert f"host gpu-1: model_token: file:{tmp_path}/token" in site.secret_refusal()


def test_a_secret_of_a_host_outside_the_limit_is_not_asked_for(gateway_site: Site) -> None:
    gateway_site.hosts["gpu-2"]["api_key"] = "env:FP8FLEET_TEST_NOT_SET"
    fleet = gateway_site.fleet()
    check_secrets(fleet, ["gpu-1", "gw-1"])
    assert "host gpu-2" in refusal(lambda: check_secrets(fleet, ["gpu-2"]))


@pytest.mark.parametrize("secret", ["two words", 'a"b', "a$b", "a\\b", "a`b", "a'b", "a;b"])
def test_a_key_that_an_environment_file_or_header_could_misread_is_refused_unseen(
    site: Site, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8FLEET_TEST_KEY", secret)
    site.serving["api_key"] = "env:FP8FLEET_TEST_KEY"
    message = site.secret_refusal()
    assert "cannot stand in a key" in message
    assert secret not in message


def test_a_sudo_password_may_hold_any_printable_character(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8FLEET_TEST_PASSWORD", "a b\"$'\\`")
    site.serving["sudo_password"] = "env:FP8FLEET_TEST_PASSWORD"
    check_secrets(site.fleet())


def test_reading_needs_no_secret(site: Site) -> None:
    site.serving["api_key"] = "env:FP8FLEET_TEST_NOT_SET"
    assert site.fleet().hosts[0].spec.secrets()["api_key"].placeholder == (
        "<secret FP8FLEET_TEST_NOT_SET>"
    )


def test_no_text_of_a_fleet_shows_a_secret(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8FLEET_TEST_KEY", PASTED)
    site.serving["api_key"] = "env:FP8FLEET_TEST_KEY"
    fleet = site.fleet()
    check_secrets(fleet)
    assert PASTED not in repr(fleet)
    assert PASTED not in fleet.hosts[0].spec.model_dump_json()


def test_a_gateways_groups_do_not_give_it_the_servers_keys(gateway_site: Site) -> None:
    gateway_site.gateways["gw-1"] = {**GATEWAY, "engine_release": "0.33.0"}
    assert gateway_site.fleet().hosts[-1].is_gateway

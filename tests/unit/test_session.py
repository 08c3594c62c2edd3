"""A pyinfra run: a wrong inventory ends it before it connects; only deploys need secrets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import INSTANCE, PROD, Ran, Site, pyinfra, refusal

from fp8fleet import session
from fp8fleet.planner import make_plan

DEPLOY = "deploys/full.py"
SECRET = "sk-live-5ecre7"


class Listener:
    """A port of this machine that counts who connects."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Stands where the SSH server of a host would."""
    listener = Listener()
    yield listener
    listener.socket.close()


@pytest.fixture
def reachable(site: Site, listener: Listener) -> Site:
    """A site, in the project's root, whose host's SSH port is ``listener``."""
    site.serving |= {
        "engine_requirements": "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt",
        "model_manifest": "models/tiny-llama/manifest.toml",
    }
    site.hosts = {"gpu-1": {"ssh_hostname": "127.0.0.1", "ssh_port": listener.port}}
    return site


def refused(ran: Ran) -> str:
    """The error line of a pyinfra run that ended before connecting."""
    assert ran.code == 2, ran.err
    assert "Traceback" not in ran.err
    assert "Connecting" not in ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ran.err
    return errors[0]


def test_a_right_inventory_connects(reachable: Site, listener: Listener) -> None:
    """So that the tests below mean something: the listener does see a run that goes on."""
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y")
    assert ran.code == 1
    assert listener.connections > 0


def test_a_host_that_does_not_answer_prints_no_traceback(reachable: Site) -> None:
    """``listener`` closes the connection where an SSH server would give its version."""
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y")
    assert "[gpu-1] SSH error" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine_relese": "0.33.0"}, "unknown key; did you mean engine_release?"),
        ({"conda_frontend_sha256": "ab" * 33}, "this has 66 characters"),
        ({"nginx_listen": 8000}, "port 8000 is used twice"),
        ({"instances": [{**INSTANCE, "tensor_parallel_size": 8}]}, "1 are listed"),
        ({"model_manifest": "models/none.toml"}, "no such manifest"),
        ({"api_key": "env:FP8FLEET_TEST_NOT_SET"}, "FP8FLEET_TEST_NOT_SET is not set"),
    ],
)
def test_a_wrong_inventory_ends_before_anything_connects(
    reachable: Site, listener: Listener, change: dict[str, Any], said: str
) -> None:
    reachable.serving |= change
    assert said in refused(pyinfra(reachable.inventory(), DEPLOY, "-y"))
    assert listener.connections == 0


def test_data_of_pyinfras_command_line_is_checked(reachable: Site, listener: Listener) -> None:
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y", "--data", "nginx_read_timeout=5")
    assert "--data: nginx_read_timeout = 5: Input should be greater than or equal to 300" in (
        refused(ran)
    )
    assert listener.connections == 0


def test_data_without_a_value_is_refused(reachable: Site) -> None:
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y", "--data", "verify")
    assert refused(ran) == "error: --data verify: expected key=value"


@pytest.mark.parametrize("limit", ["gpu-9", "gpu-1,gpu-1"])
def test_a_limit_that_pyinfra_would_match_with_nothing_is_refused(
    reachable: Site, listener: Listener, limit: str
) -> None:
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y", "--limit", limit)
    assert f"--limit {limit}: matches no host" in refused(ran)
    assert listener.connections == 0


def test_a_missing_inventory_file_is_refused() -> None:
    ran = pyinfra("inventories/nothing.py", DEPLOY, "-y")
    assert refused(ran) == "error: inventories/nothing.py: no such inventory file"


@pytest.mark.parametrize("hosts", ["@fake/gpu-1", "gpu-1.example.com", "@fake/a,@fake/b"])
def test_a_deploy_on_hosts_without_an_inventory_file_is_refused(hosts: str) -> None:
    line = refused(pyinfra(hosts, DEPLOY, "-y", PYINFRA_FAKE_DELAY="0"))
    assert line == f"error: {hosts}: not an inventory file (.py): deploys need one"


def test_the_worked_example_is_right_but_for_its_secret() -> None:
    line = refused(pyinfra(PROD, DEPLOY, "--dry"))
    assert "host gpu-h100-1: api_key: env:FP8FLEET_API_KEY" in line


def test_looking_at_the_inventory_needs_no_secret() -> None:
    ran = pyinfra(PROD, "debug-inventory", "--json")
    assert ran.code == 0
    assert "gpu-kylin-1" in [host["name"] for host in json.loads(ran.out)]


def test_the_examples_hosts_are_reached_only_with_known_keys() -> None:
    hosts = json.loads(pyinfra(PROD, "debug-inventory", "--json").out)
    assert len(hosts) == 5
    for host in hosts:
        assert host["data"]["ssh_strict_host_key_checking"] == "yes"


def test_a_secret_of_a_run_appears_nowhere(reachable: Site) -> None:
    reachable.serving["api_key"] = "env:FP8FLEET_API_KEY"
    ran = pyinfra(reachable.inventory(), DEPLOY, "-y", "-vvv", "--debug", FP8FLEET_API_KEY=SECRET)
    assert ran.code == 1
    assert SECRET not in ran.out + ran.err


# In this process


def params(path: str, **changes: Any) -> dict[str, Any]:
    """What pyinfra's command line holds."""
    return {"inventory": path, "operations": ("debug-inventory",), **changes}


def test_limits_are_names_groups_and_wildcards(gateway_site: Site) -> None:
    fleet = gateway_site.fleet()
    assert session.limited(fleet, []) == ["gpu-1", "gpu-2", "gw-1"]
    assert session.limited(fleet, ["gpu-?"]) == ["gpu-1", "gpu-2"]
    assert session.limited(fleet, ["gateway", "gpu-2"]) == ["gw-1", "gpu-2"]
    assert session.limited(fleet, ["serving", "gpu-1"]) == ["gpu-1", "gpu-2"]
    assert session.limited(fleet, ["site"]) == ["gpu-1", "gpu-2", "gw-1"]
    assert "--limit nope: matches no host" in refusal(lambda: session.limited(fleet, ["nope"]))


def test_a_run_asks_only_for_the_secrets_of_its_hosts(
    gateway_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gateway_site.root)
    gateway_site.file("deploy.py", "")
    gateway_site.hosts["gpu-2"]["api_key"] = "env:FP8FLEET_TEST_NOT_SET"
    path = gateway_site.inventory()
    deploy = params(path, operations=("deploy.py",))
    assert session._begin({**deploy, "limit": ("gpu-1",)})
    assert "host gpu-2" in refusal(lambda: session._begin(deploy))
    assert session._begin(params(path))


@pytest.fixture
def secret_of_gpu_2(gateway_site: Site, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A deploy's command line, on a fleet of which one host needs a secret that is missing."""
    monkeypatch.chdir(gateway_site.root)
    gateway_site.file("deploy.py", "")
    gateway_site.hosts["gpu-2"]["api_key"] = "env:FP8FLEET_TEST_NOT_SET"
    return params(gateway_site.inventory(), operations=("deploy.py",))


def test_the_secret_of_an_excluded_host_is_not_asked_for(secret_of_gpu_2: dict[str, Any]) -> None:
    assert session._begin({**secret_of_gpu_2, "exclude": ("gpu-2",)})
    assert session._begin({**secret_of_gpu_2, "limit": ("serving",), "exclude": ("gpu-2",)})
    message = refusal(lambda: session._begin({**secret_of_gpu_2, "exclude": ("gpu-1",)}))
    assert "host gpu-2" in message


@pytest.mark.parametrize("exclude", ["serving", "gpu-*"])
def test_the_secrets_of_an_excluded_group_are_not_asked_for(
    secret_of_gpu_2: dict[str, Any], exclude: str
) -> None:
    assert session._begin({**secret_of_gpu_2, "exclude": (exclude,)})


def test_other_operations_on_hosts_without_an_inventory_file_are_let_be() -> None:
    assert session._begin({"inventory": "@fake/gpu-1", "operations": ("exec", "--", "id")}) is None


def test_the_run_plans_the_whole_fleet_whatever_the_limit(
    gateway_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gateway_site.root)
    begun = session._begin(params(gateway_site.inventory(), limit=("gw-1",)))
    assert begun
    assert list(begun.plan.hosts) == ["gpu-1", "gpu-2", "gw-1"]


def test_verify_full_is_a_switch_of_one_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.root)
    path = site.inventory()
    full = session._begin(params(path, data=("verify=full",)))
    plain = session._begin(params(path))
    assert full
    assert plain
    assert (full.verify_full, plain.verify_full) == (True, False)


def test_further_group_data_folders_count(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(site.root)
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "serving.py").write_text("start_timeout = 77\n")
    begun = session._begin(params(site.inventory(), group_data=(str(folder),)))
    assert begun
    assert begun.fleet.hosts[0].spec.start_timeout == 77


def test_without_a_validated_inventory_there_is_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_session", None)
    assert "no inventory was validated" in refusal(session.current)


def test_a_hosts_sudo_password_is_read_when_it_is_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8FLEET_TEST_SUDO", "pass word")
    site.serving["sudo_password"] = "env:FP8FLEET_TEST_SUDO"
    fleet = site.fleet()
    plan = make_plan(fleet, site.root)
    monkeypatch.setattr(session, "_session", session.Session(fleet, plan, False))

    host = SimpleNamespace(name="gpu-1", connector_data={})
    assert session.host_plan(host) == plan.hosts["gpu-1"]
    # Where pyinfra keeps the answer to its own question, and looks before it asks.
    assert host.connector_data == {"prompted_sudo_password": "pass word"}


def test_a_host_without_a_sudo_password_gets_none(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = site.fleet()
    plan = make_plan(fleet, site.root)
    monkeypatch.setattr(session, "_session", session.Session(fleet, plan, False))
    host = SimpleNamespace(name="gpu-1", connector_data={})
    assert session.host_plan(host) == plan.hosts["gpu-1"]
    assert host.connector_data == {}

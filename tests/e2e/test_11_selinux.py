"""SELinux enforcing for real: a machine of its own, Nginx in front of a server that a unit runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from fleet import BIN, GROUP_DATA, REPO, Done, announce, until

from fp8fleet.inventory import load_fleet
from fp8fleet.plan import HostPlan
from fp8fleet.planner import make_plan
from lab import selinux_vm
from lab.machine import missing

pytestmark = [pytest.mark.lab, pytest.mark.long]
SERVING = "gpu-1"
"""Its server runs on the machine as well, which is the gateway before it."""
GATEWAY = {
    "platform": "debian-12",
    "conda_frontend_path": "/opt/conda/bin/conda",
    "firewall": "unmanaged",
}
SETTINGS = "SELinux | Mode, booleans, labels"
FORGET = "systemctl restart nginx.service"
"""A connection that Nginx keeps to the server was allowed when it was made."""
WHOLE = "selinux_deploy"
"""All roles that the machine can carry out; the others are selinux_roles and selinux_denial."""


SERVER = {
    **GATEWAY,
    "accelerator": "cpu",
    "service_address": selinux_vm.ADDRESS,
    "engine_release": "0.32.0",
    "engine_python": "3.11",
    "engine_requirements": "locks/vllm-0.32.0-cpu-x86_64.txt",
    "model_manifest": "models/tiny-llama/manifest.toml",
    "instances": [{"name": "tiny", "port": 9000}],
}


def run(script: str) -> str:
    """Run a script on the machine and return what it prints; it must succeed."""
    done = subprocess.run(
        selinux_vm.ssh_command(script),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def status(port: int = 8080) -> int:
    """The HTTP status that Nginx answers with."""
    return requests.get(f"http://{selinux_vm.address()}:{port}/v1/models", timeout=60).status_code


def mode() -> list[str]:
    """The mode now, and as configured."""
    return run("getenforce; grep ^SELINUX= /etc/selinux/config").split()


def local_ports() -> dict[int, str]:
    """The labels that someone gave to ports, by port."""
    lines = run("semanage port -l -C | cat").splitlines()
    rows = [line.split(None, 2) for line in lines if " tcp " in line]
    return {int(port): row[0] for row in rows for port in row[2].split(",")}


def write(path: str, content: bytes, mode: str = "644") -> None:
    """Write a file in place, so that it has the label that any new file there gets."""
    text = f"mkdir -p {Path(path).parent} && cat >{path} && chmod {mode} {path}"
    subprocess.run(selinux_vm.ssh_command(text), input=content, check=True)


@dataclass(frozen=True)
class Gateway:
    """The machine as the gateway of an inventory; pyinfra runs on it alone."""

    folder: Path
    capture: Any

    def inventory(self, mode: str, **data: Any) -> str:
        """Write an inventory whose gateway has the SELinux mode and ``data``."""
        path = self.folder / f"inventory_{len(list(self.folder.iterdir()))}.py"
        gateway = {**GATEWAY, **selinux_vm.connection(), "selinux": mode, **data}
        path.write_text(
            f"serving = [({SERVING!r}, {SERVER!r})]\n"
            f"gateway = [({selinux_vm.NAME!r}, {gateway!r})]\n"
        )
        return str(path)

    def deploy(self, inventory: str, *arguments: str, name: str = "selinux_roles") -> Done:
        """pyinfra with a deploy of this folder."""
        limit = ["--limit", "gateway", "--json", *(arguments or ["-y"])]
        with self.capture.global_and_fixture_disabled():
            announce(f"pyinfra {name} {' '.join(arguments)}")
        done = subprocess.run(
            [str(BIN / "pyinfra"), *GROUP_DATA, *limit, inventory, f"tests/e2e/{name}.py"],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def converge(self, inventory: str, name: str = "selinux_roles") -> Done:
        """A run that must succeed: the endpoint answers and nothing was denied."""
        done = self.deploy(inventory, name=name)
        assert done.code == 0, done.text
        return done


def serve(plan: HostPlan) -> None:
    """Run the plan's server: its unit and options, with a small program in place of vLLM."""
    (own,) = plan.instances
    assert plan.engine
    for file in plan.files:
        if file.path in own.files:
            write(file.path, file.resolved(), file.mode)
    program = (REPO / "tests/e2e/small_server.py").read_bytes()
    write(f"{plan.engine.prefix}/bin/vllm", program, "755")
    assert plan.model
    run(
        f"useradd -r -U -d {plan.home} -s {plan.no_login_shell} {plan.service_user};"
        f" mkdir -p {plan.home} {plan.model.directory};"
        f" systemctl daemon-reload && systemctl restart {own.unit}"
    )


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """The machine as after its first boot, with the server behind it running."""
    if reason := missing():
        text = f"the lab cannot run here: {reason}"
        if os.environ.get("FP8FLEET_REQUIRE_LAB") == "1":
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        announce("a machine with SELinux enforcing")
        selinux_vm.up()
    try:
        made = Gateway(tmp_path_factory.mktemp("selinux"), capture)
        serve(server_plan(made.inventory("enforcing")))
        yield made
    finally:
        selinux_vm.down()


def server_plan(inventory: str) -> HostPlan:
    return make_plan(load_fleet(inventory), REPO).hosts[SERVING]


def test_a_port_without_a_label_fails_the_run_with_selinuxs_name_and_the_port(
    gateway: Gateway,
) -> None:
    """`nginx -s reload` is content with it; the configuration that serves is the old one."""
    assert run("getenforce") == "Enforcing"
    done = gateway.deploy(gateway.inventory("unmanaged"))
    assert done.code == 1
    assert "SELinux denies Nginx port 8089" in done.err
    assert "Traceback" not in done.text


def test_without_the_boolean_nginx_does_not_reach_its_server(gateway: Gateway) -> None:
    done = gateway.deploy(gateway.inventory("unmanaged", nginx_status_port=8008))
    assert done.code == 1
    assert status() == 502
    assert "502" in done.err


def test_enforcing_works_by_itself_and_a_second_run_changes_nothing(gateway: Gateway) -> None:
    inventory = gateway.inventory("enforcing")
    done = gateway.converge(inventory, WHOLE)
    assert SETTINGS in done.changed
    assert status() == 200
    assert run("getenforce") == "Enforcing"
    limits = run("for p in $(pgrep -P $(cat /run/nginx.pid)); do cat /proc/$p/limits; done")
    # without httpd_setrlimit the workers keep 1024, and only Nginx's own log says so
    assert re.findall(r"Max open files +(\d+)", limits) == ["65536", "65536"]
    assert gateway.converge(inventory, WHOLE).changed == []
    dry = gateway.deploy(inventory, "--dry", name=WHOLE)
    pending = [op for op in json.loads(dry.out)["plan"] if op["hosts_with_change"]]
    assert (dry.code, pending) == (0, []), dry.text


def test_a_boolean_that_is_on_until_the_next_boot_only_is_made_to_stay(gateway: Gateway) -> None:
    run("setsebool -P httpd_can_network_connect off; setsebool httpd_can_network_connect on")
    assert gateway.converge(gateway.inventory("enforcing")).changed == [SETTINGS]
    values = run("semanage boolean -l | grep 'httpd_can_network_connect '")
    assert re.search(r"\(on *, *on\)", values)


def test_a_boolean_that_is_off_until_the_next_boot_only_is_turned_on(gateway: Gateway) -> None:
    run(f"setsebool httpd_can_network_connect off; {FORGET}")
    assert status() == 502
    assert gateway.converge(gateway.inventory("enforcing")).changed == [SETTINGS]
    assert status() == 200


@pytest.mark.parametrize("port", [8000, 8081], ids=["soundd_port_t", "transproxy_port_t"])
def test_nginx_listens_on_a_port_that_the_policy_has_for_others(
    gateway: Gateway, port: int
) -> None:
    done = gateway.converge(gateway.inventory("enforcing", nginx_listen=port))
    assert SETTINGS in done.changed
    assert status(port) == 200
    assert "http_port_t" in local_ports()[port]


def test_relay_lets_nginx_reach_the_servers_ports_and_no_others(gateway: Gateway) -> None:
    inventory = gateway.inventory("enforcing", selinux_network="relay")
    gateway.converge(inventory)
    assert run("cat /sys/fs/selinux/booleans/httpd_can_network_connect") == "0 0"
    assert "http_port_t" in local_ports()[9000]
    assert status() == 200
    run(f"semanage port -d -p tcp 9000; {FORGET}")
    assert status() == 502
    assert gateway.converge(inventory).changed == [SETTINGS]


def test_a_file_with_the_wrong_label_gets_its_own(gateway: Gateway) -> None:
    run("chcon -t user_home_t /etc/nginx/nginx.conf")
    done = gateway.converge(gateway.inventory("enforcing"))
    assert SETTINGS in done.changed
    assert "httpd_config_t" in run("ls -Z /etc/nginx/nginx.conf")


def test_a_denial_during_the_run_fails_it_with_the_rule_that_would_allow_it(
    gateway: Gateway,
) -> None:
    done = gateway.deploy(gateway.inventory("enforcing"), name="selinux_denial")
    run("setsebool httpd_can_network_connect on")
    assert done.code == 1
    said = " ".join(done.err.split())
    assert re.search(r"SELinux denied nginx \(httpd_t\) name_connect on tcp_socket \w+", said)
    assert re.search(r"allow httpd_t \w+:tcp_socket \{ name_connect \};", said)
    assert "httpd_can_network_connect" in said, "audit2allow knows the boolean"
    assert "Traceback" not in done.text


def test_permissive_stays_and_warns_and_enforcing_comes_back(gateway: Gateway) -> None:
    run("mkdir -p /run/fp8fleet; touch /run/fp8fleet/tiny.started")
    before = run("systemctl show -P InvocationID nginx.service")
    inventory = gateway.inventory("permissive")
    done = gateway.converge(inventory, WHOLE)
    assert mode() == ["Permissive", "SELINUX=permissive"]
    assert run("systemctl show -P InvocationID nginx.service") != before
    assert "started" not in run("ls /run/fp8fleet")
    again = gateway.converge(inventory)
    assert again.changed == []
    for ran in (done, again):
        assert "SELinux is permissive as planned" in ran.err
    report = json.loads((REPO / f"reports/preflight-{selinux_vm.NAME}.json").read_text())
    codes = [finding["code"] for finding in report["findings"]]
    assert [code for code in codes if code.startswith("selinux")] == ["selinux-permissive"]
    assert SETTINGS in gateway.converge(gateway.inventory("enforcing")).changed
    assert mode() == ["Enforcing", "SELINUX=enforcing"]


def test_the_servers_unit_runs_with_its_hardening_and_the_labels_of_its_paths(
    gateway: Gateway,
) -> None:
    plan = server_plan(gateway.inventory("enforcing"))
    assert plan.engine
    (own,) = plan.instances
    prefix = shlex.quote(plan.engine.prefix)
    run(f"restorecon -R {prefix}; systemctl enable -q {own.unit}; systemctl restart {own.unit}")
    assert "bin_t" in run(f"ls -Z {prefix}/bin/vllm")
    until(lambda: status() == 200, "the server answers again")
    log = run("cat /var/log/audit/audit.log").splitlines()
    assert [line for line in log if "denied" in line and "/fp8fleet/" in line] == []


def test_after_a_reboot_it_serves_and_nothing_is_left_to_change(gateway: Gateway) -> None:
    inventory = gateway.inventory("enforcing")
    gateway.converge(inventory)
    selinux_vm.reboot()
    assert mode() == ["Enforcing", "SELINUX=enforcing"]
    assert status() == 200
    assert gateway.converge(inventory).changed == []

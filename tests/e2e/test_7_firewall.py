"""The firewall on real hosts: who gets in and who does not, with ufw and with firewalld.

The control machine is the stranger; a second host is the gateway. The tests follow each other.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from clients import complete
from fleet import MAIN, OTHER, Fleet, command, ssh, until, url

from lab import site
from lab.site import GATEWAY, named

pytestmark = [pytest.mark.lab, pytest.mark.long]
DEPLOY = "tests/e2e/deploy_firewall.py"
GUARD = "Firewall | Planned connections are let in, others not"
CLOSE = "Firewall | Ports no longer planned"
SERVER, PROXY = named(MAIN).address, named(OTHER).address


def gets_in(port: int, address: str = SERVER, seconds: float = 2) -> bool:
    """Whether this machine, a stranger, can connect."""
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError:
        return False
    return True


def gateway_gets_in(port: int, host: str = OTHER) -> bool:
    """Whether a host can connect to the main host."""
    connect = f"timeout 2 bash -c '</dev/tcp/{SERVER}/{port}' 2>/dev/null"
    return ssh(host, f"{connect} && echo yes || echo no") == "yes"


def listen(host: str, *ports: int) -> None:
    """Something that answers on ports; what a server would."""
    for port in ports:
        ssh(
            host,
            f"systemctl -q is-active listen-{port} || systemd-run -q --unit=listen-{port}"
            f" python3 -m http.server {port}; until ss -Hltn | grep -q :{port}; do sleep 0.1; done",
        )


def reboot(host: str) -> None:
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = ssh(host, boot)
    ssh(host, "( sleep 1; systemctl reboot ) </dev/null >/dev/null 2>&1 &")

    def is_back() -> bool:
        done = subprocess.run(
            ["ssh", "-F", str(site.ssh_config()), "-o", "ConnectTimeout=2", host, boot],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode == 0 and done.stdout.strip() != before

    until(is_back, "booted again")


def with_gateway(fleet: Fleet, gateway: dict[str, Any] | None = None, **data: Any) -> str:
    """An inventory of the main host with its servers and a gateway before it."""
    own = {"service_address": PROXY} | (gateway or {})
    more = f"""
_own = {{"ssh_hostname": "{PROXY}", "platform": "debian-12"}} | {own!r}
gateway = ([("{OTHER}", _own)],
    {{key: value for key, value in _data.items() if not key.startswith(("engine_", "model_"))
      and key not in ("instances", "accelerator")}})
"""
    return fleet.inventory(hosts={MAIN: {"service_address": SERVER}}, more=more, **data)


@pytest.fixture(scope="module")
def hosts(lab: None) -> Iterator[None]:
    """Two bare hosts."""
    for name in (MAIN, OTHER):
        command("fp8fleet", "lab", "destroy", name)
        assert command("fp8fleet", "lab", "create", name).code == 0
    yield
    for name in (MAIN, OTHER):
        command("fp8fleet", "lab", "destroy", name)


def test_a_host_whose_other_services_would_be_shut_out_is_stopped_before_any_change(
    fleet: Fleet, hosts: None
) -> None:
    units = "/etc/systemd/system/metrics"
    ssh(
        MAIN,
        f"printf '[Socket]\\nListenStream=9100\\n' >{units}.socket"
        f" && printf '[Service]\\nExecStart=true\\n' >{units}.service"
        " && systemctl daemon-reload && systemctl start metrics.socket",
    )
    done = fleet.pyinfra(with_gateway(fleet), "-y", "--limit", MAIN, deploy="deploys/preflight.py")
    ssh(MAIN, f"systemctl stop metrics.socket; rm {units}.*; systemctl daemon-reload")
    assert done.code == 1
    assert "firewall-cuts" in done.text
    assert "9100" in done.text


def test_a_server_is_for_its_gateway_and_a_proxy_for_all(fleet: Fleet, hosts: None) -> None:
    done = fleet.full(with_gateway(fleet))
    assert done.code == 0, done.text
    assert "-P INPUT DROP" in ssh(MAIN, "iptables -S INPUT")
    assert gateway_gets_in(8000)
    assert not gets_in(8000)
    assert complete(url(OTHER)).status_code == 200
    listen(MAIN, 9000)
    assert not gets_in(9000)
    assert not gateway_gets_in(9000)
    assert gets_in(22)


def test_a_second_run_changes_nothing(fleet: Fleet, hosts: None) -> None:
    again = fleet.full(with_gateway(fleet))
    assert (again.code, again.changed) == (0, []), again.text


def test_after_a_reboot_it_is_so_still_and_the_host_serves(fleet: Fleet, hosts: None) -> None:
    reboot(MAIN)
    assert not gets_in(8000)
    until(lambda: gateway_gets_in(8000), "the server is back for the gateway")
    until(lambda: complete(url(OTHER)).status_code == 200, "a completion through the gateway")
    again = fleet.full(with_gateway(fleet))
    assert again.code == 0, again.text
    assert GUARD not in again.changed


def test_a_run_that_leaves_out_the_gateway_closes_nothing_and_one_with_it_does(
    fleet: Fleet, hosts: None
) -> None:
    ssh(MAIN, "systemctl stop fp8fleet-tiny")
    elsewhere = with_gateway(fleet, {"service_address": "198.18.0.250"})
    alone = fleet.pyinfra(elsewhere, "-y", "--json", "--limit", MAIN, deploy=DEPLOY)
    assert (alone.code, alone.changed) == (0, [GUARD]), alone.text
    listen(MAIN, 8000)
    assert gateway_gets_in(8000)
    both = fleet.pyinfra(elsewhere, "-y", "--json", deploy=DEPLOY)
    assert (both.code, both.changed) == (0, [CLOSE]), both.text
    assert not gateway_gets_in(8000)
    back = fleet.pyinfra(with_gateway(fleet), "-y", "--json", deploy=DEPLOY)
    assert back.changed == [GUARD, CLOSE], back.text
    assert gateway_gets_in(8000)


def test_only_the_clients_networks_reach_the_proxy(fleet: Fleet, hosts: None) -> None:
    some = with_gateway(fleet, {"client_networks": ["198.18.0.0/25", "fd00::/8"]})
    assert fleet.pyinfra(some, "-y", deploy=DEPLOY).code == 0
    assert gets_in(8080, PROXY)
    others = with_gateway(fleet, {"client_networks": ["10.0.0.0/8"]})
    assert fleet.pyinfra(others, "-y", deploy=DEPLOY).code == 0
    assert not gets_in(8080, PROXY)
    assert gets_in(22, PROXY)


def test_the_operators_own_rules_are_left_alone_and_lost_ones_mended(
    fleet: Fleet, hosts: None
) -> None:
    ssh(MAIN, f"ufw allow from {GATEWAY} to any port 9000 proto tcp; ufw limit 9001/tcp")
    ssh(MAIN, f"iptables -D ufw-user-input -s {PROXY} -p tcp -m tcp --dport 8000 -j ACCEPT")
    done = fleet.pyinfra(with_gateway(fleet), "-y", "--json", deploy=DEPLOY)
    assert GUARD in done.changed, done.text
    assert gateway_gets_in(8000)
    listen(MAIN, 9000)
    assert gets_in(9000)
    rules = ssh(MAIN, "ufw show added")
    assert "ufw limit 9001/tcp" in rules
    again = fleet.pyinfra(with_gateway(fleet), "-y", "--json", deploy=DEPLOY)
    assert (again.code, again.changed) == (0, []), again.text


def test_the_other_firewall_is_told_and_not_switched_on_beside(fleet: Fleet, hosts: None) -> None:
    asked = with_gateway(fleet, firewall="firewalld")
    done = fleet.pyinfra(asked, "-y", "--limit", MAIN, deploy=DEPLOY)
    assert done.code == 1
    assert "ufw is active on this host and the inventory asks for firewalld" in done.text
    judged = fleet.pyinfra(asked, "-y", "--limit", MAIN, deploy="deploys/preflight.py")
    assert "firewall-other" in judged.text
    unmanaged = with_gateway(fleet, firewall="unmanaged")
    left = fleet.pyinfra(unmanaged, "-y", "--json", "--limit", MAIN, deploy=DEPLOY)
    assert (left.code, left.changed) == (0, []), left.text
    assert gateway_gets_in(8000)


# firewalld, on a fresh host whose sshd listens on another port, too; it is its own proxy


def firewalld(fleet: Fleet, **data: Any) -> str:
    """An inventory of the main host alone; the second host is a client of its proxy."""
    known = fleet.folder.parent / "known_2222"
    key = next(
        line for line in site.known_hosts().read_text().splitlines() if SERVER in line.split()[0]
    )
    known.write_text(f"[{SERVER}]:2222 {' '.join(key.split()[1:3])}\n")
    own: dict[str, Any] = {
        "firewall": "firewalld",
        "ssh_port": 2222,
        "ssh_known_hosts_file": str(known),
    }
    return fleet.inventory(**(own | {"client_networks": [PROXY]} | data))


@pytest.fixture(scope="module")
def other_port(hosts: None) -> None:
    command("fp8fleet", "lab", "destroy", MAIN)
    assert command("fp8fleet", "lab", "create", MAIN).code == 0
    ports = "printf 'Port 22\\nPort 2222\\n' >/etc/ssh/sshd_config.d/ports.conf"
    ssh(MAIN, f"{ports}; systemctl restart ssh")


def changed(fleet: Fleet, inventory: str) -> list[str]:
    """What a run changes."""
    done = fleet.pyinfra(inventory, "-y", "--json", deploy=DEPLOY)
    assert done.code == 0, done.text
    return done.changed


def test_a_run_that_is_killed_while_firewalld_is_installed_shuts_nobody_out(
    fleet: Fleet, other_port: None
) -> None:
    process = fleet.start(firewalld(fleet), deploy=DEPLOY)
    unpacked = "ls /usr/bin/firewall-cmd >/dev/null 2>&1 && echo yes || echo no"
    until(lambda: ssh(MAIN, unpacked) == "yes", "firewalld is unpacked")
    process.send_signal(signal.SIGKILL)
    process.wait()
    ssh(MAIN, "flock /run/fp8fleet.work true")
    assert ssh(MAIN, "systemctl is-active firewalld || true") == "inactive"
    reboot(MAIN)
    assert gets_in(2222)


def test_firewalld_lets_in_clients_and_ssh_on_its_port(fleet: Fleet, other_port: None) -> None:
    assert GUARD in changed(fleet, firewalld(fleet))
    assert ssh(MAIN, "firewall-cmd --state") == "running"
    listen(MAIN, 8080, 9000)
    assert gateway_gets_in(8080)
    assert not gets_in(8080)
    assert not gets_in(9000)
    assert gets_in(2222)
    assert changed(fleet, firewalld(fleet)) == []


@pytest.mark.parametrize("where", ["", "--permanent "])
def test_a_rule_that_is_lost_now_or_after_a_restart_is_mended(
    fleet: Fleet, other_port: None, where: str
) -> None:
    text = f'rule family="ipv4" source address="{PROXY}" port port="8080" protocol="tcp" accept'
    ssh(MAIN, f"firewall-cmd -q {where}--remove-rich-rule='{text}'")
    assert changed(fleet, firewalld(fleet)) == [GUARD]
    ssh(MAIN, f"firewall-cmd -q --query-rich-rule='{text}'")
    ssh(MAIN, f"firewall-cmd -q --permanent --query-rich-rule='{text}'")
    assert changed(fleet, firewalld(fleet)) == []


def test_firewalld_closes_what_was_ours_and_keeps_the_operators(
    fleet: Fleet, other_port: None
) -> None:
    for where in ("", "--permanent"):
        ssh(MAIN, f"firewall-cmd -q {where} --add-port=9000/tcp")
    moved = firewalld(fleet, client_networks=["10.0.0.0/8", "fd00::/8"])
    assert changed(fleet, moved) == [GUARD, CLOSE]
    assert not gateway_gets_in(8080)
    assert gets_in(9000)
    assert changed(fleet, moved) == []
    everybody = firewalld(fleet, client_networks=[])
    assert changed(fleet, everybody) == [GUARD, CLOSE]
    assert gets_in(8080)
    reboot(MAIN)
    listen(MAIN, 8080, 9000)
    assert gets_in(8080)
    assert gets_in(9000)
    assert changed(fleet, everybody) == []


def test_a_firewall_that_shuts_ssh_out_is_switched_off_again(
    fleet: Fleet, other_port: None
) -> None:
    """The operator's own stored rules may do so: a new connection shows it, a timer undoes it."""
    rule = f'rule family="ipv4" source address="{GATEWAY}" port port="2222" protocol="tcp" drop'
    ssh(MAIN, f"systemctl stop firewalld; firewall-offline-cmd -q --add-rich-rule='{rule}'")
    done = fleet.pyinfra(firewalld(fleet), "-y", deploy=DEPLOY)
    assert done.code == 1
    assert "SSH does not get in with firewalld on" in done.text
    assert not gets_in(2222)
    until(lambda: gets_in(2222), "SSH gets in again")
    ssh(MAIN, f"firewall-offline-cmd -q --remove-rich-rule='{rule}'")
    assert GUARD in changed(fleet, firewalld(fleet))
    assert gets_in(2222)

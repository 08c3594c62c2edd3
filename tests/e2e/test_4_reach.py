"""How SSH reaches a host: another port, a bastion, an ordinary user with sudo, known host keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import complete
from fleet import GROUP_DATA, MAIN, OTHER, Fleet, command, ssh, url

from lab import site
from lab.site import named

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("served")]
PASSWORD = "only the lab's 'own'"


@pytest.fixture(scope="module")
def operator(served: None) -> None:
    """An ordinary user of the main host whose sudo asks for a password; sshd on two ports."""
    ssh(
        MAIN,
        f"""
        set -e
        id deployer 2>/dev/null || useradd -m -s /bin/sh deployer
        printf '%s\\n' "deployer:{PASSWORD}" | chpasswd
        echo 'deployer ALL=(ALL) ALL' >/etc/sudoers.d/deployer
        install -d -m 700 -o deployer /home/deployer/.ssh
        install -m 600 -o deployer /root/.ssh/authorized_keys /home/deployer/.ssh/authorized_keys
        printf 'Port 22\\nPort 2222\\n' >/etc/ssh/sshd_config.d/ports.conf
        systemctl restart ssh || systemctl restart sshd
        ufw allow 2222/tcp
        """,
    )


def test_an_ordinary_user_with_a_sudo_password_from_a_file_converges_on_another_port(
    fleet: Fleet, operator: None, tmp_path: Path
) -> None:
    password = tmp_path / "sudo"
    password.write_text(PASSWORD + "\n")
    password.chmod(0o600)
    known = tmp_path / "known_hosts"
    key = Path(site.known_hosts()).read_text().splitlines()
    address = named(MAIN).address
    line = next(text for text in key if address in text.split()[0])
    known.write_text(f"[{address}]:2222 {' '.join(line.split()[1:3])}\n")
    inventory = fleet.inventory(
        ssh_user="deployer",
        ssh_port=2222,
        ssh_known_hosts_file=str(known),
        _sudo=True,
        sudo_password=f"file:{password}",
        nginx_body_size="48m",
    )
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    assert done.changed == ["Nginx | Configuration", "Nginx | The configuration is live"]
    assert PASSWORD not in done.text
    assert "48m" in ssh(MAIN, "cat /etc/nginx/nginx.conf")
    again = fleet.full(inventory)
    assert (again.code, again.changed) == (0, []), again.text


def test_a_sudo_password_that_others_can_read_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    password = tmp_path / "sudo"
    password.write_text("x\n")
    password.chmod(0o644)
    done = fleet.full(fleet.inventory(sudo_password=f"file:{password}"))
    assert done.code == 2
    assert "0644" in done.err or "644" in done.err


def test_a_host_behind_a_bastion_is_reached(fleet: Fleet, tmp_path: Path) -> None:
    command("fp8fleet", "lab", "create", OTHER)
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host behind\n  HostName {named(MAIN).address}\n"
        f"  ProxyJump root@{named(OTHER).address}\n"
        f"Host *\n  IdentityFile {site.client_key()}\n"
        f"  UserKnownHostsFile {site.known_hosts()}\n  StrictHostKeyChecking yes\n"
    )
    behind = {MAIN: {"ssh_hostname": "behind"}}
    inventory = fleet.inventory(hosts=behind, ssh_config_file=str(config))
    sources = command("pyinfra", *GROUP_DATA, "-y", inventory, "exec", "--", "echo $SSH_CLIENT")
    assert sources.code == 0, sources.text
    assert f"{named(OTHER).address} " in sources.text, "the connection comes from the bastion"
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    assert "asked through SSH" in done.err


def test_a_host_with_another_key_than_the_known_one_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    other = next(
        line for line in site.known_hosts().read_text().splitlines() if line.startswith(OTHER)
    )
    known = tmp_path / "known_hosts"
    known.write_text(f"{named(MAIN).address} {' '.join(other.split()[1:3])}\n")
    done = fleet.full(fleet.inventory(ssh_known_hosts_file=str(known)))
    assert done.code == 1, done.text
    assert "key" in done.text


def test_a_gateway_elsewhere_reaches_the_server_by_its_service_address(fleet: Fleet) -> None:
    command("fp8fleet", "lab", "create", OTHER)
    gateway = f"""
_address = "{named(OTHER).address}"
_gateway = {{"ssh_hostname": _address, "service_address": _address, "platform": "debian-12"}}
gateway = ([("{OTHER}", _gateway)],
    {{key: value for key, value in _data.items() if not key.startswith(("engine_", "model_"))
      and key not in ("instances", "accelerator")}})
"""
    address = named(MAIN).address
    inventory = fleet.inventory(hosts={MAIN: {"service_address": address}}, more=gateway)
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    assert f"{address}:8000" in ssh(MAIN, "ss -Hltn 'sport = :8000'")
    names = [op["name"] for op in done.results["operations"]]
    assert names.index("vLLM | Server 1") < names.index("Nginx | Configuration")
    assert complete(url(OTHER)).status_code == 200
    assert ssh(MAIN, "systemctl is-active nginx.service || true") == "inactive"
    assert ssh(OTHER, "command -v g++ || echo none") == "none"
    again = fleet.full(inventory)
    assert (again.code, again.changed) == (0, []), again.text

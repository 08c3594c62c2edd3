"""One command from a bare host to a served model, and what a changed inventory changes.

The tests of this file follow each other on one host: each starts from what the one before left.
"""

from __future__ import annotations

import json
import re

import pytest
import requests
from clients import complete, open_streams, serves
from fleet import MAIN, Fleet, command, instance, invocation, reboot, ssh, until, url

pytestmark = pytest.mark.lab


def processes(unit: str) -> list[str]:
    return ssh(MAIN, f"cat /sys/fs/cgroup/systemd/system.slice/{unit}/cgroup.procs").split()


def test_a_bare_host_is_served_by_one_command(fleet: Fleet) -> None:
    command("fp8fleet", "lab", "destroy", MAIN)
    assert command("fp8fleet", "lab", "create", MAIN).code == 0
    assert ssh(MAIN, "command -v python3 nginx curl || echo bare") == "bare"
    assert ssh(MAIN, "ip route show default") == ""
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    assert done.results["failed_hosts"] == []
    answer = complete(url(MAIN))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].strip()


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    totals = done.results["totals"]
    assert totals["hosts"] > 0
    assert (totals["success"], totals["error"], done.results["failed_hosts"]) == (0, 0, [])


def test_a_dry_run_on_a_converged_host_shows_no_pending_change(fleet: Fleet) -> None:
    done = fleet.pyinfra(fleet.inventory(), "--dry", "--json")
    assert done.code == 0, done.text
    plan = json.loads(done.out)["plan"]
    assert plan
    assert [op["name"] for op in plan if op["hosts_with_change"]] == []


def test_a_run_without_changes_needs_at_most_40_remote_commands(fleet: Fleet) -> None:
    done = fleet.pyinfra(fleet.inventory(), "-y", "--debug")
    commands = done.text.count("Running command on")
    assert 0 < commands <= 40, f"{commands} remote commands"


def test_a_full_verification_hashes_the_model_and_changes_nothing(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory(), "--data", "verify=full")
    assert (done.code, done.changed) == (0, []), done.text


def test_the_server_listens_on_loopback_only_and_the_proxy_hides_the_rest(fleet: Fleet) -> None:
    assert "127.0.0.1:8000" in ssh(MAIN, "ss -Hltn 'sport = :8000'")
    assert requests.get(f"{url(MAIN)}/healthz", timeout=10).status_code == 200
    for path in ("/metrics", "/tokenize", "/invocations", "/", "/health", "/docs"):
        assert requests.get(url(MAIN) + path, timeout=10).status_code == 404, path


def test_stopping_a_server_lets_its_streams_finish_and_leaves_no_process(fleet: Fleet) -> None:
    before = processes("fp8fleet-tiny.service")
    assert len(before) > 1
    streams = open_streams(url(MAIN), 4, tokens=600)
    ssh(MAIN, "systemctl stop fp8fleet-tiny.service")
    for stream, thread in streams:
        thread.join(60)
        assert (stream.error, stream.done, stream.finish) == (None, True, "length")
    left = ssh(MAIN, f"for p in {' '.join(before)}; do [ -d /proc/$p ] && echo $p; done; true")
    assert left == ""
    assert requests.get(f"{url(MAIN)}/healthz", timeout=10).status_code >= 500


def test_a_stopped_server_is_started_again(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory())
    assert (done.code, done.changed) == (0, ["vLLM | Server 1"]), done.text
    assert complete(url(MAIN)).status_code == 200


def test_a_killed_server_comes_back_by_itself_and_leaves_no_process(fleet: Fleet) -> None:
    before = processes("fp8fleet-tiny.service")
    started = invocation(MAIN, "tiny")
    ssh(MAIN, "kill -9 $(systemctl show -P MainPID fp8fleet-tiny.service)")
    until(lambda: invocation(MAIN, "tiny") not in ("", started), "a new start")
    left = ssh(MAIN, f"for p in {' '.join(before)}; do [ -d /proc/$p ] && echo $p; done; true")
    assert left == ""
    until(
        lambda: requests.get(f"{url(MAIN)}/healthz", timeout=10).status_code == 200,
        "healthy after the kill",
    )
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    # only the proof of readiness and the warm-up were due; nothing was restarted
    assert done.changed in ([], ["vLLM | Server 1"])


def test_a_second_server_starts_without_touching_the_first(fleet: Fleet) -> None:
    first = invocation(MAIN, "tiny")
    done = fleet.full(fleet.inventory(instances=[instance(), instance("second", 8001)]))
    assert done.code == 0, done.text
    assert invocation(MAIN, "tiny") == first
    config = ssh(MAIN, "cat /etc/nginx/nginx.conf")
    assert re.findall(r"server 127\.0\.0\.1:(\d+)", config) == ["8000", "8001"]


def test_one_changed_option_changes_one_file_and_restarts_that_server_only(fleet: Fleet) -> None:
    first, second = invocation(MAIN, "tiny"), invocation(MAIN, "second")
    nginx = ssh(MAIN, "systemctl show -P MainPID nginx.service")
    ssh(MAIN, "touch /tmp/before; sleep 0.05")
    changed = instance("second", 8001, max_num_seqs=8)
    inventory = fleet.inventory(instances=[instance(), changed])
    dry = json.loads(fleet.pyinfra(inventory, "--dry", "--json").out)["plan"]
    pending = ["vLLM | Units, options, environments", "vLLM | Server 2"]
    assert [op["name"] for op in dry if op["hosts_with_change"]] == pending
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    newer = ssh(MAIN, "find /etc /opt/fp8fleet /usr/local -newer /tmp/before -type f")
    assert newer.split() == ["/etc/fp8fleet/instances/second.yaml"]
    assert done.changed == ["vLLM | Units, options, environments", "vLLM | Server 2"]
    assert invocation(MAIN, "tiny") == first
    assert invocation(MAIN, "second") != second
    assert ssh(MAIN, "systemctl show -P MainPID nginx.service") == nginx


def test_a_changed_proxy_only_reloads_nginx(fleet: Fleet) -> None:
    first, second = invocation(MAIN, "tiny"), invocation(MAIN, "second")
    nginx = ssh(MAIN, "systemctl show -P MainPID nginx.service")
    changed = instance("second", 8001, max_num_seqs=8)
    inventory = fleet.inventory(instances=[instance(), changed], nginx_body_size="32m")
    done = fleet.full(inventory)
    assert done.code == 0, done.text
    assert done.changed == ["Nginx | Configuration", "Nginx | The configuration is live"]
    assert ssh(MAIN, "systemctl show -P MainPID nginx.service") == nginx
    assert (invocation(MAIN, "tiny"), invocation(MAIN, "second")) == (first, second)


def test_a_removed_server_is_stopped_and_its_unit_and_upstream_are_gone(fleet: Fleet) -> None:
    first = invocation(MAIN, "tiny")
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    units = ssh(MAIN, "cd /etc/systemd/system && ls fp8fleet-*.service").split()
    assert units == ["fp8fleet-logrotate.service", "fp8fleet-tiny.service"]
    assert "second" not in ssh(MAIN, "ls /etc/fp8fleet/instances /run/fp8fleet")
    assert "8001" not in ssh(MAIN, "cat /etc/nginx/nginx.conf; ss -Hltn")
    assert invocation(MAIN, "tiny") == first


def test_after_a_reboot_the_host_serves_again_by_itself(fleet: Fleet) -> None:
    reboot(MAIN)
    until(lambda: serves(MAIN), "a completion after the reboot")
    done = fleet.full(fleet.inventory())
    # the proof of readiness and the warm-up are of one start
    assert (done.code, done.changed) == (0, ["vLLM | Server 1"]), done.text


def test_a_server_that_cannot_start_shows_the_line_of_its_log_that_says_why(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory(instances=[instance(chat_template="/none/chat.jinja")]))
    assert done.code == 1
    assert "/none/chat.jinja" in done.text
    assert "Traceback" not in done.text


def test_the_corrected_inventory_serves_again_with_a_key_that_the_proxy_asks_for(
    fleet: Fleet,
) -> None:
    inventory = fleet.inventory(api_key="env:E2E_API_KEY")
    refused = fleet.full(inventory)
    assert refused.code == 2
    assert "E2E_API_KEY" in refused.err
    secret = "k3y.only-for+tests"
    done = fleet.full(inventory, env={"E2E_API_KEY": secret})
    assert done.code == 0, done.text
    assert secret not in done.text
    assert complete(url(MAIN)).status_code == 401
    assert complete(url(MAIN), key=secret).status_code == 200
    assert ssh(MAIN, "stat -c %a /etc/fp8fleet/instances/tiny.env") == "600"
    assert secret not in ssh(MAIN, "ps -eo args; journalctl -b --no-pager -u fp8fleet-tiny")


def test_a_key_that_the_inventory_no_longer_has_is_gone_from_the_host(fleet: Fleet) -> None:
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text
    assert complete(url(MAIN)).status_code == 200
    assert ssh(MAIN, "grep -rl k3y.only /etc/fp8fleet /etc/systemd /etc/nginx; true") == ""

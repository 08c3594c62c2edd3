"""The firewall role: what it asks of ufw and firewalld in every state, and how it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import RecordedHost, context, host_plan, program, run
from pyinfra.api import FunctionCommand, StringCommand
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh import SSHConnector

from fp8fleet.firewalls import Rule, Zone, read_zones, ssh_ports, ufw_rule
from fp8fleet.plan import FirewallPlan, FirewallRule, HostPlan
from roles.firewall import operations
from roles.firewall.facts import (
    HOLD,
    RECORD,
    WATCHDOG,
    Firewalld,
    FirewalldState,
    Ufw,
    UfwState,
)
from roles.firewall.operations import close_unplanned, let_in, rich_rule
from roles.host.facts import InstalledPackages

STOP = f"systemctl stop {WATCHDOG}.timer"
GATEWAY = FirewallRule(8000, "10.0.0.5")
GATEWAY6 = FirewallRule(8000, "fd00::5")
PROXY = FirewallRule(8080, None)
SSH = FirewallRule(22, None)
OTHER_SSH = FirewallRule(2222, None)
OLD = FirewallRule(9000, "10.0.0.9")


def plan(tool: str, *rules: FirewallRule, ssh_port: int = 22, **changes: Any) -> HostPlan:
    return host_plan(firewall=FirewallPlan(tool, (tool,), rules, ssh_port), **changes)


def texts(host: RecordedHost, operation: Any, plan: HostPlan, executing: bool = False) -> list[str]:
    """The commands as text; what runs here as its function's name, a failure as its message."""
    with context(host, executing, run=["gpu-1", *plan.gateways]):
        return [_text(command, host) for command in operation._inner(plan=plan)]


def _text(command: StringCommand | FunctionCommand, host: RecordedHost) -> str:
    if isinstance(command, StringCommand):
        return str(command.get_raw_value()).split(" 2>/dev/null || { echo")[0]
    if command.function.__name__ == "fail":
        command.function(None, host, *command.args, **command.kwargs)
        return host.said[-1]
    return str(command.function.__name__)


def both(state: UfwState | FirewalldState, plan: HostPlan) -> tuple[list[str], list[str]]:
    """The commands of `let_in`, then of `close_unplanned`; one fact is asked."""
    fact = Ufw if isinstance(state, UfwState) else Firewalld
    host = RecordedHost({fact: state})
    found = texts(host, let_in, plan), texts(host, close_unplanned, plan)
    assert len(host.asked) == 1
    return found


def test_an_unmanaged_firewall_is_not_even_asked() -> None:
    host = RecordedHost({})
    assert texts(host, let_in, plan("unmanaged", PROXY)) == []
    assert texts(host, close_unplanned, plan("unmanaged", PROXY)) == []
    assert host.asked == []


# ufw

RULES = frozenset({GATEWAY, GATEWAY6, PROXY})
UFW = UfwState(
    installed=True,
    active=True,
    enabled=True,
    ssh_ports=(22,),
    allowed=RULES,
    ours=RULES,
    in_force=RULES,
)
PLANNED = plan("ufw", GATEWAY, GATEWAY6, PROXY)


def test_ufw_as_planned_needs_nothing() -> None:
    assert both(UFW, PLANNED) == ([], [])


def test_ssh_is_let_in_before_ufw_is_switched_on_and_proved_after() -> None:
    off = replace(UFW, active=False, enabled=False, ssh_ports=(22, 2222), in_force=frozenset())
    fresh = replace(off, allowed=frozenset(), ours=frozenset())
    found, closed = both(fresh, PLANNED)
    assert found[:5] == [
        "ufw allow proto tcp from any to any port 22 comment 'fp8fleet ssh'",
        "ufw allow proto tcp from any to any port 2222 comment 'fp8fleet ssh'",
        "ufw allow proto tcp from 10.0.0.5 to any port 8000 comment fp8fleet",
        "ufw allow proto tcp from fd00::5 to any port 8000 comment fp8fleet",
        "ufw allow proto tcp from any to any port 8080 comment fp8fleet",
    ]
    assert "systemd-run --quiet --on-active=90" in found[5]
    assert "ufw --force disable" in found[5]
    assert found[6] == "systemctl enable --quiet ufw.service"
    assert found[7].startswith("ufw --force enable >/run/fp8fleet.ufw 2>&1")
    assert found[8:] == ["_ssh_gets_in", STOP]
    assert closed == []


def test_the_port_that_ssh_connects_to_is_let_in_too() -> None:
    off = replace(UFW, active=False)
    found, _ = both(off, replace(PLANNED, firewall=replace(PLANNED.firewall, ssh_port=2200)))
    assert "ufw allow proto tcp from any to any port 2200 comment 'fp8fleet ssh'" in found


def test_ssh_is_no_concern_of_ours_where_ufw_is_on() -> None:
    """The operator may have restricted it."""
    assert both(replace(UFW, ssh_ports=()), PLANNED) == ([], [])


def test_an_operators_limit_on_ssh_is_not_replaced() -> None:
    found, _ = both(replace(UFW, active=False, limited=frozenset({SSH})), PLANNED)
    assert not [line for line in found if "port 22" in line]


def test_ufw_is_not_switched_on_where_nobody_listens_for_ssh() -> None:
    (line,), _ = both(replace(UFW, active=False, ssh_ports=()), PLANNED)
    assert "no sshd was found listening" in line


def stored(words: str) -> Rule:
    """A rule of ufw's, as its file has it."""
    rule = ufw_rule(f"### tuple ### {words}")
    assert rule, words
    return rule


@pytest.mark.parametrize(
    ("words", "port", "shown"),
    [
        ("deny tcp 8080 0.0.0.0/0 any 0.0.0.0/0 in", 8080, "deny 8080/tcp"),
        ("deny any 8080 ::/0 any ::/0 in", 8080, "deny 8080"),
        ("reject tcp 8000:8100 0.0.0.0/0 any 0.0.0.0/0 in", 8000, "reject 8000:8100/tcp"),
        ("deny tcp 7000,8080 0.0.0.0/0 any 0.0.0.0/0 in", 8080, "deny 7000,8080/tcp"),
        ("deny any any 0.0.0.0/0 any 10.0.0.0/24 in", 8000, "deny from 10.0.0.0/24"),
        ("deny_log any any ::/0 any fd00::5 in", 8000, "deny_log from fd00::5"),
        ("deny tcp 8080 0.0.0.0/0 any 0.0.0.0/0 Web%20Server - in", 8080, "deny Web Server"),
        ("deny tcp 22 0.0.0.0/0 any 0.0.0.0/0 in", 22, "deny 22/tcp"),
    ],
)
def test_a_port_that_the_operator_denies_fails_the_host_before_anything(
    words: str, port: int, shown: str
) -> None:
    state = replace(UFW, active=False, allowed=frozenset(), rules=(stored(words),))
    (line,), _ = both(state, PLANNED)
    assert f"ufw denies port {port} on this host ({shown}), the plan lets in" in line


@pytest.mark.parametrize(
    "words",
    [
        "deny any any 0.0.0.0/0 any 203.0.113.9 in",
        "deny tcp 8080 0.0.0.0/0 any 203.0.113.0/24 in",
        "deny udp 8080 0.0.0.0/0 any 0.0.0.0/0 in",
        "deny tcp 8081:9000 0.0.0.0/0 any 0.0.0.0/0 in",
        "deny tcp 8080 0.0.0.0/0 any 0.0.0.0/0 in_eth1",
        "deny tcp 8080 192.0.2.1 any 0.0.0.0/0 in",
        "deny tcp 8080 0.0.0.0/0 any 0.0.0.0/0 out",
        "route:deny tcp 8080 0.0.0.0/0 any 0.0.0.0/0 in",
    ],
)
def test_a_deny_of_a_part_is_the_operators_own(words: str) -> None:
    line = ufw_rule(f"### tuple ### {words}")
    assert both(replace(UFW, rules=(line,) if line else ()), PLANNED) == ([], [])


def test_ufw_goes_by_the_first_rule_that_fits() -> None:
    ours, deny = (
        stored("allow tcp 8080 0.0.0.0/0 any 0.0.0.0/0 in"),
        stored("deny any any 0.0.0.0/0 any 0.0.0.0/0 in"),
    )
    gateway = stored("allow tcp 8000 0.0.0.0/0 any 10.0.0.5 in")
    assert both(replace(UFW, rules=(ours, gateway, deny)), PLANNED) == ([], [])
    (line,), _ = both(replace(UFW, rules=(ours, deny, gateway)), PLANNED)
    assert "ufw denies port 8000 on this host (deny)" in line


def test_ufw_that_lets_in_what_no_rule_names_is_told_to_deny_when_it_is_switched_on() -> None:
    """Everything else is shut out; whoever runs such a ufw already has chosen it."""
    found, _ = both(replace(UFW, active=False, lets_all_in=True), PLANNED)
    (deny,) = [line for line in found if line.startswith("ufw default deny incoming ")]
    (watchdog,) = [line for line in found if "systemd-run" in line]
    (enable,) = [line for line in found if line.startswith("ufw --force enable")]
    assert found.index(watchdog) < found.index(deny) < found.index(enable)
    assert both(replace(UFW, lets_all_in=True), PLANNED) == ([], [])


def test_a_run_that_was_killed_before_its_proof_is_finished() -> None:
    found, _ = both(replace(UFW, watchdog=True, allowed=RULES | {SSH}), PLANNED)
    assert [line for line in found if line.startswith("ufw allow")] == []
    assert found[-2:] == ["_ssh_gets_in", STOP]


def test_a_rule_that_is_stored_but_not_in_force_reloads_ufw() -> None:
    found, _ = both(replace(UFW, in_force=RULES - {GATEWAY}), PLANNED)
    (line,) = found
    assert line.startswith("ufw reload ")


def test_what_was_ours_is_closed_and_the_operators_is_not() -> None:
    theirs = FirewallRule(9100, None)
    state = replace(UFW, allowed=RULES | {OLD, theirs}, ours=RULES | {OLD})
    assert both(state, PLANNED) == (
        [],
        ["ufw delete allow proto tcp from 10.0.0.9 to any port 9000"],
    )


def test_nothing_is_closed_in_a_run_without_the_gateway() -> None:
    state = replace(UFW, ours=RULES | {OLD})
    host = RecordedHost({Ufw: state})
    behind = replace(PLANNED, gateways=("gw-1",))
    texts(host, let_in, behind)
    with context(host, run=["gpu-1"]):
        assert list(close_unplanned._inner(plan=behind)) == []
    assert len(texts(host, close_unplanned, behind)) == 1


def test_the_other_firewall_is_never_joined() -> None:
    (line,), _ = both(replace(UFW, firewalld=True), PLANNED)
    assert "firewalld is active on this host and the inventory asks for ufw" in line
    (line,), _ = both(FirewalldState(ufw=True), plan("firewalld", PROXY))
    assert "ufw is active on this host and the inventory asks for firewalld" in line


def test_a_host_without_ufw_gets_it_and_is_asked_again() -> None:
    states = iter([UfwState(ssh_ports=(22,)), replace(UFW, active=False, enabled=False)])
    facts: dict[Any, Any] = {Ufw: lambda packages: next(states), InstalledPackages: set()}
    found = texts(RecordedHost(facts), let_in, PLANNED, executing=True)
    assert "install ufw" in found[2]
    assert found[3] == "ufw allow proto tcp from any to any port 22 comment 'fp8fleet ssh'"
    assert found[-1] == STOP


UFW_OUTPUT = """\
installed
enabled
lets-all-in
### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in comment=667038666c65657420737368
### tuple ### allow tcp 8000 0.0.0.0/0 any 10.0.0.5 in comment=667038666c656574
### tuple ### allow tcp 8080 0.0.0.0/0 any 10.9.0.0/16 in comment=667038666c656574
### tuple ### limit tcp 2222 0.0.0.0/0 any 0.0.0.0/0 in comment=6d696e65
### tuple ### deny tcp 9000 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### allow any 99 0.0.0.0/0 any 0.0.0.0/0 in_host0
### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 OpenSSH - in
### tuple ### allow tcp 22 ::/0 any ::/0 in comment=667038666c65657420737368
### tuple ### allow tcp 8000 ::/0 any fd00::5 in comment=667038666c656574
-N ufw-user-input
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
-A ufw-user-input -s 10.0.0.5/32 -p tcp -m tcp --dport 8000 -j ACCEPT
-A ufw-user-input -s 10.9.0.0/16 -p tcp -m tcp --dport 8080 -j ACCEPT
-A ufw-user-input -p tcp -m tcp --dport 2222 -j ufw-user-limit-accept
-N ufw6-user-input
-A ufw6-user-input -s fd00::5/128 -p tcp -m tcp --dport 8000 -j ACCEPT
listen LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=37,fd=3))
listen LISTEN 0 511 0.0.0.0:8080 0.0.0.0:* users:(("nginx",pid=99,fd=3))
"""


def test_ufws_own_words_are_read() -> None:
    """As ufw 0.36 and iptables 1.8 print them on Debian 12."""
    network = FirewallRule(8080, "10.9.0.0/16")
    state = Ufw().process(UFW_OUTPUT.splitlines())
    assert replace(state, rules=()) == UfwState(
        installed=True,
        active=True,
        enabled=True,
        lets_all_in=True,
        ssh_ports=(22,),
        allowed=frozenset({SSH, GATEWAY, GATEWAY6, network}),
        limited=frozenset({OTHER_SSH}),
        ours=frozenset({GATEWAY, GATEWAY6, network}),
        in_force=frozenset({SSH, GATEWAY, GATEWAY6, network}),
    )
    assert [rule.text for rule in state.rules if rule.action == "deny"] == ["deny 9000/tcp"]


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("10.9.0.0/16", "10.9.0.0/16"),
        ("10.0.0.5/32", "10.0.0.5"),
        ("FD00:0::5", "fd00::5"),
        ("10.9.3.4/16", "10.9.0.0/16"),
        ("0.0.0.0/0", None),
    ],
)
def test_ufws_addresses_are_compared_and_not_their_spelling(
    written: str, source: str | None
) -> None:
    rule = stored(f"allow tcp 8080 0.0.0.0/0 any {written} in comment=667038666c656574")
    assert (rule.planned, rule.comment) == (FirewallRule(8080, source), "fp8fleet")


def test_a_range_of_ports_is_written_and_read_as_the_firewalls_do() -> None:
    """As ufw 0.36 and iptables 1.8 print it on Debian 12."""
    nodes = FirewallRule(1024, "10.0.0.7", 65535)
    output = [
        *("installed", "enabled", "-N ufw-user-input"),
        "### tuple ### allow tcp 1024:65535 0.0.0.0/0 any 10.0.0.7 in comment=667038666c656574",
        'listen LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=37,fd=3))',
        "-A ufw-user-input -s 10.0.0.7/32 -p tcp -m multiport --dports 1024:65535 -j ACCEPT",
    ]
    state = Ufw().process(output)
    assert state.ours == state.in_force == {nodes}
    assert texts(RecordedHost({Ufw: state}), let_in, plan("ufw", nodes)) == []
    without = replace(state, allowed=frozenset())
    (add, *_) = texts(RecordedHost({Ufw: without}), let_in, plan("ufw", nodes))
    assert add == "ufw allow proto tcp from 10.0.0.7 to any port 1024:65535 comment fp8fleet"
    assert 'port port="1024-65535" protocol="tcp"' in rich_rule(nodes)


@pytest.mark.parametrize("fact", [Ufw, Firewalld])
def test_a_host_with_neither_answers_in_one_command(fact: Any, tmp_path: Path) -> None:
    program(tmp_path, "systemctl", "exit 3")
    program(tmp_path, "ss", "exit 1")
    program(tmp_path, "rpm", "exit 1")
    for name in ("sed", "grep"):
        program(tmp_path, name, f'exec /usr/bin/{name} "$@"')
    result = run(str(fact().command(packages=["ufw", "netbase"])), env={"PATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert not fact().process(result.stdout.splitlines()).installed


@pytest.mark.parametrize("status", ["installed", "unpacked", "half-configured"])
def test_a_package_that_is_not_configured_is_not_installed(tmp_path: Path, status: str) -> None:
    """A killed run may leave one: its programs are there, what they need is not."""
    program(tmp_path, "dpkg-query", f'[ "$4" = netbase ] && echo {status} || echo installed')
    program(tmp_path, "systemctl", "exit 3")
    command = str(Firewalld().command(packages=["firewalld", "netbase"]))
    result = run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    state = Firewalld().process(result.stdout.splitlines())
    assert state.installed == (status == "installed")


# Who listens for SSH


def test_sshd_is_found_by_its_name_and_behind_systemds_socket_by_its_connections() -> None:
    lines = [
        'listen LISTEN 0 128 0.0.0.0:2200 0.0.0.0:* users:(("sshd",pid=7,fd=3))',
        'listen LISTEN 0 4096 *:22 *:* users:(("systemd",pid=1,fd=41))',
        'listen LISTEN 0 511 [::]:8080 [::]:* users:(("nginx",pid=9,fd=6))',
        'established 0 0 [fd00::1]:22 [fd00::9]:5000 users:(("sshd-session",pid=8,fd=4))',
        'established 0 0 127.0.0.1:40000 127.0.0.1:8080 users:(("sshd",pid=8,fd=9))',
        'established 0 0 10.0.0.1:8080 10.0.0.9:5001 users:(("nginx",pid=9,fd=8))',
    ]
    assert ssh_ports(lines) == (22, 2200)
    assert ssh_ports([]) == ()


# A new SSH connection


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """SSH connections are not made; an error in the list is raised."""
    outcome: list[Any] = []

    def connect(self: Any) -> None:
        if outcome:
            raise outcome[0]

    monkeypatch.setattr(SSHConnector, "__init__", lambda self, state, host: None)
    monkeypatch.setattr(SSHConnector, "connect", connect)
    yield outcome


def test_a_new_connection_that_fails_fails_the_host(connection: list[Any]) -> None:
    host = RecordedHost({})
    state: Any = SimpleNamespace()
    assert operations._ssh_gets_in(state, host, "ufw")
    host.connector = SSHConnector(state, host)
    assert operations._ssh_gets_in(state, host, "ufw")
    connection.append(ConnectError("timed out"))
    assert not operations._ssh_gets_in(state, host, "ufw")
    assert "SSH does not get in with ufw on (timed out)" in host.said[-1]
    assert "switched off again within 90 seconds" in host.said[-1]


# firewalld


def zone(*rules: FirewallRule, name: str = "public", **changes: Any) -> dict[str, Zone]:
    texts = frozenset(rich_rule(rule) for rule in rules)
    return {name: replace(Zone(name, "default", True, texts), **changes)}


def recorded(*rules: FirewallRule, zone: str = "public") -> frozenset[tuple[str, str]]:
    return frozenset((zone, rich_rule(rule)) for rule in rules)


FIREWALLD = FirewalldState(
    installed=True,
    active=True,
    enabled=True,
    ssh_ports=(22,),
    runtime=zone(GATEWAY, PROXY),
    permanent=zone(GATEWAY, PROXY),
    recorded=recorded(GATEWAY, PROXY),
)
KYLIN = plan("firewalld", GATEWAY, PROXY, family="dnf")
RULE = "'--add-rich-rule=" + rich_rule(GATEWAY) + "'"


def test_rich_rules_are_written_as_firewalld_prints_them() -> None:
    port = 'port port="8000" protocol="tcp" accept'
    assert rich_rule(FirewallRule(8000, None)) == f"rule {port}"
    assert rich_rule(GATEWAY) == f'rule family="ipv4" source address="10.0.0.5" {port}'
    assert rich_rule(GATEWAY6) == f'rule family="ipv6" source address="fd00::5" {port}'


def test_firewalld_as_planned_needs_nothing() -> None:
    assert both(FIREWALLD, KYLIN) == ([], [])


@pytest.mark.parametrize(
    ("lost", "program"), [("runtime", "firewall-cmd"), ("permanent", "firewall-cmd --permanent")]
)
def test_a_rule_that_is_lost_now_or_for_the_next_start_is_added_there(
    lost: str, program: str
) -> None:
    gone: dict[str, Any] = {lost: zone(PROXY)}
    state = replace(FIREWALLD, **gone)
    assert both(state, KYLIN) == ([f"{program} --quiet --zone=public {RULE}"], [])


def test_what_is_ours_is_noted_before_it_is_added() -> None:
    state = replace(FIREWALLD, runtime=zone(), permanent=zone(), recorded=frozenset())
    found, _ = both(state, KYLIN)
    assert RECORD in found[0]
    assert [line.split(" --zone")[0] for line in found[1:]] == [
        "firewall-cmd --permanent --quiet",
        "firewall-cmd --quiet",
    ]


def test_a_rule_that_the_operator_has_is_not_noted_as_ours() -> None:
    state = replace(FIREWALLD, recorded=recorded(PROXY))
    assert both(state, KYLIN) == ([], [])


def test_rules_go_to_every_zone_that_traffic_comes_to() -> None:
    open_zone = Zone("trusted", "ACCEPT", True)
    zones = zone() | zone(name="internal") | {"trusted": open_zone, "dmz": Zone("dmz")}
    state = replace(FIREWALLD, runtime=zones, permanent=zones, recorded=frozenset())
    found, _ = both(state, KYLIN)
    names = {line.split("--zone=")[1].split()[0] for line in found if "--zone" in line}
    assert names == {"public", "internal"}


def test_what_was_ours_is_removed_in_both_places_and_then_from_the_record() -> None:
    state = replace(
        FIREWALLD,
        runtime=zone(GATEWAY, PROXY, OLD),
        permanent=zone(GATEWAY, PROXY, OLD),
        recorded=recorded(GATEWAY, PROXY, OLD),
    )
    found, closed = both(state, KYLIN)
    assert found == []
    remove = f"--quiet --zone=public '--remove-rich-rule={rich_rule(OLD)}'"
    assert closed[:2] == [f"firewall-cmd --permanent {remove}", f"firewall-cmd {remove}"]
    assert RECORD in closed[2]


def test_a_leftover_that_is_in_force_only_is_removed() -> None:
    state = replace(
        FIREWALLD, runtime=zone(GATEWAY, PROXY, OLD), recorded=recorded(GATEWAY, PROXY, OLD)
    )
    _, closed = both(state, KYLIN)
    assert closed[0].startswith("firewall-cmd --quiet")
    assert len(closed) == 2


def test_the_operators_rules_are_not_removed() -> None:
    state = replace(FIREWALLD, runtime=zone(GATEWAY, PROXY, OLD))
    assert both(state, KYLIN) == ([], [])


def test_rules_of_a_zone_that_is_not_in_use_now_stay() -> None:
    zones = FIREWALLD.runtime | zone(GATEWAY, name="internal", used=False)
    state = replace(
        FIREWALLD,
        runtime=zones,
        permanent=zones,
        recorded=FIREWALLD.recorded | recorded(GATEWAY, zone="internal"),
    )
    assert both(state, KYLIN) == ([], [])


HTTP: dict[str, tuple[str, ...]] = {"alt": ("8080/tcp",)}


@pytest.mark.parametrize(
    "rule",
    [
        'rule port port="8080" protocol="tcp" reject',
        'rule family="ipv6" port port="8000-8100" protocol="tcp" drop',
        'rule priority="-1" service name="alt" reject type="tcp-reset"',
        'rule family="ipv4" source address="10.0.0.0/24" drop',
        'rule protocol value="tcp" log prefix="no way" level="info" limit value="1/m" drop',
    ],
)
@pytest.mark.parametrize("where", ["runtime", "permanent"])
def test_a_rich_rule_that_keeps_out_what_is_planned_fails_the_host(rule: str, where: str) -> None:
    """firewalld goes by what denies first."""
    rules = {
        "public": replace(zone()["public"], rules=zone(GATEWAY, PROXY)["public"].rules | {rule})
    }
    denied: dict[str, Any] = {where: rules}
    (line,), _ = both(replace(FIREWALLD, services=HTTP, **denied), KYLIN)
    assert "firewall: firewalld denies port 80" in line
    assert f"({rule})" in line


@pytest.mark.parametrize(
    "rule",
    [
        'rule priority="100" port port="8080" protocol="tcp" reject',
        'rule family="ipv4" source address="203.0.113.9" drop',
        'rule family="ipv4" source NOT address="10.0.0.0/8" port port="8080" protocol="tcp" drop',
        'rule family="ipv4" source ipset="bad" drop',
        'rule family="ipv4" destination address="192.0.2.1" reject',
        'rule port port="8080" protocol="udp" reject',
        'rule service name="unknown" reject',
        'rule icmp-type name="echo-request" drop',
        'rule port port="8080" protocol="tcp" log prefix="seen"',
        'rule "broken',
    ],
)
def test_a_rich_rule_about_others_is_the_operators_own(rule: str) -> None:
    rules = {
        "public": replace(zone()["public"], rules=zone(GATEWAY, PROXY)["public"].rules | {rule})
    }
    state = replace(FIREWALLD, runtime=rules, permanent=rules, services=HTTP)
    assert both(state, KYLIN) == ([], [])


def test_a_zone_whose_target_is_drop_lets_in_what_its_rules_name() -> None:
    zones = zone(target="DROP")
    state = replace(FIREWALLD, runtime=zones, permanent=zones, recorded=frozenset())
    found, _ = both(state, KYLIN)
    assert [line for line in found if "--zone=public" in line and RULE in line]


def test_addresses_that_the_operator_shuts_out_are_not_let_in() -> None:
    """The zone `drop` with sources is how firewalld's users are rid of somebody."""
    lines = ["drop (active)", "  target: DROP", "  interfaces:", "  sources: 203.0.113.0/24"]
    assert not read_zones(lines)["drop"].used
    assert read_zones([*lines, "  services: ssh"])["drop"].used
    assert read_zones([*lines[:2], "  interfaces: eth0"])["drop"].used


OFF = replace(FIREWALLD, active=False, runtime={}, permanent=zone(), recorded=frozenset())


def test_ssh_is_let_in_offline_before_firewalld_starts_and_proved_after() -> None:
    found, _ = both(replace(OFF, ssh_ports=(22, 2222)), KYLIN)
    assert RECORD in found[0]
    assert found[1].startswith("firewall-offline-cmd --quiet --zone=public ")
    for rule in (SSH, OTHER_SSH, GATEWAY, PROXY):
        assert f"'--add-rich-rule={rich_rule(rule)}'" in found[1]
    assert found[2] == f"rm -f {HOLD} && systemctl daemon-reload"
    assert "systemctl disable --now firewalld.service" in found[3]
    assert found[4] == "systemctl enable --quiet --now firewalld.service"
    assert "firewall-cmd --state" in found[5]
    assert found[6:] == ["_ssh_gets_in", STOP]


def test_zones_that_the_network_names_let_ssh_in_too() -> None:
    state = replace(OFF, permanent=zone() | zone(name="work", used=False), bound_zones=("work",))
    found, _ = both(state, KYLIN)
    assert {line.split("--zone=")[1].split()[0] for line in found if "--zone" in line} == {
        "public",
        "work",
    }


def test_firewalld_is_held_back_while_it_is_installed() -> None:
    """A package may start it: with its default zone alone, port 22 would be all that gets in."""
    states = iter([FirewalldState(ssh_ports=(2222,)), replace(OFF, held=True, ssh_ports=(2222,))])
    facts: dict[Any, Any] = {Firewalld: lambda packages: next(states), InstalledPackages: set()}
    found = texts(RecordedHost(facts), let_in, KYLIN, executing=True)
    assert HOLD in found[0]
    assert "ConditionPathExists" in found[0]
    assert "dnf -y" in found[1]
    offline = next(line for line in found if line.startswith("firewall-offline-cmd"))
    assert f"'--add-rich-rule={rich_rule(OTHER_SSH)}'" in offline
    assert found.index(offline) < found.index(f"rm -f {HOLD} && systemctl daemon-reload")


def test_a_masked_firewalld_is_the_operators_word() -> None:
    (line,), _ = both(replace(OFF, masked=True), KYLIN)
    assert "firewalld is masked on this host" in line


def test_firewalld_that_would_not_start_at_boot_is_enabled() -> None:
    found, _ = both(replace(FIREWALLD, enabled=False), KYLIN)
    assert found == ["systemctl enable --quiet firewalld.service"]


def test_many_rules_are_several_commands() -> None:
    """A shell takes 128 KiB at most for a command."""
    many = [FirewallRule(6881, f"10.0.{i // 250}.{i % 250 + 1}") for i in range(1000)]
    state = replace(FIREWALLD, runtime=zone(), permanent=zone(), recorded=frozenset())
    found, _ = both(state, plan("firewalld", *many))
    assert max(map(len, found)) < 32_000
    assert sum(line.count("--add-rich-rule") for line in found) == 2000


FIREWALLD_OUTPUT = """\
installed
LoadState=loaded
ActiveState=active
UnitFileState=enabled
default public
bound work
record public rule port port="8080" protocol="tcp" accept
service /usr/lib/firewalld/services/ssh.xml:  <port protocol="tcp" port="22"/>
runtime internal (active)
runtime   target: default
runtime   interfaces: eth1 eth2
runtime   sources:
runtime   services: ssh mdns
runtime   rich rules:
runtime
runtime public
runtime   target: default
runtime   interfaces:
runtime   sources:
runtime   ports: 9100/tcp
runtime   rich rules:
runtime \trule family="ipv4" source address="10.0.0.5" port port="8000" protocol="tcp" accept
runtime \trule port port="8080" protocol="tcp" accept
permanent public
permanent   target: %%REJECT%%
permanent   interfaces:
permanent   sources: 10.0.0.0/8
permanent   services: ssh
permanent   rich rules:
"""


def test_firewalls_own_words_are_read() -> None:
    """As firewalld 1.3 prints them on Debian 12, and 0.6 to 0.8 do (firewall-cmd(1))."""
    assert Firewalld().process(FIREWALLD_OUTPUT.splitlines()) == FirewalldState(
        installed=True,
        active=True,
        enabled=True,
        default_zone="public",
        bound_zones=("work",),
        runtime={
            "internal": Zone("internal", "default", True, services=("ssh", "mdns")),
            "public": Zone(
                "public",
                "default",
                False,
                frozenset({rich_rule(GATEWAY), rich_rule(PROXY)}),
                ports=("9100/tcp",),
            ),
        },
        permanent={"public": Zone("public", "%%REJECT%%", True, services=("ssh",))},
        services={"ssh": ("22/tcp",)},
        recorded=recorded(PROXY),
    )

"""SELinux and KySec: what is read, what is set, what is told; recordings of a Debian 12 machine.

No KySec is within reach of the tests: its outputs are made up after public descriptions.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import PROXY, RecordedHost, asked, context, host_plan, lines, program, run
from paramiko import ChannelException
from pyinfra.api import FunctionCommand

import roles.accept.operations as accept_operations
import roles.selinux.operations as selinux_operations
from fp8fleet.plan import HostPlan, SelinuxPlan
from roles.accept.operations import endpoint_answers
from roles.conda.operations import tools_environment
from roles.facts import PathState, PathStates
from roles.kysec.facts import Kysec, KysecState
from roles.kysec.operations import trusted_environments
from roles.nginx.facts import Nginx, NginxState
from roles.nginx.operations import live_configuration
from roles.operations import relabel_command, trust_command
from roles.selinux.facts import AllowRules, Denial, Denials, Selinux, SelinuxState
from roles.selinux.operations import no_denials, selinux_as_planned

CONNECT, RELAY = "httpd_can_network_connect", "httpd_can_network_relay"
TOOLS = "/opt/f/tools/t1"

PLAN = SelinuxPlan(
    mode="enforcing",
    asked=True,
    booleans={CONNECT: True, RELAY: False},
    ports=(8000, 8080, 8089),
    equivalences={},
    programs=(f"{TOOLS}/bin/python",),
    paths=("/etc/nginx/nginx.conf",),
)

FINE = SelinuxState(
    mode="enforcing",
    configured="enforcing",
    booleans=dict(PLAN.booleans),
    persistent=dict(PLAN.booleans),
    ports=((range(8000, 8001), "http_port_t"), (range(8085, 8095), "http_port_t")),
    equivalences={},
    mislabelled=(),
)


def settings(plan: SelinuxPlan | None = PLAN, **changes: Any) -> list[str]:
    """The commands on a host whose SELinux differs by ``changes`` from what is planned."""
    return lines(selinux_as_planned, {Selinux: replace(FINE, **changes)}, selinux=plan)


# The fact


RECORDED = """\
enforce 1
config enforcing
boolean httpd_can_network_connect 1 1
boolean httpd_can_network_relay 0 0
boolean of_another_policy
persistent httpd_can_network_relay=0
portcon tcp 8000 system_u:object_r:http_port_t:s0
portcon tcp 8081-8083 system_u:object_r:soundd_port_t:s0
like /data/fp8fleet /opt/fp8fleet
Would relabel /etc/nginx/nginx.conf from system_u:object_r:user_home_t:s0 to \
system_u:object_r:httpd_config_t:s0
"""


def test_the_state_is_read_from_one_answer() -> None:
    assert Selinux().process(RECORDED.splitlines()) == SelinuxState(
        mode="enforcing",
        configured="enforcing",
        booleans={CONNECT: True, RELAY: False},
        persistent={RELAY: False},
        ports=((range(8000, 8001), "http_port_t"), (range(8081, 8084), "soundd_port_t")),
        equivalences={"/data/fp8fleet": "/opt/fp8fleet"},
        mislabelled=("/etc/nginx/nginx.conf",),
    )


@pytest.mark.parametrize(
    "line",
    [
        *("enforce", "config", "boolean", "boolean x", "persistent", "like", "like /data"),
        *("portcon", "portcon tcp", "portcon tcp 80", "portcon tcp x u:r:t:s0"),
        *("portcon tcp 80 odd", "portcon tcp 8-x u:r:t:s0", "Would", "Would relabel", "Would x y"),
    ],
)
def test_a_line_with_a_word_too_few_means_nothing(line: str) -> None:
    assert Selinux().process([line]) == Selinux().process([])


def tree(root: Path, store: str = "var/lib/selinux/default/active") -> None:
    """The files that the fact reads, as a Debian 12 machine has them."""
    files = {
        "sys/fs/selinux/enforce": "1",
        f"sys/fs/selinux/booleans/{CONNECT}": "1 1",
        "etc/selinux/config": "# SELINUX= one of\nSELINUX=enforcing\nSELINUXTYPE=default\n",
        f"{store}/booleans.local": f"# This file is auto-generated\n\n{CONNECT}=1\n",
        f"{store}/ports.local": "# auto\nportcon tcp 8000 system_u:object_r:http_port_t:s0\n"
        "portcon udp 8000 system_u:object_r:dns_port_t:s0\n",
        "etc/selinux/default/contexts/files/file_contexts.subs": "/data /opt\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(root: Path, fact: Any, **arguments: Any) -> Any:
    """The fact's command run on the tree instead of on this machine, with its programs."""
    command = fact().command(**arguments)
    for top in ("/sys/fs/", "/etc/", "/var/"):
        command = command.replace(top, f"{root}{top}")
    command = command.replace("\\" + str(root), str(root)).replace("^\\/", "^\\/")
    done = run(f"PATH={root}/bin:$PATH; {command}")
    assert done.returncode == 0, done.stderr
    return fact().process(done.stdout.splitlines())


STORES = ("var/lib/selinux/default/active", "etc/selinux/default/active")


@pytest.mark.parametrize("store", STORES)
def test_the_state_is_read_from_where_libsemanage_keeps_it(tmp_path: Path, store: str) -> None:
    tree(tmp_path, store)
    wrong = tmp_path / "wrong"
    wrong.touch()
    program(tmp_path / "bin", "restorecon", 'echo "Would relabel $3 from a:b:c:s0 to a:b:d:s0"')
    found = read(tmp_path, Selinux, booleans=[CONNECT, RELAY], paths=[str(wrong), "/no/such"])
    assert found == SelinuxState(
        mode="enforcing",
        configured="enforcing",
        booleans={CONNECT: True},
        persistent={CONNECT: True},
        ports=((range(8000, 8001), "http_port_t"),),
        equivalences={"/data": "/opt"},
        mislabelled=(str(wrong),),
    )


def test_a_host_without_selinux_is_one(tmp_path: Path) -> None:
    found = read(tmp_path, Selinux, booleans=[CONNECT], paths=[])
    assert found == SelinuxState(None, None, {}, {}, (), {}, ())


# Settings


def test_what_is_as_planned_asks_once_and_changes_nothing() -> None:
    assert settings() == []
    host = RecordedHost({Selinux: FINE})
    with context(host):
        assert list(selinux_as_planned._inner(selinux=PLAN)) == []
    assert len(host.asked) == 1


def test_where_selinux_is_left_alone_nothing_is_asked() -> None:
    assert lines(selinux_as_planned, {}, selinux=None) == []


def test_selinux_that_is_off_is_told_and_left(caplog: pytest.LogCaptureFixture) -> None:
    host = RecordedHost({Selinux: replace(FINE, mode=None)})
    with context(host, executing=True):
        assert list(selinux_as_planned._inner(selinux=PLAN)) == []
    assert "SELinux is off on this host" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"booleans": {CONNECT: False, RELAY: False}}, f"setsebool -P {CONNECT}=1"),
        ({"persistent": {RELAY: False}}, f"setsebool -P {CONNECT}=1"),
        ({"persistent": {CONNECT: False, RELAY: False}}, f"setsebool -P {CONNECT}=1"),
        ({"booleans": {}, "persistent": {}}, f"setsebool -P {CONNECT}=1 {RELAY}=0"),
    ],
    ids=["off until the next boot", "on until the next boot", "off after it", "never set"],
)
def test_a_boolean_is_as_planned_when_it_is_now_and_after_a_reboot(
    changes: dict[str, Any], expected: str
) -> None:
    first, reload = settings(**changes)
    assert first == expected
    assert "reload" in reload


@pytest.mark.parametrize(
    ("ports", "labelled"),
    [
        ((), [8000, 8089]),
        (((range(8000, 8001), "http_port_t"),), [8089]),
        (((range(8000, 8090), "http_cache_port_t"),), []),
        (((range(8000, 8090), "soundd_port_t"),), [8000, 8080, 8089]),
        (((range(8080, 8081), "squid_port_t"),), [8000, 8080, 8089]),
    ],
    ids=["policy only", "one labelled", "a range of a web type", "of another type", "of the known"],
)
def test_ports_get_a_label_unless_they_have_one_for_the_web(
    ports: Any, labelled: list[int]
) -> None:
    found = settings(ports=ports)
    assert [int(line.rsplit(maxsplit=1)[1].strip("'")) for line in found] == labelled


def semanage(folder: Path, first_fails: bool) -> list[str]:
    """What semanage is called with for port 8089."""
    log = folder / "log"
    fail = '[ "$2" = -a ] && exit 1; exit 0' if first_fails else "exit 0"
    program(folder, "semanage", f'echo "$*" >>{log}; {fail}')
    (command,) = settings(ports=((range(8000, 8001), "http_port_t"),))
    assert run(f"PATH={folder}:$PATH; {command}").returncode == 0
    return log.read_text().splitlines()


def test_a_port_that_no_policy_knows_is_added(tmp_path: Path) -> None:
    assert semanage(tmp_path, first_fails=False) == ["port -a -t http_port_t -p tcp 8089"]


def test_a_port_that_the_policy_labels_is_modified(tmp_path: Path) -> None:
    """`semanage port -a` of 8000, which is soundd_port_t, ends with "already defined"."""
    both = ["port -a -t http_port_t -p tcp 8089", "port -m -t http_port_t -p tcp 8089"]
    assert semanage(tmp_path, first_fails=True) == both


def test_a_wrong_label_of_a_file_is_put_right_alone_and_of_a_program_with_its_environment() -> None:
    wrong = ("/etc/nginx/nginx.conf", f"{TOOLS}/bin/python")
    relabel, file = settings(mislabelled=wrong)
    assert relabel == relabel_command(TOOLS)
    assert file == "restorecon /etc/nginx/nginx.conf"


def test_directories_beside_opt_are_labelled_like_it() -> None:
    plan = replace(PLAN, equivalences={"/data/f": "/opt"})
    first, second = settings(plan)
    assert "semanage fcontext -a -e /opt /data/f" in first
    assert second == relabel_command("/data/f")
    assert settings(plan, equivalences={"/data/f": "/opt"}) == []
    # another directory whose name begins alike is not this one
    assert len(settings(plan, equivalences={"/data": "/opt", "/data/fx": "/opt"})) == 2


@pytest.mark.parametrize("path", ["/no/such", "/"])
def test_where_there_is_no_selinux_or_no_such_path_nothing_is_relabelled(path: str) -> None:
    assert run(relabel_command(path)).returncode == 0


def test_a_mode_is_set_for_now_and_for_after_a_reboot() -> None:
    config, now, restart = settings(mode="permissive", configured="permissive")
    assert "echo SELINUX=enforcing" in config
    assert now.endswith("setenforce 1")
    assert "try-restart nginx.service" in restart


def test_a_mode_that_only_a_reboot_would_change_restarts_nothing() -> None:
    (config,) = settings(configured="disabled")
    assert "/etc/selinux/config" in config


def test_permissive_is_set_and_told_in_every_run(caplog: pytest.LogCaptureFixture) -> None:
    plan = replace(PLAN, mode="permissive")
    assert [line.rpartition(" ")[2] for line in settings(plan)[1:2]] == ["0"]
    state = replace(FINE, mode="permissive", configured="permissive")
    host = RecordedHost({Selinux: state})
    with context(host, executing=True):
        assert list(selinux_as_planned._inner(selinux=plan)) == []
    assert "SELinux is permissive as planned" in caplog.text


def test_the_configuration_keeps_its_other_lines_and_its_mode(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("# SELINUX= can be\nSELINUX=disabled\nSELINUXTYPE=targeted\n")
    config.chmod(0o640)
    command = settings(configured="disabled")[0].replace("/etc/selinux/config", str(config))
    assert run(command).returncode == 0
    assert config.read_text() == "# SELINUX= can be\nSELINUXTYPE=targeted\nSELINUX=enforcing\n"
    assert config.stat().st_mode & 0o777 == 0o640


def test_a_change_of_mode_has_every_server_started_anew(tmp_path: Path) -> None:
    """A server whose note of its start is gone is restarted by the vllm role."""
    (tmp_path / "main.started").touch()
    (tmp_path / "main.ready").touch()
    program(tmp_path / "bin", "setenforce", "exit 0")
    command = settings(mode="permissive")[0].replace("/run/fp8fleet", str(tmp_path))
    assert run(f"PATH={tmp_path}/bin:$PATH; {command}").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "main.ready"]


# Denials


EVENTS = """\
type=AVC msg=audit(1796022000.100:40): avc:  denied  { name_bind } for  pid=9 comm="nginx" \
src=8081 scontext=system_u:system_r:httpd_t:s0 tcontext=system_u:object_r:transproxy_port_t:s0 \
tclass=tcp_socket permissive=0
type=AVC msg=audit(1796022061.835:46): avc:  denied  { name_connect } for  pid=250 \
comm="nginx" dest=9000 scontext=system_u:system_r:httpd_t:s0 \
tcontext=system_u:object_r:unreserved_port_t:s0 tclass=tcp_socket permissive=0
type=SYSCALL msg=audit(1796022061.835:46): arch=c000003e syscall=42 success=no exit=-13 pid=250 \
comm="nginx" exe="/usr/sbin/nginx" subj=system_u:system_r:httpd_t:s0 key=(null)
type=SYSCALL msg=audit(1796022061.900:47): arch=c000003e syscall=42 success=yes exe="/bin/id"
type=AVC msg=audit(1796022062.001:48): avc:  denied  { execmem execmod } for  pid=300 \
comm="python" scontext=system_u:system_r:initrc_t:s0 tcontext=system_u:system_r:initrc_t:s0 \
tclass=process permissive=1
type=SYSCALL msg=audit(1796022062.001:48): pid=300 exe="/opt/fp8fleet/engines/e/bin/python3.12"
"""


def denials(root: Path, seconds: int = 30) -> list[Denial]:
    """What is found in the recorded log by a run that has lasted ``seconds``."""
    tree(root)
    log = root / "audit.log"
    log.write_text(EVENTS)
    conf = root / "etc/audit/auditd.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f"# x\nlog_file = {log}\n")
    program(root / "bin", "date", "echo 1796022070")
    program(root / "bin", "journalctl", "exit 0")
    found: list[Denial] = read(root, Denials, seconds=seconds)
    return sorted(found, key=lambda denial: denial.program)


def test_denials_since_the_runs_start_are_found_and_older_ones_are_not(tmp_path: Path) -> None:
    nginx, python = denials(tmp_path)
    assert (nginx.source, nginx.target, nginx.kind) == (
        "httpd_t",
        "unreserved_port_t",
        "tcp_socket",
    )
    assert nginx.rule == "allow httpd_t unreserved_port_t:tcp_socket { name_connect };"
    assert nginx.enforced
    assert python.permissions == ("execmem", "execmod")
    assert not python.enforced
    assert "exe=" in python.event
    assert nginx.line.startswith("avc:  denied")


def test_without_auditd_the_kernels_log_is_read(tmp_path: Path) -> None:
    tree(tmp_path)
    kernel = EVENTS.splitlines()[1].replace("type=AVC msg=", "audit: type=1400 ")
    program(tmp_path / "bin", "date", "echo 1796022070")
    program(tmp_path / "bin", "journalctl", f"printf '%s\\n' {shlex.quote(kernel)}")
    (found,) = read(tmp_path, Denials, seconds=30)
    assert found.permissions == ("name_connect",)


def test_where_there_is_no_selinux_nothing_was_denied() -> None:
    assert asked(Denials, seconds=10) == []


NGINX = Denial(
    line='avc:  denied  { name_connect } for  pid=250 comm="nginx" dest=9000',
    source="httpd_t",
    target="soundd_port_t",
    kind="tcp_socket",
    permissions=("name_connect",),
    program="nginx",
    enforced=True,
    event="",
    unit="",
)
OTHER = replace(NGINX, source="udev_t", program="systemd-udevd", event="/etc/fp8fleet-other/x")


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> HostPlan:
    """A plan with SELinux, in a run that has just begun."""
    session = SimpleNamespace(started=time.monotonic() - 12.3)
    monkeypatch.setattr(selinux_operations, "current", lambda: session)
    return host_plan(selinux=PLAN)


def judged(
    plan: HostPlan, *found: Denial, executing: bool = True
) -> tuple[list[str], RecordedHost]:
    """What the host is failed with after these denials."""
    rules = ["#!!!! This avc can be allowed using the boolean 'httpd_can_network_connect'"]
    host = RecordedHost({Denials: list(found), AllowRules: rules})
    with context(host, executing):
        commands: list[FunctionCommand] = list(no_denials._inner(plan=plan))
        for command in commands:
            assert command.function(None, host, *command.args, **command.kwargs) is False
    return host.said, host


def test_without_a_denial_the_log_is_asked_once(managed: HostPlan) -> None:
    said, host = judged(managed)
    assert said == []
    ((fact, arguments),) = host.asked
    assert fact is Denials
    assert arguments["seconds"] == pytest.approx(12.3, abs=1)


def test_what_was_denied_before_selinux_was_as_planned_does_not_count(managed: HostPlan) -> None:
    host = RecordedHost({Selinux: FINE, Denials: []})
    with context(host, executing=True):
        assert list(selinux_as_planned._inner(selinux=PLAN)) == []
        assert list(no_denials._inner(plan=managed)) == []
    assert host.asked[-1][1]["seconds"] < 5


def test_a_denial_of_others_is_not_ours(managed: HostPlan) -> None:
    assert judged(managed, OTHER)[0] == []


@pytest.mark.parametrize(
    "denial",
    [
        NGINX,
        replace(OTHER, unit="fp8fleet-main.service"),
        replace(OTHER, event='exe="/opt/fp8fleet/engines/e/bin/python"'),
        replace(OTHER, event='path="/etc/fp8fleet/instances/main.env"'),
    ],
    ids=["Nginx", "a server", "a program of ours", "a file of ours"],
)
def test_a_denial_of_ours_fails_the_host_with_the_rule(managed: HostPlan, denial: Denial) -> None:
    (said,), _ = judged(managed, OTHER, denial)
    assert "name_connect on tcp_socket soundd_port_t" in said
    assert said.endswith(denial.rule)


def test_audit2allow_says_which_boolean_would_do(
    managed: HostPlan, caplog: pytest.LogCaptureFixture
) -> None:
    judged(managed, NGINX)
    assert "httpd_can_network_connect" in caplog.text


def test_what_the_mode_let_pass_is_told_and_fails_nothing(
    managed: HostPlan, caplog: pytest.LogCaptureFixture
) -> None:
    assert judged(managed, replace(NGINX, enforced=False))[0] == []
    assert "enforcing, SELinux would have denied nginx" in caplog.text


def test_the_log_is_not_asked_before_the_run_or_where_selinux_is_left_alone(
    managed: HostPlan,
) -> None:
    assert judged(managed, NGINX, executing=False)[1].asked == []
    assert judged(replace(managed, selinux=None), NGINX)[1].asked == []


def test_audit2allow_is_asked_where_it_is(tmp_path: Path) -> None:
    assert asked(AllowRules, lines=[]) == []
    program(tmp_path, "audit2allow", "echo; echo '#==== httpd_t ===='; sed 's/^/allow /'")
    command = AllowRules().command(lines=[NGINX.line])
    done = run(f"PATH={tmp_path}:$PATH; {command}")
    found = AllowRules().process(done.stdout.splitlines())
    assert found[-1].startswith("allow type=AVC msg=audit(0.0:0): avc:  denied")


# KySec


TRUST = f"kysec_set -r -n exectl -v verified {TOOLS}"


def kysec(folder: Path, status: str, label: str) -> KysecState:
    """What the fact says of a program that is there and one that is not."""
    program(folder, "getstatus", f"echo 'KySec status: {status}'; echo; echo 'exec control : on'")
    program(folder, "kysec_get", f"echo {label}")
    command = Kysec().command(programs=["/bin/sh", "/no/such"])
    done = run(f"PATH={folder}:$PATH; {command}")
    assert done.returncode == 0
    return Kysec().process(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("label", "untrusted"),
    [("verified", ()), ("original", ()), ("unknown", ("/bin/sh",)), ("", ("/bin/sh",))],
)
def test_a_program_is_trusted_by_its_label(
    tmp_path: Path, label: str, untrusted: tuple[str, ...]
) -> None:
    assert kysec(tmp_path, "enabled", label) == KysecState(True, "on", untrusted)


def test_kysec_that_is_not_there_or_off_trusts_all(tmp_path: Path) -> None:
    assert asked(Kysec, programs=["/bin/sh"]) == KysecState(False, None, ())
    assert not kysec(tmp_path, "disabled", "unknown").enabled


def test_environments_that_kysec_does_not_trust_are_trusted_once() -> None:
    plan = host_plan(kysec=True)
    program_path = f"{TOOLS}/bin/python"
    found = lines(trusted_environments, {Kysec: KysecState(True, "on", (program_path,))}, plan=plan)
    assert [TRUST in line for line in found] == [True]
    assert lines(trusted_environments, {Kysec: KysecState(True, "on", ())}, plan=plan) == []
    off = KysecState(False, "off", (program_path,))
    assert lines(trusted_environments, {Kysec: off}, plan=plan) == []


def test_platforms_without_kysec_are_not_asked() -> None:
    assert lines(trusted_environments, {}, plan=host_plan(kysec=False)) == []


@pytest.mark.parametrize(
    ("status", "sets"), [("enabled", True), ("disabled", False), (None, False)]
)
def test_a_new_environment_is_trusted_where_kysec_is_enabled(
    tmp_path: Path, status: str | None, sets: bool
) -> None:
    log = tmp_path / "log"
    if status:
        program(tmp_path, "getstatus", f"echo 'KySec status: {status}'")
    program(tmp_path, "kysec_set", f'echo "$*" >{log}')
    assert run(f"PATH={tmp_path}:$PATH; {trust_command('/opt/f')}").returncode == 0
    assert log.exists() is sets
    if sets:
        assert log.read_text() == "-r -n exectl -v verified /opt/f\n"


def test_an_environment_has_labels_and_trust_before_its_programs_run_and_before_its_stamp() -> None:
    absent = {PathStates: lambda paths: {path: PathState("absent") for path in paths}}
    found = lines(tools_environment, absent, plan=host_plan(selinux=PLAN, kysec=True))
    kinds = [
        next(
            (k for k in ("create", "restorecon", "kysec_set", "pip", "import", "touch") if k in x),
            "",
        )
        for x in found
    ]
    assert [kind for kind in kinds if kind] == [
        *("create", "restorecon", "kysec_set"),
        *("pip", "restorecon", "kysec_set", "import", "touch"),
    ]
    plain = lines(tools_environment, absent, plan=host_plan(selinux=None, kysec=False))
    assert [line for line in plain if "restorecon" in line or "kysec" in line] == []


# What other roles say


def nginx_fails(folder: Path, log: str, enforcing: str | None) -> str:
    """What the wait for the live configuration says with this error log."""
    (folder / "log").write_text(log)
    if enforcing is not None:
        (folder / "enforce").write_text(enforcing)
    program(folder, "curl", "exit 7")
    program(folder, "sleep", "exit 0")
    facts = {Nginx: NginxState(active=True, enabled=True, digest=None)}
    wait = lines(live_configuration, facts, proxy=PROXY)[-1]
    wait = wait.replace("/var/log/nginx/error.log", f"{folder}/log")
    wait = wait.replace("/sys/fs/selinux/enforce", f"{folder}/enforce")
    done = run(f"PATH={folder}:$PATH; {wait}")
    assert done.returncode == 1
    return done.stderr


BIND = (
    "2026/11/30 07:46:30 [emerg] 250#250: bind() to 0.0.0.0:8081 failed (13: Permission denied)\n"
)


@pytest.mark.parametrize(
    ("log", "enforcing", "told"),
    [
        (BIND, "1", True),
        (BIND, "0", False),
        (BIND, None, False),
        (BIND.replace("13: Permission denied", "98: Address already in use"), "1", False),
    ],
)
def test_nginx_that_is_denied_a_port_is_told_as_selinuxs_doing(
    tmp_path: Path, log: str, enforcing: str | None, told: bool
) -> None:
    said = nginx_fails(tmp_path, log, enforcing)
    assert "bind() to 0.0.0.0:8081" in said
    assert ("SELinux denies Nginx port 8081" in said) is told


def test_acceptance_does_not_wait_for_a_tunnel_that_sshd_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client of the tunnel would wait for its whole time-out, six times."""

    def refuse(*arguments: object, **options: object) -> None:
        raise ChannelException(1, "Administratively prohibited")

    transport = SimpleNamespace(open_channel=refuse)
    client = SimpleNamespace(get_transport=lambda: transport)
    monkeypatch.setattr(accept_operations, "_connects", lambda address, port: False)
    host = RecordedHost({}, connector=SimpleNamespace(client=client))
    with context(host, executing=True):
        (command,) = endpoint_answers._inner(proxy=replace(PROXY, api_key=None))
        assert command.function(None, host, *command.args, **command.kwargs) is False
    (said,) = host.said
    assert "the host's sshd does not forward to it" in said
    assert "(Administratively prohibited)" in said
    assert "AllowTcpForwarding" in said

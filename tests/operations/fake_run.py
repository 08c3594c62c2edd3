"""Runs pyinfra on `@fake` hosts that answer facts as a host made from an inventory would.

usage: fake_run.py MADE_FROM INVENTORY PYINFRA_ARGUMENTS...

MADE_FROM is the inventory whose plan the hosts are in every respect, or `bare` for hosts with an
operating system and nothing else. The probe is answered as INVENTORY's plan wants it, with the
recording that FP8FLEET_TEST_PROBE names laid over it on the host that it names: `HOST=RECORDING`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pyinfra.connectors.fake import FakeConnector
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra_cli.main import main

from fp8fleet.inventory import load_fleet
from fp8fleet.plan import NVIDIA_UNIT, PEER_UNIT, PERSISTENCE_UNIT, HostPlan
from fp8fleet.planner import make_plan
from roles.firewall.operations import rich_rule

RUNS = "LoadState=loaded ActiveState=active UnitFileState=enabled NeedDaemonReload=no"


@dataclass(frozen=True)
class Made:
    """A host that is what ``plan`` says."""

    plan: HostPlan

    def answer(self, command: str) -> list[str]:
        """What the host prints."""
        if command.startswith("sh -c "):
            command = shlex.split(command)[2]
        if "/etc/ufw/ufw.conf" in command:
            return self._ufw()
        if "firewall-cmd" in command:
            return self._firewalld()
        match = re.search(r"for p in (.*?); do f=; if \[ -d", command, re.S)
        paths = [self._path(path) for path in shlex.split(match[1])] if match else []
        if command.startswith("echo @paths"):
            return self._host(paths)
        if command.startswith("echo @units"):
            noted = f"nouveau.applied:{self.plan.preparation.nouveau_digest}"
            units = [f"{unit} {RUNS}" for unit in (PERSISTENCE_UNIT, NVIDIA_UNIT)]
            return ["@units", *units, "@applied", noted, "@modules", "nvidia"]
        if paths:
            return paths
        if "apt-mark showhold" in command:
            now = ["held", "ours"] if self.plan.preparation.held else []
            now += ["matching"] if "dpkg-query" in command else []
            return [f"{what} linux-generic" for what in now]
        if "fp8fleet holds" in command:
            excluded = " ".join(self.plan.preparation.held)
            return [f"excluded excludepkgs={excluded}"] if excluded else []
        if "/sys/fs/selinux/enforce" in command:
            return self._selinux()
        if "getstatus" in command:
            return ["KySec status: enabled"]
        if "systemctl show" in command:
            return self._unit(command)
        if "cmake --version" in command and self.plan.cmake:
            return [f"link={self.plan.cmake.prefix}", "whole=yes"]
        if "systemctl is-active nginx.service" in command:
            return ["runs"] if self.plan.proxy else []
        return self._others(command)

    def _host(self, paths: list[str]) -> list[str]:
        """The answer of the host role's compound fact."""
        plan, ready = self.plan, self.plan.preparation
        versions = {name: ready.versions.get(name, "1-1") for name in plan.packages}
        epoch = "0:" if plan.family == "dnf" else ""
        running = [ready.time.unit, *(service.unit for service in ready.services)]
        applied = {service.unit: service.digest for service in ready.services}
        applied[ready.time.unit] = ready.time.digest or "none"
        user = plan.service_user
        return [
            *("@paths", *paths),
            *("@packages", *(f"installed {n} {n} {epoch}{v}" for n, v in versions.items())),
            *("@parameters", *(f"{name} rw {value}" for name, value in plan.sysctl.items())),
            *("@user", f"{user}:x:999:998:fp8fleet:{plan.home}:{plan.no_login_shell}"),
            *("@group", f"{user}:x:998:"),
            *("@units", *(f"{unit} {RUNS}" for unit in running)),
            *("@clocks", f"{ready.time.unit} loaded active running"),
            *("@applied", *(f"{name}.applied:{value}" for name, value in applied.items())),
            *("@dnf", *ready.dnf_sources),
            *("@container",),
        ]

    def _ufw(self) -> list[str]:
        comment = b"fp8fleet".hex()
        lines = ["installed", "enabled", "-N ufw-user-input"]
        for rule in self.plan.firewall.rules:
            tuple_ = f"allow tcp {rule.port} 0.0.0.0/0 any {rule.source or '0.0.0.0/0'} in"
            lines.append(f"### tuple ### {tuple_} comment={comment}")
            source = f"-s {rule.source}/32 " if rule.source else ""
            lines.append(f"-A ufw-user-input {source}-p tcp -m tcp --dport {rule.port} -j ACCEPT")
        return lines

    def _firewalld(self) -> list[str]:
        rules = [rich_rule(rule) for rule in self.plan.firewall.rules]
        zone = ["public (active)", "  interfaces: eth0", "  rich rules: "]
        zone += [f"\t{rule}" for rule in rules]
        return [
            *("installed", "ActiveState=active", "UnitFileState=enabled", "default public"),
            *(f"record public {rule}" for rule in rules),
            *(f"runtime {line}" for line in zone),
            *(f"permanent {line}" for line in zone),
        ]

    def _path(self, path: str) -> str:
        for directory in (*self.plan.preparation.directories, *self.plan.directories):
            if directory.path == path:
                state = f"{directory.mode} {directory.owner} {directory.group}"
                return f"directory {state}  {path}"
        for file in self.plan.files:
            if file.path == path:
                digest = hashlib.sha256(file.resolved()).hexdigest()
                return f"file {file.mode} {file.owner} {file.group} {digest} {path}"
        prefixes = [environment.prefix for environment in self.plan.environments]
        prefixes.append(self.plan.frontend.prefix or "")
        programs = [environment.interpreter for environment in self.plan.environments]
        programs.append(self.plan.frontend.program)
        if path in [*programs, *(f"{prefix}/.fp8fleet-whole" for prefix in prefixes)]:
            return f"file 644 root root x {path}"
        return f"absent - - -  {path}"

    def _unit(self, command: str) -> list[str]:
        on = ["ActiveState=active", "SubState=running", "UnitFileState=enabled"]
        if "nginx.service" in command and self.plan.proxy:
            return [*on, f"Live={self.plan.proxy.digest}"]
        if PEER_UNIT in command and self.plan.model and self.plan.model.peer:
            return [*on, "NeedDaemonReload=no", "Exists=yes"]
        for instance in self.plan.instances:
            if instance.unit in command:
                started = [self._started(path) for path in instance.files]
                return [*on, "NeedDaemonReload=no", *started, "Ready=yes"]
        return ["ActiveState=inactive"]

    def _selinux(self) -> list[str]:
        plan = self.plan.selinux
        assert plan
        values = {name: int(value) for name, value in plan.booleans.items()}
        lines = [f"enforce {int(plan.mode == 'enforcing')}", f"config {plan.mode}"]
        lines += [f"boolean {name} {value} {value}" for name, value in values.items()]
        lines += [f"persistent {name}={value}" for name, value in values.items()]
        lines += [f"portcon tcp {port} u:r:http_port_t:s0" for port in plan.ports]
        return lines + [f"like {path} {like}" for path, like in plan.equivalences.items()]

    def _started(self, path: str) -> str:
        content = next(file.resolved() for file in self.plan.files if file.path == path)
        return f"Started={hashlib.sha256(content).hexdigest()}  {path}"

    def _others(self, command: str) -> list[str]:
        if " inspect " in command:
            return ["whole"]
        if "for u in fp8fleet-*.service" in command:
            return [instance.unit for instance in self.plan.instances]
        return bare(command)


def bare(command: str) -> list[str]:
    """What a host prints that has an operating system and nothing else."""
    if "uname" in command:
        return ["Linux"]
    if "/sys/fs/selinux/enforce" in command:
        return ["enforce 0", "config permissive"]
    if "getstatus" in command:
        return ["KySec status: enabled", "program /opt/fp8fleet/tools/old/bin/python unknown"]
    program = re.search(r"(?:which|command -v) '?([a-z]+)", command)
    return [f"/usr/sbin/{program[1]}"] if program else []


def _lookup(made: dict[str, Made], self: FakeConnector, command: str) -> tuple[bool, CommandOutput]:
    machine = made.get(self.host.name)
    if "fp8fleet-probe" in command:
        printed = probed(PLANS[self.host.name])
    else:
        printed = machine.answer(command) if machine else bare(command)
    print(f"asked {self.host.name}: {command[:60]!r}", file=sys.stderr)
    return True, CommandOutput([OutputLine("stdout", line) for line in printed])


SYSTEMS = {"kylin-v10": "os/kylin-v10-sp3", "ubuntu-22.04": "os/ubuntu-22.04"}
DEVICES = {"h100-80g": "gpu/h100-x8", "a100-80g": "gpu/a100-x4"}
RECORDED = Path(__file__).resolve().parents[1] / "data/probes"
PLANS: dict[str, HostPlan] = {}


def probed(plan: HostPlan) -> list[str]:
    """The probe's answer of a host on which ``plan`` can be carried out."""
    target = plan.requirements.target
    host, _, broken = os.environ.get("FP8FLEET_TEST_PROBE", "").partition("=")
    names = ["host", SYSTEMS[target.platform]]
    names += [DEVICES[target.accelerator]] if target.accelerator else []
    merged: dict[str, list[str]] = {}
    for name in [*names, *([broken] if host == plan.name else [])]:
        text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
        for section in text.split("\n@")[1:]:
            title, *lines = section.splitlines()
            merged[f"@{title}"] = lines
    root = next(line for line in merged["@disk"] if line.startswith(" /usr "))
    told = {line.split()[0] for line in merged["@disk"]}
    others = [path for path in plan.requirements.paths if path not in told]
    merged["@disk"] = [root.replace(" /usr ", f" {path} ") for path in others] + merged["@disk"]
    merged["@time"] = [f" {int(time.time())}", " =0"]
    return [text for section, lines in merged.items() for text in (section, *lines)] + ["@end"]


if __name__ == "__main__":
    inventory = sys.argv.pop(1)
    PLANS |= make_plan(load_fleet(sys.argv[1])).hosts
    hosts = {} if inventory == "bare" else make_plan(load_fleet(inventory)).hosts
    table = {name: Made(plan) for name, plan in hosts.items()}
    FakeConnector._lookup_response = lambda self, command: _lookup(table, self, command)
    main()

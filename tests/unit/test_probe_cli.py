"""`fp8fleet probe`: group data to paste, from what hosts answered."""

from __future__ import annotations

import ast
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from fleets import Ran, fp8fleet
from probes import answer, facts
from pyinfra.api import Inventory

from fp8fleet import catalog, probe_cli
from fp8fleet.cli import main
from fp8fleet.preflight.facts import HostFacts, parts_of, read_facts
from fp8fleet.probe_cli import NO_ANSWER, NO_ROOT, group_data


def pasted(*lines: str) -> dict[str, Any]:
    """The keys of pasted group data."""
    tree = ast.parse("\n".join(lines))
    values: dict[str, Any] = {}
    for node in tree.body:
        assert isinstance(node, ast.Assign)
        (target,) = node.targets
        assert isinstance(target, ast.Name)
        values[target.id] = ast.literal_eval(node.value)
    return values


def test_two_h200_become_group_data() -> None:
    lines = list(group_data({"gpu-1": facts("os/ubuntu-22.04", "gpu/h200-x2")}))
    assert lines[0] == "# gpu-1"
    assert pasted(*lines) == {
        "platform": "ubuntu-22.04",
        "arch": "x86_64",
        "accelerator": "h200-141g",
        "engine_release": "0.33.0",
        "device_count": 2,
        "device_pairs": [[0, 1]],
    }
    text = "\n".join(lines)
    assert "# devices 0-1: NVIDIA H200, driver 580.159.04, CUDA up to 13.0" in text
    assert "# linked devices: [[0, 1]] (NV18)" in text
    assert "# devices by NUMA node: 0: [0, 1]" in text


def test_the_release_is_the_newest_that_fits_platform_and_driver() -> None:
    lines = group_data({"k": facts("os/kylin-v10-sp3", "gpu/a100-x4")})
    values = pasted(*lines)
    assert (values["platform"], values["engine_release"]) == ("kylin-v10", "0.21.0")


def test_bridged_pairs_are_shown_as_pairs() -> None:
    text = "\n".join(group_data({"a": facts("os/ubuntu-22.04", "gpu/a100-x4")}))
    assert "# linked devices: [[0, 1], [2, 3]] (NV12, SYS)" in text


def test_hosts_of_one_kind_share_their_keys() -> None:
    found: dict[str, HostFacts] = {
        "gpu-1": facts("os/ubuntu-22.04", "gpu/h100-x8"),
        "gpu-2": facts("os/ubuntu-22.04", "gpu/h100-x8"),
        "npu-1": facts("os/openeuler-22.03", "gpu/910b-x4"),
    }
    lines = list(group_data(found))
    assert [line for line in lines if line.startswith("platform")] == [
        'platform = "ubuntu-22.04"',
        'platform = "openeuler-22.03"',
    ]
    assert lines[0] == "# gpu-1, gpu-2"
    text = "\n".join(lines)
    assert 'accelerator = "ascend-910b"' in text
    assert 'engine_release = "vllm-ascend-0.23.0"' in text


def test_a_host_without_accelerator_is_a_cpu_host() -> None:
    assert pasted(*group_data({"a": facts()}))["accelerator"] == "cpu"


def test_what_the_catalogue_lacks_is_a_comment() -> None:
    lines = list(group_data({"a": facts("broken/unknown-os")}))
    assert "# platform: arch  is not in the catalogue" in lines
    assert "platform" not in pasted(*lines)


def test_every_printed_name_is_one_of_the_catalogue() -> None:
    values = pasted(*group_data({"a": facts("os/ubuntu-24.04", "gpu/h100-x8")}))
    assert values["platform"] in catalog.platforms()
    assert values["accelerator"] in catalog.accelerators()
    assert values["engine_release"] in catalog.releases()


def test_a_host_that_does_not_answer_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        probe_cli, "read_hosts", lambda inventory, names: ({}, dict.fromkeys(names, NO_ANSWER))
    )
    assert main(["probe", "root@10.20.0.11"]) == 1
    assert capsys.readouterr().err == (
        "error: no answer from 10.20.0.11: try `ssh root@10.20.0.11 true`\n"
    )


def test_the_advice_names_user_address_and_port_not_the_inventorys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.py"
    data = {"ssh_hostname": "10.20.0.11", "ssh_user": "deploy", "ssh_port": 2222}
    path.write_text(f"gpu = [('gpu-h100-1', {data})]\n")
    monkeypatch.setattr(
        probe_cli, "read_hosts", lambda inventory, names: ({}, dict.fromkeys(names, NO_ANSWER))
    )
    assert main(["probe", str(path)]) == 1
    assert capsys.readouterr().err == (
        "error: no answer from gpu-h100-1: try `ssh -p 2222 deploy@10.20.0.11 true`\n"
    )


# A host whose key is not known


@pytest.fixture
def ssh_port() -> Iterator[int]:
    """An SSH server of this machine, with a new key, that lets nobody in."""
    key = paramiko.RSAKey.generate(2048)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(key)
            with suppress(paramiko.SSHException, EOFError):
                transport.start_server(event=threading.Event(), server=paramiko.ServerInterface())

    threading.Thread(target=serve, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.close()


def probe(port: int, home: Path, *data: str) -> Ran:
    (home / ".ssh").mkdir()
    options = [word for pair in (f"ssh_port={port}", *data) for word in ("--data", pair)]
    return fp8fleet("probe", "root@127.0.0.1", *options, HOME=str(home), SSH_AUTH_SOCK="")


def test_a_host_whose_key_is_not_known_is_refused_with_how_to_get_it(
    ssh_port: int, tmp_path: Path
) -> None:
    ran = probe(ssh_port, tmp_path)
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == (
        f"error: known_hosts has no key of 127.0.0.1: `ssh-keyscan -p {ssh_port} -t ed25519"
        " 127.0.0.1 >>~/.ssh/known_hosts`, and compare its fingerprint (`ssh-keygen -lf"
        " ~/.ssh/known_hosts`) with what the host's console shows"
    )
    assert "Traceback" not in ran.err
    assert list((tmp_path / ".ssh").iterdir()) == []


def test_the_command_line_may_ask_for_another_checking_of_keys(
    ssh_port: int, tmp_path: Path
) -> None:
    ran = probe(ssh_port, tmp_path, "ssh_strict_host_key_checking=accept-new")
    assert ran.code == 1
    assert f"[127.0.0.1]:{ssh_port} " in (tmp_path / ".ssh/known_hosts").read_text()
    assert f"no answer from 127.0.0.1: try `ssh -p {ssh_port} root@127.0.0.1 true`" in ran.err


@pytest.mark.parametrize("argument", ["inventories/none.py", "root@", "@"])
def test_what_is_no_host_and_no_inventory_is_refused(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", argument]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_inventory_need_not_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.py"
    path.write_text("gpu = ['a', 'b']\nother = ['c']\n")
    seen: list[list[str]] = []

    def read(inventory: object, names: list[str]) -> tuple[dict[str, HostFacts], dict[str, Any]]:
        seen.append(list(names))
        return {name: facts() for name in names}, {}

    monkeypatch.setattr(probe_cli, "read_hosts", read)
    assert main(["probe", str(path), "--limit", "gpu"]) == 0
    assert seen == [["a", "b"]]
    assert "# a, b\n" in capsys.readouterr().out
    assert main(["probe", str(path), "--limit", "nope"]) == 2


# What is no key


H200 = " 0000:00:06.0 0x10de 0x2335 0x030200 -1 nvidia"


def with_cards(*lines: str, smi: bool = False) -> HostFacts:
    """Two H200 on Ubuntu 22.04 with these lines of the PCI bus before them."""
    rows = answer("os/ubuntu-22.04", "gpu/h200-x2")
    at = rows.index(H200)
    parts = parts_of([*rows[:at], *lines, *rows[at:]])
    assert parts is not None
    found = read_facts(parts)
    if smi:
        cards = found.accelerators
        other = replace(cards.devices[0], index=2, slot="0000:00:01.0")
        found = replace(found, accelerators=replace(cards, devices=(*cards.devices, other)))
    return found


DISPLAY = " 0000:00:01.0 0x10de 0x1fb1 0x030000 -1 nvidia"
A100 = " 0000:00:01.0 0x10de 0x20b5 0x030200 -1 nvidia"


def test_a_display_card_in_an_earlier_slot_hides_nothing() -> None:
    lines = list(group_data({"a": with_cards(DISPLAY)}))
    values = pasted(*lines)
    assert (values["accelerator"], values["device_count"]) == ("h200-141g", 2)
    assert "# cards: 2 h200-141g, 1 of PCI id 10de:1fb1, which the catalogue lacks" in lines


def test_devices_of_several_kinds_are_not_counted() -> None:
    lines = list(group_data({"a": with_cards(DISPLAY, smi=True)}))
    assert pasted(*lines).keys() == {"platform", "arch", "accelerator", "engine_release"}
    assert (
        "# device_count: the driver shows 2 h200-141g, 1 of PCI id 10de:1fb1, which the catalogue"
        " lacks: list each server's devices" in lines
    )


def test_two_kinds_of_accelerators_are_told_and_none_is_chosen() -> None:
    lines = list(group_data({"a": with_cards(A100)}))
    assert pasted(*lines).keys() == {"platform", "arch", "device_count", "device_pairs"}
    assert "# accelerator: 2 h200-141g, 1 a100-80g; a host has one of the catalogue" in lines


def test_for_an_unknown_accelerator_no_engine_is_proposed() -> None:
    text = "\n".join(answer("os/ubuntu-22.04", "gpu/h200-x2"))
    parts = parts_of(
        text.replace("0x2335", "0x2324").replace("580.159.04", "535.104.05").split("\n")
    )
    assert parts is not None
    lines = list(group_data({"a": read_facts(parts)}))
    assert not pasted(*lines).keys() & {"accelerator", "engine_release"}
    assert (
        "# accelerator: 2 of PCI id 10de:2324, which the catalogue lacks; a host has one of the"
        " catalogue" in lines
    )


@pytest.mark.parametrize("name", ["riscv64", ""])
def test_an_architecture_that_the_inventory_refuses_is_a_comment(name: str) -> None:
    found = facts()
    found = replace(found, system=replace(found.system, architecture=name))
    lines = list(group_data({"a": found}))
    assert f"# arch: {name or 'not told'}, expected x86_64 or aarch64" in lines
    assert not pasted(*lines).keys() & {"arch", "engine_release"}


# What cannot be meant


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["root@10.0.0.1:2222"], ": write root@10.0.0.1 --data ssh_port=2222"),
        (["gpu-1:22"], ": write gpu-1 --data ssh_port=22"),
        (["root@[::1]"], ": write root@::1"),
        (["[fe80::1]:2222"], ": write fe80::1 --data ssh_port=2222"),
        (["root@ssh://x"], "expected [USER@]HOST or an inventory file (.py)"),
        (["@gpu-1"], "expected [USER@]HOST or an inventory file (.py)"),
        (["gpu 1"], "expected [USER@]HOST or an inventory file (.py)"),
    ],
)
def test_what_is_no_hosts_name_is_refused_with_what_to_write(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {arguments[0]}: ")
    assert printed.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("ssh_port=abc", "--data: ssh_port: 'abc' is not a port number (1-65535)"),
        ('ssh_port="2222"', "--data: ssh_port: '2222' is not a port number (1-65535)"),
        ("ssh_port=99999", "--data: ssh_port: 99999 is not a port number (1-65535)"),
        ("ssh_prot=22", "--data: ssh_prot: unknown key; did you mean ssh_port?"),
        ("_sud=True", "--data: _sud: unknown key; did you mean _sudo?"),
        ("ssh_key=5", "--data: ssh_key: expected a text"),
        ("sudo_passwrd=env:X", "--data: sudo_passwrd: unknown key; did you mean sudo_password?"),
        ("sudo_password=hunter2", "--data: sudo_password: expected env:VARIABLE or file:"),
        ("sudo_password=env:NO_SUCH_X", "the environment variable NO_SUCH_X is not set"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_before_anything_connects(
    data: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["probe", "root@127.0.0.1", "--data", data]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert "hunter2" not in printed


def test_an_inventorys_connection_is_checked_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.py"
    path.write_text("gpu = [('a', {'ssh_port': '2222'})]\n")
    assert main(["probe", str(path)]) == 2
    assert "host a: ssh_port: '2222' is not a port number" in capsys.readouterr().err


def test_the_sudo_password_is_handed_to_pyinfra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.py"
    path.write_text("gpu = [('a', {'_sudo': True, 'sudo_password': 'env:SUDOPW'})]\n")
    monkeypatch.setenv("SUDOPW", "hunter2")
    seen: list[str] = []

    def read(inventory: Inventory, names: list[str]) -> tuple[dict[str, HostFacts], dict[str, Any]]:
        seen.extend(inventory.get_host(n).connector_data["prompted_sudo_password"] for n in names)
        return {name: facts() for name in names}, {}

    monkeypatch.setattr(probe_cli, "read_hosts", read)
    assert main(["probe", str(path)]) == 0
    assert seen == ["hunter2"]


def test_hosts_without_root_are_told_apart_from_those_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.py"
    path.write_text("gpu = ['a', 'b', 'c']\n")
    failed = {"a": NO_ROOT, "b": NO_ANSWER, "c": NO_ROOT}
    monkeypatch.setattr(probe_cli, "read_hosts", lambda inventory, names: ({}, failed))
    assert main(["probe", str(path)]) == 1
    assert capsys.readouterr().err == (
        "error: no answer from b: try `ssh b true`; commands cannot run as root on a, c: set"
        " sudo_password (env:NAME, file:PATH) where sudo asks for one, or leave _sudo out\n"
    )

"""`fp8fleet probe`: group data to paste, from what hosts answered."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from probes import facts

from fp8fleet import catalog, probe_cli
from fp8fleet.cli import main
from fp8fleet.preflight.facts import HostFacts
from fp8fleet.probe_cli import group_data


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
    monkeypatch.setattr(probe_cli, "read_hosts", lambda inventory, names: ({}, list(names)))
    assert main(["probe", "root@10.20.0.11"]) == 1
    assert capsys.readouterr().err == (
        "error: no answer from 10.20.0.11: try `ssh 10.20.0.11 true`\n"
    )


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

    def read(inventory: object, names: list[str]) -> tuple[dict[str, HostFacts], list[str]]:
        seen.append(list(names))
        return {name: facts() for name in names}, []

    monkeypatch.setattr(probe_cli, "read_hosts", read)
    assert main(["probe", str(path), "--limit", "gpu"]) == 0
    assert seen == [["a", "b"]]
    assert "# a, b\n" in capsys.readouterr().out
    assert main(["probe", str(path), "--limit", "nope"]) == 2

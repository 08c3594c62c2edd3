"""deploys/full.py as a whole, on hosts that answer facts and run nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPO

SECRET = "sk-live-5ecre7"

GPU: dict[str, Any] = {
    "platform": "ubuntu-22.04",
    "accelerator": "h100-80g",
    "conda_frontend_url": "https://mirror.example.com/Miniforge3.sh",
    "conda_frontend_sha256": "ab" * 32,
    "engine_release": "0.33.0",
    "engine_requirements": "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt",
    "model_manifest": "models/tiny-llama/manifest.toml",
    "api_key": "env:FP8FLEET_API_KEY",
    "instances": [
        {"name": "left", "port": 8000, "devices": [0]},
        {"name": "right", "port": 8001, "devices": [1]},
    ],
}

KYLIN = {
    **GPU,
    "platform": "kylin-v10",
    "engine_release": "0.21.0",
    "engine_requirements": "locks/vllm-0.21.0-kylin-v10-x86_64.txt",
    "instances": [{"name": "main", "port": 8000, "devices": [0]}],
}

GATEWAY = {"platform": "ubuntu-22.04", "conda_frontend_path": "/opt/conda/bin/conda"}

ONE_HOST = {"serving": {"@fake/gpu-1": GPU}}
FLEET = {
    "serving": {
        "@fake/gpu-1": {**GPU, "service_address": "10.0.0.1"},
        "@fake/kylin-1": {**KYLIN, "service_address": "10.0.0.2"},
    },
    "gateway": {"@fake/gw-1": {**GATEWAY, "served_model_name": "tiny-llama"}},
}

Groups = dict[str, dict[str, dict[str, Any]]]

ORDER = [
    "Lock | One run at a time",
    "Host | Package sources, limits, kernel parameters",
    "Host | Packages",
    "Host | Service group",
    "Host | Service user, without a shell",
    "Host | Directories",
    "Host | Kernel parameters are in force",
    "Conda | Requirements and the fp8fleet tool",
    "Conda | Conda frontend",
    "Conda | Tools environment",
    "Conda | Engine environment",
    "Model | Manifest",
    "Model | Model files",
    "vLLM | Units, options, environments",
    "vLLM | Server 1",
    "vLLM | Server 2",
    "Nginx | Configuration",
    "Nginx | The configuration is live",
    "vLLM | Servers no longer planned",
    "Accept | The endpoint answers",
]

NEVER_A_CHANGE = {
    "Lock | One run at a time",
    "Host | Kernel parameters are in force",
    "vLLM | Servers no longer planned",
    "Accept | The endpoint answers",
}


def inventory(folder: Path, name: str, groups: Groups) -> str:
    path = folder / f"{name}.py"
    text = "\n".join(f"{group} = {list(hosts.items())!r}" for group, hosts in groups.items())
    path.write_text(text)
    return str(path)


def dry(made_from: str, inventory: str, *arguments: str) -> list[dict[str, Any]]:
    """The operations that a dry run of full.py names, in order."""
    run = subprocess.run(
        [
            *(sys.executable, str(REPO / "tests/operations/fake_run.py"), made_from),
            *(inventory, "deploys/full.py", "--dry", "--json", *arguments),
        ],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHONPATH": str(REPO),
            "PYINFRA_FAKE_DELAY": "0",
            "PYINFRA_FAKE_DELAY_JITTER": "0",
            "FP8FLEET_API_KEY": SECRET,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert SECRET not in run.stdout + run.stderr
    plan = json.loads(run.stdout)["plan"]
    assert isinstance(plan, list)
    return plan


def changes(plan: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The hosts that would change, by operation; only operations that change any."""
    return {
        operation["name"]: operation["hosts_with_change"]
        for operation in plan
        if operation["hosts_with_change"] or operation["hosts_with_conditional_change"]
    }


def test_a_bare_host_gets_every_operation_in_the_order_of_the_page(tmp_path: Path) -> None:
    plan = dry("bare", inventory(tmp_path, "site", ONE_HOST))
    assert [operation["name"] for operation in plan] == ORDER
    assert set(changes(plan)) == set(ORDER) - NEVER_A_CHANGE


def test_every_operation_has_a_name_that_holds_no_content(tmp_path: Path) -> None:
    for operation in dry("bare", inventory(tmp_path, "site", FLEET)):
        assert " | " in operation["name"]
        assert operation["args"] == []


def test_a_fleet_gets_each_operation_once_for_all_its_hosts(tmp_path: Path) -> None:
    plan = dry("bare", inventory(tmp_path, "site", FLEET))
    assert sorted(operation["name"] for operation in plan) == sorted(ORDER)
    found = changes(plan)
    assert found["Host | Packages"] == ["@fake/gpu-1", "@fake/gw-1", "@fake/kylin-1"]
    assert found["vLLM | Server 1"] == ["@fake/gpu-1", "@fake/kylin-1"]
    assert found["vLLM | Server 2"] == ["@fake/gpu-1"]
    assert found["Nginx | Configuration"] == ["@fake/gw-1"]


def test_an_operation_has_one_name_whatever_the_host(tmp_path: Path) -> None:
    """Operations are told apart by line: a name with one host's words stands for others too."""
    plan = dry("bare", inventory(tmp_path, "site", FLEET))
    assert [operation["names"] for operation in plan if len(operation["names"]) != 1] == []


@pytest.mark.parametrize("groups", [ONE_HOST, FLEET], ids=["one host", "fleet"])
def test_hosts_that_are_as_planned_have_no_pending_change(tmp_path: Path, groups: Groups) -> None:
    site = inventory(tmp_path, "site", groups)
    plan = dry(site, site)
    assert len(plan) > 15
    assert changes(plan) == {}


def with_host(**change: Any) -> Groups:
    return {"serving": {"@fake/gpu-1": {**GPU, **change}}}


LEFT, RIGHT = GPU["instances"]


@pytest.mark.parametrize(
    ("change", "operations"),
    [
        (
            {"instances": [LEFT, {**RIGHT, "options": {"max-model-len": 1024}}]},
            {"vLLM | Units, options, environments"},
        ),
        (
            {"nginx_read_timeout": 900},
            {"Nginx | Configuration", "Nginx | The configuration is live"},
        ),
        (
            {"instances": [LEFT]},
            {
                "Nginx | Configuration",
                "Nginx | The configuration is live",
                "vLLM | Servers no longer planned",
            },
        ),
        (
            {"sysctl": {"net.core.somaxconn": 8192}},
            {
                "Host | Package sources, limits, kernel parameters",
                "Host | Kernel parameters are in force",
            },
        ),
        ({"model_sources": ["https://m.example.com/x"]}, {"Model | Manifest"}),
    ],
    ids=["option", "proxy", "instance removed", "kernel parameter", "model source"],
)
def test_a_changed_inventory_touches_only_what_it_changes(
    tmp_path: Path, change: dict[str, Any], operations: set[str]
) -> None:
    before = inventory(tmp_path, "before", ONE_HOST)
    plan = dry(before, inventory(tmp_path, "after", with_host(**change)))
    assert set(changes(plan)) == operations


def test_limit_works_on_the_chosen_hosts_with_the_whole_fleets_plan(tmp_path: Path) -> None:
    site = inventory(tmp_path, "site", FLEET)
    plan = dry("bare", site, "--limit", "gateway")
    touched = {host for hosts in changes(plan).values() for host in hosts}
    assert touched == {"@fake/gw-1"}
    assert changes(dry(site, site, "--limit", "gateway")) == {}

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
OTHER_SECRET = "sk-0ld-5ecre7"

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

GATEWAY = {
    "platform": "ubuntu-22.04",
    "conda_frontend_path": "/opt/conda/bin/conda",
    "service_address": "10.0.0.100",
}

ONE_HOST = {"serving": {"@fake/gpu-1": GPU}}
ONE_SERVER = {**GPU, "instances": [{"name": "main", "port": 8000, "devices": [0, 1]}]}
SERVING: dict[str, dict[str, Any]] = {
    "@fake/gpu-1": {**GPU, "service_address": "10.0.0.1"},
    "@fake/gpu-2": {**ONE_SERVER, "service_address": "10.0.0.3"},
    "@fake/kylin-1": {**KYLIN, "service_address": "10.0.0.2"},
}
GATEWAYS = {"@fake/gw-1": {**GATEWAY, "served_model_name": "tiny-llama"}}
FLEET = {"serving": SERVING, "gateway": GATEWAYS}

Groups = dict[str, dict[str, dict[str, Any]]]

ORDER = [
    "Lock | One run at a time",
    "Host | Package sources, limits, kernel parameters, logs",
    "Host | Package sources alone",
    "Host | Packages",
    "Host | Service user, without a shell",
    "Host | Directories",
    "Host | Kernel parameters are in force",
    "Host | Journal and log rotation are in force",
    "Host | Clock",
    "Driver | Drivers in the planned versions, in force",
    "Firewall | Planned connections are let in, others not",
    "Host | NVIDIA devices",
    "Host | Packages that upgrades leave",
    "SELinux | Mode, booleans, labels",
    "KySec | Environments are trusted",
    "CMake | cmake for source builds",
    "Conda | Requirements and the fp8fleet tool",
    "Conda | Conda frontend",
    "Conda | Tools environment",
    "Conda | Engine environment",
    "Model | Manifest",
    "Model | Model files",
    "Model | Transfer to other hosts",
    "vLLM | Servers over several hosts are in this run",
    "vLLM | Units, options, environments",
    "vLLM | Nodes of other hosts' servers",
    "vLLM | Server 1",
    "vLLM | Server 2",
    "Nginx | Configuration",
    "Nginx | The configuration is live",
    "vLLM | Servers no longer planned",
    "Firewall | Ports no longer planned",
    "Accept | The endpoint answers",
    "Accept | KV cache sizes are noted",
    "SELinux | Nothing of ours was denied",
]

SOURCE = {
    "engine_build": "source",
    "cmake_archive_url": "https://mirror.example.com/cmake-3.28.4-linux-x86_64.tar.gz",
    "cmake_sha256": "cd" * 32,
}

NEVER_A_CHANGE = {
    "CMake | cmake for source builds",
    "Driver | Drivers in the planned versions, in force",
    "Firewall | Ports no longer planned",
    "Model | Transfer to other hosts",
    "Lock | One run at a time",
    "Host | Package sources alone",
    "Host | Kernel parameters are in force",
    "Host | Packages that upgrades leave",
    "vLLM | Servers over several hosts are in this run",
    "vLLM | Nodes of other hosts' servers",
    "vLLM | Servers no longer planned",
    "Accept | The endpoint answers",
    "Accept | KV cache sizes are noted",
    "SELinux | Nothing of ours was denied",
    # left alone on Ubuntu, which has neither
    "SELinux | Mode, booleans, labels",
    "KySec | Environments are trusted",
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
            "FP8FLEET_OTHER_KEY": OTHER_SECRET,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for secret in (SECRET, OTHER_SECRET):
        assert secret not in run.stdout + run.stderr
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
    found = changes(plan)
    assert found["Host | Packages"] == [*sorted({*SERVING, *GATEWAYS})]
    assert found["vLLM | Server 1"] == [*SERVING]
    assert found["vLLM | Server 2"] == ["@fake/gpu-1"]
    assert found["Nginx | Configuration"] == [*GATEWAYS]
    assert found["Nginx | The configuration is live"] == [*GATEWAYS]


@pytest.mark.parametrize(
    ("gateway_first", "last"), [(False, "@fake/kylin-1"), (True, "@fake/gpu-1")]
)
def test_a_mixed_fleet_is_worked_on_in_the_order_of_the_page_however_it_is_listed(
    tmp_path: Path, gateway_first: bool, last: str
) -> None:
    """All servers, then the gateway's proxy, then what is no longer asked, then the proof."""
    serving = {name: SERVING[name] for name in sorted(SERVING, key=lambda name: name == last)}
    groups = [("serving", serving), ("gateway", GATEWAYS)]
    fleet = dict(reversed(groups) if gateway_first else groups)
    plan = dry("bare", inventory(tmp_path, "site", fleet))
    assert [operation["name"] for operation in plan] == ORDER


def test_the_order_holds_in_a_fleet_that_is_as_planned_and_with_a_limit(tmp_path: Path) -> None:
    site = inventory(tmp_path, "site", FLEET)
    for arguments in ([], ["--limit", "gateway"], ["--limit", "@fake/gpu-2"]):
        names = [operation["name"] for operation in dry(site, site, *arguments)]
        assert names == [name for name in ORDER if name in names]
        assert set(ORDER) - set(names) <= {"vLLM | Server 1", "vLLM | Server 2"}


def test_selinux_and_kysec_are_set_where_the_platform_has_them(tmp_path: Path) -> None:
    found = changes(dry("bare", inventory(tmp_path, "site", FLEET)))
    assert found["SELinux | Mode, booleans, labels"] == ["@fake/kylin-1"]
    assert found["KySec | Environments are trusted"] == ["@fake/kylin-1"]


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
            {"vLLM | Units, options, environments", "vLLM | Server 2"},
        ),
        (
            {"instances": [{**LEFT, "options": {"max-model-len": 1024}}, RIGHT]},
            {"vLLM | Units, options, environments", "vLLM | Server 1"},
        ),
        (
            {"api_key": "env:FP8FLEET_OTHER_KEY"},
            {"vLLM | Units, options, environments", "vLLM | Server 1", "vLLM | Server 2"},
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
                "Host | Package sources, limits, kernel parameters, logs",
                "Host | Kernel parameters are in force",
            },
        ),
        (
            {"log_retention_days": 30},
            {
                "Host | Package sources, limits, kernel parameters, logs",
                "Host | Journal and log rotation are in force",
            },
        ),
        (
            {"ntp_servers": ["ntp.example.com"]},
            {"Host | Package sources, limits, kernel parameters, logs", "Host | Clock"},
        ),
        ({"package_versions": {"nginx": "1.24.0-2"}}, {"Host | Packages"}),
        ({"hold_packages": []}, {"Host | Packages that upgrades leave"}),
        ({"model_sources": ["https://m.example.com/x"]}, {"Model | Manifest"}),
        (
            SOURCE,
            {
                "CMake | cmake for source builds",
                "Conda | Requirements and the fp8fleet tool",
                "Conda | Engine environment",
                "vLLM | Units, options, environments",
                "vLLM | Server 1",
                "vLLM | Server 2",
            },
        ),
    ],
    ids=[
        "option of the second server",
        "option of the first server",
        "API key",
        "proxy",
        "instance removed",
        "kernel parameter",
        "days that logs are kept",
        "time servers",
        "a package's version",
        "nothing held",
        "model source",
        "source build",
    ],
)
def test_a_changed_inventory_touches_only_what_it_changes(
    tmp_path: Path, change: dict[str, Any], operations: set[str]
) -> None:
    before = inventory(tmp_path, "before", ONE_HOST)
    plan = dry(before, inventory(tmp_path, "after", with_host(**change)))
    assert set(changes(plan)) == operations


def test_a_host_that_builds_from_source_is_asked_for_cmake_and_then_is_as_planned(
    tmp_path: Path,
) -> None:
    site = inventory(tmp_path, "site", with_host(**SOURCE))
    assert changes(dry(site, site)) == {}


@pytest.mark.parametrize(
    ("key", "operations"),
    [
        (
            "api_key",
            {"vLLM | Units, options, environments", "vLLM | Server 1", "vLLM | Server 2"},
        ),
        ("model_token", {"Model | Manifest"}),
    ],
)
def test_a_secret_that_the_inventory_no_longer_has_is_removed_and_then_all_is_as_planned(
    tmp_path: Path, key: str, operations: set[str]
) -> None:
    settings = {key: "env:FP8FLEET_API_KEY"}
    if key == "model_token":
        settings["model_token_for"] = "http://198.18.0.1:8900"
    before = inventory(tmp_path, "before", with_host(**settings))
    without = {name: value for name, value in GPU.items() if name != key}
    after = inventory(tmp_path, "after", {"serving": {"@fake/gpu-1": without}})
    assert set(changes(dry(before, after))) == operations
    assert changes(dry(after, after)) == {}


def test_a_host_whose_proxy_moved_to_a_gateway_stops_its_own(tmp_path: Path) -> None:
    serving = {"@fake/gpu-1": SERVING["@fake/gpu-1"]}
    before = inventory(tmp_path, "before", {"serving": serving})
    after = inventory(tmp_path, "after", {"serving": serving, "gateway": GATEWAYS})
    found = changes(dry(before, after))
    assert found["Nginx | Configuration"] == ["@fake/gw-1"]
    assert found["Nginx | The configuration is live"] == ["@fake/gpu-1", "@fake/gw-1"]
    assert changes(dry(after, after)) == {}


@pytest.mark.parametrize(
    ("limits", "retired"),
    [
        ([], ["@fake/gpu-1"]),
        (["@fake/gpu-1", "gateway"], ["@fake/gpu-1"]),
        (["serving"], None),
    ],
)
def test_a_server_is_retired_only_in_a_run_that_tells_the_gateway(
    tmp_path: Path, limits: list[str], retired: list[str] | None
) -> None:
    before = inventory(tmp_path, "before", FLEET)
    gpu = {**SERVING["@fake/gpu-1"], "instances": [LEFT]}
    fleet = {**FLEET, "serving": {**SERVING, "@fake/gpu-1": gpu}}
    arguments = [word for limit in limits for word in ("--limit", limit)]
    plan = dry(before, inventory(tmp_path, "after", fleet), *arguments)
    assert changes(plan).get("vLLM | Servers no longer planned") == retired


def test_limit_works_on_the_chosen_hosts_with_the_whole_fleets_plan(tmp_path: Path) -> None:
    site = inventory(tmp_path, "site", FLEET)
    plan = dry("bare", site, "--limit", "gateway")
    touched = {host for hosts in changes(plan).values() for host in hosts}
    assert touched == {"@fake/gw-1"}
    assert changes(dry(site, site, "--limit", "gateway")) == {}

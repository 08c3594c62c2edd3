"""Values that look right, pass a type check and would break a host: one line, exit code 2."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleets import INSTANCE, REPO, Site, fp8fleet, refusal

from fp8fleet.inventory import load_fleet
from fp8fleet.planner import make_plan

HUGE = 10**30

SYSTEM_DIRECTORIES = (
    *("var/lib/dpkg", "var/lib/apt/x", "var/cache/apt", "var/cache/dnf/x", "var/lib/rpm"),
    *("var/log", "var/log/x", "var/spool/x", "var/tmp/x", "var/run/x", "var/opt", "run/x"),
    *("lib32/x", "libx32", "lib64/x", "snap/x", "media", "lost+found"),
)


def server(**changes: Any) -> dict[str, Any]:
    return {"instances": [{**INSTANCE, **changes}]}


@pytest.mark.parametrize(
    "values",
    [
        server(port=80),
        server(port=1023),
        *({"model_directory": path} for path in ("/home/x", "/root/x", "/tmp/x", "/etc/x")),
        *({"model_directory": path} for path in ("/var", "/opt", "/srv", "/home", "/-x/y")),
        {"install_directory": "/usr/x"},
        *({"install_directory": f"/{path}"} for path in SYSTEM_DIRECTORIES),
        {"install_directory": "/var/lib/fp8fleet/models"},
        {"install_directory": "/var/lib/fp8fleet/models/x"},
        {"install_directory": "/var/lib/fp8fleet"},
        {"install_directory": "/var/cache/fp8fleet"},
        {"cache_directory": "/var/lib/fp8fleet/models/cache"},
        {"model_directory": "/opt/fp8fleet/models"},
        *({key: f"{'9' * 23}g"} for key in ("log_max_size", "nginx_body_size")),
        *({"sysctl": {"vm.swappiness": value}} for value in (10**40, 2**64, -(2**63) - 1, True)),
        *(
            {"sysctl": {"vm.swappiness": value}}
            for value in ("1" + "0" * 40, "4096 99999999999999999999")
        ),
        {"cache_directory": "/data/-x"},
        {"conda_frontend_path": "/opt/-x"},
        {"service_user": "root"},
        server(options={"uds": "/x"}),
        server(options={"headless": True}),
        {"proxy": "file:///x"},
        {"conda_channels": []},
        {"conda_channels": [""]},
        {"conda_channels": ["-c"]},
        {"apt_sources": ["http://m.example.com/debian ./"]},
        {"apt_sources": [""]},
        {"sysctl": {"-w": 1}},
        {"sysctl": {"../x": 1}},
        {"sysctl": {"net": 1}},
        *({key: HUGE} for key in ("start_timeout", "drain_timeout", "nofile_limit")),
        *({key: HUGE} for key in ("warm_up_concurrency", "nginx_read_timeout", "nginx_listen")),
        *({key: HUGE} for key in ("nginx_connect_timeout", "peer_port")),
        server(tensor_parallel_size=HUGE),
        *({key: ""} for key in ("tools_requirements", "engine_requirements", "model_manifest")),
        *({key: "a\0"} for key in ("tools_requirements", "engine_requirements", "model_manifest")),
        {"package_index": "http://[::1"},
        {"model_sources": ["http://[::1"]},
        {"conda_frontend_url": "http://[::1"},
        {"package_find_links": ["http://[::1"]},
        {"proxy": "http://[::1"},
    ],
    ids=lambda values: str(values)[:60].replace("\0", "NUL"),
)
def test_a_value_that_would_break_the_host_is_refused_with_its_key(
    site: Site, values: dict[str, Any]
) -> None:
    site.serving |= values
    assert next(iter(values)) in site.refusal()


class Power:
    """A number as an inventory may write it."""

    def __repr__(self) -> str:
        return "10**5000"


@pytest.mark.parametrize("key", ["start_timeout", "nginx_listen", "sysctl"])
def test_a_number_that_python_does_not_even_write_is_one_line(site: Site, key: str) -> None:
    site.serving[key] = {"vm.swappiness": Power()} if key == "sysctl" else Power()
    assert f"{key}" in site.refusal()


@pytest.mark.parametrize("value", [1.5, [1], {}, None, 2**64])
def test_a_kernel_parameter_of_another_kind_is_named_as_it_was_written(
    site: Site, value: Any
) -> None:
    site.serving["sysctl"] = {"vm.swappiness": value}
    assert re.search(r": sysctl\.vm\.swappiness( = \S+)?: (a whole|the kernel)", site.refusal())


def test_an_error_names_keys_of_the_inventory_alone(site: Site) -> None:
    site.serving |= server(options={"seed": 1j})
    assert ": instances.0.options.seed: " in site.refusal()
    site.serving |= {"sysctl": {"Net": 1}, "instances": [INSTANCE]}
    assert ": sysctl.Net = 'Net': " in site.refusal()
    site.serving |= {"sysctl": {}, "drivers": [{"name": "nvidia"}]}
    assert ": drivers.0.version: Field required" in site.refusal()


@pytest.mark.parametrize("name", ["../../esc", "a/../b", "-x", "", "a b", "a\nb", "x;reboot"])
def test_a_hosts_name_that_is_no_name_is_refused(site: Site, name: str) -> None:
    site.hosts = {name: {}}
    assert "host" in site.refusal()


BEFORE = "from pathlib import Path\n"


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(0)",
        "import sys; sys.exit('stop')",
        f"{BEFORE}serving = [('h', {{'instances': [{{'name': 'a', 'port': 8000,"
        " 'devices': [0], 'options': {'a': {'b': Path('/x')}}}]})]",
        f"{BEFORE}serving = [('h', {{'instances': [{{'name': 'a', 'port': 8000,"
        " 'devices': [0], 'options': {'a': [Path('/x')]}}]})]",
        "serving = [('h', {1: 2})]",
        "serving = [('h', {None: 2})]",
        "serving = [('h', {'sysctl': {1: 2}})]",
        "serving = [('h', {'engine_environment': {1: 'x'}})]",
        "serving = [('h', {'instances': [{'name': 'a', 'port': 8000, 'devices': [0],"
        " 'options': {1: 2}}]})]",
    ],
)
def test_odd_python_in_an_inventory_is_refused(site: Site, text: str) -> None:
    path = site.inventory(text)
    assert path in refusal(lambda: make_plan(load_fleet(path), site.root))


def test_an_inventory_that_exits_is_refused_by_the_command_too(site: Site) -> None:
    ran = fp8fleet("plan", site.inventory("raise SystemExit(0)"))
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_folder_as_a_locks_output_is_refused(tmp_path: Path) -> None:
    arguments = ("--platform", "ubuntu-22.04", "--output", str(tmp_path))
    ran = fp8fleet("lock", "0.33.0", *arguments)
    assert ran.code == 2
    assert ran.err.splitlines() == [f"error: --output {tmp_path}: is a directory: name a file"]


def interrupted(inventory: str, begun: Callable[[], object]) -> subprocess.Popen[str]:
    """A pyinfra run on ``inventory`` that gets Ctrl-C when ``begun`` returns."""
    run = subprocess.Popen(
        [sys.executable, "-m", "pyinfra", inventory, "deploys/full.py", "-y"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        begun()
        run.send_signal(signal.SIGINT)
        error = run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert "Traceback" not in error
    assert "interrupted; run the same command again" in error
    return run


def test_a_run_that_is_interrupted_while_it_reads_is_no_success(tmp_path: Path) -> None:
    pipe, inventory = tmp_path / "pipe", tmp_path / "site.py"
    os.mkfifo(pipe)
    inventory.write_text(f"import time\nopen({str(pipe)!r}, 'w').close()\ntime.sleep(60)\n")
    assert interrupted(str(inventory), pipe.read_bytes).returncode == 130


def test_a_run_that_is_interrupted_while_it_connects_is_no_success(site: Site) -> None:
    """pyinfra by itself ends with 0."""
    site.serving |= {
        "engine_requirements": "locks/vllm-0.33.0-ubuntu-22.04-x86_64.txt",
        "model_manifest": "models/tiny-llama/manifest.toml",
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        site.hosts = {"gpu-1": {"ssh_hostname": "127.0.0.1", "ssh_port": port}}
        held: list[object] = []
        run = interrupted(site.inventory(), lambda: held.append(listener.accept()))
    assert run.returncode == 130

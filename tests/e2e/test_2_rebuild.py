"""A lost host comes back with the same command, also when that is killed on its way."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from clients import complete
from faults import source
from fleet import MAIN, Fleet, command, ssh, until, url

from lab.site import mirror_root

pytestmark = pytest.mark.lab
FINAL = "/var/lib/fp8fleet/models/tiny-llama/1"


def kill_when(run: subprocess.Popen[str], reached: Callable[[], bool], what: str) -> None:
    """Kill pyinfra with SIGKILL as soon as the host has got as far as ``reached``."""
    end = time.monotonic() + 180
    try:
        while not reached():
            assert run.poll() is None, f"ended before {what}: {run.stdout and run.stdout.read()}"
            assert time.monotonic() < end, f"never reached: {what}"
            time.sleep(0.1)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()


def says(script: str) -> bool:
    return ssh(MAIN, f"{script} >/dev/null 2>&1 && echo yes || echo no") == "yes"


def test_a_lost_host_serves_again_although_the_run_is_killed_at_every_stage(fleet: Fleet) -> None:
    command("fp8fleet", "lab", "destroy", MAIN)
    assert command("fp8fleet", "lab", "create", MAIN).code == 0
    inventory = fleet.inventory()

    run = fleet.start(inventory)
    kill_when(run, lambda: says("pgrep -x dpkg"), "the packages' installation")

    run = fleet.start(inventory)
    packed = "ls -d /opt/fp8fleet/engines/*/lib/python3.11/site-packages/torch"
    kill_when(run, lambda: says(packed), "the engine's environment")
    assert not says("ls /opt/fp8fleet/engines/*/.fp8fleet-whole")

    with source(mirror_root() / "models/tiny-llama", "slow") as (base, requests):
        slow = fleet.inventory(model_sources=[base])
        run = fleet.start(slow)
        partial = f"find {FINAL}/.partial -size +300k | grep -q ."
        kill_when(run, lambda: says(partial), "the middle of the download")
        assert not says(f"ls {FINAL}/*.safetensors")
        # the killed run's tool ends by itself within a second: nobody reads its output any more
        run = fleet.start(slow)
        started = "systemctl is-active fp8fleet-tiny.service"
        kill_when(run, lambda: says(started), "the server's first start")
        resumed = [line for line in requests if "bytes=" in line]
        assert resumed, requests

    done = fleet.full(inventory)
    assert done.code == 0, done.text
    assert complete(url(MAIN)).status_code == 200
    again = fleet.full(inventory)
    assert (again.code, again.changed) == (0, []), again.text


def test_a_second_run_at_the_same_time_is_refused_and_told_who_holds_the_host(
    fleet: Fleet, served: None
) -> None:
    holder = fleet.start(fleet.inventory(), "--data", "verify=full")
    try:
        holds = f"grep 'process {holder.pid},' /run/fp8fleet.lock.holder"
        until(lambda: says(holds), "the first run holds the lock")
        holder.send_signal(signal.SIGSTOP)
        refused = fleet.full(fleet.inventory())
        assert refused.code == 1
        assert f"process {holder.pid}" in refused.text
        assert "another run works on this host" in refused.text
    finally:
        holder.kill()
        holder.wait()
    # the kernel released the dead run's lock
    done = fleet.full(fleet.inventory())
    assert done.code == 0, done.text

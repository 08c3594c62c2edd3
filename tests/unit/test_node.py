"""The program that starts and ends the nodes of a server together, with small commands as vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8fleet import node

RUNS = "echo start >>{log}; exec sleep 600"
"""Stands for a node of vLLM that does not end."""
DRAINS = "trap 'echo drained >>{log}; exit 0' TERM; echo start >>{log}; while :; do sleep 0.1; done"


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds; the bound is for a hang, not an expectation."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.05)


class Nodes:
    """Two nodes on this machine's loopback address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self, rank: int, command: str = RUNS, plan: str = "p1") -> subprocess.Popen[bytes]:
        """Start one; its lines go to RANK.out, its command's to RANK.log."""
        text = command.format(log=self.folder / f"{rank}.log")
        with (self.folder / f"{rank}.out").open("ab") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, node.__file__, "--rank", str(rank), "--port", str(self.port)),
                    *("--addresses", "127.0.0.1,127.0.0.1", "--plan", plan, "--drain", "30"),
                    *("--", "sh", "-c", text),
                ],
                stdout=out,
                stderr=out,
            )
        self.running.append(process)
        return process

    def log(self, rank: int) -> list[str]:
        """What the commands of a node wrote."""
        path = self.folder / f"{rank}.log"
        return path.read_text().split() if path.exists() else []

    def said(self, rank: int, text: str) -> bool:
        """Whether the node has printed ``text``."""
        path = self.folder / f"{rank}.out"
        return path.exists() and text in path.read_text()

    def both(self, times: int = 1) -> None:
        """Wait until both commands were started ``times`` times."""
        for rank in (0, 1):
            until(lambda r=rank: self.log(r).count("start") == times, f"start {times} of {rank}")  # type: ignore[misc]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


def test_no_node_starts_before_all_are_there(nodes: Nodes) -> None:
    nodes.start(0)
    until(lambda: nodes.said(0, "waiting for the nodes on 127.0.0.1"), "the head waits")
    assert nodes.log(0) == []
    nodes.start(1)
    nodes.both()


def test_a_node_of_another_plan_is_not_started_with_and_the_head_says_so(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, plan="p2")
    until(lambda: nodes.said(0, "has another plan: deploy to the group's hosts"), "told")
    assert nodes.log(0) == nodes.log(1) == []


def test_a_lost_follower_makes_the_head_start_anew_when_it_is_back(nodes: Nodes) -> None:
    head, follower = nodes.start(0), nodes.start(1)
    nodes.both()
    follower.kill()
    until(lambda: nodes.said(0, "the node on 127.0.0.1 is gone"), "noticed")
    nodes.start(1)
    nodes.both(times=2)
    assert head.poll() is None


def test_a_lost_head_makes_the_followers_end_and_wait_for_it(nodes: Nodes) -> None:
    head, follower = nodes.start(0), nodes.start(1)
    nodes.both()
    head.kill()
    until(lambda: nodes.said(1, "ending vLLM"), "noticed")
    nodes.start(0)
    nodes.both(times=2)
    assert follower.poll() is None


def test_where_a_follower_fails_both_units_fail_and_the_head_says_where(nodes: Nodes) -> None:
    head, follower = nodes.start(0), nodes.start(1, "sleep 1; exit 3")
    assert (head.wait(60), follower.wait(60)) == (1, 1)
    assert nodes.said(0, "NodeError: the node on 127.0.0.1 ended: its journal says why")
    assert nodes.said(1, "NodeError: vLLM ended with exit status 3")


def test_where_the_head_fails_followers_wait_for_its_restart(nodes: Nodes) -> None:
    head, follower = nodes.start(0, "echo start >>{log}; exit 0"), nodes.start(1)
    assert head.wait(60) == 1
    assert nodes.said(0, "NodeError: vLLM ended with exit status 0")
    nodes.start(0)
    until(lambda: nodes.log(0).count("start") == 2, "the second start")
    assert follower.poll() is None


def test_a_follower_that_is_stopped_lets_the_head_end_what_runs(nodes: Nodes) -> None:
    head, follower = nodes.start(0, DRAINS), nodes.start(1)
    nodes.both()
    follower.terminate()
    assert follower.wait(60) == 0
    assert nodes.log(0) == ["start", "drained"]
    assert head.poll() is None


def test_a_head_that_is_stopped_ends_what_runs_and_succeeds(nodes: Nodes) -> None:
    head, follower = nodes.start(0, DRAINS), nodes.start(1)
    nodes.both()
    head.terminate()
    assert head.wait(60) == 0
    assert nodes.log(0) == ["start", "drained"]
    until(lambda: nodes.said(1, "ending vLLM"), "the follower noticed")
    assert follower.poll() is None


def test_processes_that_a_node_leaves_behind_are_killed(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, "sleep 600 & echo $! >{log}.worker; echo start >>{log}; sleep 2; exit 1")
    worker = nodes.folder / "1.log.worker"
    until(lambda: nodes.said(1, "NodeError"), "the end")

    def gone() -> bool:
        try:
            os.kill(int(worker.read_text()), 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{int(worker.read_text())}/stat").read_text().split()[2]
        return state == "Z"

    until(gone, "the worker is gone")


def test_who_is_no_planned_node_is_turned_away(nodes: Nodes) -> None:
    nodes.start(0)
    until(lambda: nodes.said(0, "waiting"), "the head listens")
    hellos = (
        *(b"GET / HTTP/1.0\r\n\r\n", b'{"rank": 7, "plan": "p1"}\n', b"[1]\n", b"\xff\n"),
        *(b'{"rank": Infinity, "plan": "p1"}\n', b'{"rank": NaN, "plan": "p1"}\n'),
        *(b"[" * 60_000 + b"\n", b'{"a":' * 10_000 + b"\n", b"9" * 60_000 + b"\n"),
    )
    for hello in hellos:
        with socket.create_connection(("127.0.0.1", nodes.port)) as link:
            link.sendall(hello)
            assert link.recv(1) == b""
    assert nodes.log(0) == []
    assert (nodes.folder / "0.out").read_text() == "waiting for the nodes on 127.0.0.1\n"


def test_an_address_that_no_interface_has_ends_the_node_with_one_line(nodes: Nodes) -> None:
    done = subprocess.run(
        [
            *(sys.executable, node.__file__, "--rank", "0", "--port", "1024", "--plan", "p"),
            *("--addresses", "203.0.113.9,203.0.113.10", "--", "true"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == (
        "NodeError: no interface has the address 203.0.113.9 (service_address)\n"
    )
    assert done.stderr == ""


def test_torch_is_bound_to_the_interface_unless_the_environment_says_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    variables = node.network_environment("127.0.0.1")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_follower_that_still_connects_is_ended_by_sigterm(nodes: Nodes) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", nodes.port))
        full.listen(0)
        for waiting in (first, second):  # with these in its queue the port lets nobody in
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", nodes.port))
        follower = nodes.start(1)
        until(lambda: nodes.said(1, "waiting for the head"), "it waits")
        until(lambda: connects(nodes.port) > 1, "it connects")
        follower.terminate()
        assert follower.wait(60) == 0
    assert "Traceback" not in (nodes.folder / "1.out").read_text()


def connects(port: int) -> int:
    """How many sockets of this machine wait for a connection to ``port`` (state SYN_SENT)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows)


def test_an_interrupt_ends_a_waiting_follower(nodes: Nodes) -> None:
    follower = nodes.start(1)
    until(lambda: nodes.said(1, "waiting for the head"), "it waits")
    follower.send_signal(signal.SIGINT)
    assert follower.wait(60) == 0

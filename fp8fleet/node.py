"""Runs this host's node of a vLLM server over several hosts: all nodes start and end together.

vLLM's nodes do not notice each other's end: without the head a follower waits for ever, without a
follower the head is healthy until the next request, and a node that comes back meets an old
rendezvous (seen with vLLM 0.32.0). So each node runs under this program, which keeps a TCP
connection to the head's. The head starts vLLM when all nodes are there; whoever loses a connection
ends its vLLM and waits for the others anew.

Stands alone, with the standard library only: hosts get this file as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

RETRY_S = 1.0
HELLO_S = 10.0
"""Longest wait for a connection's first line."""
END_S = 20.0
"""That vLLM gets to end where nothing is left to finish."""
STARTED, ENDED, LEAVING = "start", "ended", "leaving"
"""Head to follower; follower to head: its vLLM ended by itself, its unit stops."""


class NodeError(Exception):
    """Ends this node; systemd starts it again."""


def say(text: str) -> None:
    """One line for the journal."""
    print(text, flush=True)


def interface_of(address: str) -> str:
    """Name of the interface with ``address``, from ``ip -o addr show``.

    Raises:
        NodeError: no interface has it.
    """
    program = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") or "ip"
    command = [program, "-o", "addr", "show"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in shown.stdout.splitlines():
        words = line.split()
        if len(words) > 3 and words[3].partition("/")[0] == address:
            return words[1]
    raise NodeError(f"no interface has the address {address} (service_address)")


def network_environment(address: str) -> dict[str, str]:
    """Has torch's libraries use the interface of ``address``, unless the environment says more.

    Gloo would take the address of the host's name, which is often 127.0.1.1; NCCL (``=``: this very
    name) and HCCL the first interface that they find.
    """
    name = interface_of(address)
    chosen = {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
        "HCCL_SOCKET_IFNAME": f"={name}",
    }
    return chosen | dict(os.environ)


class Child:
    """The vLLM process of this node with its workers."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Start it and wait for its end; returns its exit status, of which none means success."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, start_new_session=True
        )
        try:
            return await self._process.wait()
        finally:
            self._kill()

    async def end(self, patience_s: float) -> None:
        """Ask it to end, and kill what has not ended after ``patience_s``."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), patience_s)
        self._kill()

    def _kill(self) -> None:
        if self._process:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A host that lost its power is noticed after some 25 s."""
    link: socket.socket = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def _line(reader: asyncio.StreamReader) -> str:
    """The next line; empty where the connection is over."""
    try:
        return (await reader.readline()).decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def _write(writer: asyncio.StreamWriter, text: str) -> None:
    with suppress(OSError):
        writer.write(f"{text}\n".encode())


class Node:
    """What both kinds of nodes have."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank: int = arguments.rank
        self.addresses: list[str] = arguments.addresses.split(",")
        self.address = self.addresses[self.rank]
        self.head = self.addresses[0]
        self.port: int = arguments.port
        self.plan: str = arguments.plan
        self.drain_s: float = arguments.drain
        self.child = Child(arguments.command, network_environment(self.address))
        self.stopping = asyncio.Event()

    async def _any(self, *tasks: asyncio.Task[Any], event: asyncio.Event | None = None) -> None:
        """Wait until a task is done, ``event`` is set or the unit stops."""
        events = [asyncio.create_task(e.wait()) for e in (self.stopping, event) if e]
        await asyncio.wait([*tasks, *events], return_when=FIRST_COMPLETED)
        for waiting in events:
            waiting.cancel()


class Head(Node):
    """Node 0: has the API and starts vLLM when the others are there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.links: dict[int, asyncio.StreamWriter] = {}
        self.strangers: set[int] = set()
        """Nodes with another plan, told of once."""
        self.changed = asyncio.Event()
        self.lost = ""
        """Why this start is over; empty: it is not."""
        self.leaving = False
        """A follower's unit stops, and what runs may end first."""
        self.failed = ""
        """Whose vLLM ended by itself."""

    async def run(self) -> int:
        """Serve until SIGTERM."""
        self._server = await asyncio.start_server(self._accept, self.address, self.port)
        while not self.stopping.is_set():
            await self._gather()
            if not self.stopping.is_set():
                await self._serve()
        return 0

    async def _gather(self) -> None:
        told: list[str] = []
        while not self.stopping.is_set():
            missing = [a for n, a in enumerate(self.addresses) if n and n not in self.links]
            if not missing:
                break
            if missing != told:
                say(f"waiting for the nodes on {', '.join(missing)}")
                told = missing
            self.changed.clear()
            await self._any(event=self.changed)

    async def _serve(self) -> None:
        say(f"all {len(self.addresses)} nodes are there: starting vLLM")
        self.lost, self.failed, self.leaving = "", "", False
        for writer in self.links.values():
            _write(writer, STARTED)
        child = asyncio.create_task(self.child.run())
        while not (child.done() or self.stopping.is_set() or self.lost):
            self.changed.clear()
            await self._any(child, event=self.changed)
        over = child.done()
        if self.lost:
            say(self.lost)
        drains = self.stopping.is_set() or self.leaving
        await self.child.end(self.drain_s if drains else END_S)
        await child
        for writer in self.links.values():
            writer.close()
        self.links.clear()
        if self.failed:
            raise NodeError(self.failed)
        if over and not self.stopping.is_set() and not self.lost:
            raise NodeError(f"vLLM ended with exit status {child.result()}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = await self._hello(reader, writer)
        if rank is None:
            writer.close()
            return
        _keep_alive(writer)
        old = self.links.pop(rank, None)
        if old:
            old.close()
            self._lose(f"the node on {self.addresses[rank]} started anew")
        self.links[rank] = writer
        self.changed.set()
        where = f"the node on {self.addresses[rank]}"
        while self.links.get(rank) is writer and (word := await _line(reader)):
            if word == ENDED:
                self.failed = f"{where} ended: its journal says why"
                self._lose(self.failed)
            elif word == LEAVING:
                self.leaving = True
                self._lose(f"{where} stops")
        if self.links.get(rank) is writer:
            del self.links[rank]
            self._lose(f"{where} is gone")
        writer.close()

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self.changed.set()

    async def _hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """The rank of who connects; None: it is none of the planned nodes."""
        try:
            hello = json.loads(await asyncio.wait_for(_line(reader), HELLO_S))
            rank, plan = int(hello["rank"]), str(hello["plan"])
        except (
            *(asyncio.TimeoutError, ValueError, KeyError, TypeError),
            *(OverflowError, RecursionError),
        ):
            return None
        peer = writer.get_extra_info("peername")[0]
        if not 0 < rank < len(self.addresses) or peer != self.addresses[rank]:
            return None
        if plan != self.plan:
            if rank not in self.strangers:
                say(f"the node on {peer} has another plan: deploy to the group's hosts together")
            self.strangers.add(rank)
            return None
        self.strangers.discard(rank)
        return rank


class Follower(Node):
    """Any other node: starts vLLM when the head says so."""

    async def run(self) -> int:
        """Follow until SIGTERM."""
        say(f"waiting for the head on {self.head}")
        while not self.stopping.is_set():
            await self._follow()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), RETRY_S)
        return 0

    async def _follow(self) -> None:
        """One connection to the head, and one start of vLLM if it comes to that."""
        connecting = asyncio.create_task(
            asyncio.open_connection(self.head, self.port, local_addr=(self.address, 0))
        )
        await self._any(connecting)  # to a host that is off it takes minutes
        if not connecting.done():
            connecting.cancel()
        try:
            reader, writer = await connecting
        except (OSError, asyncio.CancelledError):
            return
        try:
            _keep_alive(writer)
            _write(writer, json.dumps({"rank": self.rank, "plan": self.plan}))
            first = asyncio.create_task(_line(reader))
            await self._any(first)
            if first.done() and first.result() == STARTED:
                await self._serve(reader, writer)
            first.cancel()
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        say("all nodes are there: starting vLLM")
        child = asyncio.create_task(self.child.run())
        over = asyncio.create_task(_line(reader))
        try:
            await self._any(child, over)
            if self.stopping.is_set():
                _write(writer, LEAVING)  # the head ends what runs, then this connection
                await asyncio.wait([over, child], timeout=self.drain_s, return_when=FIRST_COMPLETED)
            elif not over.done():
                # where the head's vLLM ends, this one may notice before the connection is over
                await asyncio.wait([over], timeout=RETRY_S)
                if not over.done():
                    _write(writer, ENDED)
                    raise NodeError(f"vLLM ended with exit status {child.result()}")
            say("the head ended or lost a node, or this one stops: ending vLLM")
        finally:
            over.cancel()
            await self.child.end(END_S)
            await asyncio.wait([child])


async def _main(arguments: argparse.Namespace) -> int:
    node = Follower(arguments) if arguments.rank else Head(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, node.stopping.set)
    return await node.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node until SIGTERM; exit code 1 where it, or another one, cannot go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="of this node; 0: the head")
    parser.add_argument("--addresses", required=True, help="of all nodes by rank: A,B,...")
    parser.add_argument("--port", type=int, required=True, help="on the head, for the other nodes")
    parser.add_argument("--plan", required=True, help="digest that all nodes must have")
    parser.add_argument("--drain", type=float, default=120, help="seconds for running requests")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- vllm serve ...")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        arguments.command = arguments.command[1:]
    try:
        return asyncio.run(_main(arguments))
    except (NodeError, OSError) as error:
        say(f"NodeError: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())

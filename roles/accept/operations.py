"""Acceptance as an operation that changes nothing and fails the host where a check fails."""

from __future__ import annotations

import dataclasses
import datetime
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from fabric.tunnels import TunnelManager
from paramiko import SSHException
from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, operation

from fp8fleet.accept import check_endpoint
from fp8fleet.errors import OperatorError
from fp8fleet.measured import REPORT, Measurement, note_measured
from fp8fleet.plan import HostPlan, ProxyPlan
from roles.accept.facts import LoggedKvCaches
from roles.operations import failed

TIMEOUT_S = 120.0
CONNECT_S = 5.0


@operation()
def endpoint_answers(proxy: ProxyPlan | None) -> Iterator[FunctionCommand]:
    """Ask the endpoint as a client would.

    Runs when operations are executed, not when they are prepared: before, nothing may answer yet.
    """
    if proxy is None or not state.is_executing:
        return
    key = proxy.api_key.resolve() if proxy.api_key else None
    try:
        with _reachable(proxy) as url:
            results = check_endpoint(url, proxy.model_id, key, TIMEOUT_S)
    except OperatorError as error:
        yield failed(f"acceptance: {proxy.url}: {error}")
        return
    for result in results:
        mark = "pass" if result.passed else "FAIL"
        logger.info(f"{host.print_prefix}{mark}  {result.name}: {result.evidence}")
    for result in results:
        if not result.passed:
            yield failed(f"acceptance: {proxy.url}: {result.name}: {result.evidence}")
            return


@contextmanager
def _reachable(proxy: ProxyPlan) -> Iterator[str]:
    """The proxy's base URL, or one through the SSH connection where only that leads to it."""
    client = getattr(host.connector, "client", None)
    if client is None or _connects(proxy.address, proxy.listen):
        yield proxy.url
        return
    logger.info(f"{host.print_prefix}{proxy.url} is not reached from here: asked through SSH")
    _check_forwarding(client.get_transport(), proxy.listen)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    finished = Event()
    remote = ("127.0.0.1", proxy.listen)
    tunnel = TunnelManager("127.0.0.1", port, *remote, client.get_transport(), finished)
    tunnel.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        finished.set()
        tunnel.join()


def _check_forwarding(transport: Any, port: int) -> None:
    """A tunnel would keep its clients waiting where sshd may not forward to ``port``.

    Raises:
        OperatorError: it may not.
    """
    try:
        transport.open_channel(
            "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=TIMEOUT_S
        ).close()
    except SSHException as error:
        raise OperatorError(
            f"port {port} is not reached from here, and the host's sshd does not forward to it"
            f" ({getattr(error, 'text', error)}): open the port for this machine, or allow"
            " forwarding (AllowTcpForwarding)"
        ) from None


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError:
        return False
    return True


@operation()
def kv_caches_noted(plan: HostPlan) -> Iterator[FunctionCommand]:
    """Note in reports/measured.toml the KV cache sizes that the running servers logged.

    A log that was rotated away notes nothing.
    """
    planned = {i.unit: i.capacity for i in plan.instances if i.capacity is not None}
    if not planned or not state.is_executing:
        return
    for unit, tokens in host.get_fact(LoggedKvCaches, units=sorted(planned)).items():
        today = datetime.date.today()
        combination = dataclasses.asdict(planned[unit].combination)
        try:
            note_measured(Measurement(**combination, kv_tokens=tokens, date=today))
        except (OperatorError, OSError) as error:
            yield failed(f"acceptance: KV cache of {unit}: {error}")
            return
        logger.info(f"{host.print_prefix}{unit}: KV cache of {tokens:,} tokens, in {REPORT}")

"""Acceptance as an operation that changes nothing and fails the host where a check fails."""

from __future__ import annotations

from collections.abc import Iterator

from fp8fleet.accept import check_endpoint
from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, operation

from fp8fleet.plan import ProxyPlan
from roles.operations import failed

TIMEOUT_S = 120.0


@operation()
def endpoint_answers(proxy: ProxyPlan) -> Iterator[FunctionCommand]:
    """Ask the endpoint as a client would.

    Runs when operations are executed, not when they are prepared: before, nothing may answer yet.
    """
    if not state.is_executing:
        return
    key = proxy.api_key.resolve() if proxy.api_key else None
    results = check_endpoint(proxy.url, proxy.model_id, key, TIMEOUT_S)
    for result in results:
        mark = "pass" if result.passed else "FAIL"
        logger.info(f"{host.print_prefix}{mark}  {result.name}: {result.evidence}")
    for result in results:
        if not result.passed:
            yield failed(f"acceptance: {proxy.url}: {result.name}: {result.evidence}")
            return

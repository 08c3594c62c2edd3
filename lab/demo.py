"""`make demo`: the lab up, one host provisioned from nothing, a completion through Nginx."""

from __future__ import annotations

import pyinfra_cli  # noqa: F401  isort: skip - it patches the standard library: before all others

import subprocess
import sys
import time

import requests

from fp8fleet.errors import CheckFailed, OperatorError
from fp8fleet.inventory import load_fleet
from fp8fleet.plan import ProxyPlan
from fp8fleet.planner import make_plan
from lab.machine import missing
from lab.processes import say
from lab.site import repository

INVENTORY = "inventories/lab.py"
PROMPT = "The quick brown fox"


def main() -> int:
    """Run the demo; returns the exit code."""
    started = time.monotonic()
    try:
        if reason := missing():
            raise OperatorError(f"the demo cannot run here: {reason}")
        _step("the lab: a bare host and a site mirror", [_program("fp8fleet"), "lab", "up"])
        deploy = [_program("pyinfra"), "-y", INVENTORY, "deploys/full.py"]
        _step("from the bare host to a served model", deploy)
        proxy = _proxy()
        text = _completion(proxy)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    say(f"\nserved after {time.monotonic() - started:.0f} s; {PROMPT!r} is continued by: {text!r}")
    say("(a tiny model with random weights: it shows the way, not wisdom)\n\nTry it:\n")
    print(_curl(proxy))
    say("\nStop it: .venv/bin/fp8fleet lab down")
    return 0


def _program(name: str) -> str:
    """A program of this environment, whatever PATH says."""
    return f"{sys.prefix}/bin/{name}"


def _step(what: str, command: list[str]) -> None:
    say(f"\n== {what}: {' '.join([command[0].rpartition('/')[2], *command[1:]])}")
    code = subprocess.run(command, cwd=repository(), check=False).returncode
    if code:
        raise CheckFailed(f"{what}: failed with exit code {code}; its own lines above say why")


def _proxy() -> ProxyPlan:
    plan = make_plan(load_fleet(INVENTORY))
    return next(host.proxy for host in plan.hosts.values() if host.proxy)


def _completion(proxy: ProxyPlan) -> str:
    body = {"model": proxy.model_id, "prompt": PROMPT, "max_tokens": 16}
    try:
        answer = requests.post(f"{proxy.url}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    except (requests.RequestException, ValueError, LookupError) as error:
        raise CheckFailed(f"{proxy.url}: no completion: {error}") from None


def _curl(proxy: ProxyPlan) -> str:
    body = f'{{"model": "{proxy.model_id}", "prompt": "{PROMPT}", "max_tokens": 16}}'
    return (
        f"curl --noproxy '*' {proxy.url}/v1/completions"
        f" -H 'Content-Type: application/json' -d '{body}'"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Proves from the control machine that an endpoint answers clients as it should."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

from fp8fleet.ready import (
    completion_body,
    event_choice,
    has_text,
    model_ids,
    open_session,
    said,
    stream_events,
)

_PROMPT = "The capital of France is"
_MAX_TOKENS = 32


@dataclass(frozen=True)
class CheckResult:
    """One check of an endpoint."""

    name: str
    passed: bool
    evidence: str
    """One line: what was answered."""
    seconds: float


class _Failed(Exception):
    """A check's answer is not the right one."""


@dataclass(frozen=True)
class _Endpoint:
    session: requests.Session
    url: str
    model_id: str
    timeout_s: float

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.url + path, timeout=self.timeout_s, allow_redirects=False)

    def post(self, path: str, body: dict[str, Any], stream: bool = False) -> requests.Response:
        return self.session.post(
            self.url + path,
            json=body,
            timeout=self.timeout_s,
            stream=stream,
            allow_redirects=False,
        )


def check_endpoint(
    base_url: str,
    model_id: str,
    api_key: str | None,
    timeout_s: float,
    verify: bool | str = True,
) -> list[CheckResult]:
    """Check what clients need of an endpoint: health, the model's id, answers, closed doors.

    Args:
        base_url: of the proxy, without ``/v1``.
        timeout_s: longest silence of one answer.
        verify: whether to check certificates, or a CA bundle's path.

    Returns:
        One result a check, in order; a dead endpoint gives failed checks.
    """
    with open_session(api_key, verify) as session:
        endpoint = _Endpoint(session, base_url.rstrip("/"), model_id, timeout_s)
        return [
            _run("healthz", lambda: _healthz(endpoint)),
            _run("models", lambda: _models(endpoint)),
            _run("completion", lambda: _completion(endpoint)),
            _run("streamed completion", lambda: _streamed(endpoint)),
            _run("/metrics is closed", lambda: _closed(endpoint.get("/metrics"))),
            _run("/tokenize is closed", lambda: _closed(endpoint.post("/tokenize", {}))),
        ]


def _run(name: str, check: Callable[[], str]) -> CheckResult:
    began = time.monotonic()
    try:
        evidence, passed = check(), True
    except _Failed as error:
        evidence, passed = str(error), False
    except requests.RequestException as error:
        evidence, passed = f"no answer: {_reason(error)}", False
    except (ValueError, KeyError, IndexError, TypeError) as error:
        evidence, passed = f"not the answer of an OpenAI-compatible server: {error!r}", False
    return CheckResult(name, passed, evidence, time.monotonic() - began)


def _reason(error: requests.RequestException) -> str:
    """The innermost words of a connection error: ``Connection refused``."""
    text = " ".join(str(error).split())
    return text.rsplit("] ", 1)[-1].rstrip("'\")") or type(error).__name__


def _expect_200(response: requests.Response) -> None:
    if response.status_code != 200:
        raise _Failed(said(response))


def _healthz(endpoint: _Endpoint) -> str:
    response = endpoint.get("/healthz")
    _expect_200(response)
    return "200"


def _models(endpoint: _Endpoint) -> str:
    response = endpoint.get("/v1/models")
    _expect_200(response)
    ids = model_ids(response)
    if endpoint.model_id not in ids:
        raise _Failed(f"has {', '.join(ids) or 'no model'}, expected {endpoint.model_id}")
    return endpoint.model_id


def _completion(endpoint: _Endpoint) -> str:
    """A chat where the model has a template, else a plain completion."""
    chat = {
        "model": endpoint.model_id,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    kind, response = "chat", endpoint.post("/v1/chat/completions", chat)
    # 400: the model has no chat template. 404: the server has no chat.
    if response.status_code in (400, 404):
        body = completion_body(endpoint.model_id, _PROMPT, _MAX_TOKENS)
        kind, response = "text", endpoint.post("/v1/completions", body)
    _expect_200(response)
    choice = response.json()["choices"][0]
    text = choice["text"] if kind == "text" else _spoken(choice["message"])
    finish = choice.get("finish_reason")
    if not has_text(text):
        raise _Failed(f"{kind}: an empty completion: {text!r}")
    if finish not in ("stop", "length"):
        raise _Failed(f"{kind}: finish_reason {finish!r}, expected stop or length")
    return f"{kind}: {str(text)[:60]!r}, finish_reason {finish}"


def _spoken(message: dict[str, Any]) -> object:
    """The text of a chat message; a reasoning model may not have got to its answer."""
    for key in ("content", "reasoning", "reasoning_content"):
        if has_text(message.get(key)):
            return message[key]
    return message.get("content")


def _streamed(endpoint: _Endpoint) -> str:
    body = completion_body(endpoint.model_id, _PROMPT, _MAX_TOKENS, stream=True)
    began = time.monotonic()
    with endpoint.post("/v1/completions", body, stream=True) as response:
        _expect_200(response)
        pieces, done, first_s = 0, False, 0.0
        for event in stream_events(response):
            done = event == "[DONE]"
            if not done and event_choice(event).get("text"):
                pieces += 1
                first_s = first_s or time.monotonic() - began
    if pieces < 2:
        raise _Failed(f"{pieces} pieces of text, expected several: does a proxy buffer?")
    if not done:
        raise _Failed(f"{pieces} pieces of text, then the stream broke off without [DONE]")
    return f"{pieces} pieces, the first after {first_s:.2f} s, [DONE]"


def _closed(response: requests.Response) -> str:
    if response.status_code != 404:
        raise _Failed(f"{response.status_code} {response.reason}, expected 404: it is reachable")
    return "404"

"""What acceptance demands of an endpoint; and the secrets that it and deploys use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpd
import pytest
from pydantic import BaseModel, ValidationError

from fp8fleet.accept import CheckResult, check_endpoint
from fp8fleet.errors import OperatorError
from fp8fleet.secrets import SecretRef

MODEL = "tiny"
NAMES = [
    "healthz",
    "models",
    "completion",
    "streamed completion",
    "/metrics is closed",
    "/tokenize is closed",
]


def as_json(body: object) -> httpd.Answer:
    return httpd.status(200, json.dumps(body).encode())


def chat(content: str | None, finish: str = "stop", **more: str) -> httpd.Answer:
    message = {"role": "assistant", "content": content, **more}
    return as_json({"choices": [{"message": message, "finish_reason": finish}]})


def events(*texts: str, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n" for text in texts]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def answer_completion(handler: httpd.Handler) -> None:
    if json.loads(handler.request_body).get("stream"):
        httpd.chunked(events(" Par", "is", ""))(handler)
    else:
        as_json({"choices": [{"text": " Paris", "finish_reason": "length"}]})(handler)


@pytest.fixture
def server() -> Iterator[httpd.Server]:
    """An endpoint as it should be."""
    with httpd.Server() as running:
        running.always = {
            "healthz": httpd.status(200, b"ok"),
            "v1/models": as_json({"data": [{"id": MODEL}]}),
            "v1/chat/completions": chat("Paris."),
            "v1/completions": answer_completion,
        }
        yield running


def check(server: httpd.Server) -> dict[str, CheckResult]:
    results = check_endpoint(server.url + "/", MODEL, "k3y", 10)
    assert [result.name for result in results] == NAMES
    return {result.name: result for result in results}


def failed(server: httpd.Server) -> dict[str, str]:
    return {name: result.evidence for name, result in check(server).items() if not result.passed}


def test_a_good_endpoint_passes_with_evidence(server: httpd.Server) -> None:
    results = check(server)
    assert [result.evidence for result in results.values() if not result.passed] == []
    assert results["completion"].evidence == "chat: 'Paris.', finish_reason stop"
    assert results["streamed completion"].evidence.startswith("2 pieces, the first after ")
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer k3y"}


@pytest.mark.parametrize("code", [400, 404])
def test_a_model_without_a_chat_template_is_asked_for_text(server: httpd.Server, code: int) -> None:
    server.always["v1/chat/completions"] = httpd.status(code)
    result = check(server)["completion"]
    assert result.passed
    assert result.evidence == "text: ' Paris', finish_reason length"


def test_a_reasoning_model_that_only_reasons_has_answered(server: httpd.Server) -> None:
    server.always["v1/chat/completions"] = chat(None, "length", reasoning="The capital")
    assert failed(server) == {}


@pytest.mark.parametrize(
    ("path", "answer", "name", "said"),
    [
        ("healthz", httpd.status(503), "healthz", "503 Service Unavailable: sorry"),
        ("v1/models", as_json({"data": [{"id": "other"}]}), "models", "has other, expected tiny"),
        ("v1/models", httpd.status(200, httpd.HTML), "models", "has no model, expected tiny"),
        ("v1/models", httpd.redirect("http://127.0.0.1:1/"), "models", "302 Found"),
        ("v1/chat/completions", chat("<pad><pad>"), "completion", "empty completion: '<pad><pad>'"),
        ("v1/chat/completions", chat("Paris", "abort"), "completion", "finish_reason 'abort'"),
        ("v1/chat/completions", httpd.status(401), "completion", "401 Unauthorized"),
        ("v1/chat/completions", as_json({}), "completion", "not the answer of an OpenAI"),
        ("metrics", httpd.status(200), "/metrics is closed", "200 OK, expected 404"),
        ("tokenize", httpd.status(405), "/tokenize is closed", "405 Method Not Allowed, expected"),
    ],
)
def test_a_wrong_answer_fails_its_check_and_no_other(
    server: httpd.Server, path: str, answer: httpd.Answer, name: str, said: str
) -> None:
    server.always[path] = answer
    failures = failed(server)
    assert list(failures) == [name]
    assert said in failures[name]
    assert "\n" not in failures[name]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (events("all at once"), "1 pieces of text, expected several: does a proxy buffer?"),
        (events("a", "b", done=False), "broke off without [DONE]"),
        (b'data: {"error": {"message": "engine dead"}}\n\n', "engine dead"),
        (b"data: <html>\n\n", "not the answer of an OpenAI-compatible server"),
    ],
)
def test_a_wrong_stream_fails(server: httpd.Server, body: bytes, said: str) -> None:
    def answer(handler: httpd.Handler) -> None:
        httpd.chunked(body)(handler)

    server.always["v1/completions"] = answer
    failures = failed(server)
    assert list(failures) == ["streamed completion"]
    assert said in failures["streamed completion"]


def test_a_dead_endpoint_gives_failed_checks_and_no_traceback() -> None:
    results = check_endpoint("http://127.0.0.1:1", MODEL, None, 5)
    assert [result.name for result in results] == NAMES
    assert not any(result.passed for result in results)
    assert {result.evidence for result in results} == {"no answer: Connection refused"}


def test_an_endpoint_that_says_nothing_gives_failed_checks(server: httpd.Server) -> None:
    server.files["healthz"] = b"x"
    server.always["healthz"] = httpd.stalled_after(0)
    results = check_endpoint(server.url, MODEL, None, 0.2)
    assert not results[0].passed
    assert "Read timed out" in results[0].evidence


# --- secrets ------------------------------------------------------------------------------------


class _Inventory(BaseModel):
    api_key: SecretRef


def test_a_secret_is_read_from_the_environment_or_a_0600_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8_KEY", "hunter2")
    path = tmp_path / "key"
    path.write_text("hunter3\n")
    path.chmod(0o400)
    assert _Inventory.model_validate({"api_key": "env:FP8_KEY"}).api_key.resolve() == "hunter2"
    assert SecretRef.parse(f"file:{path}").resolve() == "hunter3"


def test_only_the_reference_is_ever_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_KEY", "hunter2")
    inventory = _Inventory.model_validate({"api_key": "env:FP8_KEY"})
    inventory.api_key.resolve()
    assert "hunter2" not in f"{inventory!r} {inventory.api_key} {inventory.model_dump_json()}"
    assert inventory.model_dump_json() == '{"api_key":"env:FP8_KEY"}'
    assert inventory.api_key.placeholder == "<secret FP8_KEY>"


@pytest.mark.parametrize("value", ["hunter2", "env:", "env:a b", "file:key", "vault:x", 3])
def test_another_form_is_refused_and_not_repeated(value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        _Inventory.model_validate({"api_key": value})
    (error,) = caught.value.errors(include_input=False)
    assert "expected env:VARIABLE or file:/absolute/path" in error["msg"]
    assert "hunter2" not in error["msg"]


def test_a_file_that_others_can_read_is_refused_with_its_mode_and_the_command(
    tmp_path: Path,
) -> None:
    path = tmp_path / "key"
    path.write_text("hunter2")
    path.chmod(0o640)
    with pytest.raises(OperatorError) as caught:
        SecretRef.parse(f"file:{path}").resolve()
    assert "has mode 0640, expected 0600 or stricter" in str(caught.value)
    assert str(caught.value).endswith(f"chmod 600 {path}")
    assert caught.value.exit_code == 2


def test_unset_missing_empty_and_many_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8_KEY", raising=False)
    path = tmp_path / "key"
    for reference, said in (("env:FP8_KEY", "is not set"), (f"file:{path}", "no such file")):
        with pytest.raises(OperatorError, match=said):
            SecretRef.parse(reference).resolve()
    path.touch(0o600)
    for text, said in (("\n", "is empty"), ("a\nb", "one line")):
        path.write_text(text)
        with pytest.raises(OperatorError, match=said) as caught:
            SecretRef.parse(f"file:{path}").resolve()
        assert caught.value.exit_code == 2

"""When a server counts as ready, and what is said when it never will be."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpd
import pytest

from fp8fleet import hostcli, ready
from fp8fleet.errors import CheckFailed
from fp8fleet.ready import Unit, batch_sizes, explain_journal, has_text, wait_ready, warm_up

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"
MODEL = "tiny"
MODELS = json.dumps({"data": [{"id": MODEL}]}).encode()


def completion(text: str) -> httpd.Answer:
    body = {"choices": [{"text": text, "finish_reason": "length"}]}
    return httpd.status(200, json.dumps(body).encode())


STREAM = httpd.status(200, b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_POLL_S", 0.01)


@pytest.fixture
def server() -> Iterator[httpd.Server]:
    """A server that is ready: its completions are streamed when asked for."""
    with httpd.Server() as running:
        running.always = {
            "health": httpd.status(200, b""),
            "v1/models": httpd.status(200, MODELS),
            "v1/completions": answer_completion,
        }
        yield running


def answer_completion(handler: httpd.Handler) -> None:
    streamed = json.loads(handler.request_body).get("stream")
    (STREAM if streamed else completion(" Paris"))(handler)


# --- ready --------------------------------------------------------------------------------------


def test_ready_is_health_then_the_id_then_a_completion(server: httpd.Server) -> None:
    server.answers["health"] = [httpd.status(503)]
    server.answers["v1/models"] = [httpd.status(200, b'{"data": []}'), httpd.status(200, b"<html>")]
    server.answers["v1/completions"] = [
        completion(""),
        completion("<pad><pad> \n"),
        httpd.status(500),
        httpd.status(200, b"[]"),
    ]
    wait_ready(server.url, MODEL, 30, progress=lambda line: None)
    paths = [request.path for request in server.requests]
    assert paths.count("health") == 8
    assert paths.count("v1/completions") == 5


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with pytest.raises(CheckFailed, match=r"not ready after 0\.1 s: no answer yet \(Connection"):
        wait_ready("http://127.0.0.1:1", MODEL, 0.1, progress=lambda line: None)


def test_the_api_key_is_sent(server: httpd.Server) -> None:
    wait_ready(server.url, MODEL, 30, api_key="k3y", progress=lambda line: None)
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer k3y"}


def test_a_time_out_says_what_is_missing_and_the_last_log_line(server: httpd.Server) -> None:
    server.always["v1/completions"] = completion("<pad>")
    with pytest.raises(CheckFailed) as caught:
        wait_ready(server.url, MODEL, 0.05, progress=lambda line: None, last_line=lambda: "LOADING")
    assert "an empty completion: '<pad>'" in str(caught.value)
    assert "its last log line: LOADING" in str(caught.value)


def test_a_dead_server_ends_the_wait_with_its_reason() -> None:
    with pytest.raises(CheckFailed, match=r"^it died: KeyError$"):
        wait_ready("http://127.0.0.1:1", MODEL, 600, is_dead=lambda: "it died: KeyError")


def test_progress_names_what_is_missing_and_the_log(
    server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PROGRESS_S", 0.05)
    server.answers["health"] = [httpd.status(503) for _ in range(20)]
    lines: list[str] = []
    wait_ready(server.url, MODEL, 30, progress=lines.append, last_line=lambda: "LOADING")
    assert lines[0].endswith("s: /health: 503 Service Unavailable: sorry; log: LOADING")
    assert lines[-1].startswith("tiny ready after ")


@pytest.mark.parametrize("text", ["", " \n", "<pad>", "<unk> <pad>", "[PAD]", None, 3])
def test_blank_and_padding_say_nothing(text: object) -> None:
    assert not has_text(text)


# --- warm-up ------------------------------------------------------------------------------------


def test_batches_double_up_to_the_wanted_size() -> None:
    assert [batch_sizes(size) for size in (0, 1, 2, 6, 16)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


def test_the_streams_of_a_batch_run_together_with_prompts_of_their_own(
    server: httpd.Server,
) -> None:
    barriers = {size: threading.Barrier(size, timeout=20) for size in (1, 2, 4)}

    def together(handler: httpd.Handler) -> None:
        prompt = json.loads(handler.request_body)["prompt"]
        barriers[int(prompt.split(".")[0])].wait()
        STREAM(handler)

    server.always["v1/completions"] = together
    lines: list[str] = []
    warm_up(server.url, MODEL, 4, api_key="k3y", progress=lines.append)
    assert [line.split(" in ")[0] for line in lines] == [
        "warm-up: 1 streams",
        "warm-up: 2 streams",
        "warm-up: 4 streams",
    ]
    prompts = [json.loads(request.body)["prompt"] for request in server.requests]
    assert len(set(prompts)) == 7
    assert len({len(prompt.split()) for prompt in prompts}) == 4
    assert server.requests[0].headers["authorization"] == "Bearer k3y"


def test_a_failed_warm_up_answer_fails_the_warm_up(server: httpd.Server) -> None:
    server.always["v1/completions"] = httpd.status(500, b"out of memory")
    with pytest.raises(CheckFailed, match=r"warm-up with 1 streams: 500 .*: out of memory"):
        warm_up(server.url, MODEL, 4, progress=lambda line: None)
    server.always["v1/completions"] = httpd.status(200, b'data: {"choices": []}\n\n')
    with pytest.raises(CheckFailed, match="the stream broke off"):
        warm_up(server.url, MODEL, 4, progress=lambda line: None)


def test_a_server_that_dies_while_warming_up_ends_it(
    server: httpd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "PROGRESS_S", 0.05)
    gone = threading.Event()

    def silent(handler: httpd.Handler) -> None:
        gone.wait(20)
        handler.close_connection = True

    def dead() -> str:
        gone.set()
        return "it died"

    server.always["v1/completions"] = silent
    with pytest.raises(CheckFailed, match=r"^it died$"):
        warm_up(server.url, MODEL, 1, is_dead=dead, progress=lambda line: None)


# --- why it died --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "no_nvcc",
            "RuntimeError: Assertion error (/build/.deps/deepgemm-src/csrc/apis/../jit_kernels/"
            "impls/../../jit/compiler.hpp:175): std::filesystem::exists(nvcc_path)",
        ),
        (
            "scales_of_64_blocks",
            "AssertionError: assert self.data.shape == loaded_weight.shape (parameter.py:229)",
        ),
        ("no_quantization_config", "KeyError: 'layers.0.mlp.down_proj.weight_scale'"),
        (
            "truncated_shard",
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header:"
            " incomplete metadata, file not fully covered",
        ),
    ],
)
def test_the_root_cause_of_a_real_log_is_found(log: str, reason: str) -> None:
    assert explain_journal((LOGS / f"{log}.log").read_text().splitlines()) == reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [
                "usage: vllm serve [model_tag] [options]",
                "vllm serve: error: unrecognized arguments: -x",
            ],
            "vllm serve: error: unrecognized arguments: -x",
        ),
        (
            [
                "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error"
                " for ModelConfig",
                "(APIServer pid=1)   Value error, User-specified max_model_len (999999) is greater"
                " than the derived one. [type=value_error, input_value=ArgsKwargs(), input_type=A]",
                "(APIServer pid=1)     For further information visit https://errors.pydantic.dev",
            ],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig:"
            " Value error, User-specified max_model_len (999999) is greater than the derived one.",
        ),
        (
            [
                "(Worker_TP1 pid=3) ERROR 11-30 01:02:03 [multiproc.py:1] torch.OutOfMemoryError:"
                " CUDA out of memory.",
                "\x1b[0;36m(Worker_TP0 pid=2)\x1b[0;0m ERROR 11-30 01:02:04 [x.py:1]"
                " torch.distributed.DistBackendError: NCCL error",
                "(EngineCore pid=2) ERROR 11-30 01:02:04 [core.py:1] Exception: WorkerProc"
                " initialization failed due to an exception in a background process.",
                "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause"
                " above. Failed core proc(s): {}",
            ],
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            ["RuntimeError: Engine core initialization failed. See root cause above."],
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
        (
            [
                "x.service: Failed at step EXEC spawning /opt/vllm: No such file or directory",
                "x.service: Main process exited, code=exited, status=203/EXEC",
                "x.service: Failed with result 'exit-code'.",
            ],
            "x.service: Failed at step EXEC spawning /opt/vllm: No such file or directory",
        ),
        (
            [
                "(APIServer pid=1) WARNING 11-30 01:02:03 [a.py:1] may cause `OSError: x` error",
                "x.service: Main process exited, code=killed, status=9/KILL",
                "x.service: Failed with result 'signal'.",
            ],
            "x.service: Main process exited, code=killed, status=9/KILL",
        ),
        (["only this", ""], "only this"),
        ([], ""),
    ],
)
def test_the_most_telling_line_is_picked(lines: list[str], reason: str) -> None:
    assert explain_journal(lines) == reason


# --- the unit -----------------------------------------------------------------------------------


class Systemd:
    """`systemctl` and `journalctl` that print what a test says."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.state()
        (directory / "journal").write_text("")
        for name, file in (("systemctl", "state"), ("journalctl", "journal")):
            tool = directory / name
            tool.write_text(
                f'#!/bin/sh\necho "$*" >>{directory}/{name}.calls\ncat {directory}/{file}\n'
            )
            tool.chmod(0o755)

    def state(
        self, active: str = "active", sub: str = "running", restarts: int = 0, start: str = "aa"
    ) -> None:
        (self._directory / "state").write_text(
            f"NRestarts={restarts}\nResult=exit-code\nActiveState={active}\nSubState={sub}\n"
            f"ExecMainStatus=1\nInvocationID={start}\n"
        )

    def journal(self, text: str) -> None:
        (self._directory / "journal").write_text(text)

    def calls(self, tool: str) -> list[str]:
        return (self._directory / f"{tool}.calls").read_text().splitlines()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return Systemd(directory)


def test_a_running_unit_is_not_dead(systemd: Systemd) -> None:
    assert Unit("x.service").why_dead() is None
    systemd.state("activating", "start")
    assert Unit("x.service").why_dead() is None


@pytest.mark.parametrize(
    "change",
    [
        {"active": "failed", "sub": "failed"},
        {"active": "activating", "sub": "auto-restart"},
        {"restarts": 1},
        {"start": "bb"},
    ],
)
def test_a_start_that_is_over_is_told_with_the_line_of_its_own_log(
    systemd: Systemd, change: dict[str, str]
) -> None:
    unit = Unit("x.service")
    systemd.state(**change)  # type: ignore[arg-type]
    systemd.journal((LOGS / "no_quantization_config.log").read_text())
    reason = unit.why_dead() or ""
    assert reason.startswith("x.service ended (")
    assert reason.endswith("exit status 1): KeyError: 'layers.0.mlp.down_proj.weight_scale'")
    assert "_SYSTEMD_INVOCATION_ID=aa + INVOCATION_ID=aa" in systemd.calls("journalctl")[-1]


def test_without_systemd_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CheckFailed, match="systemctl is missing"):
        Unit("x.service")


# --- the command --------------------------------------------------------------------------------


def arguments(server: httpd.Server, marker: Path, *more: str) -> list[str]:
    command = ["ready", "--unit", "x.service", "--url", server.url, "--model", MODEL]
    return [*command, "--marker", str(marker), *more]


def test_ready_waits_warms_up_and_leaves_a_marker_that_the_next_check_believes(
    systemd: Systemd, server: httpd.Server, tmp_path: Path
) -> None:
    marker = tmp_path / "ready.json"
    assert hostcli.main(arguments(server, marker, "--warm-up", "4", "--timeout", "30")) == 0
    assert json.loads(marker.read_text())["invocation"] == "aa"
    streamed = [r for r in server.requests if b'"stream": true' in r.body]
    assert len(streamed) == 7
    server.requests.clear()
    assert hostcli.main(arguments(server, marker, "--check")) == 0
    assert [request.path for request in server.requests] == ["health"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": "bb"}, "was started since"),
        ({"active": "failed"}, "x.service is failed"),
    ],
)
def test_a_check_fails_when_the_unit_was_restarted_or_is_down(
    systemd: Systemd,
    server: httpd.Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    said: str,
) -> None:
    marker = tmp_path / "ready.json"
    assert hostcli.main(arguments(server, marker)) == 0
    systemd.state(**change)  # type: ignore[arg-type]
    assert hostcli.main(arguments(server, marker, "--check")) == 1
    assert said in capsys.readouterr().err


def test_a_check_fails_without_a_marker_and_when_health_fails(
    systemd: Systemd, server: httpd.Server, tmp_path: Path
) -> None:
    marker = tmp_path / "ready.json"
    assert hostcli.main(arguments(server, marker, "--check")) == 1
    assert hostcli.main(arguments(server, marker)) == 0
    server.always["health"] = httpd.status(503)
    assert hostcli.main(arguments(server, marker, "--check")) == 1


def test_a_server_that_died_leaves_no_marker(
    systemd: Systemd, server: httpd.Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.always["health"] = httpd.status(503)
    systemd.state("failed", "failed")
    systemd.journal((LOGS / "truncated_shard.log").read_text())
    marker = tmp_path / "ready.json"
    assert hostcli.main(arguments(server, marker)) == 1
    assert "incomplete metadata, file not fully covered" in capsys.readouterr().err
    assert not marker.exists()

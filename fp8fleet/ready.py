"""Waits until a vLLM server really answers, warms its batch shapes, and says why it died."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from fp8fleet.errors import CheckFailed

PROGRESS_S = 10.0
"""Longest silence of a wait."""
_POLL_S = 1.0
_REQUEST_S = 30.0
_WARM_UP_S = 300.0
"""Longest wait for one warm-up answer: a cold server compiles kernels meanwhile."""
_JOURNAL_LINES = 3000
_PROMPT = "The capital of France is"


# --- why a server died --------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# `(EngineCore pid=12) `, `(EngineCore_0 pid=12) (Worker_TP1 pid=13) `, `[rank0]: `, and vLLM's own
# `ERROR 11-30 01:02:03 [core.py:1] `.
_STAMP = r"\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?"
_PREFIX = re.compile(rf"^(?:\(\w[^()]*pid=\d+\) |\[rank\d+\]: ?|(?:ERROR|CRITICAL) {_STAMP})")
# What a healthy server prints; its prefix stays, to tell it from errors.
_QUIET = re.compile(rf"^(?:DEBUG|INFO|WARNING) {_STAMP}")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Failure)(?:: .*)?$"
)
_USAGE_ERROR = re.compile(r"^[\w./-]*vllm[\w ./-]*: error: ")
_VALIDATION = re.compile(r"\d+ validation errors? for ")
# What reports another process's failure, or follows from it.
_FOLLOWS = re.compile(
    r"See root cause above|See stack trace \(above\)|Failed core proc|EngineDeadError"
    r"|due to an exception in a background process|Executor failed|Worker proc \S+ died"
    r"|^(?:\w+\.)*(?:SystemExit|KeyboardInterrupt|CancelledError|BrokenPipeError|EOFError"
    r"|ConnectionResetError|DistBackendError)\b"
)
_HINT = re.compile(
    r"Failed at step|Failed to execute|No such file|not found|Permission denied|Killed|oom-kill"
    r"|Segmentation fault|core dumped|Fatal Python error|\b[Ee]rror\b"
)
_SYSTEMD_END = re.compile(r"Main process exited")


def explain_journal(lines: Iterable[str]) -> str:
    """Pick the line of a dead server's log that says why it died.

    vLLM's processes print one traceback each; the API server's only points to the engine's. The
    last exception that does not merely report another one is the cause. A bare ``AssertionError``
    gets the code line that failed, a pydantic error its first reason.

    Returns:
        One line without log prefixes; empty for an empty log.
    """
    plain = [_strip(line) for line in lines]
    causes = [index for index, line in enumerate(plain) if _is_cause(line)]
    own = [index for index in causes if not _FOLLOWS.search(plain[index])]
    if own or causes:
        return _with_detail(plain, (own or causes)[-1])
    notable = [line for line in plain if line.strip() and not _QUIET.match(line)]
    for pattern in (_HINT, _SYSTEMD_END):
        if found := [line.strip() for line in notable if pattern.search(line)]:
            return found[-1]
    said = [line.strip() for line in plain if line.strip()]
    return (said or [""])[-1]


def _strip(line: str) -> str:
    """``line`` without colours and the prefixes that vLLM puts before it."""
    text = _ANSI.sub("", line).rstrip()
    while match := _PREFIX.match(text):
        text = text[match.end() :]
    return text


def _is_cause(line: str) -> bool:
    return bool(_EXCEPTION.match(line) or _USAGE_ERROR.match(line))


def _with_detail(lines: list[str], index: int) -> str:
    line = lines[index]
    if _VALIDATION.search(line):
        reasons = [text.strip() for text in lines[index + 1 : index + 4] if text.startswith("  ")]
        reasons = [text for text in reasons if text.startswith("Value error, ")] or reasons
        return f"{line}: {reasons[0].split(' [type=')[0]}" if reasons else line
    if ": " not in line:
        code = _failed_code(lines[:index])
        return f"{line}: {code}" if code else line
    return line


def _failed_code(before: list[str]) -> str:
    """The last code line of the traceback that ends here, with its place."""
    frames = [text.strip() for text in before[-3:] if text.strip().strip("^~ ")]
    if len(frames) < 2 or not frames[-2].startswith("File "):
        return ""
    place = re.match(r'File ".*?([^/"]+)", line (\d+)', frames[-2])
    return f"{frames[-1]} ({place[1]}:{place[2]})" if place else frames[-1]


# --- the systemd unit ---------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitState:
    """What systemd says about a unit."""

    active: str
    sub: str
    restarts: int
    exit_status: str
    result: str
    invocation: str
    """Names one start of the unit."""


class Unit:
    """A systemd service as a wait sees it: one start of it, and whether that start is over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._first = self.state()

    @property
    def invocation(self) -> str:
        """Names the start that was seen first."""
        return self._first.invocation

    def state(self) -> UnitState:
        """Ask systemd.

        Raises:
            CheckFailed: systemctl is missing or fails.
        """
        names = ("ActiveState", "SubState", "NRestarts", "ExecMainStatus", "Result", "InvocationID")
        shown = _output(["systemctl", "show", "-p", ",".join(names), self.name])
        values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        return UnitState(
            active=values.get("ActiveState", ""),
            sub=values.get("SubState", ""),
            restarts=int(values.get("NRestarts") or 0),
            exit_status=values.get("ExecMainStatus", ""),
            result=values.get("Result", ""),
            invocation=values.get("InvocationID", ""),
        )

    def why_dead(self) -> str | None:
        """None while the start that we saw first goes on, else why it is over."""
        now = self.state()
        over = (
            now.active in ("failed", "inactive", "deactivating")
            or now.sub == "auto-restart"
            or now.restarts > self._first.restarts
            or (self._first.invocation and now.invocation != self._first.invocation)
        )
        if not over:
            return None
        reason = explain_journal(self._journal(_JOURNAL_LINES))
        ended = f"{self.name} ended ({now.active}/{now.sub}, result {now.result}"
        return f"{ended}, exit status {now.exit_status}): {reason or 'its log is empty'}"

    def last_line(self) -> str:
        """The newest line of its log."""
        return "".join(self._journal(1))

    def _journal(self, count: int) -> list[str]:
        command = ["journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(count)]
        invocation = self._first.invocation
        if not invocation:
            return _output([*command, "-u", self.name]).splitlines()
        # What the processes of this start wrote, or systemd about them.
        own = [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
        return _output([*command, *own]).splitlines()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except FileNotFoundError:
        raise CheckFailed(f"{command[0]} is missing: this runs on a systemd host") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise CheckFailed(f"{' '.join(command[:2])} failed: {said}") from None
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"{' '.join(command[:2])} does not answer") from None
    return done.stdout.decode(errors="replace")


# --- asking the server --------------------------------------------------------------------------


def has_text(text: object) -> bool:
    """Whether a completion says anything: neither blank nor only padding tokens.

    A model with broken scales is healthy and answers ``<pad><pad>...``.
    """
    return isinstance(text, str) and bool(re.sub(r"<pad>|<unk>|\[PAD\]|\[UNK\]", "", text).strip())


def open_session(api_key: str | None, verify: bool | str = True) -> requests.Session:
    """A session for a server of the site: the key, no proxy and no netrc of the environment.

    Args:
        verify: whether to check certificates, or a CA bundle's path.
    """
    session = requests.Session()
    session.trust_env = False
    session.verify = verify
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    return session


def said(response: requests.Response) -> str:
    """A failed answer in a few words."""
    text = " ".join(response.text.split())[:200]
    return (
        f"{response.status_code} {response.reason}: {text}"
        if text
        else (f"{response.status_code} {response.reason}")
    )


def model_ids(response: requests.Response) -> list[str]:
    """The ids of a /v1/models answer; empty when it is none."""
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def completion_body(model_id: str, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy /v1/completions request."""
    return {
        "model": model_id,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }


def stream_events(response: requests.Response) -> Iterator[str]:
    """The data of each server-sent event of a streamed completion, ``[DONE]`` included."""
    for line in response.iter_lines(chunk_size=None):
        if line.startswith(b"data:"):
            yield line[5:].strip().decode(errors="replace")


def event_choice(event: str) -> dict[str, Any]:
    """The first choice of an event, empty for events without one.

    Raises:
        ValueError: the event reports an error or is no JSON.
    """
    data = json.loads(event)
    if not isinstance(data, dict) or "error" in data:
        raise ValueError(f"the stream reports: {event[:200]}")
    choices = data.get("choices") or [{}]
    return dict(choices[0])


def _not_ready(session: requests.Session, url: str, model_id: str, patience_s: float) -> str | None:
    """None when the server is ready, else what is missing. A completion gets ``patience_s``."""
    try:
        health = session.get(f"{url}/health", timeout=_REQUEST_S)
        if health.status_code != 200:
            return f"/health: {said(health)}"
        models = session.get(f"{url}/v1/models", timeout=_REQUEST_S)
        if model_id not in model_ids(models):
            return f"/v1/models has no {model_id!r}: {said(models)}"
        body = completion_body(model_id, _PROMPT, 16)
        answer = session.post(f"{url}/v1/completions", json=body, timeout=patience_s)
        if answer.status_code != 200:
            return f"/v1/completions: {said(answer)}"
        text = answer.json()["choices"][0]["text"]
    except requests.RequestException as error:
        return f"no answer yet ({type(error).__name__})"
    except (ValueError, KeyError, IndexError, TypeError):
        return f"/v1/completions: not a completion: {said(answer)}"
    return None if has_text(text) else f"/v1/completions: an empty completion: {text!r}"


def _alive() -> str | None:
    return None


def _no_line() -> str:
    return ""


def wait_ready(
    url: str,
    model_id: str,
    timeout_s: float,
    api_key: str | None = None,
    is_dead: Callable[[], str | None] = _alive,
    progress: Callable[[str], None] = print,
    last_line: Callable[[], str] = _no_line,
) -> float:
    """Wait until /health is 200, the id is in /v1/models and one completion has text.

    Args:
        is_dead: why the server is over, None while it lives.
        progress: gets a line at least every 10 s while the server answers nothing.
        last_line: the newest line of the server's log, for progress and time-out.

    Returns:
        Seconds waited.

    Raises:
        CheckFailed: the server is over or not ready in time, with its own words.
    """
    began = shown = time.monotonic()
    with open_session(api_key) as session:
        while True:
            with ThreadPoolExecutor(1) as pool:
                patience_s = max(_REQUEST_S, began + timeout_s - time.monotonic())
                asked = pool.submit(_not_ready, session, url.rstrip("/"), model_id, patience_s)
                while not wait([asked], timeout=PROGRESS_S).done:
                    _raise_if_dead(is_dead)
                    progress(_waiting(began, model_id, "its first completion", last_line()))
                missing = asked.result()
            now = time.monotonic()
            if missing is None:
                progress(f"{model_id} ready after {now - began:.0f} s")
                return now - began
            _raise_if_dead(is_dead)
            if now - began >= timeout_s:
                log = last_line()
                raise CheckFailed(
                    f"{url}: not ready after {timeout_s:g} s: {missing}"
                    + (f"; its last log line: {log}" if log else "")
                )
            if now - shown >= PROGRESS_S:
                progress(_waiting(began, model_id, missing, last_line()))
                shown = now
            time.sleep(_POLL_S)


def _waiting(began: float, model_id: str, missing: str, log: str) -> str:
    line = f"{model_id} not ready after {time.monotonic() - began:.0f} s: {missing}"
    return f"{line}; log: {log}" if log else line


def _raise_if_dead(is_dead: Callable[[], str | None]) -> None:
    reason = is_dead()
    if reason is not None:
        raise CheckFailed(reason)


# --- warm-up ------------------------------------------------------------------------------------


def batch_sizes(concurrency: int) -> list[int]:
    """1, 2, 4, ... and ``concurrency`` itself; none for 0."""
    sizes: list[int] = []
    size = 1
    while size < concurrency:
        sizes.append(size)
        size *= 2
    return [*sizes, concurrency] if concurrency > 0 else []


def warm_up(
    url: str,
    model_id: str,
    concurrency: int,
    api_key: str | None = None,
    is_dead: Callable[[], str | None] = _alive,
    progress: Callable[[str], None] = print,
) -> None:
    """Send batches of 1, 2, 4, ... ``concurrency`` concurrent streams.

    A fresh server compiles kernels for each batch shape it meets: on an H200 the first 16 streams
    waited 27 s for their first token. Better now than in front of users.

    Raises:
        CheckFailed: the server is over, or an answer failed.
    """
    for size in batch_sizes(concurrency):
        began = time.monotonic()
        with ThreadPoolExecutor(size) as pool:
            streams = [
                pool.submit(_stream_once, url.rstrip("/"), model_id, _prompt(size, index), api_key)
                for index in range(size)
            ]
            _wait_for(streams, f"warm-up with {size} streams", began, is_dead, progress)
        for stream in streams:
            failure = stream.result()
            if failure is not None:
                raise CheckFailed(f"{url}: warm-up with {size} streams: {failure}")
        progress(f"warm-up: {size} streams in {time.monotonic() - began:.1f} s")


def _wait_for(
    futures: list[Future[str | None]],
    what: str,
    began: float,
    is_dead: Callable[[], str | None],
    progress: Callable[[str], None],
) -> None:
    while wait(futures, timeout=PROGRESS_S).not_done:
        _raise_if_dead(is_dead)
        progress(f"{what}: {time.monotonic() - began:.0f} s")


def _prompt(batch: int, index: int) -> str:
    """Prompts of 8 to 64 words; none begins like another, so that no prefix cache spares work."""
    words = 8 * 2 ** (index % 4)
    return f"{batch}.{index}: " + " ".join(f"word{number}" for number in range(words))


def _stream_once(url: str, model_id: str, prompt: str, api_key: str | None) -> str | None:
    """Read one streamed completion to its end; returns what failed."""
    body = completion_body(model_id, prompt, 16, stream=True)
    try:
        with open_session(api_key) as session:
            answer = session.post(
                f"{url}/v1/completions", json=body, stream=True, timeout=_WARM_UP_S
            )
            if answer.status_code != 200:
                return said(answer)
            events = list(stream_events(answer))
    except requests.RequestException as error:
        return f"no answer ({type(error).__name__})"
    return None if events and events[-1] == "[DONE]" else "the stream broke off"


# --- the marker of a finished wait --------------------------------------------------------------


def write_marker(path: Path, unit: Unit, model_id: str) -> None:
    """Note that this start of ``unit`` is ready and warm, for later cheap checks."""
    marker = {
        "invocation": unit.invocation,
        "model": model_id,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(marker) + "\n", encoding="utf-8")
    beside.replace(path)


def why_not_still_ready(path: Path, unit: Unit, url: str, model_id: str) -> str | None:
    """None when the marker is of the unit's present start and /health is 200, else why not."""
    state = unit.state()
    if state.active != "active":
        return f"{unit.name} is {state.active or 'unknown'}"
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        noted = (marker["invocation"], marker["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path}: no marker of a finished wait"
    if not state.invocation or noted != (state.invocation, model_id):
        return f"{unit.name} was started since, or serves another model"
    try:
        with open_session(None) as session:
            health = session.get(f"{url.rstrip('/')}/health", timeout=_REQUEST_S)
    except requests.RequestException as error:
        return f"{url}/health: no answer ({type(error).__name__})"
    return None if health.status_code == 200 else f"{url}/health: {said(health)}"

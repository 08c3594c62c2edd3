"""Clients of the served model, for the end-to-end tests."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

import requests
from fleet import url


def complete(base: str, key: str | None = None, tokens: int = 8) -> requests.Response:
    """One completion through the proxy at ``base``."""
    return requests.post(
        f"{base}/v1/completions",
        json={"model": "tiny-llama", "prompt": "The quick", "max_tokens": tokens},
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=120,
    )


def serves(host: str) -> bool:
    """Whether a host's proxy answers with a completion now."""
    try:
        return complete(url(host)).status_code == 200
    except requests.RequestException:
        return False


@dataclass
class Stream:
    """A streamed completion in a thread of its own."""

    base: str
    tokens: int
    pieces: int = 0
    finish: str | None = None
    done: bool = False
    error: str | None = None
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Read the stream to its end."""
        body = {
            "model": "tiny-llama",
            "prompt": "The quick",
            "max_tokens": self.tokens,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            with requests.post(
                f"{self.base}/v1/completions", json=body, stream=True, timeout=120
            ) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self._take(line.decode())
        except requests.RequestException as error:
            self.error = str(error)
        self.started.set()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.pieces += 1
            self.started.set()
            choices = json.loads(line[6:]).get("choices") or [{}]
            self.finish = choices[0].get("finish_reason") or self.finish


def open_streams(base: str, count: int, tokens: int) -> list[tuple[Stream, threading.Thread]]:
    """Start ``count`` streams and return once each has its first piece."""
    pairs = []
    for _ in range(count):
        stream = Stream(base, tokens)
        thread = threading.Thread(target=stream.run, daemon=True)
        thread.start()
        pairs.append((stream, thread))
    for stream, _ in pairs:
        assert stream.started.wait(60), "a stream did not start"
    return pairs

#!/usr/bin/python3
"""Stands for vLLM on a host too small for it: `serve DIRECTORY --config FILE`, constant answers."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LINES = Path(sys.argv[sys.argv.index("--config") + 1]).read_text().splitlines()
OPTIONS = dict(line.split(": ", 1) for line in LINES if ": " in line)
MODEL = OPTIONS["served-model-name"]
WORDS = ("Paris", " is", " a", " city")


class Handler(BaseHTTPRequestHandler):
    """Answers as an OpenAI-compatible server with a model that says one thing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path in ("/health", "/v1/models"):
            self._answer({"data": [{"id": MODEL}]})
        else:
            self._answer({}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._answer({}, 404)
        elif body.get("stream"):
            events = [*({"choices": [{"text": word}]} for word in WORDS)]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            self._send((text + "data: [DONE]\n\n").encode(), 200, "text/event-stream")
        else:
            self._answer({"choices": [{"text": "".join(WORDS), "finish_reason": "stop"}]})

    def _answer(self, answer: "dict[str, Any]", status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), status, "application/json")

    def _send(self, content: bytes, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    address = (OPTIONS["host"].strip("'\""), int(OPTIONS["port"]))
    ThreadingHTTPServer(address, Handler).serve_forever()

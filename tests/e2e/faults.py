"""Model sources that misbehave, as real HTTP servers on the lab's bridge."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lab.site import GATEWAY

BAD = "model-00002-of-00003.safetensors"
"""The file that the faulty sources give wrong; the others come right."""


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    fault: str
    requests: list[str]

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.requests.append(f"{name} {self.headers.get('Range', '-')}")
        content = (self.folder / name).read_bytes()
        if self.fault == "slow":
            self._slowly(content)
            return
        if name != BAD or self.fault == "none":
            self._answer(200, content)
        elif self.fault == "missing":
            self._answer(404, b"no such file")
        elif self.fault == "page":
            self._answer(200, b"<!DOCTYPE html><html>please log in</html>", "text/html")
        elif self.fault == "truncated":
            self._answer(200, content[:-128])
        else:
            self._answer(200, content[:-4096] + bytes(4096))  # the right length, wrong bytes

    def _answer(self, code: int, content: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _slowly(self, content: bytes) -> None:
        start = 0
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            start = int(asked[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", '"fixed"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        for offset in range(start, len(content), 32768):
            self.wfile.write(content[offset : offset + 32768])
            time.sleep(0.1)

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""


@contextmanager
def source(folder: Path, fault: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a model's ``folder`` with a ``fault``: none, missing, page, truncated, wrong or slow.

    Yields:
        The base URL and the list of requests, one line each: file and Range header.
    """
    seen: list[str] = []
    handler = type("Handler", (_Handler,), {"folder": folder, "fault": fault, "requests": seen})
    server = ThreadingHTTPServer((GATEWAY, 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{GATEWAY}:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()

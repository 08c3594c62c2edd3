"""A real HTTP server on 127.0.0.1 with byte ranges, ETags and, on demand, every fault."""

from __future__ import annotations

import ssl
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

HTML = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>\n"
_PIECE = 64 * 1024


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""


Answer = Callable[["Handler"], None]
"""Answers one request."""


class Running(ThreadingHTTPServer):
    """A server on a free port, in threads, for the time of a ``with``; ``owner`` says of what."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: Any, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.owner = owner
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the tests."""


class Server:
    """Serves ``files`` (URL path without its first slash -> bytes).

    ``answers[path]`` is a queue of answers that replace the ordinary one, one a request;
    ``always[path]`` replaces it for every request.
    """

    def __init__(
        self, files: dict[str, bytes] | None = None, tls: tuple[Path, Path] | None = None
    ) -> None:
        """``tls``: certificate and key as PEM files."""
        self.files = files or {}
        self.etags: dict[str, str] = {}
        self.answers: dict[str, list[Answer]] = defaultdict(list)
        self.always: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.sent = 0
        """Body bytes of files given to the kernel."""
        self.released = threading.Event()
        """Set at the end, so that stalled answers end with the server."""
        self._lock = threading.Lock()
        self._httpd = Running(self, Handler)
        self._scheme = "https" if tls else "http"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._httpd.socket = context.wrap_socket(self._httpd.socket, server_side=True)

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        return f"{self._scheme}://127.0.0.1:{self._httpd.server_port}"

    def ranges(self) -> list[str | None]:
        """The Range header of every request, in order."""
        return [request.headers.get("range") for request in self.requests]

    def count(self, sent: int) -> None:
        """``sent`` more body bytes left."""
        with self._lock:
            self.sent += sent

    def note(self, request: Request) -> None:
        """Remember a request."""
        with self._lock:
            self.requests.append(request)

    def answer_for(self, path: str) -> Answer:
        """The answer whose turn it is."""
        with self._lock:
            if self.answers[path]:
                return self.answers[path].pop(0)
        return self.always.get(path, serve_file)

    def __enter__(self) -> Server:
        self._httpd.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.released.set()
        self._httpd.__exit__()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> Server:
        """The server with files and faults."""
        return cast(Server, cast(Running, self.server).owner)

    def do_GET(self) -> None:
        self._answer()

    def do_CONNECT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.lstrip("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_body = body
        self.owner.note(Request(self.command, path, headers, body))
        self.owner.answer_for(path)(self)

    def file(self) -> bytes | None:
        """The bytes of the path that is asked for."""
        return self.owner.files.get(self.path.lstrip("/"))

    def start(self, status: int, **headers: str | int) -> None:
        """Send status and headers; ``_`` in a name stands for ``-``."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def send(self, body: bytes) -> None:
        """Send body bytes and count them."""
        for at in range(0, len(body), _PIECE):
            piece = body[at : at + _PIECE]
            self.wfile.write(piece)
            self.owner.count(len(piece))

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _span(handler: Handler) -> tuple[int, int | None] | None:
    """First and last byte of the range that is asked for, if it may be answered."""
    asked = handler.headers.get("Range")
    etag = handler.owner.etags.get(handler.path.lstrip("/"))
    condition = handler.headers.get("If-Range")
    if asked is None or (condition is not None and condition != etag):
        return None
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return int(first), int(last) if last else None


def _start_file(handler: Handler, body: bytes) -> bytes:
    """Send the headers of an ordinary answer; returns the bytes to follow."""
    etag = handler.owner.etags.get(handler.path.lstrip("/"))
    extra: dict[str, str | int] = {"ETag": etag} if etag else {}
    asked = _span(handler)
    if asked is None:
        handler.start(200, Content_Length=len(body), Accept_Ranges="bytes", **extra)
        return body
    start, last = asked
    if start >= len(body):
        handler.start(416, Content_Range=f"bytes */{len(body)}", Content_Length=0)
        return b""
    part = body[start:] if last is None else body[start : last + 1]
    span = f"bytes {start}-{start + len(part) - 1}/{len(body)}"
    handler.start(206, Content_Length=len(part), Content_Range=span, **extra)
    return part


def serve_file(handler: Handler) -> None:
    """The ordinary answer: the file, or the rest of it, or 404."""
    body = handler.file()
    if body is None:
        status(404)(handler)
    else:
        handler.send(_start_file(handler, body))


def status(code: int, body: bytes = b"sorry\n", **headers: str | int) -> Answer:
    """An answer with this status and body."""

    def answer(handler: Handler) -> None:
        handler.start(code, Content_Length=len(body), **headers)
        handler.wfile.write(body)

    return answer


def redirect(url: str) -> Answer:
    """302 to ``url``."""
    return status(302, b"", Location=url)


def redirect_with_a_body_without_end(url: str) -> Answer:
    """302 to ``url``, and bytes for as long as somebody takes them."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.start(302, Location=url)
        while not handler.owner.released.is_set():
            handler.send(bytes(_PIECE))

    return answer


def head_without_end(start: bytes, line: bytes) -> Answer:
    """``start``, then ``line`` again and again, never silent for long, and never a body."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(start)
        while not handler.owner.released.wait(0.02):
            handler.wfile.write(line)

    return answer


def silent(handler: Handler) -> None:
    """Not a byte."""
    handler.close_connection = True
    handler.owner.released.wait(120)


def raw(text: bytes) -> Answer:
    """These bytes and the end of the connection."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(text)

    return answer


def cut_after(count: int) -> Answer:
    """Announces everything and breaks the connection behind ``count`` bytes."""

    def answer(handler: Handler) -> None:
        handler.send(_start_file(handler, handler.file() or b"")[:count])
        handler.close_connection = True

    return answer


def ignoring_ranges(handler: Handler) -> None:
    """The whole file, whatever range was asked for."""
    body = handler.file() or b""
    handler.start(200, Content_Length=len(body))
    handler.send(body)


def unannounced(body: bytes, count: int | None = None) -> Answer:
    """``body`` without its length, ended by the end of the connection."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.start(200, Connection="close")
        handler.send(body[:count])

    return answer


def chunked(body: bytes) -> Answer:
    """``body`` in HTTP chunks, so that its length is not announced."""

    def answer(handler: Handler) -> None:
        handler.start(200, Transfer_Encoding="chunked")
        for at in range(0, len(body), 1000):
            piece = body[at : at + 1000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.owner.count(len(piece))
        handler.wfile.write(b"0\r\n\r\n")

    return answer


def overflowing(body: bytes, announced: int) -> Answer:
    """Announces ``announced`` bytes and sends more on the same connection."""

    def answer(handler: Handler) -> None:
        handler.start(200, Content_Length=announced)
        handler.send(body)

    return answer


def stalled_after(count: int) -> Answer:
    """Announces everything, sends ``count`` bytes, then nothing and no end."""

    def answer(handler: Handler) -> None:
        handler.send(_start_file(handler, handler.file() or b"")[:count])
        handler.wfile.flush()
        handler.owner.released.wait(60)
        handler.close_connection = True

    return answer


def trickling(handler: Handler) -> None:
    """One byte now and then: never silent, never done."""
    handler.close_connection = True
    for byte in _start_file(handler, handler.file() or b""):
        handler.send(bytes([byte]))
        handler.wfile.flush()
        if handler.owner.released.wait(0.02):
            return


def slow(pause_s: float) -> Answer:
    """The ordinary answer, with a pause behind every piece."""

    def answer(handler: Handler) -> None:
        body = _start_file(handler, handler.file() or b"")
        for at in range(0, len(body), _PIECE):
            handler.send(body[at : at + _PIECE])
            if handler.owner.released.wait(pause_s):
                return

    return answer

"""Asks web servers for texts, sizes, byte ranges and files, with one line for what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import sleep
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

from fp8fleet.client import (
    Client,
    Unreachable,
    Untrusted,
    Unusable,
    reason_of,
    refused_login,
    retry_after,
    root_cause,
)
from fp8fleet.errors import CheckFailed
from fp8fleet.fetch import Reporter
from fp8fleet.headers import what_instead
from fp8fleet.outside import load_json, whole_number
from fp8fleet.tokens import Origin, origin_of

_CHUNK = 1 << 20
_MAX_TEXT = 64 << 20
"""Bytes of a listing or a config.json; more is not one."""
_CONNECT_S = 15.0
_SILENT_S = 60.0


class NoRanges(Exception):
    """The server answers a request for some bytes with the whole file."""


class Refused(CheckFailed):
    """The server has answered, but not with what was asked for."""

    def __init__(
        self, message: str, status: int, code: str | None = None, login: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """X-Error-Code, where the server sends one."""
        self.login = login
        """What is the matter with the token; None: none was sent, or another answer."""


class _Broken(CheckFailed):
    """A connection broke within a body."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url}: the connection broke: {why}")
        self.why = why


class Web:
    """A client for a few addresses and what they redirect to.

    Proxies and authorities come from the environment (HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE).
    """

    def __init__(
        self,
        reporter: Reporter,
        token: str | None = None,
        trusted: Origin | None = None,
        retries: int = 4,
        backoff_s: float = 1.0,
    ) -> None:
        """
        Args:
            reporter: is told of waits and downloads.
            token: bearer token.
            trusted: who gets the token; it does not go to where that redirects.
            retries: tries after the first for 429, 5xx and broken connections.
            backoff_s: the first wait, doubled from wait to wait.

        Raises:
            OperatorError: REQUESTS_CA_BUNDLE holds no authorities.
        """
        self._reporter = reporter
        self._retries = retries
        self._backoff_s = backoff_s
        self._trusted = trusted
        self._bearer = Client(token, _CONNECT_S, _SILENT_S)
        self._plain = Client(None, _CONNECT_S, _SILENT_S)

    def text(self, url: str) -> str:
        """A text, such as a list of checksums.

        Raises:
            CheckFailed: it cannot be had, is too large, an HTML page or not UTF-8.
        """
        body, _ = self._whole(url, {}, _MAX_TEXT)
        foreign = what_instead(body)
        if foreign is not None:
            raise CheckFailed(f"{url}: answers with {foreign[1]}: check the address and the login")
        try:
            return body.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise CheckFailed(f"{url}: answers with what is not UTF-8 text") from None

    def json(self, url: str) -> tuple[Any, str | None]:
        """A JSON document, and the URL of the next page where its Link header names one.

        Raises:
            CheckFailed: it cannot be had or is not JSON.
        """
        body, response = self._whole(url, {}, _MAX_TEXT)
        try:
            return load_json(body), response.links.get("next", {}).get("url")
        except ValueError:
            what = (what_instead(body) or ("", "what is not JSON"))[1]
            raise CheckFailed(
                f"{url}: answers with {what}: is this the address of an API, and not of a page?"
            ) from None

    def size(self, url: str) -> int:
        """Bytes of a file, from HEAD or, where that does not say it, from a range of one byte.

        Raises:
            CheckFailed: the server does not say it.
        """
        try:
            with self._get("HEAD", url) as response:
                length = whole_number(response.headers.get("Content-Length"))
        except Refused as refused:
            # Some servers and signed addresses allow GET only.
            if refused.status not in (403, 405, 501):
                raise
            length = None
        if length is None:
            with self._get("GET", url, {"Range": "bytes=0-0"}) as response:
                named = "Content-Length" if response.status_code == 200 else "Content-Range"
                length = whole_number(response.headers.get(named, "").rpartition("/")[2])
        if length is None:
            raise CheckFailed(f"{url}: the server does not tell the file's size")
        return length

    def read_range(self, url: str, start: int, count: int) -> bytes:
        """``count`` bytes of a file from ``start`` on.

        Raises:
            NoRanges: the server sends the whole file.
            CheckFailed: it cannot be had.
        """
        if not count:
            return b""
        asked = {"Range": f"bytes={start}-{start + count - 1}"}
        body, response = self._whole(url, asked, count)
        span = response.headers.get("Content-Range", "")
        if not re.match(rf"bytes {start}-\d+/", span):
            raise CheckFailed(f"{url}: asked for byte {start}, got {span!r}")
        return body

    def download(self, url: str, label: str, size: int) -> Iterator[bytes]:
        """A file as it arrives, with progress.

        Raises:
            CheckFailed: it cannot be had, or is not as long as announced.
        """
        outcome = "not read"
        self._reporter.begin(label, size, 0)
        try:
            with self._get("GET", url) as response:
                received = 0
                for chunk in self._body(response, url, size):
                    received += len(chunk)
                    self._reporter.advance(label, len(chunk))
                    yield chunk
            if received != size:
                raise CheckFailed(f"{url}: sent {received} bytes, its list says {size}")
            outcome = "read"
        finally:
            self._reporter.end(label, outcome)

    def _whole(
        self, url: str, headers: dict[str, str], most: int
    ) -> tuple[bytes, requests.Response]:
        """A body of ``most`` bytes at most, asked for again where the connection breaks."""
        for attempt in range(self._retries + 1):
            with self._get("GET", url, headers) as response:
                if "Range" in headers and response.status_code != 206:
                    raise NoRanges
                try:
                    return b"".join(self._body(response, url, most)), response
                except _Broken as broken:
                    if attempt == self._retries:
                        raise
                    self._wait(url, broken.why, attempt, None)
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _body(response: requests.Response, url: str, most: int) -> Iterator[bytes]:
        """The body in pieces; refused as soon as it is longer than ``most`` bytes."""
        received = 0
        try:
            for chunk in response.iter_content(_CHUNK):
                received += len(chunk)
                if received > most:
                    raise CheckFailed(f"{url}: sends more than the {most} bytes expected")
                yield chunk
        except requests.RequestException as error:
            raise _Broken(url, root_cause(error)) from None

    def _get(
        self, method: str, url: str, headers: dict[str, str] | None = None
    ) -> requests.Response:
        """Ask, again after a while where the server or the connection fails for the moment."""
        client = self._bearer if origin_of(url) == self._trusted else self._plain
        for attempt in range(self._retries + 1):
            try:
                response = client.ask(method, url, headers)
            except Untrusted as error:
                raise CheckFailed(
                    f"{url}: {error}; a site's own authority needs REQUESTS_CA_BUNDLE"
                ) from None
            except Unusable as error:
                raise CheckFailed(f"{url}: {error}") from None
            except Unreachable as error:
                if attempt == self._retries:
                    raise CheckFailed(f"{url}: {error}") from None
                self._wait(url, str(error), attempt, None)
                continue
            if response.status_code in (200, 206):
                return response
            response.close()
            refused = _refused(url, response)
            if response.status_code not in (408, 429) and response.status_code < 500:
                raise refused
            if attempt == self._retries:
                raise refused
            self._wait(url, reason_of(response), attempt, retry_after(response))
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, url: str, why: str, attempt: int, asked_s: float | None) -> None:
        seconds = min(60.0, max(self._backoff_s * 2**attempt, asked_s or 0.0))
        self._reporter.note(f"{url}: {why}: next try in {seconds:g} s")
        sleep(seconds)


def _refused(url: str, response: requests.Response) -> Refused:
    status = response.status_code
    parts = urlsplit(response.url)
    where = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    via = "" if where == url.partition("?")[0] else f" (from {where})"
    login = refused_login(response)
    message = f"{url}: {reason_of(response)}{via}" + (f": {login}" if login else "")
    sent = "Authorization" in response.request.headers
    return Refused(message, status, response.headers.get("X-Error-Code"), login if sent else None)

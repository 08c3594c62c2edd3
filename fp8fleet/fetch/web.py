"""Web servers as origins: ranges, versions, stalls, and which answers are worth another try."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit, urlunsplit

import requests
import urllib3

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
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import Body, Interrupted, Refused
from fp8fleet.outside import is_header_value, whole_number

_CHUNK = 1 << 20


class HttpOrigin:
    """A web server, with byte ranges where it has them."""

    def __init__(self, base: str, client: Client, options: FetchOptions) -> None:
        self.name = base
        self._client = client
        self._options = options

    def open(
        self, path: str, offset: int, validator: str | None, length: int | None = None
    ) -> Body:
        """See `Origin.open`."""
        headers = {}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        if offset and validator:
            headers["If-Range"] = validator
        response = self._get(f"{self.name}/{quote(path)}", headers)
        try:
            _raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise Refused("a compressed answer, though none was asked for")
            start, total = 0, whole_number(response.headers.get("Content-Length"))
            if response.status_code == 206 and _continues(response, offset, validator):
                start, total = offset, _content_range(response)[1]
            elif response.status_code != 200:
                return self._open_from_zero(path, offset, response)
        except BaseException:
            response.close()
            raise
        where = _without_query(response.url)
        return Body(
            where, start, total, _validator(response), self._chunks(response), response.close
        )

    def _open_from_zero(self, path: str, offset: int, response: requests.Response) -> Body:
        """The range was not answered, or with another range or version: ask for all."""
        if not offset:
            raise Refused(f"{reason_of(response)} to a plain request")
        response.close()
        return self.open(path, 0, None)

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        try:
            return self._client.ask("GET", url, headers)
        except Untrusted as error:
            raise Refused(f"{error}; a site's own authority needs --ca-bundle") from None
        except Unusable as error:
            raise Refused(str(error)) from None
        except Unreachable as error:
            raise Interrupted(str(error)) from None

    def _chunks(self, response: requests.Response) -> Iterator[bytes]:
        """The body as it arrives; a silent or a trickling server is cut off."""
        stall_s, least = self._options.stall_s, self._options.least_bytes_per_s
        began, count = time.monotonic(), 0
        try:
            while chunk := response.raw.read1(_CHUNK, decode_content=False):
                yield chunk
                count += len(chunk)
                elapsed = time.monotonic() - began
                if elapsed >= stall_s:
                    if count < least * elapsed:
                        raise Interrupted(f"stalled: {count} bytes in {elapsed:.0f} s")
                    began, count = time.monotonic(), 0
        except urllib3.exceptions.ReadTimeoutError:
            raise Interrupted(f"stalled: no byte for {stall_s:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Interrupted(f"connection broken: {root_cause(error)}") from None


def _raise_for_status(response: requests.Response) -> None:
    status = response.status_code
    said = reason_of(response)
    if status in (200, 206, 416):
        return
    if status in (408, 425, 429) or status >= 500:
        raise Interrupted(said, retry_after(response))
    login = refused_login(response)
    raise Refused(f"{said}: {login}" if login else said)


def _content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """First byte and whole size of ``Content-Range: bytes FIRST-LAST/SIZE`` (RFC 9110, 14.4)."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, size = rest.partition("/")
    first = span.partition("-")[0] if unit == "bytes" else None
    return whole_number(first), whole_number(size)


def _continues(response: requests.Response, offset: int, validator: str | None) -> bool:
    """Whether a 206 answer is the range and the version that were asked for."""
    now = _validator(response)
    same_version = validator is None or now is None or now == validator
    return same_version and _content_range(response)[0] == offset


def _validator(response: requests.Response) -> str | None:
    """What If-Range may name: a strong ETag, else the date (RFC 9110, 13.1.5)."""
    etag = response.headers.get("ETag")
    found = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
    return found if is_header_value(found) else None


def _without_query(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

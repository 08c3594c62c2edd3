"""Web servers as origins: ranges, redirects, stalls, and which answers are worth another try."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit, urlunsplit

import requests
import urllib3

from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import Body, Interrupted, Refused

_CHUNK = 1 << 20


class HttpOrigin:
    """A web server, with byte ranges where it has them."""

    def __init__(self, base: str, session: requests.Session, options: FetchOptions) -> None:
        self.name = base
        self._session = session
        self._options = options

    def open(
        self, path: str, offset: int, validator: str | None, length: int | None = None
    ) -> Body:
        """See `Origin.open`."""
        # Compressed answers have other offsets than the file.
        headers = {"Accept-Encoding": "identity"}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        if offset and validator:
            headers["If-Range"] = validator
        response = self._get(f"{self.name}/{quote(path)}", headers)
        try:
            _raise_for_status(response)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise Refused("a compressed answer, though none was asked for")
            start, total = 0, _integer(response.headers.get("Content-Length"))
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
            raise Refused(f"{response.status_code} {response.reason} to a plain request")
        response.close()
        return self.open(path, 0, None)

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        options = self._options
        proxies = {"http": options.proxy, "https": options.proxy} if options.proxy else None
        try:
            return self._session.get(
                url,
                headers=headers,
                stream=True,
                timeout=(options.connect_timeout_s, options.stall_s),
                proxies=proxies,
                # Given with each request: a session's own setting loses against the environment.
                verify=str(options.ca_bundle) if options.ca_bundle else True,
            )
        except requests.exceptions.SSLError as error:
            why = f"TLS: {_root_cause(error)}; a site's own authority needs --ca-bundle"
            raise Refused(why) from None
        except requests.exceptions.TooManyRedirects:
            raise Refused("redirects without end") from None
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise Refused(f"redirects to what is no web address: {error}") from None
        except requests.exceptions.RequestException as error:
            raise Interrupted(_root_cause(error)) from None

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
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Interrupted(f"connection broken: {_root_cause(error)}") from None


def _raise_for_status(response: requests.Response) -> None:
    status = response.status_code
    said = f"{status} {response.reason}".strip()
    if status in (200, 206, 416):
        return
    if status in (408, 425, 429) or status >= 500:
        raise Interrupted(said, _retry_after(response))
    if status in (401, 403, 407):
        raise Refused(f"{said}: check the token file and the proxy's login")
    raise Refused(said)


def _retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks for: a number or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("Retry-After")
    seconds = _integer(text)
    if seconds is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(text or "").timestamp() - time.time())
    except ValueError:
        return None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """First byte and whole size of ``Content-Range: bytes FIRST-LAST/SIZE`` (RFC 9110, 14.4)."""
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, size = rest.partition("/")
    return (_integer(span.split("-")[0]) if unit == "bytes" else None), _integer(size)


def _continues(response: requests.Response, offset: int, validator: str | None) -> bool:
    """Whether a 206 answer is the range and the version that were asked for."""
    now = _validator(response)
    same_version = validator is None or now is None or now == validator
    return same_version and _content_range(response)[0] == offset


def _validator(response: requests.Response) -> str | None:
    """What If-Range may name: a strong ETag, else the date (RFC 9110, 13.1.5)."""
    etag = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return etag
    return response.headers.get("Last-Modified")


def _without_query(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))


def _root_cause(error: BaseException) -> str:
    """The innermost reason of a stack of wrapped errors, on one line."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or seen.__cause__ or next(iter(seen.args), None)
        if not isinstance(inner, BaseException):
            break
        seen = inner
    if isinstance(seen, ssl.SSLError):
        return getattr(seen, "verify_message", "") or str(seen.reason or seen)
    text = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
    return " ".join(text.split()) or type(seen).__name__


class Bearer(requests.auth.AuthBase):
    """The token, or nothing: either way requests then leaves ~/.netrc alone."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

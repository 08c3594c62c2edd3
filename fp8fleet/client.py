"""Asks web servers, which may answer anything: redirects, slow heads, addresses that are none."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import requests
import urllib3

from fp8fleet.errors import OperatorError
from fp8fleet.outside import check_web_address, plain, whole_number

_MOST_REDIRECTS = 10


class Unusable(Exception):
    """The answer is no use, and asking again gives the same."""


class Untrusted(Unusable):
    """TLS: the server does not prove who it is."""


class Unreachable(Exception):
    """No answer came; one may come later."""


class Client:
    """Connections to web servers, through the proxies of the environment or one that is given."""

    def __init__(
        self,
        token: str | None,
        connect_s: float,
        silent_s: float,
        connections: int = 10,
        proxy: str | None = None,
        ca_bundle: Path | None = None,
    ) -> None:
        """
        Args:
            token: bearer token, sent to the hosts that are asked, not to where they redirect.
            connect_s: seconds until a connection stands.
            silent_s: seconds without a byte, and for the whole head of an answer.
            connections: kept open to one host.
            proxy: URL for all requests; None: HTTP_PROXY, HTTPS_PROXY and NO_PROXY.
            ca_bundle: PEM file; None: REQUESTS_CA_BUNDLE, else the authorities of `certifi`.

        Raises:
            OperatorError: a proxy or a bundle that is none, with the option or variable.
        """
        if proxy is not None:
            _check_proxy("--proxy", proxy)
        self._proxies = {"http": proxy, "https": proxy} if proxy else None
        self._verify = _authorities(ca_bundle)
        self._token = token
        self._timeout = (connect_s, silent_s)
        self._session = _Session()
        adapter = _Adapter(pool_maxsize=connections)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.close()

    def ask(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> requests.Response:
        """The answer to a request, whatever its status, its body not read yet.

        Redirects are followed; their bodies are not read, and the token does not go to another
        host. Nothing compressed is asked for: it has other offsets than the file.

        Raises:
            Unusable: redirects without end or to what is no web address, a name without proof.
            Unreachable: no whole head of an answer came in time.
            OperatorError: the environment's proxy is none.
        """
        token = self._token
        for _ in range(_MOST_REDIRECTS + 1):
            response = self._ask_once(method, url, headers or {}, token)
            if not response.is_redirect:
                return response
            response.close()
            following = _target(response)
            if self._session.should_strip_auth(url, following):  # type: ignore[no-untyped-call]
                token = None
            url = following
        raise Unusable("redirects without end")

    def _ask_once(
        self, method: str, url: str, headers: Mapping[str, str], token: str | None
    ) -> requests.Response:
        if self._proxies is None:
            _check_environment(url)
        try:
            return self._session.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                auth=_Bearer(token),
                stream=True,
                timeout=self._timeout,
                proxies=self._proxies,
                # Given with each request: a session's own setting loses against the environment.
                verify=self._verify,
            )
        except requests.exceptions.SSLError as error:
            raise Untrusted(f"TLS: {root_cause(error)}") from None
        except requests.exceptions.ReadTimeout:
            raise Unreachable(f"stalled: no answer in {self._timeout[1]:g} s") from None
        except (requests.ConnectionError, requests.Timeout) as error:
            raise Unreachable(root_cause(error)) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise Unusable(root_cause(error)) from None


def refused_login(response: requests.Response) -> str | None:
    """What to do about 401, 403 or 407; None: another answer.

    The request says whether a token was sent: it does not go to every host.
    """
    said = plain(response.headers.get("X-Error-Message", ""))[:200]
    why = f" ({said})" if said else ""
    sent = "Authorization" in response.request.headers
    if response.status_code == 401:
        if sent:
            return f"the token was refused{why}: is it expired or mistyped?"
        return f"needs a token, none was sent{why}: --token env:NAME or file:/PATH, model_token"
    if response.status_code == 403:
        return f"{'the token has no access' if sent else 'no access without a token'}{why}"
    return f"check the proxy's login{why}" if response.status_code == 407 else None


def reason_of(response: requests.Response) -> str:
    """``404 Not Found``, whatever the server says."""
    return plain(f"{response.status_code} {response.reason or ''}".strip())


def retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks for: a number or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("Retry-After", "")
    seconds = whole_number(text)
    if seconds is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def root_cause(error: BaseException) -> str:
    """The innermost reason of a stack of wrapped errors, on one line."""
    seen: BaseException = error
    while True:
        wrapped = (getattr(seen, "reason", None), seen.__cause__, *reversed(seen.args))
        inner = next((one for one in wrapped if isinstance(one, BaseException)), None)
        if inner is None:
            break
        seen = inner
    if isinstance(seen, ssl.SSLError):
        return getattr(seen, "verify_message", "") or str(seen.reason or seen)
    text = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
    if type(seen) is http.client.BadStatusLine:
        text = f"answers with no HTTP: {text[:60]}"
    return plain(" ".join(text.split())[:200]) or type(seen).__name__


def _target(response: requests.Response) -> str:
    """The address that a redirect names."""
    location = response.headers["Location"]
    try:
        # http.client reads headers as Latin-1; what is not ASCII in an address is UTF-8.
        url = urljoin(response.url, location.encode("latin-1").decode())
        check_web_address(url)
    except ValueError as error:
        named = plain(location.partition("?")[0])[:200]
        why = "not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise Unusable(f"redirects to what is no web address: {named!r}: {why}") from None
    return url


def _check_proxy(name: str, value: str) -> None:
    try:
        check_web_address(value)
    except ValueError as error:
        raise OperatorError(
            f"{name}: {error}: write it as http://[USER:PASSWORD@]HOST[:PORT]"
        ) from None


def _check_environment(url: str) -> None:
    """Refuse a proxy of the environment that is none, where ``url`` would be asked through it."""
    found = requests.utils.get_environ_proxies(url)
    proxy = requests.utils.select_proxy(url, found)
    if proxy:
        name = next(f"{scheme}_proxy" for scheme, value in found.items() if value == proxy)
        _check_proxy(name, proxy if "://" in proxy else f"http://{proxy}")


def _authorities(ca_bundle: Path | None) -> str | bool:
    """What `requests` shall trust, loaded once to see whether that works."""
    named = {"--ca-bundle": str(ca_bundle)} if ca_bundle else os.environ
    for name in ("--ca-bundle", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        path = named.get(name)
        if not path:
            continue
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if Path(path).is_dir():
                context.load_verify_locations(capath=path)
            else:
                context.load_verify_locations(cafile=path)
        except ssl.SSLError:
            raise OperatorError(f"{name} {path}: holds no certificates, expected PEM") from None
        except OSError as error:
            raise OperatorError(f"{name} {path}: cannot be read: {error.strerror}") from None
        return path
    return True


class _Session(requests.Session):
    """Follows no redirect by itself: it would read the redirect's body, however long."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


class _Bearer(requests.auth.AuthBase):
    """The token, or nothing: either way requests then leaves ~/.netrc alone."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


# --- the head of an answer in time --------------------------------------------------------------


class _Connection(urllib3.connection.HTTPConnection):
    """The timeout of http.client is for each byte: a server that trickles would be waited for."""

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        with _cut_off(self.sock, self.timeout):
            return super().getresponse()

    def _tunnel(self) -> None:
        with _cut_off(self.sock, self.timeout):
            super()._tunnel()


class _TlsConnection(_Connection, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _Adapter(requests.adapters.HTTPAdapter):
    """Makes its connections of the classes above, also to proxies."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return manager


@contextmanager
def _cut_off(sock: Any, seconds: float | None) -> Iterator[None]:
    """Break the connection after some time; what was read of it until then does not count."""
    assert seconds is not None  # every request has a timeout
    late = threading.Event()
    # TLS within TLS is no socket but has one.
    raw: socket.socket = getattr(sock, "socket", sock)

    def cut() -> None:
        late.set()
        with suppress(OSError):
            raw.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TimeoutError

"""The sources of a run, from their URLs; loads the web client, so only when bytes are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fp8fleet.client import Client
from fp8fleet.errors import OperatorError
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import FileOrigin, Origin
from fp8fleet.fetch.web import HttpOrigin
from fp8fleet.manifest import check_source
from fp8fleet.tokens import origin_of, token_origin


@contextmanager
def open_sources(urls: tuple[str, ...], options: FetchOptions) -> Iterator[list[Origin]]:
    """The origins in the order to try.

    Raises:
        OperatorError: no source; a source, a proxy, a CA bundle or a token that is none, or a token
            for whom it may not be.
    """
    if not urls:
        raise OperatorError("no source to fetch from: give --source or `sources` in the manifest")
    bases = [_checked(url) for url in urls]
    trusted, token = None, None
    if options.token is not None:
        try:
            trusted = token_origin(bases, options.token_for, "--token-for")
        except ValueError as error:
            raise OperatorError(str(error)) from None
        token = options.token.resolve()
    with ExitStack() as clients:
        plain = clients.enter_context(_client(None, options))
        bearer = clients.enter_context(_client(token, options)) if trusted else plain
        yield [
            FileOrigin(base, options.stall_s)
            if base.startswith("file:")
            else HttpOrigin(base, bearer if origin_of(base) == trusted else plain, options)
            for base in bases
        ]


def _client(token: str | None, options: FetchOptions) -> Client:
    return Client(
        token,
        options.connect_timeout_s,
        options.stall_s,
        options.threads,
        options.proxy,
        options.ca_bundle,
    )


def _checked(url: str) -> str:
    try:
        return check_source(url)
    except ValueError as error:
        raise OperatorError(f"source {error}") from None

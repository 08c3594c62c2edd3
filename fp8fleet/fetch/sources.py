"""The sources of a run, from their URLs; loads the web client, so only when bytes are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8fleet.client import Client
from fp8fleet.errors import OperatorError
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import FileOrigin, Origin
from fp8fleet.fetch.web import HttpOrigin
from fp8fleet.manifest import check_source
from fp8fleet.secrets import SecretRef


@contextmanager
def open_sources(urls: tuple[str, ...], options: FetchOptions) -> Iterator[list[Origin]]:
    """The origins in the order to try.

    Raises:
        OperatorError: no source; a source, a proxy, a CA bundle or a token that is none.
    """
    if not urls:
        raise OperatorError("no source to fetch from: give --source or `sources` in the manifest")
    token = None
    if options.token_file is not None:
        token = SecretRef("file", str(options.token_file)).resolve()
    client = Client(
        token,
        options.connect_timeout_s,
        options.stall_s,
        options.threads,
        options.proxy,
        options.ca_bundle,
    )
    with client:
        yield [_origin(url, client, options) for url in urls]


def _origin(url: str, client: Client, options: FetchOptions) -> Origin:
    try:
        base = check_source(url)
    except ValueError as error:
        raise OperatorError(f"source {error}") from None
    if base.startswith("file:"):
        return FileOrigin(base, options.stall_s)
    return HttpOrigin(base, client, options)

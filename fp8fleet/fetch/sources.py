"""The sources of a run, from their URLs; loads the web client, so only when bytes are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests

from fp8fleet.errors import OperatorError
from fp8fleet.fetch.options import FetchOptions
from fp8fleet.fetch.origin import FileOrigin, Origin
from fp8fleet.fetch.web import Bearer, HttpOrigin
from fp8fleet.manifest import check_source
from fp8fleet.secrets import SecretRef


@contextmanager
def open_sources(urls: tuple[str, ...], options: FetchOptions) -> Iterator[list[Origin]]:
    """The origins in the order to try.

    Raises:
        OperatorError: no source, a bad source, a missing CA bundle or token.
    """
    if not urls:
        raise OperatorError("no source to fetch from: give --source or `sources` in the manifest")
    if options.ca_bundle is not None and not options.ca_bundle.is_file():
        raise OperatorError(f"CA bundle {options.ca_bundle}: no such file")
    token = None
    if options.token_file is not None:
        token = SecretRef("file", str(options.token_file)).resolve()
    with requests.Session() as session:
        session.auth = Bearer(token)
        session.max_redirects = 10
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=options.threads)
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        yield [_origin(url, session, options) for url in urls]


def _origin(url: str, session: requests.Session, options: FetchOptions) -> Origin:
    try:
        base = check_source(url)
    except ValueError as error:
        raise OperatorError(f"source {error}") from None
    if base.startswith("file:"):
        return FileOrigin(base, options.stall_s)
    return HttpOrigin(base, session, options)

"""Decides which web address a bearer token is sent to: one, and none in the clear unless named."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from fp8fleet.manifest import check_source

Origin = tuple[str, str, int]
"""Scheme, host and port (RFC 6454, 4)."""
_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> Origin | None:
    """The origin of an address that `check_source` passed; None: not one of the web."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        return None
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme]


def token_origin(urls: Iterable[str], named: str | None, option: str) -> Origin | None:
    """The one origin of ``urls`` that gets the token.

    Args:
        urls: what is asked, with sources that are no web addresses among them.
        named: the address that the operator says the token is for; it may be plain http.
        option: how the operator names it, for messages.

    Returns:
        None: there is no web address among ``urls``.

    Raises:
        ValueError: the token would go to whom it may not be for, or in the clear.
    """
    origins = list(dict.fromkeys(origin for url in urls if (origin := origin_of(url))))
    if named is not None:
        meant = origin_of(check_source(named))
        if meant not in origins:
            known = " ".join(map(_shown, origins)) or "none of the web"
            raise ValueError(f"{option} {named}: is on none of the sources' hosts: {known}")
        return meant
    if len(origins) > 1:
        raise ValueError(
            f"one token and several hosts ({' '.join(map(_shown, origins))}):"
            f" say with {option} which of them gets it"
        )
    if origins and origins[0][0] == "http" and not _is_loopback(origins[0][1]):
        raise ValueError(
            f"the token would go in the clear to {_shown(origins[0])}: use https, or say with"
            f" {option} {_shown(origins[0])} that it may"
        )
    return origins[0] if origins else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(origin: Origin) -> str:
    scheme, host, port = origin
    written = f"[{host}]" if ":" in host else host
    return f"{scheme}://{written}" + ("" if port == _PORTS[scheme] else f":{port}")

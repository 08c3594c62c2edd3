"""IP addresses and networks in one form, however they were written."""

from __future__ import annotations

import ipaddress

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_network(text: str) -> IPNetwork:
    """A network, or an address as a network of one; IPv4 where IPv6 only wraps it.

    ``::ffff:10.0.0.1`` is 10.0.0.1 (RFC 4291, 2.5.5.2): packets from it carry the IPv4 address.

    Raises:
        ValueError: it is neither, has bits outside its length, or a zone such as ``%eth0``, which
            means something on one host only.
    """
    if "%" in text:
        raise ValueError(f"{text!r} has a zone (%...), which no other host knows")
    network = ipaddress.ip_network(text)
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= 96:
        inner = network.network_address.ipv4_mapped
        if inner is not None:
            return ipaddress.IPv4Network((inner, network.prefixlen - 96))
    return network


def short(network: IPNetwork) -> str:
    """``ADDRESS/BITS``; of a single address the address alone."""
    single = network.prefixlen == network.max_prefixlen
    return str(network.network_address if single else network)

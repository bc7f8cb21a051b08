"""Address of the client behind trusted proxies, from the headers X-Forwarded-For and Forwarded (RFC 7239)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from ...metadata.errors import ConfigError

Network = IPv4Network | IPv6Network

_FOR = re.compile(r'(?:^|[;\s])for="?(\[[^\]"]*\]|[^;,\s"]*)', re.IGNORECASE)


def trusted_networks(given: Sequence[str]) -> tuple[Network, ...]:
    """Return the networks of --trusted-proxy. Raises ConfigError for one that is malformed."""
    try:
        return tuple(map(ip_network, given))
    except ValueError as error:
        raise ConfigError(f"trusted_proxy: {error}; give a network like 10.0.0.0/8, or an address") from None


def client_address(peer: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> str:
    """Return the address that a request came from: the last one that no trusted proxy has.

    `peer` is that of the connection. A header is believed only if a trusted proxy sent it; what stands in it before
    the first other address is the client's own invention.
    """
    if not trusted or not _is_trusted(peer, trusted):
        return peer
    address = peer
    if "X-Forwarded-For" in headers:
        hops = [_address(each) for each in headers["X-Forwarded-For"].split(",")]
    else:
        hops = [_address(found[1]) for each in headers.get("Forwarded", "").split(",") if (found := _FOR.search(each))]
    for hop in reversed(hops):
        if hop is None:
            break
        address = hop
        if not _is_trusted(hop, trusted):
            break
    return address


def _address(text: str) -> str | None:
    """Return an address without its port, None if it is none, such as `unknown`."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return None


def _is_trusted(address: str, trusted: Sequence[Network]) -> bool:
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return any(parsed in network for network in trusted)

"""Address of the client behind trusted proxies, from the headers X-Forwarded-For and Forwarded (RFC 7239)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from ...origins import Network, is_trusted

_FOR = re.compile(r'(?:^|[;\s])for="?(\[[^\]"]*\]|[^;,\s"]*)', re.IGNORECASE)


def client_address(peer: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> str:
    """Return the address that a request came from: the last one that no trusted proxy has.

    `peer` is that of the connection. A header is believed only if a trusted proxy sent it; what stands in it before
    the first other address is the client's own invention.
    """
    if not trusted or not is_trusted(peer, trusted):
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
        if not is_trusted(hop, trusted):
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

"""The client's address behind proxies: believed from trusted ones only, and only as far as they wrote it."""

from __future__ import annotations

import pytest

from baton.router.http.server.forwarded import client_address
from baton.router.origins import trusted_networks

TRUSTED = trusted_networks(("10.0.0.0/8", "::1"))


@pytest.mark.parametrize(
    ("peer", "headers", "address"),
    [
        ("8.8.8.8", {"X-Forwarded-For": "1.1.1.1"}, "8.8.8.8"),
        ("10.0.0.1", {}, "10.0.0.1"),
        ("10.0.0.1", {"X-Forwarded-For": "1.1.1.1, 2.2.2.2, 10.0.0.2"}, "2.2.2.2"),
        ("10.0.0.1", {"X-Forwarded-For": "1.1.1.1, nonsense, 10.0.0.2"}, "10.0.0.2"),
        ("10.0.0.1", {"X-Forwarded-For": "2.2.2.2:443"}, "2.2.2.2"),
        ("::1", {"Forwarded": 'for=1.1.1.1;proto=http, by=x;For="[2001:db8::1]:80"'}, "2001:db8::1"),
        ("10.0.0.1", {"Forwarded": "for=unknown"}, "10.0.0.1"),
        ("10.0.0.1", {"X-Forwarded-For": ""}, "10.0.0.1"),
    ],
)
def test_the_last_untrusted_address_counts(peer: str, headers: dict[str, str], address: str) -> None:
    assert client_address(peer, headers, TRUSTED) == address
    assert client_address(peer, headers, ()) == peer

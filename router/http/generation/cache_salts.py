"""Salts of prefix caches, which keep the caches of tenants, or of keys, apart.

A node matches only prompts of equal salt. The salt is a keyed hash of its owner and of the client's own `cache_salt`.
Without the router's secret nobody can make the salt of another owner. The tenant `default` without a `cache_salt` has
no salt.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from ...waiting.fair_share import DEFAULT, CacheScope
from ..server.access import Caller


class CacheSalts:
    """Salts of one router, or of several that were given the same secret. Without one it is drawn now."""

    def __init__(self, scope: CacheScope, secret: str | None) -> None:
        self._scope = scope
        # a key of any length becomes one of 32 bytes
        self._secret = blake2b(secret.encode(), digest_size=32).digest() if secret else secrets.token_bytes(32)

    def salt(self, caller: Caller, given: str | None) -> str:
        """Return the salt of a caller's prompts. `given`: the client's `cache_salt`."""
        key = caller.digest if self._scope == "key" else b""
        if caller.tenant.name == DEFAULT.name and not key and not given:
            return ""
        return self._hash(b"salt", caller.tenant.name.encode(), key, (given or "").encode()).hex()

    def session(self, caller: Caller, given: str) -> bytes:
        """Return the key of a client's session. Sessions of different owners never meet."""
        key = caller.digest if self._scope == "key" else b""
        return self._hash(b"session", caller.tenant.name.encode(), key, given.encode(errors="replace"))

    def _hash(self, *parts: bytes) -> bytes:
        hashed = blake2b(digest_size=16, key=self._secret)
        for part in parts:  # with its length, so that parts cannot run into each other
            hashed.update(len(part).to_bytes(4, "big") + part)
        return hashed.digest()

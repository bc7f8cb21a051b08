"""Salts of prefix caches, which keep the caches of tenants, or of keys, apart. Sessions, whose requests prefer the same
nodes, are kept apart in the same way.

A node matches only prompts of equal salt. The salt is a keyed hash of its owner and of the client's own `cache_salt`.
Without the router's secret nobody can make the salt of another owner. The tenant `default` without a `cache_salt` has
no salt.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b

from ...waiting.fair_share import DEFAULT, CacheScope
from ..server.access import Caller

MAX_ID = 256  # characters of a session's id; a longer one is no id
HEADERS = (  # with the id of a session; the first that is there counts
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-smg-routing-key",
    "x-litellm-session-id",
    "x-grok-conv-id",
    "session-id",
    "session_id",
)


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


def session_id(headers: Mapping[str, str], prompt_cache_key: str | None) -> str | None:
    """Return the session of a request: a header's, else the body's `prompt_cache_key`. None if there is none."""
    for name in HEADERS:
        given = headers.get(name, "").strip()
        if given:
            return given if len(given) <= MAX_ID else None
    return prompt_cache_key if prompt_cache_key and len(prompt_cache_key) <= MAX_ID else None

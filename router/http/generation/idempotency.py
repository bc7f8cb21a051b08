"""`Idempotency-Key`: a client that repeats a request gets the same text, from whichever router it reaches.

Routers keep no answers. A repeated request is computed again, with the same seed: a hash of the tenant, the key and the
body. The answer names the seed in `x-baton-seed`.
"""

from __future__ import annotations

import hashlib

from aiohttp import web

from ....metadata.errors import RequestError

HEADER = "Idempotency-Key"
SEED_HEADER = "x-baton-seed"
SEED_BITS = 62
MAX_LEN = 255
KEYED_SEED = web.RequestKey("keyed_seed", int)  # only requests with the header have one


def keyed_seed(key: str, tenant: str, body: bytes) -> int:
    """Return the seed (0..2**62 - 1) of a request with this key. `body`: as the client sent it, without compression.
    Raises RequestError for a key that is empty, too long or not printable ASCII."""
    if not 0 < len(key) <= MAX_LEN or not (key.isascii() and key.isprintable()):
        raise RequestError(
            f"header {HEADER} has {len(key)} characters; it must have 1 to {MAX_LEN}, all printable ASCII", param=HEADER
        )
    digest = hashlib.sha256()
    for part in (tenant.encode(), key.encode(), body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest()[:8], "little") >> (64 - SEED_BITS)

"""Opens the disk tier of an engine."""

from __future__ import annotations

import logging
from hashlib import blake2b

import msgspec

from ...metadata.cache.names import PageNames
from ...metadata.logs import size_in_words
from ..engine import Engine
from .disk_thread import DiskThread
from .disk_tier import DiskTier
from .page_files import MAGIC, PageFiles

logger = logging.getLogger(__name__)


def open_disk_tier(engine: Engine, directory: str, num_bytes: int, ttl_s: float) -> None:
    """Give the host tier of an engine files in `directory`, `num_bytes` bytes at most, which are removed if they were
    not used for `ttl_s` seconds. Files of other weights or of another schema are never read. Raises ConfigError if the
    directory is not this user's alone."""
    cache = engine.cache
    tier = cache.tier
    assert tier is not None
    parts = (MAGIC, msgspec.msgpack.encode(engine.schema), *(each.encode() for each in engine.fingerprints if each))
    model = blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=16).digest()
    names = PageNames(model, cache.page_size, cache.lookahead)
    files = PageFiles(directory, model, names, tier.slot_bytes)
    tier.disk = DiskTier(DiskThread(files), names, num_bytes, ttl_s, cache)
    logger.info("disk tier of %s in %s", size_in_words(num_bytes), files.path)

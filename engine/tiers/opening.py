"""Opens the disk tier of an engine."""

from __future__ import annotations

import logging
from hashlib import blake2b

import msgspec

from ...metadata.cache.names import PageNames
from ...metadata.logs import size_in_words
from ..config import EngineConfig
from ..engine import Engine
from .disk_thread import DiskThread
from .disk_tier import DiskTier
from .page_files import MAGIC, PageFiles

logger = logging.getLogger(__name__)


def open_disk_tier(engine: Engine, config: EngineConfig) -> None:
    """Give the host tier of an engine the files that its configuration asks for. Files of other weights, of another
    schema, or of another number of ranks are never read. Raises ConfigError if the directory is not this user's
    alone."""
    cache = engine.cache
    tier, directory, num_bytes = cache.tier, config.disk_cache, int(config.disk_cache_gb * 1e9)
    assert tier is not None and directory is not None
    parts = [MAGIC, msgspec.msgpack.encode(engine.schema), *(each.encode() for each in engine.fingerprints if each)]
    parts += [b"%d ranks" % config.tp] * (config.tp > 1)  # whose parts of a page lie one behind the other
    model = blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=16).digest()
    names = PageNames(model, cache.page_size, cache.lookahead)
    files = PageFiles(directory, model, names, tier.slot_bytes)
    tier.disk = DiskTier(DiskThread(files), names, num_bytes, config.disk_cache_ttl, cache)
    logger.info("disk tier of %s in %s", size_in_words(num_bytes), files.path)

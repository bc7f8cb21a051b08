"""A prefix cache with tiers over pools in host memory, whose pages hold bytes that follow from all tokens up to their
end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.engine.state.cached_node import CachedNode
from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.tiers.disk_thread import DiskThread
from baton.engine.tiers.disk_tier import DiskTier
from baton.engine.tiers.host_copies import HostCopies
from baton.engine.tiers.host_tier import HostTier
from baton.engine.tiers.page_files import PageFiles
from baton.metadata.cache.names import PageNames
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

PAGE = 4
LAYOUT = KvLayout.of(PoolLayout(3, 2, 4, "float32"), PAGE)
INDEX = KvLayout.of(PoolLayout(1, 1, 8, "float32"), PAGE)  # another pool with the same page numbers
WINDOW = KvLayout.of(PoolLayout(2, 1, 4, "float32"), PAGE)  # a pool of tail pages


class Node:
    """The cache, and requests over it. With a `directory` it has a disk tier, too."""

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        *,
        num_tails: int = 0,
        lookahead: int = 0,
        directory: Path | None = None,
        num_file_bytes: int = 1 << 30,
    ) -> None:
        self.num_tails = 2 if num_tails else 0  # that a hit needs
        self.memory = [PageMemory(LAYOUT, num_pages), PageMemory(INDEX, num_pages)]
        if num_tails:
            self.memory.append(PageMemory(WINDOW, num_tails, num_pages))
        tier = HostTier(HostCopies(self.memory, num_slots, num_slots if num_tails else 0))
        self.cache = PrefixCache(PagePool(num_pages, PAGE, num_tails=num_tails), lookahead, tier=tier)
        self.tier = tier
        self.num_computed = 0
        if directory is not None:
            tier.compute_token_s = lambda: 1.0
            names = PageNames(bytes(16), PAGE, lookahead)
            self.files = PageFiles(str(directory), bytes(16), names, tier.slot_bytes)
            tier.disk = self.disk = DiskTier(DiskThread(self.files), names, num_file_bytes, None, self.cache)

    def read(self, page: int) -> bytes:
        return b"".join(pool.pages[:, page - pool.first].tobytes() for pool in self.memory if pool.holds(page))

    def write(self, page: int, text: Sequence[int], salt: str) -> None:
        rng = np.random.default_rng(list(hashlib.sha256(repr((salt, *text)).encode()).digest()))
        for pool in self.memory:
            if pool.holds(page):
                own = pool.pages[:, page - pool.first]
                own[:] = rng.integers(0, 256, own.shape, np.uint8)

    def run(self, text: list[int], salt: str = "") -> int:
        """Compute a text as a request does, and check what it finds. Return how many pages were restored."""
        cache, look = self.cache, self.cache.lookahead
        num_pages = -(-len(text) // PAGE)
        limit = (len(text) - 1) // PAGE
        restored = cache.restore(text, salt, limit, self.num_tails, num_pages=num_pages)
        lease = cache.acquire(text, salt, limit, self.num_tails)
        assert restored == 0 or len(lease.pages) >= restored
        found = len(lease.pages)
        for index, page in enumerate(lease.pages):
            self.check(page, text, index, salt)
        first_tail = max(0, found - self.num_tails)
        for index, tail in enumerate(lease.tail_pages, first_tail):
            self.check(tail, text, index, salt)
        table = lease.pages + cache.allocate(num_pages - found, Owner.REQUEST)
        keyed = range(found, max(0, len(text) - look) // PAGE)
        for index in keyed:
            self.write(table[index], text[: (index + 1) * PAGE + look], salt)
        self.num_computed += num_pages - found
        cache.insert(text, table[: len(text) // PAGE], salt, lease)
        tails = cache.allocate_tails(min(len(keyed), 2), Owner.REQUEST) if self.num_tails else []
        first = len(lease.pages) - len(tails)
        for index, tail in enumerate(tails, first):
            self.write(tail, text[: (index + 1) * PAGE + look], salt)
        taken = cache.give_tails(lease, first, tails, first)
        cache.pool.release(tail for tail in tails if tail not in taken)
        cache.release(lease, table)
        return restored

    def check(self, page: int, text: list[int], index: int, salt: str) -> None:
        """Check that a page, or tail page, holds what it held when it was computed."""
        own = self.read(page)
        self.write(page, text[: (index + 1) * PAGE + self.cache.lookahead], salt)
        assert own == self.read(page), (page, index)

    def check_books(self) -> None:
        """Check that each slot has one node, of which the tree has a whole path, and that the pool's books balance."""
        cache, tier = self.cache, self.tier
        ledger = cache.ledger()
        assert ledger.request == ledger.ticket == ledger.cache_referenced == 0
        nodes = list[CachedNode]()
        left = cache.first_pages()
        while left:
            nodes.append(left.pop())
            left += nodes[-1].children.values()
        assert all(node.is_cached for node in nodes), "an empty node is left in the tree"
        assert all(node.page is None or node.parent is cache._root or node.parent.page is not None for node in nodes)
        for slots, name in ((tier.kept, "slot"), (tier.tails, "tail_slot")):
            used = [getattr(node, name) for node in nodes if getattr(node, name) is not None]
            assert len(used) == len(set(used)) == slots.num_used - slots.ledger().reading == len(slots.nodes)
            assert set(slots.nodes) <= set(nodes)
            assert all((node.page if name == "slot" else node.tail) is not None for node in slots._doubled)
            assert all((node.page if name == "slot" else node.tail) is None for node in slots._alone)
        alone = list(tier.kept._alone)
        is_ordered = all(node.parent not in alone[:place] for place, node in enumerate(alone))
        assert is_ordered or tier.disk is not None, "a parent before its child"
        assert cache.num_pages == sum(node.page is not None for node in nodes)

"""The host tier: random lives of texts, whose bytes are compared after every way through pool and slots."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from baton.engine.state.cached_node import CachedNode
from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.tiers.host_copies import HostCopies
from baton.engine.tiers.host_tier import HostTier
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

PAGE = 4
LAYOUT = KvLayout.of(PoolLayout(3, 2, 4, "float32"), PAGE)
INDEX = KvLayout.of(PoolLayout(1, 1, 8, "float32"), PAGE)  # another pool with the same page numbers
WINDOW = KvLayout.of(PoolLayout(2, 1, 4, "float32"), PAGE)  # a pool of tail pages


class Node:
    """A cache with a tier over pools in host memory. A page holds bytes that follow from all tokens up to its end."""

    def __init__(self, num_pages: int, num_slots: int, *, num_tails: int = 0, lookahead: int = 0) -> None:
        self.num_tails = 2 if num_tails else 0  # that a hit needs
        self.memory = [PageMemory(LAYOUT, num_pages), PageMemory(INDEX, num_pages)]
        if num_tails:
            self.memory.append(PageMemory(WINDOW, num_tails, num_pages))
        tier = HostTier(HostCopies(self.memory, num_slots, num_slots if num_tails else 0))
        self.cache = PrefixCache(PagePool(num_pages, PAGE, num_tails=num_tails), lookahead, tier=tier)
        self.tier = tier
        self.num_computed = 0

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
            assert len(used) == len(set(used)) == slots.num_used == len(slots.nodes)
            assert set(slots.nodes) <= set(nodes)
        alone = list(tier.kept._alone)
        assert all(node.parent not in alone[:place] for place, node in enumerate(alone)), "a parent before its child"
        assert cache.num_pages == sum(node.page is not None for node in nodes)


@pytest.mark.parametrize(
    ("num_slots", "num_tails", "least"), [(0, 0, 0), (1, 0, 0), (7, 0, 5), (60, 0, 20), (8, 12, 3), (60, 12, 20)]
)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_what_a_prompt_finds_is_what_was_computed_for_its_tokens(
    num_slots: int, num_tails: int, least: int, lookahead: int
) -> None:
    node = Node(16, num_slots, num_tails=num_tails, lookahead=lookahead)
    rng = random.Random(num_slots)
    num_restored = 0
    for step in range(300):
        text = [rng.randrange(2) for _ in range(rng.randint(0, 12))] + [rng.randrange(2)] * rng.randint(3, 30)
        match rng.randrange(12):
            case 0:
                node.cache.evict(rng.randint(1, 20))
            case 1 if step % 40 == 0:
                node.cache.flush()
                assert not node.cache.first_pages() and node.tier.kept.num_used == node.tier.tails.num_used == 0
            case _:
                num_restored += node.run(text, rng.choice(["", "a"]))
        node.check_books()
    assert num_restored >= least


def test_a_second_pass_over_three_times_the_pool_computes_only_last_pages() -> None:
    texts = [random.Random(seed).choices(range(100), k=10 * PAGE) for seed in range(6)]
    computed: list[int] = []
    for num_slots in (0, 60):
        node = Node(21, num_slots)
        for text in texts:
            node.run(text)
        node.num_computed = 0
        for text in texts:
            node.run(text)
        computed.append(node.num_computed)
    assert computed == [60, 6]


def test_nothing_is_restored_for_a_request_that_has_no_room() -> None:
    node = Node(11, 60)
    text = list(range(8 * PAGE))
    node.run(text)
    held = node.cache.allocate(6, Owner.REQUEST)
    assert node.cache.restore(text, num_pages=9) == 0
    assert node.tier.num_restored == 0
    assert node.cache.restore(text, num_pages=8) == 0, "five pages are pinned or free beside those held"
    node.cache.pool.release(held)
    assert node.cache.restore(text, num_pages=8) > 0


def test_a_tier_that_is_slower_than_computing_is_not_asked() -> None:
    node = Node(11, 60)
    text = list(range(8 * PAGE))
    node.run(text)
    node.cache.evict(10)
    node.tier._page_s.observe(1.0, time.monotonic())
    node.tier.compute_token_s = lambda: 0.1
    assert node.cache.restore(text, num_pages=8) == 0
    node.tier.compute_token_s = lambda: 0.3
    assert node.cache.restore(text, num_pages=8) == 8

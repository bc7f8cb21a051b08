"""Changes of a real prefix cache, read in batches, always lead to what the cache holds."""

from __future__ import annotations

import random

import pytest

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.cache import changes
from baton.metadata.cache.changes import CacheChanges, ChangeBatch
from baton.metadata.cache.names import PageNames

PAGE = 4
KEY = b"k" * 32


class Reader:
    """A holder of what batches tell: names of pages, and of tail pages."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.changes = CacheChanges(cache, KEY)
        self.pages: set[bytes] = set()
        self.tails: set[bytes] = set()
        self.num_changes = 0

    def read(self, most: int = 1000) -> ChangeBatch:
        batch = self.changes.read(most)
        if batch.begins:
            self.pages.clear()
            self.tails.clear()
        self.pages.difference_update(batch.removed)
        self.tails.difference_update(batch.removed_tails)
        for page in batch.stored:
            assert page.parent is None or page.parent in self.pages, "a page was told before its parent"
            self.pages.add(page.name)
        self.tails.update(batch.stored_tails)
        assert batch.num_changes >= self.num_changes
        self.num_changes = batch.num_changes
        return batch

    def read_all(self, most: int = 1000) -> None:
        while self.changes.are_due:
            self.read(most)
        assert self.num_changes == self.cache.num_changes


def names_in(cache: PrefixCache) -> tuple[set[bytes], set[bytes]]:
    """Return the names of all pages and tail pages in the cache, made anew."""
    names = PageNames(KEY, PAGE, cache.lookahead)
    pages, tails = set[bytes](), set[bytes]()
    todo = [(names.before_first(each.key[: -names.num_key_bytes].decode()), each) for each in cache.first_pages()]
    while todo:
        before, page = todo.pop()
        name = names.after(before, page.key[-names.num_key_bytes :])
        pages.add(name)
        if page.tail is not None:
            tails.add(names.of_tail(name))
        todo += [(name, child) for child in page.children.values()]
    return pages, tails


def store(cache: PrefixCache, ids: list[int], salt: str = "") -> None:
    """Let a request compute and release a text."""
    num_pages = len(ids) // PAGE
    lease = cache.acquire(ids, salt)
    table = lease.pages + cache.allocate(num_pages - len(lease.pages), Owner.REQUEST)
    cache.insert(ids, table, salt, lease)
    tails: list[int] = []
    if cache.pool.num_tails and cache.available_tails:
        own = cache.allocate_tails(1, Owner.REQUEST)
        tails = [each for each in own if each not in cache.give_tails(lease, len(lease.pages) - 1, own, 0)]
    cache.pool.release(tails)
    cache.release(lease, table)


@pytest.mark.parametrize("num_tails", [0, 6])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_always_arrives_at_what_the_cache_holds(num_tails: int, lookahead: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(PagePool(40, PAGE, num_tails=num_tails), lookahead)
    reader = Reader(cache)
    for step in range(300):
        ids = [rng.randrange(2) for _ in range(PAGE * rng.randint(1, 8) + lookahead)]
        match rng.randrange(6):
            case 0:
                cache.evict(rng.randint(1, 20))
            case 1 if step % 50 == 0:
                cache.flush()
            case 2 if step % 30 == 0:
                reader.changes.begin_anew()
            case _:
                store(cache, ids, rng.choice(["", "a", "b"]))
        reader.read(rng.choice([0, 1, 3, 100]))
        if rng.random() < 0.2:
            reader.read_all(rng.choice([1, 50]))
            assert (reader.pages, reader.tails) == names_in(cache)


def test_a_page_that_came_and_went_between_two_batches_is_not_told() -> None:
    cache = PrefixCache(PagePool(10, PAGE))
    reader = Reader(cache)
    reader.read_all()
    store(cache, [1] * 8)
    cache.flush()
    batch = reader.read()
    assert not batch.stored and not batch.removed and batch.num_changes == 4


def test_a_late_reader_begins_with_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(PagePool(40, PAGE))
    store(cache, list(range(80)))
    reader = Reader(cache)
    first = reader.read(5)
    assert first.begins and not first.is_whole and len(first.stored) == 5
    assert reader.read().is_whole and len(reader.pages) == 20
    monkeypatch.setattr(changes, "MAX_CHANGED", 10)
    for turn in range(3):
        store(cache, [turn] * 20)
    assert reader.read().begins
    assert reader.pages == names_in(cache)[0]


def test_a_closed_reader_hears_nothing_more() -> None:
    cache = PrefixCache(PagePool(10, PAGE))
    first, second = Reader(cache), Reader(cache)
    first.read_all()
    second.read_all()
    first.changes.close()
    store(cache, [1] * 8)
    assert not first.changes.are_due and second.changes.are_due

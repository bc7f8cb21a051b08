"""Tail pages: the table of a sequence, the books, and the prefix cache's part."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.state.tail_pages import TailPages, most_tails, tails_beside
from baton.metadata.errors import OutOfPages
from baton.metadata.handoff.memory import PageMemory
from baton.metadata.handoff.pages import page_checksums
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.handoff.schema.schema import tails_before
from baton.metadata.wire.node_info import KvPlane

NUM_PAGES, NUM_TAILS, PAGE_SIZE = 30, 12, 4
TOKENS = list(range(1, 41))


@pytest.mark.parametrize("window", [1, 2, 7, 9])
@pytest.mark.parametrize("num_new", [1, 3, 8])
def test_no_page_that_a_step_reads_is_written_over(window: int, num_new: int) -> None:
    most = most_tails(window, num_new, PAGE_SIZE)
    tail, next_page, holder = TailPages(NUM_PAGES), NUM_PAGES + 1, dict[int, int]()
    for start in range(0, 60, num_new):
        end = -(-(start + num_new) // PAGE_SIZE)
        num_missing = tail.num_missing(end, most)
        tail.extend(end, list(range(next_page, next_page + num_missing)))
        next_page += num_missing
        for index in range(start // PAGE_SIZE, end):  # the step writes its own rows, then reads back
            holder[tail.pages[index]] = index
        for index in range(max(0, start - window + 1) // PAGE_SIZE, end):
            assert holder[tail.pages[index]] == index, (start, index)
    assert next_page - NUM_PAGES - 1 == len(tail.own) == len(set(tail.own)) <= most


def test_the_books_of_tail_pages_are_their_own() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE, num_tails=NUM_TAILS)
    tails = pool.allocate_tails(NUM_TAILS - 1, Owner.TICKET)
    assert tails == list(range(NUM_PAGES + 1, NUM_PAGES + NUM_TAILS))
    with pytest.raises(OutOfPages, match="1 tail pages were asked for and 0 of 11 are free"):
        pool.allocate_tails(1, Owner.REQUEST)
    assert len(pool.allocate(NUM_PAGES - 1, Owner.REQUEST)) == NUM_PAGES - 1
    assert (pool.ledger().request, pool.tail_ledger().ticket, pool.ledger().padding) == (NUM_PAGES - 1, 11, 1)
    pool.release(tails)
    assert pool.num_free_tails == NUM_TAILS - 1 and pool.num_free == 0


def test_work_continues_only_behind_a_page_whose_tail_is_cached() -> None:
    cache = PrefixCache(PagePool(NUM_PAGES, PAGE_SIZE, num_tails=NUM_TAILS))
    num_tails = tails_before(6, PAGE_SIZE)
    assert num_tails == 2
    pages, tails = cache.allocate(10, Owner.REQUEST), cache.allocate_tails(5, Owner.REQUEST)
    lease = cache.insert(TOKENS, pages)
    assert cache.give_tails(lease, 4, tails, 7) == tails  # of pages 4 to 8; page 9 has none
    assert cache.give_tails(lease, 4, cache.allocate_tails(1, Owner.REQUEST)) == [], "it has one already"
    assert cache.match(TOKENS) == 10 and cache.match(TOKENS, num_tails=num_tails) == 9
    for limit, expected in ((9, 9), (6, 6), (5, 0), (3, 0)):
        hit = cache.acquire(TOKENS, limit_pages=limit, num_tails=num_tails)
        assert len(hit.pages) == expected, limit
        assert hit.tail_pages == tails[expected - 6 : expected - 4] if expected else not hit.tail_pages
        cache.release(hit)
    cache.release(lease)
    assert cache.available_tails == NUM_TAILS - 2, "one is still a request's"
    cache.allocate_tails(6, Owner.REQUEST)  # evicts that of page 6: nobody has continued behind it, and no text ends
    assert cache.match(TOKENS) == 10, "kept pages stay without their tails"
    assert cache.match(TOKENS, limit_pages=8, num_tails=num_tails) == 6, "work has continued there"
    assert cache.match(TOKENS, num_tails=num_tails) == 9
    cache.allocate_tails(3, Owner.REQUEST)
    assert cache.match(TOKENS, limit_pages=8, num_tails=num_tails) == 0
    cache.flush()
    ledger = cache.tail_ledger()
    assert ledger is not None and ledger.cache == ledger.cache_referenced == 0


def test_a_request_exchanges_what_it_reads_no_more_even_if_no_page_is_free() -> None:
    cache = PrefixCache(PagePool(NUM_PAGES, PAGE_SIZE, num_tails=NUM_TAILS))
    pages, tails = cache.allocate(10, Owner.REQUEST), cache.allocate_tails(11, Owner.REQUEST)
    lease = cache.insert(TOKENS, pages)
    assert cache.exchange_tails(lease, 0, tails[:3], Owner.REQUEST) == tails[:3], "the cache gives them back"
    cache.pool.release(tails[9:])
    assert cache.exchange_tails(lease, 0, tails[:3], Owner.REQUEST) == [tails[0], *tails[9:]]
    assert cache.available_tails == 2 and cache.match(TOKENS, num_tails=1) == 3
    assert cache.exchange_tails(lease, 8, tails[3:6], Owner.REQUEST)[2] == tails[5], "no page 10 is cached"


def test_tail_pages_are_few_beside_many_kept_ones_and_enough_for_a_chunk() -> None:
    sizes: dict[str, Any] = {"num_new": 6, "chunk_len": 512, "max_running": 64}
    for num_pages in (3, 40, 400, 4000, 400_000):
        num_tails = tails_beside(num_pages, 128, 16, **sizes)
        assert num_tails == num_pages or num_tails > max(num_pages // 4, 2 * most_tails(128, 512, 16))
        assert num_tails <= min(num_pages, num_pages // 2 + 100), num_pages
    for num_pages in (3, 400, 4000):
        num_large = tails_beside(num_pages, 128, 16, **sizes, relative_size=100.0)
        of_chunks = 2 * most_tails(128, 512 + 6, 16)
        assert num_large <= min(num_pages, 1 + of_chunks + 2 * (2 * num_pages / 100)), "kept pages have a fifth"
    of_sequences = 64 * most_tails(128, 6, 16)
    num_large = tails_beside(40_000, 128, 16, **sizes, relative_size=50.0)
    assert 2 * of_sequences < num_large < 2 * of_sequences + 100, "large ones are for sequences, cached ones too"


def test_damage_of_a_tail_page_changes_its_own_checksums_alone() -> None:
    layout = KvLayout(2, PAGE_SIZE, (KvPlane("k", 1, 8, "float32"), KvPlane("v", 1, 8, "float32")))
    memory = [
        PageMemory(layout, NUM_PAGES, num_counted=NUM_PAGES + NUM_TAILS),
        PageMemory(layout, NUM_TAILS, NUM_PAGES, num_counted=NUM_PAGES + NUM_TAILS),
    ]
    kept, tail = page_checksums(memory, 3), page_checksums(memory, NUM_PAGES + 3)
    assert len(kept) == len(tail), "pools without the page count as zeros"
    memory[1].pages[1, 3, 5] ^= 1
    assert page_checksums(memory, 3) == kept and page_checksums(memory, NUM_PAGES + 3) != tail
    for pool in memory:
        pool.close()


def test_tail_pages_are_shared_up_to_the_first_page_that_has_one() -> None:
    """The request goes on to read those that its lease pins. The others may be evicted."""
    cache = PrefixCache(PagePool(NUM_PAGES, PAGE_SIZE, num_tails=NUM_TAILS))
    pages, tails = cache.allocate(10, Owner.REQUEST), cache.allocate_tails(8, Owner.REQUEST)
    other, lease = cache.insert(TOKENS, pages), cache.insert(TOKENS, pages)
    assert cache.give_tails(other, 8, tails[7:]) == tails[7:]
    assert cache.share_tails(lease, 3, tails[:7], 6) == 5, "pages 3 to 7, as page 8 has one"
    ledger = cache.tail_ledger()
    assert ledger is not None and (ledger.cache, ledger.cache_referenced, ledger.request) == (6, 2, 2)
    cache.pool.release(tails[5:7])
    cache.release(other)
    cache.release(lease)
    assert cache.available_tails == NUM_TAILS - 1

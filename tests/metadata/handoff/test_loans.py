"""Loans: pages of one node's prefix cache are copied into the pool of another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from handoff_nodes import (
    SCHEMA,
    LateCache,
    make_client,
    make_server,
    named,
    pages_of,
    peer_of,
    same_pages,
    spin,
    unit,
)

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.tiers.host_copies import HostCopies
from baton.engine.tiers.host_tier import HostTier
from baton.metadata.handoff.loans import LENT_SHARE
from baton.metadata.handoff.schema.schema import page_bytes
from baton.metadata.handoff.transfer import LoanOver
from baton.metadata.wire.node_info import HandoffSchema

SIZE = SCHEMA.page_size
NUM_PAGES = 41  # 40 of them can be used, so 10 can be on loan
TEXT = list(range(100, 100 + 12 * SIZE))


class Pair:
    """A lender that has the pages of TEXT in its cache, and a borrower with an empty pool."""

    def __init__(
        self, transport: str, has_gpu: bool = False, salt: str = "", num_cached: int = 8, schema: HandoffSchema = SCHEMA
    ) -> None:
        self.stack = ExitStack()
        self.events: list[Any] = []
        self.cache = LateCache()
        common: dict[str, Any] = {"num_pages": NUM_PAGES, "transports": (transport,), "has_gpu": has_gpu}
        self.lender, self.source = make_server(schema, cache=self.cache, **common)
        self.borrower, self.target = make_client(schema, **common)
        for each in (*self.source, *self.target, self.lender, self.borrower):
            self.stack.callback(each.close)
        pool = PagePool(NUM_PAGES, SIZE, self.lender.end.memory[0].generations)
        self.cache.real = self.prefix = PrefixCache(pool)
        self.lent = self.fill(TEXT[: num_cached * SIZE], salt)

    def fill(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Put pages of a text into the cache, and return them."""
        pages = self.prefix.allocate(len(token_ids) // SIZE, Owner.REQUEST)
        self.prefix.release(self.prefix.insert(token_ids, pages, salt))
        return pages

    def borrow(
        self, pages: list[int], num_cached: int = 0, *, salt: str = "", name: str = "r", until: float = math.inf
    ) -> None:
        token_ids = TEXT[: len(pages) * SIZE]
        self.borrower.borrow(unit(name), peer_of(self.lender), num_cached, pages, (), token_ids, salt, until)

    def begin(self, pages: list[int]) -> None:
        """Borrow, and poll until the lender has lent."""
        self.borrow(pages)
        self.events = spin((self.borrower, self.lender), lambda _: self.lender.loans())

    def finish(self, count: int = 1) -> list[LoanOver]:
        """Poll both until so many loans are over, and return how."""
        nodes, before, self.events = (self.lender, self.borrower), named(self.events, LoanOver), []
        over = before + named(spin(nodes, lambda events: len(before + named(events, LoanOver)) >= count), LoanOver)
        spin(nodes, lambda _: not self.lender.loans())
        return over


class SlowCopies:
    """Copies whose loads take effect for other processes when `is_over` says so."""

    def __init__(self, own: Any, is_over: list[bool]) -> None:
        self._own, self._is_over = own, is_over

    @property
    def is_settled(self) -> bool:
        return self._is_over[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.fixture(params=["local", "zmq", "cuda"])
def pair_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**more: Any) -> Pair:
        pairs.append(Pair(request.param, has_gpu=request.param == "cuda", **more))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.stack.close()


def test_pages_of_a_prefix_cache_arrive_equal(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    ours = list(range(3, 11))
    pair.borrow(ours)
    assert [each[:3] for each in pair.finish()] == [(unit(), 8, 8 * page_bytes(SCHEMA))]
    assert same_pages(pair.target, ours, pair.source, pair.lent)
    assert pair.prefix.num_referenced == 0


def test_a_lender_offers_the_part_that_it_has_and_pages_that_are_here_are_not_copied(
    pair_of: Callable[..., Pair],
) -> None:
    pair = pair_of()
    ours = list(range(3, 15))
    before = pair.target[0].pages[:, ours[:2]].copy()
    pair.borrow(ours, num_cached=2)
    [over] = pair.finish()
    assert (over.num_pages, over.num_bytes) == (8, 6 * page_bytes(SCHEMA))
    assert same_pages(pair.target, ours[2:8], pair.source, pair.lent[2:])
    assert (pair.target[0].pages[:, ours[:2]] == before).all()


def test_pages_that_a_gpu_computes_without_checksums_are_lent_when_it_has(pair_of: Callable[..., Pair]) -> None:
    """A prompt that is computed puts its pages into the cache before the device has done so."""
    pair = pair_of(schema=msgspec.structs.replace(SCHEMA, checksum="none"))
    device = pair.lender.end.device
    if device is not None:
        device.is_slow = True
    ours = list(range(3, 11))
    pair.begin(ours)
    if device is not None:
        for _ in range(20):
            assert not pair.lender.poll() and not pair.borrower.poll()
        assert pair.target[0].device.called("gather") == []
        device.run()
    assert [each[:2] for each in pair.finish()] == [(unit(), 8)]
    assert same_pages(pair.target, ours, pair.source, pair.lent)


def test_no_more_than_a_quarter_of_the_idle_pages_is_on_loan_and_the_rest_is_lent_afterwards(
    pair_of: Callable[..., Pair],
) -> None:
    pair = pair_of(num_cached=12)
    assert pair.prefix.available // LENT_SHARE == 10
    ours = list(range(3, 15))
    pair.borrow(ours)
    assert pair.finish()[0].num_pages == 10
    pair.borrow(ours, num_cached=10)
    assert pair.finish()[0][:3] == (unit(), 12, 2 * page_bytes(SCHEMA))
    assert same_pages(pair.target, ours, pair.source, pair.lent)


def test_another_salt_or_one_other_token_finds_nothing(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(salt="tenant a")
    pair.borrow([3, 4], salt="tenant b")
    pair.borrow([5, 6], name="no salt")
    pair.borrower.borrow(unit("other"), peer_of(pair.lender), 0, [7], (), [1, *TEXT[1:SIZE]], "tenant a", math.inf)
    assert {over.num_pages for over in pair.finish(3)} == {0}
    pair.borrow([3, 4], salt="tenant a")
    assert pair.finish()[0].num_pages == 2


def test_a_reservation_takes_a_lent_page_at_once_and_the_loan_ends(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    pair.begin(list(range(3, 11)))
    assert pair.prefix.available == NUM_PAGES - 1
    taken = pair.prefix.allocate(NUM_PAGES - 1, Owner.REQUEST)
    for pool in pair.source:
        pool.pages[:] = 255  # the owner writes
    [over] = pair.finish()
    assert over.num_pages < 8
    assert len(taken) == NUM_PAGES - 1 and pair.lender.end.memory[0].generations[pair.lent[0]] == 2


def test_a_page_that_was_given_to_another_request_is_not_sent_under_an_old_loan() -> None:
    pair = Pair("zmq")
    with pair.stack:
        pair.begin(list(range(3, 11)))
        pair.prefix.allocate(NUM_PAGES - 1, Owner.REQUEST)
        assert pair.finish()[0].num_pages == 0
        assert not pair.target[0].pages.any()


def test_a_loan_that_takes_too_long_is_over_and_what_has_arrived_stays(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    ours = list(range(3, 11))
    pair.borrow(ours, until=pair.borrower.end.clock() + 0.05)
    [over] = named(spin((pair.borrower,), lambda events: named(events, LoanOver)), LoanOver)
    assert (over.num_pages, over.reason) == (0, "its time is over")
    pair.finish(0)
    pair.begin(ours)
    pair.borrower.drop(unit(), "cancelled")
    assert pair.finish(0) == []


def test_a_lost_borrower_leaves_no_loan() -> None:
    pair = Pair("local")
    with pair.stack:
        pair.begin([3, 4])
        pair.borrower.close()
        spin((pair.lender,), lambda _: not pair.lender.loans())


def test_a_unit_has_one_loan_whoever_asks() -> None:
    pair = Pair("local")
    with pair.stack:
        other, pools = make_client(num_pages=NUM_PAGES, node_id="d1", epoch="d2" * 8, transports=("local",))
        for each in (*pools, other):
            pair.stack.callback(each.close)
        pair.begin([3, 4])
        other.borrow(unit(), peer_of(pair.lender), 0, [5], (), TEXT[:SIZE], "", math.inf)
        spin((pair.lender, other), lambda _: pair.lender.dropped.count == 1)
        pair.lender.open(unit(), 1)  # a prompt that is handed over may have the same name
        assert pair.finish()[0].num_pages == 2


def test_two_full_nodes_borrow_from_each_other() -> None:
    """Both pools are full of cached pages and of requests; each side has taken its target pages first."""
    there, back = Pair("local"), Pair("local")
    with there.stack, back.stack:
        for pair in (there, back):
            pair.prefix.allocate(NUM_PAGES - 1 - 8, Owner.REQUEST)
            assert pair.prefix.pool.num_free == 0
        for pair in (there, back):
            pair.borrow(list(range(3, 11)))
        nodes = (there.lender, there.borrower, back.lender, back.borrower)
        over = named(spin(nodes, lambda events: len(named(events, LoanOver)) == 2), LoanOver)
        assert [each.num_pages for each in over] == [2, 2], "a quarter of the 8 idle pages"


@pytest.mark.parametrize("pair_of", ["local", "zmq"], indirect=True)
def test_pages_that_lie_in_the_lenders_host_memory_are_lent(pair_of: Callable[..., Pair]) -> None:
    """They are evicted, and come back for the loan. They are offered when they are there for other processes."""
    pair = pair_of()
    tier = HostTier(HostCopies(pair.lender.end.memory, 12))
    pair.prefix.tier = tier
    before = pages_of(pair.source, pair.lent)
    assert pair.prefix.evict(8) == 8 and pair.prefix.num_pages == 0
    for pool in pair.source:
        pool.pages[:] = 7  # of others
    ours, is_settled = list(range(3, 11)), [False]
    tier.copies = SlowCopies(tier.copies, is_settled)
    pair.borrow(ours)
    spin((pair.borrower, pair.lender), lambda _: pair.lender.loans())
    for _ in range(20):
        assert not pair.lender.poll() and not pair.borrower.poll()
    assert pair.borrower.tickets(), "nothing was offered"
    is_settled[0] = True
    [over] = pair.finish()
    assert over.num_pages == 8
    assert all(np.array_equal(a, b) for a, b in zip(before, pages_of(pair.target, ours), strict=True))

"""When a node borrows pages, and what it does when they do not come."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from handoff_nodes import SCHEMA, LateCache, make_client, make_server, peer_of, unit

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import Lease, PrefixCache
from baton.metadata.handoff.borrower import FIRST_S, Borrower
from baton.metadata.wire.data_link import Borrow
from baton.metadata.wire.node_info import Lender, Peer
from baton.metadata.wire.request import Unit

SIZE = SCHEMA.page_size
TEXT = list(range(100, 100 + 12 * SIZE))
NUM_PAGES = 64


class Nodes:
    """A lender with the pages of TEXT, all but the last one, and a node that borrows. The clock is the test's."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 0.0
        common: dict[str, Any] = {"num_pages": NUM_PAGES, "transports": ("local",), "clock": lambda: self.now}
        lending = LateCache()
        self.server, source = make_server(cache=lending, **common)
        self.client, target = make_client(**common)
        for each in (*source, *target, self.server, self.client):
            stack.callback(each.close)
        lending.real = self.theirs = PrefixCache(PagePool(NUM_PAGES, SIZE, self.server.end.memory[0].generations))
        pages = self.theirs.allocate(11, Owner.REQUEST)
        self.theirs.release(self.theirs.insert(TEXT[: 11 * SIZE], pages))
        self.ours = PrefixCache(PagePool(NUM_PAGES, SIZE))
        self.token_s = 1.0
        self.borrower = Borrower[Lease](self.ours, self.client, lambda: self.token_s)
        self.lender = Lender(peer_of(self.server), 11)

    def begin(self, name: str = "r", lender: Lender | None = None) -> Lease | None:
        """Begin a loan for a prompt, all of whose pages it has. Return its lease; None: it is computed."""
        lease = self.ours.acquire(TEXT, "", 11)
        self.pages = lease.pages + self.ours.allocate(12 - len(lease.pages), Owner.REQUEST)
        if self.borrower.begin(unit(name), lender or self.lender, TEXT, self.pages, lease, 11):
            return lease
        self.ours.release(lease, self.pages)
        return None

    def run(self, step_s: float = 0.0) -> list[Unit]:
        """Poll both until a loan is over, or until nothing comes any more."""
        for _ in range(3000):
            self.now += step_s
            over = [unit for each in self.client.poll() if (unit := self.borrower.take(each)) is not None]
            self.server.poll()
            if over:
                return over
        return []


@pytest.fixture
def nodes() -> Any:
    with ExitStack() as stack:
        yield Nodes(stack)


def test_borrowed_pages_go_into_the_cache_and_the_lease(nodes: Nodes) -> None:
    lease = nodes.begin()
    assert lease is not None and nodes.run() == [unit()]
    assert lease.pages == nodes.pages[:11]
    assert nodes.borrower.totals.num_pages == 11
    nodes.ours.release(lease, nodes.pages)
    assert nodes.ours.match(TEXT, "", 11) == 11


def test_parts_are_borrowed_one_after_the_other(nodes: Nodes) -> None:
    taken = nodes.theirs.allocate(NUM_PAGES - 1 - 20, Owner.REQUEST)  # a quarter of what is left is 5
    lease = nodes.begin()
    assert lease is not None and nodes.run() == [unit()]
    assert len(lease.pages) == 11
    nodes.theirs.pool.release(taken)


def test_a_loan_ends_when_computing_would_have_and_what_has_come_is_kept(nodes: Nodes) -> None:
    lease = nodes.begin()
    assert lease is not None
    assert nodes.client.wait_s() is not None
    nodes.now += 11 * SIZE * nodes.token_s
    assert nodes.run() == [unit()]
    assert lease.pages == []
    assert nodes.client.tickets() == []


def test_a_lender_that_was_slower_than_computing_is_not_asked_for_a_while(nodes: Nodes) -> None:
    nodes.token_s = 1e-6
    silent = Lender(Peer("gone", "e9" * 8, "tcp://127.0.0.1:9", 8), 11)
    for name in ("a", "b"):
        lease = nodes.begin(name, silent)
        assert lease is not None and nodes.run(step_s=FIRST_S / 100) == [unit(name)]
        nodes.ours.release(lease, nodes.pages)
    assert nodes.begin("c", silent) is None
    assert nodes.begin("d") is not None, "another lender"
    nodes.now += 600
    assert nodes.begin("e", silent) is not None


@pytest.mark.parametrize("num_pages", [0, 3])
def test_nothing_is_asked_of_a_node_that_has_no_more(nodes: Nodes, num_pages: int) -> None:
    first = nodes.ours.insert(TEXT, nodes.ours.allocate(3, Owner.REQUEST))
    assert nodes.begin(lender=Lender(nodes.lender.peer, num_pages)) is None
    nodes.ours.release(first)


def test_a_node_of_an_older_protocol_is_not_asked(nodes: Nodes) -> None:
    peer = Peer(nodes.lender.peer.node_id, nodes.lender.peer.epoch, nodes.server.address, Borrow.since - 1)
    assert nodes.begin(lender=Lender(peer, 11)) is None


def test_a_dropped_loan_is_never_named_and_writes_nothing_more(nodes: Nodes) -> None:
    lease = nodes.begin()
    assert lease is not None
    while not nodes.server.loans():
        nodes.client.poll()
        nodes.server.poll()
    nodes.borrower.drop(unit(), "cancelled")
    nodes.ours.release(lease, nodes.pages)
    assert nodes.run() == []
    assert nodes.server.loans() == []

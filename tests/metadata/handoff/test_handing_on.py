"""Texts of a node that leaves are kept by another one, which borrows their pages for its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from handoff_nodes import SCHEMA, LateCache, make_client, make_server, peer_of

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import Lease, PrefixCache
from baton.metadata.handoff.borrower import Borrower
from baton.metadata.handoff.handing_on import KEPT_SHARE, MOST_AT_ONCE, KeptTexts
from baton.metadata.handoff.transfer import LoanOver
from baton.metadata.wire.membership import Keep
from baton.metadata.wire.node_info import Lender
from baton.metadata.wire.request import pack_ids

SIZE = SCHEMA.page_size
NUM_PAGES = 61  # 60 of them can be used
TEXTS = [[100 * number + each for each in range(3 * SIZE)] for number in range(1, 9)]  # of 3 pages


class Nodes:
    """A node that leaves and has all TEXTS, and an heir."""

    def __init__(self, stack: ExitStack) -> None:
        common: dict[str, Any] = {"num_pages": NUM_PAGES, "transports": ("local",)}
        leaving = LateCache()
        self.server, source = make_server(cache=leaving, **common)
        self.client, target = make_client(**common)
        for each in (*source, *target, self.server, self.client):
            stack.callback(each.close)
        leaving.real = self.theirs = PrefixCache(PagePool(NUM_PAGES, SIZE, self.server.end.memory[0].generations))
        for text in TEXTS:
            pages = self.theirs.allocate(3, Owner.REQUEST)
            self.theirs.release(self.theirs.insert(text, pages))
        self.ours = PrefixCache(PagePool(NUM_PAGES, SIZE))
        self.borrower = Borrower[Lease](self.ours, self.client, lambda: 1.0)
        self.kept = KeptTexts(self.ours, self.borrower)

    def keep_all(self) -> None:
        """Tell the heir of all texts, those used last first, as the router does."""
        for text in self.theirs.texts():
            lender = Lender(peer_of(self.server), text.num_pages)
            ids = pack_ids(text.token_ids)
            self.kept.add(Keep(router_epoch="r" * 16, lender=lender, token_ids=ids, cache_salt=text.salt))

    def run(self) -> None:
        """Let both work until no loan is under way."""
        for _ in range(20_000):
            if not self.borrower.units() and not self.server.loans():
                return
            assert len(self.borrower.units()) <= MOST_AT_ONCE
            for event in self.client.poll():
                assert isinstance(event, LoanOver)
                unit = self.borrower.take(event)
                if unit is not None:
                    assert unit in self.kept
                    self.kept.end(unit)
            self.server.poll()
        raise AssertionError("a loan hangs")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


def test_the_texts_that_were_used_last_are_kept_up_to_a_share_of_the_idle_pages(nodes: Nodes) -> None:
    nodes.keep_all()
    nodes.run()
    most = 60 // KEPT_SHARE // 3
    assert [nodes.ours.match(text, "", 3) for text in reversed(TEXTS)] == [3] * most + [0] * (len(TEXTS) - most)
    ledger = nodes.ours.ledger()
    assert (ledger.request, ledger.cache_referenced, ledger.cache) == (0, 0, 3 * most)


def test_a_text_that_the_heir_has_already_is_not_borrowed(nodes: Nodes) -> None:
    pages = nodes.ours.allocate(3, Owner.REQUEST)
    nodes.ours.release(nodes.ours.insert(TEXTS[-1], pages))
    nodes.keep_all()
    assert len(nodes.borrower.units()) == MOST_AT_ONCE
    nodes.run()
    assert nodes.borrower.totals.num_pages <= 60 // KEPT_SHARE
    assert nodes.ours.match(TEXTS[-2], "", 3) == 3

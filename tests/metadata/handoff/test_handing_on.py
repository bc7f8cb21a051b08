"""Texts of a node that leaves are kept by another one, which borrows their pages for its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from handoff_nodes import SCHEMA, LateCache, make_client, make_server, peer_of

from baton.engine.state.pages import Owner, PagePool
from baton.engine.state.prefix_cache import Lease, PrefixCache
from baton.metadata.handoff import handing_on
from baton.metadata.handoff.borrower import Borrower
from baton.metadata.handoff.handing_on import KEPT_SHARE, MOST_AT_ONCE, KeptTexts
from baton.metadata.handoff.pages import CachedText
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.handoff.transfer import LoanOver
from baton.metadata.wire.membership import Keep
from baton.metadata.wire.node_info import Lender
from baton.metadata.wire.request import pack_ids

SIZE = SCHEMA.page_size
NUM_PAGES = 61  # 60 of them can be used
TEXTS = [[100 * number + each for each in range(3 * SIZE)] for number in range(1, 9)]  # of 3 pages


class Nodes:
    """Nodes that leave and have all TEXTS, and an heir."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.client, target = make_client(num_pages=NUM_PAGES, transports=("local",))
        for each in (*target, self.client):
            stack.callback(each.close)
        self.servers: list[HandoffServer] = []
        self.theirs = self.add_server()
        self.ours = PrefixCache(PagePool(NUM_PAGES, SIZE))
        self.borrower = Borrower[Lease](self.ours, self.client, lambda: 1.0)
        self.kept = KeptTexts(self.ours, self.borrower)

    def add_server(self) -> PrefixCache:
        """Add a node that leaves."""
        leaving = LateCache()
        number = len(self.servers)
        identity = {"node_id": f"p{number}", "epoch": f"{number:016}"}
        server, source = make_server(cache=leaving, num_pages=NUM_PAGES, transports=("local",), **identity)
        for each in (*source, server):
            self._stack.callback(each.close)
        self.servers.append(server)
        leaving.real = cache = PrefixCache(PagePool(NUM_PAGES, SIZE, server.end.memory[0].generations))
        for text in TEXTS:
            pages = cache.allocate(3, Owner.REQUEST)
            cache.release(cache.insert(text, pages))
        return cache

    def keep_all(self) -> None:
        """Tell the heir of all texts, those used last first, as the router does."""
        for text in self.theirs.texts():
            self.keep(text, self.servers[0])

    def keep(self, text: CachedText, server: HandoffServer) -> None:
        """Tell the heir of a text."""
        lender, ids = Lender(peer_of(server), text.num_pages), pack_ids(text.token_ids)
        self.kept.add(Keep(router_epoch="r" * 16, lender=lender, token_ids=ids, cache_salt=text.salt))

    def run(self) -> None:
        """Let both work until no loan is under way."""
        for _ in range(20_000):
            if not self.borrower.units() and not any(server.loans() for server in self.servers):
                return
            assert len(self.borrower.units()) <= MOST_AT_ONCE
            for event in self.client.poll():
                assert isinstance(event, LoanOver)
                unit = self.borrower.take(event)
                if unit is not None:
                    assert unit in self.kept
                    self.kept.end(unit)
            for server in self.servers:
                server.poll()
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


def test_nodes_that_leave_together_get_a_share_each(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their texts come in turns."""
    monkeypatch.setattr(handing_on, "KEPT_SHARE", 9)  # of 60 idle pages, and of 57: two texts of 3
    nodes.add_server()
    for text, server in zip(nodes.theirs.texts(), nodes.servers * 4, strict=True):
        nodes.keep(text, server)
    nodes.run()
    assert [nodes.ours.match(text, "", 3) for text in reversed(TEXTS)] == [3] * 4 + [0] * 4


def test_a_text_that_the_heir_has_already_is_not_borrowed(nodes: Nodes) -> None:
    pages = nodes.ours.allocate(3, Owner.REQUEST)
    nodes.ours.release(nodes.ours.insert(TEXTS[-1], pages))
    nodes.keep_all()
    assert len(nodes.borrower.units()) == MOST_AT_ONCE
    nodes.run()
    assert nodes.borrower.totals.num_pages <= 60 // KEPT_SHARE
    assert nodes.ours.match(TEXTS[-2], "", 3) == 3

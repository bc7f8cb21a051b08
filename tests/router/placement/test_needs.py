"""Every accepted request gets nodes: a Dispatcher over idle nodes that reserve as the real ones do."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.metadata.errors import BatonError, RequestError
from baton.metadata.handoff.schema.schema import decode_len, pages_of, prefill_pages
from baton.metadata.wire.membership import Heartbeat
from baton.metadata.wire.messages import CapacityFreed, Prefill, Reserve, Reserved
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.request import SamplingParams
from baton.router.config import RouterConfig
from baton.router.dispatcher import Dispatcher
from baton.router.effects import Effect, Error, Send
from baton.router.figures.metrics import Metrics
from baton.router.nodes.node import Node
from baton.router.placement.needs import GRAMMAR_PROTOCOL, Need
from baton.router.requests.request import Request
from baton.router.waiting.queue import Entry

from ..sites import make_group, make_hello, make_request, text_tokenizer

STATS = NodeStats()
METRICS = Metrics()


class Pool(NamedTuple):
    """The sizes of a node. Its context is at most what its pool holds, as on a real node."""

    num_pages: int
    context_len: int
    max_running: int
    num_drafts: int  # of a decode node's rounds


class Site:
    """A dispatcher with a group of idle nodes, and the outcomes of its requests."""

    def __init__(self, page_size: int, lookahead: int, prefills: list[Pool], decodes: list[Pool]) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.dispatcher = Dispatcher(RouterConfig(), "e", METRICS)
        self.dispatcher.health.is_usable = lambda *_: True  # type: ignore[method-assign] - no node answers canaries here
        self.pools: dict[bytes, Pool] = {}
        self.errors: list[BatonError] = []
        self.dispatched: list[tuple[str, int]] = []  # (rid, choice)
        for role, pools in (("prefill", prefills), ("decode", decodes)):
            for index, pool in enumerate(pools):
                self.join(role, f"{role}-{index}", pool)
        (self.group,) = self.dispatcher.registry.groups.values()
        self.group.tokenizer = text_tokenizer()

    def join(self, role: Any, name: str, pool: Pool) -> None:
        hello = make_hello(
            role,
            name,
            num_pages=pool.num_pages,
            max_running=pool.max_running,
            context_len=pool.context_len,
            page_size=self.page_size,
            key_lookahead=self.lookahead,
        )
        peer = f"{name}:1".encode()
        self.pools[peer] = pool
        self.do(self.dispatcher.on_message(peer, hello, 0.0))

    def request(self, rid: str, prompt_len: int, max_tokens: int, num_choices: int = 1) -> Request:
        nobody: Any = None
        params = SamplingParams(max_tokens=max_tokens)
        return Request(rid, self.group, [5] * prompt_len, params, nobody, num_choices=num_choices, now=0.0)

    def offer(self, request: Request) -> bool:
        """Return whether the request is accepted. An accepted request is queued, and nodes answer until they have
        nothing to say. A node gives back at once what it granted, so all nodes stay idle."""
        try:
            self.do(self.dispatcher.submit(request, 0.0))
        except RequestError:
            return False
        return True

    def queue(self, entry: Entry) -> None:
        """Queue an entry as if it had been accepted before."""
        self.dispatcher.queues.add(entry)
        self.beat()

    def beat(self) -> None:
        """Let every node report that it is idle."""
        for peer in self.pools:
            self.do(self.dispatcher.on_message(peer, Heartbeat(1, "idle", 0.0, 10.0, self._idle(peer), STATS), 0.0))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Error):
                self.errors.append(effect.error)
            elif isinstance(effect, Send) and isinstance(effect.message, Reserve):
                self._answer(effect.node, effect.message)
            elif isinstance(effect, Send) and isinstance(effect.message, Prefill):
                self._compute(effect.node, effect.message)

    def _answer(self, node: Node, message: Reserve) -> None:
        pool = self.pools[node.routing_id]
        num_tokens = (len(message.request.prompt_ids) + len(message.request.received_ids)) // 4
        reserved = decode_len(num_tokens, 2 * pool.num_drafts + 2, pool.context_len)
        granted = message.choices[: pool.num_pages // pages_of(reserved, self.page_size)]
        answer = Reserved(message.rid, message.attempt, granted, self._idle(node.routing_id))
        self.do(self.dispatcher.on_message(node.routing_id, answer, 0.0))
        freed = CapacityFreed(self._idle(node.routing_id))
        self.do(self.dispatcher.on_message(node.routing_id, freed, 0.0))

    def _compute(self, node: Node, message: Prefill) -> None:
        num_tokens = (len(message.request.prompt_ids) + len(message.request.received_ids)) // 4
        copies = len(message.choices) if message.decode is not None else 1
        taken = prefill_pages(num_tokens, copies, self.page_size, self.lookahead)
        assert taken <= self.pools[node.routing_id].num_pages, "prefill would refuse this prompt for good"
        self.dispatched += [(message.rid, choice) for choice in message.choices]
        node.end_prompt(message.rid, message.attempt)
        for decode in node.group.live("decode"):
            decode.release(message.rid, message.attempt, message.choices)
        self.beat()

    def _idle(self, peer: bytes) -> Load:
        return Load(free_pages=self.pools[peer].num_pages, running=0, waiting=0)


@st.composite
def pools(draw: st.DrawFn, page_size: int, num_drafts: int) -> Pool:
    num_pages = draw(st.integers(2, 6))
    whole = num_pages * page_size
    return Pool(num_pages, draw(st.sampled_from([whole, whole, whole - 1, whole - page_size])), 3, num_drafts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Site, int, int, int]:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_drafts, lookahead = draw(st.sampled_from([(0, 0), (1, 0), (5, 1), (3, 3)]))
    prefills = draw(st.lists(pools(page_size, 0), min_size=1, max_size=2))
    decodes = draw(st.lists(pools(page_size, num_drafts), min_size=1, max_size=3))
    site = Site(page_size, lookahead, prefills, decodes)
    context_len = site.group.context_len
    boundary = draw(st.integers(0, context_len // page_size)) * page_size
    prompt_len = max(1, boundary + draw(st.integers(-3, 3)))
    return site, prompt_len, draw(st.sampled_from([1, 2, 3, max(1, context_len - prompt_len)])), draw(st.integers(1, 5))


@given(cases())
@example((Site(16, 0, [Pool(8, 512, 3, 0)], [Pool(8, 512, 3, 0)]), 127, 2, 1))
@example((Site(16, 1, [Pool(2, 32, 3, 0)], [Pool(6, 96, 3, 5)]), 17, 5, 3))
@settings(max_examples=num_examples(1000), deadline=None)
def test_every_accepted_request_gets_nodes(case: tuple[Site, int, int, int]) -> None:
    site, prompt_len, max_tokens, num_choices = case
    if prompt_len + max_tokens > site.group.context_len and site.group.context_len < 512:
        return  # refused before it comes so far (parameters.py)
    if site.offer(site.request("r", prompt_len, max_tokens, num_choices)):
        assert not site.errors, site.errors
        assert sorted(site.dispatched) == [("r", choice) for choice in range(num_choices)]
        assert site.dispatcher.queues.num_waiting == 0
    else:
        assert site.group.context_len == 512, "nodes that hold their whole context take whatever it holds"


@given(cases(), st.integers(0, 100))
@settings(max_examples=num_examples(500), deadline=None)
def test_a_moved_request_gets_nodes_again_or_blocks_no_other(
    case: tuple[Site, int, int, int], num_received: int
) -> None:
    """A request that has grown is queued before a new one."""
    site, prompt_len, max_tokens, _ = case
    if prompt_len + max_tokens > site.group.context_len or max_tokens < 2:
        return
    moved = site.request("moved", prompt_len, max_tokens)
    moved.sequences[0].received = [7] * min(num_received, max_tokens - 1)
    site.queue(Entry(moved, (0,)))
    assert site.dispatched == [("moved", 0)], "a request that fits its context fits wherever it goes"
    longer = site.request("longer", prompt_len, 10_000)  # accepted when larger nodes were there
    site.queue(Entry(longer, (0,)))
    assert site.dispatcher.queues.num_waiting == 1
    assert site.offer(site.request("small", 1, 1))
    assert site.dispatched[-1] == ("small", 0)
    assert site.dispatcher.queues.num_waiting == 1 and not site.errors


def test_a_request_must_fit_the_pool_of_one_rank() -> None:
    """Pages of several ranks are one number in the node's Hello, and a request can use those of one rank."""
    group = make_group()
    nobody: Any = None
    request = Request("r", group, [5] * 500, SamplingParams(max_tokens=8), nobody, num_choices=1, now=0.0)
    need = Need.of(request, 0, needs_decode=True)
    assert need.decode_pages == 32 == need.prefill_pages
    for num_pools, fits in ((1, True), (2, True), (3, False)):
        prefill, decode = (
            Node(make_hello(role, role, num_pages=66, num_pools=num_pools), group, 0.0)
            for role in ("prefill", "decode")
        )
        assert need.fits_prefill(prefill) == need.fits_decode(decode) == need.fits_local(decode) == fits
        assert need.fits_any([(prefill, decode)]) == fits
    lookahead = need._replace(pages_per_choice=2)
    assert lookahead.most_choices(Node(make_hello("prefill", "p", num_pages=80, num_pools=2), group, 0.0)) == 5


def test_an_error_names_the_pages_of_one_rank() -> None:
    site = Site(16, 0, [Pool(60, 2000, 8, 0)], [Pool(60, 2000, 8, 0)])
    for role in ("prefill", "decode"):
        for node in site.group.live(role):
            node.hello = make_hello(role, node.node_id, num_pages=60, context_len=2000, num_pools=2)
    with pytest.raises(RequestError, match=r"needs 32 pages of 16 tokens; the largest prefill pool has 30"):
        site.dispatcher.submit(site.request("r", 500, 8), 0.0)


def test_only_nodes_that_know_grammars_fit_a_request_with_one() -> None:
    """Older nodes would ignore the grammar."""
    group = make_group()
    old, new = (
        Node(msgspec.structs.replace(make_hello("decode", name), protocol_max=protocol, protocol=protocol), group, 0.0)
        for name, protocol in (("old", GRAMMAR_PROTOCOL - 1), ("new", GRAMMAR_PROTOCOL))
    )
    for grammar, fits in ((None, [True, True]), ("start: /a/", [False, True])):
        request = make_request(group, params={"grammar": grammar})
        need = Need.of(request, 0, needs_decode=True)
        for fit in (need.fits_decode, need.fits_prefill, need.fits_local):
            assert [fit(old), fit(new)] == fits, grammar

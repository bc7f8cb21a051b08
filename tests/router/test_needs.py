"""Who is accepted gets nodes: the real Admission over nodes that reserve as the real ones do, and are idle."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.metadata.errors import BatonError, RequestError
from baton.metadata.handoff.needs import decode_len, pages_of, prefill_pages
from baton.metadata.wire.messages import PROTOCOL_MAX, PROTOCOL_MIN, Hello, Prefill, Reserve, Reserved
from baton.metadata.wire.node_info import Capacity, Load, ModelCard
from baton.metadata.wire.request import SamplingParams
from baton.router.admission import Admission
from baton.router.intake import Bounds
from baton.router.node import Group, GroupKey, Node
from baton.router.queue import Entry
from baton.router.request import Request
from baton.router.text.tokenizer import TextTokenizer

from .fake_nodes import make_layout, make_tokenizer

BOUNDS = Bounds(1000, 1 << 30, 1e9)


@cache
def text_tokenizer() -> TextTokenizer:
    return TextTokenizer(make_tokenizer())


class Pool(NamedTuple):
    """A node's sizes. Its context is what its pool holds, or less, as a real node's is."""

    num_pages: int
    context_len: int
    max_running: int
    num_drafts: int  # of a decode node's rounds


class Site:
    """A group of idle nodes, and what its requests came to."""

    def __init__(self, page_size: int, lookahead: int, prefills: list[Pool], decodes: list[Pool]) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.group: Group | None = None
        self.pools: dict[bytes, Pool] = {}
        for role, pools in (("prefill", prefills), ("decode", decodes)):
            for place, pool in enumerate(pools):
                self.join(role, f"{role}-{place}", pool)
        self.errors: list[BatonError] = []
        self.dispatched: list[tuple[str, int]] = []  # (rid, choice)
        dispatcher: Any = SimpleNamespace(
            send=self._send,
            fail=self._fail,
            unreachable=None,
            unanswered=None,
            is_usable=lambda prefill, decode: True,
            why_unusable=None,
            dispatched=lambda request, attempt, now: None,
        )
        self.admission = Admission("e", BOUNDS, dispatcher)
        self._answers: list[tuple[Node, Reserve]] = []

    def join(self, role: Any, name: str, pool: Pool) -> Node:
        layout = msgspec.structs.replace(make_layout(self.page_size), key_lookahead=self.lookahead)
        hello = Hello(
            role=role,
            node_id=name,
            epoch="1",
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            layout=layout,
            target_fingerprint="f",
            draft_fingerprint=None,
            model=ModelCard("fake", pool.context_len, 420, (1,), 0, "t", None),
            capacity=Capacity(pool.num_pages, self.page_size, pool.max_running),
            data_address="tcp://127.0.0.1:1",
        )
        if self.group is None:
            self.group = Group(GroupKey("s", "f", None, "fake", "t"), hello)
            self.group.tokenizer = text_tokenizer()
        node = Node(hello, self.group, 0.0)
        self.group.nodes[node.routing_id] = node
        self.pools[node.routing_id] = pool
        return node

    def request(self, rid: str, prompt_len: int, max_tokens: int, num_choices: int = 1) -> Request:
        assert self.group is not None
        nobody: Any = None
        params = SamplingParams(max_tokens=max_tokens)
        return Request(rid, self.group, [5] * prompt_len, params, nobody, num_choices=num_choices, now=0.0)

    def offer(self, request: Request) -> bool:
        """Whether the request is accepted. What is accepted is queued, and nodes answer until they have no more to say.
        A node gives back at once what it has granted, so all nodes stay idle."""
        entry = Entry(request, tuple(range(len(request.sequences))))
        try:
            self.admission.check_fits(entry)
        except RequestError:
            return False
        self.queue(entry)
        return True

    def queue(self, entry: Entry) -> None:
        self.admission.submit(entry)
        while self._answers:
            self._answer()
            for node in entry.request.group.live("decode"):  # a heartbeat: it is idle
                node.report(self._idle(node))
            self.admission.pump(entry.request.group)

    def _answer(self) -> None:
        while self._answers:
            node, message = self._answers.pop(0)
            pool = self.pools[node.routing_id]
            num_tokens = (len(message.request.prompt_ids) + len(message.request.received_ids)) // 4
            reserved = decode_len(num_tokens, 2 * pool.num_drafts + 2, pool.context_len)
            fit = pool.num_pages // pages_of(reserved, self.page_size)
            granted = message.choices[:fit]
            self.admission.reserved(node, Reserved(message.rid, message.attempt, granted, self._idle(node)), 0.0)

    def _idle(self, node: Node) -> Load:
        return Load(free_pages=node.hello.capacity.num_pages, running=0, waiting=0)

    def _send(self, node: Node, message: Any) -> bool:
        if isinstance(message, Reserve):
            self._answers.append((node, message))
        else:
            assert isinstance(message, Prefill)
            num_tokens = (len(message.request.prompt_ids) + len(message.request.received_ids)) // 4
            copies = len(message.choices) if message.decode is not None else 1
            taken = prefill_pages(num_tokens, copies, self.page_size, self.lookahead)
            assert taken <= self.pools[node.routing_id].num_pages, "prefill would refuse this prompt for good"
            self.dispatched += [(message.rid, choice) for choice in message.choices]
            node.end_prompt(message.rid, message.attempt)
            for decode in node.group.live("decode"):
                decode.release(message.rid, message.attempt, message.choices)
        return True

    def _fail(self, request: Request, error: BatonError) -> None:
        request.is_over = True
        self.errors.append(error)
        self.admission.withdraw(request)


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
    assert site.group is not None
    context_len = site.group.context_len
    boundary = draw(st.integers(0, context_len // page_size)) * page_size
    prompt_len = max(1, boundary + draw(st.integers(-3, 3)))
    return site, prompt_len, draw(st.sampled_from([1, 2, 3, max(1, context_len - prompt_len)])), draw(st.integers(1, 5))


@given(cases())
@example((Site(16, 0, [Pool(8, 512, 3, 0)], [Pool(8, 512, 3, 0)]), 127, 2, 1))
@example((Site(16, 1, [Pool(2, 32, 3, 0)], [Pool(6, 96, 3, 5)]), 17, 5, 3))
@settings(max_examples=1000, deadline=None)
def test_whoever_is_accepted_gets_nodes(case: tuple[Site, int, int, int]) -> None:
    site, prompt_len, max_tokens, num_choices = case
    assert site.group is not None
    if prompt_len + max_tokens > site.group.context_len and site.group.context_len < 512:
        return  # refused before it comes so far (parameters.py)
    if site.offer(site.request("r", prompt_len, max_tokens, num_choices)):
        assert not site.errors, site.errors
        assert sorted(site.dispatched) == [("r", choice) for choice in range(num_choices)]
        assert site.admission.num_waiting == 0
    else:
        assert site.group.context_len == 512, "nodes that hold their whole context take whatever it holds"


@given(cases(), st.integers(0, 100))
@settings(max_examples=500, deadline=None)
def test_whoever_moves_gets_nodes_again_or_is_in_nobodys_way(
    case: tuple[Site, int, int, int], num_received: int
) -> None:
    """A request that has grown is queued in front of one that has just come."""
    site, prompt_len, max_tokens, _ = case
    assert site.group is not None
    if prompt_len + max_tokens > site.group.context_len or max_tokens < 2:
        return
    moved = site.request("moved", prompt_len, max_tokens)
    moved.sequences[0].received = [7] * min(num_received, max_tokens - 1)
    site.queue(Entry(moved, (0,)))
    assert site.dispatched == [("moved", 0)], "a request that fits its context fits wherever it goes"
    longer = site.request("longer", prompt_len, 10_000)  # accepted when larger nodes were there
    site.queue(Entry(longer, (0,)))
    assert site.admission.num_waiting == 1
    assert site.offer(site.request("small", 1, 1))
    assert site.dispatched[-1] == ("small", 0)
    assert site.admission.num_waiting == 1 and not site.errors

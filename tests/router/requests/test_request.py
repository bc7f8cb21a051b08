"""A sequence merges the pieces that nodes send, in any order, to one output, and counts its failures."""

from __future__ import annotations

import random
from itertools import pairwise
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
from baton.metadata.wire.node_info import FurtherPool, KvPlane, Load, NodeStats
from baton.metadata.wire.request import Ended, FinishReason, SamplingParams, TokenLogprobs, unpack_ids
from baton.router.config import RouterConfig
from baton.router.dispatching.dispatcher import Dispatcher
from baton.router.dispatching.effects import Effect, Error, Send
from baton.router.figures.metrics import Metrics
from baton.router.nodes.node import Node
from baton.router.requests.delta import Delta, TextOptions
from baton.router.requests.need import GRAMMAR_PROTOCOL, Need
from baton.router.requests.request import MAX_AHEAD, Request, Sequence
from baton.router.waiting.entry import Entry

from ..sites import add_node, make_group, make_hello, make_request, text_tokenizer

GROUP = make_group()
P0, P1 = add_node(GROUP, "prefill", "p0"), add_node(GROUP, "prefill", "p1")
D0, D1 = add_node(GROUP, "decode", "d0"), add_node(GROUP, "decode", "d1")
EOS = 1
TEXT = "the quick brown fox — naïve café"
IDS: list[int] = text_tokenizer().inner.encode(TEXT).ids
LOGPROBS = [TokenLogprobs(-float(index)) for index in range(len(IDS))]


def sequence(*stops: str, include_stop: bool = False, **params: Any) -> Sequence:
    text = TextOptions(stops, include_stop)
    return make_request(GROUP, text=text, params={"max_tokens": 100, **params}).sequences[0]


def ended(reason: FinishReason = "length", stop_id: int | None = None) -> Ended:
    return Ended(reason, stop_id, 3, len(IDS), 0)


def send(to: Sequence, first: int, ids: list[int], end: Ended | None = None, now: float = 0.0) -> Delta | None:
    return to.merge(first, ids, (), end, now)


def text_of(ids: list[int]) -> str:
    return text_tokenizer().inner.decode(ids)


def ids_per_character(text: str) -> list[int]:
    """Return one token per character, so that a stop string spans several tokens."""
    return [token for char in text for token in text_tokenizer().inner.encode(char).ids]


@given(st.sets(st.integers(1, len(IDS) - 1)), st.randoms(use_true_random=False))
def test_pieces_in_any_order_with_repeats_make_the_whole_output(cuts: set[int], rng: random.Random) -> None:
    one, pieces = sequence(), list(pairwise([0, *sorted(cuts), len(IDS)]))
    pieces += [(max(0, first - rng.randrange(3)), end) for first, end in pieces if rng.random() < 0.3]  # overlaps
    rng.shuffle(pieces)
    deltas: list[Delta] = []
    for first, end in pieces:
        last = ended() if end == len(IDS) else None
        if one.finish_reason is None:
            delta = one.merge(first, IDS[first:end], LOGPROBS[first:end], last, 1.0)
            assert delta is None or delta.token_ids or delta.finish_reason
            deltas += [delta] if delta is not None else []
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [token for delta in deltas for token in delta.token_ids] == one.received == IDS
    assert [entry for delta in deltas for entry in delta.logprobs] == LOGPROBS
    assert [delta.finish_reason for delta in deltas][-1] == one.finish_reason == "length"


def test_known_tokens_are_dropped() -> None:
    one = sequence()
    send(one, 0, IDS[:4])
    assert send(one, 1, IDS[1:3]) is None and send(one, 3, IDS[3:4]) is None
    delta = one.merge(2, IDS[2:6], LOGPROBS[2:6], None, 0.0)
    assert delta is not None and (delta.token_ids, delta.logprobs) == (IDS[4:6], LOGPROBS[4:6])


def test_held_messages_that_contradict_each_other_raise_nothing_and_the_first_counts() -> None:
    """A faulty node sends the same token twice: with other log-probabilities, then with another end."""
    one = sequence()
    for entry in (LOGPROBS[2], LOGPROBS[0]):
        one.merge(2, IDS[2:3], (entry,), None, 0.0)
    for end in (ended("length"), ended("stop", EOS)):
        one.merge(3, IDS[3:4], (LOGPROBS[3],), end, 0.0)
    delta = one.merge(0, IDS[:2], LOGPROBS[:2], None, 0.0)
    assert delta is not None and (delta.token_ids, delta.logprobs) == (IDS[:4], LOGPROBS[:4])
    assert delta.finish_reason == one.finish_reason == "length"


def test_tokens_beyond_a_gap_are_held_until_it_is_filled() -> None:
    one = sequence()
    send(one, 0, IDS[:1])
    assert send(one, 5, IDS[5:7], now=10.0) is None
    assert send(one, 3, IDS[3:4], now=11.0) is None
    assert one.received == IDS[:1] and one.gap_since == 10.0
    one.num_resends, one.ahead_from = 2, D0
    delta = send(one, 1, IDS[1:3], now=12.0)
    assert delta is not None and delta.token_ids == IDS[1:4]
    assert (one.gap_since, one.num_resends) == (10.0, 2), "token 4 is missing still"
    delta = send(one, 4, IDS[4:5], now=13.0)
    assert delta is not None and delta.token_ids == IDS[4:7]
    assert (one.gap_since, one.num_resends, one.ahead_from) == (None, 0, None)


def test_the_tokens_held_beyond_a_gap_are_bounded() -> None:
    ids = (IDS * 10)[: MAX_AHEAD + 10]
    one = sequence()
    for first in range(1, len(ids)):
        assert send(one, first, ids[first : first + 1]) is None
    delta = send(one, 0, ids[:1])
    assert delta is not None and delta.token_ids == ids[: 1 + MAX_AHEAD]
    assert one.gap_since is None, "what was not kept is missing when the next token comes"


def test_an_end_beyond_a_gap_waits_for_the_gap() -> None:
    one = sequence()
    assert send(one, 2, IDS[2:4], ended("stop", None)) is None and one.finish_reason is None
    delta = send(one, 0, IDS[:2])
    assert delta is not None and (delta.token_ids, delta.finish_reason) == (IDS[:4], "stop")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_counts_and_is_not_shown(include: bool) -> None:
    """A special token has no text. An ordinary one shows whether it is hidden."""
    one = sequence(include_stop=include)
    delta = send(one, 0, IDS[:3], ended("stop", IDS[2]))
    assert delta is not None and (delta.finish_reason, delta.stop_reason) == ("stop", IDS[2])
    assert delta.token_ids == one.received == IDS[:3]
    assert delta.text == text_of(IDS[: 3 if include else 2])


def test_only_the_last_token_is_the_stop_token() -> None:
    one, ids = sequence(), [IDS[2], IDS[0], IDS[2]]
    delta = send(one, 0, ids, ended("stop", IDS[2]))
    assert delta is not None and delta.text == text_of(ids[:2])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_stop_string_ends_the_output_however_tokens_divide_it(step: int, include: bool) -> None:
    one, ids = sequence("k bro", include_stop=include), ids_per_character(TEXT)
    num_shown = TEXT.index("k bro") + len("k bro")
    assert len(ids) > len(TEXT), "some characters take several tokens"
    text, shown = "", list[int]()
    for first in range(0, len(ids), step):
        delta = send(one, first, ids[first : first + step])
        text, shown = text + (delta.text if delta else ""), shown + (delta.token_ids if delta else [])
        if one.finish_reason is not None:
            break
        assert "k" not in text, "held back"
    assert text == TEXT[: num_shown - (0 if include else len("k bro"))]
    assert one.received == shown == ids[:num_shown], "no token after it counts"
    assert delta is not None and (delta.finish_reason, delta.stop_reason) == ("stop", "k bro")


def test_text_held_back_as_a_possible_stop_string_is_shown_at_the_end() -> None:
    one = sequence("quilt")
    ids = ids_per_character("the qui")
    deltas = [send(one, at, [token]) for at, token in enumerate(ids)]
    assert "".join(delta.text for delta in deltas if delta) == "the "
    last = send(one, len(ids), [EOS], ended("stop", EOS))
    assert last is not None and last.text == "qui"


@pytest.mark.parametrize("step", [1, 100])
def test_no_stop_string_ends_before_min_tokens(step: int) -> None:
    ids = ids_per_character("stop stop stop")
    for min_tokens, num_tokens in ((4, 4), (5, 9), (9, 9), (10, 14)):
        one = sequence("stop", min_tokens=min_tokens)
        for first in range(0, len(ids), step):
            if one.finish_reason is None:
                send(one, first, ids[first : first + step])
        assert (one.finish_reason, len(one.received)) == ("stop", num_tokens)


def test_the_last_bytes_can_complete_a_stop_string() -> None:
    """An incomplete character becomes U+FFFD at the end, and may complete a stop string."""
    first_byte = text_tokenizer().inner.encode("—").ids[:1]
    one = sequence("\ufffd")
    assert send(one, 0, first_byte) == Delta("", first_byte, [], None, None)
    delta = send(one, 1, [], ended())
    assert delta is not None and (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "\ufffd")


def test_a_restart_drops_tokens_beyond_a_gap_and_continues_after_the_received_ones() -> None:
    one = sequence()
    send(one, 0, IDS[:2])
    one.attempt = one.request.begin_attempt({0}, P0, D0, 0.0)
    send(one, 4, IDS[4:6])
    one.ahead_from, one.num_resends = D0, 2
    one.restart()
    assert (one.attempt, one.gap_since, one.ahead_from, one.num_resends, one.num_before) == (None, None, None, 0, 2)
    delta = send(one, 2, IDS[2:4])
    assert delta is not None and delta.token_ids == IDS[2:4]
    wire = one.request.wire_request(0)
    assert unpack_ids(wire.received_ids) == IDS[:4] and one.num_left == 96


@pytest.mark.parametrize(("num_tokens", "is_progress"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize("is_loss", [False, True])
def test_failures_and_losses_count_anew_after_more_than_one_token(
    num_tokens: int, is_progress: bool, is_loss: bool
) -> None:
    one = sequence()
    for number in range(3):  # the tokens of earlier attempts do not count as this one's
        send(one, number, IDS[number : number + 1])
        one.note_end(attempt := one.request.begin_attempt({0}, P0, D0, 0.0), is_loss=is_loss)
        one.restart()
    assert (len(one.failures), one.num_losses) == ((0, 3) if is_loss else (3, 0))
    send(one, 3, IDS[3 : 3 + num_tokens])
    one.note_end(attempt, is_loss=is_loss)
    count = 1 if is_progress else 4
    assert (one.failures, one.num_losses) == (([], count) if is_loss else ([attempt.pair] * count, 0))


def test_progress_clears_both_counts() -> None:
    one = sequence()
    attempt = one.request.begin_attempt({0}, P0, D0, 0.0)
    one.note_end(attempt, is_loss=True)
    one.note_end(attempt, is_loss=False)
    send(one, 0, IDS[:2])
    one.note_end(attempt, is_loss=False)
    assert (len(one.failures), one.num_losses) == (1, 0)


def test_failures_on_a_node_that_is_gone_are_forgiven() -> None:
    request = make_request(GROUP, num_choices=2)
    pairs = [(P0, D0), (P1, D0), (P0, D1), (P1, D1)]
    for prefill, decode in pairs:
        attempt = request.begin_attempt({0, 1}, prefill, decode, 0.0)
        request.note_failure(attempt)
        for each in request.sequences:
            each.note_end(attempt, is_loss=False)
    assert all(request.has_failed_on(*pair) for pair in pairs) and not request.has_failed_on(P0, None)
    request.forgive(D0)
    assert [request.has_failed_on(*pair) for pair in pairs] == [False, False, True, True]
    left = [(node.routing_id, D1.routing_id) for node in (P0, P1)]
    assert [each.failures for each in request.sequences] == [left, left]
    request.forgive(P1)
    assert request.failed_pairs == {left[0]} and request.sequences[1].failures == left[:1]


def test_the_nodes_of_an_attempt() -> None:
    request = make_request(GROUP)
    attempt = request.begin_attempt({0}, P0, D0, 0.0)
    assert attempt.nodes == [D0], "no prefill node has it yet"
    attempt.dispatched = True
    assert attempt.nodes == [P0, D0]
    attempt.prefill_done = True
    assert attempt.nodes == [D0]
    alone = request.begin_attempt({0}, None, D0, 0.0)
    assert alone.prefill_done and alone.nodes == [D0] and alone.pair == (None, D0.routing_id)
    first_only = request.begin_attempt({0}, P0, None, 0.0)
    assert first_only.nodes == []
    assert [attempt.number, alone.number, first_only.number] == [0, 1, 2]


def test_a_request_is_complete_when_all_of_it_is_here() -> None:
    request = make_request(GROUP, num_choices=2, wants_prompt_logprobs=True)
    send(request.sequences[0], 0, IDS[:2], ended())
    assert not request.is_complete and not request.lacks_prompt
    send(request.sequences[1], 0, IDS[:3], ended())
    assert not request.is_complete and request.lacks_prompt and request.wire_request(0).prompt_logprobs
    request.prompt_logprobs = ()
    assert request.is_complete and not request.lacks_prompt and not request.wire_request(0).prompt_logprobs
    assert request.num_generated == 5


def test_counts_of_ended_sequences_add_up_and_cached_tokens_are_the_first_attempts() -> None:
    request = make_request(GROUP, num_choices=2)
    request.count(
        Ended("stop", EOS, 3, 5, 16, num_rounds=4, num_drafted=12, num_accepted=6, accept_counts=(1, 1, 1, 1))
    )
    request.count(Ended("length", None, 3, 5, 32, num_rounds=1, num_drafted=2, num_accepted=2, accept_counts=(0, 0, 1)))
    assert (request.num_cached, request.num_rounds, request.num_drafted, request.num_accepted) == (16, 5, 14, 8)
    assert request.accept_counts == [1, 1, 2, 1]


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


def test_a_request_must_fit_the_pool_of_an_idle_node() -> None:
    group = make_group()
    nobody: Any = None
    request = Request("r", group, [5] * 500, SamplingParams(max_tokens=8), nobody, num_choices=1, now=0.0)
    need = Need.of(request, 0, needs_decode=True)
    assert need.decode_pages == 32 == need.prefill_pages
    for num_pages, fits in ((66, True), (32, True), (31, False)):
        prefill, decode = (
            Node(make_hello(role, role, num_pages=num_pages), group, 0.0) for role in ("prefill", "decode")
        )
        assert need.fits_prefill(prefill) == need.fits_decode(decode) == need.fits_local(decode) == fits
        assert need.fits_any([(prefill, decode)]) == fits
    lookahead = need._replace(pages_per_choice=2)
    assert lookahead.most_choices(Node(make_hello("prefill", "p", num_pages=40), group, 0.0)) == 5


@pytest.mark.parametrize(("window", "num_tails"), [(0, 0), (5, 1), (6, 2), (22, 3), (2000, 32)])
def test_a_decode_node_needs_the_tail_pages_that_the_next_tokens_read_and_write(window: int, num_tails: int) -> None:
    """Of 500 tokens and two rounds in 32 pages of 16."""
    group = make_group()
    pool = FurtherPool("window", 1, (KvPlane("k", 1, 8, "float32"),), window)
    target = msgspec.structs.replace(group.layout.target, further=(pool,))
    group.layout = msgspec.structs.replace(group.layout, target=target)
    need = Need.of(make_request(group, prompt_len=500), 0, needs_decode=True)
    assert (need.decode_pages, need.num_tails) == (32, num_tails)


def test_an_error_names_the_pages_of_the_largest_pool() -> None:
    site = Site(16, 0, [Pool(60, 2000, 8, 0)], [Pool(60, 2000, 8, 0)])
    for role in ("prefill", "decode"):
        for node in site.group.live(role):
            node.hello = make_hello(role, node.node_id, num_pages=30, context_len=2000)
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

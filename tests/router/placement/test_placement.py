"""Placement chooses the nodes of a request: from figures alone, and in a router with fake nodes."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire import messages as m
from baton.metadata.wire.membership import IDLE, Heartbeat
from baton.metadata.wire.messages import Compute, Reserve, Reserved
from baton.metadata.wire.node_info import Capacity, Load, NodeStats, RankLoad
from baton.metadata.wire.request import unpack_ids
from baton.router.nodes.node import Node
from baton.router.placement import placement
from baton.router.placement.placement import (
    ANSWER_S,
    ASK_S,
    DecodeFigures,
    Placement,
    PrefillFigures,
    PrefixAffinity,
    Reservations,
    SessionAffinity,
    choose_decode,
    choose_prefill,
    decode_reason,
    prefill_reason,
)
from baton.router.placement.prompt_placement import GroupFacts, LocalPrefill
from baton.router.requests import streams
from baton.router.requests.request import Attempt, Request, page_hashes
from baton.router.waiting.queue import Entry

from ..conftest import System
from ..fake_nodes import FakeNode
from ..sites import add_node, make_group, make_request
from ..test_runner import own, text_of, wait_until


def decode(free: int = 100, running: int = 0, most: int = 10, *, is_full: bool = False) -> DecodeFigures:
    return DecodeFigures(free, running, most, is_full)


def test_decode_takes_the_least_loaded_with_room() -> None:
    assert choose_decode([decode(running=3), decode(running=1), decode(running=2)], 5) == 1
    assert choose_decode([decode(running=3), decode(running=1, free=4)], 5) == 0
    assert choose_decode([decode(running=3), decode(is_full=True)], 5) == 0
    assert choose_decode([decode(running=10), decode(running=9)], 5) == 1
    assert choose_decode([decode(running=5, most=100), decode(running=1, most=2)], 5) == 0
    assert choose_decode([decode(free=50), decode(free=60)], 5) == 1


def test_no_decode_node_is_chosen_if_all_are_full() -> None:
    assert choose_decode([], 1) is None
    assert choose_decode([decode(free=4), decode(is_full=True), decode(running=10)], 5) is None


def test_prefill_trades_affinity_against_load() -> None:
    cached = PrefillFigures(queued_tokens=500, num_queued=1, max_queued=8, cached_tokens=900)
    idle = PrefillFigures(queued_tokens=0, num_queued=0, max_queued=8, cached_tokens=0)
    assert choose_prefill([idle, cached], 1000) == 1
    assert choose_prefill([idle, cached._replace(queued_tokens=1000)], 1000) == 0
    assert choose_prefill([idle._replace(num_queued=1), idle], 10) == 1
    assert choose_prefill([idle._replace(num_queued=8)], 10) is None


def test_a_session_returns_to_its_nodes_unless_others_are_much_less_loaded() -> None:
    last = decode(running=4, most=20)._replace(is_sessions=True)
    assert choose_decode([decode(running=3, most=20), last], 5) == 1
    assert choose_decode([decode(running=1, most=20), last], 5) == 0, "more than a tenth of its places fuller"
    assert choose_decode([decode(running=3, most=20), last._replace(is_full=True)], 5) == 0
    idle = PrefillFigures(queued_tokens=0, num_queued=0, max_queued=8, cached_tokens=0)
    last_prefill = idle._replace(queued_tokens=900, num_queued=2, is_sessions=True)
    assert choose_prefill([idle, last_prefill], 1000) == 1
    assert choose_prefill([idle, last_prefill._replace(queued_tokens=1100)], 1000) == 0
    assert choose_prefill([idle, last_prefill._replace(num_queued=8)], 1000) == 0


LAST = decode(running=4, most=20)._replace(is_sessions=True)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ([decode(running=3), decode(running=1), decode(running=2)], "least loaded of 3 decode nodes: 1 running of 10"),
        ([decode(running=5, most=100), decode(running=1, most=2)], "least loaded of 2 decode nodes: 5 running of 100"),
        ([decode(running=3), decode(running=1, free=4)], ""),
        ([decode(running=3), decode(is_full=True), decode(running=10)], ""),
        (
            [decode(free=50, running=9), decode(free=40), decode(free=30)],
            "of the least loaded of 3 decode nodes (0 running of 10) it has the most free pages: 40",
        ),
        ([decode(running=2), decode(running=2)], "none of 2 decode nodes is less loaded: 2 running of 10"),
        (
            [decode(running=3, most=20), LAST],
            "the session stays with its decode node: 4 running of 20, elsewhere 3 of 20",
        ),
        ([decode(running=5, most=20), LAST], "least loaded of 2 decode nodes: 4 running of 20"),
        ([decode(running=1, most=20), LAST], "least loaded of 2 decode nodes: 1 running of 20"),
    ],
)
def test_the_reason_for_a_decode_node_is_what_was_compared(figures: list[DecodeFigures], reason: str) -> None:
    index = choose_decode(figures, 5)
    assert index is not None and decode_reason(figures, 5, index) == reason


QUEUE = PrefillFigures(queued_tokens=0, num_queued=0, max_queued=8, cached_tokens=0)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (
            [QUEUE._replace(queued_tokens=1200), QUEUE],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 1,000, the next 2,200",
        ),
        (
            [QUEUE, QUEUE._replace(queued_tokens=500, cached_tokens=900)],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 600, the next 1,000",
        ),
        ([QUEUE, QUEUE], "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 1,000"),
        (
            [QUEUE._replace(num_queued=2), QUEUE._replace(num_queued=1)],
            "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 1,000, and it has the fewest "
            "prompts: 1",
        ),
        (
            [QUEUE, QUEUE._replace(queued_tokens=900, is_sessions=True)],
            "the session stays with its prefill node: 900 tokens to compute before this prompt, elsewhere at least "
            "1,000 up to its end",
        ),
        (
            [QUEUE, QUEUE._replace(queued_tokens=1100, is_sessions=True)],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 1,000, the next 1,100",
        ),
        ([QUEUE, QUEUE._replace(num_queued=8)], ""),
    ],
)
def test_the_reason_for_a_prefill_node_is_what_was_compared(figures: list[PrefillFigures], reason: str) -> None:
    index = choose_prefill(figures, 1000)
    assert index is not None and prefill_reason(figures, 1000, index) == reason


def test_a_place_says_why_it_has_its_nodes() -> None:
    group = make_group()
    first, decodes = add_node(group, "prefill", "p0"), [add_node(group, "decode", "d0")]
    ready = {first, decodes[0]}
    placement = Placement(lambda prefill, decode: {prefill, decode} <= ready)
    entry = Entry(make_request(group, prompt_len=40), (0,))

    def reasons() -> tuple[str, str]:
        place = placement.choose(entry, 0.0)
        assert place is not None and place.prefill is first and place.decode is decodes[0]
        return place.prefill_reason, place.decode_reason

    assert reasons() == ("the only prefill node", "the only decode node")
    decodes.append(add_node(group, "decode", "d1"))
    unready = "the only one of 2 decode nodes that can serve it: others are not ready or too small"
    assert reasons()[1] == unready
    ready.add(decodes[1])
    decodes[1].refuse(0.0)
    assert reasons()[1] == "the only one of 2 decode nodes that has room now"
    entry.request.failed_pairs.add((first.routing_id, decodes[1].routing_id))
    assert reasons()[1] == unready + ", or the request failed there"
    placement.begin_prompt(first, entry, 0, 0.0)
    assert reasons()[0] == "the only prefill node; it probably holds 32 of the prompt's 40 tokens in its prefix cache"
    entry.pair = first, decodes[0]
    assert reasons()[1] == "a canary request tries this node"


def test_sessions_are_kept_apart_by_tenant_and_found_by_header_or_field(make_system: Callable[..., System]) -> None:
    system = make_system(router={"tenant_header": "X-Tenant", "trusted_proxy": ("127.0.0.1",)}).up(2, 2)

    def nodes(prompt: list[int], session: dict[str, str], **body: object) -> tuple[str, str]:
        asked = {"model": "fake", "prompt": prompt, "max_tokens": 5, **body}
        status, answer, _ = system.router.request("POST", "/v1/completions", asked, session)
        assert status == 200
        found = [
            node.name
            for kind in (m.Prefill, m.Reserve)
            for node in system.cluster.nodes
            if any(each.rid == answer["id"] for each in own(node, kind))
        ]
        return found[0], found[1]

    for n in range(8):
        nodes([40 + n] * 20, {"X-Session-ID": f"s{n}"})
    dispatcher = system.router.router.dispatcher._dispatcher
    session = dispatcher._placement._prefill_sessions._nodes
    assert len(session) == 8
    first, last = next(iter(session)), dispatcher.registry
    other = next(key for key, node in last.nodes.items() if node.role == "prefill" and key != session[first])
    system.router.call(lambda: session.__setitem__(first, other))
    expected = system.router.call(lambda: last.nodes[other].node_id)
    assert nodes([90] * 20, {"x-session-affinity": "s0"})[0] == expected
    assert nodes([91] * 20, {}, prompt_cache_key="s0")[0] == expected
    nodes([92] * 20, {"X-Session-ID": "s0", "X-Tenant": "acme"})
    assert len(session) == 9, "it is another session"


def test_a_prefill_node_gets_the_next_prompt_shortly_before_it_is_idle_if_tenants_share_it() -> None:
    group = make_group()
    node = add_node(group, "prefill", "p0")
    is_shared = [False]
    placement = Placement(lambda *_: True, lambda _: is_shared[0])
    entry = Entry(make_request(group, prompt_len=20, params={"max_tokens": 1}), (0,))

    def is_placed(queued_tokens: int, token_s: float = 1e-3) -> bool:
        node.report(Load(100, 0, 0, queued_tokens=queued_tokens, prompt_token_s=token_s), 10.0)
        return placement.choose(entry, 10.0) is not None

    node.begin_prompt("other", 0, 1000, 0.0)
    assert is_placed(1000) and not placement.take_held()
    is_shared[0] = True
    assert is_placed(140) and is_placed(1000, token_s=0.0) and not placement.take_held()
    assert not is_placed(160)
    assert placement.take_held() == {group} and not placement.take_held()


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_a_decode_node_gets_the_next_local_prompt_shortly_before_it_has_none_if_tenants_share_it(
    mode: LocalPrefill,
) -> None:
    group = make_group()
    group.facts = GroupFacts(mode, decodes_compute=True)
    nodes = [add_node(group, "decode", "d0"), *([add_node(group, "prefill", "p0")] if mode == "auto" else ())]
    is_shared = [False]
    placement = Placement(lambda *_: True, lambda _: is_shared[0])
    entry = Entry(make_request(group, prompt_len=20), (0,))

    def is_placed(queued_tokens: int) -> bool:
        for node in nodes:
            node.report(Load(100, 0, 0, queued_tokens=queued_tokens, prompt_token_s=1e-3, round_s=1e-3), 10.0)
        return placement.choose(entry, 10.0) is not None

    for node in nodes:
        node.begin_prompt("other", 0, 1000, 0.0)
    assert is_placed(1000) and not placement.take_held()
    is_shared[0] = True
    assert is_placed(140) and not placement.take_held()
    assert not is_placed(160)
    assert placement.take_held() == {group} and not placement.take_held()


def test_a_prompt_that_fits_no_node_is_refused(make_system: Callable[..., System]) -> None:
    system = make_system(num_pages=8).up()
    status, body, _ = system.complete(prompt="a " * 120)
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "8" in body["error"]["message"]
    assert system.complete()[0] == 200


def test_load_is_spread(make_system: Callable[..., System]) -> None:
    system = make_system().up(2, 2)
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(system.complete, prompt=f"{place} hello") for place in range(8)]
        decodes = [node for node in system.cluster.nodes if node.role == "decode"]
        wait_until(lambda: sum(len(own(node, m.Reserve)) for node in decodes) == 8)
        system.behaviour.hold.set()
        assert [future.result()[0] for future in futures] == [200] * 8
    assert max(len(own(node, m.Reserve)) for node in decodes) <= 5  # four each, but for a canary's place


@pytest.mark.parametrize("kind", ["draining", "no such capacity"])
def test_draining_and_too_small_nodes_get_no_requests(make_system: Callable[..., System], kind: str) -> None:
    system = make_system().up(1, 2)
    unwilling = system.cluster.by_name("d0")
    if kind == "draining":
        unwilling.post(m.Leaving(done=False, reason="SIGTERM"))
    else:
        unwilling.stop()
        system.cluster.nodes.remove(unwilling)
        unwilling = system.cluster.add("decode", "small", capacity=Capacity(1, 16, 64))
    time.sleep(0.2)
    before = len(own(unwilling, m.Reserve))
    for _ in range(4):
        assert system.complete(prompt="hello " * 9)[0] == 200
    assert len(own(unwilling, m.Reserve)) == before


@pytest.mark.timing
@pytest.mark.parametrize("len_left", [0, 1, 2])
def test_a_prompt_about_as_large_as_the_pool_is_served_or_refused_at_once(
    make_system: Callable[..., System], len_left: int
) -> None:
    """The pool has 8 pages of 16 tokens. A prompt with room for two rounds is served. A longer prompt is refused on
    arrival and delays no other request."""
    system = make_system(num_pages=8).up()
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(system.complete, prompt=[5] * (8 * 16 - len_left), max_tokens=2)
        time.sleep(0.1)
        assert system.complete()[0] == 200
        status, body, _ = large.result()
    assert time.monotonic() - begun < 5, "a request waited for room that no node has"
    assert (status, body.get("error", {}).get("param")) == ((200, None) if len_left == 2 else (400, "prompt")), body


@pytest.mark.parametrize("is_local", [False, True])
def test_a_request_goes_where_one_rank_has_room(is_local: bool) -> None:
    """The pools of an idle node together have more pages than the busy node, but none has enough for the request."""
    group = make_group()
    nodes = [] if is_local else [add_node(group, "prefill", "p0", context_len=2000)]
    ranked = add_node(group, "decode", "d0", context_len=2000, num_pools=2)
    whole = add_node(group, "decode", "d1", context_len=2000)
    ranked.report(Load(80, 0, 0, ranks=(RankLoad(38, 0), RankLoad(42, 0))), 0.0)
    whole.report(Load(60, 3, 0), 0.0)
    whole.reserve("other", 0, range(3), 0)
    group.look(0.0, node_wait_s=0.0)
    group.look(60.0, node_wait_s=0.0)
    placement = Placement(lambda _prefill, _decode: True)
    for prompt_len, chosen in ((16 * 45, whole), (16 * 30, ranked)):
        entry = Entry(make_request(group, prompt_len=prompt_len), (0,))
        place = placement.choose(entry, 0.0)
        assert place is not None and (place.decode, [place.prefill]) == (chosen, nodes or [None]), place


class Site:
    """A request of 3 choices whose decode node is asked at time 0 for the pages of two of them."""

    def __init__(self, *, has_prefill: bool = True) -> None:
        group = make_group()
        self.prefill: Node | None = add_node(group, "prefill", "p0") if has_prefill else None
        self.decode, self.other = add_node(group, "decode", "d0"), add_node(group, "decode", "d1")
        self.request: Request = make_request(group, prompt_len=20, num_choices=3)
        self.entry = Entry(self.request, (0, 1, 2))
        self.reservations = Reservations("epoch")
        self.attempt: Attempt = self.request.begin_attempt({1, 2}, self.prefill, self.decode, 0.0)
        self.asked = self.reservations.begin(self.entry, self.attempt, self.decode, 0.0)

    def reserved(self, *granted: int, attempt: int = 0, rid: str = "r") -> Reserved:
        return Reserved(rid, attempt, granted, Load(free_pages=90, running=1, waiting=0))

    def check_open(self) -> None:
        """Check that the reservation waits for its answer."""
        assert len(self.reservations) == 1 and self.entry.attempt is self.attempt
        assert self.reservations.get("r", self.attempt.number) is self.entry
        assert self.decode.units_of("r", self.attempt.number) == {1, 2}
        assert self.decode.pledged_pages == 2 * (self.entry.need.decode_pages or 0) > 0

    def check_over(self) -> None:
        """Check that the reservation is over."""
        assert len(self.reservations) == 0 and self.entry.attempt is None
        assert self.reservations.get("r", self.attempt.number) is None
        assert self.decode.pledged_pages == 0
        assert self.reservations.repeat(1e6) == [] and self.reservations.overdue(1e6) == []


def test_the_node_is_asked_and_its_books_have_it() -> None:
    site = Site()
    site.check_open()
    assert isinstance(site.asked, Reserve) and site.prefill is not None
    assert (site.asked.router_epoch, site.asked.rid, site.asked.attempt) == ("epoch", "r", 0)
    assert site.asked.choices == (1, 2) and site.asked.prefill == site.prefill.peer_of(site.decode)
    assert unpack_ids(site.asked.request.prompt_ids) == [5] * 20


def test_without_a_prefill_node_the_decode_node_is_asked_to_compute() -> None:
    site = Site(has_prefill=False)
    site.check_open()
    assert isinstance(site.asked, Compute) and site.asked.choices == (1, 2)
    assert [type(message) for _, message in site.reservations.repeat(ASK_S + 0.1)] == [Compute]


@pytest.mark.parametrize("granted", [(1, 2), (2,), (0, 2, 7), ()])
def test_an_answer_ends_the_reservation_and_keeps_the_granted_choices(granted: tuple[int, ...]) -> None:
    site = Site()
    answer = site.reserved(*granted)
    kept = tuple(choice for choice in (1, 2) if choice in granted)
    assert site.reservations.answered(site.decode, answer) == (site.entry, site.attempt, kept)
    site.check_over()
    assert site.decode.units_of("r", 0) == set(kept)
    assert site.reservations.answered(site.decode, answer) is None, "a second answer"
    assert site.decode.units_of("r", 0) == set(kept)


def test_an_unexpected_answer_changes_nothing() -> None:
    site = Site()
    assert site.reservations.answered(site.other, site.reserved(1, 2)) is None
    assert site.reservations.answered(site.decode, site.reserved(1, 2, attempt=1)) is None
    assert site.reservations.answered(site.decode, site.reserved(1, 2, rid="s")) is None
    site.check_open()


def test_the_node_is_asked_again_until_it_answers() -> None:
    site, asked_at = Site(), list[float]()
    for tick in range(1, 21):  # 2.5 s
        for node, message in site.reservations.repeat(tick / 8):
            assert node is site.decode and message == site.asked
            asked_at.append(tick / 8)
    assert asked_at == [ASK_S + 0.125, 2 * (ASK_S + 0.125), 3 * (ASK_S + 0.125), 4 * (ASK_S + 0.125)]
    assert site.attempt.num_asks == 5
    site.check_open()
    site.reservations.answered(site.decode, site.reserved(1))
    site.check_over()


def test_a_node_in_one_step_since_it_was_asked_is_not_late() -> None:
    """It has not read the question. After its step it has the usual time."""
    site, now = Site(), ANSWER_S + 5.0
    assert [attempt for _, attempt in site.reservations.overdue(now)] == [site.attempt]
    cases = (("decode", now + 0.2, False), ("decode", now - 3.0, True), (IDLE, now, True), ("decode", 1e3, True))
    for phase, age_s, is_late in cases:
        site.decode.heard(beat_of(phase, age_s), now)
        assert bool(site.reservations.overdue(now)) == is_late, (phase, age_s)


def beat_of(phase: str, age_s: float) -> Heartbeat:
    return Heartbeat(7, phase, age_s, 60.0, Load(free_pages=90, running=1, waiting=0), NodeStats())


def test_a_repeat_names_the_choices_that_are_left() -> None:
    site = Site()
    site.attempt.choices.discard(1)
    [(_, message)] = site.reservations.repeat(ASK_S + 0.1)
    assert message.choices == (2,)


def test_a_reservation_is_overdue_however_often_it_was_asked_for() -> None:
    site = Site()
    for tick in range(1, 8 * round(ANSWER_S) + 1):
        site.reservations.repeat(tick / 8)
        assert site.reservations.overdue(tick / 8) == []
    assert site.reservations.overdue(ANSWER_S + 0.01) == [(site.request, site.attempt)]
    site.check_open()


def test_a_reservation_is_taken_back_once() -> None:
    site = Site()
    assert site.reservations.take_back(site.request, site.attempt) is site.entry
    site.check_over()
    assert site.decode.holds_nothing
    again = site.request.begin_attempt({0}, site.prefill, site.decode, 1.0)
    site.reservations.begin(site.entry, again, site.decode, 1.0)
    assert site.reservations.take_back(site.request, site.attempt) is None
    assert len(site.reservations) == 1 and site.entry.attempt is again and site.decode.units_of("r", 1) == {0}
    assert site.reservations.answered(site.decode, site.reserved(1, 2)) is None, "it comes too late"


def test_a_granted_reservation_cannot_be_taken_back() -> None:
    site = Site()
    site.reservations.answered(site.decode, site.reserved(1, 2))
    assert site.reservations.take_back(site.request, site.attempt) is None
    assert site.decode.units_of("r", 0) == {1, 2}


def test_an_answer_to_a_reservation_twice_cancels_nothing(system: System) -> None:
    answers: list[m.Reserved] = []

    def grant_twice(node: FakeNode, message: m.Reserve) -> bool:
        node.reserve(message)
        answers.append(m.Reserved(message.rid, message.attempt, message.choices, node.load()))
        node.link.send(answers[-1])
        return True

    system.behaviour.answer_reserve = grant_twice
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    cancels = system.cluster.by_name("d0").got(m.Cancel)
    assert len(answers) == 1 and not cancels, cancels


@pytest.mark.parametrize("lost", ["Reserve", "Reserved"])
def test_a_lost_reservation_is_asked_for_again(system: System, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The reservation or its answer is lost. The node repeats what it granted, and the request keeps its attempt."""
    monkeypatch.setattr(placement, "ASK_S", 0.1)
    asked: list[m.Reserve] = []

    def lose(node: FakeNode, message: m.Reserve) -> bool:
        if message.rid.startswith("canary"):
            return False
        asked.append(message)
        if len(asked) == 1 and lost == "Reserve":
            return True
        node.reserved.update({(message.rid, choice, message.attempt): message for choice in message.choices})
        if len(asked) > 1:
            node.link.send(m.Reserved(message.rid, message.attempt, message.choices, node.load()))
        return True

    system.behaviour.answer_reserve = lose
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert len(asked) == 2 and asked[0] == asked[1]
    assert not system.cluster.by_name("d0").got(m.Cancel)


def test_messages_that_may_be_lost_are_asked_for_within_2_s() -> None:
    assert placement.ASK_S <= streams.SILENCE_S <= 2.0


def test_a_reservation_is_asked_for_again_before_its_claims_are_given_up() -> None:
    assert inspect.signature(HandoffServer).parameters["lease_s"].default > placement.ASK_S


def test_partial_grants_are_dispatched_at_once(make_system: Callable[..., System]) -> None:
    """There is room for two of four choices. Granted choices are dispatched at once, as attempts of their own."""
    system = make_system(max_running=64, num_pages=4).up()
    _, body, _ = system.complete(prompt="a " * 12, n=4)
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 4
    prefills = own(system.cluster.by_name("p0"), m.Prefill)
    assert sorted(choice for prefill in prefills for choice in prefill.choices) == [0, 1, 2, 3]
    assert len({prefill.attempt for prefill in prefills}) == len(prefills) >= 2
    assert len({(prefill.rid, prefill.request.params.seed) for prefill in prefills}) == 1
    system.router.wait_idle()


def test_n_choices_cost_one_prefill(system: System) -> None:
    system.complete(n=8)
    assert [prefill.choices for prefill in own(system.cluster.by_name("p0"), m.Prefill)] == [tuple(range(8))]


def test_a_full_node_is_asked_again_when_it_announces_room(make_system: Callable[..., System]) -> None:
    """The node refuses though its figures promise room. The request waits until the node announces capacity."""
    system = make_system().up()
    refused = 0

    def refuse_twice(node: FakeNode, message: m.Reserve) -> bool:
        nonlocal refused
        if message.rid.startswith("canary") or refused == 2:
            return False
        refused += 1
        load = node.load()
        busy = m.Load(free_pages=0, running=1, waiting=0)
        node.link.send(m.Reserved(message.rid, message.attempt, (), busy))
        node.post(m.CapacityFreed(load), after_s=0.1)
        return True

    system.behaviour.answer_reserve = refuse_twice
    assert text_of(system, stream=False) == system.text
    assert refused == 2


def test_a_request_that_an_empty_node_refuses_ends_with_an_error(make_system: Callable[..., System]) -> None:
    """The prompt fits by the figures, but the empty node refuses it. The request must not wait for ever."""
    system = make_system().up()

    def refuse(node: FakeNode, message: m.Reserve) -> bool:
        node.link.send(m.Reserved(message.rid, message.attempt, (), node.load()))
        return True

    system.behaviour.answer_reserve = refuse
    status, body, _ = system.complete()
    assert (status, body["error"]["param"]) == (400, "prompt")
    system.behaviour.answer_reserve = None
    system.router.wait_idle()


def test_the_sessions_that_are_idle_longest_are_forgotten() -> None:
    sessions = SessionAffinity(max_sessions=2)
    assert sessions.node_of(b"a") is None
    for session, node in ((b"a", 1), (b"b", 2), (b"a", 3), (b"c", 4), (None, 5)):
        sessions.note(session, node)
    assert [sessions.node_of(session) for session in (b"a", b"b", b"c", None)] == [3, None, 4, None]


def test_a_page_hash_depends_on_the_salt_and_all_tokens_up_to_its_end() -> None:
    ids = list(range(40))
    assert len(page_hashes(ids, 16, "")) == 2
    assert len(page_hashes(ids[:32], 16, "")) == 1  # the page of the last token is always computed
    assert page_hashes(ids[:16], 16, "") == []
    assert page_hashes(ids, 16, "")[0] == page_hashes([*ids[:20], *ids[:20]], 16, "")[0]
    assert page_hashes(ids, 16, "")[1] != page_hashes([*ids[:20], *ids[:20]], 16, "")[1]
    assert set(page_hashes(ids, 16, "a")).isdisjoint(page_hashes(ids, 16, "b"))
    changed = page_hashes([9, *ids[1:]], 16, "")
    assert set(changed).isdisjoint(page_hashes(ids, 16, "")), "a page depends on all tokens before it"


def test_affinity_is_bounded_and_forgets_ends_first() -> None:
    affinity = PrefixAffinity(max_pages=4)
    affinity.note("a", [1, 2, 3])
    assert affinity.num_matched("a", [1, 2, 3, 4]) == 3
    assert affinity.num_matched("a", [1, 9, 3]) == 1
    assert affinity.num_matched("b", [1, 2, 3]) == 0
    affinity.note("a", [7, 8])
    assert affinity.num_matched("a", [7, 8]) == 2
    assert affinity.num_matched("a", [1, 2, 3]) == 2
    affinity.forget("a")
    assert affinity.num_matched("a", [7, 8]) == 0


def test_equal_prefixes_meet_on_one_prefill_node(make_system: Callable[..., System]) -> None:
    system = make_system().up(2, 1)
    prefix = "the quick brown fox jumps over lazy dogs " * 3
    for place in range(6):
        system.complete(prompt=f"{prefix}{place}")
    assert sorted(len(own(node, m.Prefill)) for node in system.cluster.nodes if node.role == "prefill") == [0, 6]

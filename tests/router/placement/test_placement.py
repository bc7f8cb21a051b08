"""Placement chooses the nodes of a request: from figures alone, and in a router with fake nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity, Load
from baton.router.nodes.prompt_role import GroupFacts, LocalPrefill, PromptTimes
from baton.router.placement.node_choice import EXPECTED_S, DecodeFigures, choose_decode, decode_reason
from baton.router.placement.placement import Placement
from baton.router.placement.prompt_placement import RemoteFigures, choose_remote, remote_reason
from baton.router.waiting.entry import Entry

from ..conftest import System
from ..dispatching.test_runner import own, wait_until
from ..sites import add_node, make_group, make_request, tell_pages


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


QUEUE = RemoteFigures(0, 1000, PromptTimes(), 0.0, 0.0)
MEASURED = PromptTimes(1e-3, 0.0)


@pytest.mark.parametrize("times", [PromptTimes(), MEASURED])
def test_prefill_trades_affinity_against_load(times: PromptTimes) -> None:
    idle = QUEUE._replace(times=times)
    cached = idle._replace(num_queued_tokens=500, num_prompts=1, num_uncached_tokens=100)
    assert choose_remote([idle, cached]) == 1
    assert choose_remote([idle, cached._replace(num_queued_tokens=1000)]) == 0
    assert choose_remote([idle._replace(num_prompts=1), idle]) == 1
    assert choose_remote([]) is None


def test_a_session_returns_to_its_nodes_unless_others_are_much_less_loaded() -> None:
    last = decode(running=4, most=20)._replace(is_sessions=True)
    assert choose_decode([decode(running=3, most=20), last], 5) == 1
    assert choose_decode([decode(running=1, most=20), last], 5) == 0, "more than a tenth of its places fuller"
    assert choose_decode([decode(running=3, most=20), last._replace(is_full=True)], 5) == 0
    for idle in (QUEUE, QUEUE._replace(times=MEASURED)):
        last_prefill = idle._replace(num_queued_tokens=900, num_prompts=2, is_sessions=True)
        assert choose_remote([idle, last_prefill]) == 1
        assert choose_remote([idle, last_prefill._replace(num_queued_tokens=1100)]) == 0


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


FAST = QUEUE._replace(times=MEASURED)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (
            [QUEUE._replace(num_queued_tokens=1200), QUEUE],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 1,000, the next 2,200",
        ),
        (
            [QUEUE, QUEUE._replace(num_queued_tokens=500, num_uncached_tokens=100)],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 600, the next 1,000",
        ),
        ([QUEUE, QUEUE], "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 1,000"),
        (
            [QUEUE._replace(num_prompts=2), QUEUE._replace(num_prompts=1)],
            "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 1,000, and it has the fewest "
            "prompts: 1",
        ),
        (
            [QUEUE, QUEUE._replace(num_queued_tokens=900, is_sessions=True)],
            "the session stays with its prefill node: 900 tokens to compute before this prompt, elsewhere at least "
            "1,000 up to its end",
        ),
        (
            [QUEUE, QUEUE._replace(num_queued_tokens=1100, is_sessions=True)],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 1,000, the next 1,100",
        ),
        ([QUEUE], ""),
        (
            [FAST, FAST._replace(num_queued_tokens=900, is_sessions=True)],
            "the session stays with its prefill node: the first two tokens in 1900.0 ms with 1,900 tokens to compute, "
            "elsewhere in 1000.0 ms",
        ),
    ],
)
def test_the_reason_for_a_prefill_node_is_what_was_compared(figures: list[RemoteFigures], reason: str) -> None:
    index = choose_remote(figures)
    assert index is not None and remote_reason(figures, index) == reason


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
    placement.figures.begin_prompt(first, entry, 0, 0.0)
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
    session = dispatcher._placement.figures._prefill_sessions._nodes
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
        wait_until(lambda: "degraded" in system.router.request("GET", "/ready")[1])
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


SHARED = decode(running=4, most=20)._replace(cached_share=1.0)


def test_a_decode_node_with_pages_of_the_prompt_may_be_a_little_fuller() -> None:
    assert choose_decode([decode(running=4, most=20), SHARED], 5) == 1
    assert choose_decode([decode(running=3, most=20), SHARED], 5) == 1
    assert choose_decode([decode(running=1, most=20), SHARED], 5) == 0
    assert choose_decode([decode(running=4, most=20), SHARED._replace(is_full=True)], 5) == 0
    quick = SHARED._replace(handoff_s=0.01, round_s=0.005)  # the handoff costs as much as half a sequence
    assert choose_decode([decode(running=3, most=20), quick], 5) == 0
    assert choose_decode([decode(running=3, most=20), quick._replace(handoff_s=0.1)], 5) == 1
    assert choose_decode([decode(running=0, most=20), quick._replace(handoff_s=9.0)], 5) == 0, "SESSION_SLACK at most"


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (
            [decode(running=3, most=20), SHARED],
            "it has 100% of the prompt in its prefix cache: 4 running of 20, elsewhere 3 of 20",
        ),
        ([decode(running=6, most=20), SHARED], "least loaded of 2 decode nodes: 4 running of 20"),
    ],
)
def test_the_reason_names_cached_pages_if_they_decide(figures: list[DecodeFigures], reason: str) -> None:
    assert choose_decode(figures, 5) == 1 and decode_reason(figures, 5, 1) == reason


@pytest.mark.parametrize("late", [False, True])
def test_the_next_turn_goes_to_the_nodes_that_have_told_its_pages(late: bool) -> None:
    """Also if the router has never given them the prompt: it may have started since."""
    group = make_group()
    prefills = [add_node(group, "prefill", f"p{index}") for index in range(3)]
    decodes = [add_node(group, "decode", f"d{index}") for index in range(3)]
    placement = Placement(lambda prefill, decode: True)
    entry = Entry(make_request(group, prompt_len=100), (0,))
    for node in (*prefills, *decodes):
        tell_pages(node, entry.names, {"p1": 3, "p2": 5, "d1": 6}.get(node.node_id, 0))
    if late:
        for node in (*prefills, *decodes):
            node.cache.count(99, -100.0)
    place = placement.choose(entry, 0.0)
    assert place is not None and place.prefill is not None and place.decode is not None
    if late:
        assert (place.prefill.node_id, place.decode.node_id) == ("p0", "d0")
        assert "its news of cached pages is late, so load alone counts" in place.prefill_reason
        return
    assert (place.prefill.node_id, place.decode.node_id) == ("p2", "d1")
    assert "; it holds 80 of the prompt's 100 tokens in its prefix cache" in place.prefill_reason
    assert place.decode_reason.startswith("it has 96% of the prompt in its prefix cache")
    assert placement.figures.begin_prompt(place.prefill, entry, 0, 0.0) == 20


def test_no_prompt_is_placed_by_the_pages_of_another_tenant() -> None:
    group = make_group()
    nodes = [add_node(group, "prefill", name) for name in ("p0", "p1")] + [add_node(group, "decode", "d0")]
    placement = Placement(lambda prefill, decode: True)
    own = Entry(make_request(group, prompt_len=100, cache_salt="a"), (0,))
    others = Entry(make_request(group, prompt_len=100, cache_salt="b"), (0,))
    for node in nodes:
        tell_pages(node, own.names, 6 if node.node_id == "p1" else 0)
    places = [placement.choose(entry, 0.0) for entry in (own, others)]
    assert [place and place.prefill and place.prefill.node_id for place in places] == ["p1", "p0"]
    assert places[1] is not None and "prefix cache" not in places[1].prefill_reason + places[1].decode_reason


def test_pages_of_a_prompt_under_way_are_expected_until_the_node_would_have_told_them() -> None:
    """Requests that share a prefix and come together meet on one node."""
    group = make_group()
    nodes = [add_node(group, "prefill", name) for name in ("p0", "p1")] + [add_node(group, "decode", "d0")]
    placement = Placement(lambda prefill, decode: True)
    entry = Entry(make_request(group, prompt_len=100), (0,))
    for node in nodes:
        tell_pages(node, entry.names, 0)
    second = nodes[1]
    placement.figures.begin_prompt(second, entry, 0, 10.0)
    assert placement.figures._num_uncached(second, entry, 60.0) == 4, "the prompt still waits there"
    second.end_prompt(entry.request.rid, 0)
    assert placement.figures._num_uncached(second, entry, 11.0) == 4
    assert placement.figures._num_uncached(second, entry, 10.1 + EXPECTED_S) == 100, "it has told nothing of them"

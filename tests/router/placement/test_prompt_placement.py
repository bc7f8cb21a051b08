"""Who computes a prompt: the decision as a function, its facts, and requests that follow it through the dispatcher."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.cache.names import PromptNames
from baton.metadata.errors import RequestError
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import NodeStats
from baton.metadata.wire.request import SamplingParams, TokenLogprobs, Unit, unpack_ids
from baton.router.dispatching.dispatcher import SLOW_TICK_S
from baton.router.dispatching.streams import SILENCE_S
from baton.router.nodes.node import NodeGroup
from baton.router.nodes.prompt_role import LOST_S, EstimateError, GroupFacts, PromptTimes, patience_s, place_prompt
from baton.router.placement.prompt_placement import (
    BUSY_STREAMS,
    LOAD_ROUNDS,
    LocalFigures,
    RemoteFigures,
    choose_local,
    choose_remote,
    local_reason,
    place_sooner,
    remote_reason,
)
from baton.router.requests.request import Request

from ..conftest import System
from ..dispatching.test_dispatcher import IDS, Client, World, load
from ..dispatching.test_runner import own, wait_until
from ..sites import add_node, make_group, tell_pages

OLD = m.Compute.since - 1  # a protocol whose decode nodes cannot compute prompts


@pytest.mark.parametrize(
    ("mode", "lacks_prefill", "decodes_compute", "place"),
    [
        ("never", False, True, ("remote", "never")),
        ("never", True, True, ("local", "no prefill node")),
        ("never", True, False, ("remote", "no able decode node")),
        ("always", False, True, ("local", "always")),
        ("always", True, True, ("local", "no prefill node")),
        ("always", False, False, ("remote", "no able decode node")),
    ],
)
def test_the_place_of_a_prompt_and_its_reason(
    mode: Any, lacks_prefill: bool, decodes_compute: bool, place: tuple[str, str]
) -> None:
    found = place_prompt(GroupFacts(mode, lacks_prefill, decodes_compute))
    assert found[:2] == place and bool(found.words) == (found.reason != "never")


@pytest.mark.parametrize("mode", ["never", "auto", "always"])
def test_without_a_working_handoff_decode_nodes_compute(mode: Any) -> None:
    found = place_prompt(GroupFacts(mode, decodes_compute=True, lacks_handoff=True))
    assert found is not None and found[:2] == ("local", "no ready pair")
    assert place_prompt(GroupFacts(mode, lacks_handoff=True))[:2] == ("remote", "no able decode node")


# --- the comparison of nodes ---

LENGTHS = st.integers(0, 20_000)
SECONDS = st.floats(0, 1)
TIMES = st.builds(PromptTimes, st.floats(1e-6, 1e-2), SECONDS, st.integers(0, 1000), st.floats(0, 1e-2))
ERRORS = st.floats(0.5, 4)
COUNTS = st.integers(0, 8)
REMOTES = st.builds(RemoteFigures, LENGTHS, LENGTHS, TIMES, SECONDS, SECONDS, ERRORS, COUNTS, st.just(False))
LOCAL_TIMES = TIMES | st.just(PromptTimes())
LOCALS = st.builds(LocalFigures, LENGTHS, LENGTHS, LOCAL_TIMES, SECONDS, st.booleans(), *[COUNTS] * 4, ERRORS)
PREFILL = RemoteFigures(0, 4096, PromptTimes(2e-5, 4e-3), 0.02, 0.006)  # about 100 ms
DECODE = LocalFigures(0, 4096, PromptTimes(5e-5, 6e-3), 0.006, True, 3, 16, 100, 10)  # about 220 ms


@given(st.lists(REMOTES, max_size=3), st.lists(LOCALS, max_size=3))
def test_no_node_brings_the_first_two_tokens_sooner_than_the_one_that_is_chosen(
    remotes: list[RemoteFigures], locals_: list[LocalFigures]
) -> None:
    place, index = place_sooner(remotes, locals_)
    assert place.words
    may = [each for each in locals_ if each.num_running < each.max_running and each.room >= each.num_pages]
    may = [each for each in may if each.has_room and each.times.are_known]
    best = min(may, key=lambda each: each.two_tokens_s + LOAD_ROUNDS * each.num_running * each.round_s, default=None)
    remote_s = [each.two_tokens_s for each in remotes]
    if place.where == "remote":
        assert (index is None) == (not remotes)
        assert index is None or remotes[index].two_tokens_s == min(remote_s)
        if best is not None:
            assert remotes and (best.two_tokens_s >= min(remote_s)) == (place.reason == "sooner")
        return
    assert index is not None and best is not None
    assert locals_[index].two_tokens_s + locals_[index].load_s == best.two_tokens_s + best.load_s
    assert all(locals_[index].two_tokens_s < each for each in remote_s)


def test_the_prefill_node_that_is_compared_is_the_one_that_gets_the_prompt() -> None:
    """The first node has fewer tokens before it, but computes them slowly."""
    slow, fast = PREFILL._replace(times=PromptTimes(1e-4, 4e-3)), PREFILL._replace(num_queued_tokens=1000)
    place, index = place_sooner([slow, fast], [DECODE])
    assert (place.where, place.remote_s, index) == ("remote", fast.two_tokens_s, 1)


def test_a_prefill_node_that_has_not_told_its_times_comes_first_of_equals() -> None:
    unknown = PREFILL._replace(times=PromptTimes())
    assert choose_remote([PREFILL, unknown, PREFILL]) == 1
    assert choose_remote([PREFILL, unknown._replace(num_queued_tokens=1)]) == 0
    assert choose_remote([]) is None


@given(st.lists(REMOTES, min_size=1, max_size=3), st.lists(LOCALS, min_size=1, max_size=3), LENGTHS)
def test_a_longer_queue_of_a_role_never_brings_it_prompts(
    remotes: list[RemoteFigures], locals_: list[LocalFigures], more: int
) -> None:
    before = place_sooner(remotes, locals_)
    busier = [each._replace(num_queued_tokens=each.num_queued_tokens + more) for each in remotes]
    if before.place.where == "local":
        assert place_sooner(busier, locals_) == before._replace(place=place_sooner(busier, locals_).place)
    elif before.place.reason in ("sooner", "streams would wait"):
        slower = [each._replace(num_queued_tokens=each.num_queued_tokens + more) for each in locals_]
        assert place_sooner(remotes, slower).place.where == "remote"


@pytest.mark.parametrize(
    ("remote", "local", "place"),
    [
        ({}, {}, ("remote", "sooner")),
        ({"num_queued_tokens": 8192}, {"num_running": 2}, ("local", "sooner")),
        ({"num_queued_tokens": 8192}, {"num_running": 10}, ("remote", "streams would wait")),
        ({"num_uncached_tokens": 32}, {"num_uncached_tokens": 32}, ("local", "sooner")),
        ({"num_uncached_tokens": 96}, {"num_uncached_tokens": 96}, ("remote", "sooner")),
        (
            {"num_uncached_tokens": 96},
            {"num_uncached_tokens": 96, "num_running": 0, "times": PromptTimes(2e-5, 4e-3)},
            ("local", "sooner"),
        ),
        ({}, {"num_uncached_tokens": 100}, ("local", "sooner")),
        ({"num_queued_tokens": 8192}, {"has_room": False}, ("remote", "no room in the gap bound")),
        ({"num_queued_tokens": 8192}, {"num_running": 16}, ("remote", "decode nodes full")),
        ({"num_queued_tokens": 8192}, {"room": 9}, ("remote", "decode nodes full")),
        ({"num_queued_tokens": 8192, "times": PromptTimes()}, {}, ("remote", "not measured")),
        ({"num_queued_tokens": 8192}, {"times": PromptTimes()}, ("remote", "not measured")),
        ({}, {"times": PromptTimes(), "num_running": 0, "num_uncached_tokens": 9}, ("remote", "not measured")),
    ],
)
def test_the_sooner_place_of_a_prompt(remote: dict[str, Any], local: dict[str, Any], place: tuple[str, str]) -> None:
    found = place_sooner([PREFILL._replace(**remote)], [DECODE._replace(**local)])
    assert found.place[:2] == place and found.node_index == 0, found


def test_the_seconds_of_a_long_queue_are_those_of_full_chunks_until_its_rest_is_short() -> None:
    times = PromptTimes(1e-4, 5e-3, num_paced=500, rest_token_s=4e-5)
    assert times.seconds(400) == pytest.approx(0.045) and times.seconds(1500) == pytest.approx(0.005 + 0.05 + 0.04)
    assert times._replace(num_paced=0).seconds(1500) == pytest.approx(0.155), "one pace for all"


def test_a_prompt_is_remote_if_the_streams_of_the_decode_node_would_wait_too_long() -> None:
    """With 8,192 tokens before it the first two tokens come 43 ms sooner on the decode node. A token of the chunks
    takes 20 us, so 4,096 tokens take 82 ms, in which each stream waits."""
    busy = PREFILL._replace(num_queued_tokens=8192)
    assert busy.two_tokens_s - DECODE.two_tokens_s == pytest.approx(0.0429, abs=1e-4)
    for num_running, where in ((9, "local"), (10, "remote")):
        decode = DECODE._replace(num_running=num_running)
        assert decode.stall_s(2e-5) == pytest.approx(num_running / BUSY_STREAMS * num_running * 4096 * 2e-5)
        place, index = place_sooner([busy], [decode])
        assert (place.where, index) == (where, 0) and (place.reason == "streams would wait") == (where == "remote")
    assert place.words == (
        "a decode node would bring the first two tokens sooner (on average in 219.8 ms, by a prefill node in "
        "262.8 ms), but its streams would wait too long"
    )


def test_a_history_in_the_cache_outweighs_a_few_sequences_of_load() -> None:
    """Four rounds of 6 ms count as much as 480 tokens."""
    idle, cached = DECODE._replace(num_running=0), DECODE._replace(num_uncached_tokens=100)
    assert choose_local([idle, cached._replace(num_running=5)]) == 1
    assert choose_local([idle, cached._replace(num_running=9)]) == 0
    assert choose_local([idle, idle._replace(num_running=1), idle._replace(num_queued_tokens=100)]) == 0
    assert choose_local([idle._replace(num_queued_tokens=470), idle._replace(num_running=1)]) == 0
    assert choose_local([idle._replace(num_queued_tokens=490), idle._replace(num_running=1)]) == 1


def test_the_local_prompts_of_a_session_go_to_its_node_unless_others_are_much_sooner() -> None:
    """The session's node counts as if it had the prompt, and a tenth of its places as free: 1.6 sequences."""
    idle, last = DECODE._replace(num_running=0), DECODE._replace(num_running=2, is_sessions=True)
    assert choose_local([idle, last]) == 1
    other = idle._replace(num_uncached_tokens=100)
    assert choose_local([other, last._replace(num_running=1)]) == 1
    assert choose_local([other, last]) == 0, "it has the history too, and is less loaded"
    assert choose_local([idle, last._replace(num_queued_tokens=5000)]) == 0
    assert choose_local([idle, last._replace(num_running=16)]) == 0, "it is full"
    unknown = DECODE._replace(times=PromptTimes())
    assert choose_local([unknown, unknown._replace(num_running=4, is_sessions=True)]) == 1
    assert choose_local([unknown, unknown._replace(num_running=5, is_sessions=True)]) == 0


def test_a_node_with_room_and_known_times_comes_first() -> None:
    unknown = DECODE._replace(times=PromptTimes(), num_running=0)
    assert choose_local([unknown, DECODE._replace(has_room=False), DECODE]) == 2
    assert choose_local([unknown, DECODE._replace(has_room=False)]) == 1
    assert choose_local([unknown._replace(num_running=1), unknown]) == 1
    assert choose_local([DECODE._replace(num_running=16)]) is None


def test_without_a_free_prefill_node_a_decode_node_gets_the_prompt() -> None:
    assert place_sooner([], [DECODE]) == (("local", "prefill nodes full", None, DECODE.two_tokens_s, 1.0), 0)
    place, index = place_sooner([], [DECODE._replace(has_room=False)])
    assert place[:2] == ("remote", "prefill nodes full") and index is None


def test_the_words_name_both_times() -> None:
    words = place_sooner([PREFILL], [DECODE]).place.words
    assert words == "the first two tokens come sooner: on average in 98.9 ms, by a decode node in 219.8 ms"


LATER, UNKNOWN = PREFILL._replace(num_queued_tokens=1000), PREFILL._replace(times=PromptTimes())


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ([PREFILL], ""),
        (
            [LATER, PREFILL],
            "of 2 prefill nodes it brings the first two tokens first: in 98.9 ms with 4,096 tokens to compute, "
            "the next in 118.9 ms",
        ),
        (
            [PREFILL, PREFILL],
            "none of 2 prefill nodes brings the first two tokens sooner: in 98.9 ms with 4,096 tokens to compute",
        ),
        (
            [PREFILL, UNKNOWN],
            "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 4,096, and its times are not "
            "measured yet",
        ),
        (
            [UNKNOWN, LATER],
            "of 2 prefill nodes it has the fewest tokens to compute up to the prompt's end: 4,096, the next 5,096",
        ),
        ([UNKNOWN, UNKNOWN], "none of 2 prefill nodes has fewer tokens to compute up to the prompt's end: 4,096"),
    ],
)
def test_the_reason_for_a_prefill_node_is_what_was_compared(figures: list[RemoteFigures], reason: str) -> None:
    index = choose_remote(figures)
    assert index is not None and remote_reason(figures, index) == reason


IDLE = DECODE._replace(num_running=0)
NEW = IDLE._replace(times=PromptTimes())
SESSIONS = IDLE._replace(num_queued_tokens=2000, is_sessions=True)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ([DECODE], ""),
        ([DECODE, IDLE._replace(num_running=16)], ""),
        (
            [DECODE, IDLE._replace(num_running=2)],
            "of 2 decode nodes it costs least: 219.8 ms to the first two tokens and 48.0 ms for its 2 running, "
            "elsewhere at least 291.8 ms in all",
        ),
        (
            [IDLE, SESSIONS],
            "the session stays with its decode node: 319.8 ms to the first two tokens and 0.0 ms for its 0 running, "
            "elsewhere at least 219.8 ms in all",
        ),
        (
            [IDLE, SESSIONS._replace(num_queued_tokens=5000)],
            "of 2 decode nodes it costs least: 219.8 ms to the first two tokens and 0.0 ms for its 0 running, "
            "elsewhere at least 265.0 ms in all",
        ),
        (
            [IDLE, IDLE._replace(room=200)],
            "of the least loaded of 2 decode nodes (0 running of 16) it has the most free pages: 200",
        ),
        (
            [NEW, DECODE, IDLE._replace(has_room=False)],
            "the only one of 3 decode nodes that has measured times and room for a prompt beside its streams",
        ),
        ([NEW, IDLE._replace(has_room=False)], "the only one of 2 decode nodes that has measured times"),
        ([NEW._replace(num_running=1), NEW], "least loaded of 2 decode nodes: 0 running of 16"),
        (
            [NEW, NEW._replace(num_running=1, is_sessions=True)],
            "the session stays with its decode node: 1 running of 16, elsewhere 0 of 16",
        ),
    ],
)
def test_the_reason_for_a_decode_node_that_computes_is_what_was_compared(
    figures: list[LocalFigures], reason: str
) -> None:
    index = choose_local(figures)
    assert index is not None and local_reason(figures, index) == reason


@given(st.lists(LOCALS, min_size=2, max_size=4))
def test_a_node_said_to_be_the_cheapest_or_the_least_loaded_is_that(figures: list[LocalFigures]) -> None:
    index = choose_local(figures)
    if index is None:
        return
    reason, chosen = local_reason(figures, index), figures[index]
    others = [each for number, each in enumerate(figures) if number != index and not each.is_full]
    assert bool(reason) == bool(others)
    if "costs least" in reason:
        peers = [each for each in others if each.is_ready or (not chosen.is_ready and each.times.are_known)]
        assert all(chosen.cost_s < each.cost_s for each in peers)
    if reason.startswith("least loaded") and not chosen.times.are_known:
        assert all(chosen.num_running / chosen.max_running < each.num_running / each.max_running for each in others)


def test_a_group_that_never_had_a_prefill_node_waits_longer() -> None:
    assert patience_s(10.0, had_prefill=False) == 5.0 and patience_s(10.0, had_prefill=True) == LOST_S
    assert patience_s(0.4, had_prefill=True) == 0.2, "less than requests wait"


def test_a_group_computes_locally_while_it_lacks_a_prefill_node() -> None:
    group = make_group()
    add_node(group, "decode", "d0")
    assert not group.look(0.0, 10.0) and not group.look(5.0, 10.0) and not group.local_nodes()
    assert group.look(5.1, 10.0) and [node.node_id for node in group.local_nodes()] == ["d0"]
    assert group.can_serve and "decode nodes compute prompts, since no prefill node is here" in group.placement_words
    prefill = add_node(group, "prefill", "p0")
    assert group.look(6.0, 10.0) and not group.computes_locally and "prefill nodes" in group.placement_words
    prefill.cordon()
    assert not group.look(60.0, 10.0), "an operator may put it back"
    del group.nodes[prefill.routing_id]
    assert not group.look(60.5, 10.0) and group.look(60.0 + LOST_S + 0.1, 10.0) and group.computes_locally


def joined_by_old_node(group: NodeGroup) -> None:
    node = add_node(group, "decode", "old")
    node.protocol = OLD


def test_one_decode_node_that_cannot_compute_prompts_keeps_a_group_remote() -> None:
    group = make_group()
    add_node(group, "decode", "d0")
    joined_by_old_node(group)
    assert not group.look(0.0, 1.0) and not group.look(9.0, 1.0) and not group.can_serve


# --- through the dispatcher ---


def local_world(*names: str, **settings: Any) -> World:
    """Return a world whose decode nodes may get local prompts, after its nodes have been there for a while."""
    world = World(*(names or ("d0",)), **settings)
    world.dispatcher.health.is_usable = lambda *_: True  # type: ignore[method-assign]
    world.wait(6.0)
    return world


def grant_local(world: World, name: str = "d0") -> m.Compute:
    asked = world.got(name, m.Compute)[-1]
    world.say(name, m.Reserved(asked.rid, asked.attempt, asked.choices, load(90)))
    return asked


def test_without_a_prefill_node_a_decode_node_computes_the_prompt() -> None:
    world = local_world()
    client = world.submit(max_tokens=3, n=2)
    asked = grant_local(world)
    assert asked.choices == (0, 1) and not world.got("d0", m.Reserve)
    for choice in (0, 1):
        world.tokens("d0", asked, 0, IDS[:1], choice=choice)
        world.tokens("d0", asked, 1, IDS[1:3], choice=choice, reason="length")
    assert client.num_done == 1 and client.ids == {0: IDS[:3], 1: IDS[:3]}
    world.check_books()


def test_requests_go_on_locally_while_no_pair_hands_pages_over() -> None:
    """As between hosts whose network drops large packets. When a pair hands over again, it gets the prompts again."""
    world = World("p0", "d0")
    health: Any = world.dispatcher.health
    health.is_usable = lambda *_: True
    client = world.submit(max_tokens=4)
    world.grant()
    asked = world.got("d0", m.Reserve)[-1]
    world.tokens("p0", asked, 0, IDS[:1])
    health.is_usable, health.hands_over = lambda prefill, _: prefill is None, lambda _: False
    unit = Unit(asked.rid, 0, asked.attempt)
    world.say("d0", m.Failed(unit=unit, code="transfer_error", message="no page came", retryable=True))
    assert not world.got("d0", m.Compute)
    world.wait(LOST_S + 0.5)
    local = grant_local(world)
    assert local.attempt == 1 and unpack_ids(local.request.received_ids) == IDS[:1]
    world.tokens("d0", local, 1, IDS[1:4], reason="length")
    assert client.num_done == 1 and client.ids == {0: IDS[:4]} and not client.errors
    world.check_books()
    health.is_usable, health.hands_over = lambda *_: True, lambda _: True
    world.wait(0.5)
    world.running(world.submit(max_tokens=2))
    assert len(world.got("d0", m.Compute)) == 1 and len(world.got("p0", m.Prefill)) == 2


def test_the_trace_of_a_local_prompt_has_its_time_and_its_reason() -> None:
    world = local_world()
    client = world.submit(max_tokens=3)
    asked = grant_local(world)
    world.wait(0.2)
    world.tokens("d0", asked, 0, IDS[:1])
    world.wait(0.1)
    world.tokens("d0", asked, 1, IDS[1:3], reason="length")
    spans = {span.name: span for span in client.request.timeline.read(world.now).sequences[0].spans}
    assert (
        spans["local prefill"].reason == "local, since no prefill node is here" and spans["local prefill"].node == "d0"
    )
    assert spans["local prefill"].seconds == pytest.approx(0.2) and spans["decode"].seconds == pytest.approx(0.1)


def test_one_token_needs_pages_of_the_decode_node_if_the_prompt_is_local() -> None:
    world = local_world()
    client = world.submit(max_tokens=1)
    asked = world.got("d0", m.Compute)[-1]
    assert world.node("d0").pledged_pages == 1
    grant_local(world)
    world.tokens("d0", asked, 0, IDS[:1], reason="length")
    assert client.num_done == 1
    world.check_books()


def test_prompts_go_to_a_prefill_node_again_when_one_joins() -> None:
    world = local_world()
    first = world.submit(max_tokens=2)
    asked = grant_local(world)
    world.join("p0")
    world.wait(0.5)
    world.running(world.submit(max_tokens=2))
    assert len(world.got("d0", m.Compute)) == 1 and len(world.got("p0", m.Prefill)) == 1
    world.tokens("d0", asked, 0, IDS[:2], reason="length")
    assert first.num_done == 1, "what runs locally goes on there"


def test_requests_go_on_locally_when_the_only_prefill_node_is_lost() -> None:
    world = World("p0", "d0")
    world.dispatcher.health.is_usable = lambda *_: True  # type: ignore[method-assign]
    client = world.submit(max_tokens=4)
    world.grant()
    world.tokens("p0", world.got("d0", m.Reserve)[-1], 0, IDS[:1])
    world.lose("p0")
    world.wait(LOST_S + 0.5)
    asked = grant_local(world)
    assert asked.attempt == 1 and unpack_ids(asked.request.received_ids) == IDS[:1]
    world.tokens("d0", asked, 1, IDS[1:4], reason="length")
    assert client.num_done == 1 and client.ids == {0: IDS[:4]}
    world.check_books()


@pytest.mark.parametrize("wants", [False, True])
def test_always_sends_prompts_to_decode_nodes(wants: bool) -> None:
    world = local_world("p0", "d0", local_prefill="always")
    world.submit(wants_prompt_logprobs=wants)
    assert len(world.got("d0", m.Compute)) == 1 and not world.got("d0", m.Reserve)


TOLD = (TokenLogprobs(-1.0, (), ()),) * 2


def say_scores(world: World, asked: m.Compute, logprobs: tuple[TokenLogprobs, ...] = TOLD, name: str = "d0") -> None:
    world.say(name, m.PrefillDone(asked.rid, asked.attempt, 0.0, 0.1, 0, load(90), prompt_logprobs=logprobs))


@pytest.mark.parametrize("is_first", [True, False])
def test_log_probabilities_of_a_local_prompt_come_from_the_decode_node(is_first: bool) -> None:
    """They come before or after the last token."""
    world = local_world()
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = grant_local(world)
    assert asked.request.prompt_logprobs
    if is_first:
        say_scores(world, asked)
    world.tokens("d0", asked, 0, IDS[:2], reason="length")
    assert client.num_ends == is_first
    if not is_first:
        say_scores(world, asked)
    assert (client.num_done, client.ids, client.request.prompt_logprobs) == (1, {0: IDS[:2]}, TOLD)
    assert [span.name for span in client.request.timeline.read(world.now).sequences[0].spans][-2:] == [
        "decode",
        "finish",
    ]
    world.check_books()


def test_log_probabilities_of_a_local_prompt_that_were_lost_are_computed_again() -> None:
    """The decode node does not keep them. What it is asked brings no token."""
    world = local_world()
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = grant_local(world)
    world.tokens("d0", asked, 0, IDS[:2], reason="length")
    world.wait(SILENCE_S + 2 * SLOW_TICK_S)
    (again,) = world.got("d0", m.Resend)
    assert again.first == 2 and not client.num_ends
    world.say("d0", m.Failed(again.unit, "unavailable", "the node does not know this request any more", True))
    second = grant_local(world)
    assert second.attempt == 1 and second.request.prompt_logprobs
    assert unpack_ids(second.request.received_ids) == IDS[:2]
    world.tokens("d0", second, 2, IDS[2:3], reason="length")  # a node samples a token after each prompt
    say_scores(world, second)
    assert (client.num_done, client.ids, client.request.prompt_logprobs) == (1, {0: IDS[:2]}, TOLD)
    world.check_books()


def test_log_probabilities_of_a_local_prompt_are_computed_elsewhere_if_their_node_is_lost() -> None:
    world = local_world("d0", "d1")
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    name, other = ("d0", "d1") if world.got("d0", m.Compute) else ("d1", "d0")
    asked = grant_local(world, name)
    world.tokens(name, asked, 0, IDS[:2], reason="length")
    world.lose(name)
    again = grant_local(world, other)
    assert again.request.prompt_logprobs and not client.num_ends
    say_scores(world, again, name=other)
    assert client.num_done == 1 and client.request.prompt_logprobs == TOLD
    world.check_books()


def test_a_choice_that_fails_brings_the_log_probabilities_in_its_next_attempt() -> None:
    """The choice whose chunks score the prompt runs out of memory. The other choice ends without them."""
    world = local_world("d0", "d1")
    client = world.submit(max_tokens=2, n=2, wants_prompt_logprobs=True)
    name, other = ("d0", "d1") if world.got("d0", m.Compute) else ("d1", "d0")
    asked = grant_local(world, name)
    world.say(name, m.Failed(Unit(asked.rid, 0, 0), "out_of_memory", "no memory", retryable=True))
    again = grant_local(world, other)
    assert again.choices == (0,) and again.request.prompt_logprobs
    world.tokens(name, asked, 0, IDS[:2], choice=1, reason="length")
    say_scores(world, again, name=other)
    world.tokens(other, again, 0, IDS[:2], reason="length")
    assert client.num_done == 1 and client.request.prompt_logprobs == TOLD
    world.check_books()


def test_log_probabilities_of_a_part_of_a_local_prompt_are_not_taken() -> None:
    world = local_world()
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = grant_local(world)
    say_scores(world, asked, TOLD[:1])
    world.tokens("d0", asked, 0, IDS[:2], reason="length")
    assert (client.num_ends, client.num_done) == (1, 0) and "log-probabilities" in str(client.errors[0])
    world.check_books()


def test_a_local_prompt_must_fit_the_pool_of_a_decode_node() -> None:
    world = local_world()
    world.join("small", num_pages=20)
    world.lose("d0")
    with pytest.raises(RequestError, match=r"needs 32 pages of 16 tokens; the largest decode pool has 20"):
        world.submit(prompt_len=500, max_tokens=8)


def test_a_failed_local_attempt_tries_another_decode_node() -> None:
    world = local_world("d0", "d1")
    client = world.submit(max_tokens=2)
    (asked,) = [*world.got("d0", m.Compute), *world.got("d1", m.Compute)]
    name = "d0" if world.got("d0", m.Compute) else "d1"
    grant_local(world, name)
    world.say(name, m.Failed(Unit(asked.rid, 0, asked.attempt), "model_error", "not numbers", True))
    other = "d1" if name == "d0" else "d0"
    again = grant_local(world, other)
    world.tokens(other, again, 0, IDS[:2], reason="length")
    assert client.num_done == 1
    world.check_books()


def test_a_node_that_cannot_compute_prompts_is_never_asked_to() -> None:
    world = World("p0", "d0", local_prefill="always", protocol_max=OLD)
    world.dispatcher.health.is_usable = lambda *_: True  # type: ignore[method-assign]
    world.wait(1.0)
    world.submit()
    assert len(world.got("d0", m.Reserve)) == 1 and not world.got("d0", m.Compute)


# --- through the dispatcher, with the setting auto ---

PREFILL_LOAD = m.Load(free_pages=1000, running=0, waiting=0, prompt_token_s=2e-5, prompt_fixed_s=0.004)
DECODE_LOAD = m.Load(
    free_pages=1000, running=0, waiting=0, prompt_token_s=2.5e-5, prompt_fixed_s=0.005, round_s=0.006
)  # 80 ms for 3,000 tokens, and 12 ms for two rounds
HANDOFF_S = 0.02
LARGE = {"num_pages": 1000, "context_len": 8192, "max_running": 24}


def auto_world(*names: str, prefill: dict[str, Any] = {}, decode: dict[str, Any] = {}, **settings: Any) -> World:  # noqa: B006
    """Return a world of nodes that have measured how long prompts take, and a handoff."""
    names = names or ("p0", "d0")
    world = local_world(*names, local_prefill="auto", sizes=LARGE, **settings)
    world.group.handoff_s.observe(HANDOFF_S)
    beat_all(world, *names, prefill=prefill, decode=decode)
    return world


def beat_all(world: World, *names: str, prefill: dict[str, Any] = {}, decode: dict[str, Any] = {}) -> None:  # noqa: B006
    for name in names:
        told, more = (PREFILL_LOAD, prefill) if name[0] == "p" else (DECODE_LOAD, decode)
        beat = m.Heartbeat(1, "idle", 0.0, 10.0, msgspec.structs.replace(told, **more), NodeStats())
        world.say(name, beat)


def place_of(client: Client) -> tuple[str, str]:
    """Return the place of the only attempt of a request, and its reason."""
    (attempt,) = client.request.attempts.values()
    return attempt.place[:2]


def grants(world: World, name: str, asked: Any, load: m.Load = DECODE_LOAD) -> None:
    world.say(name, m.Reserved(asked.rid, asked.attempt, asked.choices, load))


def test_auto_sends_each_prompt_where_its_first_two_tokens_come_sooner() -> None:
    world = auto_world("p0", "d0")
    short = world.submit(prompt_len=64)
    assert place_of(short) == ("local", "sooner"), "a handoff takes longer than the prompt"
    world = auto_world("p0", "d0")
    long = world.submit(prompt_len=3000)
    assert place_of(long) == ("remote", "sooner") and world.got("d0", m.Reserve)
    world = auto_world("p0", "d0", prefill={"queued_tokens": 3000})
    world.node("p0").begin_prompt("other", 0, 3000, world.now)
    assert place_of(world.submit(prompt_len=3000)) == ("local", "sooner"), "the prefill node has other prompts to do"


def test_auto_learns_that_local_prompts_take_longer_than_expected() -> None:
    """At first a prompt of 300 tokens seems to take 21.5 ms locally, and 23 ms by way of the prefill node. Later ones
    are cached in part."""
    world = auto_world("p0", "d0")
    for _ in range(4):
        client = world.submit(prompt_len=300, max_tokens=2)
        if place_of(client)[0] == "remote":
            break
        asked = world.got("d0", m.Compute)[-1]
        grants(world, "d0", asked)
        world.wait(0.04)
        world.tokens("d0", asked, 0, IDS[:2], reason="length")
    assert place_of(client) == ("remote", "sooner")
    assert 1.1 < world.group.errors["local"].factor(world.now) < 2.0
    assert world.group.errors["remote"].factor(world.now) == 1.0


@pytest.mark.parametrize(("more", "factor"), [({"n": 3}, 1.1), ({"wants_prompt_logprobs": True}, 1.0)])
def test_an_attempt_teaches_once_and_a_scored_prompt_nothing(more: dict[str, Any], factor: float) -> None:
    world = auto_world("p0", "d0")
    world.submit(prompt_len=64, max_tokens=2, **more)
    asked = world.got("d0", m.Compute)[-1]
    grants(world, "d0", asked)
    world.wait(0.06)
    for choice in asked.choices:
        world.tokens("d0", asked, 0, IDS[:1], choice=choice)
        world.wait(0.5)
    assert factor <= world.group.errors["local"].factor(world.now) < factor + 0.35


def test_auto_learns_that_remote_prompts_take_longer_than_expected() -> None:
    world = auto_world("p0", "d0", decode={"prompt_token_s": 2.2e-5})
    world.submit(prompt_len=3000)
    asked = world.got("d0", m.Reserve)[-1]
    grants(world, "d0", asked)
    world.wait(0.29)  # 80 ms were expected
    world.tokens("p0", asked, 0, IDS[:1])
    world.say("d0", m.Admitted(Unit(asked.rid, 0, asked.attempt), 0.01, 1, 1, 0))
    assert 1.1 < world.group.errors["remote"].factor(world.now) < 1.4
    assert place_of(world.submit(prompt_len=7000)) == ("local", "sooner")


def test_auto_sends_a_prompt_to_the_prefill_node_that_it_compared() -> None:
    """The node with fewer prompt tokens in the books computes them more slowly."""
    world = auto_world("p0", "p1", "d0", decode={"prompt_token_s": 1e-4})
    beat_all(world, "p0", prefill={"prompt_token_s": 1e-4})
    world.node("p1").begin_prompt("other", 0, 1000, world.now)
    client = world.submit(prompt_len=3000)
    assert place_of(client) == ("remote", "sooner")
    (attempt,) = client.request.attempts.values()
    assert attempt.place.remote_s == pytest.approx(0.004 + 4000 * 2e-5 + (HANDOFF_S + 0.006) / 2)
    grants(world, "d0", world.got("d0", m.Reserve)[-1])
    assert len(world.got("p1", m.Prefill)) == 1 and not world.got("p0", m.Prefill)


def test_auto_sends_no_prompt_to_a_decode_node_whose_bound_on_gaps_has_no_room() -> None:
    world = auto_world("p0", "d0", decode={"has_prompt_room": False})
    assert place_of(world.submit(prompt_len=64)) == ("remote", "no room in the gap bound")
    world.lose("p0")
    world.wait(LOST_S + 0.5)
    assert place_of(world.submit(prompt_len=64)) == ("local", "no prefill node")


def test_auto_goes_on_and_says_so_when_the_last_prefill_node_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "baton.router.dispatching.dispatcher")
    world = auto_world("p0", "d0")
    client = world.submit(prompt_len=3000)
    grants(world, "d0", world.got("d0", m.Reserve)[-1])
    world.lose("p0")
    world.wait(LOST_S + 0.5)
    says = "decode nodes compute prompts, since no prefill node is here"
    assert says in caplog.text and says in world.group.placement_words
    asked = grant_local(world)
    world.tokens("d0", asked, 0, IDS[:3], reason="length")
    assert client.num_done == 1 and not client.errors
    assert place_of(world.submit(prompt_len=64)) == ("local", "no prefill node")


def test_prompts_that_a_node_was_given_count_until_it_reports_them_done() -> None:
    world = auto_world("p0", "d0")
    places = []
    for index in range(12):
        client = world.submit(prompt_len=1000, cache_salt=f"{index}")
        places.append(place_of(client)[0])
        if places[-1] == "local":
            grants(world, "d0", world.got("d0", m.Compute)[-1], msgspec.structs.replace(DECODE_LOAD, queued_tokens=0))
        else:
            grants(world, "d0", world.got("d0", m.Reserve)[-1])
    assert 1 < places.count("local") < 9, places
    assert world.node("d0").num_prompts == places.count("local")
    for client_rid in [asked.rid for asked in world.got("d0", m.Compute)]:
        asked = next(each for each in world.got("d0", m.Compute) if each.rid == client_rid)
        world.tokens("d0", asked, 0, IDS[:1])
    assert world.node("d0").num_prompts == 0, "their first tokens are here"


def test_a_queue_becomes_shorter_with_time() -> None:
    world = auto_world("p0", "d0", prefill={"queued_tokens": 4000})
    node = world.node("p0")
    node.begin_prompt("other", 0, 5000, world.now - 1.0)
    assert node.num_queued_tokens(world.now) == 4000
    assert node.num_queued_tokens(world.now + 0.04) == pytest.approx(2000, abs=2)
    node.begin_prompt("more", 0, 1000, world.now + 0.06)
    assert node.num_queued_tokens(world.now + 0.07) == pytest.approx(1500, abs=2), "it goes on where it was"
    assert node.num_queued_tokens(world.now + 1.0) == 0
    node.begin_prompt("late", 0, 1000, world.now + 1.0)
    assert node.num_queued_tokens(world.now + 1.0) == 1000, "an idle node computes nothing ahead"
    assert node.num_queued_tokens(world.now + 1.01) == pytest.approx(500, abs=2)
    for rid in ("other", "more", "late"):
        node.end_prompt(rid, 0)
    assert node.num_queued_tokens(world.now) == 0, "the books know of no prompt"


def converse(world: World, prompt: list[int], **more: Any) -> Client:
    """Submit a request for this prompt."""
    client = Client()
    params = SamplingParams(max_tokens=1000)
    world.num_submitted += 1
    client.request = Request(f"c{world.num_submitted}", world.group, prompt, params, client, now=world.now, **more)
    world.do(world.dispatcher.submit(client.request, world.now))
    return client


def test_the_next_turn_of_a_conversation_goes_to_the_decode_node_that_has_the_history() -> None:
    world = auto_world("p0", "d0", "d1")
    world.node("d0").begin_prompt("busy", 0, 50, world.now)
    first = [7 * index % 90 for index in range(3000)]
    client = converse(world, first)
    assert place_of(client) == ("remote", "sooner")
    name = "d0" if world.got("d0", m.Reserve) else "d1"
    asked = world.got(name, m.Reserve)[-1]
    grants(world, name, asked)
    world.hand_over(asked, decode=name)
    output = [11 * index % 90 for index in range(1000)]
    world.tokens(name, asked, 1, output[1:], reason="length")
    beat_all(world, "p0", "d0", "d1")
    history = PromptNames(world.group.names, [*first, *client.ids[0]], "")
    tell_pages(world.node(name), history, len(history))
    for _ in range(9):
        world.group.handoff_s.observe(HANDOFF_S)
    second = converse(world, [*first, *client.ids[0], *range(40)])
    assert place_of(second) == ("local", "sooner") and len(world.got(name, m.Compute)) == 1
    other = converse(world, [*first, *client.ids[0], *range(40)], cache_salt="other")
    assert place_of(other)[0] == "remote"
    scored = converse(world, [*first, *client.ids[0], *range(40)], wants_prompt_logprobs=True)
    assert place_of(scored)[0] == "remote", "all positions of its prompt are computed"


def test_pages_that_a_decode_node_was_given_count_until_its_cache_is_emptied() -> None:
    world = auto_world("p0", "d0")
    prompt = [7 * index % 90 for index in range(3000)]
    for _ in range(2):
        client = converse(world, prompt)
        assert place_of(client) == ("remote", "sooner")
        asked = world.got("d0", m.Reserve)[-1]
        grants(world, "d0", asked)
        world.do(world.dispatcher.cancel(client.request, "test", world.now))
        world.acknowledge_all()
        beat_all(world, "p0", "d0")
        again = converse(world, prompt)
        assert place_of(again)[0] == "local", "the decode node has the pages in its cache"
        world.do(world.dispatcher.cancel(again.request, "test", world.now))
        world.acknowledge_all()
        world.do(world.dispatcher.ask_ledgers(1, world.now, flush=True))
        beat_all(world, "p0", "d0")


def test_a_prefix_that_all_requests_share_does_not_bring_all_of_them_to_one_node() -> None:
    world = auto_world("p0", "d0", "d1", prefill={"prompt_token_s": 1.0})
    prompt = [7 * index % 90 for index in range(3000)]
    for _ in range(24):
        assert place_of(converse(world, prompt))[0] == "local"
        (name, asked) = world.sent[-1]
        grants(world, name, asked)
        world.tokens(name, asked, 0, IDS[:1])
    counts = [len(world.got(name, m.Compute)) for name in ("d0", "d1")]
    assert min(counts) >= 10, "3,000 cached tokens count as much as a few sequences"


@pytest.mark.parametrize("code", ["model_error", "out_of_memory"])
def test_a_request_whose_local_attempt_failed_goes_to_a_prefill_node(code: str) -> None:
    world = auto_world("p0", "d0")
    client = world.submit(prompt_len=64)
    asked = world.got("d0", m.Compute)[-1]
    grants(world, "d0", asked)
    world.say("d0", m.Failed(Unit(asked.rid, 0, asked.attempt), code, "the reason", True))
    assert place_of(client)[0] == "remote" and len(world.got("d0", m.Reserve)) == 1
    assert world.node("d0").num_prompts == 0


def test_auto_measures_how_long_handoffs_take() -> None:
    world = World("p0", "d0", local_prefill="auto", sizes=LARGE)
    beat_all(world, "p0", "d0")
    assert world.group.handoff_s.mean == 0.0
    client = world.submit(prompt_len=3000)
    assert place_of(client)[0] == "remote"
    asked = world.got("d0", m.Reserve)[-1]
    grants(world, "d0", asked)
    world.tokens("p0", asked, 0, IDS[:1])
    world.now += 0.02
    world.say("d0", m.Admitted(Unit(asked.rid, 0, asked.attempt), 0.1, 2, 4096, 0))
    assert world.group.handoff_s.mean == pytest.approx(0.02 + 0.006 / 2)


def test_auto_needs_decode_nodes_that_compute_and_measured_times() -> None:
    world = World("p0", "d0", local_prefill="auto")
    world.wait(0.5)
    assert place_of(world.submit()) == ("remote", "no ready decode node"), "none has passed a canary yet"
    world = auto_world("p0", "d0", decode={"prompt_token_s": 0.0})
    assert place_of(world.submit(prompt_len=64)) == ("remote", "not measured")
    world = auto_world("p0", "d0", prefill={"prompt_token_s": 0.0})
    assert place_of(world.submit(prompt_len=64)) == ("remote", "not measured")


def test_a_prompt_that_no_prefill_node_can_hold_is_local() -> None:
    world = auto_world("d0", decode={"has_prompt_room": False})
    world.join("p1", num_pages=10, context_len=8192)
    world.wait(0.5)
    beat_all(world, "p1")
    client = world.submit(prompt_len=500)
    assert place_of(client) == ("local", "prefill nodes full")


def test_the_trace_of_an_auto_prompt_has_both_times() -> None:
    world = auto_world("p0", "d0")
    client = world.submit(prompt_len=64)
    grants(world, "d0", world.got("d0", m.Compute)[-1])
    spans = {span.name: span for span in client.request.timeline.read(world.now).sequences[0].spans}
    assert (
        spans["local prefill"].reason
        == "local, since the first two tokens come sooner: on average in 15.6 ms, by a prefill node in 18.3 ms"
    )


# --- through a router and fake nodes ---


def test_a_decode_node_alone_serves_after_a_canary_and_says_so(make_system: Any) -> None:
    system: System = make_system(router={"node_wait_s": 1.0})
    system.cluster.add("decode", "d0")
    system.router.wait_ready()
    assert system.complete()[1]["choices"][0]["text"] == system.text
    for path in ("/ready", "/health"):
        (words,) = system.router.request("GET", path)[1]["local_prefill"]
        assert words == "model fake: decode nodes compute prompts, since no prefill node is here"
    page = system.router.request("GET", "/metrics")[1].decode()
    assert 'baton_placed_prompts_total{model="fake",place="local",reason="no prefill node"} 1.0' in page
    assert system.router.request("GET", "/v1/models")[1]["data"][0]["id"] == "fake"
    for max_tokens in (1, 3):
        status, body, _ = system.complete(echo=True, logprobs=1, max_tokens=max_tokens)
        logprobs = body["choices"][0]["logprobs"]["token_logprobs"]
        num_prompt = body["usage"]["prompt_tokens"]
        assert status == 200 and len(logprobs) == num_prompt + max_tokens, body
        assert logprobs[0] is None and None not in logprobs[1:]
    system.cluster.add("prefill", "p0")
    wait_until(lambda: "local_prefill" not in system.router.request("GET", "/ready")[1])
    assert system.complete()[1]["choices"][0]["text"] == system.text
    assert own(system.cluster.by_name("p0"), m.Prefill)
    system.router.wait_idle()


def test_decode_nodes_that_compute_unlike_answers_do_not_serve(make_system: Any) -> None:
    system: System = make_system(router={"node_wait_s": 0.5, "local_prefill": "always"})
    system.behaviour.corrupt = lambda _, decode, output: output[1:] if decode == "d1" else output
    system.cluster.add("decode", "d0")
    system.cluster.add("decode", "d1")
    wait_until(lambda: "nodes disagree" in str(system.router.request("GET", "/ready")[1]))
    system.cluster.add("decode", "d2")
    system.router.wait_ready()
    assert system.complete()[1]["choices"][0]["text"] == system.text
    assert not own(system.cluster.by_name("d1"), m.Compute)
    system.router.wait_idle()


# --- the error of estimates ---


@pytest.mark.parametrize("num_under_way", [1, 4, 64])
def test_an_estimate_that_is_always_too_short_is_corrected(num_under_way: int) -> None:
    """However many prompts are placed before the answer to the first comes."""
    error = EstimateError()
    for step in range(40 + num_under_way):
        now = 0.01 * step
        if step >= num_under_way:
            error.observe(0.1, 0.15, now)
            assert 1.0 < error.factor(now) < 1.5001
    assert error.factor(now) == pytest.approx(1.5, rel=0.01)


def test_one_slow_answer_changes_little() -> None:
    error = EstimateError()
    error.observe(0.1, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4**0.25)
    error.observe(0.0, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4**0.25), "nothing was expected"


def test_the_correction_is_bounded() -> None:
    error = EstimateError()
    for _ in range(100):
        error.observe(0.1, 60.0, 1.0)
    assert error.factor(1.0) == pytest.approx(4.0)
    for _ in range(100):
        error.observe(0.1, 0.001, 1.0)
    assert error.factor(1.0) == pytest.approx(0.5)


def test_a_role_that_gets_no_prompts_is_tried_again() -> None:
    error = EstimateError()
    for _ in range(100):
        error.observe(0.1, 60.0, 1.0)
    assert error.factor(21.0) == pytest.approx(2.0) and error.factor(81.0) < 1.1

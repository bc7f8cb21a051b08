"""Who computes a prompt: the decision as a function, its facts, and requests that follow it through the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.errors import RequestError, Unavailable
from baton.metadata.wire import messages as m
from baton.metadata.wire.request import Unit, unpack_ids
from baton.router.node import Group
from baton.router.prompt_placement import (
    LOST_S,
    MAX_TRIAL_LEN,
    UNEVEN,
    GroupFacts,
    LocalFigures,
    PromptTimes,
    RemoteFigures,
    patience_s,
    place_prompt,
    place_sooner,
)

from .conftest import System
from .sites import add_node, make_group
from .test_dispatcher import IDS, World, load
from .test_runner import own, wait_until

OLD = m.Compute.since - 1  # a protocol whose decode nodes cannot compute prompts


@pytest.mark.parametrize(
    ("mode", "lacks_prefill", "decodes_compute", "wants", "place"),
    [
        ("never", False, True, False, ("remote", "never")),
        ("never", True, True, False, ("local", "no prefill node")),
        ("never", True, False, False, ("remote", "no able decode node")),
        ("never", True, True, True, ("remote", "prompt log-probabilities")),
        ("always", False, True, False, ("local", "always")),
        ("always", True, True, False, ("local", "no prefill node")),
        ("always", False, False, False, ("remote", "no able decode node")),
        ("always", False, True, True, ("remote", "prompt log-probabilities")),
    ],
)
def test_the_place_of_a_prompt_and_its_reason(
    mode: Any, lacks_prefill: bool, decodes_compute: bool, wants: bool, place: tuple[str, str]
) -> None:
    found = place_prompt(GroupFacts(mode, lacks_prefill, decodes_compute), wants_prompt_logprobs=wants)
    assert found[:2] == place and bool(found.words) == (found.reason != "never")


# --- the comparison of nodes ---

LENGTHS = st.integers(0, 20_000)
SECONDS = st.floats(0, 1)
TIMES = st.builds(PromptTimes, st.floats(1e-6, 1e-2), SECONDS)
REMOTES = st.builds(RemoteFigures, LENGTHS, LENGTHS, TIMES, SECONDS, SECONDS)
COUNTS = st.integers(0, 8)
LOCAL_TIMES = TIMES | st.just(PromptTimes())
LOCALS = st.builds(LocalFigures, LENGTHS, LENGTHS, LOCAL_TIMES, SECONDS, st.booleans(), *[COUNTS] * 4)
PREFILL = RemoteFigures(0, 4096, PromptTimes(2e-5, 4e-3), 0.01, 0.006)  # about 100 ms
DECODE = LocalFigures(0, 4096, PromptTimes(5e-5, 6e-3), 0.006, True, 3, 8, 100, 10)  # about 220 ms


@given(st.lists(REMOTES, max_size=3), st.lists(LOCALS, max_size=3))
def test_no_choice_brings_the_second_token_later_than_another_would(
    remotes: list[RemoteFigures], locals_: list[LocalFigures]
) -> None:
    place, index = place_sooner(remotes, locals_)
    assert place.words
    may = [each for each in locals_ if each.num_running < each.max_running and each.free_pages >= each.num_pages]
    least = min((each.share for each in may), default=0.0)
    may = [each for each in may if each.share <= least + UNEVEN]
    times = [each.second_token_s for each in may if each.has_room and each.times.are_known]
    if index is None:
        assert place.where == "remote"
        assert not times or (remotes and min(times) >= min(each.second_token_s for each in remotes))
        return
    chosen = locals_[index]
    assert place.where == "local" and chosen in may and chosen.has_room
    if place.reason == "to measure":
        assert chosen.num_running == 0 and chosen.num_uncached_tokens <= MAX_TRIAL_LEN
    else:
        assert chosen.second_token_s == min(times)
        assert all(chosen.second_token_s < each.second_token_s for each in remotes)


@given(st.lists(REMOTES, min_size=1, max_size=3), st.lists(LOCALS, min_size=1, max_size=3), LENGTHS)
def test_a_longer_queue_of_a_role_never_brings_it_prompts(
    remotes: list[RemoteFigures], locals_: list[LocalFigures], more: int
) -> None:
    before = place_sooner(remotes, locals_)
    busier = [each._replace(num_queued_tokens=each.num_queued_tokens + more) for each in remotes]
    if before.place.where == "local":
        assert place_sooner(busier, locals_) == before._replace(place=place_sooner(busier, locals_).place)
    elif before.place.reason == "sooner":
        slower = [each._replace(num_queued_tokens=each.num_queued_tokens + more) for each in locals_]
        assert place_sooner(remotes, slower).place.where == "remote"


@pytest.mark.parametrize(
    ("remote", "local", "place"),
    [
        ({}, {}, ("remote", "sooner")),
        ({"num_queued_tokens": 8192}, {}, ("local", "sooner")),
        ({"num_uncached_tokens": 64}, {"num_uncached_tokens": 64}, ("local", "sooner")),
        ({"num_uncached_tokens": 96}, {"num_uncached_tokens": 96}, ("remote", "sooner")),
        (
            {"num_uncached_tokens": 96},
            {"num_uncached_tokens": 96, "num_running": 0, "times": PromptTimes(2e-5, 4e-3)},
            ("local", "sooner"),
        ),
        ({}, {"num_uncached_tokens": 100}, ("local", "sooner")),
        ({"num_queued_tokens": 8192}, {"has_room": False}, ("remote", "no room in the gap bound")),
        ({"num_queued_tokens": 8192}, {"num_running": 8}, ("remote", "decode nodes full")),
        ({"num_queued_tokens": 8192}, {"free_pages": 9}, ("remote", "decode nodes full")),
        ({"num_queued_tokens": 8192, "times": PromptTimes()}, {}, ("remote", "not measured")),
        ({"num_queued_tokens": 8192}, {"times": PromptTimes()}, ("remote", "not measured")),
        ({}, {"times": PromptTimes(), "num_running": 0, "num_uncached_tokens": 256}, ("local", "to measure")),
        ({}, {"times": PromptTimes(), "num_running": 0, "num_uncached_tokens": 257}, ("remote", "not measured")),
        ({}, {"times": PromptTimes(), "num_running": 1, "num_uncached_tokens": 9}, ("remote", "not measured")),
    ],
)
def test_the_sooner_place_of_a_prompt(remote: dict[str, Any], local: dict[str, Any], place: tuple[str, str]) -> None:
    found = place_sooner([PREFILL._replace(**remote)], [DECODE._replace(**local)])
    assert found.place[:2] == place and (found.local_index == 0) == (place[0] == "local"), found


def test_without_a_free_prefill_node_a_decode_node_gets_the_prompt() -> None:
    assert place_sooner([], [DECODE]) == (("local", "prefill nodes full", None, DECODE.second_token_s), 0)
    assert place_sooner([], [DECODE._replace(has_room=False)]).place[:2] == ("remote", "prefill nodes full")


def test_the_words_name_both_times() -> None:
    words = place_sooner([PREFILL], [DECODE]).place.words
    assert words == "the second token comes sooner: 101.9 ms, by a decode node 222.8 ms"


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


def joined_by_old_node(group: Group) -> None:
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
    world.dispatcher.health.is_usable_alone = lambda _: True  # type: ignore[method-assign]
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


def test_the_trace_of_a_local_prompt_has_its_time_and_its_reason() -> None:
    world = local_world()
    client = world.submit(max_tokens=3)
    asked = grant_local(world)
    world.wait(0.2)
    world.tokens("d0", asked, 0, IDS[:1])
    world.wait(0.1)
    world.tokens("d0", asked, 1, IDS[1:3], reason="length")
    spans = {span.name: span for span in client.request.timeline.read(world.now).sequences[0].spans}
    assert spans["local prefill"].reason == "no prefill node is here" and spans["local prefill"].node == "d0"
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
    world.dispatcher.health.is_usable_alone = lambda _: True  # type: ignore[method-assign]
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


def test_always_sends_prompts_to_decode_nodes_except_those_that_want_log_probabilities() -> None:
    world = local_world("p0", "d0", local_prefill="always")
    world.submit()
    assert len(world.got("d0", m.Compute)) == 1 and not world.got("d0", m.Reserve)
    world.submit(wants_prompt_logprobs=True)
    assert len(world.got("d0", m.Compute)) == 1 and len(world.got("d0", m.Reserve)) == 1


def test_log_probabilities_of_a_prompt_are_refused_without_a_prefill_node() -> None:
    world = local_world()
    with pytest.raises(Unavailable, match="no prefill node serves model 'fake' now, and only a prefill node gives log"):
        world.submit(wants_prompt_logprobs=True)


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
    world.dispatcher.health.is_usable_alone = lambda _: True  # type: ignore[method-assign]
    world.wait(1.0)
    world.submit()
    assert len(world.got("d0", m.Reserve)) == 1 and not world.got("d0", m.Compute)


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
    status, body, _ = system.complete(echo=True, logprobs=1)
    assert status == 503 and "only a prefill node gives log-probabilities of the prompt" in body["error"]["message"]
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

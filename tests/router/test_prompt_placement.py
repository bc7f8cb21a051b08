"""Who computes a prompt: the decision as a function, its facts, and requests that follow it through the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.errors import RequestError
from baton.metadata.wire import messages as m
from baton.metadata.wire.request import TokenLogprobs, Unit, unpack_ids
from baton.router.dispatcher import SLOW_TICK_S
from baton.router.node import Group
from baton.router.prompt_placement import LOST_S, GroupFacts, patience_s, place_prompt
from baton.router.streams import SILENCE_S

from .conftest import System
from .sites import add_node, make_group
from .test_dispatcher import IDS, World, load
from .test_runner import own, wait_until

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
    assert found == place and bool(found.words) == (found.reason != "never")


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

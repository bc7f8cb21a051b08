"""Canaries vote: which pair is named as faulty, who is asked, and who gets requests meanwhile. With nodes that compute
nothing; tests/integration/test_canaries.py has real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.router.ballot import UNTRIED

from .conftest import System
from .fake_nodes import FakeNode
from .test_dispatcher import is_canary, own, wait_until

Make = Callable[..., System]
Corrupt = Callable[[str, str, list[int]], list[int]]


def wrong(output: list[int]) -> list[int]:
    """What a faulty node makes of an output."""
    return [*((token + 3) % 400 for token in output[:-1]), output[-1]]


def faulty(*names: str, alone: bool = True) -> Corrupt:
    """These nodes are wrong in all they take part in; with `alone` False not in what they compute alone."""

    def corrupt(prefill: str, decode: str, output: list[int]) -> list[int]:
        is_alone = not (prefill and decode)
        return wrong(output) if {prefill, decode} & set(names) and (alone or not is_alone) else output

    return corrupt


def states(system: System) -> dict[str, str]:
    """By pair."""
    pairs = system.router.request("GET", "/debug/nodes")[1]["pairs"]
    return {f"{pair['prefill']} {pair['decode']}": pair["state"] for pair in pairs}


def words(system: System) -> dict[str, str]:
    """The states in a word each: ready, untried, faulty, undecided, unconfirmed."""
    return {
        pair: next((word for word in ("faulty", "undecided", "unconfirmed") if f" is {word}: " in state), state)
        for pair, state in states(system).items()
    }


def ask(system: System, count: int = 6) -> None:
    """Requests, which come out right."""
    for place in range(count):
        status, body, _ = system.complete(prompt=f"{place}")
        assert (status, body["choices"][0]["text"]) == (200, system.text), body


def test_a_faulty_first_pair_is_the_one_that_is_named(make_system: Make) -> None:
    """Its canary was the first answer; the good pairs come later."""
    system = make_system()
    system.behaviour.corrupt = faulty("p0", alone=False)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: "faulty" in words(system).values())
    system.cluster.add("prefill", "p1")
    system.cluster.add("decode", "d1")
    expected = {"p0 d0": "faulty", "p0 d1": "faulty", "p1 d0": "ready", "p1 d1": "ready"}
    wait_until(lambda: words(system) == expected, lambda: str(states(system)))
    right = system.say(system.text)[:4]
    for decode in ("d0", "d1"):
        state = states(system)[f"p0 {decode}"]
        assert " ".join(map(str, wrong([*right, 1])[:4])) in state and " ".join(map(str, right)) in state, state
    ask(system)
    assert not own(system.cluster.by_name("p0"), m.Prefill)


def test_a_single_faulty_pair_is_never_ready_and_ready_says_why(make_system: Make) -> None:
    system = make_system(router={"node_wait_s": 0.3})
    system.behaviour.corrupt = faulty("p0", alone=False)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: "faulty" in words(system).values())
    status, body, _ = system.router.request("GET", "/ready")
    reason = str(body)
    right = system.say(system.text)[:4]
    assert status == 503 and "pair p0 -> d0 is faulty: its canary gave " in reason
    assert f"decode node d0 alone computes {' '.join(map(str, right))}" in reason
    assert system.complete()[0] == 503
    assert not own(system.cluster.by_name("d0"), m.Reserve)
    system.behaviour.corrupt = None  # it is mended
    system.router.wait_ready(8)
    ask(system, 2)


def test_a_pair_serves_only_after_its_own_answer_came(make_system: Make) -> None:
    """Requests wait; nothing of them is lost."""
    system = make_system()
    held: list[tuple[FakeNode, m.Compute]] = []
    system.behaviour.answer_compute = lambda node, message: bool(held.append((node, message)) or True)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: held)
    assert words(system) == {"p0 d0": "unconfirmed"}
    assert "decode node d0 has not computed alone yet" in str(system.router.request("GET", "/ready")[1])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(system.complete()))
    thread.start()
    time.sleep(0.3)
    assert not own(system.cluster.by_name("d0"), m.Reserve)
    system.behaviour.answer_compute = None
    thread.join(10)
    assert answers[0][0] == 200 and words(system) == {"p0 d0": "ready"}


@pytest.mark.parametrize("bad", ["p0", "p1", "d0", "d1"])
@pytest.mark.parametrize("alone", [True, False])
def test_one_faulty_node_of_four(bad: str, alone: bool, make_system: Make) -> None:
    system = make_system()
    system.behaviour.corrupt = faulty(bad, alone=alone)
    for name in ("p0", "d0", "p1", "d1"):
        system.cluster.add("prefill" if name[0] == "p" else "decode", name)
    expected = {f"{p} {d}": "faulty" if bad in (p, d) else "ready" for p in ("p0", "p1") for d in ("d0", "d1")}
    wait_until(lambda: words(system) == expected, lambda: str(states(system)))
    ask(system)
    node = system.cluster.by_name(bad)
    assert not own(node, m.Prefill) and not own(node, m.Reserve)


def test_good_ones_are_not_condemned_by_a_decode_node_that_came_first(make_system: Make) -> None:
    """It is wrong in all it does, so that its canary and its own answer agree: a prefill node tells."""
    system = make_system()
    system.behaviour.corrupt = faulty("d0")
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: states(system))
    system.cluster.add("decode", "d1")
    wait_until(lambda: words(system) == {"p0 d0": "faulty", "p0 d1": "ready"}, lambda: str(states(system)))
    ask(system)
    assert not own(system.cluster.by_name("d0"), m.Reserve)


def test_a_pair_that_goes_bad_later_is_the_only_one_condemned(make_system: Make) -> None:
    system = make_system(router={"canary_interval_s": 0.3}).up(2, 2)
    wait_until(lambda: set(words(system).values()) == {"ready"})
    system.behaviour.corrupt = faulty("d1")
    expected = {"p0 d0": "ready", "p1 d0": "ready", "p0 d1": "faulty", "p1 d1": "faulty"}
    wait_until(lambda: words(system) == expected, lambda: str(states(system)))
    ask(system)
    system.behaviour.corrupt = None
    wait_until(lambda: set(words(system).values()) == {"ready"}, lambda: str(states(system)))


def test_decode_nodes_of_an_older_protocol_vote_by_their_pairs(make_system: Make) -> None:
    system = make_system()
    system.cluster.add("prefill", "p0")
    old = system.cluster.add("decode", "d0", protocol_max=5, protocol=5)
    system.router.wait_ready()
    ask(system, 2)
    assert not old.got(m.Compute)


def test_own_answers_come_from_no_page_of_another(make_system: Make) -> None:
    """Every request for one has a salt that no canary of a pair had, and the same prompt."""
    system = make_system(router={"canary_interval_s": 0.2}).up()
    prefill, decode = system.cluster.by_name("p0"), system.cluster.by_name("d0")
    wait_until(lambda: len(decode.got(m.Reserve)) > 2)
    pairs = [message for message in decode.got(m.Reserve) if is_canary(message)]
    alone = [*decode.got(m.Compute), *(each for each in prefill.got(m.Prefill) if each.decode is None)]
    assert {type(each) for each in alone} == {m.Compute, m.Prefill}
    salts = {each.request.cache_salt for each in pairs}
    assert len(salts) == len(pairs) and "" not in salts and not salts & {each.request.cache_salt for each in alone}
    assert len({each.request.prompt_ids for each in [*pairs, *alone]}) == 1
    assert all(each.request.params.temperature == 0 for each in alone)
    system.router.wait_idle()


def test_an_own_answer_that_does_not_come_is_asked_for_again(make_system: Make) -> None:
    system = make_system()
    failed: list[m.Compute] = []

    def fail(node: FakeNode, message: m.Compute) -> bool:
        failed.append(message)
        node.reserve(message)
        del node.reserved[(message.rid, 0, message.attempt)]
        node.link.send(m.Failed(m.Unit(message.rid, 0, message.attempt), "internal", "disk is on fire", False))
        return len(failed) < 3

    system.behaviour.answer_compute = fail
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: "disk is on fire" in states(system).get("p0 d0", ""))
    system.behaviour.answer_compute = None
    system.router.wait_ready(8)
    ask(system, 1)
    system.router.wait_idle()


def test_a_canary_that_found_no_room_goes_before_those_that_wait(make_system: Make) -> None:
    """The decode node is busy without end; a prefill node that joins gets its turn."""
    system = make_system(max_running=1).up()
    system.behaviour.step_s = 0.005
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            system.complete()

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        system.cluster.add("prefill", "p1")
        wait_until(lambda: words(system).get("p1 d0") == "ready", timeout=5)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
    assert system.router.request("GET", "/ready")[0] == 200


def test_a_node_with_less_room_joins_and_the_vote_is_held_anew(make_system: Make) -> None:
    """The prompt is shorter then: answers to another prompt say nothing."""
    system = make_system(script=lambda prompt, choice: [(len(prompt) + place) % 400 for place in range(120)]).up()
    system.cluster.add(
        "decode",
        "d1",
        model=system.cluster.card().__class__(
            **{
                **{name: getattr(system.cluster.card(), name) for name in system.cluster.card().__struct_fields__},
                "context_len": 40,
            }
        ),
    )
    wait_until(lambda: words(system) == {"p0 d0": "ready", "p0 d1": "ready"}, lambda: str(states(system)))


def test_a_pair_that_has_only_served_is_not_called_ready_and_gets_a_canary(make_system: Make) -> None:
    """Its nodes were proven by other pairs that are no more. It got nothing, and no canary, for the whole interval."""
    system = make_system().up()
    health = system.router.router.dispatcher.health

    def unprove() -> list[str]:
        health._proven = set()
        for pair in health._pairs.values():
            pair.verdict = UNTRIED
        return [health.state(*pair) for group in health._dispatcher.registry.groups.values() for pair in group.pairs()]

    assert system.router.call(unprove) == ["untried"]
    wait_until(lambda: list(states(system).values()) == ["ready"])
    assert system.complete()[0] == 200


def test_a_faulty_prefill_node_does_not_answer_alone_either(make_system: Make) -> None:
    """A request for one token needs no decode node, so no pair that is known to be wrong stands in its way."""
    system = make_system()
    system.behaviour.corrupt = faulty("p0")
    system.up(2, 2)
    wait_until(lambda: sorted(words(system).values()) == ["faulty", "faulty", "ready", "ready"])
    before = len(own(system.cluster.by_name("p0"), m.Prefill))
    for place in range(6):
        assert system.complete(prompt=f"{place}", max_tokens=1)[0] == 200
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) == before


def test_a_canary_of_a_node_whose_drain_is_over_ends(make_system: Make) -> None:
    """It went to another pair, and its answer was taken for the drained one's."""
    system = make_system().up(2, 2)
    wait_until(lambda: list(states(system).values()) == ["ready"] * 4)
    dispatcher = system.router.router.dispatcher

    def evict() -> list[bool]:
        for pair in dispatcher.health._pairs.values():
            pair.is_doubted, pair.retry_at = True, 0.0
        dispatcher.health.look(time.monotonic())
        node = next(node for node in dispatcher.registry.nodes.values() if node.node_id == "d0")
        asked = [each for each in dispatcher.requests.values() if each.is_canary]
        held = [each for each in asked if any(node in attempt.nodes for attempt in each.attempts.values())]
        dispatcher._moves.evict(node, "test")
        return [each.is_over for each in held]

    assert system.router.call(evict) == [True, True]

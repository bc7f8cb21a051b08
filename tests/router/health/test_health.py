"""PairHealth sends canaries to pairs of nodes and judges their answers; requests and the dispatcher follow its
verdicts.

Most tests drive PairHealth alone, with a clock that the test turns. Those at the end run a router with fake nodes.
tests/integration/test_canaries.py has real nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import num_examples

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import CanaryOutcome, Capacity, GroupRank, Service
from baton.metadata.wire.request import TokenLogprobs
from baton.router.health import health
from baton.router.health.canary import AWAITED_S, IDLE_TIMEOUT_S, MAX_TIMEOUT_S
from baton.router.health.health import (
    FULL_RETRY_S,
    RETRY_S,
    Effect,
    PairHealth,
    PairsReady,
    StartCanary,
    TellOutcome,
    TellProven,
)
from baton.router.nodes.node import Node
from baton.router.requests.attempt import Attempt
from baton.router.text.tokenizer import TextTokenizer

from ..conftest import System
from ..dispatching.test_runner import own, wait_until
from ..fake_nodes import FakeNode, make_layout
from ..hellos import BEAT, ClockedRegistry

Make = Callable[..., System]
Corrupt = Callable[[str, str, list[int]], list[int]]
RIGHT = [11, 12, 13, 14]
INTERVAL_S = 30.0
EVENTS = ["join", "leave", "rejoin", "mute", "full", "broken", "wrong", "look", "doubt", "answer"]


def wrong(output: list[int]) -> list[int]:
    """Return the output of a faulty node."""
    return [*((token + 3) % 400 for token in output[:-1]), output[-1]]


def faulty(*names: str, alone: bool = True) -> Corrupt:
    """Make these nodes wrong in all that they take part in, but not in what they compute alone if `alone` is False."""

    def corrupt(prefill: str, decode: str, output: list[int]) -> list[int]:
        is_alone = not (prefill and decode)
        return wrong(output) if {prefill, decode} & set(names) and (alone or not is_alone) else output

    return corrupt


class World:
    """Nodes without sockets that join PairHealth, and a dispatcher that answers its canaries at once or never."""

    def __init__(self, tokenizer: TextTokenizer, *names: str, epoch: str = "") -> None:
        self.clock = ClockedRegistry()
        self.registry = self.clock.registry
        self.health = PairHealth(self.registry.groups, INTERVAL_S, epoch)
        self.tokenizer = tokenizer
        self.nodes: dict[str, Node] = {}
        self.corrupt: Corrupt | None = None
        self.lead = 1.5  # of each token of an answer over all others
        self.full: set[str] = set()  # nodes without room
        self.broken: set[str] = set()  # nodes that answer a canary with an error
        self.mute: set[str] = set()  # nodes whose canaries stay in `unanswered`
        self.unanswered: list[StartCanary] = []
        self.started: list[StartCanary] = []
        self.told: dict[str, tuple[str, ...]] = {}  # what nodes remember, by name
        self.num_answers: Counter[tuple[str, ...]] = Counter()  # to canaries, by the epochs of their nodes
        self.outcomes: list[tuple[str, CanaryOutcome]] = []  # told to nodes for other routers
        self.num_ready_events = 0
        self.join(*names)

    @property
    def now(self) -> float:
        return self.clock.now

    def join(self, *names: str, **changes: Any) -> None:
        """Let nodes join: p... are prefill nodes, d... decode nodes."""
        for name in names:
            role = "prefill" if name[0] == "p" else "decode"
            node = self.clock.join(name=name, role=role, **{"epoch": f"e-{name}", **changes})
            node.group.tokenizer = self.tokenizer
            self.nodes[name] = node
            self.look()

    def restart(self, *names: str, after_s: float = 0.0) -> World:
        """Return a world with a new router, which nodes (all, if none are named) join with what they remember. They
        have joined when `after_s` has passed."""
        self.look()
        new = World(self.tokenizer)
        new.corrupt = self.corrupt
        for name in names or self.nodes:
            new.look(after_s / len(names or self.nodes))
            hello = self.nodes[name].hello
            new.join(name, epoch=hello.epoch, place=hello.place, proven=self.told.get(name, hello.proven))
        return new

    def leave(self, name: str) -> None:
        """Let a node die. Its canaries end with an error, as the dispatcher would have it."""
        node = self.nodes.pop(name)
        self.registry.lose(node, "dead", self.now)
        self.health.forget(node)
        for start in [start for start in self.unanswered if node in start.nodes]:
            self.unanswered.remove(start)
            self.take(self.health.failed(start.request, "its node is gone", self.now))

    def beat(self, name: str, **changes: Any) -> None:
        """Let a node send a heartbeat."""
        self.registry.beat(self.nodes[name], msgspec.structs.replace(BEAT, **changes), self.now)

    def rejoin(self, name: str, proven: tuple[str, ...] | None = None) -> None:
        """Let a node lose its connection and join again, with what its Hello said before: later messages are lost."""
        hello = self.nodes[name].hello
        self.leave(name)
        self.join(name, epoch=hello.epoch, place=hello.place, proven=hello.proven if proven is None else proven)

    def look(self, after_s: float = 0.0) -> None:
        """Let time pass, a quarter of a second per look."""
        until = self.now + after_s
        while True:
            self.take(self.health.look(self.now))
            if self.now >= until:
                return
            self.clock.now = min(self.now + 0.25, until)

    def take(self, effects: Iterable[Effect]) -> None:
        """Do what a dispatcher does."""
        for effect in effects:
            match effect:
                case StartCanary(request, nodes):
                    self.started.append(effect)
                    names = {node.node_id for node in nodes if node is not None}
                    if names & self.full:
                        self.health.no_room(request, self.now)
                    elif names & self.mute:
                        self.unanswered.append(effect)
                    else:
                        self.answer(effect)
                case TellProven(node, epochs):
                    self.told[node.node_id] = epochs
                case PairsReady():
                    self.num_ready_events += 1
                case TellOutcome(node, outcome):
                    self.outcomes.append((node.node_id, outcome))

    def answer(self, start: StartCanary) -> None:
        """Let the nodes of a canary answer."""
        request = start.request
        names = [node.node_id if node is not None else "" for node in start.nodes]
        if set(names) & self.broken:
            self.take(self.health.failed(request, "disk is on fire", self.now))
            return
        output = self.corrupt(*names, [*RIGHT, 1]) if self.corrupt else RIGHT
        (sequence,) = request.sequences
        first = len(sequence.received)
        ids = output[first : request.params.max_tokens]
        leads = [TokenLogprobs(-0.5, (token, token + 1), (-0.5, -0.5 - self.lead)) for token in ids]
        delta = sequence.merge(first, ids, leads, None, self.now)
        assert delta is not None
        request.listener.on_delta(sequence, delta)
        self.num_answers[tuple(node.unit_epoch for node in start.nodes if node is not None)] += 1
        self.take(self.health.answered(request, self.now))

    def answer_only(self, *names: str) -> None:
        """Answer the canaries of exactly these nodes that wait for their answers. Others keep waiting."""
        for start in [start for start in self.unanswered if names_of(start) == " ".join(names)]:
            self.unanswered.remove(start)
            self.answer(start)

    def answer_all(self) -> None:
        """Answer every canary that waits for its answer. No node stays mute."""
        self.mute.clear()
        waiting, self.unanswered = self.unanswered, []
        for start in waiting:
            self.answer(start)

    def only_unanswered(self) -> StartCanary:
        """Take the one canary that waits for its answer."""
        (start,) = self.unanswered
        self.unanswered = []
        return start

    def starts(self, *names: str) -> list[StartCanary]:
        """Return the canaries of exactly these nodes."""
        return [start for start in self.started if [node.node_id for node in start.nodes if node] == list(names)]

    def state(self, prefill: str, decode: str) -> str:
        return self.health.state(self.nodes[prefill], self.nodes[decode])

    def is_usable(self, prefill: str, decode: str) -> bool:
        return self.health.is_usable(self.nodes[prefill], self.nodes[decode])

    def states(self) -> dict[str, str]:
        """Return each pair's state in one word."""
        return {f"{p} {d}": word_of(self.state(p, d)) for p, d in self.pairs()}

    def pairs(self) -> list[tuple[str, str]]:
        names = sorted(self.nodes)
        return [(p, d) for p in names for d in names if (p[0], d[0]) == ("p", "d")]


def names_of(start: StartCanary) -> str:
    """Return the names of a canary's nodes."""
    return " ".join(node.node_id for node in start.nodes if node is not None)


def word_of(state: str) -> str:
    """Return a pair's state in one word: ready, untried, faulty, undecided, or failed."""
    if state in ("ready", "untried"):
        return state
    return next((word for word in ("faulty", "undecided") if f" is {word}: " in state), "failed")


@pytest.fixture
def world(tokenizer: TextTokenizer) -> World:
    """A world without nodes."""
    return World(tokenizer)


def test_a_pair_is_ready_after_its_canary_and_the_answers_of_its_nodes_alone(world: World) -> None:
    assert world.health.reason == "no node has joined"
    world.mute = {"p0", "d0"}
    world.join("p0", "d0")
    assert [names_of(start) for start in world.unanswered] == ["p0", "p0 d0", "d0"]
    for start in list(world.unanswered):
        assert world.states() == {"p0 d0": "untried"} and not world.is_usable("p0", "d0")
        assert world.health.reason == "no canary request has passed yet"
        world.mute = set()
        world.unanswered.remove(start)
        world.answer(start)
    assert world.states() == {"p0 d0": "ready"} and world.is_usable("p0", "d0") and world.health.is_ready
    assert world.num_ready_events > 0


class Worlds:
    """Routers a and b with the same nodes, which name a as the one that sends canaries and tell b how they went."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.a, self.b = World(tokenizer, epoch="a"), World(tokenizer, epoch="b")

    def join(self, *names: str) -> None:
        for name in names:
            self.a.join(name)
            self.b.join(name)
            for world in (self.a, self.b):
                world.beat(name, service=Service(canary_router="a"))
        self.pass_on()

    def pass_on(self) -> None:
        """Let nodes tell each router how the other one's canaries went."""
        for world, other in ((self.a, self.b), (self.b, self.a)):
            told, world.outcomes = world.outcomes, []
            for name, outcome in told:
                if name in other.nodes:
                    other.take(other.health.heard(other.nodes[name], outcome, other.now))

    def look(self, after_s: float) -> None:
        for _ in range(round(after_s / 0.25)):
            for world in (self.a, self.b):
                world.look(0.25)
            self.pass_on()


@pytest.fixture
def worlds(tokenizer: TextTokenizer) -> Worlds:
    worlds = Worlds(tokenizer)
    worlds.b.mute = {"p0", "d0"}  # its canaries at the join, before it has heard whose they are
    worlds.join("p0", "d0")
    return worlds


def test_a_router_hears_how_the_canaries_of_another_one_went(worlds: Worlds) -> None:
    """One router sends them: when nodes are new, and when they are idle."""
    assert worlds.b.states() == {"p0 d0": "ready"} and worlds.b.health.is_ready and not worlds.b.num_answers
    worlds.b.answer_all()
    worlds.look(1.0)
    num_at_join = len(worlds.b.started)
    worlds.look(3 * INTERVAL_S)
    assert len(worlds.a.starts("p0", "d0")) == 4 and len(worlds.b.started) == num_at_join
    worlds.a.corrupt = worlds.b.corrupt = faulty("p0", alone=False)
    worlds.look(INTERVAL_S)
    assert worlds.a.states() == worlds.b.states() == {"p0 d0": "faulty"}
    assert worlds.a.state("p0", "d0") == worlds.b.state("p0", "d0")
    worlds.a.corrupt = worlds.b.corrupt = None
    worlds.look(2 * RETRY_S)
    assert worlds.a.states() == worlds.b.states() == {"p0 d0": "ready"}
    assert len(worlds.b.started) == num_at_join


def test_a_router_tests_what_failed_for_another_one_itself(worlds: Worlds) -> None:
    """The network of the other one may be the cause, and none takes out what works for the rest."""
    worlds.b.answer_all()
    worlds.look(1.0)
    worlds.a.broken = {"p0"}
    num_before = len(worlds.b.starts("p0", "d0"))
    worlds.look(INTERVAL_S + RETRY_S)
    assert worlds.a.states() == {"p0 d0": "failed"} and worlds.b.states() == {"p0 d0": "ready"}
    assert num_before < len(worlds.b.starts("p0", "d0")) < num_before + 3
    worlds.look(4 * INTERVAL_S)
    assert worlds.a.states() == {"p0 d0": "failed"} and worlds.b.states() == {"p0 d0": "ready"}
    worlds.a.broken = set()
    worlds.look(RETRY_S)
    assert worlds.a.states() == {"p0 d0": "ready"}


def test_a_router_does_not_wait_for_another_one_forever(worlds: Worlds) -> None:
    worlds.b.answer_all()
    worlds.join("d1")
    worlds.a.leave("p0")  # router a has lost it, b has not
    worlds.b.corrupt = faulty("d1")
    worlds.look(INTERVAL_S + AWAITED_S)
    assert worlds.b.states() == {"p0 d0": "ready", "p0 d1": "faulty"}


def test_what_is_told_before_the_tokenizer_has_come_counts_then(tokenizer: TextTokenizer) -> None:
    worlds = Worlds(tokenizer)
    worlds.b.tokenizer = None  # type: ignore[assignment]
    worlds.join("p0", "d0")
    assert worlds.a.states() == {"p0 d0": "ready"} and worlds.b.states() == {"p0 d0": "untried"}
    worlds.b.nodes["p0"].group.tokenizer = tokenizer
    worlds.look(0.25)
    assert worlds.b.states() == {"p0 d0": "ready"} and not worlds.b.started


def test_the_ranks_of_a_group_are_tested_and_judged_as_one_node(world: World) -> None:
    for rank, name in enumerate(("d0", "d0/rank-1")):
        world.join(name, epoch=str(rank), place=GroupRank("d0", "e", rank, 2))
    world.corrupt = faulty("d0/rank-1")
    world.join("p0", "p1")
    assert [world.starts(prefill, "d0/rank-1") for prefill in ("p0", "p1")] == [[], []]
    assert world.states() == dict.fromkeys(("p0 d0", "p0 d0/rank-1", "p1 d0", "p1 d0/rank-1"), "ready")
    assert world.is_usable("p0", "d0/rank-1")
    world.health.doubt(world.nodes["p0"], world.nodes["d0/rank-1"], "the link is cut", world.now)
    assert {world.state("p0", rank) for rank in ("d0", "d0/rank-1")} == {"pair p0 -> d0: the link is cut"}
    assert not world.is_usable("p0", "d0") and world.is_usable("p1", "d0/rank-1")
    world.leave("d0/rank-1")
    assert world.state("p1", "d0") == "untried", "the ranks leave together"


def test_a_faulty_first_pair_is_the_one_that_is_named(world: World) -> None:
    """Its canary was the first answer; the good pairs come later."""
    world.corrupt = faulty("p0", alone=False)
    world.join("p0", "d0")
    assert world.states() == {"p0 d0": "faulty"}
    world.join("p1", "d1")
    assert world.states() == {"p0 d0": "faulty", "p0 d1": "faulty", "p1 d0": "ready", "p1 d1": "ready"}
    for decode in ("d0", "d1"):
        state = world.state("p0", decode)
        assert "its canary gave 14 15 16 17" in state and " ".join(map(str, RIGHT)) in state, state


def test_a_single_faulty_pair_is_never_ready_until_it_is_mended(world: World) -> None:
    world.corrupt = faulty("p0", alone=False)
    world.join("p0", "d0")
    world.look(10 * RETRY_S)
    assert world.states() == {"p0 d0": "faulty"} and not world.health.is_ready
    assert "pair p0 -> d0 is faulty: its canary gave " in world.health.reason
    assert "node d0 alone computes 11 12 13 14" in world.health.reason
    assert world.health.why_unusable(world.nodes["d0"].group) == world.state("p0", "d0")
    world.corrupt = None
    world.look(RETRY_S)
    assert world.states() == {"p0 d0": "ready"}


@pytest.mark.parametrize(
    ("rounds_coarsely", "lead", "state"),
    [(False, 0.4, "ready"), (False, 0.6, "faulty"), (True, 2.5, "ready"), (True, 3.5, "faulty")],
)
def test_answers_differ_if_their_tokens_were_not_a_tie_by_what_the_nodes_compute_with(
    rounds_coarsely: bool, lead: float, state: str, world: World
) -> None:
    """Layers are bfloat16. By FP8 or by experts chosen in 16 bits, right answers differ where leads are larger."""
    world.corrupt, world.lead = faulty("p0", alone=False), lead
    layout = make_layout(dtype="bfloat16")
    world.join("p0", "d0", layout=layout, rounds_coarsely=rounds_coarsely)
    assert world.states() == {"p0 d0": state}


@pytest.mark.parametrize("bad", ["p0", "p1", "d0", "d1"])
@pytest.mark.parametrize("alone", [True, False])
def test_one_faulty_node_of_four(bad: str, alone: bool, world: World) -> None:
    world.corrupt = faulty(bad, alone=alone)
    world.join("p0", "d0", "p1", "d1")
    world.look(2 * RETRY_S)
    expected = {f"{p} {d}": "faulty" if bad in (p, d) else "ready" for p in ("p0", "p1") for d in ("d0", "d1")}
    assert world.states() == expected
    assert all(world.is_usable(*pair.split()) == (state == "ready") for pair, state in expected.items())


def test_a_decode_node_that_came_first_and_is_always_wrong_condemns_no_good_pair(world: World) -> None:
    """Its canary and its own answer agree. A prefill node decides."""
    world.corrupt = faulty("d0")
    world.join("p0", "d0", "d1")
    world.look(2 * RETRY_S)
    assert world.states() == {"p0 d0": "faulty", "p0 d1": "ready"}


def test_a_pair_that_goes_bad_later_is_the_only_one_condemned(world: World) -> None:
    world.join("p0", "p1", "d0", "d1")
    assert set(world.states().values()) == {"ready"}
    world.corrupt = faulty("d1")
    world.look(INTERVAL_S + 2 * RETRY_S)
    assert world.states() == {"p0 d0": "ready", "p1 d0": "ready", "p0 d1": "faulty", "p1 d1": "faulty"}
    world.corrupt = None
    world.look(2 * RETRY_S)
    assert set(world.states().values()) == {"ready"}


def test_pairs_that_serve_requests_need_no_canary(world: World) -> None:
    world.join("p0", "d0")
    before = len(world.starts("p0", "d0"))
    for _ in range(10):
        world.look(INTERVAL_S / 2)
        world.health.worked(world.nodes["p0"], world.nodes["d0"], world.now)
    assert len(world.starts("p0", "d0")) == before
    world.look(INTERVAL_S + RETRY_S)
    assert len(world.starts("p0", "d0")) == before + 1


def test_pairs_of_a_large_group_are_looked_at_in_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the work of a look, and the canaries per second, grow with the nodes and not with their pairs."""
    monkeypatch.setattr(health, "PAIRS_PER_NODE", 1)
    nodes = [f"{role}{number}" for role in "pd" for number in range(6)]
    world.join(*nodes)
    (vote,) = world.health._votes.values()
    assert len(vote.in_turn()) == 2 * len(nodes) < len(world.pairs())
    world.look(1.0)
    assert {*world.states().values()} == {"ready"}
    before = len(world.starts("d0"))
    world.look(3 * INTERVAL_S)  # 36 pairs for 12 nodes: an idle pair waits for three intervals
    world.look(RETRY_S)
    assert all(len(world.starts(*pair)) == 2 for pair in world.pairs())
    assert len(world.starts("d0")) - before == 3


def test_pairs_of_a_large_group_that_nodes_report_are_ready_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join(*(f"{role}{number}" for role in "pd" for number in range(10)))
    world.look(2.0)
    monkeypatch.setattr(health, "PAIRS_PER_NODE", 1)
    new = world.restart()
    assert {*new.states().values()} == {"ready"} and not new.started


def test_pairs_of_a_large_group_wait_while_many_canaries_are_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PAIRS_PER_NODE", 1)
    monkeypatch.setattr(health, "LARGE_RUNS", 12)
    nodes = [f"{role}{number}" for role in "pd" for number in range(6)]
    world.mute = {*nodes}
    world.join(*nodes)
    world.look(1.0)
    assert len(world.unanswered) == 12 + 6  # the pairs of the first decode node were no large group
    world.answer_all()
    world.look(1.0)
    assert {*world.states().values()} == {"ready"}


def test_a_bad_pair_of_a_large_group_is_found_and_mended_in_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAIRS_PER_NODE", 1)
    world.join(*(f"{role}{number}" for role in "pd" for number in range(6)))
    world.look(1.0)
    world.health.doubt(world.nodes["p3"], world.nodes["d4"], "the transfer failed", world.now)
    assert not world.is_usable("p3", "d4")
    world.look()
    assert "e-d4" not in world.told["p3"]
    world.look(RETRY_S)
    assert world.is_usable("p3", "d4")
    assert "e-d4" in world.told["p3"]


def test_a_failed_transfer_takes_a_pair_out_until_a_canary_passes(world: World) -> None:
    world.join("p0", "d0")
    world.mute = {"p0"}
    world.health.doubt(world.nodes["p0"], world.nodes["d0"], "decode node d0: checksum of page 3 differs", world.now)
    assert world.state("p0", "d0") == "pair p0 -> d0: decode node d0: checksum of page 3 differs"
    assert not world.is_usable("p0", "d0") and "checksum of page 3" in world.health.reason
    world.look()  # at once
    world.answer_only("p0", "d0")
    assert world.states() == {"p0 d0": "ready"} and world.is_usable("p0", "d0")


def test_another_failure_of_a_request_brings_a_canary_while_the_pair_serves(world: World) -> None:
    world.join("p0", "d0")
    world.look(RETRY_S)
    before = len(world.starts("p0", "d0"))
    world.mute = {"p0"}
    world.health.doubt(world.nodes["p0"], world.nodes["d0"], None, world.now)
    world.look()
    assert len(world.starts("p0", "d0")) == before + 1 and world.is_usable("p0", "d0")
    world.answer_all()
    world.look(3 * RETRY_S)
    assert len(world.starts("p0", "d0")) == before + 1, "one is enough"


def test_a_canary_after_a_failure_stays_due_if_it_finds_no_room(world: World) -> None:
    world.join("p0", "d0")
    world.look(RETRY_S)
    world.full = {"d0"}
    world.health.doubt(world.nodes["p0"], world.nodes["d0"], None, world.now)
    world.look()
    world.full.clear()
    before = len(world.starts("p0", "d0"))
    world.look(2 * RETRY_S)
    assert len(world.starts("p0", "d0")) == before + 1


def test_a_failed_canary_is_tried_again_and_its_pair_gets_no_requests(world: World) -> None:
    world.broken = {"d0"}
    world.join("p0", "d0")
    assert world.state("p0", "d0") == "pair p0 -> d0: its canary failed: disk is on fire"
    before = len(world.started)
    world.look(0.9 * RETRY_S)
    assert len(world.started) == before and not world.is_usable("p0", "d0")
    world.broken.clear()
    world.look(0.2 * RETRY_S)
    assert world.states() == {"p0 d0": "ready"}


def test_a_canary_has_a_limit_of_time_and_is_tried_again(world: World) -> None:
    """The dispatcher ends every request at its deadline."""
    world.mute = {"p0"}
    world.join("p0", "d0")
    start = world.now
    world.look(IDLE_TIMEOUT_S - 1)
    assert {each.request.deadline for each in world.unanswered} == {start + IDLE_TIMEOUT_S}, "its nodes are idle"
    (late,) = world.starts("p0", "d0")
    world.take(world.health.failed(late.request, "it took more than 30 s", world.now))
    assert world.state("p0", "d0") == "pair p0 -> d0: its canary failed: it took more than 30 s"
    world.look(RETRY_S)
    world.answer_all()
    assert world.states() == {"p0 d0": "ready"}
    world.take(world.health.answered(late.request, world.now))  # changes nothing
    assert world.states() == {"p0 d0": "ready"}


def test_a_canary_waits_longer_while_one_of_its_nodes_is_in_a_step(world: World) -> None:
    """Nodes may compute long prompts of others first. A pair in which nothing goes on is found after IDLE_TIMEOUT_S."""

    def deadline() -> float:
        (canary,) = world.starts("p0", "d0")
        assert canary.request.deadline is not None
        return canary.request.deadline

    world.mute = {"p0"}
    world.join("p0", "d0")
    start = world.now
    world.beat("p0", phase="prefill", phase_age_s=2.0)
    world.look(2 * IDLE_TIMEOUT_S)
    assert deadline() == world.now + IDLE_TIMEOUT_S
    world.beat("p0", phase="prefill", phase_age_s=BEAT.phase_limit_s + 1)  # it hangs in its step
    busy_until = world.now
    world.look(IDLE_TIMEOUT_S / 2)
    assert deadline() == busy_until + IDLE_TIMEOUT_S
    world.beat("d0", phase="decode", phase_age_s=0.01)
    world.look(MAX_TIMEOUT_S)
    assert deadline() == start + MAX_TIMEOUT_S


@pytest.mark.parametrize(
    ("state", "awaited"),
    [
        ({}, ["d0"]),
        ({"dispatched": True}, ["p0"]),
        ({"dispatched": True, "prefill_done": True}, ["p0", "d0"]),
        ({"dispatched": True, "prefill_done": True, "admitted": {0}}, ["d0"]),
    ],
    ids=["asks for pages", "computes the prompt", "moves pages", "generates"],
)
@pytest.mark.parametrize("busy", ["p0", "d0"])
def test_a_canary_waits_longer_only_for_the_node_whose_turn_it_is(
    state: dict[str, Any], awaited: list[str], busy: str, world: World
) -> None:
    """Beside a decode node that serves others all the time, a prefill node that says nothing is found as soon."""
    world.mute = {"p0"}
    world.join("p0", "d0")
    (canary,) = world.starts("p0", "d0")
    attempt = canary.request.sequences[0].attempt = Attempt(0, {0}, world.nodes["p0"], world.nodes["d0"], world.now)
    for name, value in state.items():
        setattr(attempt, name, value)
    start = world.now
    world.beat(busy, phase="decode", phase_age_s=0.01)
    world.look(IDLE_TIMEOUT_S / 2)
    assert canary.request.deadline == IDLE_TIMEOUT_S + (world.now if busy in awaited else start)


def test_transfers_that_fail_in_a_row_bring_canaries_later_and_later(world: World) -> None:
    """A canary passes each time, because its pages are few. The time is that until the next one."""
    world.join("p0", "d0")
    waits: list[float] = []
    for _ in range(4):
        assert world.health.hands_over(world.nodes["p0"].group)
        num_started, begun = len(world.starts("p0", "d0")), world.now
        world.health.doubt(world.nodes["p0"], world.nodes["d0"], "no page came", world.now)
        assert not world.health.hands_over(world.nodes["p0"].group)
        while len(world.starts("p0", "d0")) == num_started:
            world.look(0.25)
        waits.append(world.now - begun)
        assert world.state("p0", "d0") == "ready"
    assert waits == pytest.approx([0.25, 2.0, 4.0, 8.0], abs=0.26)
    world.health.worked(world.nodes["p0"], world.nodes["d0"], world.now)
    world.health.doubt(world.nodes["p0"], world.nodes["d0"], "no page came", world.now)
    world.look(0.25)
    assert world.state("p0", "d0") == "ready"


def test_nodes_without_room_are_not_at_fault_and_are_asked_again(world: World) -> None:
    world.full = {"d0"}
    world.join("p0", "d0")
    assert world.states() == {"p0 d0": "untried"}
    num_tries = len(world.starts("p0", "d0"))
    world.look(0.9 * FULL_RETRY_S)
    assert len(world.starts("p0", "d0")) == num_tries
    world.look(0.1 * FULL_RETRY_S)
    assert len(world.starts("p0", "d0")) > num_tries
    world.full.clear()
    world.take(world.health.capacity_freed(world.now))  # before that
    assert world.states() == {"p0 d0": "ready"}
    assert world.health.capacity_freed(world.now) == []


def test_a_faulty_pair_gets_no_more_canaries_because_it_was_full_before(world: World) -> None:
    world.corrupt = faulty("p0", alone=False)
    world.full = {"d0"}
    world.join("p0", "d0")
    world.full.clear()
    world.look(FULL_RETRY_S)
    assert world.states() == {"p0 d0": "faulty"}
    assert world.health.capacity_freed(world.now) == []


def test_full_pairs_that_are_ready_try_their_canaries_twice_a_second_whatever_room_others_report(world: World) -> None:
    world.join("p0", "p1", "d0", "d1")
    world.look(INTERVAL_S - RETRY_S)
    world.full = set(world.nodes)
    world.look(2 * RETRY_S)
    world.look(FULL_RETRY_S)
    before = len(world.started)
    for _ in range(20):
        assert world.health.capacity_freed(world.now) == []
    world.look(FULL_RETRY_S)
    assert 0 < len(world.started) - before <= 2 * 8, "four pairs and four nodes alone"


def test_room_brings_no_canary_early_to_a_pair_whose_transfers_fail_in_a_row(world: World) -> None:
    world.join("p0", "d0")
    pair = world.nodes["p0"], world.nodes["d0"]
    world.health.doubt(*pair, "no page came", world.now)
    world.look(INTERVAL_S - RETRY_S)
    world.full = {"d0"}
    world.look(2 * RETRY_S)
    world.full.clear()
    world.health.doubt(*pair, "no page came", world.now)
    assert world.health.capacity_freed(world.now) == []


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_node_that_cannot_answer_alone_keeps_its_pair_untried_and_is_asked_again(name: str, world: World) -> None:
    world.mute = {name}
    world.join("p0", "d0")
    world.answer_only("p0", "d0")
    (alone,) = [start for start in world.unanswered if names_of(start) == name]
    world.unanswered.remove(alone)
    world.mute.clear()
    world.take(world.health.failed(alone.request, "disk is on fire", world.now))
    assert world.states() == {"p0 d0": "untried"} and not world.is_usable("p0", "d0")
    assert f"node {name}: its canary failed: disk is on fire" in world.health.reason
    world.look(0.9 * RETRY_S)
    assert world.states() == {"p0 d0": "untried"}
    world.look(0.2 * RETRY_S)
    assert world.states() == {"p0 d0": "ready"}


def test_decode_nodes_of_an_older_protocol_vote_by_their_pairs(world: World) -> None:
    world.join("p0")
    world.join("d0", protocol_max=5, protocol=5)
    assert world.states() == {"p0 d0": "ready"} and not world.starts("d0")


def test_own_answers_have_other_salts_and_the_same_prompt(world: World) -> None:
    world.join("p0", "d0")
    pair, decode = [start.request for start in (*world.starts("p0", "d0"), *world.starts("d0"))]
    prefill = [start.request for start in world.starts("p0")]
    assert [each.params.max_tokens for each in prefill] == [1, 2, 3, 4]
    assert len({pair.cache_salt, decode.cache_salt, prefill[0].cache_salt, ""}) == 4
    assert len({each.cache_salt for each in prefill}) == 1, "the tokens of one answer"
    everything = [pair, decode, *prefill]
    assert len({tuple(each.prompt_ids) for each in everything}) == 1
    assert all(each.is_canary and each.params.temperature == 0 for each in everything)


def test_a_node_with_less_room_joins_and_the_vote_begins_again_with_a_shorter_prompt(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer to the longer prompt has no consequences."""
    world.mute = {"d0"}
    world.join("p0", "d0")
    old = list(world.unanswered)
    assert world.states() == {"p0 d0": "untried"} and len(old) == 2
    world.mute = set()
    world.join("d1", capacity=Capacity(num_pages=2, page_size=16, max_running=4))
    assert world.states() == {"p0 d0": "ready", "p0 d1": "ready"}, "at once"
    assert len(world.started[0].request.prompt_ids) == 49 and len(world.started[-1].request.prompt_ids) == 24
    world.corrupt = faulty("d0")
    for start in old:
        world.answer(start)
        assert world.health.failed(start.request, "it is over", world.now) == []
    assert world.states() == {"p0 d0": "ready", "p0 d1": "ready"} and "its canary failed" not in caplog.text


def test_the_first_node_that_rounds_coarsely_begins_the_vote_again(world: World) -> None:
    world.corrupt = faulty("p1", alone=False)
    world.join("p0", "d0")
    world.join("p1")
    assert world.states() == {"p0 d0": "ready", "p1 d0": "faulty"}
    world.join("d1", rounds_coarsely=True)
    assert set(world.states().values()) == {"ready"}, "leads of 1.5 are ties now"
    num_started = len(world.started)
    world.join("d2", rounds_coarsely=True)
    assert {start.nodes[1] for start in world.started[num_started:]} == {world.nodes["d2"]}


def test_a_pair_gets_no_request_before_its_own_canary_passed_though_its_nodes_work_in_others(world: World) -> None:
    world.join("p0", "d0", "p1")
    world.mute = {"d1"}
    world.join("d1")
    world.answer_only("p1", "d1")
    world.answer_only("d1")
    assert world.states() == {"p0 d0": "ready", "p0 d1": "untried", "p1 d0": "ready", "p1 d1": "ready"}
    assert not world.is_usable("p0", "d1")
    world.answer_all()
    assert world.is_usable("p0", "d1")


def test_a_prefill_node_may_answer_alone_once_it_has_answered_rightly(world: World) -> None:
    world.corrupt = faulty("p0")
    world.mute = {"p0", "p1"}
    world.join("p0", "p1")
    assert [world.health.is_usable(world.nodes[name], None) for name in ("p0", "p1")] == [False, False]
    world.join("d0", "d1")
    world.answer_all()
    world.look(2 * RETRY_S)
    assert [world.health.is_usable(world.nodes[name], None) for name in ("p0", "p1")] == [False, True]


def test_answers_of_nodes_that_are_gone_do_not_count(world: World) -> None:
    """Three decode nodes with the same fault would outvote the two good nodes."""
    world.corrupt = faulty("d0", "d1", "d2")
    world.join("p0", "d0", "d1", "d2")
    for name in ("d0", "d1", "d2"):
        world.leave(name)
    world.join("d3")
    world.look(2 * RETRY_S)
    assert world.states() == {"p0 d3": "ready"}, world.health.reason


def test_canaries_of_a_node_that_is_gone_change_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.join("p0", "d0")
    world.mute = {"d1"}
    world.join("d1")
    world.leave("d1")
    assert "its canary failed" not in caplog.text
    assert world.states() == {"p0 d0": "ready"} and not world.unanswered
    world.mute = set()
    world.join("d1", epoch="second")
    assert world.states() == {"p0 d0": "ready", "p0 d1": "ready"}


def test_nodes_that_leave_get_no_canaries(world: World) -> None:
    world.join("p0", "d0", "d1")
    world.registry.leaving(world.nodes["d1"], m.Leaving(done=False, reason="SIGTERM"), world.now)
    before = len(world.started)
    world.corrupt = faulty("d0")  # so that the ballot wants to hear all nodes
    world.look(3 * INTERVAL_S)
    assert len(world.started) > before
    assert not any(world.nodes["d1"] in start.nodes for start in world.started[before:])
    assert "decode node d1 is leaving" in world.health.reason


def test_a_group_that_was_forgotten_begins_a_new_vote(world: World) -> None:
    world.join("p0", "d0")
    group = world.nodes["d0"].group
    world.mute = {"p0"}
    world.health.doubt(world.nodes["p0"], world.nodes["d0"], "a transfer failed", world.now)
    world.look()
    (canary,) = world.unanswered
    world.health.forget_group(group)
    assert world.health.answered(canary.request, world.now) == []
    assert world.states() == {"p0 d0": "untried"}
    world.answer_all()
    world.look(RETRY_S)
    assert world.states() == {"p0 d0": "ready"}


def test_a_router_believes_what_both_nodes_of_a_pair_report(world: World) -> None:
    world.join("p0", "p1", "d0", "d1")
    world.look()
    assert world.told["p0"] == world.told["p1"] == ("e-d0", "e-d1") and world.told["d1"] == ("e-p0", "e-p1")
    new = world.restart(after_s=RETRY_S / 2)
    assert set(new.states().values()) == {"ready"} and new.health.is_ready and not new.started
    assert new.health.is_usable(new.nodes["p0"], None) and new.health.is_usable(None, new.nodes["d1"])
    assert new.health.is_reported(new.nodes["p0"], new.nodes["d0"])
    assert not world.health.is_reported(world.nodes["p0"], world.nodes["d0"])
    assert not new.restart().started, "the nodes remember as much of the second router as of the first"


@pytest.mark.parametrize("silent", ["p0", "d0"])
def test_what_one_node_of_a_pair_says_alone_is_not_believed(silent: str, world: World) -> None:
    world.join("p0", "d0")
    world.look()
    world.told[silent] = ()
    new = world.restart()
    assert new.starts("p0", "d0") and not new.health.is_reported(new.nodes["p0"], new.nodes["d0"])
    new.look(RETRY_S)
    assert new.starts("p0") and new.starts("d0")


@pytest.mark.parametrize("restarted", ["p0", "d0"])
def test_a_node_that_was_restarted_too_is_tested_again(restarted: str, world: World) -> None:
    world.join("p0", "d0", "d1")
    (kept,) = {"p0", "d0"} - {restarted}
    new = world.restart(kept, "d1")
    new.mute = {restarted}
    new.join(restarted, epoch="another")
    assert new.states()["p0 d0"] == "untried" and new.starts("p0", "d0")
    assert restarted == "p0" or new.states()["p0 d1"] == "ready"


def test_a_faulty_or_failed_pair_is_not_reported_and_tested_by_the_next_router(world: World) -> None:
    world.corrupt = lambda p, d, output: wrong(output) if (p, d) == ("p0", "d0") else output
    world.join("p0", "p1", "d0", "d1")
    world.mute = {"p1"}
    world.health.doubt(world.nodes["p1"], world.nodes["d1"], "the link is cut", world.now)
    world.look()
    assert world.states()["p1 d1"] == "failed"
    assert world.told == {"p0": ("e-d1",), "p1": ("e-d0",), "d0": ("e-p1",), "d1": ("e-p0",)}
    new = world.restart()
    assert new.starts("p0", "d0") and new.starts("p1", "d1") and not new.starts("p0", "d1")
    assert not new.is_usable("p0", "d0") and new.is_usable("p0", "d1")
    new.look(2 * RETRY_S)
    assert new.states() == {"p0 d0": "faulty", "p0 d1": "ready", "p1 d0": "ready", "p1 d1": "ready"}


def test_a_pair_is_reported_only_while_both_its_nodes_alone_are_ready(world: World) -> None:
    world.join("p0", "d0")
    world.look()
    world.health.doubt(None, world.nodes["d0"], None, world.now)
    world.mute = {"d0"}
    world.look(RETRY_S)
    world.take(world.health.failed(world.only_unanswered().request, "no memory", world.now))
    new = world.restart()
    assert world.states() == {"p0 d0": "ready"} and world.told == {"p0": (), "d0": ()}
    new.mute = {"d0"}
    assert new.starts("d0") and not new.health.is_reported(new.nodes["p0"], new.nodes["d0"])


def test_a_reported_pair_that_serves_nobody_is_tested_after_the_interval(world: World) -> None:
    world.join("p0", "d0")
    new = world.restart()
    new.corrupt = faulty("d0", alone=False)
    new.look(INTERVAL_S - 1)
    assert not new.started and new.states() == {"p0 d0": "ready"}
    new.look(1 + 2 * RETRY_S)
    assert new.states() == {"p0 d0": "faulty"} and new.told == {"p0": (), "d0": ()}


def test_a_report_counts_only_for_a_while_after_its_nodes_joined(world: World) -> None:
    world.join("p0", "d0")
    old = world.restart("p0")
    old.look(INTERVAL_S)
    old.mute = {"d0"}
    old.join("d0", proven=("e-p0",))
    assert old.starts("p0", "d0") and not old.is_usable("p0", "d0"), "p0 has said so too long ago"


def test_a_reported_node_that_goes_bad_is_found_by_a_newcomer(world: World) -> None:
    """All nodes are asked as soon as answers differ, although their pairs are ready by what they report."""
    world.join("p0", "p1", "d0", "d1")
    new = world.restart()
    new.corrupt = faulty("d0")
    new.join("p2")
    new.look(2 * RETRY_S)
    assert {name for name in new.nodes if new.starts(name)} == set(new.nodes)
    assert new.states() == {f"p{p} d{d}": ("faulty", "ready")[d] for p in range(3) for d in range(2)}


def test_a_newcomer_gets_no_local_prompts_by_its_own_vote_while_reported_nodes_can_vote(world: World) -> None:
    world.join("p0", "d0")
    new = world.restart()
    new.corrupt, new.mute = faulty("d1"), {"p0", "d0"}
    new.join("d1")
    new.look(RETRY_S)
    assert new.starts("d1") and new.starts("p0") and new.starts("d0")
    assert not new.health.is_usable(None, new.nodes["d1"])
    assert new.is_usable("p0", "d0"), "it serves while its nodes are asked"
    new.answer_all()
    new.look(RETRY_S)
    assert word_of(new.health.state(None, new.nodes["d1"])) == "faulty"
    assert new.states() == {"p0 d0": "ready", "p0 d1": "faulty"}


def test_a_node_that_cannot_answer_or_takes_no_work_does_not_keep_another_waiting(world: World) -> None:
    world.broken, world.mute = {"d1"}, {"d2"}
    world.join("d0")
    assert world.health.is_usable(None, world.nodes["d0"]), "a single node is ready by itself"
    world.leave("d0")
    world.join("d1", "d2", "d0")
    assert not world.health.is_usable(None, world.nodes["d0"])
    num_events = world.num_ready_events
    world.take(world.health.failed(world.only_unanswered().request, "disk is on fire", world.now))
    assert world.health.is_usable(None, world.nodes["d0"]) and world.num_ready_events == num_events + 1
    world.leave("d0")
    world.leave("d1")
    world.leave("d2")
    world.join("d2")
    world.registry.leaving(world.nodes["d2"], m.Leaving(done=False, reason="SIGTERM"), world.now)
    world.join("d0")
    assert world.health.is_usable(None, world.nodes["d0"])


def test_a_node_that_is_in_steps_all_the_time_keeps_another_waiting_no_longer_than_one_that_is_idle(
    world: World,
) -> None:
    world.mute = {"d1"}
    world.join("d1", "d0")
    for _ in range(int(IDLE_TIMEOUT_S)):
        world.beat("d1", phase="decode", phase_age_s=0.01)
        world.look(1.0)
    assert not world.health.is_usable(None, world.nodes["d0"])
    num_events = world.num_ready_events
    world.look(1.0)
    assert world.health.is_usable(None, world.nodes["d0"]) and world.num_ready_events == num_events + 1
    world.corrupt = faulty("d1")
    world.answer_all()
    assert word_of(world.health.state(None, world.nodes["d0"])) == "undecided", "its vote counts when it comes"


def test_a_node_is_told_again_if_the_message_was_lost_and_only_if_it_understands(world: World) -> None:
    world.join("p0", "d0")
    world.join("d1", protocol_max=7, protocol=7)
    world.look()
    assert world.told == {"p0": ("e-d0", "e-d1"), "d0": ("e-p0",)}
    world.told.clear()
    world.look()
    assert not world.told
    world.health.untold(world.nodes["d0"])
    assert world.health.told(world.nodes["d0"]) == ()
    world.look()
    assert world.told == {"d0": ("e-p0",)}


def test_what_a_node_remembers_of_an_earlier_router_is_taken_back_until_it_is_true_again(world: World) -> None:
    world.join("p0", proven=("e-d0", "of a node that is gone"))
    assert world.told["p0"] == ()


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("failure", ["the link is cut", None])
def test_a_pair_that_failed_here_is_not_ready_because_a_node_rejoins_that_says_so(
    lost: str, failure: str | None, world: World
) -> None:
    """The message that took the verdict back is lost with the connection. The other node did not say Hello again."""
    world.join("p0", "d0")
    new = world.restart()
    new.mute = {"d0"}
    new.health.doubt(new.nodes["p0"], new.nodes["d0"], failure, new.now)
    new.look()
    new.rejoin(lost)
    assert not new.is_usable("p0", "d0") and new.starts("p0", "d0")
    new.answer_all()
    new.look(RETRY_S)
    assert new.states() == {"p0 d0": "ready"}


def test_a_pair_that_failed_here_is_not_ready_because_the_vote_begins_again(world: World) -> None:
    world.join("p0", "d0", "d1")
    new = world.restart()
    new.mute = {"d0"}
    new.health.doubt(new.nodes["p0"], new.nodes["d0"], "the link is cut", new.now)
    new.join("d2", capacity=Capacity(num_pages=2, page_size=16, max_running=4))
    assert not new.is_usable("p0", "d0") and new.starts("p0", "d0")


def test_a_node_that_this_router_has_not_tested_may_report_again(world: World) -> None:
    """In a group whose nodes differ, the vote begins again as they join one after the other."""
    world.join("p0", "d0")
    world.join("d1", capacity=Capacity(num_pages=2, page_size=16, max_running=4))
    new = world.restart("p0", "d0")
    new.rejoin("d0")
    new.join("d1", proven=world.told["d1"], capacity=world.nodes["d1"].hello.capacity)
    assert new.states() == {"p0 d0": "ready", "p0 d1": "ready"} and not new.started


def test_nodes_that_were_tested_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("baton.router.health.health.MAX_TESTED", 2)
    world.join("p0", "d0", "d1")
    for name in ("p0", "d0", "d1"):
        world.leave(name)
    assert list(world.health._tested) == ["e-d0", "e-d1"]


@settings(max_examples=num_examples(60), deadline=None)
@given(st.data())
def test_after_random_events_the_vote_at_rest_is_right(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """Nodes join, die, fall silent, fill up, break and compute wrongly in any order; then one of them stays wrong. No
    pair whose transfer failed is usable before it has answered a canary, whatever its nodes report."""
    world = World(tokenizer)
    names = ["p0", "p1", "p2", "d0", "d1", "d2"]
    failed: dict[tuple[str, str], int] = {}  # pairs of epochs, and how many canaries they had answered
    if data.draw(st.booleans()):
        world.join(*names)
        world = world.restart()
    for number in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(EVENTS)):
            case "join" if name not in world.nodes:
                world.join(name, epoch=f"{number}")
            case "leave" if name in world.nodes:
                world.leave(name)
            case "rejoin" if name in world.nodes:
                world.rejoin(name, data.draw(st.sampled_from([None, world.told.get(name)])))
            case "mute" | "full" | "broken" as trouble:
                getattr(world, trouble).symmetric_difference_update({name})
            case "wrong":
                world.corrupt = faulty(name, alone=data.draw(st.booleans()))
            case "look":
                world.look(data.draw(st.sampled_from([0.3, 2.0, MAX_TIMEOUT_S])))
            case "doubt" if world.nodes:
                p, d = (min((n for n in world.nodes if n[0] == role), default=None) for role in "pd")
                if p and d:
                    failure = data.draw(st.sampled_from([None, "torn"]))
                    world.health.doubt(world.nodes[p], world.nodes[d], failure, world.now)
                    pair = world.nodes[p].unit_epoch, world.nodes[d].unit_epoch
                    failed |= {pair: world.num_answers[pair]} if failure else {}
                    if data.draw(st.booleans()):
                        world.rejoin(p)
            case "answer":
                world.answer_all()
            case _:
                pass
        for p, d in world.pairs():
            pair = world.nodes[p].unit_epoch, world.nodes[d].unit_epoch
            assert not world.is_usable(p, d) or world.num_answers[pair] > failed.get(pair, -1), (p, d)
    bad = data.draw(st.sampled_from(names))
    world.corrupt = faulty(bad)
    world.full.clear()
    world.broken.clear()
    world.mute.clear()
    for name in names:
        if name not in world.nodes:
            world.join(name, epoch="last")
    world.answer_all()
    world.look(2 * MAX_TIMEOUT_S)
    assert not world.unanswered
    assert world.states() == {
        f"{p} {d}": "faulty" if bad in (p, d) else "ready" for p in names[:3] for d in names[3:]
    }, world.health.reason


# Through a router and fake nodes
# -------------------------------


def states(system: System) -> dict[str, str]:
    """Return the states that /debug/nodes reports, by pair."""
    pairs = system.router.request("GET", "/debug/nodes")[1]["pairs"]
    return {f"{pair['prefill']} {pair['decode']}": pair["state"] for pair in pairs}


def words(system: System) -> dict[str, str]:
    return {pair: word_of(state) for pair, state in states(system).items()}


def ask(system: System, count: int = 6) -> None:
    """Send requests, whose answers must be right."""
    for index in range(count):
        status, body, _ = system.complete(prompt=f"{index}")
        assert (status, body["choices"][0]["text"]) == (200, system.text), body


def test_requests_go_to_good_pairs_only(make_system: Make) -> None:
    system = make_system()
    system.behaviour.corrupt = faulty("p0")
    system.up(2, 2)
    expected = {"p0 d0": "faulty", "p0 d1": "faulty", "p1 d0": "ready", "p1 d1": "ready"}
    wait_until(lambda: words(system) == expected, lambda: str(states(system)))
    before = len(own(system.cluster.by_name("p0"), m.Prefill))
    ask(system)
    for index in range(6):  # a request for one token needs no decode node
        assert system.complete(prompt=f"{index}", max_tokens=1)[0] == 200
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) == before


def test_a_single_faulty_pair_gets_no_request_and_ready_says_why(make_system: Make) -> None:
    system = make_system(router={"node_wait_s": 0.3})
    system.behaviour.corrupt = faulty("p0", alone=False)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: "faulty" in words(system).values())
    status, body, _ = system.router.request("GET", "/ready")
    assert status == 503 and "pair p0 -> d0 is faulty: its canary gave " in str(body)
    assert system.complete()[0] == 503
    assert not own(system.cluster.by_name("d0"), m.Reserve)
    system.behaviour.corrupt = None
    system.router.wait_ready(8)
    ask(system, 2)


def test_requests_wait_for_the_answer_that_confirms_a_pair(make_system: Make) -> None:
    system = make_system()
    held: list[tuple[FakeNode, m.Compute]] = []
    system.behaviour.answer_compute = lambda node, message: bool(held.append((node, message)) or True)
    system.cluster.add("prefill", "p0")
    system.cluster.add("decode", "d0")
    wait_until(lambda: held)
    assert words(system) == {"p0 d0": "untried"}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(system.complete()))
    thread.start()
    wait_until(lambda: system.router.call(lambda: system.router.router.dispatcher.queues.num_waiting))
    assert not own(system.cluster.by_name("d0"), m.Reserve)
    system.behaviour.answer_compute = None
    thread.join()
    assert answers[0][0] == 200 and words(system) == {"p0 d0": "ready"}


def test_a_canary_that_a_node_answers_with_an_error_is_sent_again(make_system: Make) -> None:
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
    wait_until(lambda: "disk is on fire" in str(system.router.request("GET", "/ready")[1]))
    system.behaviour.answer_compute = None
    system.router.wait_ready(8)
    ask(system, 1)
    system.router.wait_idle()


def test_a_canary_that_found_no_room_goes_before_requests_that_wait(make_system: Make) -> None:
    """The decode node is always busy. A prefill node that joins gets its canary nevertheless."""
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


def test_a_canary_ends_when_the_drain_of_its_node_runs_out(make_system: Make) -> None:
    """It must not move to another pair: its answer would count for the drained node."""
    system = make_system(router={"canary_interval_s": 0.2}).up(1, 2)
    held: list[m.Reserve] = []

    def hold(node: FakeNode, message: m.Reserve) -> bool:
        if node.name != "d0":
            return False
        held.append(message)
        return True

    system.behaviour.answer_reserve = hold
    wait_until(lambda: held)
    rid = held[-1].rid
    system.router.request("POST", "/admin/nodes/d0/drain", {"timeout_s": 0.0})
    wait_until(lambda: not any(each.is_canary and each.rid == rid for each in live_requests(system)))
    nodes = [node for node in system.cluster.nodes if any(each.rid == rid for each in node.got(m.Reserve))]
    assert [node.name for node in nodes] == ["d0"]


def live_requests(system: System) -> list[Any]:
    return system.router.call(lambda: list(system.router.router.dispatcher.requests.values()))

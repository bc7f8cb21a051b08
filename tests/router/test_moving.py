"""Rescheduling at each event: which nodes are told, what is queued again, which request is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import BatonError
from baton.metadata.wire.messages import Cancel
from baton.metadata.wire.request import SamplingParams, TokenLogprobs
from baton.router.cancels import Cancels
from baton.router.effects import Send
from baton.router.node import Group, Node
from baton.router.queue import Bounds, Entry, Queues, Refused
from baton.router.request import Attempt, Request
from baton.router.rescheduling import MAX_LOSSES, Rescheduling
from baton.router.reservations import Reservations
from baton.router.streams import TokenStreams

from .sites import add_node, make_group


def make_node(name: str, group: Group) -> Node:
    return add_node(group, "prefill" if name.startswith("p") else "decode", name)


class Moving:
    """A request of several choices, all on (p0, d0), and the real collaborators of Rescheduling."""

    def __init__(self, num_choices: int = 2, *, max_attempts: int = 3, **more: Any) -> None:
        self.group = make_group()
        self.request = self.make_request("r", num_choices, **more)
        self.p0, self.d0, self.d1 = (make_node(name, self.group) for name in ("p0", "d0", "d1"))
        self.requests = {"r": self.request}
        self.kinds: list[str] = []  # why it moved
        metrics: Any = SimpleNamespace(moved=lambda request, kind: self.kinds.append(kind))
        self.effects: list[Any] = []
        self.queues = Queues(Bounds(100, 1 << 20, 60.0))
        self.reservations = Reservations("e")
        cancels = Cancels("e", self.effects)
        streams = TokenStreams("e", self.requests, metrics, self.effects)
        self.moves = Rescheduling(
            self.requests, self.queues, self.reservations, streams, cancels, metrics, max_attempts
        )
        self.errors: list[BatonError] = []
        self.attempt = self.begin(self.d0)

    def make_request(self, rid: str, num_choices: int, **more: Any) -> Request:
        nobody: Any = None
        params = SamplingParams(max_tokens=50)
        return Request(rid, self.group, [5, 6, 7], params, nobody, num_choices=num_choices, now=0.0, **more)

    def begin(self, decode: Node, *, dispatched: bool = True) -> Attempt:
        """All choices get nodes, or (not `dispatched`) are reserved for."""
        choices = tuple(range(len(self.request.sequences)))
        attempt = self.request.begin_attempt(set(choices), self.p0, decode, 1.0)
        attempt.dispatched = dispatched
        if not dispatched:
            entry = Entry(self.request, choices)
            self.queues.add(entry)
            self.reservations.begin(entry, attempt, decode, 1.0)
            return attempt
        for sequence in self.request.sequences:
            sequence.attempt = attempt
        decode.reserve("r", attempt.number, choices, 2)
        self.p0.begin_prompt("r", attempt.number, 3)
        return attempt

    def receive(self, num_tokens: int) -> None:
        for sequence in self.request.sequences:
            sequence.received += [9] * num_tokens

    def fail(self, choices: set[int], reason: str, at: Node | None = None, attempt: Attempt | None = None) -> None:
        self.end(self.moves.failed(self.request, attempt or self.attempt, choices, reason, 2.0, at=at))

    def lose(self, node: Node, reason: str = "silent") -> None:
        self.end(self.moves.lost(node, reason, 2.0))

    def evict(self, node: Node) -> None:
        self.end(self.moves.evict(node, "its time to drain is over", 2.0))

    def end(self, refused: list[Refused]) -> None:
        """What the dispatcher does with requests that must end."""
        for request, error in refused:
            if not request.is_over:
                request.is_over = True
                self.errors.append(error)

    @property
    def queued(self) -> list[tuple[int, ...]]:
        """Choices of the queue's entries, the first in front; (77,) stands for somebody else's."""
        waiting = self.queues.waiting_in(self.group)
        return [entry.choices if entry.request is self.request else (77,) for entry in waiting]

    @property
    def cancels(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Cancels sent: node, attempt, choices."""
        sent = [effect for effect in self.effects if isinstance(effect, Send) and isinstance(effect.message, Cancel)]
        return [(each.node.node_id, each.message.attempt, each.message.choices) for each in sent]  # type: ignore


@pytest.fixture
def moving() -> Moving:
    moving = Moving()
    moving.queues.add(Entry(moving.make_request("somebody else", 1), (0,)))
    return moving


def test_a_failure_moves_its_choice_and_leaves_the_others(moving: Moving) -> None:
    moving.receive(5)
    moving.fail({1}, "an offer was lost", moving.d0)
    assert moving.queued == [(1,), (77,)]
    assert moving.cancels == [("p0", 0, (1,))], "d0 has said that it holds nothing"
    assert moving.d0.units_of("r", 0) == {0} and moving.p0.num_prompts == 1
    assert moving.attempt.choices == {0} and list(moving.request.attempts) == [0]
    assert moving.request.sequences[1].attempt is None and moving.request.sequences[0].attempt is moving.attempt
    assert moving.request.has_failed_on(moving.p0, moving.d0)


def test_all_choices_go_on_in_their_order_before_others_and_nothing_is_left(moving: Moving) -> None:
    moving.fail({0, 1, 5}, "tokens were lost")
    assert moving.queued == [(0,), (1,), (77,)]
    assert sorted(moving.cancels) == [("d0", 0, (0, 1)), ("p0", 0, (0, 1))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing and moving.request.attempts == {}


def test_what_is_over_or_gone_moves_nothing(moving: Moving) -> None:
    moving.attempt.choices.clear()
    moving.fail({0}, "late")
    del moving.request.attempts[0]
    moving.attempt.choices.add(0)
    moving.fail({0}, "later")
    moving.request.attempts[0], moving.request.is_over = moving.attempt, True
    moving.fail({0}, "too late")
    assert moving.queued == [(77,)] and moving.cancels == [] and not moving.errors


def test_failures_in_a_row_end_it_and_progress_starts_the_count_anew(moving: Moving) -> None:
    for number in range(8):
        attempt = moving.begin(moving.d0) if number else moving.attempt
        moving.receive(2)  # more than the first token
        moving.fail({0, 1}, "why", attempt=attempt)
    assert not moving.errors
    for number in range(2):
        moving.receive(number)  # a first token is no progress: every prefill node gives it
        moving.fail({0, 1}, "secret words", attempt=moving.begin(moving.d0))
    (error,) = moving.errors
    assert "after 3 attempts" in str(error) and "secret words" in str(error)
    assert error.shown == "given up after 3 attempts"  # type: ignore[attr-defined]


def test_a_canary_is_never_moved() -> None:
    for name in ("failed", "lost"):
        moving = Moving(1, is_canary=True)
        if name == "failed":
            moving.fail({0}, "why")
        else:
            moving.lose(moving.d0, "silent")
        assert len(moving.errors) == 1 and moving.queued == []


def test_a_decode_node_that_dies_counts_for_nothing_until_many_did(moving: Moving) -> None:
    for number in range(MAX_LOSSES):
        node = make_node(f"dead-{number}", moving.group)
        moving.attempt = moving.begin(node)
        moving.lose(node, "its connection closed")
        assert ("p0", moving.attempt.number, (0, 1)) in moving.cancels
        assert node.node_id not in [name for name, _, _ in moving.cancels]
    assert not moving.errors and moving.request.sequences[0].failures == []
    node = make_node("d-last", moving.group)
    moving.begin(node)
    moving.lose(node, "its connection closed")
    assert f"after {MAX_LOSSES + 1} nodes" in str(moving.errors[0])


def test_what_failed_on_a_node_that_dies_is_forgiven(moving: Moving) -> None:
    moving.fail({0, 1}, "it does not answer")
    assert moving.request.sequences[0].failures
    moving.lose(moving.d0, "silent")
    assert not moving.request.sequences[0].failures and not moving.request.has_failed_on(moving.p0, moving.d0)


def test_a_prefill_node_that_dies_takes_what_decode_has_not_got(moving: Moving) -> None:
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(1,), (77,)] and moving.cancels == [("d0", 0, (1,))]
    assert moving.attempt.prefill_done and moving.attempt.nodes == [moving.d0]
    moving.lose(moving.p0, "twice")
    assert moving.queued == [(1,), (77,)]


def test_a_prefill_node_that_dies_after_its_work_moves_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(77,)] and moving.cancels == []


def test_a_prefill_node_that_dies_before_it_was_asked_moves_those_who_wait_for_its_pages(moving: Moving) -> None:
    """The reservation has no answer yet: it is taken back, and the choices are in the queue still."""
    moving.fail({0, 1}, "why")
    moving.moves.leave_nodes(moving.request, "it is queued once", 2.0)
    moving.effects.clear()
    attempt = moving.begin(moving.d1, dispatched=False)
    moving.lose(moving.p0, "silent")
    assert len(moving.reservations) == 0 and moving.request.attempts == {}
    assert moving.cancels == [("d1", attempt.number, (0, 1))] and moving.queued == [(77,), (0, 1)]


def test_log_probabilities_that_died_with_prefill_are_computed_again() -> None:
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(0,)], "decode goes on, but the prompt must be scored"
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.attempt.choices.clear()
    moving.request.sequences[0].finish_reason = "length"
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(0,)] and moving.request.attempts == {}
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.request.prompt_logprobs = (TokenLogprobs(-1.0, (), ()),)
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == []


@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_draining_node_hands_on_all_that_it_holds(name: str, dispatched: bool) -> None:
    moving = Moving()
    if not dispatched:
        moving.moves.leave_nodes(moving.request, "it is reserved for again", 2.0)
        moving.effects.clear()
        for sequence in moving.request.sequences:
            sequence.restart()
        moving.begin(moving.d0, dispatched=False)
    moving.evict(getattr(moving, name))
    assert moving.queued == ([(0,), (1,)] if dispatched else [(0, 1)])
    assert moving.request.attempts == {} and len(moving.reservations) == 0
    told = {"p0", "d0"} if dispatched else {"d0"}  # prefill knows nothing of it yet
    assert {cancelled for cancelled, _, _ in moving.cancels} == told
    assert moving.request.sequences[0].failures == [] and moving.request.sequences[0].num_losses == 0


def test_a_prefill_node_that_has_done_its_part_hands_on_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.evict(moving.p0)
    assert moving.queued == [(77,)]


def test_a_node_that_cannot_be_reached_is_left(moving: Moving) -> None:
    moving.end(moving.moves.unreachable(moving.request, moving.attempt, moving.d0, 2.0))
    assert moving.queued == [(0,), (1,), (77,)] and moving.cancels == [("p0", 0, (0, 1))]
    assert moving.request.sequences[0].num_losses == 1 and moving.request.sequences[0].failures == []


def test_a_pause_holds_nothing_and_resumes_in_order(moving: Moving) -> None:
    moving.receive(4)
    moving.request.sequences[1].finish_reason = "stop"
    moving.attempt.choices.discard(1)
    moving.d0.release("r", 0, (1,))
    moving.moves.pause(moving.request, "its client does not read", 2.0)
    assert moving.queued == [(77,)] and moving.request.attempts == {}
    assert sorted(moving.cancels) == [("d0", 0, (0,)), ("p0", 0, (0,))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing
    assert moving.request.sequences[0].attempt is None and moving.request.sequences[0].num_before == 4
    moving.moves.resume(moving.request, 3.0)
    assert moving.queued == [(0,), (77,)]


def test_several_choices_resume_in_their_order(moving: Moving) -> None:
    moving.moves.pause(moving.request, "its client does not read", 2.0)
    moving.moves.resume(moving.request, 3.0)
    assert moving.queued == [(0,), (1,), (77,)]


def test_why_a_request_moved_is_counted() -> None:
    for event, kind in (
        (lambda moving: moving.fail({0}, "no"), "failed"),
        (lambda moving: moving.end(moving.moves.unreachable(moving.request, moving.attempt, moving.d0, 2.0)), "lost"),
        (lambda moving: moving.evict(moving.d0), "drained"),
    ):
        moving = Moving()
        event(moving)
        assert moving.kinds == [kind]

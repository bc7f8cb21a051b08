"""What Moves does at each event, seen from its collaborators: who is told, what is queued anew, who is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import BatonError
from baton.metadata.wire.request import SamplingParams, TokenLogprobs
from baton.router.request import Attempt, Request
from baton.router.rescheduling import MAX_LOSSES, Moves
from baton.router.text.tokenizer import TextTokenizer

from .sites import add_node, make_group


def make_node(name: str) -> Any:
    role = "prefill" if name.startswith("p") else "decode"
    return add_node(make_group(), role, name)


class Moving:
    """A request of several choices, all on (p0, d0); everything that Moves asks of others is written down."""

    def __init__(self, tokenizer: TextTokenizer, num_choices: int = 2, *, max_attempts: int = 3, **more: Any) -> None:
        layout = SimpleNamespace(page_size=16, key_lookahead=0)
        group: Any = SimpleNamespace(
            tokenizer=tokenizer, key=SimpleNamespace(model="fake"), page_size=16, layout=layout
        )
        nobody: Any = None
        self.request = Request(
            "r", group, [5, 6, 7], SamplingParams(max_tokens=50), nobody, num_choices=num_choices, now=0.0, **more
        )
        self.p0, self.d0, self.d1 = (make_node(name) for name in ("p0", "d0", "d1"))
        self.queued: list[tuple[int, ...]] = []  # the queue, first in front
        self.asked: list[int] = []  # attempts whose reservation was taken back
        self.withdrawn = 0
        self.cancels: list[tuple[str, int, tuple[int, ...]]] = []
        self.closed: list[int] = []
        self.errors: list[BatonError] = []
        self.requests = {"r": self.request}
        self.admission: Any = SimpleNamespace(
            submit=self._submit,
            pump=lambda group: None,
            take_back=lambda request, attempt: self.asked.append(attempt.number),
            withdraw=lambda request: setattr(self, "withdrawn", self.withdrawn + 1),
        )
        cancels: Any = SimpleNamespace(
            send=lambda node, rid, attempt, choices, reason: self.cancels.append(
                (node.node_id, attempt, tuple(sorted(choices)))
            )
        )
        gaps: Any = SimpleNamespace(close=lambda choice: self.closed.append(choice.index))
        self.kinds: list[str] = []  # why it moved
        self.moves = Moves(self, cancels, gaps, max_attempts, lambda request, kind: self.kinds.append(kind))
        self.attempt = self.begin(self.d0)

    def begin(self, decode: Any, *, dispatched: bool = True) -> Attempt:
        """All choices get nodes."""
        attempt = self.request.begin_attempt(set(range(len(self.request.sequences))), self.p0, decode, 1.0)
        attempt.dispatched = dispatched
        for choice in self.request.sequences if dispatched else ():
            choice.attempt = attempt
        decode.reserve("r", attempt.number, attempt.choices, 2)
        self.p0.begin_prompt("r", attempt.number, 3)
        return attempt

    def receive(self, num_tokens: int) -> None:
        for choice in self.request.sequences:
            choice.received += [9] * num_tokens

    def fail(self, request: Request, error: BatonError) -> None:
        request.is_over = True
        self.errors.append(error)

    def _submit(self, entry: Any, *, first: bool = False) -> None:
        self.queued.insert(0 if first else len(self.queued), entry.choices)


@pytest.fixture
def moving(tokenizer: TextTokenizer) -> Moving:
    moving = Moving(tokenizer)
    moving.queued.append((77,))  # somebody else, who waits
    return moving


def test_a_failure_moves_its_choice_and_leaves_the_others(moving: Moving) -> None:
    moving.receive(5)
    moving.moves.failed(moving.request, moving.attempt, {1}, "an offer was lost", at=moving.d0)
    assert moving.queued == [(1,), (77,)] and moving.closed == [1] and moving.asked == [0]
    assert moving.cancels == [("p0", 0, (1,))], "d0 has said that it holds nothing"
    assert moving.d0.units_of("r", 0) == {0} and moving.p0.num_prompts == 1
    assert moving.attempt.choices == {0} and list(moving.request.attempts) == [0]
    assert moving.request.sequences[1].attempt is None and moving.request.sequences[0].attempt is moving.attempt
    assert moving.request.has_failed_on(moving.p0, moving.d0)


def test_all_choices_go_on_in_their_order_before_others_and_nothing_is_left(moving: Moving) -> None:
    moving.moves.failed(moving.request, moving.attempt, {0, 1, 5}, "tokens were lost")
    assert moving.queued == [(0,), (1,), (77,)]
    assert sorted(moving.cancels) == [("d0", 0, (0, 1)), ("p0", 0, (0, 1))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing and moving.request.attempts == {}


def test_what_is_over_or_gone_moves_nothing(moving: Moving) -> None:
    moving.attempt.choices.clear()
    moving.moves.failed(moving.request, moving.attempt, {0}, "late")
    del moving.request.attempts[0]
    moving.attempt.choices.add(0)
    moving.moves.failed(moving.request, moving.attempt, {0}, "later")
    moving.request.attempts[0], moving.request.is_over = moving.attempt, True
    moving.moves.failed(moving.request, moving.attempt, {0}, "too late")
    assert moving.queued == [(77,)] and moving.cancels == [] and not moving.errors


def test_failures_in_a_row_end_it_and_progress_starts_the_count_anew(moving: Moving) -> None:
    for number in range(8):
        attempt = moving.begin(moving.d0) if number else moving.attempt
        moving.receive(2)  # more than the first token
        moving.moves.failed(moving.request, attempt, {0, 1}, "why")
    assert not moving.errors
    for number in range(2):
        moving.receive(number)  # a first token is no progress: every prefill node gives it
        moving.moves.failed(moving.request, moving.begin(moving.d0), {0, 1}, "secret words")
    (error,) = moving.errors
    assert "after 3 attempts" in str(error) and "secret words" in str(error)
    assert error.shown == "given up after 3 attempts"  # type: ignore[attr-defined]


def test_a_canary_is_never_moved(tokenizer: TextTokenizer) -> None:
    for name in ("failed", "lost"):
        moving = Moving(tokenizer, 1, is_canary=True)
        if name == "failed":
            moving.moves.failed(moving.request, moving.attempt, {0}, "why")
        else:
            moving.moves.lost(moving.d0, "silent")
        assert len(moving.errors) == 1 and moving.queued == []


def test_a_decode_node_that_dies_counts_for_nothing_until_many_did(moving: Moving) -> None:
    for number in range(MAX_LOSSES):
        node = make_node(f"d{number}")
        moving.attempt = moving.begin(node)
        moving.moves.lost(node, "its connection closed")
        assert ("p0", moving.attempt.number, (0, 1)) in moving.cancels
        assert node.node_id not in [name for name, _, _ in moving.cancels]
    assert not moving.errors and moving.request.sequences[0].failures == []
    node = make_node("d-last")
    moving.begin(node)
    moving.moves.lost(node, "its connection closed")
    assert f"after {MAX_LOSSES + 1} nodes" in str(moving.errors[0])


def test_what_failed_on_a_node_that_dies_is_forgiven(moving: Moving) -> None:
    moving.moves.failed(moving.request, moving.attempt, {0, 1}, "it does not answer")
    assert moving.request.sequences[0].failures
    moving.moves.lost(moving.d0, "silent")
    assert not moving.request.sequences[0].failures and not moving.request.has_failed_on(moving.p0, moving.d0)


def test_a_prefill_node_that_dies_takes_what_decode_has_not_got(moving: Moving) -> None:
    moving.attempt.admitted.add(0)
    moving.moves.lost(moving.p0, "silent")
    assert moving.queued == [(1,), (77,)] and moving.cancels == [("d0", 0, (1,))]
    assert moving.attempt.prefill_done and moving.attempt.nodes == [moving.d0]
    moving.moves.lost(moving.p0, "twice")
    assert moving.queued == [(1,), (77,)]


def test_a_prefill_node_that_dies_after_its_work_moves_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.moves.lost(moving.p0, "silent")
    assert moving.queued == [(77,)] and moving.cancels == []


def test_a_prefill_node_that_dies_before_it_was_asked_moves_those_who_wait_for_its_pages(moving: Moving) -> None:
    """The reservation has no answer yet: it is taken back, and the choices are in the queue still."""
    moving.moves.failed(moving.request, moving.attempt, {0, 1}, "why")
    moving.queued, moving.cancels = [], []
    attempt = moving.begin(moving.d1, dispatched=False)
    moving.moves.lost(moving.p0, "silent")
    assert moving.asked[-1] == attempt.number and moving.request.attempts == {}
    assert moving.cancels == [("d1", attempt.number, (0, 1))] and moving.queued == []


def test_log_probabilities_that_died_with_prefill_are_computed_again(tokenizer: TextTokenizer) -> None:
    moving = Moving(tokenizer, 1, wants_prompt_logprobs=True)
    moving.attempt.admitted.add(0)
    moving.moves.lost(moving.p0, "silent")
    assert moving.queued == [(0,)], "decode goes on, but the prompt must be scored"
    moving = Moving(tokenizer, 1, wants_prompt_logprobs=True)
    moving.attempt.choices.clear()
    moving.request.sequences[0].finish_reason = "length"
    moving.moves.lost(moving.p0, "silent")
    assert moving.queued == [(0,)] and moving.request.attempts == {}
    moving = Moving(tokenizer, 1, wants_prompt_logprobs=True)
    moving.request.prompt_logprobs = (TokenLogprobs(-1.0, (), ()),)
    moving.attempt.admitted.add(0)
    moving.moves.lost(moving.p0, "silent")
    assert moving.queued == []


@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_draining_node_hands_on_all_that_it_holds(tokenizer: TextTokenizer, name: str, dispatched: bool) -> None:
    moving = Moving(tokenizer)
    moving.attempt.dispatched = dispatched
    moving.moves.evict(getattr(moving, name), "its time to drain is over")
    assert moving.queued == [(0,), (1,)] and moving.request.attempts == {} and moving.asked == [0]
    told = {"p0", "d0"} if dispatched else {"d0"}  # prefill knows nothing of it yet
    assert {cancelled for cancelled, _, _ in moving.cancels} == told
    assert moving.request.sequences[0].failures == [] and moving.request.sequences[0].num_losses == 0


def test_a_prefill_node_that_has_done_its_part_hands_on_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.moves.evict(moving.p0, "its time to drain is over")
    assert moving.queued == [(77,)]


def test_a_node_that_cannot_be_reached_is_left(moving: Moving) -> None:
    moving.moves.unreachable(moving.request, moving.attempt, moving.d0)
    assert moving.queued == [(0,), (1,), (77,)] and moving.cancels == [("p0", 0, (0, 1))]
    assert moving.request.sequences[0].num_losses == 1 and moving.request.sequences[0].failures == []


def test_a_pause_holds_nothing_and_resumes_in_order(moving: Moving) -> None:
    moving.receive(4)
    moving.request.sequences[1].finish_reason = "stop"
    moving.attempt.choices.discard(1)
    moving.d0.release("r", 0, (1,))
    moving.moves.pause(moving.request, "its client does not read")
    assert moving.withdrawn == 1 and moving.queued == [(77,)] and moving.request.attempts == {}
    assert sorted(moving.cancels) == [("d0", 0, (0,)), ("p0", 0, (0,))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing
    assert moving.request.sequences[0].attempt is None and moving.request.sequences[0].num_before == 4
    moving.moves.resume(moving.request)
    assert moving.queued == [(0,), (77,)]


def test_several_choices_resume_in_their_order(moving: Moving) -> None:
    moving.moves.pause(moving.request, "its client does not read")
    moving.moves.resume(moving.request)
    assert moving.queued == [(0,), (1,), (77,)]


def test_why_a_request_moved_is_counted(tokenizer: TextTokenizer) -> None:
    for event, kind in (
        (lambda moving: moving.moves.failed(moving.request, moving.attempt, {0}, "no"), "failed"),
        (lambda moving: moving.moves.unreachable(moving.request, moving.attempt, moving.d0), "lost"),
        (lambda moving: moving.moves.evict(moving.d0, "its time is over"), "drained"),
    ):
        moving = Moving(tokenizer)
        event(moving)
        assert moving.kinds == [kind]

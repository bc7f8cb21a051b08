"""Cancels are repeated until the node has acknowledged each of them, or is gone."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest

from baton.metadata.wire.messages import Cancel, Cancelled, Reserved
from baton.metadata.wire.node_info import Load
from baton.router.dispatching.cancels import ACK_S, LATE_S, MAX_ACK_S, Cancels
from baton.router.dispatching.effects import Effects, Send

from ..sites import add_node, make_group, make_request

GROUP = make_group()
D0, D1 = add_node(GROUP, "decode", "d0"), add_node(GROUP, "decode", "d1")
LOAD = Load(free_pages=9, running=1, waiting=0)


class Sent(Cancels):
    """A Cancels that records the messages that it sends."""

    def __init__(self) -> None:
        self.effects: Effects = []
        super().__init__("epoch", self.effects)

    @property
    def messages(self) -> list[Cancel]:
        """Remove and return all messages."""
        taken = [each.message for each in self.effects if isinstance(each, Send) and isinstance(each.message, Cancel)]
        assert len(taken) == len(self.effects)
        self.effects.clear()
        return taken


def test_a_cancel_names_choices_cancelled_before_too() -> None:
    cancels = Sent()
    cancels.send(D0, "a", 1, [2], "why", 0.0)
    cancels.send(D0, "a", 1, [0, 2], "why else", 0.0)
    cancels.send(D0, "a", 2, [1], "why", 0.0)
    assert cancels.messages == [
        Cancel("epoch", "a", 1, (2,), "why"),
        Cancel("epoch", "a", 1, (0, 2), "why else"),
        Cancel("epoch", "a", 2, (1,), "why"),
    ]
    assert cancels.num_unacked == 2


def test_messages_of_one_attempt_are_acknowledged_one_by_one() -> None:
    cancels = Sent()
    for choice in range(3):
        cancels.send(D0, "a", 1, [choice], "", 0.0)
    for _ in range(2):
        cancels.acknowledged(D0, Cancelled("a", 1))
        assert cancels.num_unacked == 1, "the last message may be lost still"
    cancels.acknowledged(D0, Cancelled("a", 1))
    assert cancels.num_unacked == 0
    cancels.acknowledged(D0, Cancelled("a", 1))  # once more does nothing


def test_an_answer_counts_for_its_node_request_and_attempt_alone() -> None:
    cancels = Sent()
    cancels.send(D0, "a", 1, [0], "", 0.0)
    for node, answer in ((D1, Cancelled("a", 1)), (D0, Cancelled("b", 1)), (D0, Cancelled("a", 2))):
        cancels.acknowledged(node, answer)
        assert cancels.num_unacked == 1


def test_a_cancel_is_repeated_without_end_after_growing_waits(caplog: pytest.LogCaptureFixture) -> None:
    cancels, repeated_at = Sent(), [0.0]
    cancels.send(D0, "a", 1, [0, 1], "why", 0.0)
    first = cancels.messages
    with caplog.at_level(logging.WARNING):
        for tick in range(1, 8 * 200):  # 200 s
            cancels.repeat(tick / 8)
            if messages := cancels.messages:
                assert messages == first
                repeated_at.append(tick / 8)
    waits = [after - before for before, after in pairwise(repeated_at)]
    assert waits[:6] == [ACK_S * 2**power for power in range(6)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert len(waits) > 25 and set(waits[5:]) == {MAX_ACK_S}
    assert len(caplog.records) == len(waits) - 5 and "d0" in caplog.text


def test_one_answer_to_a_repeated_cancel_is_enough() -> None:
    """The answers to the messages before it may be lost."""
    cancels = Sent()
    cancels.send(D0, "a", 1, [0, 1], "", 0.0)
    cancels.send(D0, "a", 1, [1], "", 0.0)  # names no other choice
    cancels.repeat(ACK_S)
    assert [message.choices for message in cancels.messages] == [(0, 1)] * 3
    cancels.acknowledged(D0, Cancelled("a", 1))
    assert cancels.num_unacked == 0
    cancels.repeat(100.0)
    assert cancels.messages == []


def test_late_answers_to_a_repeated_cancel_do_not_count_for_newer_choices() -> None:
    for is_acked_before in (False, True):
        cancels = Sent()
        cancels.send(D0, "a", 1, [0], "", 0.0)
        cancels.repeat(ACK_S)
        if is_acked_before:
            cancels.acknowledged(D0, Cancelled("a", 1))
            assert cancels.num_unacked == 0, "one answer is enough"
        cancels.send(D0, "a", 1, [1], "", 1.0)
        for _ in range(1 if is_acked_before else 2):
            cancels.acknowledged(D0, Cancelled("a", 1))
            assert cancels.num_unacked == 1, "an answer to a message that did not name choice 1"
        cancels.acknowledged(D0, Cancelled("a", 1))
        assert cancels.num_unacked == 0


def test_answers_before_a_repeat_do_not_count_for_it() -> None:
    cancels = Sent()
    cancels.send(D0, "a", 1, [0], "", 0.0)
    cancels.send(D0, "a", 1, [1], "", 0.0)
    cancels.repeat(ACK_S)
    cancels.acknowledged(D0, Cancelled("a", 1))
    assert cancels.num_unacked == 1, "the answer to the first message, which named only choice 0"
    cancels.acknowledged(D0, Cancelled("a", 1))
    assert cancels.num_unacked == 0


def test_answers_are_not_awaited_for_ever_once_a_cancel_has_ended() -> None:
    for after_s, num_needed in ((LATE_S / 2, 2), (LATE_S + 10.0, 1)):
        cancels = Sent()
        cancels.send(D0, "a", 1, [0], "", 0.0)
        cancels.repeat(ACK_S)
        cancels.acknowledged(D0, Cancelled("a", 1))
        cancels.repeat(after_s)
        cancels.send(D0, "a", 1, [1], "", after_s)
        for num_left in reversed(range(num_needed)):
            cancels.acknowledged(D0, Cancelled("a", 1))
            assert cancels.num_unacked == (num_left > 0)


@pytest.mark.parametrize("seed", range(50))
def test_a_cancel_has_ended_only_if_its_node_was_told_of_every_choice(seed: int) -> None:
    """Messages and answers keep their order, are late by any time, and are lost now and then."""
    rng = random.Random(seed)
    cancels, to_node, answers = Sent(), list[tuple[int, ...]](), list[Cancelled]()
    told, cancelled, now = set[int](), set[int](), 0.0
    for step in range(200):
        is_lossy = step < 100
        now += rng.random()
        if is_lossy and rng.random() < 0.1:
            cancelled.add(choice := rng.randrange(8))
            cancels.send(D0, "a", 1, [choice], "", now)
        cancels.repeat(now)
        to_node += [message.choices or () for message in cancels.messages if not is_lossy or rng.random() < 0.7]
        for _ in range(rng.randrange(3) if is_lossy else len(to_node)):
            if to_node:
                told.update(to_node.pop(0))
                answers += [Cancelled("a", 1)] if not is_lossy or rng.random() < 0.7 else []
        for _ in range(rng.randrange(3) if is_lossy else len(answers)):
            if answers:
                cancels.acknowledged(D0, answers.pop(0))
        assert cancels.num_unacked or told >= cancelled
    assert not cancels.num_unacked, "it ends once nothing is lost any more"


def test_another_choice_starts_the_waits_anew() -> None:
    cancels = Sent()
    cancels.send(D0, "a", 1, [0], "", 0.0)
    cancels.repeat(ACK_S)
    cancels.send(D0, "a", 1, [1], "", 0.5)
    assert len(cancels.messages) == 3
    for now, num_messages in ((0.5 + ACK_S - 0.01, 0), (0.5 + ACK_S, 1)):
        cancels.repeat(now)
        assert len(cancels.messages) == num_messages


def test_cancels_die_with_their_node() -> None:
    cancels = Sent()
    for node in (D0, D1):
        cancels.send(node, "a", 1, [0], "", 0.0)
    cancels.effects.clear()
    cancels.forget(D0)
    cancels.forget(D0)
    assert cancels.num_unacked == 1
    cancels.repeat(10.0)
    assert [each.node for each in cancels.effects if isinstance(each, Send)] == [D1]


def test_only_grants_that_were_not_asked_for_are_cancelled() -> None:
    cancels, request = Sent(), make_request(GROUP, "a", num_choices=3)
    attempt = request.begin_attempt({0, 1}, None, D0, 0.0)
    cancels.send_unwanted(D0, Reserved("a", attempt.number, (0, 1), LOAD), request, 0.0)
    assert cancels.messages == [], "all of it is wanted"
    cancels.send_unwanted(D0, Reserved("a", attempt.number, (), LOAD), None, 0.0)
    assert cancels.messages == [], "nothing was granted"
    for node, number, known, granted, unwanted in (
        (D0, attempt.number, request, (0, 1, 2), (2,)),
        (D1, attempt.number, request, (0, 1), (0, 1)),  # another node
        (D0, attempt.number + 1, request, (0,), (0,)),  # another attempt
        (D0, attempt.number + 2, None, (0,), (0,)),  # the request is over
    ):
        cancels.send_unwanted(node, Reserved("a", number, granted, LOAD), known, 0.0)
        assert [message.choices for message in cancels.messages] == [unwanted]


def test_a_cancel_that_is_lost_three_times_arrives_within_2_s() -> None:
    waits_s = [ACK_S * 2**number for number in range(3)]
    assert sum(waits_s) < 2.0

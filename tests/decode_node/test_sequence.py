"""A sequence on the decode node: tokens, counts and totals, without pages or rounds of its own."""

from __future__ import annotations

import pytest

from baton.decode_node.sequence import SequenceClock, new_sequence
from baton.engine.work import MAX_MISSED, Accepted
from baton.metadata.errors import RequestError
from baton.metadata.wire.messages import Compute
from baton.metadata.wire.request import (
    MAX_PREEMPTIONS,
    GenerationRequest,
    Preemption,
    SamplingParams,
    TokenLogprobs,
    Unit,
    pack_ids,
)

from .conftest import MakeSequence


def accepted(*token_ids: int, num_drafted: int = 0, logprobs: list[TokenLogprobs | None] | None = None) -> Accepted:
    entries = logprobs or [None] * len(token_ids)
    return Accepted(list(token_ids), entries, len(token_ids) - 1, num_drafted)


def test_a_message_becomes_a_sequence(make_sequence: MakeSequence) -> None:
    sequence = make_sequence("r", 9, choice=1, attempt=3, received=2)
    assert sequence.unit == Unit("r", 1, 3)
    assert (sequence.prompt_len, sequence.num_generated, sequence.num_sent) == (7, 2, 2)
    assert sequence.num_to_compute == 9


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 60, "context_len": 9}, {"vocab_size": 100, "context_len": 1}], ids=str
)
def test_a_prompt_outside_the_vocabulary_or_the_context_is_refused(sizes: dict[str, int]) -> None:
    generation = GenerationRequest(pack_ids([1, 60]), SamplingParams(max_tokens=1))
    message = Compute("router", "r", 0, (0,), generation)
    assert new_sequence(message, 0, 0, vocab_size=61, context_len=9).token_ids == [1, 60]
    with pytest.raises(RequestError):
        new_sequence(message, 0, 0, **sizes)


def test_a_round_appends_its_tokens_and_counts_its_drafts(make_sequence: MakeSequence) -> None:
    sequence = make_sequence("r", 5, max_tokens=9)
    sequence.start_pulled()
    sequence.append_first(11, None, num_cached=4)
    assert (sequence.num_computed, sequence.num_to_compute) == (5, 1)
    entry = TokenLogprobs(-0.5, (), ())
    assert sequence.accept(accepted(12, 13, num_drafted=3, logprobs=[None, entry]), 100) == 2
    assert sequence.accept(accepted(14), 100) == 1
    assert sequence.token_ids[5:] == [11, 12, 13, 14]
    assert (sequence.num_computed, sequence.num_to_compute) == (8, 1)
    assert (sequence.num_drafted, sequence.accept_counts) == (3, [0, 1, 0, 0])
    assert sequence.logprobs == {2: entry} and sequence.ended is None


def test_the_token_that_ends_a_sequence_is_the_last_one_appended(make_sequence: MakeSequence) -> None:
    for reason, more, context_len in (
        ("stop", {"stop_ids": (13,)}, 100),
        ("length", {"max_tokens": 3}, 100),
        ("length", {}, 8),
    ):
        sequence = make_sequence("r", 5, **{"max_tokens": 20, **more})
        sequence.start_pulled()
        sequence.append_first(11, None, num_cached=4)
        assert sequence.accept(accepted(12, 13, 14, num_drafted=4), context_len) == 2
        assert sequence.token_ids[5:] == [11, 12, 13]
        assert sequence.ended is not None and sequence.ended.reason == reason
        totals = sequence.ended
        assert (totals.num_prompt, totals.num_generated, totals.num_cached) == (5, 3, 4)
        assert (totals.num_rounds, totals.num_drafted, totals.num_accepted, totals.num_steps) == (1, 4, 2, 1)
        assert totals.accept_counts == (0, 0, 1, 0, 0)


def test_a_preemption_is_in_the_totals(make_sequence: MakeSequence) -> None:
    sequence = make_sequence("r", 5, max_tokens=3)
    sequence.start_pulled()
    sequence.append_first(11, None, num_cached=0)
    sequence.clock.start(sequence.num_generated)
    sequence.accept(accepted(12), 100)
    sequence.preempt()
    assert sequence.num_to_compute == 7
    sequence.clock.resume()
    sequence.compute(6)
    sequence.accept(accepted(13), 100)
    assert sequence.ended is not None
    assert [each.num_preemptions for each in sequence.ended.preemptions] == [1]


def test_a_sequence_that_is_left_behind_stays_so(make_sequence: MakeSequence) -> None:
    sequence = make_sequence("r", 5)
    sequence.num_missed = MAX_MISSED
    assert not sequence.is_left_behind
    sequence.num_missed += 1
    assert sequence.is_left_behind


def test_tokens_are_marked_as_sent(make_sequence: MakeSequence) -> None:
    sequence = make_sequence("r", 5)
    sequence.append_first(11, None, num_cached=0)
    assert (sequence.num_generated, sequence.num_sent) == (1, 0)
    sequence.mark_sent()
    assert sequence.num_sent == 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_preemption_records_the_run_before_it() -> None:
    time = Clock()
    clock = SequenceClock(time)
    clock.start(1)
    for num_generated in (1, 3, 4):
        time.now += 1
        clock.step(num_generated)
    time.now += 0.5
    clock.preempt(6)
    time.now += 10
    clock.resume()
    time.now += 2
    clock.step(6)
    assert clock.preemptions == [Preemption(1, 3, 5, 3.5, 10.0, 2.0)]
    time.now += 1
    clock.step(7)
    clock.preempt(8)
    time.now += 1
    clock.resume()
    time.now += 1
    clock.preempt(8)  # again before a round
    time.now += 4
    clock.resume()
    clock.step(8)
    assert clock.preemptions[1:] == [Preemption(1, 2, 2, 1.0, 1.0, 1.0), Preemption(1, 0, 0, 0.0, 4.0, 0.0)]
    assert clock.num_steps == 6


def test_many_preemptions_are_bounded_and_sum_up() -> None:
    time = Clock()
    clock = SequenceClock(time)
    clock.start(1)
    for num_generated in range(1, 101):
        time.now += 1
        clock.preempt(num_generated)
        time.now += 2
        clock.resume()
        time.now += 3
        clock.step(num_generated)
    assert len(clock.preemptions) <= MAX_PREEMPTIONS
    sums = [
        sum(column)
        for column in zip(
            *((t.num_preemptions, t.num_steps, t.ran_s, t.waited_s, t.recompute_s) for t in clock.preemptions),
            strict=True,
        )
    ]
    assert sums == [100, 99, 100.0, 200.0, 300.0]

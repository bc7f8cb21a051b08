"""The sequence clock, on a clock that only the test moves: rounds and preemptions of one sequence."""

from __future__ import annotations

from baton.decode_node.sequence_clock import SequenceClock
from baton.metadata.wire.request import MAX_PREEMPTIONS, Preemption


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

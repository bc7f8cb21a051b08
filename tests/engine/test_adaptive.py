"""How much a round drafts: the choice that brings most tokens a second, and what is not known is not asked for free."""

from __future__ import annotations

import itertools
import random

import pytest

from baton.engine.adaptive import _LOAN, _SHARE, StepChooser, _Rate
from baton.engine.draft_shape import DraftShape
from baton.engine.step_times import StepTimes

SIZES, STEPS = (1, 4, 16), (0, 1, 5)


def linear_times(plain: float, per_step: float, per_row: float) -> StepTimes:
    """Seconds of plain + steps * per_step + rows * per_row."""
    return StepTimes({(size, k): plain + k * per_step + size * (k + 1) * per_row for size in SIZES for k in STEPS})


CHEAP = (1.0, 0.15, 0.001)  # a machine that waits for weights
DEAR = (1.0, 0.1, 1.0)  # one that computes every row


def run(
    chooser: StepChooser, times: StepTimes, rate: float, num_seqs: int, num_rounds: int, seed: int = 0
) -> tuple[list[int], float]:
    """Steps of each round, and tokens a second; a draft is right with `rate`."""
    rng, chosen, seconds, tokens = random.Random(seed), [], 0.0, 0
    slots = list(range(num_seqs))
    for _ in range(num_rounds):
        steps = chooser.choose(slots, [chooser.shape.num_steps] * num_seqs)
        accepted = [next((i for i in range(steps) if rng.random() > rate), steps) for _ in slots]
        took = times.seconds(num_seqs, steps)
        if not chooser.passes_over(steps):
            chooser.observe(slots, steps, [steps] * num_seqs, accepted, took)
        chosen.append(steps)
        seconds += took
        tokens += sum(accepted) + num_seqs
    return chosen, tokens / seconds


def make(times: tuple[float, float, float]) -> tuple[StepChooser, StepTimes]:
    return StepChooser(DraftShape(5), linear_times(*times), 16), linear_times(*times)


def test_it_keeps_to_a_choice_that_is_about_as_good() -> None:
    chooser, real = make(CHEAP)
    chosen, _ = run(chooser, real, 0.6, 4, 600)
    measuring = 2 * 2 * 600 // 16  # there and back, a round without drafts and one with a step more
    assert sum(a != b for a, b in itertools.pairwise(chosen)) < measuring, chosen


def test_drafts_that_hardly_pay_are_not_begun() -> None:
    """Once begun they go on."""
    times = {(1, 0): 1.0, (1, 1): 1.4, (1, 5): 3.0}
    for rate, last, expected in ((0.55, 0, 0), (0.55, 1, 1), (0.65, 0, 1)):
        chooser = StepChooser(DraftShape(5), StepTimes(times), 1)
        for steps in [0] * 100 + [1] * 100:
            chooser.observe([0], steps, [steps], [0], times[1, steps])
        chooser.balance, chooser._credit, chooser.num_steps, chooser._since_plain = 5.0, 0.0, last, 0
        chooser._own[0] = chooser._all = _Rate(rate, 1000.0)
        assert chooser.choose([0], [1]) == expected, (rate, last)


def test_nothing_is_drafted_at_a_loss() -> None:
    """Whatever the estimate promises: here it believes in drafts that are never right."""
    chooser, real = make(CHEAP)
    chooser.acceptance = lambda slot, doubt=0.0: 0.9
    chosen, _ = run(chooser, real, 0.0, 4, 200)
    took = sum(real.seconds(4, steps) / real.seconds(4, 0) for steps in chosen)
    assert any(chosen) and took < 200 + _LOAN + 200 * _SHARE + 1, (took, chosen)


def test_what_catching_up_takes_is_learnt_and_counts() -> None:
    chooser, real = make(CHEAP)
    for _ in range(30):
        chooser.observe([0], 0, [0], [0], real.seconds(1, 0))
        chooser.observe([0], 1, [1], [1], real.seconds(1, 1) + 3.0, num_caught_up=20)
    assert chooser.times.catch_up_seconds(20) == pytest.approx(3.0, rel=0.1)
    assert chooser.times.catch_up_seconds(200) > chooser.times.catch_up_seconds(20)
    assert chooser.times.catch_up_seconds(0) == 0.0 < chooser.times.catch_up_seconds(1)
    assert chooser.times.seconds(1, 1) == pytest.approx(real.seconds(1, 1), rel=0.02)
    chooser.balance, chooser.num_steps, chooser._since_plain, chooser._until_look = 1.0, 0, 0, 0
    assert chooser.choose([0], [5], 2000) == 0
    chooser._until_look = 0
    assert chooser.choose([0], [5], 0) > 0


def test_it_tries_again_once_drafts_are_better() -> None:
    chooser, real = make(CHEAP)
    chosen, _ = run(chooser, real, 0.0, 2, 400)
    assert 0 < sum(chosen[100:]) <= 10, chosen  # some tries
    chosen, _ = run(chooser, real, 0.95, 2, 1200)
    assert 5 in chosen[-2:], chosen[-50:]  # the other one measures


def test_a_table_that_is_wrong_about_many_steps_is_found_out() -> None:
    real = linear_times(*CHEAP)
    table = {(size, k): real.seconds(size, k) * (1.8 if k == 5 else 1.0) for size in SIZES for k in STEPS}
    chosen, _ = run(StepChooser(DraftShape(5), StepTimes(table), 16), real, 0.9, 4, 600)
    assert chosen[:50].count(5) < 10 and chosen[-100:].count(5) > 80, chosen


def test_sequences_differ() -> None:
    """One whose drafts are right is not held back by another's, and a new one in a slot starts anew."""
    chooser, _ = make(CHEAP)
    for _ in range(3):
        chooser.observe([0, 1], 0, [0, 0], [0, 0], 1.0)
    for _ in range(40):
        chooser.observe([0, 1], 5, [5, 5], [5, 0], 1.8)
    chooser._since_plain = 0
    assert chooser.acceptance(0) > 0.9 > 0.3 > chooser.acceptance(1)
    assert chooser.choose([0], [5]) == 5
    chooser.admit(1)
    assert chooser.acceptance(1) == pytest.approx(chooser.acceptance(15))


def test_not_more_than_anybody_can_use() -> None:
    chooser, _ = make(CHEAP)
    assert chooser.choose([0, 1], [2, 1]) <= 2
    assert chooser.choose([0, 1], [0, 0]) == 0


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    shape = DraftShape(5, 2, 12)
    chooser = StepChooser(shape, linear_times(*CHEAP), 16)
    chosen, _ = run(chooser, linear_times(*CHEAP), 0.8, 2, 50)
    assert set(chosen) <= {0, 5} and 5 in chosen
    assert chooser.choose([0], [3]) in (0, 5)


def test_times_between_and_beyond_the_measured_ones() -> None:
    times = linear_times(1.0, 0.2, 0.01)
    for size in (1, 2, 4, 10, 16, 40):
        for steps in range(6):
            assert times.seconds(size, steps) == pytest.approx(1.0 + 0.2 * steps + 0.01 * size * (steps + 1))


def test_times_follow_what_rounds_take() -> None:
    times = linear_times(1.0, 0.2, 0.0)
    for _ in range(50):
        times.observe(4, 0, 1.0)
    for _ in range(200):
        times.observe(4, 0, 2.0)  # contexts have grown: all rounds take twice as long
    assert times.seconds(4, 0) == pytest.approx(2.0, rel=0.01)
    assert times.seconds(4, 5) > 2.5
    for _ in range(400):
        times.observe(4, 0, 2.0)
        times.observe(4, 5, 8.0)
    assert times.seconds(4, 5) == pytest.approx(8.0, rel=0.1) and times.seconds(4, 0) == pytest.approx(2.0, rel=0.1)


def test_a_pause_says_little() -> None:
    times = linear_times(1.0, 0.2, 0.0)
    for seconds in (1.0, 1000.0, 1.2):  # the first ones are believed, but for one of three
        times.observe(1, 0, seconds)
    assert times.is_begun and times.seconds(1, 0) == pytest.approx(1.2)
    for _ in range(50):
        times.observe(1, 0, 1.0)
    times.observe(1, 0, 1000.0)
    assert times.seconds(1, 0) < 1.06


def test_measuring_runs_each_kind_and_drops_the_first_run() -> None:
    calls: list[tuple[int, int]] = []

    def run_round(size: int, steps: int) -> float:
        calls.append((size, steps))
        return 0.001 * (50 if calls.count((size, steps)) == 1 else 1 + steps)

    times = StepTimes.measure(run_round, 8, range(6))
    assert set(calls) == {(size, steps) for size in (1, 4, 8) for steps in (0, 1, 5)}
    assert times.seconds(8, 5) == pytest.approx(0.006) and times.seconds(2, 3) == pytest.approx(0.004)
    assert StepTimes.measure(lambda size, steps: 1.0 + size + steps, 1, (0, 4)).seconds(1, 4) == pytest.approx(6.0)


def test_a_disturbance_of_what_is_measured_is_seen_where_more_takes_less() -> None:
    times = StepTimes.measure(
        lambda size, steps: 0.040 if (size, steps) == (4, 1) else 0.001 * size * (1 + steps), 8, range(6)
    )
    assert times.seconds(4, 1) == times.seconds(8, 1) == 0.016
    assert times.seconds(4, 0) == 0.004 and times.seconds(4, 5) == 0.024


def test_a_slow_machine_measures_two_sizes() -> None:
    sizes: set[int] = set()

    def run_round(size: int, steps: int) -> float:
        sizes.add(size)
        return 0.1 * size * (1 + steps)

    times = StepTimes.measure(run_round, 16, range(6))
    assert sizes == {1, 4}
    assert times.seconds(16, 2) == pytest.approx(4.8)


def test_a_slow_start_is_forgotten() -> None:
    """The first rounds with drafts compile kernels; that must not speak against drafts for good."""
    chooser, real = make(CHEAP)
    for _ in range(3):
        chooser.observe([0], 5, [5], [4], 100.0)
    chosen, _ = run(chooser, real, 0.9, 1, 600)
    assert sum(each == 5 for each in chosen[-100:]) > 90, chosen


def test_a_round_whose_time_is_not_known_counts_by_what_is_expected() -> None:
    """The time of a burst of arrivals spoils neither the table nor the account; what was accepted counts."""
    chooser, real = make(CHEAP)
    for _ in range(4):
        chooser.observe([0], 0, [0], [0], real.seconds(1, 0))
    before, rate, balance = chooser.times.seconds(1, 5), chooser.acceptance(0), 0.0
    chooser.balance = balance
    chooser.observe([0], 5, [5], [5], None, None)
    assert chooser.times.seconds(1, 5) == before
    assert chooser.acceptance(0) > rate
    assert chooser.balance == pytest.approx(balance + 6 - (1 - _SHARE) * before / chooser.times.seconds(1, 0), abs=0.01)
    chooser.observe([0], 5, [5], [0], 100 * before)
    assert chooser.times.seconds(1, 5) > before

"""The table of times: linear between what was measured, and corrected by what rounds really take."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from adaptive_world import Machine

from baton.engine.pace.step_times import KEPT, MEMORY, ChunkCosts, StepTimes


def linear_times(plain: float, per_step: float, per_row: float = 0.0) -> StepTimes:
    return Machine(plain, per_step, per_row).table()


def test_times_between_and_beyond_the_measured_ones() -> None:
    times = linear_times(1.0, 0.2, 0.01)
    for size in (1, 2, 4, 10, 16, 40):
        for steps in range(6):
            assert times.seconds(size, steps) == pytest.approx(1.0 + 0.2 * steps + 0.01 * size * (steps + 1))


def test_times_follow_what_rounds_take() -> None:
    times = linear_times(1.0, 0.2)
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


@pytest.mark.parametrize("firsts", list(itertools.permutations([1.1, 1.2, 1000.0])), ids=str)
def test_the_least_of_the_first_measurements_is_believed(firsts: Sequence[float]) -> None:
    times = linear_times(1.0, 0.2)
    for seconds in firsts:
        times.observe(1, 0, seconds)
    assert times.is_begun() and times.seconds(1, 0) == pytest.approx(1.1)


@pytest.mark.parametrize("num_pauses", [1, 2])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_pause_says_nothing(num_pauses: int, steps: int) -> None:
    times = linear_times(1.0, 0.2)
    expected = times.seconds(1, steps)
    for _ in range(50):
        times.observe(1, steps, expected)
    for _ in range(num_pauses):
        assert times.observe(1, steps, 1000.0) == pytest.approx(expected)
    assert times.seconds(1, steps) == pytest.approx(expected)
    for _ in range(100):
        times.observe(1, steps, 2 * expected)
    assert times.seconds(1, steps) == pytest.approx(2 * expected, rel=0.05), "a change that lasts is believed"


def test_the_first_measurement_alone_says_nothing() -> None:
    times = linear_times(1.0, 0.2)
    assert times.observe(1, 5, 40.0) == pytest.approx(2.0) == times.seconds(1, 5)
    times.observe(1, 5, 3.0)
    assert times.seconds(1, 5) == pytest.approx(3.0)


def test_measuring_runs_each_kind_and_drops_the_first_run() -> None:
    calls: list[tuple[int, int]] = []

    def run_round(size: int, steps: int) -> float:
        calls.append((size, steps))
        return 0.001 * (0.5 if calls.count((size, steps)) == 1 else 1 + steps)

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


def test_a_table_needs_the_same_steps_for_each_size_and_rounds_without_drafts() -> None:
    for seconds in ({(1, 1): 1.0}, {(1, 0): 1.0, (1, 1): 1.0, (4, 0): 1.0}):
        with pytest.raises(AssertionError):
            StepTimes(seconds)


def test_a_table_of_one_size_holds_for_all_sizes() -> None:
    times = StepTimes({(4, 0): 1.0, (4, 2): 3.0})
    assert [times.seconds(size, steps) for size in (1, 64) for steps in (0, 1, 4)] == [1.0, 2.0, 5.0] * 2


def test_three_rounds_without_drafts_begin_the_table() -> None:
    times = linear_times(1.0, 0.2)
    for steps in (1, 0, 0):
        times.observe(1, steps, times.seconds(1, steps))
        assert not times.is_begun()
    times.observe(1, 0, 1.0)
    assert times.is_begun()
    assert not times.is_begun("sampled"), "each kind of sampling begins anew"


def test_a_new_kind_of_sampling_starts_from_the_last_one() -> None:
    times = linear_times(1.0, 0.2)
    for _ in range(40):
        times.observe(4, 0, 2.0, kind="greedy")
        times.observe(4, 5, 4.0, kind="greedy")
    assert times.seconds(4, 0, "sampled") == pytest.approx(2.0, rel=0.05)
    assert times.seconds(4, 5, "sampled") == pytest.approx(4.0, rel=0.05)
    for _ in range(40):
        times.observe(4, 0, 3.0, kind="sampled")
    assert times.seconds(4, 0, "sampled") == pytest.approx(3.0, rel=0.05)
    assert times.seconds(4, 0, "greedy") < 2.6, "only what is common to all rounds has moved"


def test_bad_news_are_forgotten_where_drafts_are_not_seen() -> None:
    times = linear_times(1.0, 0.2)
    for _ in range(KEPT):
        times.observe(4, 0, 1.0)
        times.observe(4, 1, 6.0)
    assert times.seconds(4, 1) == pytest.approx(6.0)
    times.pass_over(1000)
    assert times.seconds(4, 1) == pytest.approx(1.2, rel=0.02)
    for _ in range(4 * KEPT):
        times.observe(4, 1, 0.6)
    times.pass_over(1000)
    assert times.seconds(4, 1) == pytest.approx(0.6, rel=0.05), "good news stay"


def test_what_slows_one_number_of_steps_hardly_slows_another() -> None:
    """Only a small share of an error counts for all rounds. A kind of round keeps the rest to itself."""
    times = linear_times(1.0, 0.2)
    for _ in range(100):
        times.observe(4, 0, 1.0)
        times.observe(4, 1, 1.2)
        times.observe(4, 5, 4.0)
    assert times.seconds(4, 5) == pytest.approx(4.0, rel=0.05)
    assert times.seconds(4, 1) == pytest.approx(1.2, rel=0.05) and times.seconds(4, 0) == pytest.approx(1.0, rel=0.05)


def test_work_beside_the_rounds_is_added_to_drafts_that_were_not_seen() -> None:
    """The node's own work takes as long with drafts as without, so it does not multiply the time of a draft."""
    times = linear_times(1.0, 0.2)
    for _ in range(3):
        times.observe(1, 0, 4.0)  # 3.0 more than the table says
    assert times.seconds(1, 0) == pytest.approx(4.0)
    assert times.seconds(1, 5) == pytest.approx(3.0 + 2.0)


def test_catching_up_has_a_time_of_its_own() -> None:
    times, real = linear_times(1.0, 0.2, 0.01), linear_times(1.0, 0.2, 0.01)
    before = [times.seconds(4, steps) for steps in range(6)]
    assert times.catch_up_seconds(0) == 0.0 < times.catch_up_seconds(1) < times.catch_up_seconds(9)
    for _ in range(40):
        times.observe(4, 1, real.seconds(4, 1) + 2.0, num_caught_up=9)
    assert times.catch_up_seconds(9) == pytest.approx(2.0, rel=0.05)
    assert [times.seconds(4, steps) for steps in range(6)] == before


def test_a_pause_while_catching_up_is_not_believed() -> None:
    times = linear_times(1.0, 0.2, 0.01)
    expected = times.seconds(4, 1) + times.catch_up_seconds(9)
    assert times.observe(4, 1, expected, num_caught_up=9) == pytest.approx(expected)
    assert times.observe(4, 1, 1000.0, num_caught_up=9) < 5 * expected
    assert times.catch_up_seconds(9) < 10.0


def test_the_error_follows_the_spread_and_shrinks_with_what_was_seen() -> None:
    errors: list[float] = []
    for spread in (0.01, 0.1):
        times, rng = linear_times(1.0, 0.2), random.Random(1)
        assert times.error(4, 1) == 0.0, "nothing was seen"
        for count in range(200):
            for steps in (0, 1):
                times.observe(4, steps, times.seconds(4, steps) * math.exp(rng.gauss(0.0, spread)))
            if count in (4, 199):
                errors.append(times.error(4, 1))
    assert errors[0] > 1.5 * errors[1] > 0 and errors[2] > 1.5 * errors[3] > 0, errors
    assert 3 < errors[3] / errors[1] < 30, errors


def test_rounds_of_one_size_speak_for_those_of_another() -> None:
    """Contexts that grow, or a machine that slows down, slow all sizes. One that was seen before follows half way."""
    times = linear_times(1.0, 0.2)
    for size in (1, 4) * 50:
        times.observe(size, 0, 1.0)
    for _ in range(200):
        times.observe(4, 0, 2.0)
    assert times.seconds(4, 0) == pytest.approx(2.0, rel=0.01)
    assert 1.2 < times.seconds(1, 0) < 1.8


TABLE = {16: 0.005, 256: 0.010, 1024: 0.025}


def observe(costs: ChunkCosts, num_tokens: int, seconds: float, *, depth: int = 0, times: int = KEPT) -> None:
    for _ in range(times):
        costs.observe(num_tokens, depth, seconds, is_mixed=True)


def beside(costs: ChunkCosts, num_tokens: int, depth: int = 0) -> float:
    return costs.seconds(num_tokens, depth, is_mixed=True)


def test_the_table_is_linear_between_its_points_and_goes_on_beyond_them() -> None:
    costs = ChunkCosts(TABLE)
    assert [costs.seconds(each, 0, is_mixed=False) for each in TABLE] == pytest.approx(list(TABLE.values()))
    assert costs.seconds(136, 0, is_mixed=False) == pytest.approx(0.0075)
    assert costs.seconds(1792, 0, is_mixed=False) == pytest.approx(0.040)
    assert 0 < costs.seconds(1, 0, is_mixed=False) <= 0.005
    assert beside(costs, 256) == pytest.approx(0.010), "a round is no faster than the chunk alone"


def test_a_table_of_one_length_counts_longer_chunks_by_their_tokens() -> None:
    costs = ChunkCosts({16: 0.004})
    assert beside(costs, 8) == 0.004 and beside(costs, 32) == 0.008


def test_the_least_of_the_last_measurements_counts() -> None:
    costs = ChunkCosts(TABLE)
    for seconds in (0.030, 0.012, 0.050):
        costs.observe(256, 0, seconds, is_mixed=True)
    assert beside(costs, 256) == pytest.approx(0.012)
    assert costs.seconds(256, 0, is_mixed=False) == pytest.approx(0.010), "alone it takes as long as before"


def test_a_first_slow_measurement_alone_counts_for_nothing() -> None:
    costs = ChunkCosts(TABLE)
    observe(costs, 256, 0.5, times=KEPT - 1)
    assert beside(costs, 256) == pytest.approx(0.010)
    observe(costs, 256, 0.5, times=1)
    assert beside(costs, 256) == pytest.approx(0.5)


def test_a_gain_beside_a_round_holds_for_other_lengths_at_once() -> None:
    """One forward computes a chunk and a round, and reads the weights once."""
    costs = ChunkCosts(TABLE)
    observe(costs, 256, 0.006, times=1)
    assert beside(costs, 256) == pytest.approx(0.006) and beside(costs, 16) == pytest.approx(0.001)
    assert beside(costs, 1) > 0, "no chunk is free"


def test_a_longer_history_costs_more_and_by_token() -> None:
    costs = ChunkCosts(TABLE)
    observe(costs, 256, 0.010)
    observe(costs, 256, 0.018, depth=8192)
    assert beside(costs, 256) == pytest.approx(0.010) and beside(costs, 256, 8192) == pytest.approx(0.018)
    assert beside(costs, 20, 8192) == pytest.approx(costs.seconds(20, 0, is_mixed=False) + 0.008 / 16)


def test_a_slow_kind_is_tried_again_after_a_while() -> None:
    costs = ChunkCosts(TABLE)
    observe(costs, 256, 0.5)
    observe(costs, 16, 0.005, times=MEMORY)
    assert beside(costs, 256) == pytest.approx(0.5)
    observe(costs, 16, 0.005, times=1)
    assert beside(costs, 256) == pytest.approx(0.010)


@pytest.mark.parametrize("within_s", [0.0, 0.001, 0.0049, 0.005, 0.0077, 0.02, 1.0])
def test_the_longest_chunk_within_a_time(within_s: float) -> None:
    costs = ChunkCosts(TABLE)
    found = costs.most_tokens(within_s, 0, 1024, is_mixed=True)
    assert found == 0 or beside(costs, found) <= within_s
    assert found == 1024 or beside(costs, found + 1) > within_s


def test_a_table_is_measured_without_the_first_run_of_each_length() -> None:
    runs: list[int] = []

    def run(num_tokens: int) -> float:
        runs.append(num_tokens)
        return 0.3 if runs.count(num_tokens) == 1 and num_tokens == 16 else 1e-5 * num_tokens

    costs = ChunkCosts.measure(run, 1024)
    assert runs == [16] * 4 + [256] * 4 + [1024] * 4
    assert costs.seconds(16, 0, is_mixed=False) == pytest.approx(16e-5)
    runs.clear()
    ChunkCosts.measure(lambda size: runs.append(size) or 0.2, 8)
    assert set(runs) == {2}, "a slow machine measures one length"


def test_mixed_chunks_are_measured_at_the_lengths_that_rounds_are_prepared_for() -> None:
    costs = ChunkCosts({16: 0.0045, 256: 0.0075, 1024: 0.024})
    ran: list[int] = []

    def run(num_tokens: int) -> float:
        ran.append(num_tokens)
        return 1.0 if ran.count(num_tokens) == 1 else mixed[num_tokens]

    mixed = {64: 0.0006, 128: 0.001, 256: 0.0025}
    costs.learn_mixed(run, (64, 128, 256))
    assert set(ran) == set(mixed)
    for num_tokens, seconds in mixed.items():
        assert costs.seconds(num_tokens, 0, is_mixed=True) == pytest.approx(seconds)
    assert costs.seconds(256, 0, is_mixed=False) == 0.0075, "chunks with a forward of their own are another kind"
    assert costs.most_tokens(0.0026, 0, 256, is_mixed=True) == 256
    assert costs.most_tokens(0.0026, 0, 256, is_mixed=False) == 0

"""Seconds of chunks: a table, and corrections that follow what is measured."""

from __future__ import annotations

import pytest

from baton.engine.pace.chunk_costs import ChunkCosts
from baton.engine.pace.step_times import KEPT, MEMORY

TABLE = {16: 0.005, 256: 0.010, 1024: 0.025}


def observe(costs: ChunkCosts, num_tokens: int, seconds: float, *, depth: int = 0, times: int = KEPT) -> None:
    for _ in range(times):
        costs.observe(num_tokens, depth, seconds, is_joint=True)


def beside(costs: ChunkCosts, num_tokens: int, depth: int = 0) -> float:
    return costs.seconds(num_tokens, depth, is_joint=True)


def test_the_table_is_linear_between_its_points_and_goes_on_beyond_them() -> None:
    costs = ChunkCosts(TABLE)
    assert [costs.seconds(each, 0, is_joint=False) for each in TABLE] == pytest.approx(list(TABLE.values()))
    assert costs.seconds(136, 0, is_joint=False) == pytest.approx(0.0075)
    assert costs.seconds(1792, 0, is_joint=False) == pytest.approx(0.040)
    assert 0 < costs.seconds(1, 0, is_joint=False) <= 0.005
    assert beside(costs, 256) == pytest.approx(0.010), "a round is no faster than the chunk alone"


def test_a_table_of_one_length_counts_longer_chunks_by_their_tokens() -> None:
    costs = ChunkCosts({16: 0.004})
    assert beside(costs, 8) == 0.004 and beside(costs, 32) == 0.008


def test_the_least_of_the_last_measurements_counts() -> None:
    costs = ChunkCosts(TABLE)
    for seconds in (0.030, 0.012, 0.050):
        costs.observe(256, 0, seconds, is_joint=True)
    assert beside(costs, 256) == pytest.approx(0.012)
    assert costs.seconds(256, 0, is_joint=False) == pytest.approx(0.010), "alone it takes as long as before"


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
    assert beside(costs, 20, 8192) == pytest.approx(costs.seconds(20, 0, is_joint=False) + 0.008 / 16)


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
    found = costs.most_tokens(within_s, 0, 1024, is_joint=True)
    assert found == 0 or beside(costs, found) <= within_s
    assert found == 1024 or beside(costs, found + 1) > within_s


def test_a_table_is_measured_without_the_first_run_of_each_length() -> None:
    runs: list[int] = []

    def run(num_tokens: int) -> float:
        runs.append(num_tokens)
        return 0.3 if runs.count(num_tokens) == 1 and num_tokens == 16 else 1e-5 * num_tokens

    costs = ChunkCosts.measure(run, 1024)
    assert runs == [16] * 4 + [256] * 4 + [1024] * 4
    assert costs.seconds(16, 0, is_joint=False) == pytest.approx(16e-5)
    runs.clear()
    ChunkCosts.measure(lambda size: runs.append(size) or 0.2, 8)
    assert set(runs) == {2}, "a slow machine measures one length"


def test_joint_chunks_are_measured_at_the_lengths_that_rounds_are_prepared_for() -> None:
    costs = ChunkCosts({16: 0.0045, 256: 0.0075, 1024: 0.024})
    ran: list[int] = []

    def run(num_tokens: int) -> float:
        ran.append(num_tokens)
        return 1.0 if ran.count(num_tokens) == 1 else joint[num_tokens]

    joint = {64: 0.0006, 128: 0.001, 256: 0.0025}
    costs.learn_joint(run, (64, 128, 256))
    assert set(ran) == set(joint)
    for num_tokens, seconds in joint.items():
        assert costs.seconds(num_tokens, 0, is_joint=True) == pytest.approx(seconds)
    assert costs.seconds(256, 0, is_joint=False) == 0.0075, "chunks with a forward of their own are another kind"
    assert costs.most_tokens(0.0026, 0, 256, is_joint=True) == 256
    assert costs.most_tokens(0.0026, 0, 256, is_joint=False) == 0

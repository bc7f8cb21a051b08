"""Costs fitted to measured times."""

from __future__ import annotations

import msgspec
import pytest
from simulated import TIMES

from baton.deploy.simulation.costs import ChunkPart, Costs
from baton.deploy.simulation.times import ChunkPoint, HandoffPoint, MixedPoint, RoundPoint, find, read


def test_measured_points_come_back_from_the_fit() -> None:
    times = read(find("llama-3.1-8b-h200"))
    costs = Costs(times, 256)
    for point in times.rounds:
        assert costs.round_s(point.batch, point.batch * point.context) * 1e3 == pytest.approx(point.ms, rel=1e-6)
    for point in times.chunks:
        pieces = [ChunkPart(point.tokens // point.prompts, point.history)] * point.prompts
        assert costs.chunk_s(pieces) * 1e3 == pytest.approx(point.ms, rel=0.05 if point.history else 1e-6)
    for point in times.handoffs:
        assert costs.handoff_s(point.tokens) * 1e3 == pytest.approx(point.ms)


def test_rounds_grow_with_their_bucket_and_with_the_context() -> None:
    points = (RoundPoint(1, 100, 10.1), RoundPoint(64, 100, 79.4), RoundPoint(1, 1100, 11.1))  # base 9 + batch
    costs = Costs(msgspec.structs.replace(TIMES, rounds=points), 48)
    assert costs.round_s(3, 0) == costs.round_s(4, 0) == pytest.approx(13e-3)
    assert costs.round_s(5, 0) == pytest.approx(17e-3)  # its graph holds 8 sequences
    assert costs.round_s(40, 0) == pytest.approx(57e-3)  # and this one max_running
    assert costs.round_s(4, 5000) == pytest.approx(18e-3)


def test_prompts_that_share_a_chunk_do_not_attend_to_each_other() -> None:
    points = (ChunkPoint(10, 1.0), ChunkPoint(1000, 110.0), ChunkPoint(1000, 105.0, prompts=2))
    points += (ChunkPoint(1000, 140.0, history=2000),)
    costs = Costs(msgspec.structs.replace(TIMES, chunks=points), 64)
    alone = costs.chunk_s([ChunkPart(1000, 0)])
    assert alone == pytest.approx(0.110)
    assert costs.chunk_s([ChunkPart(500, 0), ChunkPart(500, 0)]) == pytest.approx(0.105)
    assert costs.chunk_s([ChunkPart(250, 0)] * 4) == pytest.approx(0.1025)
    assert costs.chunk_s([ChunkPart(1000, 4000)]) - alone == pytest.approx(0.060)


def test_a_smaller_chunk_than_the_smallest_measured_one_takes_as_long() -> None:
    costs = Costs(TIMES, 64)
    assert costs.chunk_s([ChunkPart(1, 0)]) == costs.chunk_s([ChunkPart(10, 0)])
    assert costs.chunk_s([ChunkPart(20_000, 0)]) == pytest.approx(2.0)


def test_a_chunk_beside_a_round_is_joined_with_it_where_that_was_measured_and_is_faster() -> None:
    joints = (MixedPoint(8, 64, 2.0), MixedPoint(4, 64, 1.5), MixedPoint(8, 256, 15.0))
    costs = Costs(msgspec.structs.replace(TIMES, joints=joints), 64)
    assert costs.beside_s([ChunkPart(64, 0)], 8) == pytest.approx(2e-3)  # alone 6.4
    assert costs.beside_s([ChunkPart(64, 0)], 4) == pytest.approx(1.5e-3)
    assert costs.beside_s([ChunkPart(128, 0)], 3) == costs.beside_s([ChunkPart(128, 0)], 8)  # 4 have no graph of 128
    assert costs.beside_s([ChunkPart(128, 0)], 8) == pytest.approx((2 + 13 / 3) * 1e-3)
    assert costs.beside_s([ChunkPart(16, 0)], 8) == pytest.approx(1.6e-3)  # alone is faster
    assert costs.beside_s([ChunkPart(64, 0)], 0) == pytest.approx(6.4e-3)  # there is no round
    assert costs.beside_s([ChunkPart(64, 0)], 9) == pytest.approx(6.4e-3)  # no graph holds so large a batch
    assert costs.beside_s([ChunkPart(300, 0)], 8) == pytest.approx(30e-3)  # no graph holds as many


def test_handoffs_are_linear_between_measured_sizes() -> None:
    costs = Costs(msgspec.structs.replace(TIMES, handoffs=(HandoffPoint(64, 2.0), HandoffPoint(128, 4.0))), 1)
    assert [costs.handoff_s(num_tokens) for num_tokens in (1, 96, 256)] == pytest.approx([2e-3, 3e-3, 8e-3])

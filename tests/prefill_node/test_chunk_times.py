"""The times of chunks that a prefill node reports."""

from __future__ import annotations

import pytest

from baton.prefill_node.chunk_times import ChunkSeconds


def test_nothing_is_known_before_the_first_chunk() -> None:
    assert (ChunkSeconds().token_s, ChunkSeconds().fixed_s) == (0.0, 0.0)


def test_long_chunks_tell_the_time_per_token_and_short_ones_the_rest() -> None:
    rate = ChunkSeconds()
    rate.observe(16, 0.006)
    assert rate.token_s == pytest.approx(0.006 / 16) and rate.fixed_s == 0.0
    for seconds in (0.5, 0.082, 0.1):
        rate.observe(4000, seconds)
    assert rate.token_s == pytest.approx(0.082 / 4000)
    for _ in range(3):
        rate.observe(17, 0.006)
    assert rate.fixed_s == pytest.approx(0.006 - 17 * 0.082 / 4000)
    for _ in range(3):
        rate.observe(4000, 0.2)
    assert rate.token_s == pytest.approx(0.2 / 4000), "old measurements are forgotten"

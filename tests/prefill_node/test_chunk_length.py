"""The length of chunks: tails of long prompts, and the most tokens of a chunk that several prompts share."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from baton.prefill_node.chunk_length import (
    LEAST_TAIL,
    ChunkLength,
    ChunkSeconds,
    measured_sharing_limit,
    num_before_tail,
)

CHUNK = 8192


@pytest.mark.parametrize(
    ("num_left", "before"),
    [(1, None), (4095, None), (4096, 3072), (4607, 3072), (4608, 4096), (8192, 7168), (8193, None)],
)
def test_long_prompts_that_fit_in_a_chunk_are_divided(num_left: int, before: int | None) -> None:
    assert num_before_tail(num_left, CHUNK) == before
    assert before is None or LEAST_TAIL <= num_left - before < LEAST_TAIL + 1024


def test_a_tail_follows_what_is_before_it_and_nothing_else() -> None:
    tails = ChunkLength[str](CHUNK, has_tails=True)
    assert tails.budget("a", 8192, is_alone=True) == 7168
    assert tails.budget("a", 1024, is_alone=False) == 1024, "others wait, but not in this chunk"
    assert tails.budget("b", 8192, is_alone=False) == CHUNK
    assert tails.budget("c", 8192, is_alone=True) == 7168
    assert tails.budget("d", 8192, is_alone=True) == 7168, "c is gone"
    assert tails.budget("d", 8192, is_alone=True) == CHUNK, "the chunk before the tail failed, so all is left"
    assert tails.budget("e", 20000, is_alone=True) == CHUNK
    assert tails.budget("e", 3616, is_alone=True) == CHUNK


def measured(base: float) -> Callable[[int], float]:
    """Return seconds of a chunk that takes `base` tokens' time besides that of its tokens."""
    return lambda num_tokens: (base + num_tokens) / 1e4


@pytest.mark.parametrize(("base", "limit"), [(0, 512), (20, 512), (50, 1024), (100, 2048), (200, 4096), (1e6, None)])
def test_prompts_share_until_twice_as_many_tokens_gain_little(base: float, limit: int | None) -> None:
    """A chunk of twice n tokens computes tokens faster by (base + n) / (base / 2 + n)."""
    assert measured_sharing_limit(measured(base), 8192) == limit


@pytest.mark.parametrize("longest", [1, 511, 512])
def test_short_chunks_are_shared_whole_and_not_measured(longest: int) -> None:
    def never(num_tokens: int) -> float:
        raise AssertionError(num_tokens)

    assert measured_sharing_limit(never, longest) is None


def test_the_longest_chunk_need_not_be_a_power_of_two() -> None:
    asked = list[int]()

    def chunk_s(num_tokens: int) -> float:
        asked.append(num_tokens)
        return 1.0

    assert measured_sharing_limit(chunk_s, 3000) is None
    assert sorted(set(asked)) == [512, 1024, 2048, 3000]


def test_the_first_run_and_a_disturbance_do_not_count() -> None:
    """A compilation makes the first run of each size long, and another process the second one."""
    delays = itertools.cycle([5.0, 0.3, 0.0])
    assert measured_sharing_limit(lambda num_tokens: next(delays) + measured(50)(num_tokens), 8192) == 1024


@pytest.mark.parametrize(("slow", "asked"), [(512, [512] * 2), (2048, [512] * 3 + [1024] * 3 + [2048] * 2)])
def test_a_slow_device_is_not_measured_further(slow: int, asked: list[int]) -> None:
    """A CPU with a large model would take minutes."""
    seen = list[int]()

    def chunk_s(num_tokens: int) -> float:
        seen.append(num_tokens)
        return 60.0 if num_tokens >= slow else 0.1

    assert measured_sharing_limit(chunk_s, 8192) is None
    assert seen == asked


def test_no_limit_holds_for_every_chunk() -> None:
    length = ChunkLength[str](CHUNK, has_tails=False)
    assert length.may_share(9999)
    length.sharing_limit = 512
    assert length.may_share(512) and not length.may_share(513)


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

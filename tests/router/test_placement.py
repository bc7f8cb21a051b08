"""The policy alone: figures in, a choice out."""

from __future__ import annotations

from baton.router.placement import (
    DecodeFigures,
    PrefillFigures,
    choose_decode,
    choose_prefill,
)


def decode(free: int = 100, running: int = 0, most: int = 10, *, is_full: bool = False) -> DecodeFigures:
    return DecodeFigures(free, running, most, is_full)


def test_decode_takes_the_least_loaded_with_room() -> None:
    assert choose_decode([decode(running=3), decode(running=1), decode(running=2)], 5) == 1
    assert choose_decode([decode(running=3), decode(running=1, free=4)], 5) == 0
    assert choose_decode([decode(running=3), decode(is_full=True)], 5) == 0
    assert choose_decode([decode(running=10), decode(running=9)], 5) == 1
    assert choose_decode([decode(running=5, most=100), decode(running=1, most=2)], 5) == 0
    assert choose_decode([decode(free=50), decode(free=60)], 5) == 1


def test_decode_none_when_all_are_full() -> None:
    assert choose_decode([], 1) is None
    assert choose_decode([decode(free=4), decode(is_full=True), decode(running=10)], 5) is None


def test_prefill_trades_affinity_against_load() -> None:
    cached = PrefillFigures(queued_tokens=500, num_queued=1, max_queued=8, cached_tokens=900)
    idle = PrefillFigures(queued_tokens=0, num_queued=0, max_queued=8, cached_tokens=0)
    assert choose_prefill([idle, cached], 1000) == 1
    assert choose_prefill([idle, cached._replace(queued_tokens=1000)], 1000) == 0
    assert choose_prefill([idle._replace(num_queued=1), idle], 10) == 1
    assert choose_prefill([idle._replace(num_queued=8)], 10) is None

"""The policy alone: figures in, a choice out."""

from __future__ import annotations

from baton.router.placement import (
    DecodeFigures,
    PrefillFigures,
    PrefixAffinity,
    choose_decode,
    choose_prefill,
    page_hashes,
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


def test_page_hashes() -> None:
    ids = list(range(40))
    assert len(page_hashes(ids, 16, "")) == 2
    assert len(page_hashes(ids[:32], 16, "")) == 1  # the page of the last token is always computed
    assert page_hashes(ids[:16], 16, "") == []
    assert page_hashes(ids, 16, "")[0] == page_hashes([*ids[:20], *ids[:20]], 16, "")[0]
    assert page_hashes(ids, 16, "")[1] != page_hashes([*ids[:20], *ids[:20]], 16, "")[1]
    assert set(page_hashes(ids, 16, "a")).isdisjoint(page_hashes(ids, 16, "b"))
    changed = page_hashes([9, *ids[1:]], 16, "")
    assert set(changed).isdisjoint(page_hashes(ids, 16, "")), "a page depends on all tokens before it"


def test_affinity_is_bounded_and_forgets_ends_first() -> None:
    affinity = PrefixAffinity(max_pages=4)
    affinity.note("a", [1, 2, 3])
    assert affinity.num_matched("a", [1, 2, 3, 4]) == 3
    assert affinity.num_matched("a", [1, 9, 3]) == 1
    assert affinity.num_matched("b", [1, 2, 3]) == 0
    affinity.note("a", [7, 8])
    assert affinity.num_matched("a", [7, 8]) == 2
    assert affinity.num_matched("a", [1, 2, 3]) == 2
    affinity.forget("a")
    assert affinity.num_matched("a", [7, 8]) == 0

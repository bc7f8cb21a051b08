"""Suffixes of finished requests against a plain search."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.drafters import suffixes
from baton.engine.drafters.suffixes import LENGTHS, MAX_MATCH, MAX_OCCURRENCES, MIN_MATCH, OwnSuffixes, SharedSuffixes

FEW_TOKENS = st.sampled_from([0, 1, 2])
ODD_TOKENS = st.sampled_from([0, 1, 256, 65536, 65537])  # each other's bytes, shifted
SALTS = ("", "a", "b")


class PlainSuffixes:
    """The same by looking everywhere."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.texts: list[tuple[str, list[int]]] = []

    def add(self, ids: list[int], salt: str) -> None:
        ids = ids[-self.max_tokens :]
        if len(ids) <= MIN_MATCH:
            return
        self.texts.append((salt, ids))
        while sum(len(held) for _, held in self.texts) > self.max_tokens:
            self.texts.pop(0)

    def places(self, suffix: list[int], salt: str) -> Iterator[tuple[list[int], int]]:
        """Latest first."""
        for text_salt, ids in reversed(self.texts):
            for place in range(len(ids) - 1, len(suffix) - 1, -1):
                if text_salt == salt and ids[place - len(suffix) : place] == suffix:
                    yield ids, place

    def lookup(self, ids: list[int], salt: str, num_steps: int, min_match: int) -> list[int] | None:
        indexed = [n for n in LENGTHS if n <= len(ids) and any(self.places(ids[-n:], salt))]
        if not indexed:
            return None
        latest = list(self.places(ids[-indexed[-1] :], salt))[:MAX_OCCURRENCES]
        lengths = [common_suffix(held[:place], ids) for held, place in latest]
        if max(lengths) < min_match:
            return None
        following = [
            held[place:] for (held, place), length in zip(latest, lengths, strict=True) if length == max(lengths)
        ]
        proposal: list[int] = []
        for step in range(num_steps):
            agreeing = [tokens for tokens in following if tokens[:step] == proposal and len(tokens) > step]
            tokens = [tokens[step] for tokens in agreeing]
            if not tokens:
                break
            proposal.append(min(tokens, key=lambda token: (-tokens.count(token), tokens.index(token))))
        return proposal


def common_suffix(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other), MAX_MATCH) and one[-length - 1] == other[-length - 1]:
        length += 1
    return length


@pytest.mark.parametrize("tokens", [FEW_TOKENS, ODD_TOKENS])
@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(data=st.data(), max_tokens=st.integers(1, suffixes.MAX_HOPS))
def test_equals_a_plain_search(tokens: st.SearchStrategy[int], data: st.DataObject, max_tokens: int) -> None:
    shared, plain = SharedSuffixes(max_tokens), PlainSuffixes(max_tokens)
    texts, salts = st.lists(tokens, max_size=24), st.sampled_from(SALTS)
    for ids, salt in data.draw(st.lists(st.tuples(texts, salts), max_size=8)):
        shared.add(ids, salt)
        plain.add(ids, salt)
        assert shared.num_tokens == sum(len(held) for _, held in plain.texts) <= max_tokens
    for ids, salt in data.draw(st.lists(st.tuples(texts, salts), min_size=1, max_size=4)):
        num_steps, min_match = data.draw(st.integers(0, 6)), data.draw(st.integers(MIN_MATCH, 8))
        assert shared.lookup(ids, salt, num_steps, min_match) == plain.lookup(ids, salt, num_steps, min_match)


@pytest.mark.parametrize("seed", range(6))
def test_long_texts_equal_a_plain_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "MAX_HOPS", 10_000)
    rng = random.Random(seed)
    phrases = [rng.choices(range(50_000), k=rng.randint(1, 20)) for _ in range(8)]
    shared, plain = SharedSuffixes(700), PlainSuffixes(700)
    num_found = 0
    for _ in range(60):
        ids = [token for _ in range(rng.randint(1, 14)) for token in rng.choice(phrases)]
        salt = rng.choice(SALTS)
        found = shared.lookup(ids, salt, 5, MIN_MATCH)
        assert found == plain.lookup(ids, salt, 5, MIN_MATCH)
        num_found += found is not None
        shared.add(ids, salt)
        plain.add(ids, salt)
    assert num_found > 20


def test_the_longest_match_wins_then_the_most_frequent_then_the_latest() -> None:
    shared = SharedSuffixes(1000)
    for follower in (10, 11, 11, 12):
        shared.add([1, 2, 3, 4, follower, 90 + follower])
    assert shared.lookup([7, 1, 2, 3, 4], num_steps=3) == [11, 101]
    shared.add([1, 2, 3, 4, 12, 13])
    assert shared.lookup([1, 2, 3, 4], num_steps=3) == [12, 13]
    shared.add([7, 1, 2, 3, 4, 14])
    for _ in range(3):
        shared.add([8, 1, 2, 3, 4, 15])
    assert shared.lookup([7, 1, 2, 3, 4], num_steps=3) == [14]
    assert shared.lookup([7, 1, 2, 3, 4], num_steps=3, min_match=5) == [14]
    assert shared.lookup([7, 1, 2, 3, 4], num_steps=3, min_match=6) is None
    assert shared.lookup([7, 7, 2, 3], num_steps=3) is None and shared.lookup([], num_steps=3) is None


def test_only_the_latest_occurrences_vote() -> None:
    shared = SharedSuffixes(1000)
    half = MAX_OCCURRENCES // 2
    for follower in [4] * (half + 1) + [5] * half:  # the oldest would make a majority
        shared.add([1, 2, 3, follower])
    assert shared.lookup([1, 2, 3], num_steps=1) == [5]


def test_salts_share_nothing() -> None:
    shared = SharedSuffixes(1000)
    shared.add([1, 2, 3, 4, 5], "a")
    assert shared.lookup([1, 2, 3], "b", 2) is None and shared.lookup([1, 2, 3], "", 2) is None
    assert shared.lookup([1, 2, 3], "a", 2) == [4, 5]


def test_salts_share_nothing_where_all_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "crc32", lambda data: 0)
    test_salts_share_nothing()


def test_the_oldest_leave_first() -> None:
    shared = SharedSuffixes(12)
    for first in (10, 20, 30):
        shared.add(range(first, first + 5))
    assert shared.num_tokens == 10
    assert shared.lookup([10, 11, 12], num_steps=1) is None
    assert shared.lookup([20, 21, 22], num_steps=1) == [23]
    shared.add(range(100, 130))
    assert shared.num_tokens == 12 and shared.lookup([30, 31, 32], num_steps=1) is None
    assert shared.lookup([118, 119, 120], num_steps=1) == [121]
    assert shared.lookup([115, 116, 117], num_steps=1) is None


def test_a_walk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MAX_HOPS` places of another salt in one bucket hide what lies before them; one fewer do not."""
    monkeypatch.setattr(suffixes, "crc32", lambda data: 0)
    shared = SharedSuffixes(2000)
    shared.add([1, 2, 3, 4], "a")
    for _ in range(suffixes.MAX_HOPS - 1):
        shared.add([1, 2, 3, 5], "b")
    assert shared.lookup([1, 2, 3], "a", 1) == [4]
    shared.add([1, 2, 3, 5], "b")
    assert shared.lookup([1, 2, 3], "a", 1) is None and shared.lookup([1, 2, 3], "b", 1) == [5]


def plain_own_lookup(ids: list[int], num_steps: int, min_match: int, max_match: int) -> list[int] | None:
    for length in range(min(max_match, len(ids) - 1), min_match - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if ids[place - length : place] == ids[-length:]:
                return ids[place : place + num_steps]
    return None


@pytest.mark.parametrize("tokens", [FEW_TOKENS, ODD_TOKENS, st.integers(0, 300)])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), num_steps=st.integers(0, 6), min_match=st.integers(1, 3), max_match=st.integers(1, 6))
def test_own_text_equals_a_plain_search(
    tokens: st.SearchStrategy[int], data: st.DataObject, num_steps: int, min_match: int, max_match: int
) -> None:
    ids = data.draw(st.lists(tokens, max_size=20))
    own = OwnSuffixes(ids)
    for new in [[], *data.draw(st.lists(st.lists(tokens, max_size=5), max_size=4))]:
        own.extend(new)
        ids = ids + new
        assert own.lookup(num_steps, min_match, max_match) == plain_own_lookup(ids, num_steps, min_match, max_match)

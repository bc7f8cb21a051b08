"""Tokens that followed the last tokens of a request before: in finished requests by hash chains, in its own by search.

`SharedSuffixes` is prompt lookup (Saxena 2023) over the texts of other requests. For each length in `LENGTHS`
there is a table of buckets, as in LZ77 compressors (RFC 1951, section 4): a bucket holds the latest place whose
preceding tokens hash into it, and each place the one before it in its bucket. Places are checked against the text, so
a collision costs time only.

    suffixes = SharedSuffixes(max_tokens=1_000_000)
    suffixes.add(prompt + output, salt)                   # once, when a request finishes
    suffixes.lookup(token_ids, salt, num_steps=4)         # None, or up to 4 tokens

Arrays of ints rather than dicts of k-grams: adding is a few numpy calls a length, no table grows in the middle of a
step, and a token held takes about 65 bytes. Three lengths and eight votes lose little against all lengths and many
votes, and every one costs a lookup cache misses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from zlib import crc32

import numpy as np

LENGTHS = (3, 6, 12)  # of the indexed suffixes, in tokens, ascending
MIN_MATCH, MAX_MATCH = LENGTHS[0], 16
MAX_OCCURRENCES = 8  # the latest ones vote
MAX_HOPS = 32  # along one chain, collisions included

_PLACE_BITS = 24  # an entry is text number << 24 | place; numbers start at 1, so entry 0 names no text
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_MULTIPLIER = 0x9E3779B1  # odd, about 2^32 / golden ratio: its products spread into the high bits (Knuth, vol. 3, 6.4)
_COEFFICIENTS = tuple(pow(_MULTIPLIER, distance, 1 << 32) for distance in range(1, LENGTHS[-1] + 1))
_HASH_MASK = (1 << 32) - 1
_WIDTH = array("i").itemsize


@dataclass(slots=True, eq=False)
class _Text:
    """One finished request. A place is the index of a token that followed something."""

    salt: str
    token_ids: array[int]
    data: bytes  # of token_ids
    previous: array[int]  # [len(LENGTHS) * num_tokens] int64: of each place, the entry before it in its bucket


class SharedSuffixes:
    """Owns the texts of the latest finished requests, `max_tokens` in all, and the index over them.

    Deterministic: proposals depend on the calls so far alone. A text never proposes to another salt.
    """

    def __init__(self, max_tokens: int) -> None:
        assert 0 < max_tokens <= _PLACE_MASK, max_tokens
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._texts: dict[int, _Text] = {}  # by number, oldest first
        self._num_added = 0
        self._bucket_bits = max(1, (max_tokens - 1).bit_length())
        self._heads = array("q", bytes(8 * len(LENGTHS) << self._bucket_bits))  # [len(LENGTHS) * num_buckets] entries

    def add(self, token_ids: Sequence[int], salt: str = "") -> None:
        """Keep a finished request's prompt and output (their last `max_tokens`); the oldest leave to make room."""
        ids = array("i", token_ids[-self.max_tokens :])
        if len(ids) <= MIN_MATCH:
            return  # nothing follows anything that could match
        self.num_tokens += len(ids)
        while self.num_tokens > self.max_tokens:
            oldest = self._texts.pop(self._num_added - len(self._texts) + 1)
            self.num_tokens -= len(oldest.token_ids)
        self._num_added += 1
        previous = self._link(np.frombuffer(ids, np.int32), salt)
        self._texts[self._num_added] = _Text(salt, ids, ids.tobytes(), previous)

    def lookup(
        self, token_ids: Sequence[int], salt: str = "", num_steps: int = 1, min_match: int = MIN_MATCH
    ) -> list[int] | None:
        """Up to `num_steps` tokens that followed the last tokens of `token_ids` in texts of `salt`.

        The longest indexed suffix that occurs is taken, and of its latest `MAX_OCCURRENCES` those that match furthest
        back, up to `MAX_MATCH` tokens. They vote token by token; of equals the latest wins. None where fewer than
        `min_match` tokens match.
        """
        assert min_match >= MIN_MATCH, min_match
        recent = array("i", token_ids[: -MAX_MATCH - 1 : -1])  # the last token first
        data = array("i", reversed(recent)).tobytes()
        hashed, chain, at_least = crc32(salt.encode()), None, 0
        for level, length in enumerate(LENGTHS):  # most have no match: the shortest first
            if length > len(recent):
                break
            hashed += sum(map(mul, recent[at_least:length], _COEFFICIENTS[at_least:length]))
            bucket = (level << self._bucket_bits) + ((hashed & _HASH_MASK) >> 32 - self._bucket_bits)
            longer = (level, bucket, data[-length * _WIDTH :], salt)
            if not self._occurrences(*longer, limit=1):
                break
            chain, at_least = longer, length
        if chain is None:
            return None
        matched, found = _longest(self._occurrences(*chain, limit=MAX_OCCURRENCES), recent, at_least)
        return _vote(found, num_steps) if matched >= min_match else None

    def _link(self, ids: np.ndarray, salt: str) -> array[int]:
        """Enter the places of a text ([num_tokens] int32) as the latest of their buckets; returns `_Text.previous`."""
        num_tokens, shift = len(ids), np.uint32(32 - self._bucket_bits)
        tokens = ids.view(np.uint32)
        hashed = np.full(num_tokens, crc32(salt.encode()), np.uint32)  # [places from `length` on]
        previous = array("q", bytes(8 * len(LENGTHS) * num_tokens))
        by_level = np.frombuffer(previous, np.int64).reshape(len(LENGTHS), num_tokens)
        for length in range(1, min(LENGTHS[-1], num_tokens - 1) + 1):
            hashed = hashed[1:] + tokens[: num_tokens - length] * np.uint32(_COEFFICIENTS[length - 1])
            if length in LENGTHS:
                level = LENGTHS.index(length)
                self._chain((hashed >> shift) + np.int64(level << self._bucket_bits), by_level[level], length)
        return previous

    def _chain(self, buckets: np.ndarray, previous: np.ndarray, start: int) -> None:
        """Place start + i comes after all others in buckets[i] ([num_places] int64); `previous` is written."""
        ordered = np.sort(buckets << _PLACE_BITS | np.arange(start, start + len(buckets)))  # by bucket, then by place
        buckets, places = ordered >> _PLACE_BITS, ordered & _PLACE_MASK
        entries = places | self._num_added << _PLACE_BITS
        edges = np.flatnonzero(buckets[1:] != buckets[:-1])
        first, last = np.append(0, edges + 1), np.append(edges, len(buckets) - 1)  # of each bucket
        before = np.empty_like(entries)
        before[1:] = entries[:-1]
        heads = np.frombuffer(self._heads, np.int64)
        before[first] = heads[buckets[first]]
        previous[places] = before
        heads[buckets[last]] = entries[last]

    def _occurrences(
        self, level: int, bucket: int, suffix: bytes, salt: str, limit: int
    ) -> list[tuple[array[int], int]]:
        """The latest `limit` (text, place)s at which `suffix`, of LENGTHS[level] tokens, just ended; latest first."""
        found: list[tuple[array[int], int]] = []
        texts, length = self._texts, LENGTHS[level]
        entry = self._heads[bucket]
        for _ in range(MAX_HOPS):
            text = texts.get(entry >> _PLACE_BITS)
            if text is None:  # it left, and so did all before it
                break
            place = entry & _PLACE_MASK
            if text.data.startswith(suffix, (place - length) * _WIDTH) and text.salt == salt:
                found.append((text.token_ids, place))
                if len(found) == limit:
                    break
            entry = text.previous[level * len(text.token_ids) + place]
        return found


class OwnSuffixes:
    """Owns a copy of one sequence's tokens, extended as they come, so that no lookup converts the whole text."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids = array("i")
        self._data = bytearray()  # of _ids
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        new = array("i", token_ids)
        self._ids.extend(new)
        self._data += new.tobytes()

    def lookup(self, num_steps: int, min_match: int = 1, max_match: int = 4) -> list[int] | None:
        """Up to `num_steps` tokens after the latest earlier occurrence of the longest suffix that has one.

        Suffixes are of `min_match` to `max_match` tokens; None where not even the shortest occurs. An occurrence of a
        longer one ends where a shorter one does, so each search ends where the last one found something.
        """
        assert min_match >= 1, min_match
        place, end = None, len(self._ids) - 1
        for length in range(min_match, max_match + 1):
            found = self._ending(length, end)
            if found is None:
                break
            place = end = found
        return None if place is None else self._ids[place : place + num_steps].tolist()

    def _ending(self, length: int, end: int) -> int | None:
        """The last place, `end` at most, before which the last `length` tokens stand."""
        if length > end:
            return None
        data, suffix = self._data, bytes(self._data[-length * _WIDTH :])
        at = data.rfind(suffix, 0, end * _WIDTH)
        while at >= 0 and at % _WIDTH:  # the bytes of neighbours are no token
            at = data.rfind(suffix, 0, at + len(suffix) - 1)
        return at // _WIDTH + length if at >= 0 else None


def _longest(
    found: list[tuple[array[int], int]], recent: array[int], matched: int
) -> tuple[int, list[tuple[array[int], int]]]:
    """Return the members of `found` that match most tokens, and how many tokens that is. All of `found` match `matched`
    tokens of `recent`."""
    for token in recent[matched:]:
        longer = [(ids, at) for ids, at in found if matched < at and ids[at - matched - 1] == token]
        if not longer:
            break
        matched, found = matched + 1, longer
    return matched, found


def _vote(found: list[tuple[array[int], int]], num_steps: int) -> list[int]:
    """Return the tokens that followed most often, each token among the occurrences that agree so far."""
    following = [ids[place : place + num_steps] for ids, place in found]
    for step in range(num_steps):
        if following.count(following[0]) == len(following):
            break
        counts: dict[int, int] = {}
        for tokens in following:
            for token in tokens[step : step + 1]:
                counts[token] = counts.get(token, 0) + 1
        winner = max(counts, key=counts.__getitem__)  # the first of equals, and the latest text came first
        following = [tokens for tokens in following if step < len(tokens) and tokens[step] == winner]
    return following[0].tolist()

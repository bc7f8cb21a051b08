"""Which nodes a request goes to. Pure policy: figures in, a choice out.

Decode: the least loaded node that has room. Prefill: the node that would be through first, where pages that it has
likely cached (it saw a prompt that began alike, under the same salt) need not be computed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import xxhash

MAX_HASHED_PAGES = 2048  # of one prompt
MAX_KNOWN_PAGES = 32768  # remembered for one prefill node


class DecodeFigures(NamedTuple):
    """A decode node as the policy sees it."""

    free_pages: int  # less those pledged to requests that are on their way
    num_running: int  # with those on their way
    max_running: int
    is_full: bool  # it refused, and has shown no more room since


class PrefillFigures(NamedTuple):
    """A prefill node as the policy sees it."""

    queued_tokens: int  # prompt tokens still to compute
    num_queued: int
    max_queued: int
    cached_tokens: int  # of this prompt, likely in its prefix cache


def choose_decode(figures: Sequence[DecodeFigures], num_pages: int) -> int | None:
    """The place of the least loaded node with room for `num_pages`; None when all are full."""
    places = [
        place
        for place, node in enumerate(figures)
        if not node.is_full and node.free_pages >= num_pages and node.num_running < node.max_running
    ]
    return min(
        places,
        key=lambda place: (figures[place].num_running / figures[place].max_running, -figures[place].free_pages),
        default=None,
    )


def choose_prefill(figures: Sequence[PrefillFigures], prompt_len: int) -> int | None:
    """The place of the node with the fewest tokens to compute before this prompt is done; None when all are full."""
    places = [place for place, node in enumerate(figures) if node.num_queued < node.max_queued]
    return min(
        places,
        key=lambda place: (
            figures[place].queued_tokens + prompt_len - figures[place].cached_tokens,
            figures[place].num_queued,
        ),
        default=None,
    )


def page_hashes(prompt_ids: Sequence[int], page_size: int, salt: str) -> list[int]:
    """One hash for each whole leading page, over all tokens up to its end and the salt. The page of the last token is
    left out: it is always computed."""
    num_pages = min((len(prompt_ids) - 1) // page_size, MAX_HASHED_PAGES)
    data = array("i", prompt_ids[: num_pages * page_size]).tobytes()
    width = 4 * page_size
    seed = xxhash.xxh3_64_intdigest(salt.encode())
    hashes: list[int] = []
    for page in range(num_pages):
        seed = xxhash.xxh3_64_intdigest(data[page * width : (page + 1) * width], seed=seed)
        hashes.append(seed)
    return hashes


class PrefixAffinity:
    """Which prefill node saw which leading pages, bounded, least recently used forgotten first."""

    def __init__(self, max_pages: int = MAX_KNOWN_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[Hashable, OrderedDict[int, None]] = {}

    def num_matched(self, node: Hashable, hashes: Iterable[int]) -> int:
        """Leading pages of a prompt that the node saw."""
        known = self._known.get(node)
        num_pages = 0
        for page in hashes if known else ():
            if known is None or page not in known:
                break
            num_pages += 1
        return num_pages

    def note(self, node: Hashable, hashes: Sequence[int]) -> None:
        """The node gets a prompt with these pages."""
        known = self._known.setdefault(node, OrderedDict())
        for page in reversed(hashes):  # the first page is the last to be forgotten
            known[page] = None
            known.move_to_end(page)
        while len(known) > self._max_pages:
            known.popitem(last=False)

    def forget(self, node: Hashable) -> None:
        """The node is gone, or its cache was emptied."""
        self._known.pop(node, None)

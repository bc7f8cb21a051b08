"""Affinity: PrefixAffinity estimates which leading pages of a prompt each node has in its prefix cache. SessionAffinity
knows which nodes served a client's session last."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import xxhash

MAX_HASHED_PAGES = 2048  # of one prompt
MAX_KNOWN_PAGES = 32768  # remembered per node
MAX_SESSIONS = 32768  # remembered per role


class PrefixAffinity:
    """Leading pages that each node was given. Bounded; the least recently used pages are forgotten first."""

    def __init__(self, max_pages: int = MAX_KNOWN_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[Hashable, OrderedDict[int, None]] = {}

    def num_matched(self, node: Hashable, hashes: Iterable[int]) -> int:
        """Return how many leading pages of a prompt the node was given before."""
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


class SessionAffinity:
    """The node of one role that served each session last. Bounded; the sessions that are idle longest are forgotten."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._nodes: OrderedDict[bytes, Hashable] = OrderedDict()

    def node_of(self, session: bytes | None) -> Hashable:
        """Return the node that served the session last, None if there is none."""
        return None if session is None else self._nodes.get(session)

    def note(self, session: bytes | None, node: Hashable) -> None:
        """The node serves the session now."""
        if session is None:
            return
        self._nodes[session] = node
        self._nodes.move_to_end(session)
        if len(self._nodes) > self._max_sessions:
            self._nodes.popitem(last=False)


def page_hashes(prompt_ids: Sequence[int], page_size: int, cache_salt: str) -> list[int]:
    """Return one hash per whole leading page, over the salt and all tokens up to the page's end. The page of the last
    token is left out, because a node always computes it."""
    num_pages = min((len(prompt_ids) - 1) // page_size, MAX_HASHED_PAGES)
    data = array("i", prompt_ids[: num_pages * page_size]).tobytes()
    width = 4 * page_size
    seed = xxhash.xxh3_64_intdigest(cache_salt.encode())
    hashes: list[int] = []
    for page in range(num_pages):
        seed = xxhash.xxh3_64_intdigest(data[page * width : (page + 1) * width], seed=seed)
        hashes.append(seed)
    return hashes

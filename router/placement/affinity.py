"""Affinity: ExpectedPages remembers which leading pages of prompts each node was given a little while ago.
SessionAffinity knows which nodes served a client's session last.

A node tells its cached pages (nodes/told_pages.py) a little after it was given their prompt. In between the router
expects them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import islice

MAX_NOTED_PAGES = 2048  # of one prompt
MAX_KNOWN_PAGES = 32768  # remembered per node
MAX_SESSIONS = 32768  # remembered per role


class ExpectedPages:
    """Leading pages that each node was given, by name, and when. Bounded; those given longest ago are forgotten
    first."""

    def __init__(self, max_pages: int = MAX_KNOWN_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[Hashable, OrderedDict[int, float]] = {}

    def num_matched(self, node: Hashable, names: Iterable[int], since: float) -> int:
        """Return how many leading pages of a prompt the node was given at or after `since`."""
        known = self._known.get(node)
        num_pages = 0
        for page in names if known else ():
            if known is None or page not in known or known[page] < since:
                break
            num_pages += 1
        return num_pages

    def note(self, node: Hashable, names: Iterable[int], now: float, since: float) -> None:
        """The node gets a prompt with these pages. Nobody will ask for those given before `since`."""
        known = self._known.setdefault(node, OrderedDict())
        for page in reversed(list(islice(names, MAX_NOTED_PAGES))):  # the first page is the last to be forgotten
            known[page] = now
            known.move_to_end(page)
        while known and (len(known) > self._max_pages or next(iter(known.values())) < since):
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

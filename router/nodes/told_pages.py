"""The pages that a node has in its prefix cache, as the node itself has told the router (`CachedPages`).

    nothing told --batch 0 ... a whole one--> whole --a batch is missing--> not whole, asked to begin anew --> whole
                                                |
                                                '-- a heartbeat counts changes that no batch tells within LATE_S: late

While news is late or not whole, the router places by load. It does not know what the node has lost since, and a guess
would bring prompts to a node that computes them all the same. Of any other node the router also
expects the pages of the prompts that it got a moment ago (placement/affinity.py).
"""

from __future__ import annotations

import math
from typing import Literal

from ...metadata.cache.names import PromptNames, short_names
from ...metadata.errors import ProtocolError
from ...metadata.wire.membership import CachedPages
from .name_table import NameTable

LATE_S = 3.0  # batches come several times per second

NewsState = Literal["none", "whole", "late"]


class ToldPages:
    """The news of one life of a node. `most`: pages and tail pages that it can have."""

    __slots__ = (
        "_asked_at",
        "_due",
        "_due_since",
        "_has_gap",
        "_has_told",
        "_is_whole",
        "_most",
        "_next",
        "_table",
        "_told",
    )

    def __init__(self, most: int) -> None:
        self._most = most
        self._table = NameTable()
        self._next: int = 0  # number of the batch that comes next
        self._has_gap = False  # a batch is missing
        self._told = 0  # changes of the node's cache that batches have told
        self._due: int | None = None  # changes that the node has counted, until batches tell them
        self._due_since = 0.0
        self._asked_at = -math.inf
        self._is_whole = False
        self._has_told = False  # everything, at least once

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self._table.num_bytes

    def state(self, now: float) -> NewsState:
        """Return what the news is worth at `now` (monotonic seconds)."""
        if not self._has_told:
            return "none"
        return "whole" if self._is_whole and not self._is_overdue(now) else "late"

    def take(self, news: CachedPages) -> None:
        """Enter a batch, unless one before it is missing.

        Raises ProtocolError if the node tells more pages than it can have. Then its news is late."""
        if news.number == 0:
            self._table, self._has_gap, self._is_whole = NameTable(self._most), False, False
        elif self._has_gap or news.number != self._next:
            self._has_gap, self._is_whole = True, False
            return
        self._next = news.number + 1
        self._table.remove(short_names(news.removed))  # before what is stored: a page may go and come in one batch
        self._table.add(short_names(news.stored))
        if len(self._table) > self._most:
            num_told, self._table, self._has_gap, self._is_whole = len(self._table), NameTable(), True, False
            raise ProtocolError(f"a node with {self._most} pages told {num_told} cached ones")
        self._told = news.num_changes
        if self._due is not None and self._told >= self._due:
            self._due = None
        self._is_whole = news.is_whole
        self._has_told = self._has_told or self._is_whole

    def count(self, num_changes: int, now: float) -> None:
        """The node's heartbeat says how often its cache has changed."""
        if self._due is None and num_changes > self._told:
            self._due, self._due_since = num_changes, now

    def asks(self, now: float) -> bool:
        """Return whether the node must be asked now to begin anew. Notes that it is."""
        if not (self._has_gap or self._is_overdue(now)) or now - self._asked_at <= LATE_S:
            return False
        self._asked_at = now
        return True

    def _is_overdue(self, now: float) -> bool:
        return self._due is not None and now - self._due_since > LATE_S

    def num_matched(self, names: PromptNames, num_tails: int) -> int:
        """Return how many leading pages of a prompt the node has, up to the last one behind which it can continue: the
        last `num_tails` of them, or all if these are fewer, have their tail pages, too."""
        table, num_pages = self._table, len(names)
        if not table or not num_pages:
            return 0
        low, high = 0, 1  # the node has the first `low` pages
        while low < num_pages and names[high - 1] in table:
            low, high = high, min(2 * high, num_pages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if names[middle - 1] in table else (low, middle)
        if not num_tails:
            return low
        run = 0  # tail pages in a row that are there, the last one first
        for index in reversed(range(low)):
            run = run + 1 if names.tail(index) in table else 0
            end = index + run
            if run == min(num_tails, end):
                return end
        return 0

"""The pages that a node has in its prefix cache, as the node itself has told the router (`CachedPages`).

    nothing told --batch 0 ... a whole one--> whole --a batch is missing--> not whole, asked to begin anew --> whole
                                                |
                                                '-- a heartbeat counts changes that no batch tells within LATE_S: late

While news is late or not whole, the router places by load. It does not know what the node has lost since, and a guess
would bring prompts to a node that computes them all the same. Of any other node the router also expects the pages of
the prompts that it got a moment ago: a node tells its pages a little after it was given their prompt.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Literal

from ...metadata.cache.names import PromptNames, short_names
from ...metadata.errors import ProtocolError
from ...metadata.wire.membership import CachedPages

LATE_S = 3.0  # batches come several times per second
MAX_NOTED_PAGES = 2048  # of one prompt
MAX_KNOWN_PAGES = 32768  # expected of a node
_MAX_FIRST = 1 << 18  # slots of a new table

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


class NameTable:
    """A set of 64-bit names in one array: open addressing with linear probing. `num_expected`: how many it will hold
    without growing.

    Names are hashes already, so the low bits of a name are its slot. A removed name leaves no mark: the names behind it
    move up. So the table is never rebuilt but to grow. It takes 16 to 32 bytes per name, where Python's set takes about
    80, and the garbage collector does not look at it."""

    __slots__ = ("_mask", "_num", "_slots")

    def __init__(self, num_expected: int = 0) -> None:
        self._resize(min(_MAX_FIRST, 1 << max(16, 2 * num_expected - 1).bit_length()))
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, name: int) -> bool:
        slots, mask = self._slots, self._mask
        slot = name & mask
        while slots[slot]:
            if slots[slot] == name:
                return True
            slot = (slot + 1) & mask
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return len(self._slots) * self._slots.itemsize

    def add(self, names: Iterable[int]) -> None:
        """Add names. Zero means an empty slot and is left out."""
        slots, mask = self._slots, self._mask
        for name in names:
            slot = name & mask
            while (held := slots[slot]) and held != name:
                slot = (slot + 1) & mask
            if held or not name:
                continue
            slots[slot] = name
            self._num += 1
            if 2 * self._num > mask:
                self._grow()
                slots, mask = self._slots, self._mask

    def remove(self, names: Iterable[int]) -> None:
        """Remove the names that are there."""
        slots, mask = self._slots, self._mask
        for name in names:
            hole = name & mask
            while (held := slots[hole]) and held != name:
                hole = (hole + 1) & mask
            if not held:
                continue
            self._num -= 1
            slot = hole
            while held := slots[slot := (slot + 1) & mask]:
                if (slot - held) & mask >= (slot - hole) & mask:  # its own slot is not behind the hole
                    slots[hole] = held
                    hole = slot
            slots[hole] = 0

    def _grow(self) -> None:
        names = [name for name in self._slots if name]
        self._resize(2 * len(self._slots))
        self._num = 0
        self.add(names)

    def _resize(self, num_slots: int) -> None:
        self._slots, self._mask = array("Q", bytes(8 * num_slots)), num_slots - 1


class ExpectedPages:
    """Leading pages that each node was given, by name, and when. Bounded; those given longest ago are forgotten
    first."""

    def __init__(self, max_pages: int = MAX_KNOWN_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[Hashable, OrderedDict[int, float]] = {}

    def num_matched(self, node: Hashable, names: Iterable[int], since: float) -> int:
        """Return how many leading pages of a prompt the node was given at or after `since`."""
        known, num_pages = self._known.get(node) or {}, 0
        for page in names if known else ():
            given_at = known.get(page)
            if given_at is None or given_at < since:
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

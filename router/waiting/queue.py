"""The waiting queue of a group decides in which order its requests are served.

Tenants take turns by the tokens that were computed for them (tenants/fair_share.py). Within a tenant: first come, first
served within a priority. Priority is a head start: the turn of an entry is the time of its arrival, AGE_S earlier per
step of higher priority (a lower number). So waiting makes up for priority, the order of two entries of a tenant never
changes, and nobody is starved. A request that has had nodes before, and was rescheduled, goes before all others.

admission.py decides which requests may wait, and for how long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import ceil

from ..requests.request import Request
from ..tenants.fair_share import DEFAULT, FairShares, Share, Tenant
from .entry import Entry, Turn

AGE_S = 10.0  # seconds of waiting that make up for one step of priority
FEW = 64  # entries that are sooner copied than looked up one by one


def turn_of(arrived_at: float, priority: int) -> float:
    """Return the turn of a request that arrived at `arrived_at` (monotonic seconds)."""
    return arrived_at + AGE_S * priority


class _Line:
    """Entries of one tenant, or those that go before all others, in the order of their turns."""

    __slots__ = ("entries", "num_tokens", "share")

    def __init__(self, share: Share) -> None:
        self.entries: list[Entry] = []
        self.num_tokens = 0
        self.share = share

    def index(self, turn: Turn) -> int:
        """Return how many entries have an earlier turn."""
        return bisect_left(self.entries, turn, key=_turn)

    def add(self, entry: Entry) -> None:
        self.entries.insert(self.index(entry.turn), entry)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> bool:
        """Take an entry out. False if it is not here."""
        index = self.index(entry.turn)
        if index == len(self.entries) or self.entries[index] is not entry:
            return False
        del self.entries[index]
        self.num_tokens -= entry.num_tokens
        return True


def _turn(entry: Entry) -> Turn:
    return entry.turn


class WaitingQueue:
    """Entries of one group. Iteration yields them in the order in which they are served."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self._first = _Line(Share())
        self._lines: dict[str, _Line] = {}  # by tenant; none is empty
        self._by_request: dict[int, list[Entry]] = {}  # by id(request): entries keep their request
        self._num_added = 0
        self._num_entries = 0
        self.num_tokens = 0  # prompt tokens of all entries

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        if self._first.entries:
            yield from self._first.entries.copy()
        if len(self._lines) == 1 and self._num_entries <= FEW:
            for line in self._lines.copy().values():
                yield from line.entries.copy()
        else:
            yield from self._in_turns()

    def _in_turns(self) -> Iterator[Entry]:
        places: dict[str, Turn] = {}  # the last turn of each tenant that was yielded: entries may leave meanwhile

        def take(share: Share) -> tuple[Entry, int] | None:
            line = self._lines.get(share.name)
            if line is None:
                return None
            last = places.get(share.name)
            index = 0 if last is None else line.index((last[0], last[1] + 1))
            if index >= len(line.entries):
                return None
            entry = line.entries[index]
            places[share.name] = entry.turn
            return entry, entry.num_tokens

        return self.shares.turns(take)

    @property
    def unordered(self) -> Iterator[Entry]:
        """All entries, in no order between tenants. Nothing may be added or removed meanwhile."""
        for line in (self._first, *self._lines.values()):
            yield from line.entries

    @property
    def sizes(self) -> Iterator[tuple[str, int, int]]:
        """Name, number of entries and number of prompt tokens of each tenant that waits for its first nodes."""
        for name, line in self._lines.items():
            yield name, len(line.entries), line.num_tokens

    def has(self, request: Request) -> bool:
        """Whether an entry of the request waits."""
        return id(request) in self._by_request

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """Queue an entry by its tenant and its turn, or before all others."""
        self._num_added += 1
        request = entry.request
        at = float("-inf") if first else turn_of(request.created_at, request.priority)
        entry.turn = (at, -self._num_added if first else self._num_added)
        line = self._first if first else self._lines.get(request.tenant.name)
        if line is None:
            line = self._lines[request.tenant.name] = _Line(self.shares.begin(request.tenant))
        if not first:
            request.share = line.share
        line.add(entry)
        self._by_request.setdefault(id(request), []).append(entry)
        self._num_entries += 1
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> None:
        """Take an entry out. Nothing happens if it is not here."""
        name = entry.request.tenant.name
        line = self._first if entry.turn[0] == float("-inf") else self._lines.get(name)
        if line is None or not line.remove(entry):
            return
        if not line.entries and line is not self._first:
            del self._lines[name]
            self.shares.end(line.share)
        self._num_entries -= 1
        self.num_tokens -= entry.num_tokens
        entries = self._by_request[id(entry.request)]
        entries.remove(entry)
        if not entries:
            del self._by_request[id(entry.request)]

    def withdraw(self, request: Request) -> None:
        """Take out all entries of a request."""
        for entry in self._by_request.get(id(request), []).copy():
            self.remove(entry)

    def num_before(self, turn: float, tenant: Tenant = DEFAULT) -> int:
        """Return how many entries are probably served before one of the tenant with this turn that arrives now: other
        tenants have as many turns meanwhile, by their weights."""
        line = self._lines.get(tenant.name)
        num_own = 0 if line is None else line.index((turn, self._num_added + 1))
        num_others = len(self) - len(self._first.entries) - (0 if line is None else len(line.entries))
        if num_others:
            weight = self.shares.waiting_weight - (0.0 if line is None else tenant.weight)
            num_turns = num_own + (0 if self.shares.is_next(tenant) else 1)
            num_others = min(num_others, ceil(num_turns * weight / tenant.weight))
        return len(self._first.entries) + num_own + num_others

    def last_fresh(self, tenant: str = DEFAULT.name, turn: float | None = None) -> Iterator[Entry]:
        """Yield the fresh entries of a tenant whose turn is later than that of one that arrives now with this turn
        (None: all), the last one first. Nothing may be added or removed meanwhile."""
        line = self._lines.get(tenant)
        if line is None:
            return
        start = 0 if turn is None else line.index((turn, self._num_added + 1))
        for index in range(len(line.entries) - 1, start - 1, -1):
            if line.entries[index].is_fresh:
                yield line.entries[index]

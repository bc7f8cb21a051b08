"""The waiting queue of a group decides in which order its requests are served.

Tenants take turns by the tokens that were computed for them (tenants/fair_share.py). Within a tenant: first come, first
served within a priority. Priority is a head start: the turn of an entry is the time of its arrival, AGE_S earlier per
step of higher priority (a lower number). So waiting makes up for priority, the order of two entries of a tenant never
changes, and nobody is starved. A request that has had nodes before, and was rescheduled, goes before all others.

admission.py decides which requests may wait, and for how long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from math import ceil

from ...metadata.cache.names import PromptNames
from ...metadata.errors import Unavailable
from ..nodes.node import Node
from ..nodes.prompt_role import PromptPlace, place_prompt
from ..requests.attempt import Attempt
from ..requests.need import Need
from ..requests.request import Request
from ..tenants.fair_share import DEFAULT, FairShares, Share, Tenant

AGE_S = 10.0  # seconds of waiting that make up for one step of priority
FEW = 64  # entries that are sooner copied than looked up one by one

Turn = tuple[float, int]  # smaller is served earlier; the second part orders entries of one time
# Nodes that a canary must go to: a pair, a prefill node alone (for one token), or a decode node alone.
Pinned = tuple[Node, Node] | tuple[Node, None] | tuple[None, Node]


class Entry:
    """Choices of a request that wait for nodes. `pair` names the nodes that a canary must go to."""

    __slots__ = (
        "attempt",
        "choices",
        "names",
        "need",
        "pair",
        "request",
        "stranded_since",
        "turn",
        "unfit",
        "was_refused",
    )

    def __init__(self, request: Request, choices: tuple[int, ...], pair: Pinned | None = None) -> None:
        self.request = request
        self.choices = choices
        self.pair = pair
        self.attempt: Attempt | None = None  # the reservation under way
        self.was_refused = False
        self.stranded_since: float | None = None  # since when no node could take it, however idle
        self.turn: Turn = (0.0, 0)  # the queue sets it
        self.unfit: set[bytes] = set()  # routing ids of decode nodes that refused it although they were empty
        self.need = Need.of(request, choices[0], needs_decode=self.needs_decode)
        self.names = PromptNames(request.group.names, request.prompt_ids, request.cache_salt)

    @property
    def needs_decode(self) -> bool:
        """False if the node that computes the prompt does the rest alone, so that a prefill node needs no decode node:
        one token, or only the prompt's log-probabilities."""
        sequence = self.request.sequences[self.choices[0]]
        return sequence.num_left > 1 and sequence.finish_reason is None

    @property
    def place(self) -> PromptPlace | None:
        """The role that computes its prompt, and the reason. None: the placement compares the nodes."""
        if self.pair is not None:
            return PromptPlace("local" if self.pair[0] is None else "remote", "never")
        return place_prompt(self.request.group.facts)

    @property
    def is_local(self) -> bool:
        """Whether a decode node must compute its prompt."""
        return self.place is not None and self.place.where == "local"

    @property
    def is_open(self) -> bool:
        """Whether either role may compute its prompt."""
        return self.place is None

    def could_go_to(
        self, pairs: Iterable[tuple[Node, Node]], prefills: Iterable[Node], decodes: Iterable[Node] = ()
    ) -> bool:
        """Whether one of these pairs, or one of these prefill nodes if that is enough, could serve it when idle. If its
        prompt may be local: whether one of these decode nodes could."""
        place = self.place
        if place is None or place.where == "local":
            fits = any(self.need.fits_local(node) for node in decodes if node.routing_id not in self.unfit)
            if fits or place is not None:
                return fits
        if not self.needs_decode:
            return any(self.need.fits_prefill(prefill) for prefill in prefills)
        return self.need.fits_any(pair for pair in pairs if pair[1].routing_id not in self.unfit)

    @property
    def kind(self) -> Hashable:
        """Entries of one kind can go to the same nodes when these are idle."""
        place = self.place
        return self.need, self.needs_decode, place and place.where, frozenset(self.unfit)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the router keeps for it."""
        return len(self.request.prompt_ids)

    @property
    def is_fresh(self) -> bool:
        """No node has been asked for it, so that it can be refused without loss."""
        return self.request.dispatched_at is None and self.attempt is None and self.pair is None


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


class PairFull(Unavailable):
    """The nodes that a canary must go to have no room. That is no fault of the pair."""

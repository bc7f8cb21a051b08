"""The waiting queue of a group: who is served next.

First come, first served within a priority. Priority works as a head start: an entry's turn is the time of its arrival,
AGE_S earlier for each step of higher priority (a lower number). So waiting makes up for priority, the order of two
entries never changes, and nobody is starved: none is overtaken by one that came more than AGE_S x the difference of
their priorities after it. What was admitted before, and must move to other nodes, goes before all others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from .needs import Need
from .node import Node
from .placement import page_hashes
from .request import Attempt, Request

AGE_S = 10.0  # seconds of waiting that make up for one step of priority

Turn = tuple[float, int]  # smaller is served earlier; the second part tells entries of one time apart


# The nodes that a canary is for: a pair, a prefill node alone (for one token), or a decode node alone.
Pinned = tuple[Node, Node] | tuple[Node, None] | tuple[None, Node]


class Entry:
    """Choices of a request that wait for a decode node. `pair` pins them (a canary's)."""

    __slots__ = (
        "attempt",
        "choices",
        "hashes",
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
        self.stranded_since: float | None = None  # no node there could take it, however idle
        self.turn: Turn = (0.0, 0)  # the queue sets it
        self.unfit: set[bytes] = set()  # decode nodes (routing ids) that refused it though they were empty
        self.need = Need.of(request, choices[0], needs_decode=self.needs_decode)
        self.hashes = page_hashes(request.prompt_ids, request.group.page_size, request.salt)

    @property
    def needs_decode(self) -> bool:
        """False when one token is left, which prefill gives alone, or only log-probabilities of the prompt are."""
        choice = self.request.sequences[self.choices[0]]
        return choice.num_left > 1 and choice.finish_reason is None

    def could_go_to(self, pairs: Iterable[tuple[Node, Node]], prefills: Iterable[Node]) -> bool:
        """Whether one of these pairs could serve it, or one of these prefill nodes alone where that is enough, however
        busy they are now."""
        if not self.needs_decode:
            return any(self.need.fits_prefill(prefill) for prefill in prefills)
        return self.need.fits_any(pair for pair in pairs if pair[1].routing_id not in self.unfit)

    @property
    def needs_prefill(self) -> bool:
        """False when a decode node computes the prompt itself."""
        return self.pair is None or self.pair[0] is not None

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the router keeps for it."""
        return len(self.request.prompt_ids)

    @property
    def is_fresh(self) -> bool:
        """No node has been asked for it: it may be refused without loss."""
        return self.request.dispatched_at is None and self.attempt is None and self.pair is None


def turn_of(arrived_at: float, priority: int) -> float:
    """When it is the turn of a request that arrived at `arrived_at` (monotonic seconds)."""
    return arrived_at + AGE_S * priority


class WaitingQueue:
    """Entries in the order of their turns."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._num_added = 0
        self.num_tokens = 0  # prompt tokens of all entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """Queues an entry by its turn, or before all others."""
        self._num_added += 1
        request = entry.request
        at = float("-inf") if first else turn_of(request.created_at, request.priority)
        entry.turn = (at, -self._num_added if first else self._num_added)
        self._entries.insert(self._place(entry.turn), entry)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: Entry) -> None:
        """Takes an entry out; nothing happens when it is not here."""
        place = self._place(entry.turn)
        if place < len(self._entries) and self._entries[place] is entry:
            del self._entries[place]
            self.num_tokens -= entry.num_tokens

    def withdraw(self, request: Request) -> None:
        """Takes out all entries of a request."""
        for entry in [entry for entry in self._entries if entry.request is request]:
            self.remove(entry)

    def num_before(self, turn: float) -> int:
        """How many are served before one with this turn that arrives now."""
        return self._place((turn, self._num_added + 1))

    def fresh_after(self, turn: float) -> list[Entry]:
        """Entries that no node was asked for and whose turn is later, the last one first."""
        return [entry for entry in reversed(self._entries[self.num_before(turn) :]) if entry.is_fresh]

    def _place(self, turn: Turn) -> int:
        return bisect_left(self._entries, turn, key=lambda entry: entry.turn)

"""A simulated request: what it asks for, when its tokens came, and where it stands on its decode node."""

from __future__ import annotations

from .figures import Record
from .traffic import Arrival

SLACK = 2  # tokens of two rounds, which a decode node reserves beyond those that a sequence has


class SimulatedRequest:
    """One request. Nodes write its times; its decode node also writes its place in rounds."""

    __slots__ = (
        "arrived_s",
        "first_s",
        "gap_s",
        "is_local",
        "joined_round",
        "last_s",
        "num_computed",
        "num_received",
        "num_tokens",
        "order",
        "prompt_len",
        "second_s",
    )

    def __init__(self, order: int, arrival: Arrival) -> None:
        self.order = order  # of arrival; the smallest is the oldest
        self.arrived_s, self.prompt_len, self.num_tokens = arrival[:3]
        self.is_local = False  # the decode node computes the prompt
        self.num_received = 0
        self.num_computed = 0  # tokens with KV, while a node computes the prompt or lost tokens
        self.joined_round = 0  # of its decode node
        self.first_s = self.second_s = self.last_s = self.gap_s = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_len + self.num_received

    @property
    def num_left(self) -> int:
        """Tokens that are still to come."""
        return self.num_tokens - self.num_received

    def take_first(self, now: float) -> None:
        """The first token has come."""
        self.num_received, self.first_s, self.last_s = 1, now, now

    def end_gap(self, now: float) -> None:
        """A token has come after those that were counted: the second one, or the first after a preemption. Further
        tokens are counted when the request leaves its rounds."""
        if self.num_received == 1:
            self.second_s = now - self.last_s
        self.gap_s = max(self.gap_s, now - self.last_s)

    @property
    def record(self) -> Record:
        """The times of the answer, which is whole."""
        assert self.num_received == self.num_tokens, (self.order, self.num_received, self.num_tokens)
        tpot_s = (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0
        return Record(self.first_s - self.arrived_s, tpot_s, self.second_s, self.gap_s)

"""An entry: choices of a request that wait for nodes, and the nodes that could serve them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ...metadata.cache.names import PromptNames
from ...metadata.errors import Unavailable
from ..nodes.node import Node
from ..nodes.prompt_role import PromptPlace, place_prompt
from ..requests.attempt import Attempt
from ..requests.need import Need
from ..requests.request import Request

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


class PairFull(Unavailable):
    """The nodes that a canary must go to have no room. That is no fault of the pair."""

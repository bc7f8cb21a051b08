"""An attempt: one run of some sequences of a request on a pair of nodes."""

from __future__ import annotations

from ...metadata.wire.node_info import Lender
from ..nodes.node import Node
from ..nodes.prompt_role import PromptPlace

PairId = tuple[bytes | None, bytes | None]  # routing ids of an attempt's prefill and decode node


class Attempt:
    """One run of some sequences on a pair of nodes. `decode` is None if the prefill node gives the last token alone,
    `prefill` if the decode node computes the prompt itself."""

    __slots__ = (
        "admitted",
        "ask_at",
        "choices",
        "decode",
        "dispatched",
        "is_learnt",
        "lender",
        "num_asks",
        "num_uncached",
        "number",
        "place",
        "placed_at",
        "prefill",
        "prefill_done",
        "prefill_reason",
        "sent_at",
    )

    def __init__(self, number: int, choices: set[int], prefill: Node | None, decode: Node | None, now: float) -> None:
        self.number = number
        self.choices = choices  # indices of the sequences that still run
        self.prefill = prefill
        self.decode = decode
        self.place = PromptPlace("remote" if prefill is not None else "local", "never")  # who computes the prompt
        self.prefill_reason = ""  # why it has this prefill node
        self.dispatched = False  # it has its nodes: Prefill was sent if a prefill node takes part
        self.prefill_done = prefill is None  # nothing comes from the node that computes the prompt, except tokens
        self.admitted: set[int] = set()  # sequences whose pages have all arrived on the decode node
        self.placed_at = self.sent_at = now
        self.is_learnt = False  # its times have corrected the estimates of its role
        self.lender: Lender | None = None  # from which the node that computes the prompt may borrow pages
        self.num_uncached = 0  # prompt tokens that it will probably compute
        self.num_asks = 0  # how often the decode node was asked for its pages
        self.ask_at = now  # when it is asked again

    @property
    def pair(self) -> PairId:
        """Routing ids of the nodes."""
        return pair_of(self.prefill, self.decode)

    @property
    def prompt_node(self) -> Node | None:
        """The node that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def nodes(self) -> list[Node]:
        """Nodes that may hold something of this attempt."""
        legs = [self.prefill] if self.prefill is not None and self.dispatched and not self.prefill_done else []
        return [*legs, self.decode] if self.decode is not None else legs


def pair_of(prefill: Node | None, decode: Node | None) -> PairId:
    """Return the name of a pair of nodes."""
    return prefill and prefill.routing_id, decode and decode.routing_id

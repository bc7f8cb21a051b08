"""Messages by which a node joins the router, shows that it lives, answers operators, and leaves."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from .node_info import (
    MAX_RANKS,
    Address,
    Capacity,
    GroupRank,
    HandoffSchema,
    Load,
    ModelCard,
    NodeStats,
    PoolLedger,
    Role,
    Service,
)
from .protocol import Message, Since
from .request import Count, Digest, Index, Name, Seconds, Text, Units

HUB_FRAME_BYTES = 64 << 20  # a tokenizer is the largest message on the hub
MAX_ROUTERS = 256  # that a node says it has joined
MAX_PROVEN = 1024  # nodes of which a node remembers that they work together

Epochs = Annotated[tuple[Digest, ...], Meta(max_length=MAX_PROVEN)]

# --- node -> router -----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """A node's first message, sent again after HelloAgain and to a router of a new epoch. A node that does not know yet
    which protocol the router understands uses its oldest one; the router asks again for newer fields."""

    role: Role
    node_id: Name
    epoch: Digest
    protocol_min: Index
    protocol_max: Index
    layout: HandoffSchema  # a wire layout; it is compared field by field, never by version
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    model: ModelCard
    capacity: Capacity
    data_address: Address = ""
    protocol: Annotated[Index, Since(6)] = 0  # this Hello is written in it
    # numbers in FP8, or experts chosen in 16 bits: right answers differ by more than the types of the layout say
    rounds_coarsely: Annotated[bool, Since(6)] = False
    place: Annotated[GroupRank | None, Since(7)] = None  # None: the node is no rank of a group
    commit: Annotated[Digest, Since(8)] = ""  # of the repository that the model is of; "": it is of none
    proven: Annotated[Epochs, Since(8)] = ()  # what the last router said (Proven)

    @property
    def unit(self) -> str:
        """Name of what an operator starts, drains and stops: the group of this rank, or the node itself."""
        return self.node_id if self.place is None else self.place.group

    @property
    def unit_epoch(self) -> str:
        """Epoch of the group of this rank, or of the node itself."""
        return self.epoch if self.place is None else self.place.epoch

    @property
    def protocols(self) -> tuple[int, int]:
        """The lowest and the highest protocol that the node knows."""
        return self.protocol_min, self.protocol_max


class TokenizerFile(Message, frozen=True, tag="tokenizer"):
    """tokenizer.json, zlib-compressed, sent if Welcome asks for it."""

    digest: Digest
    data: Annotated[bytes, Meta(max_length=HUB_FRAME_BYTES)]


IDLE = "idle"  # the phase of a main loop that waits for messages


class Heartbeat(Message, frozen=True, tag="beat"):
    """Sign of life from the node's heartbeat thread: the main loop's step, its phase, and how long that has lasted."""

    step: Count
    phase: Name
    phase_age_s: Seconds
    phase_limit_s: Seconds
    load: Load
    stats: NodeStats
    # since ranks 1 and above last said that their processes run
    rank_silences_s: Annotated[tuple[Seconds, ...], Meta(max_length=MAX_RANKS), Since(6)] = ()
    round_trip_s: Annotated[Seconds, Since(6)] = 0.0  # to the router, as the node's kernel measures it
    service: Annotated[Service | None, Since(8)] = None  # None: the node does not say


class LedgerReport(Message, frozen=True, tag="ledger"):
    """Answer to Inspect and Flush: one node's page ledger, units and counters."""

    query: Count
    pool: PoolLedger
    requests: Units
    tickets: Units
    load: Load
    stats: NodeStats
    tail_pool: Annotated[PoolLedger | None, Since(8)] = None  # of tail pages; None: the model has none
    # units of `requests` by the epoch of the router that they are of; the routers that the node has joined have 0 if
    # they have none
    routers: Annotated[dict[Digest, Count], Meta(max_length=MAX_ROUTERS), Since(8)] = {}


class Leaving(Message, frozen=True, tag="leaving"):
    """The node drains and takes no new work. `done`: it holds nothing any more and exits now."""

    done: bool
    reason: Text = ""


# --- router -> node -----------------------------------------------------------------------------------------------


class RouterMessage(Message, frozen=True):
    """Base of the router's messages: each carries the router's epoch."""

    router_epoch: Digest


class Welcome(RouterMessage, frozen=True, tag="welcome"):
    """Answer to Hello: the node has joined, and both speak `protocol` from now on. The node logs `notice`, if any, as a
    warning, for example that it has no partner yet."""

    protocol: Index
    need_tokenizer: bool
    notice: Text = ""


class Refusal(RouterMessage, frozen=True, tag="refusal"):
    """Answer to Hello: the node can be paired with no other; `reason` names both values. The node logs it and exits."""

    reason: Text


class HelloAgain(RouterMessage, frozen=True, tag="hello_again"):
    """The router does not know this routing id, or wants the Hello in a newer protocol that both know."""

    protocol: Annotated[Index, Since(6)] = 0  # 0: the oldest that the node knows


class RouterHeartbeat(RouterMessage, frozen=True, tag="router_beat"):
    """The router's sign of life. A node that hears no router message for 5 s frees all of this router's requests."""


class Proven(RouterMessage, frozen=True, tag="proven"):
    """The node is in a pair that is ready with each of the nodes that have these epochs, and with no others. It names
    them to the next router in its Hello, so that this one need not test the pairs."""

    since: ClassVar[int] = 8

    epochs: Epochs


class Inspect(RouterMessage, frozen=True, tag="inspect"):
    """Asks the node for a LedgerReport with the same `query`."""

    query: Count


class Flush(RouterMessage, frozen=True, tag="flush"):
    """Remove unreferenced pages from the prefix cache, then send a LedgerReport."""

    query: Count


class Cordon(RouterMessage, frozen=True, tag="cordon"):
    """An operator drains the node, or puts it back. The node goes on, and tells all its routers (Service), which give
    it no new work."""

    since: ClassVar[int] = 8

    is_cordoned: bool


class Drain(RouterMessage, frozen=True, tag="drain"):
    """Take no new work, finish the rest, and exit, as after SIGTERM."""

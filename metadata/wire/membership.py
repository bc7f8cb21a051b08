"""Messages by which a node joins the router, shows that it lives, answers operators, and leaves."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from ..cache.names import NAME_BYTES
from .node_info import (
    MAX_RANKS,
    Address,
    CanaryOutcome,
    Capacity,
    GroupRank,
    HandoffSchema,
    Lender,
    Load,
    ModelCard,
    NodeStats,
    PoolLedger,
    Role,
    Service,
    TierLedger,
)
from .protocol import Message, Since
from .request import Count, Digest, Ids, Index, Name, Seconds, Text, Units

HUB_FRAME_BYTES = 64 << 20  # a tokenizer is the largest message on the hub
MAX_NAMES = 1 << 14  # of pages, in one batch
MAX_ROUTERS = 256  # that a node says it has joined
MAX_PROVEN = 1024  # nodes of which a node remembers that they work together

PageNameColumn = Annotated[bytes, Meta(max_length=NAME_BYTES * MAX_NAMES)]
PageKey = Annotated[bytes, Meta(max_length=64)]
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
    borrows: Annotated[bool, Since(8)] = False  # it borrows cached pages; with a data_address it lends its own

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
    interval_s: Annotated[Seconds, Since(8)] = 0.0  # the next one comes after so long at most; 0: it does not say


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
    host_tier: Annotated[TierLedger | None, Since(8)] = None  # None: the node has none


class Leaving(Message, frozen=True, tag="leaving"):
    """The node drains and takes no new work. `done`: it holds nothing any more and exits now."""

    done: bool
    reason: Text = ""


class CachedPages(Message, frozen=True, tag="cached_pages"):
    """Pages that the node's prefix cache has stored and removed since the batch before, as columns of names
    (metadata/cache/names.py). Batch 0 begins anew: the node has no other pages than those that it tells from then
    on."""

    since: ClassVar[int] = 8

    number: Count  # of the batch
    stored: PageNameColumn
    removed: PageNameColumn
    num_changes: Count  # of the prefix cache since the node's start that this batch and those before it tell
    is_whole: bool  # all pages that the node had at batch 0 are told

    def __post_init__(self) -> None:
        if len(self.stored) % NAME_BYTES or len(self.removed) % NAME_BYTES:
            raise ValueError(f"{len(self.stored)} and {len(self.removed)} bytes are not columns of names")


class CanaryTold(Message, frozen=True, tag="canary_told"):
    """How a canary went that another router has sent (TellCanary)."""

    since: ClassVar[int] = 8

    outcome: CanaryOutcome


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
    page_key: Annotated[PageKey, Since(8)] = b""  # of the names in CachedPages; b"": the node sends none


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
    them to each next router in its Hello, so that this one need not test the pairs."""

    since: ClassVar[int] = 8

    epochs: Epochs


class TellCanary(RouterMessage, frozen=True, tag="tell_canary"):
    """How a canary of this router went. The node tells its other routers (CanaryTold)."""

    since: ClassVar[int] = 8

    outcome: CanaryOutcome


class Inspect(RouterMessage, frozen=True, tag="inspect"):
    """Asks the node for a LedgerReport with the same `query`."""

    query: Count


class Flush(RouterMessage, frozen=True, tag="flush"):
    """Remove unreferenced pages from the prefix cache, then send a LedgerReport."""

    query: Count


class ForgetSalts(RouterMessage, frozen=True, tag="forget_salts"):
    """A tenant is gone: free the pages of all salts that begin with `prefix`, in all tiers, but those that requests
    use. The router repeats it when the tenant's last request has ended."""

    since: ClassVar[int] = 8

    prefix: Annotated[str, Meta(min_length=1, max_length=64)]


class TellPages(RouterMessage, frozen=True, tag="tell_pages"):
    """A batch of CachedPages was lost: begin anew with batch 0."""

    since: ClassVar[int] = 8


class Cordon(RouterMessage, frozen=True, tag="cordon"):
    """An operator drains the node, or puts it back. The node goes on, and tells all its routers (Service), which give
    it no new work."""

    since: ClassVar[int] = 8

    is_cordoned: bool


class Drain(RouterMessage, frozen=True, tag="drain"):
    """Take no new work, finish the rest, and exit, as after SIGTERM."""


# --- the cached texts of a node that leaves ---------------------------------------------------------------------------


class HandOn(Message, frozen=True, tag="hand_on"):
    """The node leaves. Another one may borrow the pages of this text, which is in its prefix cache. The router answers
    HandedOn."""

    since: ClassVar[int] = 8

    token_ids: Ids  # of all pages, and the next tokens by which the last one is keyed
    cache_salt: Digest
    num_pages: Index


class Keep(RouterMessage, frozen=True, tag="keep"):
    """A node leaves that has the pages of this text. This one may borrow them for its prefix cache."""

    since: ClassVar[int] = 8

    lender: Lender
    token_ids: Ids
    cache_salt: Digest


class HandedOn(RouterMessage, frozen=True, tag="handed_on"):
    """Whether another node was told of the text that the node has named in HandOn."""

    since: ClassVar[int] = 8

    has_heir: bool

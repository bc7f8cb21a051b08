"""Every message between two processes, typed and bounded.

    router -> node     ToNode      over the hub (ROUTER -> DEALER), each with the router's epoch
    node   -> router   ToRouter    over the hub (DEALER -> ROUTER)
    decode -> prefill  ToPrefill   over the data link, on which a decode node pulls pages
    prefill -> decode  ToDecode    over the data link; `Pages` is followed by a raw data frame

Each direction has one union and one typed decoder, so a message of another direction is refused. Unknown fields are
refused too, except in a Hello (hello.py). A new field or message needs a new protocol version and names it where it is
declared (protocol.py), so that an older peer never gets what it does not know. Token ids travel as little-endian int32
bytes, batches as columns. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from .frames import encode as encode
from .node_info import Capacity, DevicePools, HandoffSchema, Load, ModelCard, NodeStats, Peer, PoolLedger, Role
from .protocol import PROTOCOL_MAX as PROTOCOL_MAX
from .protocol import PROTOCOL_MIN as PROTOCOL_MIN
from .protocol import Message, Since
from .request import (
    MAX_CONTEXT,
    Choices,
    Count,
    Digest,
    Ended,
    GenerationRequest,
    Ids,
    Index,
    Name,
    Seconds,
    Text,
    TokenLogprobsColumn,
    Unit,
)
from .times import PrefillTimes, PullTimes

MAX_BATCH = 4096  # units in one message
MIN_LEASE_S = 0.05
DATA_FRAME_BYTES = 64 << 20
MAX_REASON = 4096  # characters of a Text
HUB_FRAME_BYTES = 64 << 20  # a tokenizer is the largest message on the hub

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
    data_address: Annotated[str, Meta(max_length=256)] = ""
    protocol: Annotated[Index, Since(6)] = 0  # this Hello is written in it

    @property
    def protocols(self) -> tuple[int, int]:
        """The lowest and the highest protocol that the node knows."""
        return self.protocol_min, self.protocol_max


class TokenizerFile(Message, frozen=True, tag="tokenizer"):
    """tokenizer.json, zlib-compressed, sent if Welcome asks for it."""

    digest: Digest
    data: Annotated[bytes, Meta(max_length=HUB_FRAME_BYTES)]


class Heartbeat(Message, frozen=True, tag="beat"):
    """Sign of life from the node's heartbeat thread: the main loop's step, its phase, and how long that has lasted."""

    step: Count
    phase: Name
    phase_age_s: Seconds
    phase_limit_s: Seconds
    load: Load
    stats: NodeStats


class Reserved(Message, frozen=True, tag="reserved"):
    """A decode node's answer to Reserve and Compute. Choices that are not granted stay in the router's queue. If none
    is granted the node is full, which is no failure."""

    rid: Name
    attempt: Index
    granted: Choices
    load: Load


class CapacityFreed(Message, frozen=True, tag="room"):
    """A decode node that refused a reservation has free pages again."""

    load: Load


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """The prefill node's part of a request is over: all tickets have ended. Times in seconds."""

    rid: Name
    attempt: Index
    queue_s: Seconds
    compute_s: Seconds
    num_cached: Count
    load: Load
    times: PrefillTimes = PrefillTimes()
    prompt_logprobs: TokenLogprobsColumn = ()  # of the prompt's tokens after the first, if the request asked for them


class Admitted(Message, frozen=True, tag="admitted"):
    """The decode node has the pages, checked, and the unit runs."""

    unit: Unit
    transfer_s: Seconds
    num_pages: Count
    num_bytes: Count
    num_cached_pages: Count = field(name="have_pages")
    times: PullTimes = PullTimes()


class Tokens(Message, frozen=True, tag="tokens"):
    """The tokens of one step, as columns over `units`. Sparse columns are keyed by the unit's index in `units`."""

    units: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    firsts: Ids  # for each unit: index of its first token here among its generated tokens
    counts: Ids  # for each unit: how many tokens it has here
    ids: Ids  # all units' tokens, one after the other
    logprobs: Annotated[dict[Index, TokenLogprobsColumn], Meta(max_length=MAX_BATCH)] = {}
    ended: Annotated[dict[Index, Ended], Meta(max_length=MAX_BATCH)] = {}
    # prompt tokens found in the prefix cache; sent with the first tokens, where a stop string may end the request
    num_cached: Count | None = None

    def __post_init__(self) -> None:
        if not len(self.firsts) == len(self.counts) == 4 * len(self.units) or len(self.ids) % 4:
            raise ValueError(
                f"columns of {len(self.firsts)} and {len(self.counts)} bytes do not fit {len(self.units)} units"
            )


class Failed(Message, frozen=True, tag="failed"):
    """One unit ended in an error. `retryable` says whether another attempt elsewhere could succeed."""

    unit: Unit
    code: Name
    message: Text
    retryable: bool


class Cancelled(Message, frozen=True, tag="cancelled"):
    """Answer to Cancel: the node holds nothing of the request any more."""

    rid: Name
    attempt: Index


class LedgerReport(Message, frozen=True, tag="ledger"):
    """Answer to Inspect and Flush: one node's page ledger, units and counters."""

    query: Count
    pool: PoolLedger
    requests: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    tickets: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    load: Load
    stats: NodeStats


class Leaving(Message, frozen=True, tag="leaving"):
    """The node drains and takes no new work. `done`: it holds nothing any more and exits now."""

    done: bool
    reason: Text = ""


OfNode = Hello | TokenizerFile | Heartbeat | LedgerReport | Leaving
OfWork = Reserved | CapacityFreed | PrefillDone | Admitted | Tokens | Failed | Cancelled
ToRouter = OfNode | OfWork


# --- router -> node -----------------------------------------------------------------------------------------------


class RouterMessage(Message, frozen=True):
    """Base of the router's messages: each carries the router's epoch."""

    router_epoch: Digest


class Dispatch(RouterMessage, frozen=True):
    """Base of messages that give a node work: some choices of one attempt at a request."""

    rid: Name
    attempt: Index
    choices: Choices
    request: GenerationRequest

    def __post_init__(self) -> None:
        if not 0 < len(set(self.choices)) == len(self.choices):
            raise ValueError(f"choices {self.choices} are empty or name a choice twice")


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


class Reserve(Dispatch, frozen=True, tag="reserve"):
    """To a decode node: take all pages of these choices' prompts (less the cached ones) plus two rounds, all or nothing
    per choice, in order. Then claim the granted choices from `prefill`."""

    prefill: Peer


class Compute(Dispatch, frozen=True, tag="compute"):
    """To a decode node without a prefill node: take pages as for Reserve, compute the prompt and the received tokens
    here, and generate. The node answers Reserved; no Admitted follows."""

    since: ClassVar[int] = 6


class Prefill(Dispatch, frozen=True, tag="prefill"):
    """To a prefill node: compute the prompt once, sample each choice's first token, and offer the pages to `decode`
    (None: no ticket)."""

    decode: Peer | None


class Cancel(RouterMessage, frozen=True, tag="cancel"):
    """Stop these choices (None: all) of the request and free what they hold. The node answers Cancelled."""

    rid: Name
    attempt: Index
    choices: Choices | None
    reason: Text


class Resend(RouterMessage, frozen=True, tag="resend"):
    """Send the unit's tokens again from index `first`, because a gap in them lasts."""

    unit: Unit
    first: Index


class Inspect(RouterMessage, frozen=True, tag="inspect"):
    """Send a LedgerReport."""

    query: Count


class Flush(RouterMessage, frozen=True, tag="flush"):
    """Remove unreferenced pages from the prefix cache, then send a LedgerReport."""

    query: Count


class Drain(RouterMessage, frozen=True, tag="drain"):
    """Take no new work, finish the rest, and exit, as after SIGTERM."""


OfRouter = Welcome | Refusal | HelloAgain | RouterHeartbeat | Inspect | Flush | Drain
ToNode = OfRouter | Reserve | Compute | Prefill | Cancel | Resend

# --- decode -> prefill, on the data link ---------------------------------------------------------------------------


class LinkHello(Message, frozen=True, tag="link_hello"):
    """The decode node opens the link. `transports` are those that it can use, best first. Two nodes with equal `host`
    can share memory. `inbox` is where the node receives file descriptors (descriptors.py); empty if it needs none."""

    node_id: Name
    epoch: Digest
    layout: HandoffSchema
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    transports: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=8)]
    host: Digest
    protocol: Annotated[Index, Since(6)] = 0  # the two nodes address each other in it; 0: the decode node is older
    inbox: Annotated[str, Meta(pattern=r"^(baton-[0-9a-f]{32})?$", max_length=38), Since(6)] = ""


class Claim(Message, frozen=True, tag="claim"):
    """The decode node has reserved pages for the unit and needs none of the first `num_cached_pages`. A claim of an
    unknown unit is parked for a lease."""

    unit: Unit
    num_cached_pages: Index = field(name="have")


class Pull(Message, frozen=True, tag="pull"):
    """Request for these pages (indices in the ticket). Only transports that cannot read the pool themselves send it."""

    unit: Unit
    indices: Ids


class Renew(Message, frozen=True, tag="renew"):
    """Renewal of these tickets' leases."""

    units: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]


class Ack(Message, frozen=True, tag="ack"):
    """All pages are in the decode node's own memory and checked. The ticket ends."""

    unit: Unit


class Drop(Message, frozen=True, tag="drop"):
    """The decode node gives up the claim (cancelled, or failed). The ticket ends."""

    unit: Unit
    reason: Text


class RevokeAck(Message, frozen=True, tag="revoke_ack"):
    """Answer to Revoke: the decode node does not read the ticket's pages any more."""

    unit: Unit


ToPrefill = LinkHello | Claim | Pull | Renew | Ack | Drop | RevokeAck


# --- prefill -> decode, on the data link ---------------------------------------------------------------------------


class LinkWelcome(Message, frozen=True, tag="link_welcome"):
    """The link is open. If `transport` is `local`, the pools are /proc/PID/fd/FD of the prefill node, one fd per pool,
    with sizes in bytes."""

    node_id: Name
    epoch: Digest
    transport: Name
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=1e4)]  # a shorter lease would be renewed all the time
    num_pages: Count = 0
    pid: Count = 0
    fds: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()


class CudaWelcome(LinkWelcome, frozen=True, tag="cuda_welcome", kw_only=True):
    """LinkWelcome for `cuda`. `fds` and `sizes` name only the host mirror of the target's pool, which holds the
    generations."""

    since: ClassVar[int] = 6

    pools: DevicePools


class LinkRefused(Message, frozen=True, tag="link_refused"):
    """The two nodes cannot hand over; the reason names both values."""

    reason: Text


class Offer(Message, frozen=True, tag="offer"):
    """Pages that are computed and will not be written again, as columns. The last offer of a ticket carries the row."""

    unit: Unit
    num_pages: Index  # of the whole ticket
    indices: Ids  # index of each page in the ticket
    pages: Ids  # its number in the prefill node's pools
    generations: Annotated[bytes, Meta(max_length=8 * MAX_CONTEXT)]  # int64: how often the page had been allocated
    checksums: Annotated[bytes, Meta(max_length=DATA_FRAME_BYTES)]  # uint64 by (page, pool, layer, K|V, kv head)
    row: Annotated[bytes, Meta(max_length=1 << 24)] | None = None
    row_checksum: Count = 0


class Pages(Message, frozen=True, tag="pages"):
    """Answer to Pull, followed by one raw frame. Each page holds the target's [num_layers, 2, num_kv_heads, page_size,
    head_dim] and then the draft's."""

    unit: Unit
    indices: Ids
    generations: Annotated[bytes, Meta(max_length=8 * MAX_CONTEXT)]


class Revoke(Message, frozen=True, tag="revoke"):
    """The prefill node took the ticket back: `finished` if the first token ended the request, else because of an
    error."""

    unit: Unit
    finished: bool
    reason: Text


class UnknownClaim(Message, frozen=True, tag="unknown_claim"):
    """Answer to a claim whose unit did not become known in time."""

    unit: Unit


ToDecode = LinkWelcome | CudaWelcome | LinkRefused | Offer | Pages | Revoke | UnknownClaim

to_router_decoder = msgspec.msgpack.Decoder(ToRouter)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)
to_prefill_decoder = msgspec.msgpack.Decoder(ToPrefill)
to_decode_decoder = msgspec.msgpack.Decoder(ToDecode)

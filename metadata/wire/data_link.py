"""Messages of a data link, on which a decode node pulls pages: it says hello to a prefill node, which welcomes or
refuses it, and claims tickets. Nodes that borrow cached pages do the same. messages.py has the rules of all messages.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from .node_info import MAX_POOLS, Address, DevicePools, HandoffSchema, HostMemory
from .protocol import Message, Since
from .request import MAX_CONTEXT, Count, Digest, Ids, Index, Name, Text, Unit, Units

MIN_LEASE_S = 0.05
DATA_FRAME_BYTES = 64 << 20
MAX_RANKS = 256

RankIndex = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
RankCount = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Generations = Annotated[bytes, Meta(max_length=8 * MAX_CONTEXT)]  # int64 little-endian
SealingKey = Annotated[bytes, Meta(min_length=32, max_length=32)]


class LinkHello(Message, frozen=True, tag="link_hello"):
    """The decode node opens the link. `transports` are those that it can use, best first. `inbox` names the place where
    the node receives file descriptors (handoff/descriptor_inbox.py); empty if it needs none. Two nodes can share memory
    if the inbox is in the prefill node's reach. Before protocol 8, and without an inbox, they can if their `host` is
    equal."""

    node_id: Name
    epoch: Digest
    layout: HandoffSchema
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    transports: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=8)]
    host: Digest
    protocol: Annotated[Index, Since(6)] = 0  # the two nodes address each other in it; 0: the decode node is older
    inbox: Annotated[str, Meta(pattern=r"^(baton-[0-9a-f]{32})?$", max_length=38), Since(6)] = ""


class RankHello(LinkHello, frozen=True, tag="rank_hello", kw_only=True):
    """Rank `rank` of a decode node of `size` ranks opens a link to rank `source_rank` of a prefill node of
    `source_size`. The link is for pages alone: rank 0 of the decode node holds the tickets, on a link of its own."""

    since: ClassVar[int] = 6

    rank: RankIndex
    size: RankCount
    source_rank: RankIndex
    source_size: RankCount

    def __post_init__(self) -> None:
        if self.rank >= self.size or self.source_rank >= self.source_size:
            raise ValueError(
                f"rank {self.rank} of {self.size} asks rank {self.source_rank} of {self.source_size}; ranks count from "
                "0, so each must be less than the number of ranks of its node"
            )


class LinkWelcome(Message, frozen=True, tag="link_welcome"):
    """The link is open. If `transport` is `local`, the pools are /proc/PID/fd/FD of the prefill node, one fd per pool,
    with sizes in bytes. With a `token` their descriptors, or those of the generations, went to the decode node's
    inbox."""

    node_id: Name
    epoch: Digest
    transport: Name
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=1e4)]  # a shorter lease would be renewed all the time
    num_pages: Count = 0
    pid: Count = 0
    fds: Annotated[tuple[Count, ...], Meta(max_length=MAX_POOLS)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_POOLS)] = ()
    num_tails: Annotated[Count, Since(8)] = 0  # tail pages in its pools, numbered behind the others
    token: Annotated[bytes, Meta(max_length=16), Since(8)] = b""


class CudaWelcome(LinkWelcome, frozen=True, tag="cuda_welcome", kw_only=True):
    """LinkWelcome for `cuda`. `fds` and `sizes` name only the host mirror of the target's pool, which holds the
    generations."""

    since: ClassVar[int] = 6

    pools: DevicePools


class RankWelcome(LinkWelcome, frozen=True, tag="rank_welcome", kw_only=True):
    """LinkWelcome of rank 1 or above for `local`. `generations` is the target's pool of rank 0, which counts them."""

    since: ClassVar[int] = 6

    generations: HostMemory


class RanksWelcome(LinkWelcome, frozen=True, tag="ranks_welcome", kw_only=True):
    """LinkWelcome if either node has several ranks. Tickets go over this link. Pages go over links that the ranks of
    the decode node open (RankHello). `addresses` are those of the prefill node's ranks, by rank."""

    since: ClassVar[int] = 6

    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class NixlWelcome(LinkWelcome, frozen=True, tag="nixl_welcome", kw_only=True):
    """LinkWelcome for `nixl`: the agent that lets the decode node read the pools (metadata/handoff/nixl_agents.py).
    `pools` and `generations` are addresses in the prefill node; `sizes` are those of the pools."""

    since: ClassVar[int] = 8

    agent: Name
    metadata: Annotated[bytes, Meta(max_length=1 << 16)]  # NIXL's own format
    pools: Annotated[tuple[Count, ...], Meta(max_length=MAX_POOLS)]
    generations: Count
    kind: Literal["DRAM", "VRAM"] = "DRAM"  # of the pools' memory; the generations are in that of the host
    gpu: Index = 0  # of the pools, as the prefill node counts them


class PagePortWelcome(LinkWelcome, frozen=True, tag="page_port_welcome", kw_only=True):
    """LinkWelcome for transports whose pages come from the prefill node's page port (metadata/handoff/page_port.py).
    The decode node connects once, as `guest` with `password`. The keys are those of its pulls and of the pages."""

    since: ClassVar[int] = 8

    port: Annotated[int, Meta(ge=1, le=65535)]  # at the host of the data link's address
    guest: Digest
    password: Digest
    pull_key: SealingKey
    page_key: SealingKey


class LinkRefused(Message, frozen=True, tag="link_refused"):
    """The two nodes cannot hand over; the reason names both values."""

    reason: Text


# --- decode -> prefill, on the data link ---------------------------------------------------------------------------


class Claim(Message, frozen=True, tag="claim"):
    """The decode node has reserved pages for the unit and needs none of the first `num_cached_pages`. A claim of an
    unknown unit is parked for a lease."""

    unit: Unit
    num_cached_pages: Index = field(name="have")


class Borrow(Claim, frozen=True, tag="borrow", kw_only=True):
    """A node asks for pages that the other one has in its prefix cache: those of these tokens behind the first
    `num_cached_pages`. The lender compares all tokens. It offers what it has of them, with an empty row at the end, or
    answers Revoke."""

    since: ClassVar[int] = 8

    token_ids: Ids  # up to the last page, and the next tokens by which a page is keyed
    cache_salt: Digest

    def __post_init__(self) -> None:
        if len(self.token_ids) % 4:
            raise ValueError(f"{len(self.token_ids)} bytes are no int32 column: not a multiple of 4")


class Pull(Message, frozen=True, tag="pull"):
    """Request for these pages (indices in the ticket). Only transports that cannot read the pool themselves send it."""

    unit: Unit
    indices: Ids


class Renew(Message, frozen=True, tag="renew"):
    """Renewal of these tickets' leases."""

    units: Units


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


# --- prefill -> decode, on the data link ---------------------------------------------------------------------------


class Offer(Message, frozen=True, tag="offer"):
    """Pages that are computed and will not be written again, as columns. The last offer of a ticket carries the row."""

    unit: Unit
    num_pages: Index  # of the whole ticket
    indices: Ids  # index of each page in the ticket
    pages: Ids  # its number in the prefill node's pools
    generations: Generations  # how often the page had been allocated
    checksums: Annotated[bytes, Meta(max_length=DATA_FRAME_BYTES)]  # uint64 by (page, pool, layer, plane, head)
    row: Annotated[bytes, Meta(max_length=1 << 24)] | None = None
    row_checksum: Count = 0


class Pages(Message, frozen=True, tag="pages"):
    """Answer to Pull, followed by one raw frame. Each page holds the target's [num_layers, page_layer_bytes] and then
    the draft's (metadata/handoff/schema/kv_layout.py). On a link of a rank it holds [num_layers, bytes of the span] for
    each span that the two ranks share (metadata/handoff/ranks/shards.py)."""

    unit: Unit
    indices: Ids
    generations: Generations


class Revoke(Message, frozen=True, tag="revoke"):
    """The prefill node took the ticket back: `finished` if the first token ended the request, else because of an
    error."""

    unit: Unit
    finished: bool
    reason: Text


class UnknownClaim(Message, frozen=True, tag="unknown_claim"):
    """Answer to a claim whose unit did not become known in time."""

    unit: Unit


# --- all messages by direction -------------------------------------------------------------------------------------

ToPrefill = LinkHello | RankHello | Claim | Borrow | Pull | Renew | Ack | Drop | RevokeAck
OfLink = LinkWelcome | CudaWelcome | RankWelcome | RanksWelcome | NixlWelcome | PagePortWelcome | LinkRefused
ToDecode = OfLink | Offer | Pages | Revoke | UnknownClaim

to_prefill_decoder = msgspec.msgpack.Decoder(ToPrefill)
to_decode_decoder = msgspec.msgpack.Decoder(ToDecode)

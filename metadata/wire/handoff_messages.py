"""The messages of the data links, on which a decode node pulls pages from a prefill node (messages.py has the others).

decode -> prefill  ToPrefill   DEALER -> ROUTER
prefill -> decode  ToDecode    `Pages` is followed by a raw data frame
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from .node_info import DevicePools, HandoffSchema
from .protocol import Message, Since
from .request import MAX_CONTEXT, Count, Digest, Ids, Index, Name, Text, Unit

MAX_BATCH = 4096
MIN_LEASE_S = 0.05
DATA_FRAME_BYTES = 64 << 20

# --- decode -> prefill, on the data link ---------------------------------------------------------------------------


class LinkHello(Message, frozen=True, tag="link_hello"):
    """Decode opens the link. `transports`: those it can use, best first; equal `host`s can share memory. `inbox`: where
    it takes file descriptors (descriptors.py); empty if it has no use for any."""

    node_id: Name
    epoch: Digest
    layout: HandoffSchema
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    transports: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=8)]
    host: Digest
    protocol: Annotated[Index, Since(6)] = 0  # in which the two nodes address each other; 0: an older one
    inbox: Annotated[str, Meta(pattern=r"^(baton-[0-9a-f]{32})?$", max_length=38), Since(6)] = ""


class Claim(Message, frozen=True, tag="claim"):
    """Decode has reserved for the unit and holds its first `have` pages. Parked for 1 s when the unit is unknown."""

    unit: Unit
    have: Index


class Pull(Message, frozen=True, tag="pull"):
    """Send these pages (indices in the ticket). Only transports that cannot read the pool themselves ask."""

    unit: Unit
    indices: Ids


class Renew(Message, frozen=True, tag="renew"):
    """Keeps the leases of these tickets alive."""

    units: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]


class Ack(Message, frozen=True, tag="ack"):
    """All pages are in decode's own memory and checked: the ticket ends."""

    unit: Unit


class Drop(Message, frozen=True, tag="drop"):
    """Decode gives the claim up (cancelled, or failed): the ticket ends."""

    unit: Unit
    reason: Text


class RevokeAck(Message, frozen=True, tag="revoke_ack"):
    """Decode will not read the ticket's pages any more."""

    unit: Unit


ToPrefill = LinkHello | Claim | Pull | Renew | Ack | Drop | RevokeAck


# --- prefill -> decode, on the data link ---------------------------------------------------------------------------


class LinkWelcome(Message, frozen=True, tag="link_welcome"):
    """The link is open. For `local`, where the pools are: /proc/PID/fd/FD of prefill, one fd a pool, sizes in bytes."""

    node_id: Name
    epoch: Digest
    transport: Name
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_S, le=1e4)]  # a tiny one would be renewed all the time
    num_pages: Count = 0
    pid: Count = 0
    fds: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()


class CudaWelcome(LinkWelcome, frozen=True, tag="cuda_welcome", kw_only=True):
    """LinkWelcome for `cuda`. `fds`, `sizes`: of the host mirror of the target's pool alone, for its generations."""

    since: ClassVar[int] = 6

    pools: DevicePools


class LinkRefused(Message, frozen=True, tag="link_refused"):
    """The two nodes cannot hand over; the reason names both values."""

    reason: Text


class Offer(Message, frozen=True, tag="offer"):
    """Pages that are computed and will not be written again, as columns. The last offer of a ticket carries the row."""

    unit: Unit
    num_pages: Index  # of the whole ticket
    indices: Ids  # place of each page in the ticket
    pages: Ids  # its number in prefill's pool
    generations: Annotated[bytes, Meta(max_length=8 * MAX_CONTEXT)]  # int64: how often the page had been allocated
    checksums: Annotated[bytes, Meta(max_length=DATA_FRAME_BYTES)]  # uint64 by (page, pool, layer, K|V, kv head)
    row: Annotated[bytes, Meta(max_length=1 << 24)] | None = None
    row_checksum: Count = 0


class Pages(Message, frozen=True, tag="pages"):
    """Answer to Pull, followed by one raw frame: per page the target's
    [num_layers, 2, num_kv_heads, page_size, head_dim] and then the draft's."""

    unit: Unit
    indices: Ids
    generations: Annotated[bytes, Meta(max_length=8 * MAX_CONTEXT)]


class Revoke(Message, frozen=True, tag="revoke"):
    """The ticket is over: `finished` when the first token ended the request, else an error."""

    unit: Unit
    finished: bool
    reason: Text


class UnknownClaim(Message, frozen=True, tag="unknown_claim"):
    """The claim named a unit that did not become known in time."""

    unit: Unit


ToDecode = LinkWelcome | CudaWelcome | LinkRefused | Offer | Pages | Revoke | UnknownClaim

to_prefill_decoder = msgspec.msgpack.Decoder(ToPrefill)
to_decode_decoder = msgspec.msgpack.Decoder(ToDecode)

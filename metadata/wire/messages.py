"""Every message that crosses a process border, typed and bounded (DESIGN.md section 3).

Four directions, four unions, one typed decoder each; a message that does not belong to a direction is refused by the
decoder. Unknown fields are refused, in all but a Hello (hello.py). A new field or message means a new protocol version
and says so where it is declared (protocol.py): a peer of an older version is sent nothing that it does not know.
Token ids travel as little-endian int32 bytes, batches as columns. Nothing here imports torch.

    router -> node     ToNode      over the hub (DEALER -> ROUTER), each carrying the router's epoch
    node   -> router   ToRouter    over the hub
    decode -> prefill  ToPrefill   over the data link: handoff_messages.py
    prefill -> decode  ToDecode    over the data link
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
    """First words of a node, and again after HelloAgain or a new router epoch. A node that does not know yet what the
    router understands says it in the oldest protocol of its own; the router asks again for what it lacks."""

    role: Role
    node_id: Name
    epoch: Digest
    protocol_min: Index
    protocol_max: Index
    layout: HandoffSchema  # named so, not `schema`: it is compared as a wire layout, never by version
    target_fingerprint: Digest
    draft_fingerprint: Digest | None
    model: ModelCard
    capacity: Capacity
    data_address: Annotated[str, Meta(max_length=256)] = ""
    protocol: Annotated[Index, Since(6)] = 0  # in which this Hello is written

    @property
    def protocols(self) -> tuple[int, int]:
        """The protocols that the node knows, lowest and highest."""
        return self.protocol_min, self.protocol_max


class TokenizerFile(Message, frozen=True, tag="tokenizer"):
    """tokenizer.json, zlib-compressed, sent when Welcome asks for it."""

    digest: Digest
    data: Annotated[bytes, Meta(max_length=HUB_FRAME_BYTES)]


class Heartbeat(Message, frozen=True, tag="beat"):
    """Heartbeat from a thread of its own: the main loop's step, what it is doing and for how long."""

    step: Count
    phase: Name
    phase_age_s: Seconds
    phase_limit_s: Seconds
    load: Load
    stats: NodeStats


class Reserved(Message, frozen=True, tag="reserved"):
    """Decode's answer to Reserve and Compute. Choices not granted stay the router's; none means full (no failure)."""

    rid: Name
    attempt: Index
    granted: Choices
    load: Load


class CapacityFreed(Message, frozen=True, tag="room"):
    """Sent by a decode node that refused a reservation, when pages have come free."""

    load: Load


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """Prefill's part of a request is over: all tickets ended. Times in seconds."""

    rid: Name
    attempt: Index
    queue_s: Seconds
    compute_s: Seconds
    num_cached: Count
    load: Load
    times: PrefillTimes = PrefillTimes()
    prompt_logprobs: TokenLogprobsColumn = ()  # of the prompt's tokens after the first, when the request asked


class Admitted(Message, frozen=True, tag="admitted"):
    """Decode has the pages, checked, and the unit runs."""

    unit: Unit
    transfer_s: Seconds
    num_pages: Count
    num_bytes: Count
    have_pages: Count
    times: PullTimes = PullTimes()


class Tokens(Message, frozen=True, tag="tokens"):
    """The tokens of one step, as columns over `units`. Sparse columns are keyed by the unit's place in `units`."""

    units: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    firsts: Ids  # index of each unit's first token here, among its generated tokens
    counts: Ids  # how many tokens each unit has here
    ids: Ids  # all units' tokens, one after the other
    logprobs: Annotated[dict[Index, TokenLogprobsColumn], Meta(max_length=MAX_BATCH)] = {}
    ended: Annotated[dict[Index, Ended], Meta(max_length=MAX_BATCH)] = {}
    # prompt tokens found in prefill's cache, with the first tokens: a stop string may end the request right there
    num_cached: Count | None = None

    def __post_init__(self) -> None:
        if not len(self.firsts) == len(self.counts) == 4 * len(self.units) or len(self.ids) % 4:
            raise ValueError(f"columns do not fit {len(self.units)} units")


class Failed(Message, frozen=True, tag="failed"):
    """One unit ended in an error. `retryable` says whether another attempt elsewhere could succeed."""

    unit: Unit
    code: Name
    message: Text
    retryable: bool


class Cancelled(Message, frozen=True, tag="cancelled"):
    """Acknowledges Cancel: nothing of the request is held here any more."""

    rid: Name
    attempt: Index


class LedgerReport(Message, frozen=True, tag="ledger"):
    """Answer to Inspect and Flush: the books of one node."""

    query: Count
    pool: PoolLedger
    requests: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    tickets: Annotated[tuple[Unit, ...], Meta(max_length=MAX_BATCH)]
    load: Load
    stats: NodeStats


class Leaving(Message, frozen=True, tag="leaving"):
    """The node drains: it takes nothing new. `done` says that nothing is left and it goes now."""

    done: bool
    reason: Text = ""


OfNode = Hello | TokenizerFile | Heartbeat | LedgerReport | Leaving
OfWork = Reserved | CapacityFreed | PrefillDone | Admitted | Tokens | Failed | Cancelled
ToRouter = OfNode | OfWork


# --- router -> node -----------------------------------------------------------------------------------------------


class RouterMessage(Message, frozen=True):
    """Every router message carries the router's epoch."""

    router_epoch: Digest


class Dispatch(RouterMessage, frozen=True):
    """What gives a node work: some choices of one attempt at a request."""

    rid: Name
    attempt: Index
    choices: Choices
    request: GenerationRequest

    def __post_init__(self) -> None:
        if not 0 < len(set(self.choices)) == len(self.choices):
            raise ValueError(f"choices {self.choices} are none, or name one twice")


class Welcome(RouterMessage, frozen=True, tag="welcome"):
    """Answer to Hello: the node is in, and both speak `protocol` from now on. `notice`, if any, is a warning that the
    node logs: nobody to pair with yet."""

    protocol: Index
    need_tokenizer: bool
    notice: Text = ""


class Refusal(RouterMessage, frozen=True, tag="refusal"):
    """Answer to Hello: the node can be paired with nobody; `reason` names both values. The node logs it and exits."""

    reason: Text


class HelloAgain(RouterMessage, frozen=True, tag="hello_again"):
    """The router does not know this routing id, or wants its Hello in a newer protocol, of which both know."""

    protocol: Annotated[Index, Since(6)] = 0  # 0: the oldest that the node knows


class RouterBeat(RouterMessage, frozen=True, tag="router_beat"):
    """The router lives. No router message for 5 s: the node frees all of this router's requests."""


class Reserve(Dispatch, frozen=True, tag="reserve"):
    """Decode: take all pages of these choices' prompts (less those cached) plus two rounds, each all or nothing,
    in order; then claim the granted ones from `prefill`."""

    prefill: Peer


class Compute(Dispatch, frozen=True, tag="compute"):
    """Decode alone: take pages as for Reserve, compute what is known of these choices here, prompt and received tokens,
    and generate. Answered by Reserved; no Admitted follows."""

    since: ClassVar[int] = 6


class Prefill(Dispatch, frozen=True, tag="prefill"):
    """Prefill: compute the prompt once, sample each choice's first token, offer pages to `decode` (None: no ticket)."""

    decode: Peer | None


class Cancel(RouterMessage, frozen=True, tag="cancel"):
    """Stop these choices (None: all) of the request and free what they hold; answered by Cancelled."""

    rid: Name
    attempt: Index
    choices: Choices | None
    reason: Text


class Resend(RouterMessage, frozen=True, tag="resend"):
    """Send the unit's tokens again from this index; a gap has lasted 250 ms."""

    unit: Unit
    first: Index


class Inspect(RouterMessage, frozen=True, tag="inspect"):
    """Report the books."""

    query: Count


class Flush(RouterMessage, frozen=True, tag="flush"):
    """Empty the prefix cache of unreferenced pages, then report the books."""

    query: Count


class Drain(RouterMessage, frozen=True, tag="drain"):
    """Finish what you hold and leave, as after SIGTERM."""


OfRouter = Welcome | Refusal | HelloAgain | RouterBeat | Inspect | Flush | Drain
ToNode = OfRouter | Reserve | Compute | Prefill | Cancel | Resend

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
    num_cached_pages: Index = field(name="have")


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

to_router_decoder = msgspec.msgpack.Decoder(ToRouter)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)
to_prefill_decoder = msgspec.msgpack.Decoder(ToPrefill)
to_decode_decoder = msgspec.msgpack.Decoder(ToDecode)

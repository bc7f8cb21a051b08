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
from msgspec import Meta

# the data link's messages are to be had here as well
from .handoff_messages import DATA_FRAME_BYTES as DATA_FRAME_BYTES
from .handoff_messages import MAX_BATCH as MAX_BATCH
from .handoff_messages import Ack as Ack
from .handoff_messages import Claim as Claim
from .handoff_messages import CudaWelcome as CudaWelcome
from .handoff_messages import Drop as Drop
from .handoff_messages import LinkHello as LinkHello
from .handoff_messages import LinkRefused as LinkRefused
from .handoff_messages import LinkWelcome as LinkWelcome
from .handoff_messages import Offer as Offer
from .handoff_messages import Pages as Pages
from .handoff_messages import Pull as Pull
from .handoff_messages import Renew as Renew
from .handoff_messages import Revoke as Revoke
from .handoff_messages import RevokeAck as RevokeAck
from .handoff_messages import ToDecode as ToDecode
from .handoff_messages import ToPrefill as ToPrefill
from .handoff_messages import UnknownClaim as UnknownClaim
from .handoff_messages import to_decode_decoder as to_decode_decoder
from .handoff_messages import to_prefill_decoder as to_prefill_decoder
from .node_info import Capacity, HandoffSchema, Load, ModelCard, NodeStats, Peer, PoolLedger, Role
from .protocol import PROTOCOL_MAX as PROTOCOL_MAX
from .protocol import PROTOCOL_MIN as PROTOCOL_MIN
from .protocol import Message, Since
from .protocol import encode as encode
from .request import (
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

to_router_decoder = msgspec.msgpack.Decoder(ToRouter)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)

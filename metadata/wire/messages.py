"""Messages of a request between router and nodes, and the unions of all messages between them, typed and bounded.

    router -> node     ToNode      over the hub (ROUTER -> DEALER), each with the router's epoch
    node   -> router   ToRouter    over the hub (DEALER -> ROUTER)
    decode -> prefill  ToPrefill   over the data link (data_link.py), on which a decode node pulls pages
    prefill -> decode  ToDecode    over the data link; `Pages` is followed by a raw data frame

Messages about a node itself are declared in membership.py. Each direction has one union and one typed decoder, so a
message of another direction is refused. Unknown fields are refused too, except in a Hello (frames.py). A new field or
message needs a new protocol version and names it where it is declared (protocol.py), so that an older peer never gets
what it does not know. Token ids travel as little-endian int32 bytes, batches as columns. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, field

from .membership import (
    CachedPages,
    CanaryTold,
    Cordon,
    Drain,
    Flush,
    ForgetSalts,
    HandedOn,
    HandOn,
    Heartbeat,
    Hello,
    HelloAgain,
    Inspect,
    Keep,
    Leaving,
    LedgerReport,
    Proven,
    Refusal,
    RouterHeartbeat,
    RouterMessage,
    TellCanary,
    TellPages,
    TokenizerFile,
    Welcome,
)
from .node_info import Lender, Load, Peer
from .protocol import Message, Since
from .request import (
    MAX_BATCH,
    MAX_CONTEXT,
    Choices,
    Count,
    Ended,
    GenerationRequest,
    Ids,
    Index,
    Name,
    PrefillTimes,
    PullTimes,
    Seconds,
    Text,
    TokenLogprobsColumn,
    Unit,
    Units,
)

# --- router -> node -----------------------------------------------------------------------------------------------


class Dispatch(RouterMessage, frozen=True):
    """Base of messages that give a node work: some choices of one attempt at a request."""

    rid: Name
    attempt: Index
    choices: Choices
    request: GenerationRequest

    def __post_init__(self) -> None:
        if not 0 < len(set(self.choices)) == len(self.choices):
            raise ValueError(f"choices {self.choices} are empty or name a choice twice")


class Reserve(Dispatch, frozen=True, tag="reserve"):
    """To a decode node: take all pages of these choices' prompts (less the cached ones) plus two rounds, all or nothing
    per choice, in order. Then claim the granted choices from `prefill`."""

    prefill: Peer
    waited_s: Annotated[Seconds, Since(8)] = 0.0  # since the request came to the router


class Compute(Dispatch, frozen=True, tag="compute"):
    """To a decode node without a prefill node: take pages as for Reserve, compute the prompt and the received tokens
    here, and generate. The node answers Reserved; no Admitted follows. The first Tokens say how much was cached."""

    since: ClassVar[int] = 6

    waited_s: Annotated[Seconds, Since(8)] = 0.0  # as of Reserve
    lender: Annotated[Lender | None, Since(8)] = None  # another node that has pages of the prompt


class Prefill(Dispatch, frozen=True, tag="prefill"):
    """To a prefill node: compute the prompt once, sample each choice's first token, and offer the pages to `decode`
    (None: no ticket)."""

    decode: Peer | None
    lender: Annotated[Lender | None, Since(8)] = None  # another node that has pages of the prompt


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


# --- node -> router -----------------------------------------------------------------------------------------------


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
    """The prefill node's part of a request is over: all tickets have ended. Times in seconds.

    A decode node sends it for a local prompt (Compute) whose log-probabilities were asked for, when it has them all."""

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

    units: Units
    firsts: Ids  # for each unit: index of its first token here among its generated tokens
    counts: Ids  # for each unit: how many tokens it has here
    ids: Ids  # all units' tokens, one after the other
    logprobs: Annotated[dict[Index, TokenLogprobsColumn], Meta(max_length=MAX_BATCH)] = {}
    ended: Annotated[dict[Index, Ended], Meta(max_length=MAX_BATCH)] = {}
    # prompt tokens found in the prefix cache; sent with the first tokens, where a stop string may end the request
    num_cached: Count | None = None
    # of units whose request marks drafts: for each token a byte, 1 for an accepted draft
    drafts: Annotated[
        dict[Index, Annotated[bytes, Meta(max_length=MAX_CONTEXT)]], Meta(max_length=MAX_BATCH), Since(8)
    ] = {}

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


# --- all messages by direction -------------------------------------------------------------------------------------

OfNode = Hello | TokenizerFile | Heartbeat | LedgerReport | CachedPages | CanaryTold | Leaving
OfWork = Reserved | CapacityFreed | PrefillDone | Admitted | Tokens | Failed | Cancelled
ToRouter = OfNode | OfWork | HandOn
OfOperator = Inspect | Flush | Drain | Cordon | ForgetSalts
OfRouter = Welcome | Refusal | HelloAgain | RouterHeartbeat | Proven | TellCanary | TellPages | OfOperator
ToNode = OfRouter | Reserve | Compute | Prefill | Cancel | Resend | Keep | HandedOn

to_router_decoder = msgspec.msgpack.Decoder(ToRouter)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)

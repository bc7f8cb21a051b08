"""Messages between a scheduler and executors: *work* is what the scheduler asks for, *reports* are the answers. Both
are plain values. Imports no torch.

    scheduler --Work--> Executor --Report--> scheduler

A scheduler makes work of token ids, page numbers and slots. The executor of each rank does the same work on its own
device. State on a device between two works (slots, states of prompts) is named by numbers that the scheduler
chooses. Host decisions, such as the length of drafts, are made before the work is built and are named in it.

    work        does                                                        report
    Chunk       computes prompt tokens, and their log-probabilities         Scores
    Tails       samples first tokens, and drafts after them                 FirstTokens, then HandoffRows
    LoadSlot    gives a slot to a sequence                                  -
    Recompute   computes tokens of sequences that have a slot, the
                drafter's state after local prompts, and the
                log-probabilities of their tokens                           Scores, if tokens are scored
    CatchUp     lets the drafter see rows that rounds left out              -
    Round       drafts, verifies, accepts; does a Recompute beside it       RoundTokens
    Forget      frees what is kept of a prompt                              -
    WarmUp      compiles and captures what other work needs                 -
    CopyPages   copies pages within every pool                              -
    StorePages  copies pages from every pool to the host tier               -
    LoadPages   copies pages from there into every pool                     -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..metadata.wire.request import SamplingParams, TokenLogprobs
from .pace.draft_length import DraftShape
from .sampling.state import Needs, SamplingState


@dataclass(frozen=True, slots=True)
class BatchRow:
    """New tokens of one sequence of a forward.

    `pages` must cover position + len(input_ids) tokens; more is fine. `tail` has the tail page of each page of tokens,
    if the model has such pages; those that no new token sees may be any. If it is empty, padding is written. Logits are
    wanted for the last `num_logits` of the new tokens. The first `num_scored` of them score the token that follows
    them.
    """

    input_ids: Sequence[int]
    position: int  # of the first new token: as many tokens have KV in the pages
    pages: Sequence[int]
    num_logits: int = 1
    num_scored: int = 0
    tail: Sequence[int] | None = None


# --- rounds: what a decode node asks for ---

MAX_MISSED = 64  # rows that a drafter can catch up on: the device keeps so many for each slot


@dataclass(frozen=True, slots=True)
class LoadSlot:
    """The state of a sequence for a slot, from which rounds go on.

    When the sequence's first round begins, all its tokens but the last have KV. The drafter's state comes from `row`,
    the metadata row of a handoff in the bytes of the schema; without one it is zeros.
    """

    slot: int
    token_ids: Sequence[int]  # the whole sequence
    sampling: SamplingState  # after the last token
    row: bytes | None = None


@dataclass(frozen=True, slots=True)
class LocalRow:
    """A row of a `Recompute` that computes a part of a local prompt, of which the drafter has no state yet.

    The executor keeps the target's states of the prompt's last positions for the slot. After the row that has
    `sampling`, all tokens but the last have KV, and the slot gets the drafter's state.
    """

    row: int  # index into the rows
    slot: int
    sampling: SamplingState | None = None  # after the last token; None: more rows follow


@dataclass(frozen=True, slots=True)
class Recompute:
    """Tokens whose KV is computed again, or for the first time for a local prompt; in the drafter's pool too.

    Row i continues the sequence `token_ids[i]`. The slot of a sequence keeps its state, unless `local` says otherwise.
    """

    rows: Sequence[BatchRow]
    token_ids: Sequence[Sequence[int]]  # of each row, the whole sequence
    local: Sequence[LocalRow] = ()
    num_logprobs: Sequence[int] = ()  # of each row, as in `ChunkRow`; empty: no row has scored tokens

    @property
    def is_scored(self) -> bool:
        """Whether a row has scored tokens."""
        return any(row.num_scored for row in self.rows)


@dataclass(frozen=True, slots=True)
class TableChange:
    """New columns of a slot's block tables: `pages` from column `first` on, and the tail pages beside them if the model
    has such pages. Columns behind them hold no pages."""

    slot: int
    first: int
    pages: Sequence[int]
    tail: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Rows that rounds without drafts left out, for the drafter: the oldest of each sequence, as if a round had brought
    them. Each field has one entry per sequence."""

    slots: Sequence[int]
    num_pages: Sequence[int]
    changes: Sequence[TableChange]  # of any slots, since the work before
    firsts: Sequence[int]  # of the rows that the slot has kept, the first that the drafter lacks
    num_missed: Sequence[int]  # rows that the drafter lacks, at least one
    num_rows: int  # the most rows that this work brings to each
    needs: Needs


@dataclass(frozen=True, slots=True)
class Round:
    """One round of drafting and verifying. Each field of sequences has one entry per sequence.

    Pages must cover the tokens of a sequence, and `shape.num_slots` more if its limit is not 0 (in a chain: limit + 1
    more), counted from the most that the round before may have brought.

    `beside` is of other sequences, without scored tokens. Whether it is computed in the round's own forward or before
    it is the executor's choice.
    """

    slots: Sequence[int]
    num_pages: Sequence[int]
    changes: Sequence[TableChange]  # of any slots, since the work before
    limits: Sequence[int]  # drafts that may be accepted
    num_missed: Sequence[int]  # rows that the slot has kept, before one that this round may leave out
    shape: DraftShape
    needs: Needs  # of all sequences together
    num_logprobs: Sequence[int | None]
    proposed: Sequence[Sequence[int]] = ()  # drafts that were found on the host, num_steps of each
    beside: Recompute | None = None
    least_seqs: int = 0  # sequences of its bucket, at least: other ranks have as many


RoundWork = LoadSlot | Recompute | CatchUp | Round


def widened(work: Round, shape: DraftShape) -> Round:
    """Return the same round with drafts of `shape`, of which each sequence accepts no more than before."""
    if work.shape == shape:
        return work
    num_more = shape.num_steps - work.shape.num_steps
    return replace(
        work,
        shape=shape,
        limits=[min(limit, work.shape.num_steps) for limit in work.limits],
        proposed=[[*drafts, *[drafts[-1]] * num_more] for drafts in work.proposed],
    )


class Accepted(NamedTuple):
    """Result of a round for one sequence."""

    token_ids: list[int]  # t_0 .. t_a, at least one; fewer if the target's logits are not numbers
    logprobs: list[TokenLogprobs | None]
    num_accepted: int  # a: drafts that equal the target's tokens
    num_drafted: int  # at most K: drafts that the sequence could have accepted


class Masking(NamedTuple):
    """Costs of the masks of a round with grammars."""

    fill_s: float  # that the host took to fill the masks
    is_late: bool  # the device had nothing else to do before they were there; always on a CPU


@dataclass(frozen=True, slots=True)
class RoundTokens:
    """The report of a round: what it brought each sequence, in order. None: the sequence has left its slot."""

    rows: Sequence[Accepted | None]
    masking: Masking | None = field(default=None, compare=False)  # None: no sequence has a grammar


def catch_up_sizes(shape: DraftShape) -> tuple[int, int]:
    """Return the numbers of rows that a `CatchUp` may have: one, after a round that only measured, or as many as a
    round of `shape` brings at most."""
    return 1, shape.num_steps + 1


# --- prompts: what a prefill node asks for ---

_NO_NUMBERS = "the model's logits at position {position} are not numbers; try another dtype, or check the weights"
_NO_WAY_ON = (
    "nothing can follow at position {position}: the grammar takes too much work, or llguidance cannot use the model's "
    "tokenizer, or the logits are not numbers; simplify the grammar, or see the node's log"
)


def no_token(position: int, params: SamplingParams) -> str:
    """Return why no token was sampled at a position."""
    return (_NO_NUMBERS if params.grammar is None else _NO_WAY_ON).format(position=position)


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """The next tokens of one prompt.

    The executor keeps states of the prompt's last positions under `key` until the prompt's Tail is submitted or the key
    is forgotten.
    """

    key: int  # names the prompt on the device
    token_ids: Sequence[int]  # the whole prompt
    row: BatchRow  # its new tokens
    num_logprobs: int = 0  # likeliest tokens that are reported with each score


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copies of pages within every pool: page sources[i] into page targets[i], in this order."""

    sources: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class StorePages:
    """A call of `PageCopies.store` (engine/tiers/host_tier.py)."""

    pages: Sequence[int]
    slots: Sequence[int]
    is_ahead: bool
    awaits_ahead: bool  # after a call of `await_ahead`; there may be no pages then


@dataclass(frozen=True, slots=True)
class ShareSlots:
    """The rank reports where its slots lie (engine/ranks/rank_copies.py), and counts the copies that it does from now
    on."""


@dataclass(frozen=True, slots=True)
class LoadPages:
    """A call of `PageCopies.load`."""

    slots: Sequence[int]
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """A prompt whose last token is in the chunk, and its choices: each samples its own first token.

    `copies` gives the choices after the first one their own copies of the pages that a first token changes, tail pages
    included.
    """

    row: int  # index into the chunk's rows
    states: Sequence[SamplingState]  # of each choice, before its first token
    block_tables: Sequence[Sequence[int]]  # of each choice
    copies: CopyPages
    is_handed_over: bool  # whether a decode node continues: then the drafter works, and metadata rows are reported
    num_cached: int  # prompt tokens found in the prefix cache, for the metadata rows
    tail_tables: Sequence[Sequence[int] | None] = ()  # of each choice, as of `BatchRow`; empty: there are no such pages


@dataclass(frozen=True, slots=True)
class Tails:
    """Prompts whose first tokens are sampled in one pass, with one row of logits for each choice."""

    tails: Sequence[Tail]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The prompt tokens of one step, and the prompts that end in it."""

    rows: Sequence[ChunkRow]
    tails: Sequence[Tails]

    @property
    def num_tokens(self) -> int:
        return sum(len(each.row.input_ids) for each in self.rows)


@dataclass(frozen=True, slots=True)
class Forget:
    """A prompt of which nothing more is computed."""

    key: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The first work of a rank. `expects_prompts`: as of `Executor.warm_up`."""

    expects_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """The report of a chunk, or of a `Recompute`, whose KV is computed.

    `logprobs` has, for each row of the work, the log-probabilities of its scored tokens. The times are monotonic
    seconds: when the work was begun, and when the host saw that it was computed.
    """

    begun: float
    computed: float
    logprobs: Sequence[Sequence[TokenLogprobs]]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of one prompt's choices, in order. None: the logits of the choice are not numbers."""

    token_ids: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class HandoffRows:
    """The metadata rows of one prompt's choices, in order, with first tokens and drafts, in the bytes of the schema.

    None: the choice has no first token. A prompt that is not handed over has no rows. `no_memory` says why a prompt has
    none because the device had no memory for its drafts.
    """

    rows: Sequence[bytes | None]
    no_memory: str = ""

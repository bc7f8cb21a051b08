"""Kernels of attention to a window and entries (entries.py) that read and write pages, and the plan of a forward that
all layers give them. The host reads no tensor's value.

An entry of `rate` tokens lies at the slots of these tokens, so entries are a pool with shorter and wider pages: a page
of them has page_size / rate rows. Tokens of a sequence are a chain.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..attention.paged_plan import PagedPlan
from ..attention.picks import PagedSight, PickedRows
from ..operations import kernel
from ..products.norm import Norm


class TokenPlan(NamedTuple):
    """The place of each new token of a forward, and the pages of its sequence."""

    seqs: Tensor  # [num_tokens] int32, the sequence of each token
    slots: Tensor  # [num_tokens] int32, where each token lies; -1: a token without a place, which is padding
    firsts: Tensor  # [num_tokens] int32, the slot of the first new token of its sequence
    ends: Tensor  # [num_tokens] int32, the slot behind the last new token of its sequence
    table: Tensor  # [num_seqs, max_pages] int64, of kept pages
    tail_table: Tensor  # [num_seqs, max_pages] int64, of tail pages
    arrivals: Tensor  # [num_tokens] int32, programs of a kernel that are done; zeros at rest
    query_len: int | None = None  # new tokens of each sequence; None: they differ

    @classmethod
    def of(cls, plan: PagedPlan, tail_table: Tensor, num_tokens: int, page_size: int) -> Self:
        """Return the plan of a forward's tokens."""
        sight, lens, starts = PagedSight.of(plan, num_tokens), plan.seq_lens, plan.starts
        if starts is None or plan.query_len is not None:
            assert plan.query_len is not None, plan
            firsts = lens - plan.query_len
        else:
            firsts = lens - (starts[1:] - starts[:-1])
        slots = sight.ends - 1
        slots = slots.masked_fill(slots >= plan.block_table.shape[1] * page_size, -1)
        arrivals = torch.zeros_like(slots)
        firsts, ends = firsts[sight.seqs].int(), lens[sight.seqs].int()
        return cls(sight.seqs, slots, firsts, ends, plan.block_table, tail_table, arrivals, plan.query_len)


class HeadTurns(NamedTuple):
    """How heads are normed and rotated: the last 2 * num_pairs numbers of a head, as pairs of neighbours."""

    frequencies: Tensor  # [num_pairs] float32, radians per position
    eps: float | None = None  # of the norm of queries, which has no weights; None: they are not normed
    key_norm: Norm | None = None  # [width]


class EntryRows(NamedTuple):
    """The entries that the tokens of a forward see."""

    layer: Tensor  # [num_pages, 1, 1, page_size, part of an entry]
    rate: int  # tokens of an entry
    picked: PickedRows | None = None  # the rows of `layer.view(-1, ..)` that each token sees; None: all that it may


@kernel
def turn_heads_(
    q: Tensor, key: Tensor | None, turns: HeadTurns, keys_layer: Tensor | None, plan: TokenPlan
) -> None: ...


@kernel
def compress_paged(
    inputs: Tensor,
    bias: Tensor,
    norm: Norm,
    frequencies: Tensor,
    inputs_layer: Tensor,
    entries_layer: Tensor,
    plan: TokenPlan,
) -> None: ...


@kernel
def attend_entries(
    q: Tensor,
    keys_layer: Tensor,
    entries: EntryRows | None,
    sinks: Tensor,
    frequencies: Tensor,
    window: int,
    plan: TokenPlan,
) -> Tensor: ...

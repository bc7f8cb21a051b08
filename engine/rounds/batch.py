"""One forward's input: the tokens of several sequences laid end to end, and where their KV lives.

Prefill chunks, decode steps and mixtures of both look alike: each sequence brings `query_len` new tokens on top of what
its pages hold already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from ...kernels.attention.attention import AttentionPlan, Tree
from ..device import kind_of, to_device
from ..work import BatchRow


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Built once per forward and shared by all its layers."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    query_lens: tuple[int, ...]  # per sequence: new tokens; empty for graphs of chunks, where `starts` alone knows
    seq_lens: torch.Tensor  # [num_seqs] int64, tokens with KV after this forward
    block_table: torch.Tensor  # [num_seqs, max_pages] int64; short rows repeat page 0, the padding page
    logit_rows: torch.Tensor | None  # [num_logits] int64, rows of the states whose logits are wanted; None: all
    page_size: int
    tree: Tree | None = None  # of draft tokens; None: a token sees all before it
    starts: torch.Tensor | None = None  # [num_seqs + 1] int32, first token of each sequence; None: as many in each
    prefix_lens: tuple[
        int, ...
    ] = ()  # per sequence: tokens before the new ones; empty where the host does not know lengths: rounds, graphs
    tail_table: torch.Tensor | None = None  # likewise, of tail pages; None: of padding, or the model has none
    attention: Callable[..., Any] | None = None  # (config, rotary) -> what attends without pages, in training

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def of_tails(self) -> ForwardBatch:
        """Return the batch as layers with tail pages see it."""
        return replace(
            self, block_table=torch.zeros_like(self.block_table) if self.tail_table is None else self.tail_table
        )

    @classmethod
    def build(cls, rows: Sequence[BatchRow], page_size: int, device: torch.device | str) -> ForwardBatch:
        """Lay the rows end to end, in the order given. An idle rank has no rows."""
        query_lens = tuple(len(row.input_ids) for row in rows)
        seq_lens = tuple(row.position + query_len for row, query_len in zip(rows, query_lens, strict=True))
        num_pages = [-(-seq_len // page_size) for seq_len in seq_lens]
        starts = [0, *itertools.accumulate(query_lens)]
        table = np.zeros((len(rows), max(num_pages, default=0)), dtype=np.int64)
        tails = np.zeros_like(table) if any(row.tail for row in rows) else None
        ids = np.empty(starts[-1], dtype=np.int64)
        positions = np.empty(starts[-1], dtype=np.int64)
        logit_rows: list[int] = []
        for i, row in enumerate(rows):
            assert query_lens[i] > 0 and 0 <= row.num_logits <= query_lens[i], row
            assert len(row.pages) >= num_pages[i], f"{len(row.pages)} pages for {seq_lens[i]} tokens of row {i}"
            new = slice(starts[i], starts[i + 1])
            table[i, : num_pages[i]] = row.pages[: num_pages[i]]
            if tails is not None and row.tail:
                assert len(row.tail) >= num_pages[i], f"{len(row.tail)} tail pages for {seq_lens[i]} tokens of row {i}"
                tails[i, : num_pages[i]] = row.tail[: num_pages[i]]
            ids[new], positions[new] = row.input_ids, np.arange(row.position, seq_lens[i])
            logit_rows.extend(range(starts[i + 1] - row.num_logits, starts[i + 1]))
        numbers = [ids, positions, seq_lens, table, logit_rows, starts]
        on_device = upload(numbers if tails is None else [*numbers, tails], device)
        return cls(
            input_ids=on_device[0],
            positions=on_device[1],
            query_lens=query_lens,
            seq_lens=on_device[2],
            block_table=on_device[3],
            logit_rows=on_device[4],
            page_size=page_size,
            starts=on_device[5].int(),
            prefix_lens=tuple(row.position for row in rows),
            tail_table=None if tails is None else on_device[6],
        )

    @classmethod
    def uniform(
        cls,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        page_size: int,
        tree: Tree | None = None,
        tail_table: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Return the batch of sequences that have equally many new tokens, each in its last slots. All logits are
        wanted.

        `input_ids` and `positions` are [num_seqs, query_len] int64, `seq_lens` [num_seqs] int64. They lie on the device
        already."""
        num_seqs, query_len = input_ids.shape
        assert positions.shape == input_ids.shape and len(block_table) == len(seq_lens) == num_seqs, input_ids.shape
        return cls(
            input_ids=input_ids.reshape(-1),
            positions=positions.reshape(-1),
            query_lens=(query_len,) * num_seqs,
            seq_lens=seq_lens,
            block_table=block_table,
            logit_rows=None,
            page_size=page_size,
            tree=tree,
            tail_table=tail_table,
        )

    def attention_plan(
        self, num_kv_heads: int, windows: Sequence[int | None], dtype: torch.dtype, num_planes: int = 2
    ) -> AttentionPlan:
        """Indices and masks of a model with these kv heads and per-layer windows."""
        return AttentionPlan.build(
            self.block_table,
            self.query_lens,
            tuple(self.seq_lens.tolist()),
            page_size=self.page_size,
            num_kv_heads=num_kv_heads,
            windows=frozenset(windows),
            dtype=dtype,
            positions=self.positions,
            tree=self.tree,
            num_planes=num_planes,
        )


@dataclass(frozen=True, slots=True, eq=False)
class MixedBatch:
    """Two batches of one forward. Layers that work token by token see the tokens of both end to end. Attention sees two
    batches. A sequence may be in both: its token in the first batch then follows, and sees, those in the second."""

    first: ForwardBatch
    second: ForwardBatch
    input_ids: torch.Tensor  # [num_tokens] int64, of both

    def of_tails(self) -> MixedBatch:
        """Return the batches as layers with tail pages see them."""
        return MixedBatch(self.first.of_tails(), self.second.of_tails(), self.input_ids)

    @classmethod
    def of(cls, first: ForwardBatch, second: ForwardBatch) -> MixedBatch:
        return cls(first, second, torch.cat([first.input_ids, second.input_ids]))


class Computed(NamedTuple):
    """Result of a forward."""

    extend: torch.Tensor | None  # [num_tokens, width] for the drafter
    logits: torch.Tensor  # [sum of num_logits, vocab_size], of the model's dtype
    final: torch.Tensor | None = None  # [num_tokens, hidden_size] after the final norm; None: no token is scored


def upload(numbers: Sequence[ArrayLike], device: torch.device | str) -> list[torch.Tensor]:
    """Each as an int64 tensor of its shape, by one copy."""
    arrays = [np.asarray(each, dtype=np.int64) for each in numbers]
    if not kind_of(torch.device(device)).is_apart:
        return [torch.from_numpy(each) for each in arrays]
    offsets = aligned([each.size for each in arrays])
    joined = np.zeros(offsets[-1], dtype=np.int64)
    for offset, each in zip(offsets, arrays, strict=False):
        joined[offset : offset + each.size] = each.ravel()
    block = to_device(torch.from_numpy(joined), device)
    return [block[offset : offset + each.size].view(each.shape) for offset, each in zip(offsets, arrays, strict=False)]


def aligned(sizes: Sequence[int]) -> list[int]:
    """Return where arrays of int64 of these sizes begin in one block, and the block's end, in numbers of int64. Each
    begins at a multiple of 16 bytes: kernels are compiled anew for other pointers, which would happen in service."""
    return list(itertools.accumulate((size + size % 2 for size in sizes), initial=0))

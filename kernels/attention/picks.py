"""Sparse attention (DSA, DeepSeek-V3.2): an indexer scores the tokens that a token sees, and the best are attended to.

    score(t, j) = sum over heads h of w[t, h] * relu(q[t, h] . k[j])       float32, heads in order

A token takes the `num_picks` slots of the best scores among those that it sees; of equal scores, those of the lowest
slots. It takes all if it sees no more. Attention reads them in the order of their slots. So a choice does not depend on
the batch, on the division of a prompt into chunks, or on how many slots a table has room for.

Index keys are a pool of their own, with the pages of the latents: `keys` [num_pages, 1, 1, page_size, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from ..operations import Operation, kernel
from .attention import Tree
from .paged_plan import PagedPlan


class Sight(NamedTuple):
    """The slots that each new token of a forward sees, before any choice."""

    seqs: torch.Tensor  # [num_tokens] int64, the sequence of each token
    slots: torch.Tensor  # [num_tokens] int64, where each token lies
    seen: torch.Tensor  # [num_tokens, num_slots] bool
    block_table: torch.Tensor  # [num_seqs, max_pages] int64

    @classmethod
    def of(
        cls, block_table: torch.Tensor, query_lens: Sequence[int], seq_lens: torch.Tensor, tree: Tree | None = None
    ) -> Self:
        """Return the sight of a forward in which sequence i has `query_lens[i]` new tokens, in its last slots.
        `seq_lens` is [num_seqs] int64."""
        lens, device = torch.tensor(query_lens, device=seq_lens.device), seq_lens.device
        seqs = torch.arange(len(lens), device=device).repeat_interleave(lens)
        slots = torch.arange(len(seqs), device=device) + (seq_lens - lens.cumsum(0))[seqs]
        column = torch.arange(int(seq_lens.max()), device=device)
        if tree is None:
            return cls(seqs, slots, column <= slots.unsqueeze(1), block_table)
        ahead = column - tree.starts[seqs].unsqueeze(1)  # columns of the tree
        num_columns = tree.visible.shape[1]
        is_visible = tree.visible.gather(1, ahead.clamp(0, num_columns - 1))
        seen = (ahead < 0) | ((ahead < num_columns) & is_visible & (column < seq_lens[seqs].unsqueeze(1)))
        return cls(seqs, slots, seen, block_table)

    def rows(self, page_size: int) -> torch.Tensor:
        """Return the rows of the new tokens' keys in `keys.view(-1, head_dim)`, [num_tokens] int64."""
        pages = self.block_table[self.seqs, self.slots // page_size]
        return pages * page_size + self.slots % page_size


def index_scores_ref(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Return the scores of all slots, [num_tokens, num_slots] float32; -inf for a slot that a token does not see.

    `q` [num_tokens, num_heads, head_dim] is rotated, `weights` [num_tokens, num_heads] float32. The keys of the new
    tokens must be stored already. Keys that a token does not see have no influence, even if they are NaN."""
    num_slots = sight.seen.shape[1]
    out = torch.empty(sight.seen.shape, dtype=torch.float32, device=q.device)
    for seq in range(len(sight.block_table)):
        tokens = sight.seqs == seq
        k = keys[sight.block_table[seq]].flatten(0, 3)[:num_slots].float()  # [at most num_slots, head_dim]
        products = torch.einsum("thd,jd->thj", q[tokens].float(), k).relu_()
        own = torch.full((len(products), num_slots), float("-inf"), device=q.device)
        own[:, : len(k)] = torch.einsum("thj,th->tj", products, weights[tokens])
        out[tokens] = own
    return out.masked_fill_(~sight.seen, float("-inf"))


def pick(scores: torch.Tensor, num_picks: int) -> torch.Tensor:
    """Return the slots that each token takes, [num_tokens, min(num_picks, num_slots)] int32, in ascending order; -1
    behind the last one. `scores` is [num_tokens, num_slots] float32. A slot of score -inf or NaN is not taken."""
    num_tokens, num_slots = scores.shape
    num = min(num_picks, num_slots)
    taken = scores > float("-inf")
    if num < num_slots:
        scores = scores.masked_fill(~taken, float("-inf"))
        threshold = scores.topk(num, dim=1).values[:, -1:]
        above, level = scores > threshold, scores == threshold
        num_left = num - above.sum(1, keepdim=True)
        taken &= above | (level & (level.cumsum(1) <= num_left))
    columns = torch.where(taken, taken.cumsum(1) - 1, num)  # column `num` is dropped
    slots = torch.arange(num_slots, dtype=torch.int32, device=scores.device).expand(num_tokens, -1)
    picks = torch.full((num_tokens, num + 1), -1, dtype=torch.int32, device=scores.device)
    return picks.scatter_(1, columns, slots)[:, :num]


def picked(picks: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return picks [num_tokens, num] as [num_tokens, num_slots] bool: whether a token takes a slot."""
    out = torch.zeros(len(picks), num_slots + 1, dtype=torch.bool, device=picks.device)
    columns = torch.where(picks < 0, num_slots, picks).long()
    return out.scatter_(1, columns, True)[:, :num_slots]


index_scores = Operation("index_scores", index_scores_ref)


class PagedSight(NamedTuple):
    """The place of each token of a forward, for the kernels of a GPU. The tensors are computed on the device."""

    seqs: torch.Tensor  # [num_tokens] int32, the sequence of each token
    ends: torch.Tensor  # [num_tokens] int32: a token sees slots below its end, of a tree some of them

    @classmethod
    def of(cls, plan: PagedPlan, num_tokens: int) -> Self:
        """Return the sight of a forward's tokens."""
        tokens, seq_lens = torch.arange(num_tokens, device=plan.seq_lens.device), plan.seq_lens
        if plan.starts is None:
            assert plan.query_len is not None, plan
            seqs, stops = tokens // plan.query_len, (tokens // plan.query_len + 1) * plan.query_len
        else:
            seqs = torch.searchsorted(plan.starts[1:], tokens, right=True).clamp_(max=len(seq_lens) - 1)
            stops = plan.starts[1:][seqs]
        ends = seq_lens[seqs]
        if plan.visible is None:
            ends = ends - (stops - 1 - tokens)
        return cls(seqs.int(), ends.clamp(min=0).int())


class PickedRows(NamedTuple):
    """The rows of a pool, one per slot, that each token attends to, in the order of their slots."""

    rows: torch.Tensor  # [num_tokens, num_picks] int64
    counts: torch.Tensor  # [num_tokens] int64, of rows; what is behind them may be anything


@kernel
def paged_index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, plan: PagedPlan, sight: PagedSight, tokens: range
) -> torch.Tensor: ...


@kernel
def paged_picks(
    scores: torch.Tensor,
    plan: PagedPlan,
    sight: PagedSight,
    tokens: range,
    page_size: int,
    num_picks: int,
    out: PickedRows,
) -> None: ...

"""Kernels of the gated delta rule (delta_rule.py) that read and write pages, and the plan of a forward that all layers
give them. The host reads no tensor's value.

A layer has three pools, which engine/layers/delta_net.py describes: rows, updates and states. A prompt is computed in
whole blocks. A round has few new rows, so it reads the updates U of the rows before them in their block:

    o = exp(G) q S + sum over j of exp(G - G_j) (q . k_j) U_j, with S at the last edge

and likewise with k for the update of a new row. So no round solves the system of a whole block. A new row costs a
product with the state and one with each row since the edge.

A round may verify trees of drafts instead of chains. When the accepted path of a tree lies behind its root,
`pass_edges` stores the states after the blocks that the path may complete.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..operations import captures, kernel
from ..products.norm import Norm
from .delta_rule import DeltaWeights

MAX_ROUND_LEN = 16  # new rows of a sequence in a round; more are computed as prompts are


class DeltaInputs(NamedTuple):
    """The output of a layer's input projections, as views with neighbouring numbers side by side. `q`, `k` and `v` have
    equal strides."""

    q: Tensor  # [num_tokens, num_key_heads, key_dim]
    k: Tensor  # likewise
    v: Tensor  # [num_tokens, num_key_heads, num_shared * value_dim]
    gate: Tensor  # likewise
    b: Tensor  # [num_tokens, num_key_heads, num_shared]
    a: Tensor  # [num_tokens, num_key_heads, num_shared * decay_dim]

    @property
    def strides(self) -> tuple[int, int, int]:
        """How far tokens of q, k and v, of b and of a are apart."""
        return self.q.stride(0), self.b.stride(0), self.a.stride(0)


class DeltaPools(NamedTuple):
    """The pools of one layer, whose pages are tail pages."""

    rows: Tensor  # [num_pages, 1, num_key_heads, page_size, width of a row]
    updates: Tensor  # [num_pages, 1, num_key_heads, page_size, `DeltaWeights.update_width`] float32
    states: Tensor  # [num_pages, 1, num_key_heads, page_size, part of a state] float32 or bfloat16


class DeltaSizes(NamedTuple):
    """The sizes of the layers of a model."""

    num_shared: int  # value heads of a key head
    key_dim: int
    value_dim: int
    decay_dim: int
    block: int  # tokens of a block


class DeltaBlocks(NamedTuple):
    """The blocks that hold the new tokens of a prompt's batch."""

    tokens: Tensor  # [num_seqs] int32, the first new token of each sequence in the batch
    starts: Tensor  # [num_seqs] int32, the slot of the first new token
    stops: Tensor  # [num_seqs] int32, the slot behind the last one
    firsts: Tensor  # [num_seqs] int32, the first block of each sequence
    seqs: Tensor  # [num_blocks] int32, the sequence of each block; -1: no block
    edges: Tensor  # [num_blocks] int32, the slot of its first token

    @classmethod
    def of(cls, seq_lens: Tensor, starts: Tensor, num_tokens: int, num_slots: int, block: int) -> Self:
        """Return the blocks of sequences of `seq_lens` [num_seqs] int64, whose new tokens begin at `starts` [num_seqs +
        1] int32 in the batch. `num_slots`: of each sequence."""
        num_seqs, lens = len(seq_lens), starts[1:] - starts[:-1]
        first = (seq_lens - lens).clamp(min=0)
        stops = (first + lens).clamp(max=num_slots)
        counts = torch.where(stops > first, (stops + block - 1) // block - first // block, 0)
        ends = counts.cumsum(0)
        blocks = torch.arange(num_tokens // block + 2 * num_seqs, device=seq_lens.device)
        seqs = torch.searchsorted(ends, blocks, right=True)
        own = seqs.clamp(max=num_seqs - 1)
        edges = (first // block - ends + counts)[own] + blocks
        seqs = seqs.masked_fill(seqs == num_seqs, -1)
        return cls(starts[:-1], *(each.int() for each in (first, stops, ends - counts, seqs, edges * block)))


class DeltaPlan(NamedTuple):
    """The new tokens of each sequence of a batch."""

    table: Tensor  # [num_seqs, max_pages] int64, of tail pages
    seq_lens: Tensor  # [num_seqs] int64, after the forward
    query_len: int | None  # new tokens of every sequence, in its last slots; None: sequences differ
    block: int  # tokens of a block
    blocks: DeltaBlocks | None  # of prompts; None: a round
    paths: Tensor | None = None  # of trees, [num_tokens, MAX_ROUND_LEN] int32: the nodes from the root to each, then -1

    @classmethod
    def of(
        cls, table: Tensor, seq_lens: Tensor, starts: Tensor | None, num_tokens: int, page_size: int, block: int
    ) -> Self:
        """Return the plan of a batch. `starts` [num_seqs + 1] int32: the first token of each sequence, and the end;
        None: as many in each. Other arguments are as in the fields."""
        assert page_size % block == 0 and block & (block - 1) == 0, (page_size, block)
        query_len = num_tokens // len(seq_lens) if starts is None else None
        if query_len is not None and query_len <= MAX_ROUND_LEN:
            return cls(table, seq_lens, query_len, block, None)
        if query_len is not None:
            starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=seq_lens.device)
        assert starts is not None and starts.shape == (len(seq_lens) + 1,), starts
        blocks = DeltaBlocks.of(seq_lens, starts, num_tokens, table.shape[1] * page_size, block)
        return cls(table, seq_lens, query_len, block, blocks)

    @classmethod
    def of_trees(cls, table: Tensor, seq_lens: Tensor, visible: Tensor, block: int) -> Self:
        """Return the plan of a batch of trees, each in the last slots of its sequence. `visible` [num_tokens, >=
        nodes per tree] bool: a node sees itself and its ancestors, fewer than MAX_ROUND_LEN of them, which come before
        it."""
        num_nodes = len(visible) // len(seq_lens)
        sees = visible[:, :num_nodes]
        column = (sees.cumsum(1) - 1).masked_fill(~sees, MAX_ROUND_LEN)
        nodes = torch.arange(num_nodes, dtype=torch.int32, device=visible.device).expand_as(sees)
        paths = nodes.new_full((len(visible), MAX_ROUND_LEN + 1), -1).scatter_(1, column, nodes)
        return cls(table, seq_lens, num_nodes, block, None, paths[:, :MAX_ROUND_LEN].contiguous())

    @property
    def is_round(self) -> bool:
        """Whether sequences have few new tokens, and equally many."""
        return self.blocks is None


def have_kernels(device: torch.device, num_shared: int, decay_dim: int) -> bool:
    """Return whether kernels compute a delta rule on this device: on a GPU, and if states decay by channel, with one
    value head per key head."""
    return captures(device) and 1 in (num_shared, decay_dim)


@kernel
def delta_round(
    inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan, *, is_alone: bool
) -> Tensor: ...


@kernel
def delta_tree(inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan) -> Tensor: ...


@kernel
def pass_edges(
    updates: Tensor, states: Tensor, sizes: DeltaSizes, table: Tensor, starts: Tensor, num_new: int
) -> None: ...


@kernel
def delta_prompt(inputs: DeltaInputs, weights: DeltaWeights, pools: DeltaPools, plan: DeltaPlan) -> Tensor: ...


@kernel
def gate_heads(outputs: Tensor, gate: Tensor, norm: Norm, *, is_sigmoid: bool = False) -> Tensor: ...

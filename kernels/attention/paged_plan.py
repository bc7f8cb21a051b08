"""Kernels that read KV in its pages, and the plan of a forward that all layers give them.

`norm_rotate_store` puts the keys and values of new tokens into their pages. Then `decode_attention` or
`extend_attention` attends. The host reads no tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..operations import kernel
from .attention import Tree

T = TypeVar("T")

MAX_DECODE_QUERY_LEN = 64  # causal tokens per sequence; with more, tiles are full enough without splits


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlan:
    """Values that all layers of one forward share. Tensors are on the device. All else follows from shapes."""

    block_table: torch.Tensor  # [num_seqs, max_pages] int64
    seq_lens: torch.Tensor  # [num_seqs] int64, after this forward; 0 for padding is fine
    rows: torch.Tensor | None  # [num_tokens] int64, where new KV goes (`token_rows`); None: it is stored already
    query_len: int | None  # new tokens of every sequence; None: as `starts` says
    starts: torch.Tensor | None  # [num_seqs + 1] int32, first token of each sequence, and the end
    tree_starts: torch.Tensor | None  # [num_seqs] int64, as in `Tree`; None: causal
    visible: torch.Tensor | None  # [num_tokens, num_words] int64: bit i of word w is column 64 w + i of a `Tree`
    positions: torch.Tensor | None  # [num_tokens] int64 of the nodes of a tree, which windows count by
    _shares: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False)

    @classmethod
    def uniform(
        cls,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        page_size: int,
        tree: Tree | None = None,
        positions: torch.Tensor | None = None,
        *,
        is_stored: bool = False,
    ) -> PagedPlan:
        """Return the plan of a forward with `query_len` new tokens in each sequence, in its last slots.

        Arguments are as in the fields; `seq_lens` is [num_seqs] int64. A tree needs `positions` [num_tokens] int64. If
        the new KV `is_stored` already, no rows are computed for `norm_rotate_store`."""
        num_tokens = len(seq_lens) * query_len
        rows = None if is_stored else token_rows(block_table, seq_lens, num_tokens, page_size, query_len)
        if tree is not None:
            assert tree.starts.shape == seq_lens.shape and tree.starts.is_contiguous(), tree.starts.shape
            assert positions is not None and positions.shape == (num_tokens,), positions
            visible = pack(tree.visible, num_tokens)
            return cls(block_table, seq_lens, rows, query_len, None, tree.starts, visible, positions)
        starts = None
        if query_len > MAX_DECODE_QUERY_LEN:
            starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=seq_lens.device)
        return cls(block_table, seq_lens, rows, query_len, starts, None, None, None)

    @classmethod
    def ragged(
        cls, block_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, num_tokens: int, page_size: int
    ) -> PagedPlan:
        """Return the plan of a forward in which sequence i has the new tokens starts[i] .. starts[i + 1] - 1.

        `starts` is [num_seqs + 1] int32. Its last number is `num_tokens`."""
        rows = token_rows(block_table, seq_lens, num_tokens, page_size, None, starts)
        return cls(block_table, seq_lens, rows, None, starts, None, None, None)

    @property
    def new_rows(self) -> torch.Tensor:
        """`rows` of a forward with new KV."""
        assert self.rows is not None, "the KV is stored already"
        return self.rows

    def shares(self, make: Callable[..., T], *cut: int) -> T:
        """Return `make(plan, *cut)`, computed by the first layer that asks for it."""
        if cut not in self._shares:
            self._shares[cut] = make(self, *cut)
        return self._shares[cut]


@kernel
def token_rows(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    page_size: int,
    query_len: int | None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor: ...


@kernel
def pack(visible: torch.Tensor, num_tokens: int) -> torch.Tensor: ...


@kernel
def norm_rotate_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    writes_back: bool = False,
    values: torch.Tensor | None = None,
) -> torch.Tensor: ...


@kernel
def decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: PagedPlan,
    window: int | None = None,
    *,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor: ...


@kernel
def extend_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: PagedPlan,
    window: int | None = None,
    *,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor: ...

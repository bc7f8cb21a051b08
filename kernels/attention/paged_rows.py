"""A forward of few tokens per sequence that reads KV where it lies: norm, rotation, store and attention in one call.

For each new token, with the heads q, k, v that its row of `qkv` holds:

    q, k = rotate(norm(q)), rotate(norm(k))          norm.py (if the model norms heads), rotary.py
    page of the token's slot = k, v                  a page that begins is cleared first
    out = attention of q over its sequence           attention.py: causal, a window, a tree

If fewer numbers of a head are rotated than it has, they are its last ones. If pages have one plane, `qkv` has no v.
`attend_stored` is the last line alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..operations import Operation
from ..products.norm import rms_norm_ref
from ..products.rotary import rotary_ref
from .attention import Tree, paged_attention_ref

_THREADED_PRODUCTS = 4096  # queries times keys, the least work of a part that is worth a thread
_CAUSAL = np.empty((0, 0), dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """The inputs of `attend` that all layers of a forward share.

    Tokens of a sequence lie together, and sequences lie end to end. New token i of a sequence has slot seq_len -
    query_len + i. A token of a tree sees all slots before `tree_starts`. `visible` says which later slots it sees."""

    cos: np.ndarray  # [num_tokens, 1, rotary_dim] float32
    sin: np.ndarray  # [num_tokens, 1, rotary_dim] float32, signed as `apply_rotary_` takes it
    block_table: np.ndarray  # [num_seqs, max_pages] int64
    starts: np.ndarray  # [num_seqs + 1] int64, the first token of each sequence, and the end
    seq_lens: np.ndarray  # [num_seqs] int64, after this forward
    positions: np.ndarray  # [num_tokens] int64, for windows: a token's slot, or the position of a node of a tree
    tree_starts: np.ndarray  # [num_seqs] int64, the slot of the first column of `visible`
    visible: np.ndarray  # [num_tokens, num_columns] bool: a token sees slot tree_start + i; [0, 0]: all up to its own
    parts: tuple[slice, ...]  # the sequences of each thread, in order; each sequence is in one part

    @classmethod
    def build(
        cls,
        rotary: tuple[torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        query_lens: Sequence[int],
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree | None = None,
    ) -> PagedRows:
        """Return the inputs of a forward in which sequence i has `query_lens[i]` new tokens.

        All tensors are on the CPU. `rotary` is (cos, sin), and `seq_lens` is [num_seqs] int64. Shapes and dtypes of the
        others are those of the fields. The arrays share the tensors' memory where these are contiguous: numba compiles
        each layout anew, which takes seconds."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        assert positions.shape == (starts[-1],) and block_table.shape[0] == len(seq_lens) == len(query_lens)
        assert tree is None or (len(tree.visible) == starts[-1] and len(tree.starts) == len(seq_lens)), tree
        lens = seq_lens.contiguous().numpy()
        return cls(
            cos=rotary[0].numpy(),
            sin=rotary[1].numpy(),
            block_table=block_table.contiguous().numpy(),
            starts=starts,
            seq_lens=lens,
            positions=positions.contiguous().numpy(),
            tree_starts=lens if tree is None else tree.starts.contiguous().numpy(),
            visible=_CAUSAL if tree is None else tree.visible.contiguous().numpy(),
            parts=_parts(query_lens, lens),
        )

    def seeing(self, seen: torch.Tensor) -> PagedRows:
        """Return the inputs of the same forward whose tokens see `seen` [num_tokens, num_slots] bool."""
        return replace(self, tree_starts=np.zeros_like(self.seq_lens), visible=seen.contiguous().numpy())

    @property
    def query_lens(self) -> list[int]:
        """The number of new tokens of each sequence."""
        return np.diff(self.starts).tolist()

    @property
    def tree(self) -> Tree | None:
        """The tree, as views of these arrays; None if every token sees all slots up to its own."""
        if self.visible is _CAUSAL:
            return None
        return Tree(torch.from_numpy(self.tree_starts), torch.from_numpy(self.visible))


def attend_ref(
    qkv: torch.Tensor,
    kv: np.ndarray,
    layer: int,
    rows: PagedRows,
    window: int | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attended values [num_tokens, num_heads * head_dim], a new tensor; store the new tokens' keys and
    values.

    `qkv` [num_tokens, (num_heads + num_planes * num_kv_heads) * head_dim] float32 may be overwritten. `kv` [num_layers,
    num_pages, num_planes, num_kv_heads, page_size, head_dim] float32 is the pool. `norms` holds the weights of queries
    and keys, [head_dim] each; None: heads are not normed. `scale`: of scores; None: 1 / sqrt(head_dim). `sinks` are
    [num_heads] float32. Slots beyond a sequence's length have no influence."""
    num_planes, num_kv_heads, page_size, head_dim = kv.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - num_planes * num_kv_heads
    q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms[0], eps), rms_norm_ref(k, norms[1], eps)
    cos, sin = torch.from_numpy(rows.cos), torch.from_numpy(rows.sin)
    first = head_dim - cos.shape[2]  # that is rotated
    q, k = (torch.cat((x[..., :first], rotary_ref(x[..., first:], cos, sin)), dim=-1) for x in (q, k))
    pages, table = torch.from_numpy(kv[layer]), torch.from_numpy(rows.block_table)
    for seq, (start, stop) in enumerate(itertools.pairwise(rows.starts.tolist())):
        for token in range(start, stop):
            slot = int(rows.seq_lens[seq]) - stop + token
            page = pages[table[seq, slot // page_size]]  # [num_planes, num_kv_heads, page_size, head_dim]
            if slot % page_size == 0:
                page.zero_()
            for plane, new in zip(page, (k, v), strict=False):
                plane[:, slot % page_size] = new[token]
    lens, positions = rows.seq_lens.tolist(), torch.from_numpy(rows.positions)
    tree = rows.tree
    out = paged_attention_ref(q, pages, table, rows.query_lens, lens, window, positions, tree, scale, sinks=sinks)
    return out.flatten(1)


def attend_stored_ref(
    q: torch.Tensor, kv: torch.Tensor, layer: int, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Return the attention of one rotated query per sequence over KV that is stored already.

    `q` [num_seqs, num_heads, head_dim] -> the same shape, a new tensor. `kv` is the pool as in `attend_ref`;
    `block_table` [num_seqs, max_pages] and `seq_lens` [num_seqs] int64."""
    return paged_attention_ref(q, kv[layer], block_table, [1] * len(q), seq_lens.tolist(), None)


attend = Operation("attend", attend_ref)
attend_stored = Operation("attend_stored", attend_stored_ref)


def _parts(query_lens: Sequence[int], seq_lens: np.ndarray) -> tuple[slice, ...]:
    """Return runs of sequences with about equal work: one per thread of torch, or fewer if there is little work."""
    num_threads = min(torch.get_num_threads(), len(seq_lens))
    if num_threads == 1:
        return (slice(0, len(seq_lens)),)
    done = np.cumsum(np.multiply(query_lens, seq_lens))
    num_parts = max(1, min(num_threads, int(done[-1]) // _THREADED_PRODUCTS))
    stops = np.searchsorted(done, done[-1] * np.arange(1, num_parts) / num_parts) + 1
    bounds = sorted({0, *stops.tolist(), len(seq_lens)})
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(bounds))

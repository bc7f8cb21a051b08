"""A running batch's KV kept side by side, so that a decode step on a CPU reads it once instead of gathering it first.

Gathering pages copies all KV of the batch for every layer and token: read, written, read again. While the same
sequences decode together, step after step, only one position each is new. So the first such step gathers into dense
buffers, keys transposed (products with a few query rows stream them faster), and the next steps append to them. Pages
stay the truth: they are written as ever, and any other step forgets the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..kernels.attention import AttentionPlan, gather_index
from .batch import ForwardBatch

_MAX_BYTES = 512 << 20  # above it a batch is gathered at every step
_MIN_SPARE = 64  # positions that the buffers hold beyond the longest sequence, at least


@dataclass(slots=True, eq=False)
class DenseKv:
    """Owns the buffers of one model on one pool; float32 only."""

    num_appended: int = 0  # steps so far that gathered nothing
    _sequences: tuple[object, ...] = ()
    _seq_lens: tuple[int, ...] = ()
    _keys: list[torch.Tensor] = field(default_factory=list)  # per layer, [num_seqs * num_kv_heads, head_dim, capacity]
    _values: list[torch.Tensor] = field(default_factory=list)  # [num_seqs * num_kv_heads, capacity, head_dim]
    _pool: int = 0  # address of the pool that the buffers follow
    _gather: torch.Tensor | None = None  # this step fills the buffers from these blocks; None: it appends
    _append: tuple[torch.Tensor, torch.Tensor] | None = None  # where new keys [elements] and values [rows] go
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # per window, as `_mask` makes them

    def begin(self, batch: ForwardBatch, kv: torch.Tensor) -> bool:
        """Whether `attend` serves this forward: one new token a sequence, every sequence known by its identity."""
        follows = (
            len(batch.sequences) == len(self._sequences)
            and all(ours is theirs for ours, theirs in zip(batch.sequences, self._sequences, strict=True))
            and batch.seq_lens == tuple(seq_len + 1 for seq_len in self._seq_lens)
            and kv.data_ptr() == self._pool
            and max(batch.seq_lens) <= self._values[0].shape[1]
        )
        if not follows and not self._allocate(batch, kv):
            self._sequences, self._seq_lens = (), ()
            return False
        self._sequences, self._seq_lens = batch.sequences, batch.seq_lens
        self._masks = {}
        if follows:
            self.num_appended += 1
            self._gather = None
            self._append = self._append_index(kv.shape[3])
        return True

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        kv_new: torch.Tensor,
        kv_layer: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        """As `paged_attention` after `store_kv`: `q` [num_seqs, num_heads, head_dim] -> the same shape; `kv_new`
        [num_seqs, 2 * num_kv_heads, head_dim] is what was stored."""
        num_seqs, num_heads, head_dim = q.shape
        num_kv_heads = kv_layer.shape[2]
        keys, values = self._keys[layer], self._values[layer]
        if self._gather is None:
            assert self._append is not None
            keys.view(-1).index_copy_(0, self._append[0], kv_new[:, :num_kv_heads].reshape(-1))
            values.view(-1, head_dim).index_copy_(0, self._append[1], kv_new[:, num_kv_heads:].reshape(-1, head_dim))
        else:
            blocks = kv_layer.view(-1, kv_layer.shape[3] * head_dim).index_select(0, self._gather)
            gathered = blocks.view(2, num_seqs * num_kv_heads, -1, head_dim)
            keys.copy_(gathered[0].transpose(1, 2))
            values.copy_(gathered[1])
        kv_len = max(self._seq_lens)
        grouped = q.mul(head_dim**-0.5).view(num_seqs * num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.bmm(grouped, keys[:, :, :kv_len])
        mask = self._mask(plan, window, num_kv_heads)
        if mask is not None:
            scores.add_(mask)
        return torch.bmm(scores.softmax(-1), values[:, :kv_len]).view(num_seqs, num_heads, head_dim)

    def _mask(self, plan: AttentionPlan, window: int | None, num_kv_heads: int) -> torch.Tensor | None:
        """[num_seqs * num_kv_heads, 1, kv_len] additive."""
        if window not in self._masks:
            mask = plan.groups[0].masks[window]
            self._masks[window] = None if mask is None else mask.expand(-1, num_kv_heads, -1, -1).flatten(0, 1)
        return self._masks[window]

    def _allocate(self, batch: ForwardBatch, kv: torch.Tensor) -> bool:
        """Buffers for this batch with room to grow, and the blocks to fill them from."""
        num_layers, _, _, num_kv_heads, page_size, head_dim = kv.shape
        longest = max(batch.seq_lens)
        num_columns = -(-(longest + max(_MIN_SPARE, longest // 4)) // page_size)
        heads, capacity = len(batch.seq_lens) * num_kv_heads, num_columns * page_size
        num_bytes = 2 * num_layers * heads * capacity * head_dim * kv.itemsize
        usable = kv.dtype == torch.float32 and max(batch.query_lens) == 1 and None not in batch.sequences
        if not usable or num_bytes > _MAX_BYTES:
            return False
        if not self._values or self._values[0].shape != (heads, capacity, head_dim) or self._pool != kv.data_ptr():
            self._keys = [kv.new_empty((heads, head_dim, capacity)) for _ in range(num_layers)]
            self._values = [kv.new_empty((heads, capacity, head_dim)) for _ in range(num_layers)]
        self._pool = kv.data_ptr()
        self._gather = gather_index(batch.block_table, list(batch.seq_lens), page_size, num_kv_heads, num_columns)
        return True

    def _append_index(self, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads, capacity, head_dim = self._values[0].shape
        position = torch.tensor(self._seq_lens).repeat_interleave(num_kv_heads) - 1  # [num_seqs * num_kv_heads]
        key_row = torch.arange(heads * head_dim).view(heads, head_dim)
        return (key_row * capacity + position.unsqueeze(1)).flatten(), torch.arange(heads) * capacity + position

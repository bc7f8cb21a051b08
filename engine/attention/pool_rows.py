"""The rows of one forward's tokens in the pools that a model has beside that of its KV.

A family declares a pool by `ModelFamily.read_further`, which returns a `Further` (engine/checkpoint/model_config.py): a
name, the layers that store something, heads, width and dtype. All else follows. The node allocates the pool, hands it
over, caches its pages and moves them, together with those of KV. A layer reaches it through the context of its forward:

    rows = context.further
    rows.store("index", place, keys)            # each new token's row, at its own slot
    for seen in rows.sequences("index", place):  # what the tokens of each sequence see, in plain torch
        scores = queries[seen.tokens] @ seen.stored.T ...

`place` is the layer's index in the pool, which the family gives to the layer (`ModelConfig.place`). A row lies at the
slot that the token's KV has, or at the same place of its tail page (engine/state/tail_pages.py). If a tail page has
fewer rows than tokens (`Further.num_kept`), the row of slot s lies at s modulo the number of rows, and a page keeps
those of its last tokens. So the row of a rejected draft is written again before a layer reads it. Kernels read
`rows.pools` by the block tables of `rows.batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from ..rounds.batch import ForwardBatch, MixedBatch

T = TypeVar("T")


class SeenRows(NamedTuple):
    """The rows of one sequence that the new tokens of a batch see."""

    tokens: slice  # of the forward
    stored: torch.Tensor  # [seq_len, num_planes * num_heads * width], in the order of slots
    is_seen: torch.Tensor  # [query_len, seq_len] bool, a token sees itself


class NewRows(NamedTuple):
    """The new tokens of one sequence. They lie in its slots `start` to `stop`."""

    tokens: slice  # of the forward
    start: int
    stop: int
    pages: torch.Tensor  # [max_pages] int64, of the sequence
    sees: torch.Tensor | None  # [stop - start, stop - start] bool, of a tree of drafts; None: all before and itself

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)  # without slots, because it keeps the slots of its tokens
class PoolRows:
    """The pools beside that of KV, and where the tokens of a forward have their rows."""

    pools: Mapping[str, torch.Tensor]  # each [num_layers, num_pages, num_planes, num_heads, page_size, width]
    batches: tuple[ForwardBatch, ...]  # that share the forward, end to end; the first may see rows of the second
    _made: dict[str, Any] = field(default_factory=dict, init=False)  # by name, what `once` has made

    @classmethod
    def of(cls, batch: ForwardBatch | MixedBatch, pools: Mapping[str, torch.Tensor]) -> PoolRows:
        """Return the rows of a forward."""
        return cls(pools, (batch.first, batch.second) if isinstance(batch, MixedBatch) else (batch,))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.batches[0].page_size

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returned for the first layer that asked: a value that all layers of a forward share."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @cached_property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page of each token, and its row there, each [num_tokens] int64."""
        pages, rows = zip(*map(_slots, self.batches), strict=True)
        return torch.cat(pages), torch.cat(rows)

    def store(self, name: str, place: int, rows: torch.Tensor) -> None:
        """Store the rows of all tokens, [num_tokens, num_planes * num_heads * width], in layer `place` of a pool."""
        pool = self.pools[name][place]
        pages, slots = self.slots
        num_planes, num_heads, width = pool.shape[1], pool.shape[2], pool.shape[4]
        pool[pages, :, :, slots] = rows.view(-1, num_planes, num_heads, width).to(pool.dtype)

    def new_rows(self) -> Iterator[NewRows]:
        """Yield the new tokens of each sequence, without those behind its last page. Tokens of one sequence come in the
        order of their slots. The host reads lengths, so no graph can hold it."""
        stop = sum(batch.num_tokens for batch in self.batches)
        for batch in reversed(self.batches):  # the last one has the earlier tokens of a sequence that is in both
            first = stop = stop - batch.num_tokens
            for seq, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens.tolist(), strict=True)):
                start = max(0, seq_len - query_len)
                end = min(start + query_len, batch.block_table.shape[1] * batch.page_size)
                if end > start:
                    tokens = slice(first, first + end - start)
                    own = slice(tokens.start - stop, tokens.stop - stop)
                    sees = None if batch.tree is None else _seen(batch, seq, own, end)[:, start:]
                    yield NewRows(tokens, start, end, batch.block_table[seq], sees)
                first += query_len

    def read(self, name: str, place: int, pages: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Return the rows in slots `first` to `stop` of a sequence with these pages, in layer `place` of a pool of one
        plane: [stop - first, num_heads, width]."""
        pool = self.pools[name][place]
        slots = torch.arange(first, stop, device=pool.device)
        return pool[pages[slots // self.page_size], 0, :, slots % self.page_size % pool.shape[3]]

    def write(self, name: str, place: int, pages: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Write rows [num_rows, num_heads, width] into the slots from `first` on, as `read` returns them."""
        pool, page_size = self.pools[name][place], self.page_size
        slots, num_rows = torch.arange(first, first + len(rows), device=pool.device), pool.shape[3]
        if num_rows < page_size:  # of the tokens that share a row, the last one has it
            after = slots + num_rows
            is_last = (after >= first + len(rows)) | (after // page_size > slots // page_size)
            slots, rows = slots[is_last], rows[is_last]
        pool[pages[slots // page_size], 0, :, slots % page_size % num_rows] = rows

    def sequences(self, name: str, place: int) -> Iterator[SeenRows]:
        """Yield what the tokens of each sequence see in layer `place` of a pool. The rows of all new tokens must be
        stored. The host reads lengths, so no graph can hold it."""
        pool, start = self.pools[name][place], 0
        for batch in self.batches:
            first = 0
            for seq, seq_len in enumerate(batch.seq_lens.tolist()):
                query_len = batch.query_lens[seq]
                pages = pool[batch.block_table[seq]]  # [max_pages, num_planes, num_heads, page_size, width]
                stored = pages.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)[:seq_len]
                is_seen = _seen(batch, seq, slice(first, first + query_len), seq_len)
                yield SeenRows(slice(start + first, start + first + query_len), stored, is_seen)
                first += query_len
            start += batch.num_tokens


def _slots(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page of each token of a batch, and its row there. The host reads no tensor. Tokens behind the last
    sequence of a graph's batch are padding, and have slots in page 0."""
    num_seqs, num_tokens, device = len(batch.seq_lens), batch.num_tokens, batch.seq_lens.device
    if num_tokens == 0:
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return empty, empty
    token = torch.arange(num_tokens, device=device)
    if batch.starts is None:
        query_len = num_tokens // num_seqs
        seq = token // query_len
        stops = (seq + 1) * query_len
        is_padding = torch.zeros_like(token, dtype=torch.bool)
    else:
        seq = torch.searchsorted(batch.starts[1:], token.int(), right=True)
        is_padding = seq >= num_seqs
        seq = seq.clamp(max=num_seqs - 1)
        stops = batch.starts[1:].long()[seq]
    slot = (batch.seq_lens[seq] - stops + token).clamp(min=0)
    is_padding |= slot >= batch.block_table.shape[1] * batch.page_size
    slot = slot.masked_fill(is_padding, 0)
    pages = batch.block_table[seq, slot // batch.page_size].masked_fill(is_padding, 0)
    return pages, slot % batch.page_size


def _seen(batch: ForwardBatch, seq: int, tokens: slice, seq_len: int) -> torch.Tensor:
    """Return which slots the new tokens of a sequence see, [query_len, seq_len] bool. `tokens`: of the batch."""
    query_len, device = tokens.stop - tokens.start, batch.seq_lens.device
    if batch.tree is None:
        own = torch.arange(seq_len - query_len, seq_len, device=device)
        return torch.arange(seq_len, device=device) <= own.unsqueeze(1)
    start = int(batch.tree.starts[seq])
    before = torch.ones(query_len, start, dtype=torch.bool, device=device)
    return torch.cat([before, batch.tree.visible[tokens, : seq_len - start]], 1)

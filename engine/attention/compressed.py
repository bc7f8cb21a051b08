"""Attention of DeepSeek-V4 in one forward. A layer sees the last tokens, its window. It also sees entries, each
of which is made of several tokens (kernels/entries/entries.py).

Everything lies in pools with the page numbers of the sequence (pool_rows.py):

    KV              the key of each token, which is also its value, by layer; in tail pages
    *_INPUTS        kv and gate of each token, from which entries are made; in tail pages
    *_ENTRIES       one entry for `rate` tokens, at the slots of these tokens: each slot has a part of it

So the first pool of a target, which all models have, is one of entries (`ModelConfig.pool`). A draft, whose layers see
a window alone, has no tail pages.

A page is as long as a multiple of every rate, so a whole page never changes. All rows lie at the positions of their
tokens. So the token that takes the place of a rejected draft writes its rows again, and its entry if it ends a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.entries.entries import compress, rotate_pairs_
from ...kernels.products.norm import Norm
from ..checkpoint.model_config import WINDOW_POOL, ModelConfig
from ..rounds.batch import ForwardBatch, JointBatch
from ..state.model_pools import ModelPools
from .context import AttentionContext
from .pool_rows import NewRows, PoolRows

KV = "kv"  # name of the pool of keys among the rows


class EntryPool(NamedTuple):
    """Where the entries of a layer lie, and how they are made."""

    inputs: str  # name of the pool of kv and gate
    entries: str  # name of the pool of entries
    place: int  # of the layer in both
    bias: Tensor  # [rate, columns] float32
    norm: Norm  # [width]
    frequencies: Tensor  # [num_pairs] float32, radians per position

    @property
    def rate(self) -> int:
        """Tokens that an entry stands for."""
        return len(self.bias)

    @property
    def overlaps(self) -> bool:
        """Whether an entry is also made of the tokens of the window before its own."""
        return self.bias.shape[1] > len(self.norm.weight)


@dataclass(frozen=True, eq=False)  # without slots, because it keeps cosines and sines
class CompressedAttention(AttentionContext):
    """The rows of one forward's tokens in all pools, and the rotations of their positions."""

    kept: PoolRows
    tails: PoolRows  # of what only the next tokens read

    def __call__(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("a layer over a window and entries reads the rows")

    @property
    def further(self) -> PoolRows:
        return self.kept

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all tokens, [num_tokens] int64."""
        return torch.cat([batch.positions for batch in self.kept.batches])

    def turns(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all tokens, each [num_tokens, 1, num_pairs] float32."""
        return _turns(self.positions, frequencies)

    def sequences(self) -> Iterator[tuple[NewRows, NewRows]]:
        """Yield the new tokens of each sequence by its kept pages, and by its tail pages."""
        return zip(self.kept.new_rows(), self.tails.new_rows(), strict=True)

    def compress(self, pool: EntryPool, inputs: Tensor) -> None:
        """Store kv and gate of all tokens, [num_tokens, 2 * columns], and the entries of windows that end with one of
        them."""
        rows, rate = self.tails, pool.rate
        rows.store(pool.inputs, pool.place, inputs)
        for new, tail in self.sequences():
            first, end = new.start // rate, new.stop // rate  # windows
            if first == end:
                continue
            has_before = pool.overlaps and first > 0
            read = rows.read(pool.inputs, pool.place, tail.pages, (first - has_before) * rate, end * rate).flatten(1)
            made = compress(read, pool.bias, pool.norm, has_before=has_before).unsqueeze(1)
            windows = torch.arange(first, end, device=made.device)
            rotate_pairs_(made, *_turns(windows * rate, pool.frequencies))
            self._store_entries(pool, new, windows, made.squeeze(1))

    def entries(self, pool: EntryPool, new: NewRows) -> Tensor:
        """Return the entries that the last token of a sequence sees, [num_entries, width]."""
        windows = torch.arange(new.stop // pool.rate, device=new.pages.device)
        whole, places = self._entry_places(pool, new, windows)
        return whole[places][:, : len(pool.norm.weight)]

    def _store_entries(self, pool: EntryPool, new: NewRows, windows: Tensor, made: Tensor) -> None:
        whole, places = self._entry_places(pool, new, windows)
        whole[places, : made.shape[1]] = made.to(whole.dtype)

    def _entry_places(self, pool: EntryPool, new: NewRows, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return all entries of a layer, and the places of those of some windows among them."""
        layer, rate = self.kept.pools[pool.entries][pool.place], pool.rate
        page_size, width = layer.shape[3:]
        assert page_size % rate == 0, (page_size, rate)
        slots = windows * rate
        places = new.pages[slots // page_size] * (page_size // rate) + slots % page_size // rate
        return layer.view(-1, rate * width), places


def begin_compressed(config: ModelConfig, batch: ForwardBatch | JointBatch, pools: ModelPools) -> CompressedAttention:
    """Return the context of a forward over `pools`."""
    own, seen = {KV: pools.kv, **pools.further}, batch
    if config.has_tail:
        own, seen = {**own, config.further[0].name: pools.kv, KV: pools.further[WINDOW_POOL]}, batch.of_tails()
    keys = own[KV].shape
    assert keys[0] == config.num_layers and keys[5] == config.head_dim, keys
    return CompressedAttention(PoolRows.of(batch, own), PoolRows.of(seen, own))


def _turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = (positions.unsqueeze(1).float() * frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()

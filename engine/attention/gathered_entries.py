"""Attention to windows and entries in plain torch, one sequence after the other. The host reads lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.attention.picks import pick, picked
from ...kernels.entries.entries import attend_rows, compress, rotate_pairs_, window_sums
from ...kernels.products.norm import rms_norm
from .compressed import KV, CompressedAttention, EntryPool, WindowHeads
from .pool_rows import NewRows, PoolRows


class _Choice(NamedTuple):
    """The index of one layer, from which the tokens of each sequence choose."""

    keys: EntryPool
    q: Tensor  # [num_tokens, num_heads, head_dim], rotated
    weights: Tensor  # [num_tokens, num_heads] float32
    num_picks: int


@dataclass(frozen=True, eq=False)  # without slots, because it keeps positions
class GatheredEntries(CompressedAttention):
    """The rows of one forward's tokens in all pools, and the rotations of their positions."""

    kept: PoolRows
    tails: PoolRows  # of what only the next tokens read

    @property
    def further(self) -> PoolRows:
        return self.kept

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all tokens, [num_tokens] int64."""
        return torch.cat([batch.positions for batch in self.kept.batches])

    def sequences(self) -> Iterator[tuple[NewRows, NewRows]]:
        """Yield the new tokens of each sequence by its kept pages, and by its tail pages."""
        return zip(self.kept.new_rows(), self.tails.new_rows(), strict=True)

    def store(self, heads: WindowHeads, q: Tensor, key: Tensor) -> Tensor:
        turns = _turns(self.positions, heads.frequencies)
        key = rms_norm(key, *heads.key_norm).unsqueeze(1)
        q = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + heads.query_eps).to(q.dtype)
        rotate_pairs_(q, *turns)
        rotate_pairs_(key, *turns)
        self.tails.store(KV, heads.layer, key)
        return q

    def compress(self, pool: EntryPool, inputs: Tensor) -> None:
        make = self._made_of_two if pool.overlaps else self._made_of_one
        for new, tail in self.sequences():  # rows before the new ones are read before these are written over them
            made, rows = make(pool, new, tail, inputs[new.tokens].float())
            if len(made):
                windows = torch.arange(new.start // pool.rate, new.stop // pool.rate, device=made.device)
                made = made.unsqueeze(1)
                rotate_pairs_(made, *_turns(windows * pool.rate, pool.frequencies))
                self._store_entries(pool, new, windows, made.squeeze(1))
            self.tails.write(pool.inputs, pool.place, tail.pages, new.start, rows.unsqueeze(1))

    def _made_of_two(self, pool: EntryPool, new: NewRows, tail: NewRows, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of the windows that end with a new token of a sequence, before their rotation, and the
        rows that the new tokens leave. `own`: their inputs, [num_tokens, 2 * columns]."""
        first, end = new.start // pool.rate, new.stop // pool.rate  # windows
        if first == end:
            return own[:0], own
        begin = max(0, first - 1) * pool.rate
        before = self.tails.read(pool.inputs, pool.place, tail.pages, begin, new.start).flatten(1)
        read = torch.cat([before, own[: end * pool.rate - new.start]])
        return compress(read, pool.bias, pool.norm, has_before=first > 0), own

    def _made_of_one(self, pool: EntryPool, new: NewRows, tail: NewRows, own: Tensor) -> tuple[Tensor, Tensor]:
        """The same of windows that do not overlap. Tokens leave the sums of their windows."""
        before = None
        if new.start % pool.rate:
            read = self.tails.read(pool.inputs, pool.place, tail.pages, new.start - 1, new.start)
            before = read.flatten()
        sums = window_sums(own, pool.bias, new.start, before)
        ends = slice(-(new.start + 1) % pool.rate, None, pool.rate)  # tokens that end a window
        return rms_norm(sums[ends, : own.shape[1] // 2], *pool.norm), sums

    def choose(self, keys: EntryPool, q: Tensor, weights: Tensor, num_picks: int) -> _Choice:
        rotate_pairs_(q, *_turns(self.positions, keys.frequencies))
        return _Choice(keys, q, weights, num_picks)

    def attend(
        self, heads: WindowHeads, q: Tensor, pool: EntryPool | None = None, chosen: _Choice | None = None
    ) -> Tensor:
        attended = torch.zeros_like(q)
        for new, tail in self.sequences():
            attended[new.tokens] = self._attend(heads, q[new.tokens], new, tail, pool, chosen)
        cos, sin = _turns(self.positions, heads.frequencies)
        rotate_pairs_(attended, cos, -sin)
        return attended

    def _attend(
        self,
        heads: WindowHeads,
        q: Tensor,
        new: NewRows,
        tail: NewRows,
        pool: EntryPool | None,
        chosen: _Choice | None,
    ) -> Tensor:
        """Return the attention of the new tokens of one sequence, `q` [num_tokens, num_heads, head_dim]."""
        first = max(0, new.start - heads.window + 1)
        keys = self.tails.read(KV, heads.layer, tail.pages, first, new.stop).flatten(1)
        slots, own = (torch.arange(at, new.stop, device=q.device) for at in (first, new.start))
        behind = own.unsqueeze(1) - slots
        seen = (behind >= 0) & (behind < heads.window)
        if pool is not None and new.stop >= pool.rate:
            of_entries = _seen(pool, new, q.device)
            if chosen is not None:
                of_entries = self._chosen(chosen, new, of_entries)
            keys, seen = torch.cat([keys, self.entries(pool, new)]), torch.cat([seen, of_entries], 1)
        return attend_rows(q, keys, seen, heads.sinks, q.shape[2] ** -0.5)

    def _chosen(self, chosen: _Choice, new: NewRows, seen: Tensor) -> Tensor:
        """Return which of the `seen` entries of a sequence its new tokens take, a tensor of its shape."""
        q, weights = chosen.q[new.tokens], chosen.weights[new.tokens]
        keys = self.entries(chosen.keys, new).float()
        products = torch.einsum("thd,ed->the", q.float(), keys).relu_()
        scores = torch.einsum("the,th->te", products, weights).masked_fill(~seen, float("-inf"))
        return picked(pick(scores, chosen.num_picks), seen.shape[1])

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


def _seen(pool: EntryPool, new: NewRows, device: torch.device) -> Tensor:
    """Return which entries each new token of a sequence sees, [num_tokens, num_entries] bool."""
    ends = torch.arange(new.start + 1, new.stop + 1, device=device) // pool.rate
    return torch.arange(new.stop // pool.rate, device=device) < ends.unsqueeze(1)


def _turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = (positions.unsqueeze(1).float() * frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()

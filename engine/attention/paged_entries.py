"""Attention to windows and entries by kernels that read pages where they lie, on CUDA (kernels/entries/)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention.paged_plan import PagedPlan
from ...kernels.attention.picks import PagedSight, PickedRows
from ...kernels.entries.paged_entries import (
    EntryRows,
    HeadTurns,
    TokenPlan,
    attend_entries,
    compress_paged,
    turn_heads_,
)
from .compressed import KV, CompressedAttention, EntryPool, WindowHeads
from .paged import paged_plan, pick_rows
from .pool_rows import PoolRows

T = TypeVar("T")


class _Part(NamedTuple):
    """One batch of the forward."""

    tokens: slice  # of the forward
    plan: PagedPlan  # of kept pages
    places: TokenPlan
    sights: dict[int, PagedSight]  # by the tokens of an entry, as layers ask for them

    def sight(self, rate: int) -> PagedSight:
        """Return which entries of `rate` tokens the tokens see."""
        if rate not in self.sights:
            self.sights[rate] = PagedSight(self.places.seqs, (self.places.slots + 1) // rate)
        return self.sights[rate]


@dataclass(frozen=True, slots=True, eq=False)
class PagedEntries(CompressedAttention):
    """The attention of one forward of one or two batches. The first batch may see tokens of the second, so each step is
    done for the second one first."""

    kept: PoolRows
    pools: Mapping[str, Tensor]  # each [num_layers, num_pages, 1, 1, page_size, width]
    parts: tuple[_Part, ...]  # the last batch first
    made: dict[str, Any]  # by name, what `once` has made

    @classmethod
    def of(cls, kept: PoolRows, tails: PoolRows) -> PagedEntries:
        """Return the attention to pools by the tables of their batches."""
        parts: list[_Part] = []
        first = 0
        for batch, of_tails in zip(kept.batches, tails.batches, strict=True):
            plan, tokens = paged_plan(batch, is_stored=True), slice(first, first + batch.num_tokens)
            places = TokenPlan.of(plan, of_tails.block_table, batch.num_tokens, batch.page_size)
            parts.append(_Part(tokens, plan, places, {}))
            first = tokens.stop
        return cls(kept, kept.pools, tuple(reversed(parts)), {})

    @property
    def further(self) -> PoolRows:
        return self.kept

    def once(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def store(self, heads: WindowHeads, q: Tensor, key: Tensor) -> Tensor:
        keys, turns = self.pools[KV][heads.layer], HeadTurns(heads.frequencies, heads.query_eps, heads.key_norm)
        for tokens, _, places, _ in self.parts:
            turn_heads_(q[tokens], key[tokens], turns, keys, places)
        return q

    def compress(self, pool: EntryPool, inputs: Tensor) -> None:
        rows, entries = (self.pools[name][pool.place] for name in (pool.inputs, pool.entries))
        for tokens, _, places, _ in self.parts:
            compress_paged(inputs[tokens], pool.bias, pool.norm, pool.frequencies, rows, entries, places)

    def choose(self, keys: EntryPool, q: Tensor, weights: Tensor, num_picks: int) -> list[PickedRows]:
        rows = self._as_rows(keys)
        found: list[PickedRows] = []
        for part in self.parts:
            tokens, plan, places, _ = part
            turn_heads_(q[tokens], None, HeadTurns(keys.frequencies), None, places)
            own = F.pad(q[tokens], (0, rows.shape[4] - q.shape[2])) if rows.shape[4] > q.shape[2] else q[tokens]
            found.append(pick_rows(own, weights[tokens], rows, plan, part.sight(keys.rate), num_picks))
        return found

    def attend(
        self,
        heads: WindowHeads,
        q: Tensor,
        pool: EntryPool | None = None,
        chosen: list[PickedRows] | None = None,
    ) -> Tensor:
        keys = self.pools[KV][heads.layer]
        out: list[Tensor] = []
        for i, (tokens, _, places, _) in enumerate(self.parts):
            entries = None
            if pool is not None:
                layer = self.pools[pool.entries][pool.place]
                entries = EntryRows(layer, pool.rate, None if chosen is None else chosen[i])
            out.append(attend_entries(q[tokens], keys, entries, heads.sinks, heads.frequencies, heads.window, places))
        return out[0] if len(out) == 1 else torch.cat(out[::-1])

    def _as_rows(self, pool: EntryPool) -> Tensor:
        """Return the entries of a layer as a pool whose pages have one row per entry."""
        layer, rate = self.pools[pool.entries][pool.place], pool.rate
        page_size, part = layer.shape[3:]
        return layer.view(len(layer), 1, 1, page_size // rate, rate * part)

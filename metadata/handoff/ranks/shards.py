"""The heads that each rank of a decode node copies from each rank of a prefill node.

The two nodes may have unlike numbers of ranks. A rank's pool has the planes of the whole page, with its own heads
alone, in order (kv_layout.py: `Shard`, `KvLayout.part_of`). If there are fewer heads than ranks, several ranks hold the
same head. Such a head is copied from the first of them, whose checksum the offer has.

    prefill, 2 ranks   | 0: K0 K1 K2 V0 V1 V2 | 1: K3 K4 K5 V3 V4 V5 |
    decode, 3 ranks    | 0: K0 K1 V0 V1 | 1: K2 K3 V2 V3 | 2: K4 K5 V4 V5 |

Decode rank 1 copies K2 and V2 from prefill rank 0, and K3 and V3 from prefill rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..schema.kv_layout import KvLayout, Shard

ONE_SHARD = Shard(0, 1)


class BlockSource(NamedTuple):
    """The blocks of a page in one layer of one pool that come from prefill rank `rank`: block there[i] of its pool is
    block here[i] of ours."""

    rank: int
    there: tuple[int, ...]
    here: tuple[int, ...]


class ByteSpan(NamedTuple):
    """Neighbouring bytes of a page in one layer. They begin at byte `source` in the peer's pool and `target` in
    ours."""

    source: int
    target: int
    num_bytes: int


class PoolPart(NamedTuple):
    """The part of the pages of one pool that one prefill rank gives. `layout` is that of its own pool."""

    layout: KvLayout
    here: tuple[int, ...]  # the blocks of our pool, in a page of a layer
    spans: tuple[ByteSpan, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.layout.num_layers * sum(span.num_bytes for span in self.spans)


@dataclass(frozen=True)
class PagePart:
    """The part of each page that one prefill rank gives, pool by pool: target, then draft."""

    pools: tuple[PoolPart, ...]

    @staticmethod
    def whole(layouts: Sequence[KvLayout]) -> PagePart:
        """Return the part that is the whole page, of pools with these layouts."""
        return PagePart(tuple(_pool_part(layout, layout, _all_blocks(layout)) for layout in layouts))

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of all pools."""
        return sum(pool.page_bytes for pool in self.pools)


def block_sources(num_heads: Sequence[int], source_size: int, ours: Shard) -> tuple[BlockSource, ...]:
    """Return where rank `ours` of the decode node finds its blocks of a page, by rising rank of the prefill node, which
    has `source_size` ranks. `num_heads`: of each plane of the whole page. Every block of `ours` is listed once.

    Raises ConfigError as `Shard.heads`, if heads cannot be split over the ranks of either node."""
    found: dict[int, list[tuple[int, int]]] = {}
    first_here = 0
    first_there = [0] * source_size  # block of the plane's first head, by rank
    for plane_heads in num_heads:
        held = [Shard(rank, source_size).heads(plane_heads) for rank in range(source_size)]
        wanted = ours.heads(plane_heads)
        for head in wanted:
            rank = next(rank for rank, heads in enumerate(held) if head in heads)
            there = first_there[rank] + head - held[rank].start
            found.setdefault(rank, []).append((there, first_here + head - wanted.start))
        first_here += len(wanted)
        first_there = [first + len(heads) for first, heads in zip(first_there, held, strict=True)]
    return tuple(BlockSource(rank, *zip(*found[rank], strict=True)) for rank in sorted(found))


def page_parts(layouts: Sequence[KvLayout], source_size: int, ours: Shard) -> dict[int, PagePart]:
    """Return what each of the prefill node's `source_size` ranks gives to rank `ours`, by rank. A rank from which
    nothing comes is not listed. `layouts`: of the whole pages, target, then draft. Raises ConfigError as
    `block_sources`."""
    found = [
        {source.rank: source for source in block_sources(_num_heads(layout), source_size, ours)} for layout in layouts
    ]
    ranks = sorted({rank for sources in found for rank in sources})
    return {
        rank: PagePart(
            tuple(
                _pool_part(
                    layout.part_of(Shard(rank, source_size)),
                    layout.part_of(ours),
                    sources.get(rank, BlockSource(rank, (), ())),
                )
                for layout, sources in zip(layouts, found, strict=True)
            )
        )
        for rank in ranks
    }


def digest_columns(layouts: Sequence[KvLayout], shard: Shard) -> np.ndarray:
    """Return, for each checksum of the shard's own pages, its place among those of the whole page, int64 [sum of
    num_layers * blocks of the shard per layer]. `layouts`: of the whole pages."""
    columns: list[np.ndarray] = []
    first = 0
    for layout in layouts:
        layers = first + layout.blocks_per_layer * np.arange(layout.num_layers)
        columns.append((layers[:, None] + np.array(layout.blocks_of(shard))[None, :]).reshape(-1))
        first += layout.num_layers * layout.blocks_per_layer
    return np.concatenate(columns)


def blocks_here(part: PagePart, layouts: Sequence[KvLayout]) -> np.ndarray:
    """Return the places, among the checksums of one of our own pages, of the blocks that the part brings, int64.
    `layouts`: of our own pools."""
    places: list[np.ndarray] = []
    first = 0
    for pool, layout in zip(part.pools, layouts, strict=True):
        layers = first + layout.blocks_per_layer * np.arange(layout.num_layers)
        places.append((layers[:, None] + np.array(pool.here, dtype=np.int64)[None, :]).reshape(-1))
        first += layout.num_layers * layout.blocks_per_layer
    return np.concatenate(places)


def _num_heads(layout: KvLayout) -> list[int]:
    return [plane.num_heads for plane in layout.planes]


def _all_blocks(layout: KvLayout) -> BlockSource:
    blocks = tuple(range(layout.blocks_per_layer))
    return BlockSource(0, blocks, blocks)


def _pool_part(there: KvLayout, here: KvLayout, source: BlockSource) -> PoolPart:
    """Return the bytes of the blocks, as few spans as possible."""
    spans: list[ByteSpan] = []
    for block_there, block_here in zip(source.there, source.here, strict=True):
        (start, size), (target, size_here) = there.block_ranges[block_there], here.block_ranges[block_here]
        assert size == size_here, (source, size, size_here)
        last = spans[-1] if spans else None
        if last is not None and last.source + last.num_bytes == start and last.target + last.num_bytes == target:
            spans[-1] = last._replace(num_bytes=last.num_bytes + size)
        else:
            spans.append(ByteSpan(start, target, size))
    return PoolPart(there, source.here, tuple(spans))

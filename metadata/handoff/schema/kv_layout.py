"""The layout of a KV pool: where each head of each plane lies in a page. Imports no torch.

A pool has `num_pages` pages in each of `num_layers` layers. A page of a layer is a list of planes, one behind the
other: K and V, or one plane of latents. A plane is a list of blocks, one per head. A block holds the tokens of the
page for that head:

    page of a layer   | block K 0 | block K 1 | ... | block V 0 | block V 1 | ...
    block             | values [page_size, head_dim] of dtype | padding | extra [page_size, extra_bytes] | padding |

A block is the unit of a checksum, and of what one rank of a shard needs. `extra` holds bytes that belong to a token and
a head, such as the scale of its FP8 values. It begins, and the block ends, at a multiple of the layout's alignment, so
blocks follow each other without gaps. Pools of 16 and 32 bits have no extra bytes and no padding.

schema.py, memory.py, pages.py, the transports and the engine's pools ask this module; none of them counts heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from ...errors import ConfigError
from ...wire.node_info import FurtherPool, KvPlane, PoolLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8}


class Shard(NamedTuple):
    """The part of every page that rank `rank` of `size` ranks computes with."""

    rank: int
    size: int

    def heads(self, num_heads: int) -> range:
        """Return the heads of this rank: an equal share of them. If there are fewer heads than ranks, several ranks
        have the same head. Raises ConfigError if the heads cannot be shared out equally."""
        assert 0 <= self.rank < self.size, self
        if num_heads % self.size == 0:
            share = num_heads // self.size
            return range(self.rank * share, (self.rank + 1) * share)
        if self.size % num_heads == 0:
            head = self.rank * num_heads // self.size
            return range(head, head + 1)
        raise ConfigError(f"{num_heads} KV heads cannot be split over {self.size} ranks: use a divisor or a multiple")


class BlockRun(NamedTuple):
    """Neighbouring blocks of equal size in a page of a layer. They may belong to several planes."""

    first: int  # block
    num_blocks: int
    block_bytes: int
    offset: int  # of the first block in the page of a layer, bytes

    @property
    def end(self) -> int:
        """Offset behind the last block, bytes."""
        return self.offset + self.num_blocks * self.block_bytes


class PlaneView(NamedTuple):
    """One array within the pages of a pool, uint8 [num_layers, num_pages, page_layer_bytes]. Offset and strides are
    in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str  # a name of DTYPE_BYTES


@dataclass(frozen=True)  # without slots, because it keeps derived sizes: messages and pages ask for them
class KvLayout:
    """The layout of one pool. Its sizes are those of the whole model; `blocks_of` and `bytes_of` a shard are one rank's
    part."""

    num_layers: int
    page_size: int
    planes: tuple[KvPlane, ...]

    @staticmethod
    @lru_cache(64)
    def of(pool: PoolLayout | FurtherPool, page_size: int) -> KvLayout:
        """Return the layout of the pool that a schema describes."""
        return KvLayout(pool.num_layers, page_size, planes_of(pool))

    @cached_property
    def alignment(self) -> int:
        """Every block begins at a multiple of this many bytes: the largest alignment or element of a plane."""
        return max(max(plane.alignment, DTYPE_BYTES[plane.dtype]) for plane in self.planes)

    def block_bytes(self, plane: KvPlane) -> int:
        """Return the bytes of one block of this plane: one head of a page in one layer."""
        return self._extra_offset(plane) + self._aligned(self.page_size * plane.extra_bytes)

    @cached_property
    def page_layer_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return sum(plane.num_heads * self.block_bytes(plane) for plane in self.planes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.num_layers * self.page_layer_bytes

    @cached_property
    def blocks_per_layer(self) -> int:
        """Number of blocks, so of checksums, of one page in one layer."""
        return sum(plane.num_heads for plane in self.planes)

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        """All blocks of a page in one layer, in order, as few runs of equal blocks."""
        runs: list[BlockRun] = []
        first = offset = 0
        for plane in self.planes:
            run = BlockRun(first, plane.num_heads, self.block_bytes(plane), offset)
            first, offset = first + run.num_blocks, run.end
            if runs and runs[-1].block_bytes == run.block_bytes:
                run = runs.pop()
                run = run._replace(num_blocks=first - run.first)
            runs.append(run)
        return tuple(runs)

    @cached_property
    def block_ranges(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each block of a page in one layer, bytes, in order."""
        return tuple(
            (run.offset + block * run.block_bytes, run.block_bytes)
            for run in self.runs
            for block in range(run.num_blocks)
        )

    def part_of(self, shard: Shard) -> KvLayout:
        """Return the layout of the pool of one rank: the same planes with the heads of the shard alone. Raises
        ConfigError as `Shard.heads`."""
        planes = (msgspec.structs.replace(each, num_heads=len(shard.heads(each.num_heads))) for each in self.planes)
        return KvLayout(self.num_layers, self.page_size, tuple(planes))

    def stacked_shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of the values of a pool whose planes are alike, as one tensor: [num_layers, num_pages,
        num_planes, num_heads, page_size, head_dim]. Its blocks lie `block_bytes` apart. Raises ConfigError for a pool
        that is no such tensor."""
        plane = self.planes[0]
        alike = {(each.num_heads, each.head_dim, each.dtype, each.extra_bytes) for each in self.planes}
        if len(alike) > 1:
            raise ConfigError(f"planes {planes_words(self.planes)} are not one tensor of equal heads")
        return (self.num_layers, num_pages, len(self.planes), plane.num_heads, self.page_size, plane.head_dim)

    def values(self, plane: KvPlane, num_pages: int) -> PlaneView:
        """Return where the plane's values lie: [num_layers, num_pages, num_heads, page_size, head_dim] of its dtype."""
        return self._view(plane, num_pages, 0, plane.head_dim, plane.dtype)

    def extras(self, plane: KvPlane, num_pages: int) -> PlaneView:
        """Return where the plane's extra bytes lie: uint8 [num_layers, num_pages, num_heads, page_size,
        extra_bytes]."""
        return self._view(plane, num_pages, self._extra_offset(plane), plane.extra_bytes, "uint8")

    def blocks_of(self, shard: Shard) -> tuple[int, ...]:
        """Return the numbers of the blocks of a page in one layer that a shard needs. Raises ConfigError as
        `Shard.heads`."""
        blocks: list[int] = []
        first = 0
        for plane in self.planes:
            blocks += [first + head for head in shard.heads(plane.num_heads)]
            first += plane.num_heads
        return tuple(blocks)

    def bytes_of(self, shard: Shard) -> tuple[range, ...]:
        """Return the bytes of a page in one layer that a shard needs, one range per plane, in order. Raises ConfigError
        as `Shard.heads`."""
        ranges: list[range] = []
        for plane in self.planes:
            start, size, heads = self._offset(plane), self.block_bytes(plane), shard.heads(plane.num_heads)
            ranges.append(range(start + heads.start * size, start + heads.stop * size))
        return tuple(ranges)

    def _offset(self, plane: KvPlane) -> int:
        """Return the plane's offset in a page of a layer, bytes."""
        before = self.planes[: self.planes.index(plane)]
        return sum(each.num_heads * self.block_bytes(each) for each in before)

    def _extra_offset(self, plane: KvPlane) -> int:
        """Return the offset of the extra bytes in a block."""
        return self._aligned(self.page_size * plane.head_dim * DTYPE_BYTES[plane.dtype])

    def _aligned(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def _view(self, plane: KvPlane, num_pages: int, offset: int, width: int, dtype: str) -> PlaneView:
        item, page = DTYPE_BYTES[dtype], self.page_layer_bytes
        return PlaneView(
            shape=(self.num_layers, num_pages, plane.num_heads, self.page_size, width),
            strides=(num_pages * page, page, self.block_bytes(plane), width * item, item),
            offset=self._offset(plane) + offset,
            dtype=dtype,
        )


def planes_of(pool: PoolLayout | FurtherPool) -> tuple[KvPlane, ...]:
    """Return the planes of a pool. A pool that lists none has K and V of equal heads."""
    if isinstance(pool, FurtherPool) or pool.planes:
        return pool.planes
    names = ("k", "v")
    return tuple(KvPlane(name, num_heads=pool.num_kv_heads, head_dim=pool.head_dim, dtype=pool.dtype) for name in names)


def pool_of(
    num_layers: int,
    dtype: Literal["float32", "bfloat16", "float16"],
    planes: Sequence[KvPlane],
    further: Sequence[FurtherPool] = (),
    window: int = 0,
) -> PoolLayout:
    """Return the description of a pool with these planes. `dtype`: of the values as attention takes them. `further`:
    pools beside it. `window`: positions that layers read back, if the pool has tail pages.

    Planes that a pool has anyway are not listed, so equal pools have equal descriptions. Raises ConfigError if two
    planes, or two pools, have one name.
    """
    if len({pool.name for pool in further}) < len(further):
        raise ConfigError(f"further pools have the names {', '.join(pool.name for pool in further)}: give each its own")
    if len({plane.name for plane in planes}) < len(planes):
        names = ", ".join(plane.name for plane in planes)
        raise ConfigError(f"planes {planes_words(planes)} have the names {names}: give each plane a name of its own")
    first = planes[0]
    plain = PoolLayout(num_layers, first.num_heads, first.head_dim, dtype, further=tuple(further), window=window)
    if planes_of(plain) == tuple(planes):
        return plain
    # zeros, so that a peer that does not know `planes` takes the pool for none of its own
    return PoolLayout(num_layers, 0, 0, dtype, tuple(planes), tuple(further), window)


def planes_words(planes: Sequence[KvPlane]) -> str:
    """Return a list of planes as an error names them."""
    return ", ".join(plane_words(plane) for plane in planes)


def plane_words(plane: KvPlane) -> str:
    """Return a plane in words."""
    extra = f" + {plane.extra_bytes} bytes" if plane.extra_bytes else ""
    aligned = f" aligned to {plane.alignment} bytes" if plane.alignment > 1 else ""
    return f"{plane.name}: {plane.num_heads} heads x {plane.head_dim} {plane.dtype}{extra}{aligned}"

"""Checksums of KV blocks: xxh3_64 per (layer, plane, head) of a page, and one of a metadata row.

Pages on a GPU have other checksums (multilinear64, kernels/state/pages.py). Checksums catch faults, not attackers.
kv_layout.py says which bytes a block has. One checksum per block is slower than one per layer, but it says which head
is wrong, and still fits after heads are split over ranks. The decode node checks each page right after its copy, while
it lies in the processor's cache.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from .kv_layout import KvLayout

CHECKSUM_BYTES = 8


class HostPool(Protocol):
    """A pool in host memory."""

    layout: KvLayout
    num_pages: int
    pages: np.ndarray  # uint8 [num_layers, num_pages, page_layer_bytes]


def page_checksums(memory: Sequence[HostPool], page: int) -> bytes:
    """Return the checksums of page number `page` in all pools (target, then draft), as little-endian uint64 [sum of
    num_layers * blocks_per_layer]."""
    digests: list[int] = []
    for pool in memory:
        size = pool.pages.shape[2]
        blocks = _blocks(pool.layout)
        data = pool.pages.reshape(-1).data
        for start in range(page * size, data.nbytes, pool.num_pages * size):  # the page's offset in each layer
            digests += map(xxh3_64_intdigest, blocks.unpack_from(data, start))
    column = array("Q", digests)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def row_checksum(row: bytes) -> int:
    """Return the checksum of a metadata row, 62 bits (a Count on the wire)."""
    return xxh3_64_intdigest(row) >> 2


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """Return the index of the first block whose checksum differs; None if all agree."""
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)) // CHECKSUM_BYTES
    starts = range(0, len(ours), CHECKSUM_BYTES)
    return next(i for i, s in enumerate(starts) if ours[s : s + CHECKSUM_BYTES] != theirs[s : s + CHECKSUM_BYTES])


@functools.cache  # of the pools of this process
def _blocks(layout: KvLayout) -> struct.Struct:
    """Return a struct that splits a page of a layer into blocks. It copies them, and is still faster than slices: the
    copies stay in the processor's cache, and the loop runs in C."""
    return struct.Struct("".join(f"{run.block_bytes}s" * run.num_blocks for run in layout.runs))

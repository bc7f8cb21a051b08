"""Checksums of KV blocks: xxh3_64 per (layer, K|V, kv head) of a page, and of a metadata row.

They catch faults, not attackers. A block is page_size * head_dim * itemsize contiguous bytes. Measured on one
core: 8 GB/s at blocks of 2 KiB and 13 at 4 KiB with pages from memory, 18 and 25 with pages in the processor's cache,
where decode checks them right after the copy. Half of it is the loop (one digest a layer would give 26-44 GB/s, but
could not say which head is wrong, nor be re-sliced).
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from .memory import PageMemory

CHECKSUM_BYTES = 8


def page_checksums(memory: Sequence[PageMemory], page: int) -> bytes:
    """Checksums of page number `page` in all pools (target, then draft), as little-endian uint64
    [sum of num_layers * 2 * num_kv_heads]."""
    digests: list[int] = []
    for pool in memory:
        size = pool.page_layer_bytes
        blocks = _blocks(pool.block_bytes, size // pool.block_bytes)
        data = pool.pages.reshape(-1).data
        for start in range(page * size, data.nbytes, pool.num_pages * size):  # the page's place in each layer
            digests += map(xxh3_64_intdigest, blocks.unpack_from(data, start))
    column = array("Q", digests)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def row_checksum(row: bytes) -> int:
    """Checksum of a metadata row, 62 bits (a Count on the wire)."""
    return xxh3_64_intdigest(row) >> 2


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """Index of the first block whose checksum differs; None when all agree."""
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)) // CHECKSUM_BYTES
    starts = range(0, len(ours), CHECKSUM_BYTES)
    return next(i for i, s in enumerate(starts) if ours[s : s + CHECKSUM_BYTES] != theirs[s : s + CHECKSUM_BYTES])


@functools.cache
def _blocks(block_bytes: int, num_blocks: int) -> struct.Struct:
    """Cuts a page of a layer into blocks. It copies them, and is still a third faster than slicing at 2 KiB (as fast
    at 4 KiB): the copies stay in the processor's cache and the loop is the interpreter's own."""
    return struct.Struct(f"{block_bytes}s" * num_blocks)

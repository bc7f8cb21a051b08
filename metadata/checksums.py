"""Checksums of KV blocks: xxh3_64 per (layer, K|V, kv head) of a page, and of a metadata row.

They catch faults, not attackers. A block is page_size * head_dim * itemsize contiguous bytes. Measured on one core:
12.7 GB/s at blocks of 2 KiB, 15 GB/s at 4 KiB, of which the loop in Python is more than half
(one digest a layer would give 26-44 GB/s, but could not say which head is wrong nor be re-sliced).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from .memory import PageMemory

CHECKSUM_BYTES = 8


def page_checksums(memory: Sequence[PageMemory], page: int) -> bytes:
    """Checksums of page number `page` in all pools (target, then draft), as little-endian uint64
    [sum of num_layers * 2 * num_kv_heads]."""
    digests: array[int] = array("Q")
    for pool in memory:
        size = pool.block_bytes
        blocks = [slice(start, start + size) for start in range(0, pool.page_layer_bytes, size)]
        for layer in pool.pages[:, page]:
            data = memoryview(layer)
            digests.extend([xxh3_64_intdigest(data[block]) for block in blocks])
    if sys.byteorder == "big":
        digests.byteswap()
    return digests.tobytes()


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

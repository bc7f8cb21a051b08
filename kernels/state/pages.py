"""Pages of KV copied from pool to pool, and checksums of pages, for pools on a GPU.

A pool is a contiguous int32 view [num_layers, num_pages, page_words] of KV pages; a word is four bytes.

The checksum of a block w of n words is multilinear, with odd 64-bit multipliers from a counter hash:

    sum = m(0) + m(1) w[0] + m(2) w[1] + ... + m(n) w[n - 1]  mod 2^64,     m(i) = splitmix64(i) | 1

A change within one word always shows, because m is odd and the difference is not 0 and below 2^32. Any other change is
missed about once in 2^32 at worst (multilinear hashing: L. Carter and M. Wegman, 1979; D. Lemire and O. Kaser, 2014).
The sum may be taken in any order. The multipliers are public, so the checksum finds faults and no attackers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..operations import Operation, is_installed, kernel

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (S. Vigna, public domain)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def has_kernels() -> bool:
    """Return whether Triton is installed. Without it torch digests pages, slowly, and no peer's pool can be read."""
    return is_installed("triton")


def page_checksums_ref(pool: torch.Tensor, pages: torch.Tensor, block_words: int) -> torch.Tensor:
    """Return the checksums of all blocks of `block_words` words of the pages, [num_pages, num_layers, num_blocks] int64
    with the bits of uint64. Arguments are as in `store_checksums_ref`."""
    words = pool[:, pages.long()].transpose(0, 1).unflatten(2, (-1, block_words)).long() & 0xFFFFFFFF
    factors = multipliers(block_words + 1).to(pool.device)
    return (words * factors[1:]).sum(-1) + factors[0]


def store_checksums_ref(
    pool: torch.Tensor,
    pages: torch.Tensor,
    block_words: int,
    sums: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Store the checksums of all blocks of `block_words` words of the pages, by work on `stream` (None: the current
    one).

    `pool` [num_layers, pool_pages, num_words] int32 is a contiguous pool, or a range of the words of each of its pages.
    `pages` [num_pages] int32 lies on its device or in pinned memory. `sums` [num_pages, num_layers, num_blocks] int64,
    with the bits of uint64, on the device or in pinned memory, is contiguous, or a range of the blocks of each layer.
    """
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        # torch copies to a strided place by way of a buffer, which must be full by then
        sums.copy_(page_checksums_ref(pool, pages, block_words), non_blocking=sums.is_contiguous())


page_checksums = Operation("page_checksums", store_checksums_ref)


class WordSpan(NamedTuple):
    """Neighbouring words of a page in one layer. They begin at word `source` in the peer's pool and `target` in
    ours."""

    source: int
    target: int
    num_words: int


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """The address of a pool that this device can read, but that is not a tensor of this process.

    Triton's interpreter does not take it."""

    address: int
    num_pages: int
    page_words: int | None = None  # of a page in one layer; None: as in the pool that is written
    dtype: torch.dtype = torch.int32

    def data_ptr(self) -> int:
        """Return the address. Triton calls this method of its arguments."""
        return self.address


def gather_pages_ref(
    peer: torch.Tensor,
    pool: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    spans: Sequence[WordSpan] | None = None,
) -> None:
    """Copy all layers of the pages `sources` of `peer` to the pages `targets` of `pool`, [num_moves] int32 each. If
    there are `spans`, copy only these words of the pages."""
    for source, target, num_words in [WordSpan(0, 0, pool.shape[2])] if spans is None else spans:
        copied = peer[:, sources.long(), source : source + num_words].to(pool.device)
        pool[:, targets.long(), target : target + num_words] = copied


@kernel
def gather_pages(
    peer: torch.Tensor | PoolAddress,
    pool: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
    spans: Sequence[WordSpan] | None = None,
) -> None: ...


@kernel
def least_of_many(num_layers: int, num_blocks: int) -> int: ...


def multipliers(count: int) -> torch.Tensor:
    """Return m(0) to m(count - 1), [count] int64 with the bits of uint64."""
    state = (torch.arange(count, dtype=torch.int64) + 1) * _signed(_GOLDEN)
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLIER_1)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLIER_2)
    return (state ^ ((state >> 31) & ((1 << 33) - 1))) | 1


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits

"""Sums over ranks that read each other's memory, and what stands behind a sum in a decoder layer.

    y = x_0 + x_1 + ...                      all_reduce
    hidden += y;  normed = rms_norm(hidden)  all_reduce_norm_

Sums are float32, in the order of the ranks, and rounded once. So every rank has the same bits. The specifications take
the tensors of all ranks; a kernel (triton_all_reduce.py) takes those of its own rank and the blocks of all ranks.

Every rank has one block of memory, which all ranks map. A program of a launch is a *lane*: lane i of a rank only meets
lane i of the other ranks.

    counts  [NUM_LANES] int64                     meetings of a lane so far, written by its own rank
    flags   [NUM_LANES, MAX_RANKS] int64          flags[lane, q]: the count of rank q, written by rank q
    slots   [2, NUM_LANES, SLOT_BYTES] uint8      rows of this rank, read by the others; slots[count % 2] in a meeting

A slot holds several rows, each at a multiple of its bytes, rounded up to a power of two of at least 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..operations import kernel
from ..products.linear import sum_parts
from ..products.norm import add_rms_norm_, add_rms_norm_ref_

NUM_LANES = 128  # two ranks that share one GPU have all lanes under way at once
MAX_RANKS = 16  # the flags of a lane fill one line of the cache
MAX_ROW_BYTES = 32768  # a row is held in registers
SLOT_BYTES = 4 * MAX_ROW_BYTES  # the more rows a slot holds, the fewer meetings a long chunk of a prompt takes
FLAGS_AT = NUM_LANES * 8
SLOTS_AT = FLAGS_AT + NUM_LANES * MAX_RANKS * 8
SCATTER_AT = SLOTS_AT + 2 * NUM_LANES * SLOT_BYTES  # counts, flags and slots of `reduce_scatter`
BLOCK_BYTES = 2 * SCATTER_AT


class Control(NamedTuple):
    """Places in `PeerBlocks.control`."""

    has_failed: int = 0  # 1: a lane has waited too long, or the host wants no lane to wait
    limit: int = 1  # nanoseconds that a lane waits for another rank; in Triton's interpreter, the number of looks


CONTROL = Control()


@dataclass(frozen=True, slots=True, eq=False)
class PeerBlocks:
    """The blocks of all ranks as one rank sees them."""

    rank: int
    addresses: Tensor  # [num_ranks] int64, of the blocks as this process maps them
    own: Tensor  # [BLOCK_BYTES] uint8, zeros before the first meeting
    control: Tensor  # [len(Control)] int64 in host memory that the device reads and writes

    def __post_init__(self) -> None:
        assert self.addresses.dtype == torch.int64 and self.addresses.ndim == 1, self.addresses
        assert 0 <= self.rank < self.size <= MAX_RANKS, (self.rank, self.size)
        assert self.own.shape == (BLOCK_BYTES,) and self.own.dtype == torch.uint8, (self.own.shape, self.own.dtype)
        assert self.control.shape == (len(CONTROL),) and self.control.is_cpu, self.control

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.addresses)


def all_reduce_ref(xs: Sequence[Tensor]) -> Tensor:
    """Return the sum of the `xs` of all ranks, floats of one shape and dtype: a new tensor."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


def all_max_ref(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest value of all ranks, element by element: a new tensor. NaN is larger than all numbers."""
    return torch.stack(list(xs)).amax(0)


def all_gather_ref(xs: Sequence[Tensor]) -> Tensor:
    """Return the `xs` of all ranks, one shape: a new tensor [num_ranks, ...]."""
    return torch.stack(list(xs))


def all_gather_columns_ref(xs: Sequence[Tensor], num_columns: int) -> Tensor:
    """Return the first `num_columns` columns of the `xs` of all ranks side by side, [num_rows, width] each: a new
    tensor [num_rows, num_columns]."""
    return torch.cat(list(xs), 1)[:, :num_columns].contiguous()


def reduce_scatter_ref(xs: Sequence[Tensor], rank: int) -> Tensor:
    """Return the rows of `rank` of the sum of the `xs` of all ranks, [num_ranks, ...] each, as `all_reduce_ref`: a new
    tensor [...]."""
    return all_reduce_ref([x[rank] for x in xs])


def all_reduce_norm_ref_(hidden: Tensor, deltas: Sequence[Tensor], weight: Tensor, eps: float) -> Tensor:
    """Add the sum of the `deltas` of all ranks to `hidden` [num_rows, size] in place. Return the norm of the result, a
    new tensor. `weight` [size].

    A delta is [num_rows, size] of hidden's dtype, or float32 parts [num_parts, num_rows, size]. The sum of the parts is
    rounded to hidden's dtype before it is added to that of another rank."""
    own = [delta if delta.ndim == 2 else delta.sum(0).to(hidden.dtype) for delta in deltas]
    return add_rms_norm_ref_(hidden, all_reduce_ref(own), weight, eps)


@kernel
def all_reduce(x: Tensor, blocks: PeerBlocks) -> Tensor: ...


@kernel
def all_max(x: Tensor, blocks: PeerBlocks) -> Tensor: ...


@kernel
def all_gather(x: Tensor, blocks: PeerBlocks) -> Tensor: ...


@kernel
def all_gather_columns(x: Tensor, num_columns: int, blocks: PeerBlocks) -> Tensor: ...


@kernel
def reduce_scatter(x: Tensor, blocks: PeerBlocks) -> Tensor: ...


@kernel
def all_reduce_norm_(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, blocks: PeerBlocks) -> Tensor:
    return add_rms_norm_(hidden, all_reduce(whole(delta, hidden.dtype), blocks), weight, eps)


@kernel
def reduce_scatter_norm_(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, blocks: PeerBlocks) -> Tensor:
    rows = whole(delta, hidden.dtype).unflatten(0, (blocks.size, -1))
    return add_rms_norm_(hidden, reduce_scatter(rows, blocks), weight, eps)


def whole(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a delta, the sum of its parts if it has parts."""
    return delta if delta.ndim == 2 else sum_parts(delta, dtype)

"""Products of the rows of a block under the gated delta rule by Triton, each decayed from one row to the other.

If states decay by channel, such a product is a sum over channels of q_i k_j exp(G_i - G_j). It is divided into tiles of
16 rows. For a tile and the rows before it, both factors are decayed to the row before the tile. So both exponents are
at most zero, and nothing overflows. Within a tile, each difference of decays is computed.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .triton_delta_rows import TILE, decays, places


def pairs_by_head(q: Tensor, *tensors: Tensor | int, **sizes: int) -> None:
    """Compute the products of all blocks if states decay by value head. The arguments are those of `_pairs_kernel`."""
    _pairs_kernel[len(q), sizes["HEADS"] * sizes["SHARED"]](q, *tensors, **sizes, num_warps=4)


def pairs_by_channel(
    q: Tensor, k: Tensor, pairs: Tensor, system: Tensor, _decays: Tensor, rows: Tensor, updates: Tensor, a_log: Tensor,
    dt_bias: Tensor, *plan: Tensor | int, **sizes: int,
) -> None:  # fmt: skip
    """Compute the products of all blocks if states decay by channel. The arguments are those of `_pairs_kernel`."""
    _decays_kernel[len(q), sizes["HEADS"]](rows, updates, a_log, dt_bias, *plan, **sizes, num_warps=4)
    _channel_pairs_kernel[len(q) * (sizes["ROWS"] // TILE), sizes["HEADS"]](
        q, k, pairs, system, rows, updates, *plan, **sizes, num_warps=4
    )


@triton.jit(do_not_specialize=("table_stride",))
def _pairs_kernel(
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    pairs_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written
    system_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written, without the ones on the diagonal
    decays_ptr,  # [num_blocks, HEADS * SHARED, BLOCK] float32, written
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED] float32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    KEEP: tl.constexpr,  # tokens may be drafts
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (num_blocks, HEADS * SHARED). A program has a block of one value head."""
    GATES: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = GATES + SHARED * (1 + DECAY_DIM)
    block, value_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, shared = value_head // SHARED, value_head % SHARED
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, stop = tl.load(block_edges_ptr + block), tl.load(stops_ptr + seq)
        row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
        is_row = (row < BLOCK) & (edge + row < stop)
        is_in = (row < BLOCK)[:, None] & (dims < KEY_DIM)[None, :]
        at = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        q, k = tl.load(q_ptr + at, mask=is_in, other=0.0), tl.load(k_ptr + at, mask=is_in, other=0.0)
        place = places(edge, edge >= 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE)
        of_row = rows_ptr + (place + row) * WIDTH + GATES + shared
        beta = tl.sigmoid(tl.load(of_row, mask=is_row, other=0.0).to(tl.float32))
        a = tl.load(of_row + SHARED, mask=is_row, other=0.0).to(tl.float32)
        steps = decays(a, is_row, tl.load(a_log_ptr + value_head), tl.load(dt_bias_ptr + value_head))
        decay = tl.cumsum(steps, 0)
        of_head = block * (HEADS * SHARED) + value_head
        tl.store(decays_ptr + of_head * BLOCK + row, decay, mask=row < BLOCK)
        of_row = updates_ptr + (place + row) * UPDATE_WIDTH + SHARED * VALUE_DIM + KEY_DIM + shared
        tl.store(of_row, decay, mask=is_row & (KEEP or edge + BLOCK > stop))
        is_seen = row[:, None] >= row[None, :]
        between = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
        pairs = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between
        at = of_head * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
        is_square = (row < BLOCK)[:, None] & (row < BLOCK)[None, :]
        tl.store(pairs_ptr + at, pairs.to(pairs_ptr.dtype.element_ty), mask=is_square)
        below = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * tl.where(is_row, beta, 0.0)[:, None]
        below = tl.where(row[:, None] > row[None, :], below, 0.0)
        tl.store(system_ptr + at, below.to(system_ptr.dtype.element_ty), mask=is_square)


@triton.jit(do_not_specialize=("table_stride",))
def _decays_kernel(
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32, written
    a_log_ptr,  # [HEADS, SHARED] float32
    dt_bias_ptr,  # [HEADS, SHARED, DECAY_DIM] float32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (num_blocks, HEADS). A program stores the decays since the edge of a block of one head."""
    GATES: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = GATES + SHARED * (1 + DECAY_DIM)
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        edge, stop = tl.load(block_edges_ptr + block), tl.load(stops_ptr + seq)
        row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
        is_row, is_dim = (row < BLOCK) & (edge + row < stop), dims < KEY_DIM
        place = (places(edge, edge >= 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE) + row)[:, None]
        is_in = is_row[:, None] & is_dim[None, :]
        a = tl.load(rows_ptr + place * WIDTH + GATES + SHARED + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head * KEY_DIM + dims, mask=is_dim, other=0.0)[None, :]
        steps = decays(a, is_in, tl.load(a_log_ptr + head), dt_bias)
        to_ptr = updates_ptr + place * UPDATE_WIDTH + (SHARED * VALUE_DIM + KEY_DIM) + dims[None, :]
        tl.store(to_ptr, tl.cumsum(steps, 0), mask=is_in)


@triton.jit(do_not_specialize=("table_stride",))
def _channel_pairs_kernel(
    q_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    k_ptr,  # [num_blocks, BLOCK, HEADS, KEY_DIM]
    pairs_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written
    system_ptr,  # [num_blocks, HEADS * SHARED, BLOCK, BLOCK], written, without the ones on the diagonal
    rows_ptr,  # [num_pages, HEADS, PAGE_SIZE, 2 * KEY_DIM + SHARED * (VALUE_DIM + 1 + DECAY_DIM)]
    updates_ptr,  # [num_pages, HEADS, PAGE_SIZE, UPDATE_WIDTH] float32
    stops_ptr,  # [num_seqs] int32
    block_seqs_ptr,  # [num_blocks] int32
    block_edges_ptr,  # [num_blocks] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    table_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DECAY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (num_blocks * ceil(BLOCK / 16), HEADS). A program has 16 rows of a block of one head, and all columns."""
    TILE: tl.constexpr = 16
    PARTS: tl.constexpr = (BLOCK + TILE - 1) // TILE
    GATES: tl.constexpr = 2 * KEY_DIM + SHARED * VALUE_DIM
    WIDTH: tl.constexpr = GATES + SHARED * (1 + DECAY_DIM)
    DTYPE: tl.constexpr = pairs_ptr.dtype.element_ty
    block, first, head = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS * TILE, tl.program_id(1)
    seq = tl.load(block_seqs_ptr + block).to(tl.int64)
    if seq >= 0:
        num_rows = tl.minimum(tl.load(stops_ptr + seq) - tl.load(block_edges_ptr + block), BLOCK)
        edge, dims = tl.load(block_edges_ptr + block), tl.arange(0, BLOCK_K)
        row, others = first + tl.arange(0, TILE), tl.arange(0, ROWS)
        is_dim, is_row = dims < KEY_DIM, row < num_rows
        is_own, is_before = is_row[:, None] & is_dim[None, :], (others < first)[:, None] & is_dim[None, :]
        place = places(edge, edge >= 0, table_ptr + seq * table_stride, head, HEADS, PAGE_SIZE)
        decay_ptr = updates_ptr + place * UPDATE_WIDTH + (SHARED * VALUE_DIM + KEY_DIM) + dims[None, :]
        decay = tl.load(decay_ptr + row[:, None] * UPDATE_WIDTH, mask=is_own, other=0.0)
        of_others = tl.load(decay_ptr + others[:, None] * UPDATE_WIDTH, mask=is_before, other=0.0)
        middle = tl.load(decay_ptr + (first - 1) * UPDATE_WIDTH, mask=is_dim[None, :] & (first > 0), other=0.0)
        own = ((block * BLOCK + row) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        q = tl.load(q_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        at = ((block * BLOCK + others) * HEADS + head)[:, None] * KEY_DIM + dims[None, :]
        before = tl.load(k_ptr + at, mask=is_before, other=0.0).to(tl.float32)
        before = tl.trans((before * tl.exp(tl.where(is_before, middle - of_others, 0.0))).to(DTYPE))
        faded = tl.exp(tl.where(is_own, decay - middle, 0.0))
        pairs = tl.dot((q * faded).to(DTYPE), before, input_precision="tf32x3")
        below = tl.dot((k * faded).to(DTYPE), before, input_precision="tf32x3")
        for column in range(first, tl.minimum(first + TILE, num_rows)):
            of_column = tl.load(decay_ptr + column * UPDATE_WIDTH, mask=is_dim[None, :], other=0.0)
            other = tl.load(k_ptr + ((block * BLOCK + column) * HEADS + head) * KEY_DIM + dims, mask=is_dim, other=0.0)
            between = tl.exp(tl.where(is_own & (row >= column)[:, None], decay - of_column, float("-inf")))
            between *= other.to(tl.float32)[None, :]
            is_column = (others == column)[None, :]
            pairs = tl.where(is_column, tl.sum(q * between, 1)[:, None], pairs)
            below = tl.where(is_column, tl.sum(k * between, 1)[:, None], below)
        b = tl.load(rows_ptr + (place + row) * WIDTH + GATES, mask=is_row, other=0.0)
        below = below * tl.sigmoid(b.to(tl.float32))[:, None]
        below = tl.where((row[:, None] > others[None, :]) & is_row[:, None], below, 0.0)
        at = (block * HEADS + head) * (BLOCK * BLOCK) + row[:, None] * BLOCK + others[None, :]
        is_square = (row < BLOCK)[:, None] & (others < BLOCK)[None, :]
        tl.store(pairs_ptr + at, pairs.to(DTYPE), mask=is_square)
        tl.store(system_ptr + at, below.to(DTYPE), mask=is_square)

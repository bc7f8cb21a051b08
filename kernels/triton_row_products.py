"""Products of rows of a matrix W with one row x, without tensor cores: what kernels of one row share.

A program is one warp, and loads its rows of W whole, in chunks of columns that its threads load at once. Nothing passes
through shared memory, and few threads load columns that are not there. The number of instructions limits such a kernel
as soon as it is twice the least: a number of W costs two or three.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803, N806, RUF005
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import BLOCK

ROWS_BYTES = 16384  # of W that a program had better have: 128 registers of each thread
_LOAD_BYTES = 512  # that a warp loads at once


def chunk_of(in_size: int, item_size: int) -> int:
    """Return how many columns a chunk has, so that as many chunks as possible are whole."""
    chunk = _LOAD_BYTES // item_size
    while chunk > BLOCK and in_size % chunk:
        chunk //= 2
    return min(chunk, 1 << (in_size - 1).bit_length())


@triton.jit
def row_chunks(
    ptr,  # [N] pointers to rows of W, [K] each
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load rows of W in chunks of columns, each [N, CHUNK]."""
    chunks = ()
    for start in tl.static_range(0, K, CHUNK):
        at = ptr[:, None] + start + tl.arange(0, CHUNK)[None, :]
        if start + CHUNK <= K:
            chunks = chunks + (tl.load(at, eviction_policy="evict_first"),)
        else:
            is_in = (start + tl.arange(0, CHUNK) < K)[None, :]
            chunks = chunks + (tl.load(at, mask=is_in, other=0.0, eviction_policy="evict_first"),)
    return chunks


@triton.jit
def row_products(
    chunks,  # of rows of W
    rows,  # [N], which rows of W they are
    x_ptr,  # [K]
    x_scales_ptr,  # [ceil(K / GROUP)] float32, or [1] if GROUP is 0; None: they are 1
    scales_ptr,  # [rows of W / ROWS, ceil(K / GROUP)] float32, or 1 column if GROUP is 0; None: they are 1
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale; 0: all
    ROWS: tl.constexpr,  # of a scale
):
    """Return the products of rows of W and the row x, [N] float32."""
    WIDTH: tl.constexpr = GROUP if GROUP > 0 else CHUNK
    PARTS: tl.constexpr = CHUNK // WIDTH
    sums = tl.zeros((rows.shape[0], PARTS, WIDTH), dtype=tl.float32)
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)[None, :]
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        products = tl.reshape(chunks[start // CHUNK].to(tl.float32) * x, sums.shape)
        if GROUP > 0:
            group, num_groups = start // GROUP + tl.arange(0, PARTS), (K + GROUP - 1) // GROUP
            scales_at = scales_ptr + (rows // ROWS)[:, None] * num_groups + group[None, :]
            scales = tl.load(scales_at, mask=(group < num_groups)[None, :], other=0.0)
            if x_scales_ptr is not None:
                scales *= tl.load(x_scales_ptr + group, mask=group < num_groups, other=0.0)[None, :]
            products *= scales[:, :, None]
        sums += products
    y = tl.sum(tl.sum(sums, 2), 1)
    if GROUP == 0 and scales_ptr is not None:
        y *= tl.load(scales_ptr + rows // ROWS)
    if GROUP == 0 and x_scales_ptr is not None:
        y *= tl.load(x_scales_ptr)
    return y

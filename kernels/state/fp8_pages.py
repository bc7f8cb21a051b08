"""Pages of keys and values in e4m3 (fp8.py), with a float32 scale for each token and head.

    a head's block of a page   | values [page_size, head_dim] e4m3 | padding | scales [page_size] float32 | padding |

The scales and the block's end lie at multiples of ALIGNMENT bytes. A pool is the tensor of its values, [..., page_size,
head_dim] float8_e4m3fn, whose blocks are as far apart as they lie in memory. `scales_of` finds the scales behind them.
A pool of another dtype has no scales. Attention takes each number as value times scale.

New rows are rounded by `round_rows` with scales that are powers of two: the largest number of a token's head becomes a
value from LARGEST / 2 to LARGEST. Values keep as many bits as with any other scale. But a value times its scale is
exact in bfloat16 and float16, so all kernels see the same numbers, whether they multiply a value, a score or a weight
by the scale. A scale is at most 128, so numbers beyond MOST become MOST. A row with a number that is not finite has the
scale NaN; its values say nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import ALIGNMENT, SCALE_BYTES
from ..products.fp8 import E4M3, LARGEST, round_rows_ref

MOST = 128 * LARGEST  # 57,344; float16 ends at 65,504


def scales_of(kv: Tensor) -> Tensor:
    """Return the scales of a pool or of some layers of it: [..., page_size, head_dim] e4m3 -> [..., page_size] float32,
    a view of the same memory."""
    assert kv.dtype == E4M3, kv.dtype
    *outer, page_size, head_dim = kv.shape
    apart = [stride if size > 1 else 0 for size, stride in zip(outer, kv.stride(), strict=False)]  # 1 has any stride
    shape, strides = (*outer, page_size * SCALE_BYTES), (*apart, 1)
    behind = kv.storage_offset() + _aligned(page_size * head_dim)
    return kv.view(torch.uint8).as_strided(shape, strides, behind).view(torch.float32)


def block_size(kv: Tensor) -> int:
    """Return how far apart the blocks of a page lie in a pool or layer [..., num_kv_heads, page_size, head_dim], in
    numbers."""
    page_size, head_dim = kv.shape[-2:]
    size = page_size * head_dim
    return size if kv.dtype != E4M3 else _aligned(size) + _aligned(page_size * SCALE_BYTES)


def has_close_blocks(kv_layer: Tensor) -> bool:
    """Return whether the pages of a layer, and the blocks of each, follow one another without gaps, as kernels read
    them. `kv_layer` is [num_pages, num_planes, num_kv_heads, page_size, head_dim]."""
    size, (_, num_planes, num_heads, _, head_dim) = block_size(kv_layer), kv_layer.shape
    strides = (num_planes * num_heads * size, num_heads * size, size, head_dim, 1)
    sides = zip(kv_layer.shape, kv_layer.stride(), strides, strict=True)
    return all(length == 1 or ours == wanted for length, ours, wanted in sides)


def parts_of(kv: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the numbers of a pool, for copies: the pool, or its values as bytes and its scales,
    [..., page_size, head_dim] uint8 and [..., page_size, 1] float32. All are views."""
    return (kv,) if kv.dtype != E4M3 else (kv.view(torch.uint8), scales_of(kv).unsqueeze(-1))


def store_rows(rows: Tensor, kv_layer: Tensor, places: Tensor) -> None:
    """Round rows of heads, and store them with their scales: `rows` [n, head_dim] of any float dtype, `kv_layer`
    [num_pages, num_planes, num_kv_heads, page_size, head_dim] e4m3, `places` [n] int64: block * page_size + slot."""
    page_size, head_dim = kv_layer.shape[-2:]
    values, scales = round_rows_ref(rows.clamp(-MOST, MOST), head_dim, has_power_of_two_scales=True)
    assert scales is not None, "rounded rows have scales"
    at = places // page_size, places % page_size
    kv_layer.view(torch.uint8).view(-1, page_size, head_dim)[at] = values.view(torch.uint8)
    scales_of(kv_layer).view(-1, page_size)[at] = scales.squeeze(1).masked_fill_(~rows.isfinite().all(1), math.nan)


def blocks_at(kv_layer: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of some blocks in `dtype`, a new tensor [n, page_size, head_dim].

    `kv_layer` [num_pages, num_planes, num_kv_heads, page_size, head_dim] is e4m3, `blocks` [n] int64."""
    page_size, head_dim = kv_layer.shape[-2:]
    codes = kv_layer.view(torch.uint8).view(-1, page_size, head_dim).index_select(0, blocks)
    scales = scales_of(kv_layer).view(-1, page_size).index_select(0, blocks)
    # a CPU looks numbers up faster than it converts them
    numbers = torch.arange(256, dtype=torch.uint8, device=codes.device).view(E4M3).float()
    values = numbers.index_select(0, codes.flatten().int()).view(codes.shape)
    return values.mul_(scales.unsqueeze(-1)).to(dtype)


def pages_at(kv_layer: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of some pages of any pool in float32, a new tensor [n, num_planes, num_kv_heads, page_size,
    head_dim]. Those of a pool in e4m3 are rounded to `dtype`, that of the queries. `pages` is [n] int64."""
    if kv_layer.dtype != E4M3:
        return kv_layer[pages].float()
    per_page = kv_layer.shape[1] * kv_layer.shape[2]
    blocks = pages.unsqueeze(1) * per_page + torch.arange(per_page, device=pages.device)
    return blocks_at(kv_layer, blocks.flatten(), dtype).view(len(pages), *kv_layer.shape[1:]).float()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

"""The operations of history.py on a GPU: pages to contiguous keys, and the join of two parts of attention."""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..products.fp8 import E4M3
from ..state.fp8_pages import block_size, has_close_blocks, scales_of
from .history import Part
from .triton_attention import value_dim

_KEYS = 64  # per program of `_gather_kernel`
_HEADS = 16  # per program of `_join_kernel`


def gather_keys(
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    seq: int,
    start: int,
    stop: int,
    num_keys: int,
    dtype: torch.dtype,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the work of `gather_keys_ref`. The blocks of `kv_layer` follow one another (`has_close_blocks`), and the rows
    of `block_table` are contiguous."""
    _, _, num_kv_heads, page_size, head_dim = kv_layer.shape
    assert 0 <= start <= stop <= start + num_keys, (start, stop, num_keys)
    assert stop <= block_table.shape[1] * page_size and 0 <= seq < len(block_table), (stop, seq, block_table.shape)
    assert has_close_blocks(kv_layer) and block_table.stride(1) == 1 and block_table.dtype == torch.int64, block_table
    assert kv_layer.dtype in (dtype, E4M3), (kv_layer.dtype, dtype)
    scales = scales_of(kv_layer) if kv_layer.dtype == E4M3 else None
    keys = torch.empty((2, num_kv_heads, num_keys, head_dim), dtype=dtype, device=kv_layer.device)
    _gather_kernel[(triton.cdiv(num_keys, _KEYS), num_kv_heads)](
        keys, kv_layer, values, scales, block_table, seq, block_table.stride(0), start, stop, num_keys,
        NUM_KV_HEADS=num_kv_heads, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK=block_size(kv_layer),
        VALUE_DIM=value_dim(kv_layer, values), KEYS=_KEYS, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return keys


def join_parts(out: torch.Tensor, first: Part, second: Part) -> torch.Tensor:
    """Do the work of `join_parts_ref`."""
    num_rows, num_heads, head_dim = out.shape
    assert first.out.shape == second.out.shape == out.shape, (first.out.shape, second.out.shape, out.shape)
    assert first.lse.shape == second.lse.shape == (num_heads, num_rows), (first.lse.shape, second.lse.shape)
    assert out.is_contiguous() and first.out.is_contiguous() and second.out.is_contiguous(), out.stride()
    assert first.lse.dtype == second.lse.dtype == torch.float32, (first.lse.dtype, second.lse.dtype)
    lse = torch.empty((num_heads, num_rows), dtype=torch.float32, device=out.device)
    _join_kernel[(num_rows, triton.cdiv(num_heads, _HEADS))](
        out, lse, first.out, first.lse, second.out, second.lse,
        num_rows, first.lse.stride(0), first.lse.stride(1), second.lse.stride(0), second.lse.stride(1),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        HEADS=min(_HEADS, triton.next_power_of_2(num_heads)), BLOCK_D=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return lse


@triton.jit(do_not_specialize=("seq", "table_stride", "start", "stop", "num_keys"))
def _gather_kernel(
    keys_ptr,  # [2, NUM_KV_HEADS, num_keys, HEAD_DIM], written
    kv_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM] of the keys' dtype or e4m3, blocks BLOCK apart
    v_ptr,  # [num_pages, NUM_KV_HEADS, PAGE_SIZE, VALUE_DIM], if kv_ptr has keys alone; None: it has both
    scales_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE] float32, blocks BLOCK / 4 apart; None: no scales
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq,
    table_stride,
    start,
    stop,
    num_keys,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (ceil(num_keys / KEYS), NUM_KV_HEADS). Copy KEYS keys and values of one kv head; zeros from `stop` on."""
    HALF: tl.constexpr = NUM_KV_HEADS * BLOCK  # numbers of a page's keys, and of its values
    kv_head = tl.program_id(1)
    keys, dims = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    slots = start + keys
    is_inside = slots < stop
    pages = tl.load(table_ptr + seq.to(tl.int64) * table_stride + slots // PAGE_SIZE, mask=is_inside, other=0)
    in_page = kv_head * BLOCK + slots % PAGE_SIZE * HEAD_DIM
    sources = pages * (2 * HALF) + in_page if v_ptr is None else pages * HALF + in_page
    is_dim = dims[None, :] < HEAD_DIM
    is_read, is_stored = is_inside[:, None] & is_dim, (keys < num_keys)[:, None] & is_dim
    k = tl.load(kv_ptr + sources[:, None] + dims[None, :], mask=is_read, other=0.0)
    if v_ptr is None:
        v = tl.load(kv_ptr + sources[:, None] + (HALF + dims)[None, :], mask=is_read, other=0.0)
    else:
        v_sources = (pages * NUM_KV_HEADS + kv_head) * (PAGE_SIZE * VALUE_DIM) + slots % PAGE_SIZE * VALUE_DIM
        is_value = is_inside[:, None] & (dims[None, :] < VALUE_DIM)
        v = tl.load(v_ptr + v_sources[:, None] + dims[None, :], mask=is_value, other=0.0)
    if scales_ptr is not None:
        scales = scales_ptr + pages * (HALF // 2) + kv_head * (BLOCK // 4) + slots % PAGE_SIZE
        k = k.to(tl.float32) * tl.load(scales, mask=is_inside, other=0.0)[:, None]
        v = v.to(tl.float32) * tl.load(scales + HALF // 4, mask=is_inside, other=0.0)[:, None]
    k, v = k.to(keys_ptr.dtype.element_ty), v.to(keys_ptr.dtype.element_ty)
    targets = (kv_head.to(tl.int64) * num_keys + keys) * HEAD_DIM
    tl.store(keys_ptr + targets[:, None] + dims[None, :], k, mask=is_stored)
    targets += num_keys.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
    tl.store(keys_ptr + targets[:, None] + dims[None, :], v, mask=is_stored)


@triton.jit(
    do_not_specialize=("num_rows", "first_head", "first_row", "second_head", "second_row"),
    do_not_specialize_on_alignment=("first_lse_ptr", "second_lse_ptr"),  # a part may begin at any row
)
def _join_kernel(
    out_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM] of any float dtype, written; may be first_ptr
    lse_ptr,  # [NUM_HEADS, num_rows] float32, written
    first_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM] of any float dtype
    first_lse_ptr,  # [NUM_HEADS, num_rows] float32, heads first_head and rows first_row apart
    second_ptr,  # [num_rows, NUM_HEADS, HEAD_DIM] of any float dtype
    second_lse_ptr,  # [NUM_HEADS, num_rows] float32, heads second_head and rows second_row apart
    num_rows,
    first_head,
    first_row,
    second_head,
    second_row,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (num_rows, ceil(NUM_HEADS / HEADS)). Join HEADS heads of one row."""
    row = tl.program_id(0)
    heads, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    first_lse = tl.load(first_lse_ptr + heads * first_head + row * first_row, mask=is_head, other=0.0)
    second_lse = tl.load(second_lse_ptr + heads * second_head + row * second_row, mask=is_head, other=0.0)
    highest = tl.maximum(first_lse, second_lse)
    first_weight, second_weight = tl.exp(first_lse - highest), tl.exp(second_lse - highest)
    total = first_weight + second_weight
    numbers = (row.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    is_number = is_head[:, None] & (dims[None, :] < HEAD_DIM)
    first = tl.load(first_ptr + numbers, mask=is_number, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + numbers, mask=is_number, other=0.0).to(tl.float32)
    out = first * (first_weight / total)[:, None] + second * (second_weight / total)[:, None]
    tl.store(out_ptr + numbers, out.to(out_ptr.dtype.element_ty), mask=is_number)
    tl.store(lse_ptr + heads * num_rows + row, highest + tl.log(total), mask=is_head)

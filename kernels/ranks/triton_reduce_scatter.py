"""Sums over ranks of which every rank keeps its own rows, on GPUs that map each other's memory (all_reduce.py).

A meeting of one lane, in each rank:

    row of every other rank --> own slot;  flags as in triton_all_reduce.py
    sum over ranks of what their slots have for this rank, in the order of the ranks --> out

So a rank reads its own rows of the others, and nothing else. Counts, flags and slots are those of the second part of
the blocks: lanes of this file only meet lanes of this file.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .all_reduce import FLAGS_AT, MAX_RANKS, MAX_ROW_BYTES, NUM_LANES, SCATTER_AT, SLOT_BYTES, SLOTS_AT, PeerBlocks
from .triton_all_reduce import _pointer, _wait, num_warps, tile_size

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LANES, _RANKS, _SLOT = tl.constexpr(NUM_LANES), tl.constexpr(MAX_RANKS), tl.constexpr(SLOT_BYTES)
_GAVE_UP_AT, _APART = tl.constexpr(FLAGS_AT), tl.constexpr(SCATTER_AT)
_FLAGS_AT, _SLOTS_AT = tl.constexpr(SCATTER_AT + FLAGS_AT), tl.constexpr(SCATTER_AT + SLOTS_AT)


def serves_norm(hidden: Tensor, weight: Tensor, num_ranks: int) -> bool:
    """Return whether `reduce_scatter_norm_` takes these tensors: a slot must hold a row for
    every rank, and registers one."""
    is_row = hidden.dtype == weight.dtype and hidden.dtype in _FLOATS and hidden.stride(-1) == 1
    row_bytes = int(triton.next_power_of_2(hidden.shape[1])) * hidden.itemsize
    return is_row and row_bytes <= MAX_ROW_BYTES and row_bytes * num_ranks <= SLOT_BYTES


def reduce_scatter(x: Tensor, blocks: PeerBlocks) -> Tensor:
    """Return `reduce_scatter_ref` of all ranks' `x` [num_ranks, ...]: a new contiguous tensor [...]. `x` has the same
    shape and dtype on each rank."""
    assert x.dtype in _FLOATS and x.shape[0] == blocks.size, (x.dtype, x.shape, blocks.size)
    out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    num_elements = out.numel()
    if num_elements:
        most = SLOT_BYTES // x.itemsize // triton.next_power_of_2(blocks.size)
        tile = min(tile_size(num_elements, x.itemsize), most)
        _launch(x.contiguous(), blocks, out, triton.cdiv(num_elements, tile), tile, None)
    return out


def reduce_scatter_norm_(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, blocks: PeerBlocks) -> Tensor:
    """Add this rank's rows of the sum of all ranks' `delta` to `hidden` [num_rows, size] in place. Return the norm of
    the result, a new contiguous tensor [num_rows, size].

    `hidden` has a contiguous last dimension. `delta` is contiguous: [num_ranks * num_rows, size] of hidden's dtype, in
    the order of the ranks, or parts [num_parts, num_ranks * num_rows, size] float32. Ranks may have unlike numbers of
    parts, and have equal numbers of rows."""
    num_rows, size = hidden.shape
    assert serves_norm(hidden, weight, blocks.size), (hidden.shape, hidden.stride(), hidden.dtype, weight.dtype)
    assert weight.shape == (size,) and weight.is_contiguous(), (hidden.shape, weight.shape)
    assert delta.shape[-2:] == (blocks.size * num_rows, size) and delta.is_contiguous(), (hidden.shape, delta.shape)
    assert delta.dtype == (hidden.dtype if delta.ndim == 2 else torch.float32), (delta.shape, delta.dtype)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        num_parts = 1 if delta.ndim == 2 else delta.shape[0]
        _launch(delta, blocks, out, num_rows, size, (hidden, weight, eps), num_parts)
    return out


def _launch(
    x: Tensor,
    blocks: PeerBlocks,
    out: Tensor,
    num_rows: int,
    size: int,
    norm: tuple[Tensor, Tensor, float] | None,
    num_parts: int = 1,
) -> None:
    """Launch `_scatter_kernel` for `num_rows` rows of `size` elements; the last one may be shorter. `norm`: the
    residual, and the weight and eps of its norm."""
    assert x.device == out.device == blocks.addresses.device, (x.device, out.device, blocks.addresses.device)
    block, dependent = triton.next_power_of_2(size), gpu.dependent_launch(num_rows)
    hidden, weight, eps = norm or (out, out, 0.0)
    _scatter_kernel[(min(num_rows, NUM_LANES),)](
        x, hidden, weight, out, blocks.addresses, blocks.control, blocks.rank, num_rows, out.numel(),
        hidden.stride(0) if norm else 0, eps, SIZE=size, BLOCK=block, NUM_RANKS=blocks.size, PARTS=num_parts,
        NORMS=norm is not None, CLOCKED=x.is_cuda, DEPENDENT=dependent, num_warps=num_warps(block), num_stages=1,
        launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _scatter_kernel(
    x_ptr,  # [PARTS, NUM_RANKS, num_elements] of out's dtype or float32
    hidden_ptr,  # [num_rows, SIZE] of out's dtype, rows hidden_stride apart; read and written if NORMS
    weight_ptr,  # [SIZE] of out's dtype, read if NORMS
    out_ptr,  # [num_elements], written
    blocks_ptr,  # [NUM_RANKS] int64, addresses (all_reduce.py: PeerBlocks)
    control_ptr,  # [2] int64 in host memory (all_reduce.py: Control)
    rank,
    num_rows,
    num_elements,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    CLOCKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (min(num_rows, NUM_LANES),)."""
    dtype = out_ptr.dtype.element_ty
    lane = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    own = tl.load(blocks_ptr + rank)
    if NORMS:
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    count_ptr = (own + _APART + lane * 8).to(tl.pointer_type(tl.int64))
    count = tl.load(count_ptr)
    row = lane
    while row < num_rows:
        count += 1
        at = row * SIZE + columns
        is_in = columns < SIZE
        if not NORMS:  # the last row may be shorter
            is_in = is_in & (at < num_elements)
        slot = _SLOTS_AT + ((count % 2) * _LANES + lane) * _SLOT
        x = tl.zeros([BLOCK], dtype)
        for other in tl.static_range(NUM_RANKS):
            each = _summand(x_ptr, other, at, is_in, num_elements, NUM_RANKS, PARTS, dtype)
            tl.store(_pointer(own + slot, dtype) + other * BLOCK + columns, each, mask=is_in & (other != rank))
            x = tl.where(other == rank, each, x)
        if NORMS:
            hidden_at = hidden_ptr + row * hidden_stride + columns
            hidden = tl.load(hidden_at, mask=is_in, other=0.0).to(tl.float32)
        _meet_apart(blocks_ptr, control_ptr, own, rank, lane, count, NUM_RANKS, CLOCKED)
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(NUM_RANKS):
            theirs = _pointer(tl.load(blocks_ptr + other) + slot, dtype) + rank * BLOCK + columns
            theirs = tl.load(theirs, mask=is_in & (other != rank), other=0, cache_modifier=".cg")
            wide = tl.where(other == rank, x, theirs).to(tl.float32)
            total = wide if other == 0 else total + wide
        if NORMS:
            hidden = (hidden + total.to(dtype).to(tl.float32)).to(dtype)
            tl.store(hidden_at, hidden, mask=is_in)
            hidden = hidden.to(tl.float32)
            scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / SIZE + eps)
            normed = (hidden * scale).to(dtype).to(tl.float32)
            tl.store(out_ptr + at, (normed * weight).to(dtype), mask=is_in)
        else:
            tl.store(out_ptr + at, total.to(dtype), mask=is_in)
        row += _LANES
    tl.store(count_ptr, count)


@triton.jit
def _summand(
    x_ptr,
    other: tl.constexpr,
    at,
    is_in,
    num_elements,
    NUM_RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return what this rank adds to elements `at` of the rows of rank `other`."""
    start = x_ptr + other * num_elements.to(tl.int64)
    x = tl.load(start + at, mask=is_in, other=0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(start + part * NUM_RANKS * num_elements.to(tl.int64) + at, mask=is_in, other=0)
    return x.to(dtype)


@triton.jit
def _meet_apart(blocks_ptr, control_ptr, own, rank, lane, count, NUM_RANKS: tl.constexpr, CLOCKED: tl.constexpr):
    """Show the others what this lane has written, and wait until they have written, too."""
    tl.debug_barrier()  # all threads have written, and have read what they read in the last meeting
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            flag = tl.load(blocks_ptr + other) + _FLAGS_AT + (lane * _RANKS + rank) * 8
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), count, sem="release", scope="sys")
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            flag = own + _FLAGS_AT + (lane * _RANKS + other) * 8
            gave_up = own + _GAVE_UP_AT + rank * 8  # the word of all kernels of this rank
            pointer = tl.pointer_type(tl.int64)
            _wait(flag.to(pointer), count, gave_up.to(pointer), control_ptr, CLOCKED)
    tl.debug_barrier()

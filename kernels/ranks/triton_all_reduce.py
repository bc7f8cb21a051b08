"""The operations of all_reduce.py on GPUs that map each other's memory.

A meeting of one lane, in each rank:

    x --> own slot;  flag of every other rank = count (release);  wait for all own flags >= count (acquire)
    sum over ranks of their slots, in the order of the ranks --> out

or, in `reduce_scatter`, of which every rank keeps its own rows, and reads nothing else:

    row of every other rank --> own slot;  flags as above
    sum over ranks of what their slots have for this rank, in the order of the ranks --> out

Counts, flags and slots of `reduce_scatter` are those of the second part of the blocks, so its lanes only meet each
other.

A slot holds as many rows of a lane as fit, and one meeting is enough for them. A lane writes slot `count % 2` again two
meetings later. It has then met the others once more, and they raise that flag only after they have read the slot. A
CUDA graph can hold a launch: each lane keeps its count in device memory.

A rank that is gone raises no flag. A lane that has waited `limit` nanoseconds writes `has_failed`, and from then on no
lane of this rank waits. Results are wrong from there, so the host looks at `has_failed` before it uses any.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from .. import gpu
from .all_reduce import (
    CONTROL,
    FLAGS_AT,
    MAX_RANKS,
    MAX_ROW_BYTES,
    NUM_LANES,
    SCATTER_AT,
    SLOT_BYTES,
    SLOTS_AT,
    PeerBlocks,
)

_MIN_TILE = 1024  # elements of a lane; a few lanes are faster than one
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Kind = Literal["sum", "max", "gather", "columns"]
_LOOKS = tl.constexpr(64)  # at a flag, between two looks at the rank's own word that says whether a lane gave up
# at a flag, between two looks at the clock and at the host's words: many lanes that read these often wait for the bus,
# others wait for them, and nobody catches up again
_HOST_LOOKS = tl.constexpr(8192)  # some milliseconds; in Triton's interpreter _LOOKS
_LANES, _RANKS, _SLOT = tl.constexpr(NUM_LANES), tl.constexpr(MAX_RANKS), tl.constexpr(SLOT_BYTES)
_FLAGS_AT, _SLOTS_AT, _APART = tl.constexpr(FLAGS_AT), tl.constexpr(SLOTS_AT), tl.constexpr(SCATTER_AT)
_FAILED, _LIMIT = tl.constexpr(CONTROL.has_failed), tl.constexpr(CONTROL.limit)


def serves_norm(hidden: Tensor, _: Tensor, weight: Tensor, *__: object) -> bool:
    """Return whether `all_reduce_norm_` takes these tensors: a row must fit into registers."""
    is_row = hidden.dtype == weight.dtype and hidden.dtype in _FLOATS and hidden.stride(-1) == 1
    return is_row and hidden.shape[1] * hidden.itemsize <= MAX_ROW_BYTES


def tile_size(num_elements: int, itemsize: int) -> int:
    """Return how many elements of a row of numbers a lane takes at once."""
    shared = max(_MIN_TILE, int(triton.next_power_of_2(-(-num_elements // NUM_LANES))))
    return min(MAX_ROW_BYTES // itemsize, shared)


def num_warps(block: int) -> int:
    """Return the warps of a lane that takes rows of `block` elements, a power of two."""
    return min(16, max(4, block // 512))


def all_reduce(x: Tensor, blocks: PeerBlocks) -> Tensor:
    """Return `all_reduce_ref` of all ranks' `x`, a new contiguous tensor. `x` has the same shape and dtype on each."""
    assert x.dtype in _FLOATS, x.dtype
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_flat(x, blocks, out, "sum")
    return out


def all_max(x: Tensor, blocks: PeerBlocks) -> Tensor:
    """Return `all_max_ref` of all ranks' `x`, a new contiguous tensor. `x` has the same shape and dtype on each."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_flat(x, blocks, out, "max")
    return out


def all_gather(x: Tensor, blocks: PeerBlocks) -> Tensor:
    """Return `all_gather_ref` of all ranks' `x`: a new tensor [num_ranks, ...]. `x` has one shape and dtype on each."""
    out = torch.empty((blocks.size, *x.shape), dtype=x.dtype, device=x.device)
    _launch_flat(x, blocks, out, "gather")
    return out


def all_gather_columns(x: Tensor, num_columns: int, blocks: PeerBlocks) -> Tensor:
    """Return `all_gather_columns_ref` of all ranks' `x` [num_rows, width], which has one shape and dtype on each."""
    num_rows, width = x.shape
    assert 0 < num_columns <= width * blocks.size, (x.shape, num_columns, blocks.size)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _launch_flat(x, blocks, out, "columns", width)
    return out


def all_reduce_norm_(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, blocks: PeerBlocks) -> Tensor:
    """Do `all_reduce_norm_ref_`: add the sum of all ranks' `delta` to `hidden` in place and return the norm of the
    result, a new contiguous tensor [num_rows, size].

    `hidden` [num_rows, size] has a contiguous last dimension. `delta` is contiguous: [num_rows, size] of hidden's
    dtype, or parts [num_parts, num_rows, size] float32. Ranks may have unlike numbers of parts."""
    num_rows, size = hidden.shape
    assert serves_norm(hidden, delta, weight), (hidden.shape, hidden.stride(), hidden.dtype, weight.dtype)
    assert weight.shape == (size,) and weight.is_contiguous(), (hidden.shape, weight.shape)
    assert delta.shape[-2:] == hidden.shape and delta.is_contiguous(), (hidden.shape, delta.shape, delta.stride())
    assert delta.dtype == (hidden.dtype if delta.ndim == 2 else torch.float32), (delta.shape, delta.dtype)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        num_parts = 1 if delta.ndim == 2 else delta.shape[0]
        _launch(delta, blocks, out, num_rows, size, num_rows * size, "sum", (hidden, weight, eps), num_parts)
    return out


def serves_scatter(hidden: Tensor, _: Tensor, weight: Tensor, __: float, blocks: PeerBlocks) -> bool:
    """Return whether `reduce_scatter_norm_` takes these tensors: a slot must hold a row for
    every rank, and registers one."""
    is_row = hidden.dtype == weight.dtype and hidden.dtype in _FLOATS and hidden.stride(-1) == 1
    row_bytes = int(triton.next_power_of_2(hidden.shape[1])) * hidden.itemsize
    return is_row and row_bytes <= MAX_ROW_BYTES and row_bytes * blocks.size <= SLOT_BYTES


def reduce_scatter(x: Tensor, blocks: PeerBlocks) -> Tensor:
    """Return `reduce_scatter_ref` of all ranks' `x` [num_ranks, ...]: a new contiguous tensor [...]. `x` has the same
    shape and dtype on each rank."""
    assert x.dtype in _FLOATS and x.shape[0] == blocks.size, (x.dtype, x.shape, blocks.size)
    out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    num_elements = out.numel()
    if num_elements:
        most = SLOT_BYTES // x.itemsize // triton.next_power_of_2(blocks.size)
        tile = min(tile_size(num_elements, x.itemsize), most)
        _launch_scatter(x.contiguous(), blocks, out, triton.cdiv(num_elements, tile), tile, None)
    return out


def reduce_scatter_norm_(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, blocks: PeerBlocks) -> Tensor:
    """Add this rank's rows of the sum of all ranks' `delta` to `hidden` [num_rows, size] in place. Return the norm of
    the result, a new contiguous tensor [num_rows, size].

    `hidden` has a contiguous last dimension. `delta` is contiguous: [num_ranks * num_rows, size] of hidden's dtype, in
    the order of the ranks, or parts [num_parts, num_ranks * num_rows, size] float32. Ranks may have unlike numbers of
    parts, and have equal numbers of rows."""
    num_rows, size = hidden.shape
    assert serves_scatter(hidden, delta, weight, eps, blocks), (
        hidden.shape,
        hidden.stride(),
        hidden.dtype,
        weight.dtype,
    )
    assert weight.shape == (size,) and weight.is_contiguous(), (hidden.shape, weight.shape)
    assert delta.shape[-2:] == (blocks.size * num_rows, size) and delta.is_contiguous(), (hidden.shape, delta.shape)
    assert delta.dtype == (hidden.dtype if delta.ndim == 2 else torch.float32), (delta.shape, delta.dtype)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        num_parts = 1 if delta.ndim == 2 else delta.shape[0]
        _launch_scatter(delta, blocks, out, num_rows, size, (hidden, weight, eps), num_parts)
    return out


def _launch_flat(x: Tensor, blocks: PeerBlocks, out: Tensor, kind: Kind, width: int = 1) -> None:
    """Work on `x` as a row of numbers, in tiles of equal size. `width`: of its rows, if the kind is "columns"."""
    num_elements = x.numel()
    if not num_elements:
        return
    tile = tile_size(num_elements, x.itemsize)
    _launch(x.contiguous(), blocks, out, triton.cdiv(num_elements, tile), tile, num_elements, kind, width=width)


def _launch(
    x: Tensor,
    blocks: PeerBlocks,
    out: Tensor,
    num_rows: int,
    size: int,
    num_elements: int,
    kind: Kind,
    norm: tuple[Tensor, Tensor, float] | None = None,
    num_parts: int = 1,
    width: int = 1,
    num_ranks: int = 1,
) -> None:
    """Launch `_exchange_kernel` for `num_rows` rows of `size` elements; the last one may be shorter. `norm`: the
    residual, and the weight and eps of its norm. `num_ranks`: of this launch; more than one have their tensors end to
    end, on one GPU."""
    num_columns = out.shape[-1] if kind == "columns" else 1
    assert x.device == out.device == blocks.addresses.device, (x.device, out.device, blocks.addresses.device)
    block, dependent = triton.next_power_of_2(size), gpu.dependent_launch(num_rows)
    hidden, weight, eps = norm or (out, out, 0.0)
    _exchange_kernel[(min(num_rows, NUM_LANES), num_ranks)](
        x, hidden, weight, out, blocks.addresses, blocks.control, blocks.rank, num_rows, num_elements,
        hidden.stride(-2) if norm else 0, eps, SIZE=size, BLOCK=block, NUM_RANKS=blocks.size, PARTS=num_parts,
        KIND=kind, NORMS=norm is not None, IS_FLOAT=out.dtype.is_floating_point, WIDTH=width, COLUMNS=num_columns,
        MANY=num_rows > NUM_LANES, CLOCKED=x.is_cuda, DEPENDENT=dependent, num_warps=num_warps(block), num_stages=1,
        launch_pdl=dependent,
    )  # fmt: skip


def _launch_scatter(
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
def _exchange_kernel(
    x_ptr,  # [num_elements], PARTS of them, of out's dtype or float32
    hidden_ptr,  # [num_rows, SIZE] of out's dtype, rows hidden_stride apart; read and written if NORMS
    weight_ptr,  # [SIZE] of out's dtype, read if NORMS
    out_ptr,  # [num_elements]; "gather": [NUM_RANKS, num_elements]; "columns": [num_elements / WIDTH, COLUMNS]; written
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
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of x, for "columns"
    COLUMNS: tl.constexpr,  # of a row of `out`, likewise
    MANY: tl.constexpr,  # a lane has more rows than one
    CLOCKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (min(num_rows, NUM_LANES), ranks of this launch). Of n lanes each has every n-th row of
    SIZE elements."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    lane, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_ptr += tl.program_id(1) * PARTS * num_elements
    hidden_ptr += tl.program_id(1) * num_rows * hidden_stride
    out_ptr += tl.program_id(1) * num_elements
    rank += tl.program_id(1)
    own = tl.load(blocks_ptr + rank)
    weight = tl.zeros([BLOCK], tl.float32)
    if NORMS:
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    count_ptr = (own + lane * 8).to(tl.pointer_type(tl.int64))
    count = tl.load(count_ptr) + 1
    slot = _SLOTS_AT + ((count % 2) * _LANES + lane) * _SLOT
    if MANY:
        row_bytes: tl.constexpr = max(16, BLOCK * max(8, dtype.primitive_bitwidth) // 8)
        at_once: tl.constexpr = _SLOT // row_bytes
        num_lanes, first = tl.num_programs(0), lane
        while first < num_rows:
            num_here = tl.minimum(at_once, tl.cdiv(num_rows - first, num_lanes))
            for i in range(num_here):
                x = _own_row(x_ptr, first + i * num_lanes, num_elements, dtype, SIZE, BLOCK, PARTS, NORMS)
                is_in = _is_in(first + i * num_lanes, num_elements, SIZE, BLOCK, NORMS)
                tl.store(_pointer(own + slot + i * row_bytes, dtype) + columns, x, mask=is_in)
            _meet(blocks_ptr, control_ptr, own, rank, lane, count, NUM_RANKS, CLOCKED)
            for i in range(num_here):
                row = first + i * num_lanes
                is_in = _is_in(row, num_elements, SIZE, BLOCK, NORMS)
                x = tl.load(_pointer(own + slot + i * row_bytes, dtype) + columns, mask=is_in, other=0)
                hidden = _residual(hidden_ptr, row, hidden_stride, SIZE, BLOCK, NORMS)
                _finish(
                    x, hidden, weight, hidden_ptr, out_ptr, blocks_ptr, slot + i * row_bytes, rank, row, num_elements,
                    hidden_stride, eps, SIZE, BLOCK, NUM_RANKS, KIND, NORMS, IS_FLOAT, WIDTH, COLUMNS,
                )  # fmt: skip
            first += at_once * num_lanes
            if first < num_rows:
                count += 1
                slot = _SLOTS_AT + ((count % 2) * _LANES + lane) * _SLOT
    else:
        x = _own_row(x_ptr, lane, num_elements, dtype, SIZE, BLOCK, PARTS, NORMS)
        is_in = _is_in(lane, num_elements, SIZE, BLOCK, NORMS)
        tl.store(_pointer(own + slot, dtype) + columns, x, mask=is_in)
        hidden = _residual(hidden_ptr, lane, hidden_stride, SIZE, BLOCK, NORMS)
        _meet(blocks_ptr, control_ptr, own, rank, lane, count, NUM_RANKS, CLOCKED)
        _finish(
            x, hidden, weight, hidden_ptr, out_ptr, blocks_ptr, slot, rank, lane, num_elements, hidden_stride, eps,
            SIZE, BLOCK, NUM_RANKS, KIND, NORMS, IS_FLOAT, WIDTH, COLUMNS,
        )  # fmt: skip
    tl.store(count_ptr, count)


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
        slot = _APART + _SLOTS_AT + ((count % 2) * _LANES + lane) * _SLOT
        x = tl.zeros([BLOCK], dtype)
        for other in tl.static_range(NUM_RANKS):
            each = _summand(x_ptr, other, at, is_in, num_elements, NUM_RANKS, PARTS, dtype)
            tl.store(_pointer(own + slot, dtype) + other * BLOCK + columns, each, mask=is_in & (other != rank))
            x = tl.where(other == rank, each, x)
        if NORMS:
            hidden_at = hidden_ptr + row * hidden_stride + columns
            hidden = tl.load(hidden_at, mask=is_in, other=0.0).to(tl.float32)
        _meet(blocks_ptr, control_ptr, own, rank, lane, count, NUM_RANKS, CLOCKED, _APART)
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(NUM_RANKS):
            theirs = _pointer(tl.load(blocks_ptr + other) + slot, dtype) + rank * BLOCK + columns
            theirs = tl.load(theirs, mask=is_in & (other != rank), other=0, cache_modifier=".cg")
            wide = tl.where(other == rank, x, theirs).to(tl.float32)
            total = wide if other == 0 else total + wide
        if NORMS:
            hidden = (hidden + total.to(dtype).to(tl.float32)).to(dtype)
            tl.store(hidden_at, hidden, mask=is_in)
            normed = _normed(hidden, eps, SIZE)
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
def _is_in(row, num_elements, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr):
    """Return the mask [BLOCK] of a row's elements."""
    columns = tl.arange(0, BLOCK)
    is_in = columns < SIZE
    if not NORMS:  # the last row may be shorter
        is_in = is_in & (columns < (num_elements - row * SIZE).to(tl.int32))
    return is_in


@triton.jit
def _own_row(
    x_ptr,
    row,
    num_elements,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Return this rank's summand of a row, [BLOCK] of `dtype`: the sum of its parts, rounded."""
    columns, is_in = tl.arange(0, BLOCK), _is_in(row, num_elements, SIZE, BLOCK, NORMS)
    x = tl.load(x_ptr + row * SIZE + columns, mask=is_in, other=0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * num_elements.to(tl.int64) + row * SIZE) + columns, mask=is_in, other=0)
    return x.to(dtype)


@triton.jit
def _residual(hidden_ptr, row, hidden_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr):
    """Return a row of the residual, [BLOCK] float32; zeros without one."""
    hidden = tl.zeros([BLOCK], tl.float32)
    if NORMS:
        columns = tl.arange(0, BLOCK)
        hidden = tl.load(hidden_ptr + row * hidden_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    return hidden


@triton.jit
def _finish(
    x,
    hidden,
    weight,
    hidden_ptr,
    out_ptr,
    blocks_ptr,
    place,  # of the row in every rank's block
    rank,
    row,
    num_elements,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    KIND: tl.constexpr,
    NORMS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read a row of the other ranks after a meeting, and write the result."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    begin, is_in = row * SIZE, _is_in(row, num_elements, SIZE, BLOCK, NORMS)
    total = x
    for other in tl.static_range(NUM_RANKS):
        theirs = _pointer(tl.load(blocks_ptr + other) + place, dtype) + columns
        theirs = tl.load(theirs, mask=is_in & (other != rank), other=0, cache_modifier=".cg")
        each = tl.where(other == rank, x, theirs)
        if KIND == "gather":
            tl.store(out_ptr + (other * num_elements.to(tl.int64) + begin) + columns, each, mask=is_in)
        elif KIND == "columns":
            at = (begin % WIDTH).to(tl.int32) + columns
            column = other * WIDTH + at % WIDTH
            begin_out = out_ptr + begin // WIDTH * COLUMNS
            tl.store(begin_out + (at // WIDTH * COLUMNS + column), each, mask=is_in & (column < COLUMNS))
        elif KIND == "sum":
            wide = each.to(tl.float32)
            total = wide if other == 0 else total + wide
        elif IS_FLOAT:
            total = each if other == 0 else tl.maximum(total, each, propagate_nan=tl.PropagateNan.ALL)
        else:
            total = each if other == 0 else tl.maximum(total, each)
    if NORMS:
        hidden = (hidden + total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(hidden_ptr + row * hidden_stride + columns, hidden, mask=is_in)
        normed = _normed(hidden, eps, SIZE)
        tl.store(out_ptr + begin + columns, (normed * weight).to(dtype), mask=is_in)
    elif KIND != "gather" and KIND != "columns":
        tl.store(out_ptr + begin + columns, total.to(dtype), mask=is_in)


@triton.jit
def _normed(hidden, eps, SIZE: tl.constexpr):
    """Return the norm of a row without its weight, [BLOCK] float32, rounded to the row's dtype."""
    dtype: tl.constexpr = hidden.dtype
    hidden = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / SIZE + eps)
    return (hidden * scale).to(dtype).to(tl.float32)


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Return a pointer to elements that start at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _meet(
    blocks_ptr,
    control_ptr,
    own,
    rank,
    lane,
    count,
    NUM_RANKS: tl.constexpr,
    CLOCKED: tl.constexpr,
    APART: tl.constexpr = 0,
):
    """Show the others what this lane has written, and wait until they have written, too. The flags lie APART bytes
    behind those of `_exchange_kernel`."""
    tl.debug_barrier()  # all threads have written, and have read what they read in the last meeting
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            flag = tl.load(blocks_ptr + other) + APART + _FLAGS_AT + (lane * _RANKS + rank) * 8
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), count, sem="release", scope="sys")
    for other in tl.static_range(NUM_RANKS):
        if other != rank:
            flag = own + APART + _FLAGS_AT + (lane * _RANKS + other) * 8
            gave_up = own + _FLAGS_AT + rank * 8  # the word of all kernels of this rank: the flag for itself
            pointer = tl.pointer_type(tl.int64)
            _wait(flag.to(pointer), count, gave_up.to(pointer), control_ptr, CLOCKED)
    tl.debug_barrier()


@triton.jit
def _wait(flag_ptr, count, gave_up_ptr, control_ptr, CLOCKED: tl.constexpr):
    """Wait until the flag is `count` or more. Give up if the host says so, after the limit, or if another lane did."""
    num_looks = count * 0
    begun = num_looks
    if CLOCKED:
        begun = globaltimer()
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while seen < count:
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        num_looks += 1
        if num_looks % _LOOKS == 0:
            gave_up = tl.load(gave_up_ptr, volatile=True)
            if not CLOCKED or num_looks % _HOST_LOOKS == 0:
                now = num_looks
                if CLOCKED:
                    now = globaltimer()
                is_late = now - begun > tl.load(control_ptr + _LIMIT, volatile=True)
                gave_up += is_late | (tl.load(control_ptr + _FAILED, volatile=True) != 0)
            if gave_up != 0:
                tl.store(gave_up_ptr, 1)
                tl.store(control_ptr + _FAILED, 1)
                seen = count

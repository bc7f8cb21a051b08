"""`rms_norm` and `add_rms_norm_` of norm.py on a GPU, one pass each.

    y = x * rsqrt(mean(x^2) + eps) rounded to the weight's dtype, * weight

Sums are float32. One program sums a row, in an order that depends on the row's size alone. So a row's result does not
depend on the rows beside it.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu

MAX_SIZE = 16384
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # elements of a program that works on several short rows


def serves(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> bool:
    """Return whether `rms_norm` takes these tensors, with any eps."""
    is_weight = weight.dtype in (x.dtype, torch.float32) and x.dtype in _DTYPES
    return is_weight and 0 < x.shape[-1] <= MAX_SIZE and x.stride(-1) == 1


def serves_sum(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, *_: object, **__: object
) -> bool:
    """Return whether `add_rms_norm_` takes these tensors, with any delta and eps."""
    del delta
    return serves(hidden, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `rms_norm_ref`, a new contiguous tensor of x's shape.

    `x` [..., size] has a contiguous last dimension, and `weight` [size] has its dtype or is float32. A view of heads
    [num_tokens, num_heads, size] is read in place, without a copy."""
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.ndim == 3 else x.reshape(-1, 1, size)  # [num_outer, num_inner, size]
    _launch(rows, None, weight, eps, out)
    return out


def add_rms_norm_(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Do `add_rms_norm_ref_`: add `delta` to `hidden` in place and return the norm of the sum, a new contiguous tensor.

    `hidden` and `delta` are [num_rows, size] with a contiguous last dimension. If `delta` holds parts [num_parts,
    num_rows, size], it is contiguous and float32."""
    if delta is None:
        return rms_norm(hidden, weight, eps)
    assert hidden.ndim == 2 and delta.shape[-2:] == hidden.shape, (hidden.shape, delta.shape)
    if delta.ndim == 3:
        assert delta.dtype == torch.float32 and delta.is_contiguous(), (delta.dtype, delta.stride())
    else:
        assert delta.ndim == 2 and delta.dtype == hidden.dtype, (delta.shape, delta.dtype)
        assert delta.shape[1] == 1 or delta.stride(1) == 1, delta.stride()
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(hidden.unsqueeze(1), delta, weight, eps, out)
    return out


def _launch(
    rows: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Norm `rows` [num_outer, num_inner, size] into `out`, contiguous, after the sum with `delta`, if any."""
    num_outer, num_inner, size = rows.shape
    num_rows = num_outer * num_inner
    assert weight.shape == (size,) and weight.is_contiguous(), (rows.shape, weight.shape)
    assert serves(rows, weight), (rows.shape, rows.stride(), rows.dtype, weight.dtype)
    if num_rows == 0:
        return
    block, dependent = triton.next_power_of_2(size), gpu.dependent_launch(num_rows)
    rows_per_program = max(1, _TILE // block)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        rows, rows if delta is None else delta, weight, out, num_rows, num_inner, rows.stride(0), rows.stride(1),
        0 if delta is None else delta.stride(-2), eps, SIZE=size, BLOCK=block, ROWS=rows_per_program,
        ADDS=delta is not None, PARTS=1 if delta is None or delta.ndim == 2 else delta.shape[0],
        DEPENDENT=dependent, num_warps=min(16, max(4, block // 512)),
        launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # [num_outer, num_inner, SIZE], strides outer_stride and inner_stride; written if ADDS
    delta_ptr,  # [num_rows, SIZE] of x's dtype, or parts [PARTS, num_rows, SIZE] float32; read if ADDS
    weight_ptr,  # [SIZE] of x's dtype or float32
    out_ptr,  # [num_rows, SIZE] of x's dtype, written
    num_rows,
    num_inner,
    outer_stride,
    inner_stride,
    delta_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(num_rows / ROWS),). A program norms ROWS rows, num_rows = num_outer * num_inner."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    is_in = (rows < num_rows) & (columns < SIZE)
    at = (rows // num_inner) * outer_stride + (rows % num_inner) * inner_stride + columns
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + at, mask=is_in, other=0.0)
    if ADDS:
        delta_at = delta_ptr + rows * delta_stride + columns
        delta = tl.load(delta_at, mask=is_in, other=0.0)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_at + part * num_rows.to(tl.int64) * SIZE, mask=is_in, other=0.0)
        delta = delta.to(x.dtype)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + at, x, mask=is_in)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    normed = (wide * scale).to(weight.dtype).to(tl.float32)
    tl.store(out_ptr + rows * SIZE + columns, (normed * weight.to(tl.float32)).to(x.dtype), mask=is_in)

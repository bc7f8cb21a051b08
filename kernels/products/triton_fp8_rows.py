"""`round_rows`, `round_to_scale`, `add_rms_norm_round_` and `silu_mul_round` of fp8.py on a GPU, one pass each.

A program has one row, or some groups of columns of one row. The two kernels that do something before they round give
the numbers of both steps in turn: what is rounded to e4m3 was rounded to the dtype of the model first.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .fp8 import E4M3, RoundedRows
from .triton_silu import silu_mul_of

MAX_SIZE = 16384  # of a row that one program holds
_TILE = 1024  # numbers of a program that has some groups of a row
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter truncates where a GPU rounds to e4m3, and it has no fused multiply-add.
_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def round_rows(x: Tensor, group: int, *, has_power_of_two_scales: bool = False) -> RoundedRows:
    """Return `round_rows_ref`, the same numbers: `x` [num_rows, size], whose last dimension is contiguous."""
    num_rows, size = x.shape
    assert x.stride(1) == 1, x.stride()
    rows, group, num_groups, width = _empty_rows(x, size, group)
    if num_rows:
        at_once = max(1, _TILE // width)
        dependent = gpu.dependent_launch(num_rows)
        _round_kernel[num_rows, triton.cdiv(num_groups, at_once)](
            x, rows.values, rows.scales, rows.scales, size, num_groups, x.stride(0), group, GROUPS=at_once, WIDTH=width,
            IS_STORED=False, IS_STORED_BY_ROW=False, IS_POWER=has_power_of_two_scales, DEPENDENT=dependent,
            num_warps=_num_warps(at_once * width), launch_pdl=dependent,
        )  # fmt: skip
    return rows


def round_to_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Return `round_to_scale_ref`, the same numbers: `x` [num_rows, size], whose last dimension is contiguous."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 and scale.shape in ((), (num_rows, 1)) and scale.is_contiguous(), (x.stride(), scale.shape)
    values = torch.empty((num_rows, size), dtype=E4M3, device=x.device)
    if num_rows:
        dependent = gpu.dependent_launch(num_rows)
        _round_kernel[num_rows, triton.cdiv(size, _TILE)](
            x, values, scale, scale, size, triton.cdiv(size, _TILE), x.stride(0), _TILE, GROUPS=1, WIDTH=_TILE,
            IS_STORED=True, IS_STORED_BY_ROW=scale.ndim == 2, IS_POWER=False, DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return values


def serves_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, *_: object, **__: object) -> bool:
    """Return whether `add_rms_norm_round_` takes these tensors, with any delta, eps and group."""
    del delta
    is_weight = weight.dtype in (hidden.dtype, torch.float32)
    return is_weight and 0 < hidden.shape[1] <= MAX_SIZE and hidden.stride(1) == 1


def add_rms_norm_round_(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int,
    *,
    has_power_of_two_scales: bool = False,
    out: Tensor | None = None,
) -> RoundedRows:
    """Do `add_rms_norm_round_ref_`. `hidden` [num_rows, size] has a contiguous last dimension, and so has `delta`.
    Parts and `out` are contiguous."""
    num_rows, size = hidden.shape
    assert weight.shape == (size,) and weight.is_contiguous(), (hidden.shape, weight.shape)
    assert delta is None or (delta.shape[-2:] == hidden.shape and delta.stride(-1) == 1), (hidden.shape, delta)
    assert delta is None or delta.dtype == (hidden.dtype if delta.ndim == 2 else torch.float32), delta.dtype
    assert out is None or (out.shape == hidden.shape and out.is_contiguous()), (hidden.shape, out.shape)
    rows, group, num_groups, width = _empty_rows(hidden, size, group)
    if num_rows:
        num_at_once = triton.next_power_of_2(num_groups)
        dependent = gpu.dependent_launch(num_rows)
        _norm_round_kernel[num_rows,](
            hidden, hidden if delta is None else delta, weight, out, rows.values, rows.scales, num_rows, size,
            num_groups, hidden.stride(0), 0 if delta is None else delta.stride(-2), eps, group, GROUPS=num_at_once,
            WIDTH=width, ADDS=delta is not None, PARTS=1 if delta is None or delta.ndim == 2 else delta.shape[0],
            IS_POWER=has_power_of_two_scales, DEPENDENT=dependent, num_warps=_num_warps(num_at_once * width),
            launch_pdl=dependent,
        )  # fmt: skip
    return rows


def serves_silu(gate_up: Tensor, *_: object, **__: object) -> bool:
    """Return whether `silu_mul_round` takes such a tensor, with any group."""
    return gate_up.is_contiguous() and 0 < gate_up.shape[1] // 2 <= MAX_SIZE


def silu_mul_round(gate_up: Tensor, group: int, *, has_power_of_two_scales: bool = False) -> RoundedRows:
    """Return `silu_mul_round_ref` of `gate_up` [num_rows, 2 * size], contiguous."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous() and gate_up.dtype in _FLOATS, (gate_up.stride(), gate_up.dtype)
    rows, group, num_groups, width = _empty_rows(gate_up, size, group)
    if num_rows:
        at_once = max(1, _TILE // width)
        dependent = gpu.dependent_launch(num_rows)
        _silu_round_kernel[num_rows, triton.cdiv(num_groups, at_once)](
            gate_up, rows.values, rows.scales, size, num_groups, group, GROUPS=at_once, WIDTH=width,
            IS_POWER=has_power_of_two_scales, DEPENDENT=dependent, num_warps=_num_warps(at_once * width, most=32),
            launch_pdl=dependent,
        )  # fmt: skip
    return rows


def _empty_rows(x: Tensor, size: int, group: int) -> tuple[RoundedRows, int, int, int]:
    """Return rounded rows to write [num_rows, size], the columns of a group, the number of groups, and the power of two
    that holds a group."""
    group = min(group, size)
    num_groups = -(-size // group)
    values = torch.empty((len(x), size), dtype=E4M3, device=x.device)
    scales = torch.empty((len(x), num_groups), dtype=torch.float32, device=x.device)
    return RoundedRows(values, scales), group, num_groups, 1 << (group - 1).bit_length()


def _num_warps(num_numbers: int, most: int = 16) -> int:
    """Return the warps of a program of so many numbers: 8 or more numbers per thread."""
    return min(most, max(4, num_numbers // 256))


@triton.jit
def e4m3(y):
    """Return float32 numbers rounded to e4m3, the even one of two neighbours, at most 448."""
    if _IS_INTERPRETED:
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of the mantissa are left
        small = (y + 24576.0) - 24576.0  # multiples of 2^-9, below 2^-6
        y = tl.where(tl.abs(y) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return y.to(tl.float8e4nv)


@triton.jit
def quotients(x, scales):
    """Return x / scales, correctly rounded if the scale is above 2^-100: one step from a product with the reciprocal
    (Markstein, IBM J. Res. Dev. 34, 1990). Division itself takes several times as long."""
    if _IS_INTERPRETED:
        return tl.div_rn(x, scales)
    reciprocals = tl.div_rn(1.0, tl.maximum(scales, 1.1754944e-38))
    q = x * reciprocals
    return tl.fma(tl.fma(-q, scales + tl.zeros_like(q), x), reciprocals + tl.zeros_like(q), q)


@triton.jit
def scales_for(largest, IS_POWER: tl.constexpr):
    """Return the scales of groups whose largest absolute numbers are `largest`, float32: 1 for a scale of 0."""
    scales = tl.div_rn(largest, 448.0)
    scales = tl.where(scales > 0, scales, 1.0)
    if IS_POWER:
        bits = scales.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & -0x800000  # the next power of two
        scales = bits.to(tl.float32, bitcast=True)
    return scales


@triton.jit(do_not_specialize=["num_groups"])
def _round_kernel(
    x_ptr,  # [num_rows, size]
    values_ptr,  # [num_rows, size] e4m3, written
    scales_ptr,  # [num_rows, num_groups] float32, written unless IS_STORED
    stored_ptr,  # [] or [num_rows] float32, read if IS_STORED
    size,
    num_groups,
    x_stride,
    group,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # at least `group`
    IS_STORED: tl.constexpr,
    IS_STORED_BY_ROW: tl.constexpr,
    IS_POWER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_groups / GROUPS))."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inner = tl.arange(0, WIDTH)
    columns = groups[:, None] * group + inner[None, :]
    is_in = (inner < group)[None, :] & (columns < size)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if IS_STORED:
        y = quotients(x, tl.load(stored_ptr + (row if IS_STORED_BY_ROW else 0)))
    else:
        scales = scales_for(tl.max(tl.abs(x), 1), IS_POWER)
        tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)
        y = quotients(x, scales[:, None])
    tl.store(values_ptr + row * size + columns, e4m3(y), mask=is_in)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _norm_round_kernel(
    x_ptr,  # [num_rows, size]; written if ADDS
    delta_ptr,  # [num_rows, size] of x's dtype, or parts [PARTS, num_rows, size] float32; read if ADDS
    weight_ptr,  # [size] of x's dtype or float32
    out_ptr,  # [num_rows, size] of x's dtype, written; None: not wanted
    values_ptr,  # [num_rows, size] e4m3, written
    scales_ptr,  # [num_rows, num_groups] float32, written
    num_rows,
    size,
    num_groups,
    x_stride,
    delta_stride,
    eps,
    group,
    GROUPS: tl.constexpr,  # at least num_groups
    WIDTH: tl.constexpr,  # at least `group`
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    IS_POWER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    groups, inner = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    columns = groups[:, None] * group + inner[None, :]
    is_in = (inner < group)[None, :] & (columns < size)
    weight = tl.load(weight_ptr + columns, mask=is_in, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = x_ptr + row * x_stride + columns
    x = tl.load(at, mask=is_in, other=0.0)
    if ADDS:
        delta_at = delta_ptr + row * delta_stride + columns
        delta = tl.load(delta_at, mask=is_in, other=0.0)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_at + part * num_rows.to(tl.int64) * size, mask=is_in, other=0.0)
        delta = delta.to(x.dtype)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(at, x, mask=is_in)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / size + eps)
    normed = ((wide * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    if out_ptr is not None:
        tl.store(out_ptr + row * size + columns, normed, mask=is_in)
    normed = normed.to(tl.float32)
    scales = scales_for(tl.max(tl.abs(normed), 1), IS_POWER)
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)
    tl.store(values_ptr + row * size + columns, e4m3(quotients(normed, scales[:, None])), mask=is_in)


@triton.jit(do_not_specialize=["num_groups"])
def _silu_round_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]
    values_ptr,  # [num_rows, size] e4m3, written
    scales_ptr,  # [num_rows, num_groups] float32, written
    size,
    num_groups,
    group,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # at least `group`
    IS_POWER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_groups / GROUPS))."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inner = tl.arange(0, WIDTH)
    columns = groups[:, None] * group + inner[None, :]
    is_in = (inner < group)[None, :] & (columns < size)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = gate_up_ptr + row * 2 * size + columns
    gate = tl.load(at, mask=is_in, other=0.0)
    up = tl.load(at + size, mask=is_in, other=0.0)
    gated = silu_mul_of(gate, up).to(tl.float32)
    scales = scales_for(tl.max(tl.abs(gated), 1), IS_POWER)
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)
    tl.store(values_ptr + row * size + columns, e4m3(quotients(gated, scales[:, None])), mask=is_in)

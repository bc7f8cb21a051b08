"""Products of 8-bit floating-point numbers (e4m3), y = x W^T + b. W and the rows x are multiples of scales:

    x[m, k] = x_values[m, k] * x_scales[m, k / group]      W[n, k] = values[n, k] * scales[n / rows, k / group]

`group` is the number of columns that share a scale. A product of two e4m3 numbers is exact in float32.

What stands before a product can round its own result (`add_rms_norm_round_`, `silu_mul_round`), which spares a pass
over the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import BLOCK
from ..operations import Operation
from .norm import add_rms_norm_
from .silu import silu_mul

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest e4m3 number; larger ones become it


class RoundedRows(NamedTuple):
    """Rows of x as `fp8_linear` takes them."""

    values: Tensor  # [num_rows, size] float8_e4m3fn; or numbers of 16 or 32 bits that are not rounded
    scales: Tensor | None  # [num_rows, ceil(size / group)] float32; None: they are 1, or the product has them


class Fp8Weight(NamedTuple):
    """A weight with its scales, as `fp8_linear` takes them."""

    values: Tensor  # [out_size, in_size] float8_e4m3fn
    scales: Tensor  # [ceil(out_size / rows), ceil(in_size / group)] float32, where `rows` is 1 or BLOCK
    group: int  # columns that share a scale


def round_rows_ref(x: Tensor, group: int, *, has_power_of_two_scales: bool = False) -> RoundedRows:
    """Round rows to e4m3, with a scale for each `group` columns of each row, so that the largest becomes LARGEST.

    `x` [num_rows, size] -> values [num_rows, size] float8_e4m3fn, scales [num_rows, ceil(size / group)] float32.
    `has_power_of_two_scales`: scales are the next larger powers of two (DeepSeek-V3.1's ue8m0)."""
    num_rows, size = x.shape
    groups = F.pad(x.float(), (0, -size % group)).view(num_rows, -(-size // group), group)
    scales = scales_for(groups.abs().amax(-1))
    if has_power_of_two_scales:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    values = (groups / scales.unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    return RoundedRows(values.flatten(1)[:, :size].to(E4M3), scales)


def scales_for(largest: Tensor) -> Tensor:
    """Return the scales of rows or groups whose largest absolute numbers are `largest`, float32. A scale that would be
    0, of zeros or of numbers below about 2^-141, is 1: they become zeros."""
    divisor = torch.full_like(largest, LARGEST)  # torch multiplies by the reciprocal of a number on a GPU
    scales = largest / divisor
    return torch.where(scales > 0, scales, 1.0)


def round_to_scale_ref(x: Tensor, scale: Tensor) -> Tensor:
    """Round `x` / `scale` to e4m3: `x` [num_rows, size], `scale` [] or [num_rows, 1] float32 -> [num_rows, size]
    float8_e4m3fn."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(E4M3)


def add_rms_norm_round_ref_(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int,
    *,
    has_power_of_two_scales: bool = False,
    out: Tensor | None = None,
) -> RoundedRows:
    """Do `add_rms_norm_` (norm.py), and return its result rounded by `round_rows`. The result itself is written to
    `out` [num_rows, size], if that is given."""
    normed = add_rms_norm_(hidden, delta, weight, eps)
    if out is not None:
        out.copy_(normed)
    return round_rows(normed, group, has_power_of_two_scales=has_power_of_two_scales)


def silu_mul_round_ref(gate_up: Tensor, group: int, *, has_power_of_two_scales: bool = False) -> RoundedRows:
    """Return `silu_mul` (silu.py) of `gate_up` [num_rows, 2 * size], rounded by `round_rows`."""
    return round_rows(silu_mul(gate_up), group, has_power_of_two_scales=has_power_of_two_scales)


def fp8_linear_ref(rows: RoundedRows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product in `dtype`, [num_rows, out_size], of sums in float32. `bias` [out_size]."""
    values, scales = rows
    wide = values.float() if scales is None else values.float() * spread(scales, weight.group, values.shape[1])
    product = F.linear(wide, dequantized(*weight))
    return (product if bias is None else product + bias.float()).to(dtype)


def fp8_linear_parts_ref(rows: RoundedRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return the product [num_rows, out_size]. A backend may return float32 parts of it instead, [num_parts, num_rows,
    out_size], for a reader that takes the sum: `add_rms_norm_`, `add_rms_norm_round_` or `sum_parts` (linear.py)."""
    return fp8_linear(rows, weight, None, dtype)


def fp8_gated_linear_ref(rows: RoundedRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return `silu_mul` of the product: weight [2 * size, in_size], gate first -> [num_rows, size]."""
    return silu_mul(fp8_linear(rows, weight, None, dtype))


def gates_fp8_ref(rows: RoundedRows, weight: Fp8Weight) -> bool:  # noqa: ARG001
    """Return whether one kernel does `fp8_gated_linear`."""
    return False


def dequantized(weight: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the numbers that a weight stands for, [out_size, in_size] float32. Arguments as of `Fp8Weight`."""
    rows = scales if len(scales) == len(weight) else scales.repeat_interleave(BLOCK, 0)[: len(weight)]
    return weight.float() * spread(rows, group, weight.shape[1])


def spread(scales: Tensor, group: int, size: int) -> Tensor:
    """Return the scale of each of `size` columns, or one for all of them: [num_rows, size or 1]."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(group, 1)[:, :size]


round_rows = Operation("round_rows", round_rows_ref)
round_to_scale = Operation("round_to_scale", round_to_scale_ref)
add_rms_norm_round_ = Operation("add_rms_norm_round_", add_rms_norm_round_ref_)
silu_mul_round = Operation("silu_mul_round", silu_mul_round_ref)
# ruff: noqa: ARG005
fp8_linear = Operation("fp8_linear", fp8_linear_ref, by=lambda rows, weight, *_, **__: weight.values)
fp8_linear_parts = Operation("fp8_linear_parts", fp8_linear_parts_ref, by=lambda rows, weight, *_, **__: weight.values)
fp8_gated_linear = Operation("fp8_gated_linear", fp8_gated_linear_ref, by=lambda rows, weight, *_, **__: weight.values)
gates_fp8 = Operation("gates_fp8", gates_fp8_ref, by=lambda rows, weight: weight.values)

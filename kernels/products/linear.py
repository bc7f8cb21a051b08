"""Products with a weight matrix, y = x W^T + b, with what stands before and after them in a decoder layer.

    norm       x is RMS-normed first (norm.py)
    gated      silu(gate) * up of the two halves of the product (silu.py)
    residual   the product is added to a tensor in place

A backend that `fuses` does these in the kernel of the product; each is rounded as if it were done apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operations import Operation
from .norm import Norm, rms_norm
from .silu import silu_mul


def linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias: `x` [num_rows, in_size], `weight` [out_size, in_size], `bias` [out_size].

    With `norm`, x is normed first. With `residual` [num_rows, out_size], the product is added to it in place, and it is
    returned. Otherwise the result is a new tensor [num_rows, out_size]."""
    x = x if norm is None else rms_norm(x, norm.weight, norm.eps)
    product = F.linear(x, weight, bias)
    return product if residual is None else residual.add_(product)


def gated_linear_ref(x: Tensor, weight: Tensor, *, norm: Norm | None = None) -> Tensor:
    """Return `silu_mul` of the product: `x` [num_rows, in_size], `weight` [2 * size, in_size], gate first -> a new
    tensor [num_rows, size]. With `norm`, x is normed first."""
    return silu_mul(linear_ref(x, weight, norm=norm))


def linear_parts_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product [num_rows, out_size]. A backend may return float32 parts of it instead, [num_parts, num_rows,
    out_size], for a reader that takes the sum: `add_rms_norm_` or `sum_parts`."""
    return F.linear(x, weight)


def sum_parts_ref(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of `linear_parts` [num_parts, num_rows, out_size] float32: a new [num_rows, out_size]."""
    return parts.sum(0).to(dtype)


def fuses_ref(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:  # noqa: ARG001
    """Return whether one kernel norms x, multiplies, and adds the product to a residual."""
    return False


linear = Operation("linear", linear_ref)
gated_linear = Operation("gated_linear", gated_linear_ref)
linear_parts = Operation("linear_parts", linear_parts_ref)
sum_parts = Operation("sum_parts", sum_parts_ref)
fuses = Operation("fuses", fuses_ref)

"""`experts_linear`, `gated_experts_linear` and `mix_parts` of experts.py on a GPU.

MXFP4 weights     triton_expert_packed.py
other weights     triton_expert_blocks.py
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..formats import SwigluClamp
from ..products.fp8 import BLOCK, E4M3
from .experts import ExpertWeight, Places
from .triton_expert_blocks import block_product
from .triton_expert_packed import packed_product

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MIX_BLOCK = 1024


def serves(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> bool:
    """Return whether the products take these tensors."""
    del places, dtype, clamp
    if x.stride(1) != 1 or not weight.values.is_contiguous():
        return False
    if weight.is_packed:
        return x.dtype in _FLOATS and x_scales is None
    if weight.scales is None:
        return x.dtype == weight.values.dtype and x.dtype in _FLOATS
    is_whole = weight.scales.shape[1] == 1 and (x_scales is None or x_scales.shape[1] == 1)
    return x.dtype in (E4M3, torch.bfloat16, torch.float16) and (is_whole or weight.group == BLOCK)


def experts_linear(
    x: Tensor, x_scales: Tensor | None, weight: ExpertWeight, places: Places, dtype: torch.dtype
) -> Tensor:
    """Return `experts_linear_ref`: sums in another order."""
    return _product(x, x_scales, weight, places, dtype, is_gated=False)


def gated_experts_linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    """Return `gated_experts_linear_ref`: sums in another order."""
    return _product(x, x_scales, weight, places, dtype, is_gated=True, clamp=clamp)


def _product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    *,
    is_gated: bool,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    num_pairs, out_size = places.chosen.numel(), len(weight.values) // places.num_experts
    assert x.shape[1] == weight.values.shape[1] * (2 if weight.is_packed else 1), (x.shape, weight.values.shape)
    out = torch.empty((num_pairs, out_size // 2 if is_gated else out_size), dtype=dtype, device=x.device)
    if num_pairs:
        by = packed_product if weight.is_packed else block_product
        by(x, x_scales, weight, places, out, is_gated=is_gated, clamp=clamp)
    return out


def serves_mix(parts: Tensor, shares: Tensor, others: Tensor | None = None) -> bool:
    """Return whether `mix_parts` takes these tensors."""
    return parts.is_contiguous() and shares.is_contiguous() and (others is None or others.is_contiguous())


def mix_parts(parts: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
    """Return `mix_parts_ref`, bit by bit but for fused multiply-adds."""
    (num_rows, num_active), size = shares.shape, parts.shape[1]
    assert others is None or others.shape[-2:] == (num_rows, size), (others.shape, num_rows, size)
    out = torch.empty((num_rows, size), dtype=parts.dtype, device=parts.device)
    if out.numel():
        num_others = 0 if others is None else 1 if others.ndim == 2 else len(others)
        dependent = gpu.dependent_launch(num_rows)
        _mix_kernel[num_rows, triton.cdiv(size, _MIX_BLOCK)](
            parts, shares, others, out, size, ACTIVE=num_active, OTHERS=num_others, BLOCK=_MIX_BLOCK,
            DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return out


@triton.jit
def _mix_kernel(
    parts_ptr,  # [num_rows * ACTIVE, size]
    shares_ptr,  # [num_rows, ACTIVE] float32
    others_ptr,  # [OTHERS, num_rows, size]; None: there are none
    out_ptr,  # [num_rows, size], written
    size,
    ACTIVE: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(ACTIVE):
        part = tl.load(parts_ptr + (row * ACTIVE + place) * size + columns, mask=is_in, other=0.0).to(tl.float32)
        y += part * tl.load(shares_ptr + row * ACTIVE + place)
    for other in tl.static_range(OTHERS):
        at = (other * tl.num_programs(0) + row) * size + columns
        y += tl.load(others_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=is_in)

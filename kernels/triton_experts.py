"""`place_experts`, `experts_linear`, `gated_experts_linear` and `mix_parts` of kernels/experts.py on a GPU.

MXFP4 weights     triton_expert_packed.py
one row           triton_expert_vectors.py
more rows         triton_expert_blocks.py
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

from . import gpu
from .experts import ExpertWeight, Places, block_size, most_blocks
from .fp8 import BLOCK, E4M3
from .silu import SwigluClamp
from .triton_expert_blocks import block_product
from .triton_expert_packed import packed_product

MAX_PLACED = 4096  # pairs that one program places; torch sorts more of them
_CHUNK = 32  # pairs that it looks at together
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MIX_BLOCK = 1024


def serves_places(chosen: Tensor, num_experts: int) -> bool:
    """Return whether `place_experts` takes so many pairs."""
    return 0 < chosen.numel() <= MAX_PLACED and chosen.is_contiguous() and num_experts <= 1024


def place_experts(chosen: Tensor, num_experts: int) -> Places:
    """Return `place_experts_ref` by one program."""
    num_pairs = chosen.numel()
    block = block_size(num_pairs, num_experts)
    num_blocks = most_blocks(num_pairs, num_experts, block)
    pairs = torch.empty(num_blocks * block, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=chosen.device)
    dependent = gpu.dependent_launch(len(chosen))
    _place_kernel[1,](
        chosen, pairs, experts, num_pairs, num_experts, num_blocks, EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=block, CHUNK=_CHUNK, DEPENDENT=dependent, num_warps=8, launch_pdl=dependent,
    )  # fmt: skip
    return Places(chosen, num_experts, pairs, experts)


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


def serves_mix(parts: Tensor, shares: Tensor) -> bool:
    """Return whether `mix_parts` takes these tensors."""
    return parts.is_contiguous() and shares.is_contiguous()


def mix_parts(parts: Tensor, shares: Tensor) -> Tensor:
    """Return `mix_parts_ref`, bit by bit but for fused multiply-adds."""
    (num_rows, num_active), size = shares.shape, parts.shape[1]
    out = torch.empty((num_rows, size), dtype=parts.dtype, device=parts.device)
    if out.numel():
        dependent = gpu.dependent_launch(num_rows)
        _mix_kernel[num_rows, triton.cdiv(size, _MIX_BLOCK)](
            parts, shares, out, size, ACTIVE=num_active, BLOCK=_MIX_BLOCK, DEPENDENT=dependent, launch_pdl=dependent
        )
    return out


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    chosen_ptr,  # [num_pairs] int64
    pairs_ptr,  # [num_blocks * BLOCK] int32, written
    experts_ptr,  # [num_blocks] int32, written
    num_pairs,
    num_experts,
    num_blocks,
    EXPERTS: tl.constexpr,  # at least num_experts
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (1,). Counts the pairs of each expert, and then gives each pair its place."""
    each, expert = tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    for start in range(0, num_blocks * BLOCK, CHUNK):
        tl.store(pairs_ptr + start + each, -1, mask=start + each < num_blocks * BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        chosen = tl.load(chosen_ptr + start + each, mask=start + each < num_pairs, other=-1).to(tl.int32)
        counts += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    for start in range(0, num_blocks, CHUNK):
        block = start + each
        is_behind = (ends[None, :] <= block[:, None]) & (expert < num_experts)[None, :]
        tl.store(experts_ptr + block, tl.sum(is_behind.to(tl.int32), 1), mask=block < num_blocks)
    tl.debug_barrier()  # a pair may be written by another thread than its -1
    next_place = (ends - blocks) * BLOCK
    for start in range(0, num_pairs, CHUNK):
        pair = start + each
        chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_own = (chosen[:, None] == expert[None, :]).to(tl.int32)
        place = tl.sum(is_own * (next_place[None, :] + tl.cumsum(is_own, 0) - 1), 1)
        tl.store(pairs_ptr + place, pair, mask=pair < num_pairs)
        next_place += tl.sum(is_own, 0)


@triton.jit
def _mix_kernel(
    parts_ptr,  # [num_rows * ACTIVE, size]
    shares_ptr,  # [num_rows, ACTIVE] float32
    out_ptr,  # [num_rows, size], written
    size,
    ACTIVE: tl.constexpr,
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
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=is_in)

"""`turns` of rotary.py on a GPU: one launch, one program per few tokens."""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 512  # numbers of a program


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `turns_ref`; `positions` [num_tokens] int64 may have any stride."""
    num_tokens, head_dim = len(positions), frequencies.shape[1]
    assert frequencies.is_contiguous() and frequencies.shape[0] == 2, frequencies.shape
    cos, sin = torch.empty((2, num_tokens, 1, head_dim), dtype=dtype, device=positions.device).unbind()
    block = triton.next_power_of_2(head_dim)
    tokens = max(1, _TILE // block)
    if num_tokens:
        _turns_kernel[(triton.cdiv(num_tokens, tokens),)](
            cos,
            sin,
            positions,
            frequencies,
            scale,
            positions.stride(0),
            num_tokens,
            HEAD_DIM=head_dim,
            TOKENS=tokens,
            BLOCK=block,
        )
    return cos, sin


@triton.jit(do_not_specialize=("stride", "num_tokens"))
def _turns_kernel(
    cos_ptr,  # [num_tokens, HEAD_DIM] of any float dtype, written
    sin_ptr,  # [num_tokens, HEAD_DIM] of the same dtype, written
    positions_ptr,  # [num_tokens] int64, stride apart
    frequencies_ptr,  # [2, HEAD_DIM] float32
    scale,
    stride,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(num_tokens / TOKENS),)."""
    tokens, dims = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    positions = tl.load(positions_ptr + tokens * stride, mask=tokens < num_tokens, other=0).to(tl.float32)[:, None]
    cos_angles = positions * tl.load(frequencies_ptr + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    sin_angles = positions * tl.load(frequencies_ptr + HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    at = tokens[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
    is_in = (tokens < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(cos_ptr + at, (tl.cos(cos_angles) * scale).to(cos_ptr.dtype.element_ty), mask=is_in)
    tl.store(sin_ptr + at, (tl.sin(sin_angles) * scale).to(sin_ptr.dtype.element_ty), mask=is_in)

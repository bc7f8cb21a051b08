"""The product of one to eight rows with a matrix W, without tensor cores, on a GPU.

A program loads a few rows of W at once, multiplies them by each row of x, and sums. It can also do the operations that
stand before and after a product in a decoder layer. Each is rounded as if it had a launch of its own:

    norm       x is RMS-normed first. Every program norms all of x, while its part of W arrives
    gated      silu(gate) * up of two products
    adds       the product is added to what `out` holds, the residual

With a dependent launch (gpu.py) a program fetches its part of W while the kernel before still runs.
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
from .norm import Norm
from .triton_silu import silu_mul_of

MAX_ROWS = 8


def vector_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    block_n: int,
    block_k: int,
    num_warps: int,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """Write x W^T + bias to `out`; with `adds`, add it to what `out` holds.

    `x` [num_rows, in_size] may be strided by row. `weight` is W [out_size, in_size]; if the product is gated,
    [2 * out_size, in_size], the gate first. `bias` is [out_size], `norm.weight` [in_size]. `out` [num_rows, out_size]
    is contiguous. All have one 16-bit dtype, but a norm's weight may be float32, and is not rounded then.

    A program has `block_n` rows of W, and `block_k` columns in one step, both powers of two. For a norm, or if x has
    more than one row, one step must hold all columns. `num_rows` is at most MAX_ROWS."""
    (num_rows, in_size), out_size = x.shape, out.shape[1]
    if norm is not None:
        block_k = 1 << (in_size - 1).bit_length()
        assert norm.weight.shape == (in_size,) and norm.weight.dtype in (x.dtype, torch.float32), (norm.weight, x.shape)
    assert num_rows == 1 or (num_rows <= MAX_ROWS and block_k >= in_size), (x.shape, block_k)
    assert not (is_gated and (adds or bias is not None)), "a gated product is neither biased nor added"
    dependent = gpu.dependent_launch(num_rows)
    _vector_kernel[(triton.cdiv(out_size, block_n),)](
        x, weight, weight if bias is None else bias, x if norm is None else norm.weight, out,
        out_size, x.stride(0), 0.0 if norm is None else norm.eps, M=num_rows, K=in_size,
        BLOCK_N=block_n, BLOCK_K=block_k, HAS_BIAS=bias is not None, HAS_NORM=norm is not None,
        IS_GATED=is_gated, ADDS=adds, DEPENDENT=dependent, num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _vector_kernel(
    x_ptr,  # [M, K], rows x_stride apart
    weight_ptr,  # [size, K] of x's dtype; IS_GATED: [2 * size, K]
    bias_ptr,  # [size] of x's dtype, read if HAS_BIAS
    norm_ptr,  # [K] of x's dtype or float32, read if HAS_NORM
    out_ptr,  # [M, size] of x's dtype, written; read if ADDS
    size,
    x_stride,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(size / BLOCK_N),). If M > 1 or HAS_NORM, BLOCK_K is K or more."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight_ptr + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * K + k[None, :]
    is_k = (k < K)[None, :]
    weight = tl.load(at, mask=is_k, other=0.0, eviction_policy="evict_first")
    if IS_GATED:
        up_at = at + size.to(tl.int64) * K
        up_weight = tl.load(up_at, mask=is_k, other=0.0, eviction_policy="evict_first")
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
            x = (x.to(norm_ptr.dtype.element_ty).to(tl.float32) * norm).to(weight.dtype).to(tl.float32)
        products = weight.to(tl.float32) * x[None, :]
        if IS_GATED:
            up_products = up_weight.to(tl.float32) * x[None, :]
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):  # no step if M > 1
            is_k = (start + k < K)[None, :]
            x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)[None, :]
            products += tl.load(at + start, mask=is_k, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
            if IS_GATED:
                up = tl.load(up_at + start, mask=is_k, other=0.0, eviction_policy="evict_first")
                up_products += up.to(tl.float32) * x
        y = tl.sum(products, axis=1)  # [BLOCK_N]
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows, mask=rows < size, other=0.0).to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty)
        if IS_GATED:
            y = silu_mul_of(y, tl.sum(up_products, axis=1).to(y.dtype))
        out_at = out_ptr + m * size + rows
        if ADDS:
            before = tl.load(out_at, mask=rows < size, other=0.0)
            y = (before.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
        tl.store(out_at, y, mask=rows < size)

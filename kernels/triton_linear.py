"""y = x W^T + b for the few rows of a decode step, where the time is that of reading W once.

`linear` and `gated_linear` choose, by the shape alone, one of two kernels or torch (cuBLAS):

    vector   1 to 8 rows, without tensor cores (triton_vector.py). It takes along what stands before and after a product
             in a decoder layer: `fuses`.
    dot      2 to 64 rows. x is padded to 16, 32 or 64 rows for the tensor cores; tiles of W pass through shared memory,
             a few ahead. Where W has few rows its columns are split over programs too; their float32 partial sums are
             added in a fixed order, by a second small kernel or by the one that reads them (`linear_parts`).

Products of 16-bit numbers are exact in float32 and so are summed. The result of a row does not depend on the rows
beside it, but on which kernel is taken, which depends on how many there are.

With `gpu.dependent_launch` a vector product fetches its weights while the kernel before still runs; the others only
save the time of their launch, and let the next kernel begin when their own loads are done.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .norm import Norm
from .triton_silu import silu_mul, silu_mul_of
from .triton_vector import vector_product

MAX_ROWS = 64
_DTYPES = (torch.bfloat16, torch.float16)
_SUM_BLOCK = 1024


class Config(NamedTuple):
    """Launch configuration of a product."""

    kind: Literal["vector", "dot"]
    block_n: int  # rows of W of a program
    block_k: int  # columns of W worked on at once
    num_warps: int = 4
    num_stages: int = 4  # dot: tiles on their way
    split_k: int = 1  # dot: programs that share the columns of a row of W


# Of a dot product. A process finds the device in one of two states, which other processes change; in one of them 64
# programs, launched while the kernel before ran, took 12.9 us instead of 5.9 (docs/performance.md).
FEWEST_PROGRAMS = 96
# Rows of x up to each bound share a configuration.
ROW_CLASSES = (1, 4, 8, 16, 32, 64)
# (rows of W, columns of W) -> one configuration for each of ROW_CLASSES; None: torch, gated `linear` and `silu_mul`.
# Measured on an H200 by tests/benchmarks/bench_kernels_dense.py (choices); other shapes take `_default`.
Table = dict[tuple[int, int], tuple[Config | None, ...]]
TABLE: Table = {
    (3072, 2048): (
        Config("vector", 8, 2048, 4, 4, 1),
        Config("dot", 32, 256, 4, 4, 1),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        None,
    ),
    (2048, 2048): (
        Config("vector", 1, 2048, 4, 4, 1),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 64, 4, 6, 4),
        Config("dot", 64, 64, 4, 6, 4),
    ),
    (16384, 2048): (
        Config("vector", 1, 2048, 4, 4, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        None,
    ),
    (2048, 8192): (
        Config("vector", 1, 8192, 8, 4, 1),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 256, 4, 3, 4),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 128, 4, 4, 4),
    ),
    (128256, 2048): (
        Config("vector", 2, 2048, 8, 4, 1),
        Config("dot", 128, 128, 8, 3, 1),
        Config("dot", 128, 128, 8, 3, 1),
        Config("dot", 128, 128, 8, 3, 1),
        Config("dot", 64, 64, 4, 6, 1),
        Config("dot", 64, 64, 4, 6, 1),
    ),
    (6144, 4096): (
        Config("vector", 2, 4096, 4, 4, 1),
        Config("dot", 64, 128, 4, 5, 1),
        Config("dot", 64, 128, 4, 5, 1),
        Config("dot", 64, 128, 4, 5, 1),
        Config("dot", 64, 128, 4, 5, 1),
        None,
    ),
    (4096, 4096): (
        Config("vector", 2, 2048, 8, 4, 1),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 4, 2),
    ),
    (28672, 4096): (Config("vector", 1, 2048, 8, 4, 1), None, None, None, None, None),
    (4096, 14336): (
        Config("vector", 1, 16384, 8, 4, 1),
        Config("dot", 64, 128, 4, 5, 4),
        Config("dot", 64, 128, 4, 3, 4),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 5, 2),
        Config("dot", 64, 128, 4, 3, 4),
    ),
    (128256, 4096): (
        Config("vector", 2, 2048, 4, 4, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
    ),
}
# block_n counts rows of the gate, each with one of up
GATED_TABLE: Table = {
    (16384, 2048): (
        Config("vector", 4, 2048, 8, 4, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 5, 1),
        Config("dot", 64, 64, 4, 6, 1),
        Config("dot", 64, 64, 4, 6, 1),
        Config("dot", 64, 128, 4, 4, 1),
    ),
    (28672, 4096): (
        Config("vector", 2, 4096, 8, 4, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 3, 1),
        Config("dot", 64, 128, 4, 5, 1),
        Config("dot", 128, 128, 8, 3, 1),
        Config("dot", 128, 64, 8, 4, 1),
    ),
}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: Config | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`F.linear`: x [num_rows, in_size], weight [out_size, in_size], bias [out_size] -> [num_rows, out_size].

    Where it `fuses`, x is normed first by `norm`, and the product is added to `residual` [num_rows, out_size] in place,
    which is returned. Float32, more than MAX_ROWS rows and unusual strides go to torch; `config` asks for a kernel."""
    config = config or choose(x, weight)
    if config is None:
        assert norm is None and residual is None, "torch's product takes nothing along"
        return F.linear(x, weight, bias)
    num_rows, out_size = x.shape[0], weight.shape[0]
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device) if residual is None else residual
    if config.split_k == 1:
        _launch(x, weight, bias, out, config, norm=norm, adds=residual is not None)
        return out
    assert norm is None and residual is None, config
    return _sum(_parts(x, weight, config), bias, out)


def linear_parts(x: Tensor, weight: Tensor, config: Config | None = None) -> Tensor:
    """`linear`, or, where programs share the columns of a row of W, what each of them brings, [split_k, num_rows,
    out_size] float32: for a kernel that takes the sum along (`add_rms_norm_`)."""
    config = config or choose(x, weight)
    return linear(x, weight, None, config) if config is None or config.split_k == 1 else _parts(x, weight, config)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of `linear_parts`, [num_parts, num_rows, out_size] float32 -> [num_rows, out_size]."""
    return _sum(parts, None, torch.empty(parts.shape[1:], dtype=dtype, device=parts.device))


def _parts(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    parts = torch.empty((config.split_k, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, parts, config)
    return parts


def _sum(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    num_parts, num_rows, size = parts.shape
    dependent = gpu.dependent_launch(num_rows)
    _sum_kernel[(num_rows, triton.cdiv(size, _SUM_BLOCK))](
        parts, out if bias is None else bias, out, num_rows, size, SPLITS=num_parts, BLOCK=_SUM_BLOCK,
        HAS_BIAS=bias is not None, DEPENDENT=dependent, launch_pdl=dependent,
    )  # fmt: skip
    return out


def gated_linear(x: Tensor, weight: Tensor, config: Config | None = None, *, norm: Norm | None = None) -> Tensor:
    """`silu_mul(linear(x, weight))` in one kernel: weight [2 * size, in_size], gate first -> [num_rows, size]; x is
    normed first by `norm` where it `fuses`."""
    assert weight.shape[0] % 2 == 0, weight.shape
    config = config or choose(x, weight, is_gated=True)
    if config is None or config.split_k > 1:
        return silu_mul(linear(x, weight, None, config, norm=norm))
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, out, config, norm=norm, is_gated=True)
    return out


def fuses(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:
    """Whether the product takes a norm of x and a residual along."""
    config = choose(x, weight, is_gated=is_gated)
    return config is not None and config.kind == "vector"


def choose(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> Config | None:
    """The configuration of a product; None: torch's."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    if not (0 < num_rows <= MAX_ROWS and x.dtype == weight.dtype and x.dtype in _DTYPES):
        return None
    if x.stride(1) != 1 or not weight.is_contiguous() or in_size % 16 or x.stride(0) % 8:
        return None
    row_class = next(index for index, bound in enumerate(ROW_CLASSES) if num_rows <= bound)
    stored = (GATED_TABLE if is_gated else TABLE).get((out_size, in_size))
    return _default(num_rows, out_size, in_size, is_gated) if stored is None else stored[row_class]


def _default(num_rows: int, out_size: int, in_size: int, is_gated: bool) -> Config:
    """For shapes that were not measured: enough programs for about two on each of some 130 processors."""
    if num_rows == 1 and is_gated:  # rows enough to share the norm
        return Config("vector", 2 if in_size > 2048 else 4, triton.next_power_of_2(in_size), 8)
    if num_rows == 1:
        is_large = out_size * in_size >= 1 << 25
        return Config("vector", 2 if is_large else 1, min(2048, triton.next_power_of_2(in_size)))
    if num_rows > 32:
        if out_size >= 1 << 16:
            return Config("dot", 128, 64, 8, 5)
        if is_gated:
            return Config("dot", 64, 64)
        return Config("dot", 64, 128, split_k=_split(out_size, in_size, 64, FEWEST_PROGRAMS))
    return Config("dot", 32, 128) if is_gated else Config("dot", 32, 256, split_k=_split(out_size, in_size, 32, 264))


def _split(out_size: int, in_size: int, block_n: int, num_programs: int) -> int:
    """Return the number of programs that share the columns of a row, for `num_programs` programs in all."""
    split_k = 1
    while split_k < 8 and triton.cdiv(out_size, block_n) * split_k < num_programs and in_size // (2 * split_k) >= 1024:
        split_k *= 2
    return split_k


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """`out` is [num_rows, size], or [split_k, num_rows, size] float32 partial sums."""
    num_rows, in_size = x.shape
    size = weight.shape[0] // (2 if is_gated else 1)
    assert weight.shape[1] == in_size and out.shape[-2:] == (num_rows, size), (x.shape, weight.shape, out.shape)
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous() and not is_gated), bias
    assert 0 < num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous(), x.stride()
    if config.kind == "vector":
        assert config.split_k == 1, config
        vector_product(
            x,
            weight,
            bias,
            out,
            config.block_n,
            config.block_k,
            config.num_warps,
            norm=norm,
            is_gated=is_gated,
            adds=adds,
        )
        return
    assert norm is None and not adds, config
    grid, dependent = (triton.cdiv(size, config.block_n), config.split_k), gpu.dependent_launch(num_rows)
    part = triton.cdiv(in_size, config.split_k * config.block_k) * config.block_k  # columns of a program
    _dot_kernel[grid](
        x, weight, weight if bias is None else bias, out, num_rows, size, in_size, x.stride(0), part,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        IS_EVEN=in_size % (config.split_k * config.block_k) == 0,
        IS_PART=out.ndim == 3, HAS_BIAS=bias is not None, IS_GATED=is_gated, DEPENDENT=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x_ptr,  # [num_rows, in_size]
    weight_ptr,  # [size, in_size], gated [2 * size, in_size]
    bias_ptr,  # [size]
    out_ptr,  # [num_rows, size]; IS_PART: [splits, num_rows, size] float32
    num_rows,
    size,
    in_size,
    x_stride,
    part,  # columns of W of a program
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, splits of its columns). Works on y^T = W x^T, [BLOCK_N, BLOCK_M]."""
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, in_size)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ptrs = weight_ptr + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * in_size
    up_offset = size.to(tl.int64) * in_size
    if DEPENDENT:
        gdc_wait()
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        at = row_ptrs + (start + k)[None, :]
        x_at = x_ptr + m[None, :] * x_stride + (start + k)[:, None]
        is_x = m[None, :] < num_rows
        if IS_EVEN:
            weight = tl.load(at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_x, other=0.0)
        else:
            weight = tl.load(at, mask=(start + k < end)[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=is_x & (start + k < end)[:, None], other=0.0)
        y = tl.dot(weight, x, y)
        if IS_GATED:
            if IS_EVEN:
                weight = tl.load(at + up_offset, eviction_policy="evict_first")
            else:
                weight = tl.load(at + up_offset, mask=(start + k < end)[None, :], other=0.0)
            up = tl.dot(weight, x, up)
    if DEPENDENT:  # not before: programs of the next kernel would take the place of those that are to come
        gdc_launch_dependents()
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < size, other=0.0).to(tl.float32)[:, None]
    is_out = (rows < size)[:, None] & (m < num_rows)[None, :]
    out_at = m[None, :] * size + rows[:, None]
    if IS_PART:
        tl.store(out_ptr + tl.program_id(1) * num_rows * size + out_at, y, mask=is_out)
    else:
        y = y.to(out_ptr.dtype.element_ty)
        if IS_GATED:
            y = silu_mul_of(y, up.to(y.dtype))
        tl.store(out_ptr + out_at, y, mask=is_out)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    parts_ptr,  # [SPLITS, num_rows, size] float32
    bias_ptr,  # [size]
    out_ptr,  # [num_rows, size]
    num_rows,
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_rows, blocks of columns)."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    at = tl.program_id(0) * size + columns
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(parts_ptr + split * num_rows * size + at, mask=is_in, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_in)

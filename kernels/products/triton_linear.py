"""y = x W^T + b for the few rows of a decode step, which takes as long as reading W once.

`linear` and `gated_linear` run one of two kernels or torch's product (cuBLAS), whichever linear_configs.py names for
the shape:

    vector   1 to 8 rows, without tensor cores (triton_vector.py). It can also norm x first, and add the product to a
             residual: `fuses`.
    dot      2 to 64 rows. x is padded to 16, 32 or 64 rows for the tensor cores. Tiles of W pass through shared memory,
             a few of them under way at any time. If W has few rows, several programs share the columns of a row
             (`split_k`). Their float32 sums are added in a fixed order, by a second small kernel or by the kernel that
             reads them (`linear_parts`).

Products of 16-bit numbers are exact in float32, and sums are float32. The result of a row does not depend on the values
of other rows. It depends on the kernel, which depends on the number of rows.

With `gpu.dependent_launch`, a vector product fetches its weights while the kernel before it still runs. The others only
save the time of their launch.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.errors import OutOfResources

from .. import gpu
from . import linear_configs
from .linear_configs import MAX_ROWS, Config, DoesNotFitError, ProductShape
from .norm import Norm
from .triton_silu import silu_mul, silu_mul_of
from .triton_vector import vector_product

_DTYPES = (torch.bfloat16, torch.float16)
_SUM_BLOCK = 1024


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

    If the product `fuses`, x is normed first by `norm`, and the product is added to `residual` [num_rows, out_size] in
    place, which is returned. torch computes products in float32, of more than MAX_ROWS rows, and of unusual strides.
    `config` asks for a kernel."""
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
    """Return the product, as `linear`. If several programs share the columns of a row of W, return the sum of each
    program instead, [split_k, num_rows, out_size] float32, for a kernel that adds them (`add_rms_norm_`)."""
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
    """Return `silu_mul(linear(x, weight))` by one kernel: weight [2 * size, in_size], gate first -> [num_rows, size].
    If the product `fuses`, x is normed first by `norm`."""
    assert weight.shape[0] % 2 == 0, weight.shape
    config = config or choose(x, weight, is_gated=True)
    if config is None or config.split_k > 1:
        return silu_mul(linear(x, weight, None, config, norm=norm))
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, out, config, norm=norm, is_gated=True)
    return out


def fuses(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:
    """Return whether the kernel of this product can norm x first and add the product to a residual."""
    config = choose(x, weight, is_gated=is_gated)
    return config is not None and config.kind == "vector"


def choose(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> Config | None:
    """Return the configuration of a product. None: torch's product serves, because it is faster, or because no kernel
    takes these dtypes, strides or numbers of rows."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    if not (0 < num_rows <= MAX_ROWS and x.dtype == weight.dtype and x.dtype in _DTYPES):
        return None
    if x.stride(1) != 1 or not weight.is_contiguous() or in_size % 16 or x.stride(0) % 8:
        return None
    return linear_configs.choose(ProductShape.of(num_rows, out_size, in_size, is_gated=is_gated))


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
    """Write the product to `out` [num_rows, size], or the float32 sums of all splits to `out` [split_k, num_rows,
    size]. Raises DoesNotFitError if the GPU cannot run the configuration."""
    num_rows, in_size = x.shape
    size = weight.shape[0] // (2 if is_gated else 1)
    assert weight.shape[1] == in_size and out.shape[-2:] == (num_rows, size), (x.shape, weight.shape, out.shape)
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous() and not is_gated), bias
    assert 0 < num_rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous(), x.stride()
    try:
        if config.kind == "vector":
            assert config.split_k == 1, config
            block = config.block_n, config.block_k, config.num_warps
            vector_product(x, weight, bias, out, *block, norm=norm, is_gated=is_gated, adds=adds)
        else:
            assert norm is None and not adds, config
            _dot_product(x, weight, bias, out, config, is_gated=is_gated)
    except OutOfResources as error:
        raise DoesNotFitError(f"{config}: {error}") from None


def _dot_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: Config, *, is_gated: bool
) -> None:
    num_rows, in_size = x.shape
    size, dependent = out.shape[-1], gpu.dependent_launch(num_rows)
    part = triton.cdiv(in_size, config.split_k * config.block_k) * config.block_k  # columns of a program
    block_n = max(16, triton.next_power_of_2(config.block_n))
    _dot_kernel[triton.cdiv(size, config.block_n), config.split_k](
        x, weight, weight if bias is None else bias, out, num_rows, size, in_size, x.stride(0), part, config.block_n,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=block_n, BLOCK_K=config.block_k,
        IS_WHOLE=config.block_n == block_n,
        IS_EVEN=in_size % (config.split_k * config.block_k) == 0,
        IS_PART=out.ndim == 3, HAS_BIAS=bias is not None, IS_GATED=is_gated, DEPENDENT=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "program_rows"])
def _dot_kernel(
    x_ptr,  # [num_rows, in_size]
    weight_ptr,  # [size, in_size], gated [2 * size, in_size]
    bias_ptr,  # [size]
    out_ptr,  # [num_rows, size]; IS_PART: [splits, num_rows, size] float32
    num_rows,
    size,
    in_size,
    x_stride,
    part,  # columns of W per program
    program_rows,  # rows of W per program, at most BLOCK_N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # program_rows is BLOCK_N
    IS_EVEN: tl.constexpr,  # BLOCK_K divides the columns of all programs
    IS_PART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (blocks of rows of W, splits of its columns). Works on y^T = W x^T, [BLOCK_N, BLOCK_M]."""
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, in_size)
    n = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * program_rows + n
    is_row = (n < program_rows) & (rows < size)
    row_ptrs = weight_ptr + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * in_size
    up_offset = size.to(tl.int64) * in_size
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        at = row_ptrs + (start + k)[None, :]
        x_at = x_ptr + m[None, :] * x_stride + (start + k)[:, None]
        is_x = (m < num_rows)[None, :]
        is_weight = is_row[:, None]
        if not IS_EVEN:
            is_x = is_x & (start + k < end)[:, None]
            is_weight = is_weight & (start + k < end)[None, :]
        x = tl.load(x_at, mask=is_x, other=0.0)
        y = tl.dot(_load_weight(at, is_weight, IS_EVEN and IS_WHOLE), x, y)
        if IS_GATED:
            up = tl.dot(_load_weight(at + up_offset, is_weight, IS_EVEN and IS_WHOLE), x, up)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    is_out = is_row[:, None] & (m < num_rows)[None, :]
    out_at = m[None, :] * size + rows[:, None]
    if IS_PART:
        tl.store(out_ptr + tl.program_id(1) * num_rows * size + out_at, y, mask=is_out)
    else:
        y = y.to(out_ptr.dtype.element_ty)
        if IS_GATED:
            y = silu_mul_of(y, up.to(y.dtype))
        tl.store(out_ptr + out_at, y, mask=is_out)


@triton.jit
def _load_weight(at, is_in, IS_FULL: tl.constexpr):
    """Load a tile of W, zeros where it has no numbers. IS_FULL: it has them everywhere."""
    if IS_FULL:
        weight = tl.load(at, eviction_policy="evict_first")
    else:
        weight = tl.load(at, mask=is_in, other=0.0, eviction_policy="evict_first")
    return weight


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

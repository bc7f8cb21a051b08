"""`silu_mul` and `clamped_silu_mul` of silu.py on a GPU in one pass. silu(gate) and its product with up are each
rounded to the dtype as torch does. A clamped gate is rounded once."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..formats import SwigluClamp

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 1024


def serves(gate_up: torch.Tensor, clamp: SwigluClamp | None = None) -> bool:
    """Return whether `silu_mul` and `clamped_silu_mul` take such a tensor."""
    del clamp
    return gate_up.is_contiguous()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu_mul_ref` of `gate_up` [num_rows, 2 * size], contiguous, gate first: a new [num_rows, size]."""
    return _gated(gate_up, None)


def clamped_silu_mul(gate_up: torch.Tensor, clamp: SwigluClamp) -> torch.Tensor:
    """Return `clamped_silu_mul_ref`. `gate_up` as for `silu_mul`."""
    return _gated(gate_up, clamp)


def _gated(gate_up: torch.Tensor, clamp: SwigluClamp | None) -> torch.Tensor:
    assert gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous(), gate_up.shape
    assert gate_up.dtype in _DTYPES, gate_up.dtype
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if out.numel():
        dependent = gpu.dependent_launch(num_rows)
        _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, size, *(clamp or (0.0, 0.0, 0.0)), IS_CLAMPED=clamp is not None, BLOCK=_BLOCK,
            DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return out


@triton.jit
def silu_mul_of(gate, up):
    """Return silu(gate) * up of two tiles of one shape and dtype. x / (1 + exp(-x)) is that of IEEE's division, rounded
    to the dtype. For bfloat16 the faster division of GPUs gives the same for every x."""
    wide = gate.to(tl.float32)
    if gate.dtype == tl.bfloat16:
        silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    else:
        silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def clamped_silu_mul_of(gate, up, limit, alpha, offset):
    """Return `clamped_silu_mul` of two float32 tiles of one shape."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + offset) * tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate))


@triton.jit(do_not_specialize=("limit", "alpha", "offset"))
def _silu_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size] of the same dtype, written
    size,
    limit,
    alpha,
    offset,
    IS_CLAMPED: tl.constexpr,
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
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=is_in, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, mask=is_in, other=0.0)
    if IS_CLAMPED:
        wide = clamped_silu_mul_of(gate.to(tl.float32), up.to(tl.float32), limit, alpha, offset)
        out = wide.to(out_ptr.dtype.element_ty)
    else:
        out = silu_mul_of(gate, up)
    tl.store(out_ptr + row * size + columns, out, mask=is_in)

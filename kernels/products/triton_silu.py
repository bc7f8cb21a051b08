"""`silu_mul` of silu.py on a GPU in one pass: silu(gate) * up, each rounded to the dtype as torch does."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 1024


def serves(gate_up: torch.Tensor) -> bool:
    """Return whether `silu_mul` takes such a tensor."""
    return gate_up.is_contiguous()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu_mul_ref` of `gate_up` [num_rows, 2 * size], contiguous, gate first: a new [num_rows, size]."""
    assert gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous(), gate_up.shape
    assert gate_up.dtype in _DTYPES, gate_up.dtype
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if out.numel():
        dependent = gpu.dependent_launch(num_rows)
        _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, size, BLOCK=_BLOCK, DEPENDENT=dependent, launch_pdl=dependent
        )
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


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size] of the same dtype, written
    size,
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
    tl.store(out_ptr + row * size + columns, silu_mul_of(gate, up), mask=is_in)

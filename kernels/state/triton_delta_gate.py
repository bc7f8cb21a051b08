"""Norm and gate of the outputs of a gated delta rule by Triton."""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..products.norm import Norm

_ROWS = 4  # heads of tokens that a program has


def gate_heads(outputs: Tensor, gate: Tensor, norm: Norm, *, is_sigmoid: bool = False) -> Tensor:
    """Return rms_norm(outputs) times silu(gate) or sigmoid(gate), [num_tokens, num_value_heads * value_dim] of the
    outputs' dtype.

    `outputs` [num_tokens, num_value_heads, value_dim]; `gate` [num_tokens, num_key_heads, num_shared * value_dim], the
    numbers of a key head side by side; the norm's weight is [value_dim]."""
    (num_tokens, num_values, dim), num_heads = outputs.shape, gate.shape[1]
    assert outputs.is_contiguous() and gate.shape == (num_tokens, num_heads, num_values // num_heads * dim), gate.shape
    assert gate.stride(2) == 1 and norm.weight.shape == (dim,), (gate.stride(), norm.weight.shape)
    gated = torch.empty_like(outputs)
    dependent = gpu.dependent_launch(num_tokens)
    _gate_kernel[(num_tokens, triton.cdiv(num_values, _ROWS))](
        gated, outputs, gate, norm.weight, gate.stride(0), norm.eps, GATE_HEAD=gate.stride(1), VALUES=num_values,
        SHARED=num_values // num_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), ROWS=_ROWS, SIGMOID=is_sigmoid,
        DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return gated.flatten(1)


@triton.jit
def _gate_kernel(
    gated_ptr,  # [num_tokens, VALUES, DIM], written
    outputs_ptr,  # [num_tokens, VALUES, DIM]
    gate_ptr,  # [num_tokens, VALUES / SHARED, SHARED * DIM], tokens gate_stride and heads GATE_HEAD apart
    weight_ptr,  # [DIM]
    gate_stride,
    eps,
    GATE_HEAD: tl.constexpr,
    VALUES: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,  # in place of silu
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, ceil(VALUES / ROWS)). It rounds where plain torch rounds."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_in = (heads < VALUES)[:, None] & (dims < DIM)[None, :]
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = (token * VALUES + heads)[:, None] * DIM + dims[None, :]
    x = tl.load(outputs_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    normed = x.to(weight.dtype).to(tl.float32) * weight[None, :].to(tl.float32)
    normed = normed.to(weight.dtype).to(outputs_ptr.dtype.element_ty)
    own = token * gate_stride + (heads // SHARED * GATE_HEAD + heads % SHARED * DIM)[:, None] + dims[None, :]
    gate = tl.load(gate_ptr + own, mask=is_in, other=0.0).to(tl.float32)
    gated = normed.to(tl.float32) * (tl.sigmoid(gate) if SIGMOID else gate * tl.sigmoid(gate))
    tl.store(gated_ptr + at, gated.to(gated_ptr.dtype.element_ty), mask=is_in)

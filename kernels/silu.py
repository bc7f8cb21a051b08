"""The gate of a SwiGLU feed-forward (arXiv:2002.05202): silu(gate) * up, silu(x) = x * sigmoid(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import cpu, gpu


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """The specification: `gate_up` [num_rows, 2 * size], gate first -> [num_rows, size], a new tensor."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul_ref`, in one call where a compiled kernel serves."""
    if gpu.compiled(gate_up) and gate_up.is_contiguous():
        from . import triton_silu

        return triton_silu.silu_mul(gate_up)
    return cpu.silu_mul(gate_up) if cpu.compiled(gate_up) else silu_mul_ref(gate_up)

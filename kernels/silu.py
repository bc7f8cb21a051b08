"""The gate of a SwiGLU feed-forward (arXiv:2002.05202): silu(gate) * up, silu(x) = x * sigmoid(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .operations import Operation


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `gate_up` [num_rows, 2 * size], gate first: a new tensor [num_rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


silu_mul = Operation("silu_mul", silu_mul_ref)

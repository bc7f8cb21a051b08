"""The gates of feed-forward layers (arXiv:2002.05202). SwiGLU: silu(gate) * up, silu(x) = x * sigmoid(x). GEGLU:
gelu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import SwigluClamp
from ..operations import Operation


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `gate_up` [num_rows, 2 * size], gate first: a new tensor [num_rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def clamped_silu_mul_ref(gate_up: torch.Tensor, clamp: SwigluClamp) -> torch.Tensor:
    """Return the clamped gate of `gate_up` [num_rows, 2 * size], gate first: a new tensor [num_rows, size]. Computes in
    float32 and rounds to gate_up's dtype at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return ((up + clamp.offset) * gate * torch.sigmoid(clamp.alpha * gate)).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up of `gate_up` [num_rows, 2 * size], gate first: a new tensor [num_rows, size]. GELU is
    approximated by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


silu_mul = Operation("silu_mul", silu_mul_ref)
clamped_silu_mul = Operation("clamped_silu_mul", clamped_silu_mul_ref)

"""`add_rms_norm_` of norm.py and `silu_mul` of silu.py for float32 on a CPU: one compiled call in place of several of
torch."""

from __future__ import annotations

import numpy as np
import torch

from .. import numba_kernels


def add_rms_norm_(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `add_rms_norm_ref_`, a new tensor; all tensors are float32."""
    if delta is not None and delta.ndim == 3:
        delta = delta.sum(0)
    assert hidden.shape[1:] == weight.shape and (delta is None or delta.shape == hidden.shape), (hidden.shape, delta)
    rows = hidden.numpy()
    out = np.empty(rows.shape, dtype=np.float32)
    other = rows if delta is None else delta.numpy()
    numba_kernels.add_rms_norm(rows, other, delta is not None, weight.numpy(), eps, out)
    return torch.from_numpy(out)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu_mul_ref` of `gate_up` [num_rows, 2 * size], a new tensor [num_rows, size]."""
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=np.float32)
    numba_kernels.silu_mul(gate_up.numpy(), out)
    return torch.from_numpy(out)

"""Root-mean-square normalisation over the last dimension (arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import cpu, gpu


class Norm(NamedTuple):
    """What `rms_norm` multiplies by."""

    weight: torch.Tensor  # [size]
    eps: float


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The specification. `x` [..., size], `weight` [size]; in float32, rounded to x's dtype before `weight`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in fewer passes on CUDA and for float32: [..., size] -> [..., size], a new tensor."""
    assert x.shape[-1:] == weight.shape, (x.shape, weight.shape)
    if gpu.compiled(x):
        from . import triton_norm

        if triton_norm.serves(x, weight):
            return triton_norm.rms_norm(x, weight, eps)
    if x.dtype != torch.float32:
        return rms_norm_ref(x, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return x.mul(scale).mul_(weight)


def add_rms_norm_(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden += delta (None: nothing), in place; returns `rms_norm` of it. `hidden`, `delta` [num_rows, size]; where
    hidden is on CUDA also float32 parts of a delta, [num_parts, num_rows, size], whose sum is rounded first."""
    if cpu.compiled(hidden):
        return cpu.add_rms_norm_(hidden, delta, weight, eps)
    if gpu.compiled(hidden):
        from . import triton_norm

        if triton_norm.serves(hidden, weight):
            return triton_norm.add_rms_norm_(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta if delta.ndim == 2 else delta.sum(0).to(hidden.dtype))
    return rms_norm(hidden, weight, eps)

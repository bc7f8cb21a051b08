"""Root-mean-square normalisation over the last dimension (arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..operations import Operation


class Norm(NamedTuple):
    """The constants of a norm."""

    weight: torch.Tensor  # [size]
    eps: float


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of `x` [..., size], a new tensor of its shape; `weight` [size].

    The sum and the quotient are float32. The quotient is rounded to the weight's dtype before it is multiplied by
    `weight`: a float32 weight is exact, and the result is rounded once."""
    assert x.shape[-1:] == weight.shape, (x.shape, weight.shape)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm_ref_(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `hidden` in place (None: add nothing) and return the norm of the sum, a new tensor.

    `hidden` and `delta` are [num_rows, size]. A delta may also be float32 parts [num_parts, num_rows, size], whose sum
    is rounded to hidden's dtype first."""
    if delta is not None:
        hidden.add_(delta if delta.ndim == 2 else delta.sum(0).to(hidden.dtype))
    return rms_norm(hidden, weight, eps)


rms_norm = Operation("rms_norm", rms_norm_ref)
add_rms_norm_ = Operation("add_rms_norm_", add_rms_norm_ref_)

"""Float32 products on a CPU with a weight in oneDNN's blocked order, which is read faster than plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ...kernels.products.norm import Norm
from .base import Product, WeightSource

_BLOCKED_FOR_ROWS = 32  # the number of rows that oneDNN chooses its blocking for


@dataclass(frozen=True, slots=True, eq=False)
class BlockedProduct(Product):
    """Holds the weight in oneDNN's own form, in place of the plain one."""

    weight: Tensor  # opaque, float32
    bias: Tensor | None  # [out_size]
    in_size: int
    out_size: int

    @classmethod
    def build(cls, source: WeightSource) -> Self | None:
        if not (source.is_float32_on_cpu and _is_available()):
            return None
        weight = source.fused("weight")
        with torch.inference_mode(False):
            blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCKED_FOR_ROWS)
        return cls(blocked, source.bias, weight.shape[1], weight.shape[0])

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def _is_available() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)

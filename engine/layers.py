"""The linear layer, and when its weights are kept packed for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Packed weights are a second copy: kept only for models whose weights are below this many bytes together.
PACK_LIMIT_BYTES = 2 << 30
_PACKED_FOR_ROWS = 32  # the number of rows that oneDNN chooses a packing for


@dataclass(slots=True, eq=False)
class Linear:
    """y = x @ weight.T + bias."""

    weight: torch.Tensor  # [out_size, in_size]
    bias: torch.Tensor | None  # [out_size]
    packed: torch.Tensor | None = None  # oneDNN's blocked form of `weight`, opaque

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_size] -> [num_rows, out_size]."""
        if self.packed is None or x.shape[0] == 1:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def pack(self) -> None:
        """Keep a packed copy beside the weight. For two rows and more, float32 products through it took 0.4 to 0.7 of
        the time on an AVX-512 machine whose BLAS is not tuned for it; for one row the plain weight is faster."""
        if can_pack(self.weight):
            with torch.inference_mode(False):
                self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch has the packed product and the weight is of a kind that gains by it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )

"""The linear layer, the residual stream that layers add to, and the forms in which the CPU multiplies fastest.

A decode step on a CPU mostly waits for weights from memory, so a smaller form is a faster one. Measured on one core
with the demo model's 29 MB of float32 weights, all products of a step: plain 1.5 ms (1 row) and 2.8 ms (8 rows),
oneDNN's blocked form 1.0 and 1.4, half precision 0.5 and 0.7. Whichever form is chosen replaces the plain weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels import gpu
from ..kernels.norm import Norm, add_rms_norm_
from ..kernels.rows import gather_rows
from ..kernels.silu import silu_mul

_BLOCKED_FOR_ROWS = 32  # the number of rows that oneDNN chooses its blocking for
# Rounding of weights to half precision that disappears in the rounding of a float32 sum of a few hundred products.
_HALF_TOLERANCE = 2.0**-22


def embed(token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Rows `token_ids` [num_tokens] int64 of [vocab_size, hidden_size], copies: [num_tokens, hidden_size]. Of up to 16
    tokens torch's `embedding` takes one after the other on CUDA, 12 us for 16."""
    return gather_rows([embedding], token_ids)[0]


@dataclass(slots=True, eq=False)
class Linear:
    """y = x @ weight.T + bias. At most one of `half` and `blocked` is there."""

    weight: torch.Tensor | None  # [out_size, in_size]; None once packed
    bias: torch.Tensor | None  # [out_size]
    half: Any = None  # FBGEMM's packed float16 weight and bias, opaque
    blocked: torch.Tensor | None = None  # oneDNN's blocked float32 weight, opaque

    def __call__(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[num_rows, in_size] -> [num_rows, out_size], both of the model's dtype. Where it `fuses`, x is normed first,
        and the product is added to `residual` in place, which is returned."""
        if self.weight is not None and gpu.compiled(x):
            from ..kernels.triton_linear import linear

            return linear(x, self.weight, self.bias, norm=norm, residual=residual)
        assert norm is None and residual is None, "nothing is fused here"
        if self.half is not None:
            return _half_product()(x, self.half)
        if self.blocked is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of a call, or float32 parts of it, [num_parts, num_rows, out_size], if a kernel leaves the
        sum to their reader (`add_rms_norm_`)."""
        if self.weight is None or self.bias is not None or not gpu.compiled(x):
            return self(x)
        from ..kernels.triton_linear import linear_parts

        return linear_parts(x, self.weight)

    def gated(self, x: torch.Tensor, *, norm: Norm | None = None) -> torch.Tensor:
        """`silu_mul` of the product, of which the gate is the first half: [num_rows, in_size] -> [num_rows, out_size /
        2]; in one kernel where there is one, which norms x first where it `fuses`."""
        if gpu.compiled(x) and self.weight is not None and self.bias is None:
            from ..kernels.triton_linear import gated_linear

            return gated_linear(x, self.weight, norm=norm)
        assert norm is None, "nothing is fused here"
        return silu_mul(self(x))

    def fuses(self, x: torch.Tensor, *, is_gated: bool = False) -> bool:
        """Whether one kernel norms x, multiplies, and adds to what is there (`Residual`)."""
        if not gpu.compiled(x) or self.weight is None or (is_gated and self.bias is not None):
            return False
        from ..kernels.triton_linear import fuses

        return fuses(x, self.weight, is_gated=is_gated)

    def pack(self) -> None:
        """Replace a float32 weight on the CPU by a faster form: half precision where the weight came from 16 bits and
        fits (products and sums stay float32), else blocked. Other weights, and torch without these, stay plain."""
        if self.weight is None or self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        with torch.inference_mode(False):
            if _has_half_products() and fits_half(self.weight):
                self.half = torch.ops.quantized.linear_prepack_fp16(self.weight, self.bias)
                self.weight = None
            elif _has_blocked_products():
                self.blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight, _BLOCKED_FOR_ROWS)
                self.weight = None


def fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds a float32 weight as well as float32 arithmetic can tell: exactly, but for tiny values that
    are rounded to multiples of 2^-24. So it is with weights trained in bfloat16 or float16."""
    error = torch.linalg.vector_norm(weight.half().float().sub_(weight))
    return bool(error <= _HALF_TOLERANCE * torch.linalg.vector_norm(weight))  # an overflow makes error infinite or NaN


@dataclass(slots=True, eq=False)
class Residual:
    """The residual stream of a forward, which sublayers read normed and add to. One row on CUDA: the products add what
    they bring, and that of gate and up norms what it reads (that of q, k and v has too few rows of weights to each
    program to gain by it); else what a sublayer brings is added by the norm that reads it next."""

    hidden: torch.Tensor  # [num_tokens, hidden_size], added to in place
    eps: float
    _delta: torch.Tensor | None = None  # still to be added, [num_tokens, hidden_size], or parts of it (`Linear.parts`)

    def gated_product(self, linear: Linear, norm: torch.Tensor) -> torch.Tensor:
        """`Linear.gated` of the normed stream: [num_tokens, hidden_size] -> [num_tokens, out_size / 2]; `norm`
        [hidden_size]."""
        if self._delta is None and linear.fuses(self.hidden, is_gated=True):
            return linear.gated(self.hidden, norm=Norm(norm, self.eps))
        return linear.gated(self.normed(norm))

    def add(self, linear: Linear, x: torch.Tensor) -> None:
        """The product [num_tokens, hidden_size] of `x` [num_tokens, in_size]."""
        hidden = self.settled()
        if linear.fuses(x):
            linear(x, residual=hidden)
        else:
            self._delta = linear.parts(x)

    def normed(self, norm: torch.Tensor) -> torch.Tensor:
        """A new tensor, [num_tokens, hidden_size]."""
        delta, self._delta = self._delta, None
        return add_rms_norm_(self.hidden, delta, norm, self.eps)

    def settled(self) -> torch.Tensor:
        """`hidden` with all that was added."""
        delta, self._delta = self._delta, None
        if delta is not None and delta.ndim == 3:
            from ..kernels.triton_linear import sum_parts

            delta = sum_parts(delta, self.hidden.dtype)
        return self.hidden if delta is None else self.hidden.add_(delta)


@functools.cache
def _half_product() -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """FBGEMM's product without torch's look for fake arguments, which costs a tenth of a small product."""
    overload = torch.ops.quantized.linear_dynamic_fp16.default
    return getattr(overload, "_op", overload)


def _has_half_products() -> bool:
    return torch.backends.quantized.engine in ("fbgemm", "x86")


def _has_blocked_products() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)

"""The decoder layer with a norm before and after each sublayer, and the gated feed-forward layer with GELU (Gemma 3).

h += norm(attention.out(attention(norm(h))));  h += norm(mlp(norm(h)))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.products.norm import rms_norm
from ...kernels.products.silu import gelu_mul
from ..attention.context import AttentionContext
from ..products.base import Rows
from ..products.linear import Linear
from .decoder import DecoderBody, Residual


@dataclass(frozen=True, slots=True, eq=False)
class GeluMlp:
    """The gated feed-forward layer with GELU in its approximation by tanh (GEGLU, arXiv:2002.05202)."""

    gate_up: Linear  # hidden_size -> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size -> hidden_size

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self.down(gelu_mul(self.gate_up(normed)))

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add_output(self(stream.normed(norm)))


@dataclass(frozen=True, slots=True, eq=False)
class SandwichBody(DecoderBody):
    """A decoder layer without its input norm, which norms the outputs of its sublayers."""

    attention_out_norm: Tensor  # [hidden_size]
    mlp_out_norm: Tensor  # [hidden_size]

    def __call__(self, stream: Residual, x: Rows, context: AttentionContext) -> None:
        out = self.attention.out(self.attention(x, context))
        stream.add_output(rms_norm(out, self.attention_out_norm, stream.eps))
        out = self.mlp(stream.normed(self.mlp_norm))
        stream.add_output(rms_norm(out, self.mlp_out_norm, stream.eps))

"""The gated feed-forward layer (SwiGLU, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..products.linear import Linear
from .residual import Residual


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """A `FeedForward` (decoder.py) of dense products."""

    gate_up: Linear  # hidden_size -> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size -> hidden_size

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self.down(self.gate_up.gated(normed))

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add(self.down, stream.gated_product(self.gate_up, norm, self.down))

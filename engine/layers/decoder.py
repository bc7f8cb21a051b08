"""The pre-norm decoder layer over one residual stream.

h += attention.out(attention(norm(h)));  h += mlp(norm(h))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..attention.context import AttentionContext
from ..products.base import Rows
from ..products.linear import Linear
from .residual import Residual


class SelfAttention(Protocol):
    """The first half of a decoder layer."""

    @property
    def reader(self) -> Linear:
        """The first projection, which alone reads the input."""
        ...

    @property
    def out(self) -> Linear:
        """The output projection, which the residual stream takes along (`Residual.add`)."""
        ...

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store what the pool holds of the new tokens and return the attended values: [num_tokens, in_size] ->
        [num_tokens, out.in_size]."""
        ...


class FeedForward(Protocol):
    """The second half of a decoder layer."""

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        ...

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderBody:
    """A decoder layer without its input norm. Draft heads feed it inputs of their own."""

    attention: SelfAttention
    mlp_norm: Tensor  # [hidden_size]
    mlp: FeedForward

    def __call__(self, stream: Residual, x: Rows, context: AttentionContext) -> None:
        """Attend from `x` [num_tokens, in_size] and add the outputs of both sublayers to the stream."""
        stream.add(self.attention.out, self.attention(x, context))
        self.mlp.add_to(stream, self.mlp_norm)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A decoder layer whose attention reads the stream normed by `norm`. The caller norms it, because it may want to
    keep the layer's input."""

    norm: Tensor  # [hidden_size]
    body: DecoderBody

    def normed(self, stream: Residual) -> Rows:
        """Return the normed stream [num_tokens, hidden_size] as the attention takes it."""
        return stream.normed_for(self.body.attention.reader, self.norm)

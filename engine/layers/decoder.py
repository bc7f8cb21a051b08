"""The pre-norm decoder layer over one residual stream.

h += attention.out(attention(norm(h)));  h += mlp(norm(h))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...kernels.products.linear import sum_parts
from ...kernels.products.norm import Norm, add_rms_norm_
from ..attention.context import AttentionContext
from ..products.base import Rows, Sum
from ..products.experts import Experts
from ..products.linear import Linear


@dataclass(slots=True, eq=False)
class Residual:
    """Owns the stream, and the output of the last sublayer until it is added to the stream.

    With one row on CUDA, the kernel of a product adds its result to the stream itself, and the kernel of gate and up
    also norms its input. (The product of q, k and v has too few rows of weights per program to gain by that.) Otherwise
    the next norm that reads the stream also adds the output of the last sublayer, and rounds its result if the product
    that reads it `rounds`. If ranks share the product, it also sums over them."""

    hidden: Tensor  # [num_tokens, hidden_size], added to in place
    eps: float
    _delta: Tensor | None = None  # still to be added: [num_tokens, hidden_size], or summands of it (`Linear.parts`)
    _group: Sum | None = None  # ranks over which `_delta` is still to be summed

    def gated_product(self, linear: Linear, norm: Tensor, reader: Linear | None = None) -> Rows:
        """Return `linear.gated` of the normed stream: [num_tokens, out_size / 2], as `reader` takes it, if that is
        given. `norm` [hidden_size]."""
        if self._delta is None and linear.fuses(self.hidden, is_gated=True):
            return linear.gated(self.hidden, norm=Norm(norm, self.eps))
        x = self.normed_for(linear, norm)
        if reader is None or not reader.rounds or linear.gates(x):
            return linear.gated(x)
        return reader.gate(linear(x))  # by one kernel that also rounds

    def add(self, linear: Linear, x: Rows) -> None:
        """Add the product [num_tokens, hidden_size] of `x` [num_tokens, in_size]."""
        hidden = self.settled()
        if linear.fuses(x):
            linear(x, residual=hidden)
        else:
            self._delta, self._group = linear.parts(x), linear.sums_over

    def add_output(self, y: Tensor, sums_over: Sum | None = None) -> None:
        """Add the output `y` [num_tokens, hidden_size] of a sublayer that does not end in one product, or the sum of
        what all ranks have."""
        self.settled()
        self._delta, self._group = y, sums_over

    def normed(self, norm: Tensor) -> Tensor:
        """Return the normed stream, a new tensor [num_tokens, hidden_size]. `norm` [hidden_size]."""
        delta, group, self._delta, self._group = self._delta, self._group, None, None
        if delta is None or group is None:
            return add_rms_norm_(self.hidden, delta, norm, self.eps)
        return group.sum_norm_(self.hidden, delta, norm, self.eps)

    def normed_for(self, linear: Linear, norm: Tensor) -> Rows:
        """Return the normed stream [num_tokens, hidden_size] as `linear` takes it. `norm` [hidden_size]."""
        if self._group is not None:
            return self.normed(norm)
        delta, self._delta = self._delta, None
        return linear.normed(self.hidden, delta, Norm(norm, self.eps))

    def normed_for_experts(self, experts: Experts, norm: Tensor) -> tuple[Tensor, Rows]:
        """Return the normed stream [num_tokens, hidden_size] twice: as it is, and as `experts` take it."""
        if self._group is not None:
            normed = self.normed(norm)
            return normed, normed
        delta, self._delta = self._delta, None
        return experts.normed(self.hidden, delta, Norm(norm, self.eps))

    def settled(self) -> Tensor:
        """Return `hidden` with all that was added."""
        delta, group, self._delta, self._group = self._delta, self._group, None, None
        if delta is not None and delta.ndim == 3:
            delta = sum_parts(delta, self.hidden.dtype)
        if delta is not None and group is not None:
            delta = group.sum(delta)
        return self.hidden if delta is None else self.hidden.add_(delta)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The gated feed-forward layer (SwiGLU, arXiv:2002.05202), of dense products: down(silu(gate(x)) * up(x))."""

    gate_up: Linear  # hidden_size -> 2 * intermediate_size, gate first
    down: Linear  # intermediate_size -> hidden_size

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        return self.down(self.gate_up.gated(normed))

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add(self.down, stream.gated_product(self.gate_up, norm, self.down))


class SelfAttention(Protocol):
    """The first half of a decoder layer."""

    @property
    def reader(self) -> Linear | None:
        """The first projection, if it alone reads the input."""
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
        reader = self.body.attention.reader
        return stream.normed(self.norm) if reader is None else stream.normed_for(reader, self.norm)

"""The decoder layer of Gemma 4: norms on both sides of each sublayer, KV that later layers share, numbers for each
token that are the layer's own, and a scale of the residual stream at its end.

h += norm(attention.out(attention(norm(h))));  h += norm(mlp(norm(h)))
    or, with experts beside the dense layer,   h += norm(norm(mlp(norm(h))) + norm(experts(norm(h))))
h += norm(project(gelu(gate(h)) * numbers of the token));  h *= scale
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.experts.routes import Routes
from ...kernels.products.norm import rms_norm
from ..attention.context import AttentionContext, HeadNorms, LayerHeads
from ..products.base import Rows, Sum
from ..products.experts import Experts
from ..products.linear import Linear
from ..products.ranked import OwnRowsSum
from .decoder import Residual
from .moe import ExpertRouter
from .sandwich_decoder import GeluMlp

# Keys and values before norm and rotation of the last layer with a window (True) and without one (False).
KeptKv = MutableMapping[bool, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SharingAttention:
    """Attention whose keys and values later layers may share. A layer without keys of its own gives those of another
    layer to attention again. They are normed, rotated and stored as before, so the same numbers lie in the pages."""

    place: int  # of its KV in the pool
    projection: Linear  # in_size -> q_size, and behind it, if they are its own, keys and values or keys alone
    norms: HeadNorms  # of its queries, and of the keys
    value_norm: Tensor  # [head_dim] of ones: values are normed without weights
    window: int | None
    out: Linear  # q_size -> hidden_size
    q_size: int
    values_are_keys: bool
    eps: float

    @property
    def reader(self) -> Linear:
        return self.projection

    def __call__(self, normed: Rows, context: AttentionContext, kept: KeptKv) -> Tensor:
        """Return the attended values: [num_tokens, in_size] -> [num_tokens, q_size]."""
        q, own = self.projection(normed).tensor_split((self.q_size,), dim=1)
        is_windowed = self.window is not None
        if own.shape[1]:
            k, v = (own, own) if self.values_are_keys else own.chunk(2, dim=1)
            heads = v.unflatten(1, (-1, len(self.value_norm)))
            kept[is_windowed] = torch.cat([k, rms_norm(heads, self.value_norm, self.eps).flatten(1)], dim=1)
        qkv = torch.cat([q, kept[is_windowed]], dim=1)
        return context(qkv, LayerHeads(self.place, self.norms, self.window))


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """The sublayer that adds the token's own numbers to the residual stream."""

    gate: Linear  # hidden_size -> input_size
    projection: Linear  # input_size -> hidden_size
    norm: Tensor  # [hidden_size]

    def __call__(self, hidden: Tensor, numbers: Tensor, eps: float) -> Tensor:
        """Return what is added to `hidden` [num_tokens, hidden_size]; `numbers` [num_tokens, input_size]."""
        gated = F.gelu(self.gate(hidden), approximate="tanh").mul_(numbers)
        return rms_norm(self.projection(gated), self.norm, eps)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsBeside:
    """The experts beside a dense feed-forward layer. The router reads the stream normed without weights: its own scale
    is in the weight of its product."""

    router: ExpertRouter
    scales: Tensor  # [num_experts] float32, of an expert's share
    experts: Experts
    dense_norm: Tensor  # [hidden_size], of the dense layer's output
    in_norm: Tensor  # [hidden_size], of the stream, for the experts
    out_norm: Tensor  # [hidden_size], of their output
    sums_over: Sum | None  # ranks

    def __call__(self, hidden: Tensor, dense: Tensor, eps: float) -> Tensor:
        """Return the output of both: [num_tokens, hidden_size]. `hidden` is the stream, `dense` the dense layer's
        output."""
        of_all = self.sums_over.gather(hidden) if isinstance(self.sums_over, OwnRowsSum) else hidden
        chosen, shares = self.router(rms_norm(of_all, torch.ones_like(self.in_norm), eps))
        routes = Routes(chosen, shares * self.scales[chosen])
        out = self.experts(rms_norm(of_all, self.in_norm, eps), *routes)
        out = out if self.sums_over is None else self.sums_over.sum(out)
        return rms_norm(dense, self.dense_norm, eps).add_(rms_norm(out, self.out_norm, eps))


class LayerNorms(NamedTuple):
    """Norms before and after the sublayers, each [hidden_size]."""

    before_attention: Tensor
    after_attention: Tensor
    before_mlp: Tensor
    after_mlp: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerDecoder:
    """One decoder layer of Gemma 4. The head of this file has its formula."""

    norms: LayerNorms
    attention: SharingAttention
    mlp: GeluMlp
    input: LayerInput | None
    scale: Tensor  # [1]
    experts: ExpertsBeside | None = None

    def __call__(self, stream: Residual, context: AttentionContext, kept: KeptKv, numbers: Tensor | None) -> None:
        """Change the stream; `numbers` [num_tokens, input_size] of the tokens, if the layer has an input."""
        norms, eps, attention = self.norms, stream.eps, self.attention
        normed = stream.normed_for(attention.reader, norms.before_attention)
        out = attention.out(attention(normed, context, kept))
        stream.add_output(rms_norm(out, norms.after_attention, eps))
        out = self.mlp(stream.normed(norms.before_mlp))
        if self.experts is not None:
            out = self.experts(stream.settled(), out, eps)
        stream.add_output(rms_norm(out, norms.after_mlp, eps))
        if self.input is not None:
            assert numbers is not None, "the layer has an input"
            stream.add_output(self.input(stream.settled(), numbers, eps))
        stream.settled().mul_(self.scale)

"""The decoder layer over several residual streams: static hyper-connections (Zhu et al. 2024, arXiv:2409.19606).

At both sites of a layer (attention, mlp):
    y = branch(norm(sum_a read[a] s_a));   s_b <- sum_a mix[a, b] s_a + write[b] y
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.products.norm import add_rms_norm_
from ..attention.context import AttentionContext
from .decoder import DecoderLayer


@dataclass(frozen=True, slots=True, eq=False)
class StreamSite:
    """Weights by which one branch of a layer reads the residual streams and adds to them."""

    read: Tensor  # [hc_mult]
    write: Tensor  # [hc_mult]
    mix: Tensor  # [hc_mult, hc_mult], from, to

    def input(self, streams: Tensor) -> Tensor:
        """Return the input of the branch: [num_tokens, hc_mult, hidden_size] -> [num_tokens, hidden_size]."""
        return torch.matmul(self.read, streams)

    def output(self, streams: Tensor, y: Tensor) -> Tensor:
        """Return the mixed streams with the branch's `y` [num_tokens, hidden_size] added to each."""
        return torch.matmul(self.mix.T, streams).addcmul_(self.write.unsqueeze(1), y.unsqueeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class HyperDecoderLayer:
    """A decoder layer with a site before each of its sublayers."""

    layer: DecoderLayer
    attention_site: StreamSite
    mlp_site: StreamSite
    eps: float  # of the norms

    def __call__(self, streams: Tensor, context: AttentionContext) -> Tensor:
        """Return the streams after the layer, a new tensor [num_tokens, hc_mult, hidden_size]; `streams` is kept."""
        body, site = self.layer.body, self.attention_site
        normed = add_rms_norm_(site.input(streams), None, self.layer.norm, self.eps)
        streams = site.output(streams, body.attention.out(body.attention(normed, context)))
        site = self.mlp_site
        normed = add_rms_norm_(site.input(streams), None, body.mlp_norm, self.eps)
        return site.output(streams, body.mlp(normed))

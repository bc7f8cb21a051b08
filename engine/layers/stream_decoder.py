"""The decoder layer over residual streams whose weights follow from each token (kernels/streams/streams.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.products.norm import Norm
from ...kernels.streams.streams import PendingStreams, StreamRules, StreamWeights, cross_streams
from ..attention.compressed import CompressedAttention
from .compressed_attention import WindowedAttention
from .moe import MoeMlp


@dataclass(frozen=True, slots=True, eq=False)
class StreamLayer:
    """A decoder layer with a site of weights before each of its sublayers."""

    attention_site: StreamWeights
    attention_norm: Norm  # [hidden_size]
    attention: WindowedAttention
    mlp_site: StreamWeights
    mlp_norm: Norm  # [hidden_size]
    mlp: MoeMlp
    rules: StreamRules

    def __call__(self, pending: PendingStreams, input_ids: Tensor, context: CompressedAttention) -> PendingStreams:
        """Return the streams before the output of the layer's last sublayer is added to them. `input_ids` [num_tokens]
        int64."""
        streams, x, shares = cross_streams(pending, self.attention_site, self.attention_norm, self.rules)
        pending = PendingStreams(streams, self.attention(x, context), shares)
        streams, x, shares = cross_streams(pending, self.mlp_site, self.mlp_norm, self.rules)
        return PendingStreams(streams, self.mlp(x, input_ids), shares)

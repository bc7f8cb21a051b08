"""The decoder layer over residual streams whose weights follow from each token (kernels/streams/streams.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.products.norm import Norm
from ...kernels.streams.streams import StreamRules, StreamWeights, read_streams, write_streams
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

    def __call__(self, streams: Tensor, input_ids: Tensor, context: CompressedAttention) -> Tensor:
        """Return the streams after the layer, a new tensor [num_tokens, hc_mult, hidden_size]; `streams` is kept.
        `input_ids` [num_tokens] int64."""
        x, shares = read_streams(streams, self.attention_site, self.attention_norm, self.rules)
        streams = write_streams(streams, self.attention(x, context), shares)
        x, shares = read_streams(streams, self.mlp_site, self.mlp_norm, self.rules)
        return write_streams(streams, self.mlp(x, input_ids), shares)

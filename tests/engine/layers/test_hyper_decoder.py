"""The decoder layer over several streams against the formula of hyper-connections, stream by stream."""

from __future__ import annotations

import torch
from stream_layers import EPS, SIZE, Mixing, body, random

from baton.engine.layers.decoder import DecoderLayer
from baton.engine.layers.hyper_decoder import HyperDecoderLayer, StreamSite
from baton.kernels.products.norm import rms_norm_ref

STREAMS = 3


def site(seed: int) -> StreamSite:
    return StreamSite(random(STREAMS, seed=seed), random(STREAMS, seed=seed + 1), random(STREAMS, STREAMS, seed=seed))


def test_equals_the_formula() -> None:
    norm, context = random(SIZE, seed=1), Mixing()
    layer = HyperDecoderLayer(DecoderLayer(norm, body(0)), site(10), site(20), EPS)
    streams = random(2, STREAMS, SIZE, seed=2)
    before = streams.clone()
    out = layer(streams, context)

    def branch(streams: torch.Tensor, at: StreamSite, y_of: object) -> torch.Tensor:
        assert callable(y_of)
        read = sum(at.read[a] * streams[:, a] for a in range(STREAMS))
        y = y_of(read)
        return torch.stack(
            [
                sum((at.mix[a, b] * streams[:, a] for a in range(STREAMS)), torch.zeros(())) + at.write[b] * y
                for b in range(STREAMS)
            ],
            dim=1,
        )

    inner = layer.layer.body
    expected = branch(
        streams,
        layer.attention_site,
        lambda x: inner.attention.out(inner.attention(rms_norm_ref(x, norm, EPS), context)),
    )
    expected = branch(expected, layer.mlp_site, lambda x: inner.mlp(rms_norm_ref(x, inner.mlp_norm, EPS)))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(streams, before)

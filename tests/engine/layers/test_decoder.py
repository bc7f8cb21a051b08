"""The decoder layer over one stream: both sublayers read the normed stream and add to it, in this order."""

from __future__ import annotations

import torch
from streams import EPS, SIZE, Mixing, body, random

from baton.engine.layers.decoder import DecoderLayer
from baton.engine.layers.residual import Residual
from baton.kernels.norm import rms_norm_ref


def test_equals_the_formula() -> None:
    norm, context, x = random(SIZE, seed=1), Mixing(), random(3, SIZE, seed=2)
    layers = [DecoderLayer(norm, body(index)) for index in range(2)]
    stream = Residual(x.clone(), EPS)
    for layer in layers:
        layer(stream, context)
    expected = x
    for layer in layers:
        attended = layer.body.attention(rms_norm_ref(expected, norm, EPS), context)
        expected = expected + layer.body.attention.out(attended)
        expected = expected + layer.body.mlp(rms_norm_ref(expected, layer.body.mlp_norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-4, rtol=1e-4)
    assert context.indices == [0, 1, 0, 1]


def test_a_body_attends_from_what_it_is_given() -> None:
    given, x, context = random(3, SIZE, seed=3), random(3, SIZE, seed=2), Mixing()
    layer = body(0)
    stream = Residual(x.clone(), EPS)
    layer(stream, given, context)
    expected = x + layer.attention.out(layer.attention(given, context))
    expected = expected + layer.mlp(rms_norm_ref(expected, layer.mlp_norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-4, rtol=1e-4)

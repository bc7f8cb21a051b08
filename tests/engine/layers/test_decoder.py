"""The body of a decoder layer: attention reads what it is given, the MLP the normed stream, and both add to it."""

from __future__ import annotations

import torch
from stream_layers import EPS, SIZE, Mixing, body, random

from baton.engine.layers.residual import Residual
from baton.kernels.products.norm import rms_norm_ref


def test_equals_the_formula() -> None:
    norm, context, x = random(SIZE, seed=1), Mixing(), random(3, SIZE, seed=2)
    bodies = [body(index) for index in range(2)]
    stream = Residual(x.clone(), EPS)
    for each in bodies:
        each(stream, stream.normed(norm), context)
    assert context.indices == [0, 1]
    expected = x
    for each in bodies:
        attended = each.attention(rms_norm_ref(expected, norm, EPS), context)
        expected = expected + each.attention.out(attended)
        expected = expected + each.mlp(rms_norm_ref(expected, each.mlp_norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-4, rtol=1e-4)


def test_the_input_of_attention_need_not_be_the_stream() -> None:
    given, x, context = random(3, SIZE, seed=3), random(3, SIZE, seed=2), Mixing()
    layer = body(0)
    stream = Residual(x.clone(), EPS)
    layer(stream, given, context)
    expected = x + layer.attention.out(layer.attention(given, context))
    expected = expected + layer.mlp(rms_norm_ref(expected, layer.mlp_norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-4, rtol=1e-4)

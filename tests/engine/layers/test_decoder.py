"""The body of a decoder layer: attention reads what it is given, the MLP the normed stream, and both add to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from stream_layers import EPS, INNER, SIZE, Mixing, body, random

from baton.engine.layers.decoder import Mlp, Residual
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import rms_norm_ref

GATE, UP, DOWN = random(INNER, SIZE, seed=1), random(INNER, SIZE, seed=2), random(SIZE, INNER, seed=3)
MLP = Mlp(Linear.dense(torch.cat([GATE, UP])), Linear.dense(DOWN))


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


def formula(x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, GATE)) * F.linear(x, UP), DOWN)


def test_the_feed_forward_equals_its_formula() -> None:
    x = random(3, SIZE, seed=4)
    torch.testing.assert_close(MLP(x), formula(x), atol=1e-4, rtol=1e-4)


def test_the_feed_forward_adds_to_the_stream_what_it_makes_of_the_normed_stream() -> None:
    x, norm = random(3, SIZE, seed=4), random(SIZE, seed=5)
    stream = Residual(x.clone(), EPS)
    MLP.add_to(stream, norm)
    torch.testing.assert_close(stream.settled(), x + formula(rms_norm_ref(x, norm, EPS)), atol=1e-4, rtol=1e-4)

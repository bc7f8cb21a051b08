"""The gated feed-forward layer against its formula, called alone and over a residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.engine.layers.mlp import Mlp
from baton.engine.layers.residual import Residual
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import rms_norm_ref

SIZE, INNER, EPS = 16, 24, 1e-5


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GATE, UP, DOWN = random(INNER, SIZE, seed=1), random(INNER, SIZE, seed=2), random(SIZE, INNER, seed=3)
MLP = Mlp(Linear.dense(torch.cat([GATE, UP])), Linear.dense(DOWN))


def formula(x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, GATE)) * F.linear(x, UP), DOWN)


def test_equals_the_formula() -> None:
    x = random(3, SIZE, seed=4)
    torch.testing.assert_close(MLP(x), formula(x), atol=1e-4, rtol=1e-4)


def test_adds_to_the_stream_what_it_makes_of_the_normed_stream() -> None:
    x, norm = random(3, SIZE, seed=4), random(SIZE, seed=5)
    stream = Residual(x.clone(), EPS)
    MLP.add_to(stream, norm)
    torch.testing.assert_close(stream.settled(), x + formula(rms_norm_ref(x, norm, EPS)), atol=1e-4, rtol=1e-4)

"""The mixture of experts against its formula, token by token, and the form without host reads against the other."""

from __future__ import annotations

import pytest
import torch
from stream_layers import EPS, SIZE, random

from baton.engine.layers import moe
from baton.engine.layers.mlp import Mlp
from baton.engine.layers.moe import MoeMlp
from baton.engine.layers.residual import Residual
from baton.engine.products.linear import Linear
from baton.kernels.norm import rms_norm_ref

NUM_EXPERTS, INNER = 5, 8


def layer(num_active: int, *, norm_topk_prob: bool) -> MoeMlp:
    experts = tuple(
        Mlp(Linear.dense(random(2 * INNER, SIZE, seed=10 + i)), Linear.dense(random(SIZE, INNER, seed=20 + i)))
        for i in range(NUM_EXPERTS)
    )
    return MoeMlp(Linear.dense(random(NUM_EXPERTS, SIZE, seed=1)), experts, num_active, norm_topk_prob)


def formula(mlp: MoeMlp, token: torch.Tensor) -> torch.Tensor:
    """Return the output for one token, [hidden_size] -> [hidden_size]."""
    scores = mlp.router(token.unsqueeze(0))[0].double().softmax(0)
    best = sorted(range(NUM_EXPERTS), key=lambda index: -scores[index])[: mlp.num_active]
    total = sum(scores[index] for index in best) if mlp.norm_topk_prob else 1.0
    y = torch.zeros(SIZE, dtype=torch.float64)
    for index in best:
        y += scores[index] / total * mlp.experts[index](token.unsqueeze(0))[0]
    return y.float()


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_active", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_the_formula(num_tokens: int, num_active: int, norm_topk_prob: bool) -> None:
    mlp, x = layer(num_active, norm_topk_prob=norm_topk_prob), random(num_tokens, SIZE, seed=3)
    expected = torch.stack([formula(mlp, token) for token in x])
    torch.testing.assert_close(mlp(x), expected, atol=1e-3, rtol=1e-4)


def test_no_tokens_are_no_tokens() -> None:
    assert layer(2, norm_topk_prob=True)(torch.empty(0, SIZE)).shape == (0, SIZE)


def test_the_form_without_host_reads_gives_the_same() -> None:
    mlp, x = layer(2, norm_topk_prob=True), random(7, SIZE, seed=3)
    weights, chosen = mlp.router(x).softmax(-1).topk(2)
    grouped = moe._mix_grouped(x, chosen, weights, mlp.experts)
    torch.testing.assert_close(moe._mix_all(x, chosen, weights, mlp.experts), grouped, atol=1e-3, rtol=1e-4)


def test_an_expert_that_was_not_chosen_may_overflow() -> None:
    mlp, x = layer(1, norm_topk_prob=True), random(3, SIZE, seed=3)
    chosen = torch.tensor([[0], [1], [0]])
    broken = Mlp(Linear.dense(torch.full((2 * INNER, SIZE), float("nan"))), mlp.experts[2].down)
    experts = (*mlp.experts[:2], broken)
    assert moe._mix_all(x, chosen, torch.ones(3, 1), experts).isfinite().all()


def test_adds_to_the_stream_what_it_makes_of_the_normed_stream() -> None:
    mlp, x, norm = layer(2, norm_topk_prob=True), random(3, SIZE, seed=4), random(SIZE, seed=5)
    stream = Residual(x.clone(), EPS)
    mlp.add_to(stream, norm)
    expected = x + mlp(rms_norm_ref(x, norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-3, rtol=1e-4)

"""The mixture of experts against its formula, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stream_layers import EPS, SIZE, random

from baton.engine.checkpoint.model_config import ExpertsConfig
from baton.engine.layers.decoder import Mlp, Residual
from baton.engine.layers.moe import ExpertRouter, MoeMlp
from baton.engine.products.dense import DenseProduct
from baton.engine.products.experts import TorchExperts
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref

NUM_EXPERTS, INNER = 6, 8
PLAIN = ExpertsConfig(NUM_EXPERTS, 2, INNER, norm_topk_prob=True, layers=(0,))
GROUPS = replace(PLAIN, num_groups=3, num_active_groups=2)
CONFIGS = {
    "one": replace(PLAIN, num_active=1),
    "sum to one": PLAIN,
    "as they are": replace(PLAIN, norm_topk_prob=False),
    "all": replace(PLAIN, num_active=NUM_EXPERTS),
    "scaled": replace(PLAIN, scaling=2.5),
    "sigmoid": replace(PLAIN, scoring="sigmoid"),
    "sigmoid with bias": replace(PLAIN, scoring="sigmoid", has_bias=True, norm_topk_prob=False),
    "groups": replace(GROUPS, norm_topk_prob=False),
    "groups of two": replace(GROUPS, scoring="sigmoid", has_bias=True, num_ranking=2, scaling=1.5),
    "shared": replace(PLAIN, shared_size=12),
    "root of softplus": replace(PLAIN, scoring="sqrtsoftplus", has_bias=True),
}


def layer(config: ExpertsConfig) -> MoeMlp:
    bias = random(NUM_EXPERTS, seed=2) if config.has_bias else None
    gate_up = [DenseProduct.of(random(2 * INNER, SIZE, seed=10 + i), None) for i in range(NUM_EXPERTS)]
    down = [DenseProduct.of(random(SIZE, INNER, seed=20 + i), None) for i in range(NUM_EXPERTS)]
    shared = None
    if config.shared_size:
        shared = Mlp(Linear.dense(random(24, SIZE, seed=30)), Linear.dense(random(SIZE, 12, seed=31)))
    router = ExpertRouter(random(NUM_EXPERTS, SIZE, seed=1), bias, config)
    return MoeMlp(router, TorchExperts(tuple(gate_up), tuple(down)), shared, None)


def formula(mlp: MoeMlp, token: torch.Tensor) -> torch.Tensor:
    """Return the output for one token, [hidden_size] -> [hidden_size]."""
    config, product = mlp.router.config, mlp.router.weight.double() @ token.double()
    scores = {
        "softmax": product.softmax(0),
        "sigmoid": product.sigmoid(),
        "sqrtsoftplus": product.exp().log1p().sqrt(),
    }[config.scoring]
    ranking = (scores if mlp.router.bias is None else scores + mlp.router.bias.double()).tolist()
    width = NUM_EXPERTS // config.num_groups
    groups = [ranking[start : start + width] for start in range(0, NUM_EXPERTS, width)]
    of_groups = [sum(sorted(group)[-config.num_ranking :]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda index: -of_groups[index])[: config.num_active_groups]
    allowed = [index for index in range(NUM_EXPERTS) if index // width in best]
    chosen = sorted(allowed, key=lambda index: -ranking[index])[: config.num_active]
    total = sum(scores[index] for index in chosen) if config.norm_topk_prob else 1.0
    y = torch.zeros(SIZE, dtype=torch.float64)
    assert isinstance(mlp.experts, TorchExperts)
    for index in chosen:
        inner = silu_mul_ref(mlp.experts.gate_up[index](token.unsqueeze(0)))
        y += config.scaling * scores[index] / total * mlp.experts.down[index](inner)[0]
    return y.float() if mlp.shared is None else y.float() + mlp.shared(token.unsqueeze(0))[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_the_formula(num_tokens: int, name: str) -> None:
    mlp, x = layer(CONFIGS[name]), random(num_tokens, SIZE, seed=3)
    expected = torch.stack([formula(mlp, token) for token in x])
    torch.testing.assert_close(mlp(x), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["sum to one", "groups of two", "shared"])
def test_no_tokens_are_no_tokens(name: str) -> None:
    assert layer(CONFIGS[name])(torch.empty(0, SIZE)).shape == (0, SIZE)


def test_a_bias_of_the_product_changes_choice_and_shares() -> None:
    """Softmax over all experts, divided by the sum of the chosen ones, is the softmax of their products."""
    weight, bias, x = random(NUM_EXPERTS, SIZE, seed=1), random(NUM_EXPERTS, seed=2), random(7, SIZE, seed=3)
    routes = ExpertRouter(weight, None, PLAIN, bias)(x)
    best = (x @ weight.T + bias).topk(2)
    assert torch.equal(routes.chosen, best.indices)
    torch.testing.assert_close(routes.shares, best.values.softmax(-1))
    assert not torch.equal(routes.chosen, ExpertRouter(weight, None, PLAIN)(x).chosen)


def test_the_choice_is_made_in_float32() -> None:
    """Scores that bfloat16 cannot tell apart."""
    weight = torch.tensor([[1.0, 2.0**-12], [1.0, 2.0**-11], [0.0, 0.0]])
    router = ExpertRouter(weight, None, replace(PLAIN, num_experts=3, num_active=1))
    assert router(torch.ones(1, 2, dtype=torch.bfloat16)).chosen.tolist() == [[1]]


@pytest.mark.parametrize("name", ["sum to one", "shared"])
def test_adds_to_the_stream_what_it_makes_of_the_normed_stream(name: str) -> None:
    mlp, x, norm = layer(CONFIGS[name]), random(3, SIZE, seed=4), random(SIZE, seed=5)
    stream = Residual(x.clone(), EPS)
    mlp.add_to(stream, norm)
    expected = x + mlp(rms_norm_ref(x, norm, EPS))
    torch.testing.assert_close(stream.settled(), expected, atol=1e-3, rtol=1e-4)

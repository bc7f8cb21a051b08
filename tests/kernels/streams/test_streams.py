"""Residual streams with weights of each token, against the modules of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kernels.products.norm import Norm, rms_norm_ref
from baton.kernels.streams.streams import (
    StreamRules,
    StreamShares,
    StreamWeights,
    collapse_streams,
    read_streams,
    write_streams,
)

SIZE, RULES = 24, StreamRules(20, 1e-6, 1e-5)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(hc_mult: int) -> StreamWeights:
    num = (2 + hc_mult) * hc_mult
    return StreamWeights(random(num, hc_mult * SIZE, seed=1), random(num, seed=2), random(3, seed=3))


def config_of(hc_mult: int) -> Any:
    return SimpleNamespace(hc_mult=hc_mult, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5, hidden_size=SIZE)


@pytest.mark.parametrize("hc_mult", [2, 3, 4])
def test_a_site_equals_transformers(hc_mult: int) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    weights, streams, y = weights_of(hc_mult), random(5, hc_mult, SIZE, seed=4), random(5, SIZE, seed=5)
    module, norm = DeepseekV4HyperConnection(config_of(hc_mult)), Norm(random(SIZE, seed=6), 1e-5)
    module.load_state_dict(weights._asdict())
    with torch.no_grad():
        post, comb, collapsed = (each[0] for each in module(streams[None]))
    x, shares = read_streams(streams, weights, norm, RULES)
    torch.testing.assert_close(x, rms_norm_ref(collapsed, *norm))
    torch.testing.assert_close(shares, StreamShares(post, comb))
    expected = post.unsqueeze(2) * y.unsqueeze(1) + comb.transpose(1, 2) @ streams
    torch.testing.assert_close(write_streams(streams, y, shares), expected)


@pytest.mark.parametrize("hc_mult", [2, 4])
def test_the_end_of_the_layers_equals_transformers(hc_mult: int) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

    weights = StreamWeights(random(hc_mult, hc_mult * SIZE, seed=1), random(hc_mult, seed=2), random(1, seed=3))
    module, streams = DeepseekV4HyperHead(config_of(hc_mult)), random(5, hc_mult, SIZE, seed=4)
    module.load_state_dict({f"hc_{name}": tensor for name, tensor in weights._asdict().items()})
    with torch.no_grad():
        expected = module(streams[None])[0]
    torch.testing.assert_close(collapse_streams(streams, weights, RULES), expected)


def test_rows_and_columns_of_the_mixture_sum_to_one() -> None:
    _, shares = read_streams(random(7, 4, SIZE, seed=0), weights_of(4), Norm(torch.ones(SIZE), 1e-5), RULES)
    for dim in (1, 2):
        torch.testing.assert_close(shares.mix.sum(dim), torch.ones(7, 4), atol=1e-3, rtol=0)


def test_a_state_without_rows_has_the_same_widths() -> None:
    streams = torch.zeros(0, 3, SIZE)
    x, shares = read_streams(streams, weights_of(3), Norm(torch.ones(SIZE), 1e-5), RULES)
    assert x.shape == (0, SIZE) and write_streams(streams, x, shares).shape == streams.shape

"""The attention layer over a paged pool against dense attention in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from thread_ranks import ThreadGroup
from torch import Tensor

from baton.engine.attention.attention import RotaryEmbedding, begin_attention
from baton.engine.attention.context import HeadNorms
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.layers.attention import Attention, WideNorms
from baton.engine.products.base import WeightShard
from baton.engine.products.linear import Linear
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.products.norm import rms_norm_ref

PAGE_SIZE, NUM_PAGES, IN_SIZE = 4, 12, 24
Checkpoint = Callable[..., Path]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(x: torch.Tensor, layer: Attention, config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The attended values of a whole sequence, [num_tokens, q_size]."""
    heads = layer.qkv(x).unflatten(1, (-1, config.head_dim))
    q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if layer.head_norms is not None:
        q, k = (
            y * (y.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight
            for y, weight in zip((q, k), layer.head_norms, strict=True)
        )
    q, k = (y * cos + torch.cat(y.chunk(2, dim=-1)[::-1], dim=-1) * sin for y in (q, k))  # `sin` has the signs
    groups = config.num_heads // config.num_kv_heads
    k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
    position = torch.arange(len(x))
    distance = position.unsqueeze(1) - position
    seen = (distance >= 0) & (distance < (layer.window or len(x)))
    scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = layer.sinks.view(-1, 1, 1).expand(-1, len(x), 1)
        probabilities = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", probabilities, v).flatten(1)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("has_norms", "has_sinks"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("chunks", [(20,), (7, 1, 1, 11), (18, 1, 1)])
def test_equals_dense_attention(
    window: int | None, has_norms: bool, has_sinks: bool, chunks: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    config = read_model_config(checkpoint("mistral", sliding_window=window))
    norms = HeadNorms(random(config.head_dim, seed=1), random(config.head_dim, seed=2)) if has_norms else None
    qkv = Linear.dense(random(config.q_size + 2 * config.kv_size, IN_SIZE, seed=3) / 5)
    sinks = random(config.num_heads, seed=5) if has_sinks else None
    layer = Attention(1, qkv, norms, window, Linear.dense(torch.eye(config.q_size)), sinks=sinks)
    rotary = RotaryEmbedding(config.rope, config.head_dim, torch.device("cpu"))
    shape = (config.num_layers, NUM_PAGES, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    kv, x, pages = torch.full(shape, float("nan")), random(20, IN_SIZE, seed=4), [7, 2, 9, 1, 5]
    outs, position = [], 0
    for num in chunks:
        batch = ForwardBatch.build([BatchRow([0] * num, position, pages)], PAGE_SIZE, "cpu")
        context = begin_attention(config, rotary, batch, ModelPools(kv), kv.dtype)
        outs.append(layer(x[position : position + num], context))
        position += num
    cos, sin = rotary(torch.arange(20), torch.float32)
    torch.testing.assert_close(torch.cat(outs), dense(x, layer, config, cos, sin), atol=1e-4, rtol=1e-4)
    assert kv[1, pages].isfinite().all()
    assert not kv[0].nan_to_num().any()  # the other layer's pages hold no value


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 2), (2, 2), (2, 1)])
def test_norms_over_all_heads_are_those_of_one_rank(size: int, num_kv_heads: int) -> None:
    """Two ranks have two of four heads of q each, and one head of k each, or the same one."""
    num_tokens, head_dim = 3, 4
    weights = [random(count * head_dim, seed=seed) for seed, count in enumerate((4, num_kv_heads))]
    q, k, v = (random(num_tokens, len(each), seed=9 + i) for i, each in enumerate((*weights, weights[1])))
    expected = [rms_norm_ref(x, weight, 1e-5) for x, weight in zip((q, k), weights, strict=True)]
    group, rows = ThreadGroup(size, 20.0), dict[int, Tensor]()

    def run(rank: int) -> None:
        shard = None if size == 1 else WeightShard(rank, size, 0, (4, num_kv_heads, num_kv_heads))
        norms = WideNorms.of(weights[0], weights[1], 1e-5, shard, group.of(rank))
        own = [x if shard is None else shard.take(x.T, i).T for i, x in enumerate((q, k, v))]
        qkv = torch.cat(own, 1)
        with group.turn:
            norms.apply_(qkv)
        rows[rank] = qkv

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    for rank, qkv in rows.items():
        shard = None if size == 1 else WeightShard(rank, size, 0, (4, num_kv_heads, num_kv_heads))
        own = [x if shard is None else shard.take(x.T, i).T for i, x in enumerate((*expected, v))]
        torch.testing.assert_close(qkv, torch.cat(own, 1))

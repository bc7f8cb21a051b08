"""Attention to latents in the pool against heads that are expanded, with keys and values of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from thinned import halved

from baton.engine.attention import latent_pieces
from baton.engine.attention.attention import RotaryEmbedding, begin_attention
from baton.engine.checkpoint.model_config import LatentConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.layers.latent_attention import LatentAttention
from baton.engine.products.linear import Linear
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.kernels.operations import preferring

PAGE_SIZE, NUM_PAGES, IN_SIZE, EPS = 4, 12, 24, 1e-6
Checkpoint = Callable[..., Path]
Backend = Literal["numba", "reference", "triton", "pieces"]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """Turn each pair of `x` [num_tokens, num_heads, rotary_dim], written as complex numbers, into two halves."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if is_interleaved else torch.stack((x[..., :half], x[..., half:]), -1)
    angles = positions.double().view(-1, 1, 1) * 10_000.0 ** (-torch.arange(half).double() / half)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1).float()


def expanded(x: torch.Tensor, layer: LatentAttention) -> torch.Tensor:
    """The attended values of a whole sequence, [num_tokens, num_heads * value_dim]."""
    latent, num_heads, positions = layer.latent, len(layer.up), torch.arange(len(x))
    width = latent.rank + latent.rope_dim
    q, stored = layer.down(x)[:, :-width], layer.down(x)[:, -width:]
    if layer.query_norm is not None and layer.query_up is not None:
        q = layer.query_up(norm(q, layer.query_norm))
    q = q.view(len(x), num_heads, -1)
    c, r = norm(stored[:, : latent.rank], layer.latent_norm), stored[:, latent.rank :].unsqueeze(1)
    turned_q = rotated(q[..., latent.plain_dim :], positions, is_interleaved=latent.is_interleaved)
    turned_k = rotated(r, positions, is_interleaved=latent.is_interleaved)
    k, v = torch.einsum("td,hpd->thp", c, layer.up).split([latent.plain_dim, latent.value_dim], dim=2)
    scores = torch.einsum("qhp,khp->hqk", q[..., : latent.plain_dim], k)
    scores = (scores + torch.einsum("qhr,kr->hqk", turned_q, turned_k.squeeze(1))) * latent.scale
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)


@pytest.mark.parametrize(
    ("chunks", "is_interleaved", "query_rank", "backend"),
    halved([(20,), (7, 1, 1, 11), (18, 1, 1)], [False, True], [None, 12], ["numba", "reference", "triton", "pieces"]),
    ids=str,
)
def test_equals_heads_that_are_expanded(
    chunks: tuple[int, ...],
    is_interleaved: bool,
    query_rank: int | None,
    backend: Backend,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces: chunks of many tokens attend to expanded keys, eight at once."""
    if backend in ("triton", "pieces"):
        pytest.importorskip("triton")
        monkeypatch.setattr(latent_pieces, "_LEAST", 5 if backend == "pieces" else 1000)
        monkeypatch.setattr(latent_pieces, "_PIECE_BYTES", 4 * (20 + 24) * 4 * 8)
        monkeypatch.setattr(latent_pieces, "_UNIT", 4)
    latent = LatentConfig(40, query_rank, 20, 16, 24, is_interleaved, 0.07)
    config = replace(read_model_config(checkpoint("deepseek_v3")), latent=latent)
    num_queries = 4 * (20 + 16)
    layer = LatentAttention(
        1,
        latent,
        Linear.dense(random((query_rank or num_queries) + 56, IN_SIZE, seed=1) / 5),
        None if query_rank is None else random(query_rank, seed=2),
        None if query_rank is None else Linear.dense(random(num_queries, query_rank, seed=3)),
        random(40, seed=4),
        torch.cat((random(4, 20, 40, seed=5), random(4, 24, 40, seed=6)), dim=1),
        Linear.dense(torch.eye(4 * 24)),
    )
    rotary = RotaryEmbedding(config.rope, 16, torch.device("cpu"))
    kv, x = torch.full((config.num_layers, NUM_PAGES, 1, 1, PAGE_SIZE, 56), float("nan")), random(20, IN_SIZE, seed=7)
    outs, position, pages = [], 0, [7, 2, 9, 1, 5]
    with preferring("triton" if backend == "pieces" else backend):
        for num in chunks:
            batch = ForwardBatch.build([BatchRow([0] * num, position, pages)], PAGE_SIZE, "cpu")
            outs.append(
                layer(x[position : position + num], begin_attention(config, rotary, batch, ModelPools(kv), kv.dtype))
            )
            position += num
    torch.testing.assert_close(torch.cat(outs), expanded(x, layer), atol=1e-4, rtol=1e-4)
    assert kv[1, pages].isfinite().all()
    assert not kv[0].nan_to_num().any()  # the other layer's pages hold no value

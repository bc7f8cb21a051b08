"""Queries, latents and values by Triton against torch, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_device import random

pytest.importorskip("triton")

from attention_case import Case

from baton.kernels.attention.latents import LatentWeights, Turns, join_latents, latent_values_ref
from baton.kernels.attention.triton_latent_heads import absorb_latents, latent_values, turn_latents
from baton.kernels.operations import preferring
from baton.kernels.products.norm import Norm
from baton.kernels.products.rotary import rotary_ref
from baton.kernels.state.triton_store import token_rows

RANK, PLAIN_DIM, ROPE_DIM, VALUE_DIM = 72, 20, 12, 24
DTYPES = [torch.float32, torch.float16]
UNIT = {torch.float32: 2e-6, torch.float16: 2.0**-9}


class Layer:
    """New tokens of a case, the weights of a layer, and what should come of them."""

    def __init__(self, case: Case, num_heads: int, *, is_interleaved: bool) -> None:
        self.case, dtype, num_tokens = case, case.dtype, len(case.qkv)
        width = RANK + ROPE_DIM
        down = random(num_tokens, num_heads * (PLAIN_DIM + ROPE_DIM) + width, dtype=dtype)
        q, self.stored = down.tensor_split([-width], dim=1)
        self.q = q.unflatten(1, (num_heads, -1))
        up = random(num_heads, PLAIN_DIM + VALUE_DIM, RANK, dtype=dtype, seed=1, scale=0.2)
        norm = Norm(random(RANK, dtype=dtype, seed=2), 1e-6)
        self.weights = LatentWeights(norm, up, PLAIN_DIM, is_interleaved)
        angle = random(num_tokens, 1, ROPE_DIM // 2, seed=3)
        cos, sin = torch.cat((angle.cos(),) * 2, -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
        rows = token_rows(case.table, case.lens, num_tokens, case.page_size, None, case.starts)
        self.turns = Turns(cos, sin, rows)
        with preferring("reference"):
            self.heads = join_latents(self.q.float(), self.stored.float(), self._wide(self.weights))
        self.heads[..., RANK:] = rotary_ref(self.heads[..., RANK:], cos.float(), sin.float())

    def _wide(self, weights: LatentWeights) -> LatentWeights:
        return weights._replace(norm=Norm(weights.norm.weight.float(), 1e-6), up=weights.up.float())

    def check_pool(self, pool: torch.Tensor) -> None:
        """Assert that `pool`, what the pages held before, became the case's pages by the store of the latents alone."""
        expected = pool.view(-1, RANK + ROPE_DIM)
        for token, row in enumerate(self.turns.rows.tolist()):
            if row >= 0:
                expected[row] = self.heads[token, -1].to(pool.dtype)
        self.close(self.case.kv, pool)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        unit = UNIT[self.case.dtype]
        torch.testing.assert_close(found, expected.to(found.dtype), atol=8 * unit, rtol=4 * unit, equal_nan=True)


def case_of(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], page_size: int, dtype: torch.dtype) -> Case:
    case = Case(query_lens, seq_lens, (2, 1), head_dim=RANK + ROPE_DIM, page_size=page_size, dtype=dtype)
    case.kv = case.kv[:, :1].contiguous()
    return case


SHAPES = [  # (query_lens, seq_lens, num_heads, page_size)
    ((1,), (40,), 5, 16),
    ((3, 3, 3), (9, 3, 50), 5, 4),
    ((5, 1, 0, 19), (9, 1, 4, 30), 3, 1),
    ((70,), (77,), 2, 48),
    ((300,), (300,), 2, 64),  # torch multiplies
]


@pytest.mark.each_value
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_absorbed_queries(
    shape: tuple[tuple[int, ...], tuple[int, ...], int, int], dtype: torch.dtype, is_interleaved: bool
) -> None:
    query_lens, seq_lens, num_heads, page_size = shape
    case = case_of(query_lens, seq_lens, page_size, dtype)
    layer, pool = Layer(case, num_heads, is_interleaved=is_interleaved), case.kv.clone()
    q, stored = layer.q.clone(), layer.stored.clone()
    heads = absorb_latents(layer.q, layer.stored, layer.weights, layer.turns, case.kv)
    layer.close(heads, layer.heads[:, :-1])
    layer.check_pool(pool)
    assert torch.equal(q, layer.q) and torch.equal(stored, layer.stored) and heads.is_contiguous()


@pytest.mark.each_value
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_turned_queries(
    shape: tuple[tuple[int, ...], tuple[int, ...], int, int], dtype: torch.dtype, is_interleaved: bool
) -> None:
    query_lens, seq_lens, num_heads, page_size = shape
    case = case_of(query_lens, seq_lens, page_size, dtype)
    layer, pool = Layer(case, num_heads, is_interleaved=is_interleaved), case.kv.clone()
    q = layer.q.clone()
    latents = turn_latents(layer.q, layer.stored, layer.weights, layer.turns, case.kv)
    layer.close(latents, layer.heads[:, -1])
    layer.close(layer.q[..., PLAIN_DIM:], layer.heads[:, :-1, RANK:])
    assert torch.equal(layer.q[..., :PLAIN_DIM], q[..., :PLAIN_DIM])
    layer.check_pool(pool)


def test_tokens_without_a_place_are_not_stored() -> None:
    case = case_of((2, 2), (30, 9), 4, torch.float32)
    layer, pool = Layer(case, 3, is_interleaved=True), case.kv.clone()
    layer.turns.rows[1:3] = -1
    absorb_latents(layer.q, layer.stored, layer.weights, layer.turns, case.kv)
    layer.check_pool(pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 40, 300])
def test_values(num_tokens: int, dtype: torch.dtype) -> None:
    up = random(3, PLAIN_DIM + VALUE_DIM, RANK, dtype=dtype, seed=1, scale=0.2)
    weights = LatentWeights(Norm(random(RANK, dtype=dtype), 1e-6), up, PLAIN_DIM, is_interleaved=True)
    attended = random(num_tokens, 3, RANK, dtype=dtype)
    values = latent_values(attended, weights)
    wide = latent_values_ref(attended.float(), weights._replace(up=up.float()))
    assert values.dtype == dtype and values.shape == (num_tokens, 3 * VALUE_DIM)
    torch.testing.assert_close(values.float(), wide, atol=8 * UNIT[dtype], rtol=4 * UNIT[dtype])

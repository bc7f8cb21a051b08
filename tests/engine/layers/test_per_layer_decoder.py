"""The layer of Gemma 4: what it adds to Gemma 3's. Whole models are compared with transformers' in ../models."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.attention.context import AttentionContext, HeadNorms, LayerHeads
from baton.engine.layers.per_layer_decoder import SharingAttention
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import rms_norm_ref

SIZE, HEADS, HEAD_DIM, EPS = 12, 2, 4, 1e-6


@dataclass
class _Recorded(AttentionContext):
    """A context that records what it is given."""

    calls: list[tuple[Tensor, LayerHeads]] = field(default_factory=list[tuple[Tensor, LayerHeads]])

    def __call__(self, qkv: Tensor, heads: LayerHeads) -> Tensor:
        self.calls.append((qkv.clone(), heads))
        qkv.fill_(float("nan"))  # as the interface allows
        return qkv[:, : HEADS * HEAD_DIM]


def layer(out_size: int, window: int | None, *, values_are_keys: bool, seed: int) -> SharingAttention:
    generator = torch.Generator().manual_seed(seed)
    projection = Linear.of(torch.randn(out_size, SIZE, generator=generator))
    norms, ones = HeadNorms(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM)), torch.ones(HEAD_DIM)
    out, q_size = Linear.of(torch.eye(HEADS * HEAD_DIM)), HEADS * HEAD_DIM
    return SharingAttention(0, projection, norms, ones, window, out, q_size, values_are_keys, EPS)


def test_a_layer_without_keys_gives_attention_those_of_the_last_layer_of_its_kind() -> None:
    x, context = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(9)), _Recorded()
    kept: dict[bool, Tensor] = {}
    both = layer((HEADS + 2) * HEAD_DIM, None, values_are_keys=False, seed=1)
    keys = layer((HEADS + 1) * HEAD_DIM, 7, values_are_keys=True, seed=2)
    queries = layer(HEADS * HEAD_DIM, None, values_are_keys=False, seed=3)
    windowed = layer(HEADS * HEAD_DIM, 7, values_are_keys=False, seed=4)
    for each in (both, keys, queries, windowed):
        each(x, context, kept)
    first, second, third, fourth = (qkv.split([HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM], 1) for qkv, _ in context.calls)
    assert torch.equal(torch.cat(third[1:], 1), torch.cat(first[1:], 1))
    assert torch.equal(torch.cat(fourth[1:], 1), torch.cat(second[1:], 1))
    assert torch.equal(third[0], queries.projection(x))
    own = both.projection(x)[:, HEADS * HEAD_DIM :]
    assert torch.equal(first[1], own[:, :HEAD_DIM])  # attention norms and rotates keys
    torch.testing.assert_close(first[2], rms_norm_ref(own[:, HEAD_DIM:], torch.ones(HEAD_DIM), EPS))
    torch.testing.assert_close(second[2], rms_norm_ref(second[1], torch.ones(HEAD_DIM), EPS))

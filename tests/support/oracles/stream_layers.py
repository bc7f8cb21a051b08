"""Small decoder layers with random weights, and an attention context without pages, for tests of layers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.attention.context import LayerHeads
from baton.engine.layers.attention import Attention
from baton.engine.layers.decoder import DecoderBody, Mlp
from baton.engine.products.linear import Linear

SIZE, INNER, EPS = 16, 24, 1e-5


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Mixing:
    """An `AttentionContext` in which every token's values are the means of its own q, k and v."""

    def __init__(self) -> None:
        self.indices: list[int] = []  # of the layers that asked

    def __call__(self, qkv: Tensor, heads: LayerHeads) -> Tensor:
        self.indices.append(heads.layer)
        return qkv.unflatten(1, (3, -1)).mean(1)


def body(index: int) -> DecoderBody:
    """A layer without its input norm; every `index` has weights of its own."""

    def linear(out_size: int, in_size: int, part: int) -> Linear:
        return Linear.dense(random(out_size, in_size, seed=100 * index + part) / in_size**0.5)

    attention = Attention(index, linear(3 * SIZE, SIZE, 1), None, None, linear(SIZE, SIZE, 2))
    mlp = Mlp(linear(2 * INNER, SIZE, 3), linear(SIZE, INNER, 4))
    return DecoderBody(attention, random(SIZE, seed=100 * index + 5), mlp)

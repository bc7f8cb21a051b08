"""The residual stream of a planted model: how long embeddings are, what they hold, and what the lm_head compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from planted_heads import RESULT, Dims
from planted_text import PlantedText
from torch import Tensor

from baton.metadata.errors import ModelError

GAMMA = 2.5  # by how much the right token's logit leads
RANDOM_ENERGY = 2e-4  # of an embedding's, outside of the subspace
RANDOM_LOGIT = 0.05  # standard deviation of what that adds to logits
SINK = -1e6  # far below the score of every key


@dataclass(frozen=True, slots=True)
class Stream:
    """The length of the embeddings, which decides how a norm scales the subspace."""

    hidden_size: int
    scale: float  # a norm turns 1 into this: a power of two
    energy: float  # sum of an embedding's squares
    random: float  # standard deviation outside of the subspace

    @classmethod
    def of(cls, text: PlantedText, dims: Dims, hidden_size: int, eps: float) -> Stream:
        needed = 2 + text.key_bits + text.num_bits + 1  # squares of an embedding's parts, and some ballast
        scale = 2.0 ** math.floor(math.log2(hidden_size / needed) / 2) if hidden_size > needed else 0.0
        if scale < 2 or hidden_size < 2 * dims.size:
            raise ModelError(f"hidden_size {hidden_size} is too small to plant a text of {dims.size} dimensions in")
        energy = hidden_size * (1 / scale**2 - eps)
        return cls(hidden_size, scale, energy, math.sqrt(RANDOM_ENERGY * energy / (hidden_size - dims.size)))


def embedding(
    drawn: Tensor,
    text: PlantedText,
    dims: Dims,
    stream: Stream,
    dtype: str,
    low: Tensor | None = None,
    unset: Sequence[int] = (),
) -> Tensor:
    """Turn normal noise [vocab_size, hidden_size], in place, into embeddings that have equal length in `dtype`.

    `low` [vocab_size] int64 replaces the low digits. The results of the bits `unset` begin as 0 of a bit.
    """
    drawn.mul_(stream.random)
    drawn[:, : dims.size] = 0.0
    drawn.copy_(drawn.to(getattr(torch, dtype)))
    rows = torch.arange(text.vocab_size, device=drawn.device)
    low = torch.from_numpy(text.low).to(drawn.device) if low is None else low
    keys, values = (torch.from_numpy(each).to(drawn.device) for each in (text.keys, text.values))
    drawn[rows, dims.low.start + low] = 1.0
    drawn[:, dims.key] = _signs(keys.unsqueeze(1) >> torch.arange(text.key_bits, device=drawn.device) & 1)
    drawn[:, dims.value] = _signs(values)
    drawn[:, dims.one] = 1.0
    drawn[:, [dims.result.start + bit for bit in unset]] = -RESULT
    rest = stream.energy - torch.cat([block.square().sum(1) for block in drawn.split(4096)])
    for dim in range(dims.ballast.start, dims.ballast.stop):
        drawn[:, dim] = _rounded_down(rest.clamp_min(0.0).sqrt(), dtype)
        rest -= drawn[:, dim].square()
    return drawn


def comparing(drawn: Tensor, text: PlantedText, dims: Dims, rows: Tensor, low_scale: float, bit_scale: float) -> Tensor:
    """Turn normal noise [num_rows, hidden_size], in place, into an lm_head that compares low digit and bits.

    The head sees the low digit as `low_scale` and the bits as +-`bit_scale`. Code c has the row rows[c]; `rows` is
    [num_codes] int64.
    """
    drawn.mul_(RANDOM_LOGIT / math.sqrt(2 * RANDOM_ENERGY * drawn.shape[1]))
    drawn[:, : dims.size] = 0.0
    rows, codes = rows.to(drawn.device), torch.arange(text.num_codes, device=drawn.device)
    bits = (codes // text.base).unsqueeze(1) >> torch.arange(text.num_bits, device=drawn.device) & 1
    drawn[rows, dims.low.start + (codes - 1) % text.base] = GAMMA / low_scale
    drawn[rows, dims.result] = _signs(bits) * (GAMMA / 2 / bit_scale)
    return drawn


def _signs(bits: Tensor) -> Tensor:
    return bits.float() * 2 - 1


def _rounded_down(values: Tensor, dtype: str) -> Tensor:
    dropped = {"float32": 0, "bfloat16": 16, "float16": 13}[dtype]  # bits of float32's mantissa
    return (values.view(torch.int32) >> dropped << dropped).view(torch.float32)

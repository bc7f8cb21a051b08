"""Products of rows with the weights of the experts that they chose, for mixtures of experts (arXiv:1701.06538).

A pair is a row and one of the experts that it chose: pair `row * num_active + place`. The rows of pairs that chose the
same expert are multiplied together, so that the weights of each chosen expert are read once, and others never.
Nothing is read on the host, and no shape depends on the choice, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import SwigluClamp
from ..operations import Operation
from ..products.fp8 import dequantized, spread
from ..products.silu import clamped_silu_mul, silu_mul
from .mxfp4 import unpacked


class ExpertWeight(NamedTuple):
    """The weights of all experts, one below the other: [num_experts * out_size, in_size]. `scales` and `group` are as
    for `fp8_linear`, or, if the values are bytes, as in mxfp4.py; None: the values are plain numbers."""

    values: Tensor
    scales: Tensor | None
    group: int
    bias: Tensor | None = None  # [num_experts * out_size]

    def numbers(self, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the numbers that the weight of each expert stands for, [out_size, in_size]."""
        if self.scales is None:
            whole = self.values.to(dtype)
        elif self.is_packed:  # one after the other, as float32 numbers take eight times the memory
            parts = zip(self.values.chunk(num_experts), self.scales.chunk(num_experts), strict=True)
            return tuple(unpacked(*part, self.group).to(dtype) for part in parts)
        else:
            whole = dequantized(self.values, self.scales, self.group).to(dtype)
        return whole.chunk(num_experts)

    def biases(self, num_experts: int) -> Sequence[Tensor | None]:
        """Return the bias of each expert, [out_size]."""
        return [None] * num_experts if self.bias is None else self.bias.chunk(num_experts)

    @property
    def is_packed(self) -> bool:
        """Whether the values are MXFP4."""
        return self.values.dtype is torch.uint8


class Places(NamedTuple):
    """The pairs in the order of their experts, in blocks of one expert each. A place is empty if it holds -1."""

    chosen: Tensor  # [num_rows, num_active] int64
    num_experts: int
    pairs: Tensor  # [num_blocks * block] int32, pairs; of each expert in their own order
    experts: Tensor  # [num_blocks] int32; num_experts: the block is empty

    @property
    def block(self) -> int:
        return len(self.pairs) // max(1, len(self.experts))


def place_experts_ref(chosen: Tensor, num_experts: int, *, is_packed: bool = False) -> Places:
    """Place the pairs of `chosen` [num_rows, num_active] int64. `is_packed`: the experts' weights are."""
    flat, device = chosen.flatten(), chosen.device
    num_pairs = len(flat)
    block = block_size(num_pairs, num_experts, is_packed=is_packed)
    num_blocks = most_blocks(num_pairs, num_experts, block)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    first_place, first_pair = (ends - blocks) * block, counts.cumsum(0) - counts
    expert = flat[order]
    place = first_place[expert] + torch.arange(num_pairs, device=device) - first_pair[expert]
    pairs = torch.full((num_blocks * block,), -1, dtype=torch.int32, device=device)
    pairs[place] = order.int()
    experts = torch.searchsorted(ends, torch.arange(num_blocks, device=device), right=True).int()
    return Places(chosen, num_experts, pairs, experts)


def places_of_row(chosen: Tensor, num_experts: int) -> Places:
    """Return the places of one row's pairs, `chosen` [1, num_active] int64: block i is pair i, and holds no places."""
    assert len(chosen) == 1, chosen.shape
    return Places(chosen, num_experts, chosen.new_empty(0), chosen[0])


def block_size(num_pairs: int, num_experts: int, *, is_packed: bool = False) -> int:
    """Return the number of places of a block: about the mean number of pairs per expert, rounded up to a block size.

    A second block of an expert reads its weights again, and unpacks them again if they are packed. So if experts have
    few pairs, a block has room for twice the mean: then most experts need only one."""
    mean = -(-num_pairs // num_experts)
    most_of_size = ((16, 12), (32, 24), (64, 64)) if is_packed else ((16, 8), (32, 32), (64, 64))
    return next((size for size, most in most_of_size if mean <= most), 128)


def most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Return the largest number of blocks that so many pairs need: every expert may end with one that is not full."""
    return num_pairs // block + min(num_experts, num_pairs)


def experts_linear_ref(
    x: Tensor, x_scales: Tensor | None, weight: ExpertWeight, places: Places, dtype: torch.dtype
) -> Tensor:
    """Return the product of each pair's row with its expert's weight, and its bias, [num_pairs, out_size] of `dtype`.

    `x` has a row for each row of `places.chosen`, or one for each pair; `x_scales` are as for `fp8_linear`."""
    chosen = places.chosen.flatten()
    rows = x.float() if x_scales is None else x.float() * spread(x_scales, weight.group, x.shape[1])
    rows = rows.repeat_interleave(len(chosen) // max(1, len(x)), 0)
    out = rows.new_zeros(len(chosen), len(weight.values) // places.num_experts)
    biases = weight.biases(places.num_experts)
    for expert, numbers in enumerate(weight.numbers(places.num_experts, torch.float32)):
        product, bias = F.linear(rows, numbers), biases[expert]
        product = product if bias is None else product + bias.float()
        out = torch.where((chosen == expert).unsqueeze(1), product, out)
    return out.to(dtype)


def gated_experts_linear_ref(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    places: Places,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    """Return `silu_mul` of the product, whose first half is the gate: [num_pairs, out_size / 2]. Arguments as for
    `experts_linear`. `clamp`: `clamped_silu_mul` instead."""
    if clamp is None:
        return silu_mul(experts_linear_ref(x, x_scales, weight, places, dtype))
    return clamped_silu_mul(experts_linear_ref(x, x_scales, weight, places, torch.float32), clamp).to(dtype)


def mix_parts_ref(parts: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the sums of pairs times their shares: `parts` [num_rows * num_active, size], `shares` [num_rows,
    num_active] float32 -> [num_rows, size] of parts' dtype. The sum is float32, in the order of the pairs.

    `others` are further summands of the rows: [num_rows, size], or [num_others, num_rows, size] float32."""
    wide = parts.float().view(*shares.shape, parts.shape[1]) * shares.unsqueeze(-1)
    out = wide[:, 0]
    for place in range(1, shares.shape[1]):
        out = out + wide[:, place]
    if others is not None:
        for other in others.unsqueeze(0) if others.ndim == 2 else others:
            out = out + other
    return out.to(parts.dtype)


def gated_experts_of_row_ref(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    clamp: SwigluClamp | None = None,
) -> Tensor:
    """Return `gated_experts_linear` of one row, which needs no places: `x` [1, in_size], `chosen` [1, num_active]
    int64 -> [num_active, size] of `dtype`."""
    return gated_experts_linear_ref(x, x_scales, weight, places_of_row(chosen, num_experts), dtype, clamp)


def experts_of_row_ref(
    x: Tensor,
    x_scales: Tensor | None,
    weight: ExpertWeight,
    chosen: Tensor,
    num_experts: int,
    shares: Tensor,
    dtype: torch.dtype,
    others: Tensor | None = None,
) -> Tensor:
    """Return `mix_parts` of `experts_linear` of the pairs of one row: `x` [num_active, in_size], `chosen` [1,
    num_active] int64, `shares` [1, num_active] float32 -> [1, size] of `dtype`. `others` are further summands: [1,
    size], or [num_others, 1, size] float32. All are added before the sum is rounded."""
    parts = experts_linear_ref(x, x_scales, weight, places_of_row(chosen, num_experts), dtype)
    out = mix_parts_ref(parts.float(), shares)
    if others is not None:
        for other in others.view(-1, *out.shape):
            out = out + other
    return out.to(dtype)


place_experts = Operation("place_experts", place_experts_ref)
experts_linear = Operation("experts_linear", experts_linear_ref, by=lambda x, x_scales, weight, *_, **__: weight.values)  # noqa: ARG005
gated_experts_linear = Operation(
    "gated_experts_linear",
    gated_experts_linear_ref,
    by=lambda x, x_scales, weight, *_, **__: weight.values,  # noqa: ARG005
)
mix_parts = Operation("mix_parts", mix_parts_ref)
gated_experts_of_row = Operation("gated_experts_of_row", gated_experts_of_row_ref)
experts_of_row = Operation("experts_of_row", experts_of_row_ref)

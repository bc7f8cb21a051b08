"""The feed-forward layers of all experts of a mixture, in one format: gate and up of every expert in one weight, and
down of every expert in another.

    gate_up    rows of expert 0's gate, expert 0's up, expert 1's gate, ...    [num_experts * 2 * inner_size, size]
    down       rows of expert 0, expert 1, ...                                 [num_experts * size, inner_size]

Either may have biases. The gate is a SwiGLU, which may be clamped, or a GEGLU.

The formats of weights are those of other products (registry.py), and stand in the same files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.experts.experts import (
    ExpertWeight,
    experts_linear,
    experts_of_row,
    gated_experts_linear,
    gated_experts_of_row,
    mix_parts,
    place_experts,
)
from ...kernels.formats import SwigluClamp
from ...kernels.operations import captures
from ...kernels.products.fp8 import RoundedRows, add_rms_norm_round_
from ...kernels.products.norm import Norm, add_rms_norm_
from ...kernels.products.silu import clamped_silu_mul, gelu_mul
from .base import GivenWeight, Product, Rows, WeightSource
from .fp8 import RowRounding
from .registry import choose, read_experts


class ExpertSources(NamedTuple):
    """The weights of all experts before a product holds them. The projections of each are those of the experts, in
    order: gate, up, gate, up, ... and down, down, ..."""

    gate_up: WeightSource
    down: WeightSource
    num_experts: int
    clamp: SwigluClamp | None = None  # of the gate; None: it is plain
    is_geglu: bool = False  # the gate has GELU in place of SiLU


class Experts(ABC):
    """The feed-forward layers of all experts."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def build(cls, sources: ExpertSources) -> Self | None:
        """Return None if the format does not serve these weights on their device."""

    def normed(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Rows]:
        """Do `add_rms_norm_` (norm.py), and return its result [num_rows, size] twice: as it is, and as the experts take
        it."""
        normed = add_rms_norm_(hidden, delta, *norm)
        return normed, normed

    @abstractmethod
    def __call__(self, x: Rows, chosen: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
        """Return the sums of the experts of each row, times their shares: [num_rows, size] -> [num_rows, size]. `x` is
        a tensor, or what `normed` returned.

        `chosen` [num_rows, num_active] int64: different experts. `shares` [num_rows, num_active] float32. `others` are
        further summands of the rows, as for `mix_parts`."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchExperts(Experts):
    """Products of each expert, one expert after the other. The host reads which experts are chosen, which costs nothing
    on a CPU. FP8 and MXFP4 weights are here as the numbers that they stand for, and FP8 rounds rows. Products of
    FP8 are float32, as 16 bits do not hold its numbers."""

    gate_up: tuple[Product, ...]  # size -> 2 * inner_size
    down: tuple[Product, ...]  # inner_size -> size
    roundings: tuple[RowRounding, RowRounding] | None = None  # of the rows of both; None: they are not rounded
    clamp: SwigluClamp | None = None
    is_geglu: bool = False

    @classmethod
    def build(cls, sources: ExpertSources) -> Self | None:
        if captures(sources.gate_up.device):
            return None
        products, roundings = list[tuple[Product, ...]](), list[RowRounding]()
        for source in (sources.gate_up, sources.down):
            weight, rounding = read_experts(source)
            dtype = source.dtype if rounding is None else torch.float32
            biases = [None if each is None else each.to(dtype) for each in weight.biases(sources.num_experts)]
            each = zip(weight.numbers(sources.num_experts, dtype), biases, strict=True)
            products.append(tuple(choose(GivenWeight(*own)) for own in each))
            if rounding is not None:
                roundings.append(rounding)
        of_both = (roundings[0], roundings[1]) if roundings else None
        return cls(products[0], products[1], of_both, sources.clamp, sources.is_geglu)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, self._expert(index, x[rows]).float() * shares[rows, place].unsqueeze(1))
        if others is not None:
            out += others if others.ndim == 2 else others.sum(0)
        return out.to(x.dtype)

    def _expert(self, index: int, x: Tensor) -> Tensor:
        of_x, of_inner = self.roundings or (None, None)
        gate_up, rows = self.gate_up[index], x if of_x is None else of_x.numbers(x)
        if self.is_geglu:
            inner = gelu_mul(gate_up(rows))
        else:
            inner = gate_up.gated(rows) if self.clamp is None else clamped_silu_mul(gate_up(rows), self.clamp)
        return self.down[index](inner if of_inner is None else of_inner.numbers(inner.to(x.dtype)))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts(Experts):
    """Products of all experts at once, by kernels that read the weights of each chosen expert and no others."""

    gate_up: ExpertWeight
    down: ExpertWeight
    num_experts: int
    dtype: torch.dtype  # of the products
    roundings: tuple[RowRounding, RowRounding] | None = None
    clamp: SwigluClamp | None = None
    is_geglu: bool = False

    @classmethod
    def build(cls, sources: ExpertSources) -> Self | None:
        (gate_up, of_x), (down, of_inner) = read_experts(sources.gate_up), read_experts(sources.down)
        roundings = None if of_x is None or of_inner is None else (of_x, of_inner)
        dtype = sources.gate_up.dtype
        return cls(gate_up, down, sources.num_experts, dtype, roundings, sources.clamp, sources.is_geglu)

    def normed(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Rows]:
        rounding = None if self.roundings is None else self.roundings[0]
        if rounding is None or not rounding.is_of_row:
            return Experts.normed(self, hidden, delta, norm)
        normed, (group, is_power) = torch.empty_like(hidden), rounding[:2]
        options = {"group": group, "has_power_of_two_scales": is_power}
        return normed, add_rms_norm_round_(hidden, delta, *norm, **options, out=normed)

    def __call__(self, x: Rows, chosen: Tensor, shares: Tensor, others: Tensor | None = None) -> Tensor:
        gate_up, down, num_experts, dtype = self.gate_up, self.down, self.num_experts, self.dtype
        values, scales = x if isinstance(x, RoundedRows) else self._rounded(0, x)
        if len(chosen) == 1 and not self.is_geglu:
            inner = gated_experts_of_row(values, scales, gate_up, chosen, num_experts, dtype, self.clamp)
            return experts_of_row(*self._rounded(1, inner), down, chosen, num_experts, shares, dtype, others)
        places = place_experts(chosen, num_experts, is_packed=gate_up.is_packed)
        if self.is_geglu:
            inner = gelu_mul(experts_linear(values, scales, gate_up, places, dtype))
        else:
            inner = gated_experts_linear(values, scales, gate_up, places, dtype, self.clamp)
        return mix_parts(experts_linear(*self._rounded(1, inner), down, places, dtype), shares, others)

    def _rounded(self, index: int, x: Tensor) -> RoundedRows:
        """Return rows as the first or second product takes them."""
        return RoundedRows(x, None) if self.roundings is None else self.roundings[index](x)


EXPERT_PRODUCTS: tuple[type[Experts], ...] = (TorchExperts, GroupedExperts)


def choose_experts_product(sources: ExpertSources) -> Experts:
    """Make the experts of a mixture by the first class that serves them on their device."""
    found = (built for kind in EXPERT_PRODUCTS if (built := kind.build(sources)) is not None)
    return next(found)

"""Products of FP8 weights (kernels/products/fp8.py), in the formats that engine/checkpoint/quantization.py lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...kernels.experts.experts import ExpertWeight
from ...kernels.products.fp8 import (
    BLOCK,
    E4M3,
    Fp8Weight,
    RoundedRows,
    add_rms_norm_round_,
    dequantized,
    fp8_gated_linear,
    fp8_linear,
    fp8_linear_parts,
    gates_fp8,
    round_rows,
    round_to_scale,
    scales_for,
    silu_mul_round,
    spread,
)
from ...kernels.products.norm import Norm, add_rms_norm_
from ...kernels.products.silu import silu_mul
from ..checkpoint.checkpoint import FLOATS
from ..checkpoint.quantization import Quantization
from ..ranks.group import Group
from .base import GivenWeight, Product, StoredTensor, WeightSource
from .blocked import BlockedProduct
from .dense import DenseProduct

_STORED, _SCALES = ("F8_E4M3",), (*FLOATS, "F8_E8M0")


class RowRounding(NamedTuple):
    """How the rows x of a product are rounded to e4m3. `group` 0: they are not."""

    group: int  # columns that share a scale
    has_power_of_two_scales: bool
    stored: Tensor | None  # [] float32: the scale of all rows
    ranks: Group | None = None  # that have other columns of the same rows, which share the scales of whole rows

    @property
    def is_of_row(self) -> bool:
        """Whether the numbers of a row, and nothing else, tell how it is rounded."""
        return bool(self.group) and self.stored is None and self.ranks is None

    def __call__(self, x: Tensor) -> RoundedRows:
        """Return rows [num_rows, in_size] as `fp8_linear` takes them. The stored scale is left to the product."""
        if not self.group:
            return RoundedRows(x, None)
        if self.stored is not None:
            return RoundedRows(round_to_scale(x, self.stored), None)
        if self.ranks is not None:
            largest = x.abs().amax(1, keepdim=True).float()
            largest = self.ranks.gather_columns(largest, self.ranks.size).amax(1, keepdim=True)
            scales = scales_for(largest)
            return RoundedRows(round_to_scale(x, scales), scales)
        return round_rows(x, self.group, has_power_of_two_scales=self.has_power_of_two_scales)

    def numbers(self, x: Tensor) -> Tensor:
        """Return the numbers that the rounded rows stand for, float32."""
        values, scales = self(x)
        wide = values.float()
        return wide if scales is None else wide * spread(scales, self.group, x.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Product(Product):
    """The weight in FP8, on any device."""

    weight: Fp8Weight
    rounding: RowRounding
    bias: Tensor | None  # [out_size]
    in_size: int
    out_size: int
    dtype: torch.dtype  # of the product, if the rows are rounded already

    @classmethod
    def tensors(
        cls, out_size: int, in_size: int, quantization: Quantization | None
    ) -> Mapping[str, StoredTensor] | None:
        if quantization is None:
            return None
        if quantization.is_online:
            return {"weight": StoredTensor((out_size, in_size))}
        scales = {
            "blocks": StoredTensor((-(-out_size // BLOCK), -(-in_size // BLOCK)), _SCALES, (BLOCK, BLOCK)),
            "rows": StoredTensor((out_size, 1)),
            "tensor": StoredTensor(()),
        }
        if quantization.weight_scale not in scales:
            return None
        stored = {"weight": StoredTensor((out_size, in_size), _STORED)}
        stored[quantization.scale_name] = scales[quantization.weight_scale]
        if quantization.rounding == "stored":
            stored[quantization.input_scale_name] = StoredTensor(())
        return stored

    @classmethod
    def build(cls, source: WeightSource) -> Self:
        return cls(*read_fp8(source), source.bias, source.in_size, sum(source.out_sizes), source.dtype)

    @classmethod
    def numbers(cls, source: WeightSource) -> Tensor:
        quantization = source.quantization
        if quantization is None or quantization.is_online:
            return source.fused("weight")
        return dequantized(*_stored(source, quantization)).to(source.dtype)

    def __call__(self, x: Tensor | RoundedRows, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        return fp8_linear(self._rows(x), self.weight, self.bias, self._dtype(x))

    def parts(self, x: Tensor | RoundedRows) -> Tensor:
        return self(x) if self.bias is not None else fp8_linear_parts(self._rows(x), self.weight, self._dtype(x))

    def gated(self, x: Tensor | RoundedRows, *, norm: Norm | None = None) -> Tensor:
        assert norm is None, "nothing is fused here"
        if self.bias is not None:
            return silu_mul(self(x))
        return fp8_gated_linear(self._rows(x), self.weight, self._dtype(x))

    def gates(self, x: Tensor | RoundedRows) -> bool:
        rows = x if isinstance(x, RoundedRows) else RoundedRows(x, None)
        return self.bias is None and gates_fp8(rows, self.weight)

    @property
    def rounds(self) -> bool:
        return self.rounding.is_of_row

    def normed(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor | RoundedRows:
        group, is_power = self.rounding[:2]
        if not self.rounds:
            return add_rms_norm_(hidden, delta, *norm)
        return add_rms_norm_round_(hidden, delta, *norm, group=group, has_power_of_two_scales=is_power)

    def gate(self, gate_up: Tensor) -> Tensor | RoundedRows:
        group, is_power = self.rounding[:2]
        return silu_mul_round(gate_up, group, has_power_of_two_scales=is_power) if self.rounds else silu_mul(gate_up)

    def _rows(self, x: Tensor | RoundedRows) -> RoundedRows:
        return x if isinstance(x, RoundedRows) else self.rounding(x)

    def _dtype(self, x: Tensor | RoundedRows) -> torch.dtype:
        return self.dtype if isinstance(x, RoundedRows) else x.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Fp8ProductOnCpu(Product):
    """Float32 products on a CPU: the rows are rounded, and multiplied by the float32 numbers that the weight stands
    for."""

    product: Product
    rounding: RowRounding
    in_size: int
    out_size: int

    @classmethod
    def tensors(
        cls, out_size: int, in_size: int, quantization: Quantization | None
    ) -> Mapping[str, StoredTensor] | None:
        return Fp8Product.tensors(out_size, in_size, quantization)

    @classmethod
    def build(cls, source: WeightSource) -> Self | None:
        if not source.is_float32_on_cpu:
            return None
        of = Fp8Product.build(source)
        plain = GivenWeight(dequantized(*of.weight), of.bias)
        product = BlockedProduct.build(plain) or DenseProduct.build(plain)
        return cls(product, of.rounding, of.in_size, of.out_size)

    @classmethod
    def numbers(cls, source: WeightSource) -> Tensor:
        return Fp8Product.numbers(source)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None, "nothing is fused here"
        return self.product(self.rounding.numbers(x))


def read_experts(source: WeightSource) -> tuple[ExpertWeight, RowRounding] | None:
    """Return the weights of all experts as kernels take them, and how rows are rounded for them; None: they are not in
    FP8."""
    quantization = source.quantization
    if quantization is None or not (quantization.is_online or source.has(quantization.scale_name)):
        return None
    weight, rounding = read_fp8(source)
    return ExpertWeight(*weight, source.bias), rounding


def read_fp8(source: WeightSource) -> tuple[Fp8Weight, RowRounding]:
    """Return a quantized weight, and how the rows are rounded that it multiplies."""
    quantization = source.quantization
    assert quantization is not None, "no format without a quantization"
    weight = _rounded(source) if quantization.is_online else _stored(source, quantization)
    rounding = _rounding(source, quantization)
    if rounding.stored is not None:
        weight = weight._replace(scales=weight.scales * rounding.stored)
    return weight, rounding


def _stored(source: WeightSource, quantization: Quantization) -> Fp8Weight:
    """Return the weight that the checkpoint has."""
    device, out_sizes = source.device, source.out_sizes
    values = torch.empty((sum(out_sizes), source.in_size), dtype=E4M3, device=device)
    for part, own in zip(source.parts("weight"), values.split(out_sizes), strict=True):
        own.copy_(part)
    scales = [part.to(device, torch.float32) for part in source.parts(quantization.scale_name)]
    match quantization.weight_scale:
        case "blocks":
            if any(size % BLOCK for size in out_sizes[:-1]):  # blocks of the whole would hold rows of two projections
                scales = [each.repeat_interleave(BLOCK, 0)[:size] for each, size in zip(scales, out_sizes, strict=True)]
            return Fp8Weight(values, torch.cat(scales), BLOCK)
        case "rows":
            return Fp8Weight(values, torch.cat(scales), source.in_size)
        case "tensor":
            spread = [each.reshape(1, 1).expand(size, 1) for each, size in zip(scales, out_sizes, strict=True)]
            return Fp8Weight(values, torch.cat(spread), source.in_size)
        case other:
            raise AssertionError(f"{other} is not FP8")


def _rounded(source: WeightSource) -> Fp8Weight:
    """Return a plain weight in FP8, with one scale for each row."""
    values, scales = RowRounding(source.in_size, False, None, source.ranks)(source.fused("weight"))
    assert scales is not None, "rows have scales of their own"
    return Fp8Weight(values, scales, source.in_size)


def _rounding(source: WeightSource, quantization: Quantization) -> RowRounding:
    if quantization.rounding == "none":
        return RowRounding(0, False, None)
    if quantization.rounding == "groups":
        return RowRounding(BLOCK, quantization.has_power_of_two_scales, None)
    if quantization.rounding == "rows":
        return RowRounding(source.in_size, False, None, source.ranks)
    scales = torch.stack([part.reshape(()) for part in source.parts(quantization.input_scale_name)])
    return RowRounding(source.in_size, False, scales.max().to(source.device, torch.float32))  # all read the same rows

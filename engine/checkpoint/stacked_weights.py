"""The weights of all experts that a checkpoint has in one tensor, as gpt-oss and Mistral 4 do.

gpt-oss has columns in front, and rows of an expert's projections alternate: gate, up, gate, up, ...

    NAME           [num_experts, in_size, num_parts * out_size]
    NAME_bias      [num_experts, num_parts * out_size]

or, in MXFP4 (kernels/experts/mxfp4.py),

    NAME_blocks    [num_experts, num_parts * out_size, in_size / 32, 16] uint8
    NAME_scales    [num_experts, num_parts * out_size, in_size / 32] uint8

Mistral 4 has rows in front, those of gate before those of up:

    NAME           [num_experts, num_parts * out_size, in_size]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.experts.mxfp4 import GROUP
from ...metadata.errors import ModelError
from ..products.base import Split, WeightSource
from .checkpoint import FLOATS, TensorSpec
from .weights import Weights

_ENDS = {"weight": "", "bias": "_bias", "blocks": "_blocks", "scales": "_scales"}
_BYTES = ("U8",)


class StackedWeight(WeightSource):
    """The weights of all experts, or this rank's share of them. Its projections are those of expert 0, of expert 1, ...

    The tensors `blocks` and `scales` have the columns of a row side by side: [out_size, in_size / 2] and [out_size,
    in_size / group], where `group` is 32, or less if ranks divide groups."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        num_experts: int,
        num_parts: int,
        out_size: int,
        in_size: int,
        split: Split,
        *,
        has_rows_first: bool = False,
    ) -> None:
        """`num_parts` projections of each expert have `out_size` rows each. Sizes are those of the whole weights.
        `split`: how ranks may divide each projection. `has_rows_first`: as Mistral 4's."""
        shard = weights.ranks.shard(split)
        own_size, self.in_size = out_size, in_size
        if shard is not None and shard.dim == 0:
            own_size = shard.part_len(out_size, 0)
        elif shard is not None:
            self.in_size = shard.part_len(in_size, 0)
        self.out_sizes = (own_size,) * (num_experts * num_parts)
        self.dtype, self.device, self.quantization = weights.dtype, weights.device, weights.quantization
        self.divides_columns = shard is not None and shard.dim == 1
        self.ranks = weights.ranks.group if self.divides_columns else None
        self._weights, self._name, self._shard = weights, name, shard
        self._sizes, self._num_parts = (num_experts, num_parts * out_size, in_size), num_parts
        self._has_rows_first = has_rows_first
        self._fused: dict[str, Tensor] = {}

    @property
    def bias(self) -> Tensor | None:
        if self._has_rows_first:
            return None
        if self.divides_columns and self._shard is not None and self._shard.rank > 0:
            return None  # the sum over the ranks has it once
        return self.fused("bias")

    def has(self, name: str) -> bool:
        return name in _ENDS and self._weights.has(f"{self._name}{_ENDS[name]}")

    def parts(self, name: str) -> list[Tensor]:
        stored, shard = self._stored(name), self._shard
        if self._has_rows_first:
            parts = [part for rows in stored for part in rows.chunk(self._num_parts)]
        else:
            parts = [rows[part :: self._num_parts] for rows in stored for part in range(self._num_parts)]
        if shard is None or (name == "bias" and shard.dim == 1):
            return parts
        return [shard.take(part, 0) for part in parts]

    def fused(self, name: str) -> Tensor:
        if name not in self._fused:
            parts = self.parts(name)
            out = torch.empty((sum(self.out_sizes), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
            for part, own in zip(parts, out.split(self.out_sizes), strict=True):
                own.copy_(part)
            self._fused[name] = out
        return self._fused[name]

    def _stored(self, name: str) -> Tensor:
        """Return a tensor of the whole weights with the rows in front, [num_experts, num_parts * out_size, ...]."""
        (num_experts, num_rows, in_size), rows_first = self._sizes, self._has_rows_first
        if name in ("blocks", "scales") and in_size % GROUP:
            raise ModelError(f"{self._name} has {in_size} columns, which groups of {GROUP} (MXFP4) cannot divide")
        shape, dtypes = {
            "weight": ((num_experts, num_rows, in_size) if rows_first else (num_experts, in_size, num_rows), FLOATS),
            "bias": ((num_experts, num_rows), FLOATS),
            "blocks": ((num_experts, num_rows, in_size // GROUP, GROUP // 2), _BYTES),
            "scales": ((num_experts, num_rows, in_size // GROUP), _BYTES),
        }[name]
        [stored] = self._weights.stored([TensorSpec(f"{self._name}{_ENDS[name]}", shape, dtypes)])
        if name == "weight":
            return stored if rows_first else stored.transpose(1, 2)
        if name == "blocks":
            return stored.flatten(2)
        return stored.repeat_interleave(GROUP // self._group, 2) if name == "scales" else stored

    @property
    def _group(self) -> int:
        """Columns that share a scale here: so few that no group belongs to two ranks."""
        group = math.gcd(GROUP, self.in_size)
        if group == 1:
            raise ModelError(
                f"{self._name}: ranks would have {self.in_size} columns each, and two share a byte (MXFP4)"
            )
        return group

"""Products of groups of numbers with weights of their own, as in the output projection of DeepSeek-V4: group g of a row
is multiplied by weight g. Weights in FP8 stay so on a GPU. Rows are not rounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.experts.experts import ExpertWeight, Places, experts_linear, place_experts
from ...kernels.formats import BLOCK
from ...kernels.operations import captures
from .base import WeightSource
from .fp8 import read_experts
from .registry import plain_numbers

Once = Callable[[str, Callable[[], Places]], Places]  # (name, make) -> what `make` returns, made once in a forward


class Groups(ABC):
    """The weights of all groups."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor, once: Once) -> Tensor:
        """Return the products, [num_rows, num_groups * in_size] -> [num_rows, num_groups * out_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseGroups(Groups):
    """Plain numbers."""

    weight: Tensor  # [num_groups, out_size, in_size]

    def __call__(self, x: Tensor, once: Once) -> Tensor:
        del once
        parts = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1)
        return torch.bmm(parts, self.weight.transpose(1, 2)).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Groups(Groups):
    """Blocks of FP8. To the kernels, a group is an expert, which one part of each row has chosen."""

    weight: ExpertWeight
    num_groups: int

    def __call__(self, x: Tensor, once: Once) -> Tensor:
        num_rows, num_groups = len(x), self.num_groups

        def make() -> Places:
            chosen = torch.arange(num_groups, device=x.device).expand(num_rows, -1)
            return place_experts(chosen.contiguous(), num_groups)

        places = once(f"groups {num_groups}", make)
        return experts_linear(x.view(num_rows * num_groups, -1), None, self.weight, places, x.dtype).view(num_rows, -1)


def read_groups(source: WeightSource, out_size: int) -> Groups:
    """Return the weights of groups of `out_size` rows each."""
    are_blocks = source.quantization is not None and source.quantization.weight_scale == "blocks"
    are_whole = out_size % BLOCK == 0 and source.in_size % BLOCK == 0
    if are_blocks and are_whole and source.dtype != torch.float32 and captures(source.device):
        found = read_experts(source)
        if found is not None:
            return Fp8Groups(found[0], sum(source.out_sizes) // out_size)
    return DenseGroups(plain_numbers(source).unflatten(0, (-1, out_size)))

"""Products of a weight that is divided among the ranks of a node (group.py). Each wraps the product of its own share.

    all ranks hold the same rows             columns of W are divided:  SummedProduct
    every rank holds rows of its own         rows of W are divided:     GatheredProduct, before the share
                                             columns of W are divided:  ScatteredProduct, after the share

Rows of W that are divided while all ranks hold the same rows need no wrapper. The residual stream sums what a
`SummedProduct` or a `ScatteredProduct` leaves (`parts`) together with its own addition and the next norm: on a GPU one
kernel does all three. Nothing else is fused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ...kernels.products.norm import Norm
from ..ranks.group import Group
from .base import Product, Sum, WeightSource


@dataclass(slots=True)
class RankRows:
    """Rows of every rank in the forward that runs. The steps of the group write them (engine/ranks/steps.py); at the
    start, `Ranks.announce` does."""

    lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class OwnRowsSum:
    """The sum over ranks of which each rank keeps its own rows. A `Sum`."""

    group: Group
    rows: RankRows

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, [num_own_rows, size] -> [sum of num_rows, size]."""
        return self.group.gather(x, self.rows.lens)

    def sum(self, x: Tensor) -> Tensor:
        """[sum of num_rows, size] -> [num_own_rows, size]."""
        return self.group.reduce_scatter(x, self.rows.lens)

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do `Group.reduce_scatter_norm_`."""
        return self.group.reduce_scatter_norm_(hidden, delta, weight, eps, self.rows.lens)


@dataclass(frozen=True, slots=True, eq=False)
class _Wrapped(Product):
    product: Product  # by this rank's share of the weight
    group: Group
    in_size: int
    out_size: int

    @classmethod
    def build(cls, source: WeightSource) -> Self | None:
        """Return None: a product of ranks is made around another (`Ranks.join`)."""
        del source
        return None

    @property
    def alone(self) -> Product:
        return self.product


@dataclass(frozen=True, slots=True, eq=False)
class SummedProduct(_Wrapped):
    """Multiplies this rank's columns and sums over the ranks. The bias is in rank 0's share."""

    @property
    def sums_over(self) -> Group:
        return self.group

    def parts(self, x: Tensor) -> Tensor:
        """[num_rows, in_size / num_ranks] -> this rank's summand, [num_rows, out_size], or float32 parts of it."""
        return self.product.parts(x)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """[num_rows, in_size / num_ranks] -> [num_rows, out_size], bit for bit the same on each rank."""
        assert norm is None and residual is None, "nothing is fused here"
        return self.group.sum(self.product(x))


@dataclass(frozen=True, slots=True, eq=False)
class GatheredProduct(_Wrapped):
    """Multiplies the rows of all ranks by this rank's rows of the weight."""

    rows: RankRows

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """[num_own_rows, in_size] -> [sum of num_rows, out_size / num_ranks]."""
        assert norm is None and residual is None, "nothing is fused here"
        return self.product(self.group.gather(x, self.rows.lens))

    def gated(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        """[num_own_rows, in_size] -> [sum of num_rows, out_size / num_ranks / 2]."""
        assert norm is None, "nothing is fused here"
        return self.product.gated(self.group.gather(x, self.rows.lens))


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredProduct(_Wrapped):
    """Multiplies this rank's columns for the rows of all ranks, sums, and keeps its own rows."""

    rows: RankRows

    @property
    def sums_over(self) -> Sum:
        return OwnRowsSum(self.group, self.rows)

    def parts(self, x: Tensor) -> Tensor:
        """[sum of num_rows, in_size / num_ranks] -> this rank's summand of the rows of all ranks, [sum of num_rows,
        out_size], or float32 parts of it."""
        return self.product.parts(x)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """[sum of num_rows, in_size / num_ranks] -> [num_own_rows, out_size]."""
        assert norm is None and residual is None, "nothing is fused here"
        return self.group.reduce_scatter(self.product(x), self.rows.lens)

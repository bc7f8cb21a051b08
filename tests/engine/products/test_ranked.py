"""Products of a divided weight: the operation of the group that each asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.engine.layers.decoder import Residual
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear
from baton.engine.products.ranked import GatheredProduct, RankRows, ScatteredProduct, SummedProduct
from baton.engine.ranks.group import OneRank
from baton.kernels.products.norm import rms_norm_ref


class Doubling(OneRank):
    """A group in which another rank always has the same as this one."""

    size = 2

    def sum(self, x: Tensor) -> Tensor:
        return 2 * x

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_ref(hidden.add_(2 * delta), weight, eps)

    def gather(self, x: Tensor, lens: object) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor, lens: object) -> Tensor:
        return 2 * x[: len(x) // 2]

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        assert list(lens) == [3, 3]
        return rms_norm_ref(hidden.add_(2 * delta[:3]), weight, eps)


WEIGHT, X = torch.randn(8, 4), torch.randn(3, 4)
DENSE = DenseProduct.of(WEIGHT, None)


def test_columns_are_summed() -> None:
    linear = Linear(SummedProduct(DENSE, Doubling(), 4, 8))
    assert torch.equal(linear(X), 2 * DENSE(X))
    assert torch.equal(linear.gated(X), Linear.dense(2 * WEIGHT).gated(X))
    assert not linear.fuses(X) and (linear.in_size, linear.out_size) == (4, 8)


@pytest.mark.parametrize("ends_in_norm", [True, False])
def test_the_residual_stream_sums_over_the_ranks_once(ends_in_norm: bool) -> None:
    """An output of ranks is added, another one after it, and one that no rank shares."""
    stream, norm = Residual(torch.ones(3, 8), 1e-5), torch.rand(8)
    shared, alone = Linear(SummedProduct(DENSE, Doubling(), 4, 8)), Linear.dense(WEIGHT)
    expected = torch.ones(3, 8) + 4 * DENSE(X) + DENSE(X)
    stream.add(shared, X)
    stream.add(shared, X)
    if ends_in_norm:
        stream.normed(norm)
    stream.add(alone, X)
    torch.testing.assert_close(stream.normed(norm), rms_norm_ref(expected, norm, 1e-5))
    torch.testing.assert_close(stream.settled(), expected)


def test_rows_of_all_ranks_are_multiplied_and_each_rank_keeps_its_own() -> None:
    rows = RankRows((3, 3))
    up = Linear(GatheredProduct(DENSE, Doubling(), 4, 8, rows))
    assert torch.equal(up(X), DENSE(torch.cat([X, X])))
    assert torch.equal(up.gated(X), DENSE.gated(torch.cat([X, X])))
    down = Linear(ScatteredProduct(DENSE, Doubling(), 4, 8, rows))
    assert torch.equal(down(torch.cat([X, X])), 2 * DENSE(X))


@pytest.mark.parametrize("ends_in_norm", [True, False])
def test_the_residual_stream_adds_its_own_rows_of_a_sum(ends_in_norm: bool) -> None:
    rows, both = RankRows(), torch.cat([X, X])
    stream, norm = Residual(torch.ones(3, 8), 1e-5), torch.rand(8)
    down = Linear(ScatteredProduct(DENSE, Doubling(), 4, 8, rows))
    rows.lens = 3, 3
    expected = torch.ones(3, 8) + 4 * DENSE(X)
    stream.add(down, both)
    stream.add(down, both)
    if ends_in_norm:
        torch.testing.assert_close(stream.normed(norm), rms_norm_ref(expected, norm, 1e-5))
    torch.testing.assert_close(stream.settled(), expected)


def test_a_rank_without_rows_gets_none() -> None:
    rows = RankRows((0,))
    up, down = (kind(DENSE, OneRank(), 4, 8, rows) for kind in (GatheredProduct, ScatteredProduct))
    assert up(X[:0]).shape == down(X[:0]).shape == (0, 8)

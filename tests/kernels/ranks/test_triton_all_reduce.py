"""The Triton sums over ranks against kernels/ranks/all_reduce.py, between processes that share memory.

tests/gpu/test_cuda_group.py does the same between processes that share a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing
from peer_cases import Case, check, local_group, new_blocks, run_processes
from thinned import thinned
from torch import Tensor
from triton_device import IS_INTERPRETED

pytest.importorskip("triton")

from baton.kernels.ranks.all_reduce import (
    CONTROL,
    MAX_ROW_BYTES,
    NUM_LANES,
    SLOT_BYTES,
    PeerBlocks,
    all_reduce_norm_ref_,
)
from baton.kernels.ranks.triton_all_reduce import (
    all_max,
    all_reduce,
    all_reduce_norm_,
    reduce_scatter,
    reduce_scatter_norm_,
    serves_norm,
    serves_scatter,
)

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tests/gpu/test_cuda_group.py tests them on a GPU")

HALF = torch.float16
CASES = [
    Case("sum", (1, 64)),
    Case("sum", (3, 301)),
    Case("sum", (2, 0)),
    Case("sum", (7, 1024), num_lanes=4),  # a lane has two rows
    Case("sum", (7, 50), HALF),
    Case("sum", (4, 5), torch.int64),
    Case("max", (3, 301)),
    Case("max", (9, 2), torch.int64),
    Case("max", (5, 3), HALF),
    Case("gather", (5, 33)),
    Case("gather", (6, 2), torch.int64),
    Case("gather", (0, 8)),
    Case("gather", (600, 1024), torch.bool, num_lanes=2),
    Case("gather_columns", (5, 33)),
    Case("gather_columns", (1, 1040), HALF),
    Case("gather_columns", (0, 8)),
    Case("exchange_columns", (7, 33)),
    Case("exchange_columns", (14, 20), HALF, num_lanes=4),
    Case("reduce_scatter", (12, 17)),
    Case("all_to_all", (12, 17), HALF),
    Case("sum_norm_", (1, 256)),
    Case("sum_norm_", (5, 100), HALF),
    Case("sum_norm_", (0, 64)),
    Case("sum_norm_", (6, 24), num_lanes=4),
    Case("sum_norm_", (10, 16000), HALF, num_lanes=1),  # more rows than a slot holds
    Case("gather", (21, 16384), HALF, num_lanes=2),
    Case("sum_norm_", (3, 72), HALF, num_parts=4),
    Case("sum_norm_", (1, 16384)),  # a row that is too long to be fused
    Case("sum", (1, 64)),
]


SCATTER_CASES = [
    Case("reduce_scatter", (12, 17)),
    Case("reduce_scatter", (9, 64), torch.int64),
    Case("reduce_scatter", (0, 64), HALF),
    Case("equal_scatter", (6, 301)),
    Case("sum", (3, 301)),  # lanes of both kernels take turns
    Case("equal_scatter", (12 * NUM_LANES, 200), HALF),  # a lane meets the others twice in a launch
    Case("equal_scatter", (6, 64)),
    Case("reduce_scatter_norm_", (6, 256)),
    Case("reduce_scatter_norm_", (6 * (NUM_LANES + 2), 24)),
    Case("sum_norm_", (5, 100), HALF),
    Case("reduce_scatter_norm_", (12, 72), HALF, num_parts=4),
    Case("reduce_scatter_norm_", (0, 64)),
    Case("reduce_scatter_norm_", (6, 5000)),  # no slot holds a row for each rank
    Case("equal_scatter", (6, 5)),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    thinned([(size, cases) for size in (2, 3) for cases in (CASES, SCATTER_CASES)], lambda i, *_: i in (1, 2)),
    ids=["2-reduce", "2-scatter", "3-reduce", "3-scatter"],
)
def test_every_operation_has_the_bits_of_the_specification(size: int, cases: list[Case]) -> None:
    found = run_processes(size, cases)
    for rank, values in found.items():
        assert len(values) == len(cases), values[-1]
        for case, value in zip(cases, values, strict=True):
            check(case, rank, size, [torch.from_numpy(each) for each in value])


def one_group(limit: int = 1000) -> Any:
    """Return the group of rank 0 of two; nobody is rank 1."""
    return local_group(0, new_blocks(2), limit)


def test_a_row_that_does_not_fit_into_registers_is_not_fused() -> None:
    weight = torch.ones(MAX_ROW_BYTES // 4)
    assert serves_norm(weight[None], weight, weight)
    assert not serves_norm(torch.ones(1, MAX_ROW_BYTES // 4 + 1), weight, weight)
    assert not serves_norm(weight[None], weight, weight.half())
    assert serves_norm(torch.ones(1, MAX_ROW_BYTES // 2, dtype=HALF), weight, weight.half())


def test_unlike_shapes_are_refused() -> None:
    blocks = one_group()._blocks
    hidden, weight = torch.ones(3, 64), torch.ones(64)
    for delta in (torch.ones(3, 32), torch.ones(3, 64, dtype=HALF), torch.ones(2, 3, 64, dtype=HALF), hidden.T):
        with pytest.raises(AssertionError):
            all_reduce_norm_(hidden, delta, weight, 1e-5, blocks)
    with pytest.raises(AssertionError):
        all_reduce(torch.ones(3, dtype=torch.int64), blocks)


def both(xs: tuple[Tensor, Tensor]) -> list[PeerBlocks]:
    """Return the blocks of two ranks after a meeting in which nobody waited."""
    memory = new_blocks(2)
    groups = [local_group(rank, memory, 0) for rank in range(2)]
    for group, x in zip(groups, xs, strict=True):
        group.sum(x)
    return [group._blocks for group in groups]


def test_not_a_number_is_the_largest() -> None:
    x, nan = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, 0.0])
    blocks = both((x, x))
    for each in blocks:
        each.control[CONTROL.has_failed] = 0
    all_max(nan, blocks[0])
    found = all_max(x, blocks[1])
    assert found.isnan().tolist() == [True, False] and found[1] == 2.0


def test_a_strided_residual_is_added_to_in_place() -> None:
    table, weight = torch.zeros(3, 80), torch.ones(64)
    delta = torch.arange(192.0).view(3, 64)
    expected = torch.zeros(3, 64)
    normed = all_reduce_norm_ref_(expected, [torch.zeros(3, 64), delta], weight, 1e-5)
    memory = new_blocks(2)
    first, second = (local_group(rank, memory, 0) for rank in range(2))
    first.sum_norm_(torch.zeros(3, 64), torch.zeros(3, 64), weight, 1e-5)
    actual = second.sum_norm_(table[:, :64], delta, weight, 1e-5)
    torch.testing.assert_close(actual, normed)
    assert torch.equal(table[:, :64], expected) and not table[:, 64:].any()


def test_a_slot_must_hold_a_row_for_each_rank_and_registers_one() -> None:
    def serves(hidden: torch.Tensor, weight: torch.Tensor, num_ranks: int = 2) -> bool:
        return serves_scatter(hidden, hidden, weight, 1e-5, Mock(size=num_ranks))

    weight = torch.ones(MAX_ROW_BYTES // 4)
    most = SLOT_BYTES // MAX_ROW_BYTES
    assert serves(weight[None], weight, most) and not serves(weight[None], weight, most + 1)
    assert not serves(torch.ones(1, MAX_ROW_BYTES // 4 + 1), torch.ones(MAX_ROW_BYTES // 4 + 1))
    assert not serves(weight[None], weight.half())
    assert not serves(torch.ones(8, 2).T, torch.ones(8)), "a row is contiguous"


def test_unlike_shapes_of_a_scatter_are_refused() -> None:
    blocks, hidden, weight = local_group(0, new_blocks(2), 1000)._blocks, torch.ones(3, 64), torch.ones(64)
    for delta in (torch.ones(3, 64), torch.ones(6, 32), torch.ones(6, 64, dtype=HALF), torch.ones(2, 6, 64).half()):
        with pytest.raises(AssertionError):
            reduce_scatter_norm_(hidden, delta, weight, 1e-5, blocks)
    for x in (torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 3)):
        with pytest.raises(AssertionError):
            reduce_scatter(x, blocks)

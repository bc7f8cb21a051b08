"""The Triton sums of which a rank keeps its own rows, against kernels/ranks/all_reduce.py, between processes that share
memory.

tests/gpu/test_cuda_group.py does the same between processes that share a GPU."""

from __future__ import annotations

import pytest
import torch
from peer_cases import Case, check, local_group, new_blocks, run_processes
from triton_device import IS_INTERPRETED

pytest.importorskip("triton")

from baton.kernels.ranks.all_reduce import MAX_ROW_BYTES, NUM_LANES, SLOT_BYTES
from baton.kernels.ranks.triton_reduce_scatter import reduce_scatter, reduce_scatter_norm_, serves_norm

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="tests/gpu/test_cuda_group.py tests them on a GPU")

HALF = torch.float16
CASES = [
    Case("reduce_scatter", (12, 17)),
    Case("reduce_scatter", (9, 64), torch.int64),
    Case("reduce_scatter", (0, 64), HALF),
    Case("equal_scatter", (6, 301)),
    Case("sum", (3, 301)),  # lanes of both files take turns
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


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_has_the_bits_of_the_specification(size: int) -> None:
    for rank, values in run_processes(size, CASES).items():
        assert len(values) == len(CASES), values[-1]
        for case, value in zip(CASES, values, strict=True):
            check(case, rank, size, [torch.from_numpy(each) for each in value])


def test_a_slot_must_hold_a_row_for_each_rank_and_registers_one() -> None:
    weight = torch.ones(MAX_ROW_BYTES // 4)
    most = SLOT_BYTES // MAX_ROW_BYTES
    assert serves_norm(weight[None], weight, most) and not serves_norm(weight[None], weight, most + 1)
    assert not serves_norm(torch.ones(1, MAX_ROW_BYTES // 4 + 1), torch.ones(MAX_ROW_BYTES // 4 + 1), 2)
    assert not serves_norm(weight[None], weight.half(), 2)
    assert not serves_norm(torch.ones(8, 2).T, torch.ones(8), 2), "a row is contiguous"


def test_unlike_shapes_are_refused() -> None:
    blocks, hidden, weight = local_group(0, new_blocks(2), 1000)._blocks, torch.ones(3, 64), torch.ones(64)
    for delta in (torch.ones(3, 64), torch.ones(6, 32), torch.ones(6, 64, dtype=HALF), torch.ones(2, 6, 64).half()):
        with pytest.raises(AssertionError):
            reduce_scatter_norm_(hidden, delta, weight, 1e-5, blocks)
    for x in (torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 3)):
        with pytest.raises(AssertionError):
            reduce_scatter(x, blocks)

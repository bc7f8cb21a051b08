"""The group of ranks on GPUs: which tensors go which way, and what happens when a rank is gone. Its operations are in
tests/kernels/ranks/test_triton_all_reduce.py and tests/gpu/test_cuda_group.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from peer_cases import local_group, new_blocks
from torch import Tensor
from triton_device import IS_INTERPRETED

pytest.importorskip("triton")

from baton.engine.ranks.cuda_group import CudaGroup
from baton.engine.ranks.group import OneRank
from baton.kernels.ranks.all_reduce import CONTROL

LOOKS = 1 << 40


def one_group(limit: int = 1000) -> CudaGroup:
    """Return the group of rank 0 of two; nobody is rank 1."""
    return local_group(0, new_blocks(2), limit)


@pytest.mark.timing
@pytest.mark.skipif(not IS_INTERPRETED, reason="tests/gpu/test_cuda_group.py loses a rank on a GPU")
def test_a_rank_that_does_not_come_ends_the_wait_and_no_later_one_waits() -> None:
    group = one_group()
    group.check()
    group.sum(torch.ones(5))
    with pytest.raises(RuntimeError, match="rank 0 waited too long"):
        group.check()
    group._blocks.control[CONTROL.limit] = LOOKS
    started = time.monotonic()
    for _ in range(3):
        group.sum(torch.ones(5))
    assert time.monotonic() - started < 5
    with pytest.raises(RuntimeError, match="waited too long"):
        group.check()


@pytest.mark.skipif(not IS_INTERPRETED, reason="tests/gpu/test_cuda_group.py loses a rank on a GPU")
def test_the_host_ends_a_wait() -> None:
    group = one_group(LOOKS)
    group.abandon()
    group.max(torch.ones(5))
    with pytest.raises(RuntimeError, match="waited too long"):
        group.check()


class Host(OneRank):
    """Says which operations were asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sum(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return x

    def max(self, x: Tensor) -> Tensor:
        self.calls.append("max")
        return x

    def gather(self, x: Tensor, lens: object) -> Tensor:
        self.calls.append("gather")
        return x

    def reduce_scatter(self, x: Tensor, lens: object) -> Tensor:
        self.calls.append("reduce_scatter")
        return x

    def limit(self, timeout_s: float) -> None:
        self.calls.append(f"limit {timeout_s}")

    def abandon(self) -> None:
        self.calls.append("abandon")

    def close(self) -> None:
        self.calls.append("close")


def test_numbers_of_the_host_go_another_way() -> None:
    host, memory = Host(), one_group()._memory
    group: Any = CudaGroup(host, memory)
    group._device = torch.device("meta")
    x = torch.ones(2, 3)
    for call in (group.sum, group.max, lambda x: group.gather(x, [2]), lambda x: group.all_to_all(x, [[2]])):
        assert torch.equal(call(x), x)
    assert torch.equal(group.reduce_scatter(x, [2]), x)
    assert host.calls == ["sum", "max", "gather", "gather", "reduce_scatter"]


def test_kernels_and_the_host_wait_as_long() -> None:
    host, memory = Host(), one_group()._memory
    CudaGroup(host, memory).limit(2.5)
    assert host.calls == ["limit 2.5"] and memory.blocks.control[CONTROL.limit] == 2_500_000_000


def test_the_end_of_the_group_is_that_of_its_memory_and_its_host() -> None:
    host, memory = Host(), one_group()._memory
    group = CudaGroup(host, memory)
    group.abandon()
    group.close()
    assert host.calls == ["abandon", "close"] and memory.blocks.control[CONTROL.has_failed] == 1

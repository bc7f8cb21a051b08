"""Collective operations over ranks on GPUs of one host, by kernels that read each other's memory
(kernels/ranks/all_reduce.py). A CUDA graph can hold them.

Numbers of the host (tensors on the CPU) go another way, which needs no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.products.norm import add_rms_norm_
from ...kernels.ranks.all_reduce import (
    CONTROL,
    PeerBlocks,
    all_gather,
    all_gather_columns,
    all_max,
    all_reduce,
    all_reduce_norm_,
    reduce_scatter,
    reduce_scatter_norm_,
    whole,
)
from .group import Group


class Blocks(Protocol):
    """The memory of the ranks (mapped_blocks.py)."""

    blocks: PeerBlocks

    def close(self) -> None: ...


class CudaGroup:
    """The group of several processes of one host with a GPU each, or with one GPU in turn.

    An operation on the GPU raises nothing: it is under way when the method returns. If another rank is gone or too
    late, it ends with wrong values, and `check` raises."""

    def __init__(self, host: Group, memory: Blocks) -> None:
        """`host` has the same ranks, for tensors that are not on the device of `memory`. The group closes both."""
        self.rank, self.size = host.rank, host.size
        self._host, self._memory, self._blocks = host, memory, memory.blocks
        self._device = memory.blocks.own.device

    def sum(self, x: Tensor) -> Tensor:
        if not self._is_here(x):
            return self._host.sum(x)
        if not x.is_floating_point():
            return self._all(x).sum(0, dtype=x.dtype)
        return all_reduce(x, self._blocks)

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return all_reduce_norm_(hidden, delta, weight, eps, self._blocks)

    def max(self, x: Tensor) -> Tensor:
        if not self._is_here(x):
            return self._host.max(x)
        return all_max(x, self._blocks)

    def gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        if not self._is_here(x):
            return self._host.gather(x, lens)
        assert len(x) == lens[self.rank], (x.shape, lens, self.rank)
        if len(set(lens)) == 1:
            return self._all(x).flatten(0, 1)
        padded = x.new_zeros(max(lens), *x.shape[1:])  # lanes of all ranks meet equally often
        padded[: len(x)] = x
        return torch.cat([rows[:num_rows] for rows, num_rows in zip(self._all(padded), lens, strict=True)])

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        if not self._is_here(x):
            return self._host.gather_columns(x, num_columns)
        return all_gather_columns(x, num_columns, self._blocks)

    def exchange_columns(self, x: Tensor, lens: Sequence[int], num_columns: int) -> Tensor:
        first = sum(lens[: self.rank])
        return self.gather_columns(x, num_columns)[first : first + lens[self.rank]]

    def reduce_scatter(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        assert len(x) == sum(lens), (x.shape, lens)
        if not self._is_here(x):
            return self._host.reduce_scatter(x, lens)
        if not x.is_floating_point():
            return self.sum(x).split(list(lens))[self.rank].clone()
        if len(set(lens)) == 1:
            return reduce_scatter(x.unflatten(0, (self.size, lens[0])), self._blocks)
        padded = x.new_zeros(self.size, max(lens), *x.shape[1:])  # lanes of all ranks meet equally often
        for rows, own in zip(padded, x.split(list(lens)), strict=True):
            rows[: len(own)] = own
        return reduce_scatter(padded, self._blocks)[: lens[self.rank]]

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        if len(set(lens)) == 1:
            return reduce_scatter_norm_(hidden, delta, weight, eps, self._blocks)
        return add_rms_norm_(hidden, self.reduce_scatter(whole(delta, hidden.dtype), lens), weight, eps)

    def all_to_all(self, x: Tensor, lens: Sequence[Sequence[int]]) -> Tensor:
        rows = self.gather(x, [sum(each) for each in lens]).split(list(itertools.chain.from_iterable(lens)))
        return torch.cat(rows[self.rank :: self.size])

    def check(self) -> None:
        if self._blocks.control[CONTROL.has_failed]:
            raise RuntimeError(f"rank {self.rank} waited too long for another rank in a sum on its GPU")

    def limit(self, timeout_s: float) -> None:
        self._blocks.control[CONTROL.limit] = int(timeout_s * 1e9)
        self._host.limit(timeout_s)

    def abandon(self) -> None:
        self._blocks.control[CONTROL.has_failed] = 1
        self._host.abandon()

    def close(self) -> None:
        self._memory.close()
        self._host.close()

    def _is_here(self, x: Tensor) -> bool:
        return x.device == self._device

    def _all(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`: [num_ranks, ...]."""
        return all_gather(x, self._blocks)

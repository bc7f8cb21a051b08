"""Collective operations over the ranks of a node.

A rank is a process with a device of its own. All ranks call the same operations in the same order, ranks without rows
too: their tensors have zero rows and the usual width. `OneRank` is the group of a node with one process; every
operation returns its input. The group of ranks on GPUs is in cuda_group.py.

Rows of unlike counts are passed with `lens`, the number of rows of every rank. The ranks agree on these counts before
each forward (steps.py).
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from ...kernels.products.linear import sum_parts
from ...kernels.products.norm import add_rms_norm_

_LOOPBACK = "lo"
TIMEOUT_S = 60.0  # an operation that waits longer for another rank raises RuntimeError
START_TIMEOUT_S = 300.0  # likewise before service: a rank loads, compiles, or waits for another node that measures


class Group(Protocol):
    """Collective operations. Every method raises RuntimeError if another rank is gone or too late; on a GPU only
    `check` does."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, of one shape, in the order of the ranks: bit for bit the same on each."""
        ...

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' `delta` to `hidden` [num_rows, size] in place. Return the RMS norm of the result, a
        new tensor [num_rows, size], by `weight` [size].

        `delta` is contiguous: [num_rows, size] of hidden's dtype, or float32 summands of it [num_parts, num_rows,
        size]."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' values of `x`, of one shape, element by element."""
        ...

    def gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, end to end in the order of the ranks: [lens[rank], ...] -> [sum(lens), ...]."""
        ...

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """Return the columns of all ranks side by side, in the order of the ranks, up to `num_columns` of them:
        [num_rows, width] on each rank -> [num_rows, num_columns]."""
        ...

    def exchange_columns(self, x: Tensor, lens: Sequence[int], num_columns: int) -> Tensor:
        """Return this rank's rows of what `gather_columns` returns: [sum(lens), width] on each rank -> [lens[rank],
        num_columns]. The rows of a rank follow those of the ranks before it."""
        ...

    def reduce_scatter(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum of all ranks' `x`: [sum(lens), ...] -> [lens[rank], ...]."""
        ...

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        """Add this rank's rows of the sum of all ranks' `delta` to `hidden` [lens[rank], size] in place. Return the RMS
        norm of the result, as `sum_norm_`.

        `delta` is contiguous: [sum(lens), size], or float32 summands of it [num_parts, sum(lens), size]."""
        ...

    def all_to_all(self, x: Tensor, lens: Sequence[Sequence[int]]) -> Tensor:
        """Exchange rows. `lens[i][j]` rows go from rank i to rank j: [sum(lens[rank]), ...], in the order of their
        receivers -> [sum of lens[i][rank] over i, ...], in the order of their senders."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if an operation whose results are there has failed on this rank. A host that waits for
        results on a GPU must call it before it uses them."""
        ...

    def limit(self, timeout_s: float) -> None:
        """From now on, let an operation of this rank wait at most `timeout_s` for another rank."""
        ...

    def abandon(self) -> None:
        """Let no operation on this rank's GPU wait any more: another rank is gone. Any thread may call it."""
        ...

    def close(self) -> None:
        """Leave the group. It must not be used afterwards."""
        ...


class OneProcess:
    """Methods of a group whose ranks are all in one process. They do nothing, for no rank can be gone or late."""

    def check(self) -> None:
        pass

    def limit(self, timeout_s: float) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class OneRank(OneProcess):
    """The group of a node with one process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm_(hidden, delta, weight, eps)

    def max(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        _check_rows(x, lens[0])
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return x if x.shape[1] == num_columns else x[:, :num_columns].contiguous()

    def exchange_columns(self, x: Tensor, lens: Sequence[int], num_columns: int) -> Tensor:
        _check_rows(x, lens[0])
        return self.gather_columns(x, num_columns)

    def reduce_scatter(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        _check_rows(x, lens[0])
        return x

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        _check_rows(hidden, lens[0])
        return add_rms_norm_(hidden, delta, weight, eps)

    def all_to_all(self, x: Tensor, lens: Sequence[Sequence[int]]) -> Tensor:
        _check_rows(x, lens[0][0])
        return x


class CpuGroup:
    """The group of several processes of one host without GPUs, by torch.distributed with gloo.

    It shows that ranks compute the right numbers; it is not fast. Sockets of gloo trust whoever connects, so they bind
    loopback alone.
    """

    def __init__(self, rank: int, size: int, meeting: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the other ranks at `meeting`, a path that names no file yet and that only this user can reach. Wait for
        all of them. Raises RuntimeError after `timeout_s`. A process can be in one group at a time."""
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting.absolute()}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def sum(self, x: Tensor) -> Tensor:
        first, *others = self._all(x)
        for other in others:
            first += other
        return first

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        own = delta if delta.ndim == 2 else sum_parts(delta, hidden.dtype)
        return add_rms_norm_(hidden, self.sum(own), weight, eps)

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).amax(0)

    def gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        _check_rows(x, lens[self.rank])
        padded = x.new_zeros(max(lens), *x.shape[1:])  # gloo gathers equal shapes only
        padded[: len(x)] = x
        return torch.cat([rows[:num_rows] for rows, num_rows in zip(self._all(padded), lens, strict=True)])

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return torch.cat(self._all(x), 1)[:, :num_columns].contiguous()

    def exchange_columns(self, x: Tensor, lens: Sequence[int], num_columns: int) -> Tensor:
        num_rows, width = lens[self.rank], x.shape[1]
        rows = self.all_to_all(x, [lens] * self.size).view(self.size, num_rows, width).transpose(0, 1)
        return rows.reshape(num_rows, self.size * width)[:, :num_columns].contiguous()

    def reduce_scatter(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        _check_rows(x, sum(lens))
        return self.sum(x).split(list(lens))[self.rank].clone()

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        own = delta if delta.ndim == 2 else sum_parts(delta, hidden.dtype)
        return add_rms_norm_(hidden, self.reduce_scatter(own, lens), weight, eps)

    def all_to_all(self, x: Tensor, lens: Sequence[Sequence[int]]) -> Tensor:
        _check_rows(x, sum(lens[self.rank]))
        rows = self.gather(x, [sum(each) for each in lens]).split(list(itertools.chain.from_iterable(lens)))
        return torch.cat(rows[self.rank :: self.size])

    def check(self) -> None:
        """Do nothing: operations raise errors themselves."""

    def limit(self, timeout_s: float) -> None:
        _set_pg_timeout(datetime.timedelta(seconds=timeout_s))

    def abandon(self) -> None:
        """Do nothing: gloo sees that a process has ended."""

    def close(self) -> None:
        dist.destroy_process_group()

    def _all(self, x: Tensor) -> list[Tensor]:
        """Return copies of all ranks' `x`."""
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        if x.numel():  # all ranks' `x` have one shape, so all of them are empty, or none
            dist.all_gather(copies, x.contiguous())
        return copies


def _check_rows(x: Tensor, num_rows: int) -> None:
    assert len(x) == num_rows, (x.shape, num_rows)

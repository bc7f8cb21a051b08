"""A rank group in one process: every rank is a thread with an engine of its own, whose collective operations are noted.

    ranks = ThreadRanks(2, config)
    ranks.do({0: lambda: ranks.prompts[0].submit(chunk)})      # rank 1 joins the step without work
    assert ranks.group.traces[1] == ranks.group.traces[0]

A rank that raises an error, or that joins no operation while another waits for it, ends the whole group.
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, use_threads
from baton.engine.products.ranked import RankRows
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.board import Board
from baton.engine.ranks.group import OneProcess
from baton.engine.ranks.ranks import Ranks
from baton.engine.ranks.steps import NUM_VALUES, GroupSteps
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.kernels.products.linear import sum_parts
from baton.kernels.products.norm import add_rms_norm_

TIMEOUT_S = 120.0  # of a rank that hangs, on a machine that is busy


class Operation(NamedTuple):
    """One collective operation as a rank called it."""

    name: str
    width: tuple[int, ...]
    dtype: torch.dtype
    lens: tuple[int, ...]


def in_threads(functions: Sequence[Callable[[], object]]) -> None:
    """Call each function in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ThreadGroup:
    """Carries the operations of all ranks of one process. `of(rank)` is the `Group` of a rank."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.traces: list[list[Operation]] = [[] for _ in range(size)]
        self.turn = threading.Lock()  # held by the rank that runs
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._given: dict[int, dict[int, tuple[Operation, Tensor]]] = defaultdict(dict)
        self._num_done = [0] * size

    def of(self, rank: int) -> _ThreadRank:
        return _ThreadRank(self, rank)

    def exchange(self, rank: int, operation: Operation, x: Tensor) -> list[Tensor]:
        """Return all ranks' `x`. Raises RuntimeError if a rank does not come, AssertionError if it does another
        operation."""
        number = self._num_done[rank]
        self._num_done[rank] += 1
        self.traces[rank].append(operation)
        self._given[number][rank] = operation, x
        self.turn.release()
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(f"rank {rank} waited in {operation.name} for a rank that did not come") from None
        finally:
            self.turn.acquire()
        given = [self._given[number][each] for each in range(self.size)]
        assert len({each for each, _ in given}) == 1, f"ranks do unlike operations: {[each for each, _ in given]}"
        return [each for _, each in given]

    def end(self) -> None:
        """Let no rank wait any more."""
        self._barrier.abort()


class _ThreadRank(OneProcess):
    """The `Group` of one rank."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size = rank, group.size
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        total, *others = (each.clone() for each in self._all("sum", x, x.shape, ()))
        for other in others:
            total += other
        return total

    def sum_norm_(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm_(hidden, self.sum(delta), weight, eps)

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all("max", x, x.shape, ())).amax(0)

    def gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        assert len(x) == lens[self.rank], (x.shape, lens, self.rank)
        return torch.cat(self._all("gather", x, x.shape[1:], lens))

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return torch.cat(self._all("gather_columns", x, x.shape, ()), 1)[:, :num_columns].contiguous()

    def exchange_columns(self, x: Tensor, lens: Sequence[int], num_columns: int) -> Tensor:
        return self.gather_columns(x, num_columns).split(list(lens))[self.rank].clone()

    def reduce_scatter(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        assert len(x) == sum(lens), (x.shape, lens)
        total, *others = (each.clone() for each in self._all("reduce_scatter", x, x.shape[1:], lens))
        for other in others:
            total += other
        return total.split(list(lens))[self.rank].clone()

    def reduce_scatter_norm_(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, lens: Sequence[int]
    ) -> Tensor:
        own = delta if delta.ndim == 2 else sum_parts(delta, hidden.dtype)
        return add_rms_norm_(hidden, self.reduce_scatter(own, lens), weight, eps)

    def all_to_all(self, x: Tensor, lens: Sequence[Sequence[int]]) -> Tensor:
        rows = self.gather(x, [sum(each) for each in lens]).split(list(itertools.chain.from_iterable(lens)))
        return torch.cat(rows[self.rank :: self.size])

    def _all(self, name: str, x: Tensor, width: Sequence[int], lens: Sequence[int]) -> list[Tensor]:
        return self._group.exchange(self.rank, Operation(name, tuple(width), x.dtype, tuple(lens)), x)


class ThreadBoard(Board):
    """A board whose rank gives up the turn while it waits."""

    def __init__(self, group: ThreadGroup, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._group = group

    def wait(self) -> list[tuple[int, ...]]:
        self._group.turn.release()
        try:
            return super().wait()
        finally:
            self._group.turn.acquire()


class ThreadRanks:
    """Owns the engines, executors and threads of all ranks. Context manager: leaving it ends them.

    The thread of a rank does what `do` asks for. Otherwise it joins the steps of other ranks."""

    def __init__(
        self,
        size: int,
        config: EngineConfig,
        *,
        num_slots: int = 8,
        buckets: Sequence[int] = (),
        timeout_s: float = TIMEOUT_S,
        leads: bool = False,
    ) -> None:
        """`leads`: rank 0 is the calling thread, which has the turn from now on unless it waits."""
        use_threads(config)
        self.size, self.num_slots = size, num_slots
        self.group = ThreadGroup(size, timeout_s)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.steps: list[GroupSteps] = []
        self._shared: list[Ranks] = []
        for rank in range(size):
            rows = RankRows()
            board = ThreadBoard(self.group, Path(self._folder.name), rank, size, NUM_VALUES, timeout_s=timeout_s + 5.0)
            self.steps.append(GroupSteps(board, rows, "group", "epoch"))
            self._shared.append(Ranks(self.group.of(rank), rows, self.steps[-1]))
        self.engines = self._load(config)
        self.prompts = [Prompts(engine) for engine in self.engines]
        self.executors = [DeviceExecutor(engine, num_slots, buckets) for engine in self.engines if num_slots]
        self._posting = threading.Lock()
        self._todo: list[queue.SimpleQueue[Callable[[], Any]]] = [queue.SimpleQueue() for _ in range(size)]
        self._done: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._errors: list[BaseException] = []
        self._is_over = False
        self._leads = leads
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(leads, size)]
        for thread in self._threads:
            thread.start()
        if leads:
            self.group.turn.acquire()

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over = True
        if self._leads:
            self.group.turn.release()
        for thread in self._threads:
            thread.join()
        for steps in self.steps:
            steps.board.close()
        self._folder.cleanup()

    def do(self, works: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Call works[rank] in the thread of each of these ranks, at the same time. Return the results. Raises the
        first error of any rank."""
        with self._posting:
            for rank, work in works.items():
                self._todo[rank].put(work)
        found = {rank: self._done[rank].get() for rank in works}
        if self._errors:
            raise self._errors[0]
        return found

    def _load(self, config: EngineConfig) -> list[Engine]:
        """Load the engines of all ranks, which agree on the size of their pools."""
        engines: list[Engine | None] = [None] * self.size

        def load(rank: int) -> None:
            with self.group.turn:
                engines[rank] = Engine(config, ranks=self._shared[rank])

        threads = [threading.Thread(target=load, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return cast(list[Engine], engines)

    def _run(self, rank: int) -> None:
        steps, todo, done = self.steps[rank], self._todo[rank], self._done[rank]
        while not self._is_over:
            with self._posting:  # a rank that has work does not join before it has begun
                is_called = todo.empty() and steps.board.is_called and not self._errors
            if not is_called and todo.empty():
                time.sleep(1e-4)
                continue
            found = None
            with self.group.turn:
                try:
                    found = steps.join() if is_called else todo.get()()
                except BaseException as error:
                    self._errors.append(error)
                    self.group.end()
                    steps.board.end()
            if not is_called:
                done.put(found)

"""Ranks of a node as threads of one process, for tests of what ranks do together. One rank runs at a time.

with ThreadRanks(2, config, num_slots=8) as ranks:
    executor = OwnWorkExecutor(ranks)        # rank 0 is the calling thread
    executor.run([work, None])
    assert ranks.group.traces[1] == ranks.group.traces[0]

A rank that raises an error, or that joins no operation while another waits for it, ends the whole group.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, use_threads
from baton.engine.products.ranked import RankRows
from baton.engine.ranks.group import OneProcess
from baton.engine.ranks.own_work_executor import OwnWorkExecutor
from baton.engine.ranks.ranked_engine import RankedEngine
from baton.engine.ranks.ranks import Ranks
from baton.engine.ranks.worker import RankWorker, serve_rank
from baton.kernels.products.linear import sum_parts
from baton.kernels.products.norm import add_rms_norm_

TIMEOUT_S = 20.0


class Operation(NamedTuple):
    """One collective operation as a rank called it."""

    name: str
    width: tuple[int, ...]
    dtype: torch.dtype
    lens: tuple[int, ...]


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


class _Pipe:
    """Both ends of the pipe of one rank. The rank has the turn between a frame and the next."""

    def __init__(self, turn: threading.Lock) -> None:
        self.frames: queue.Queue[bytes | None] = queue.Queue()
        self.reports: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        self._turn, self._has_turn = turn, False

    def poll(self, timeout: float, /) -> bool:
        return not self.frames.empty()

    def recv_bytes(self) -> bytes:
        self.leave()
        frame = self.frames.get()
        if frame is None:
            raise EOFError
        self._turn.acquire()
        self._has_turn = True
        return frame

    def send_bytes(self, buf: bytes, /) -> None:
        self.reports.put(buf)

    def leave(self) -> None:
        if self._has_turn:
            self._turn.release()
            self.frames.task_done()
        self._has_turn = False


class _Processes:
    """The part of `RankProcesses` that an executor uses."""

    def __init__(self, group: ThreadGroup, pipes: Sequence[_Pipe]) -> None:
        self._group, self._pipes = group, pipes

    def send(self, rank: int, frame: bytes) -> None:
        self._pipes[rank].frames.put(frame)

    def report(self, rank: int) -> bytes:
        report = self._pipes[rank].reports.get(timeout=TIMEOUT_S)
        if isinstance(report, BaseException):
            raise report
        return report[1:]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let rank 0 run. The error of another rank comes first: it explains that of rank 0."""
        with self._group.turn:
            try:
                yield
            except BaseException:
                self._group.end()
                for pipe in self._pipes:
                    while not pipe.reports.empty():
                        report = pipe.reports.get()
                        if isinstance(report, BaseException):
                            raise report from None
                raise


class ThreadRanks:
    """Owns the engines, workers and threads of all ranks. Context manager: leaving it ends them.

    It has what `OwnWorkExecutor` uses of a `RankedEngine`."""

    def __init__(
        self,
        size: int,
        config: EngineConfig,
        *,
        num_slots: int = 8,
        buckets: Sequence[int] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        use_threads(config)
        self.size, self.num_slots = size, num_slots
        self.group = ThreadGroup(size, timeout_s)
        rows = [RankRows() for _ in range(size)]
        self._shared = [Ranks(self.group.of(rank), rows[rank]) for rank in range(size)]
        self.ranks = self._shared[0]
        self.engines = self._load(config)
        self.engine = self.engines[0]
        self._pipes = [_Pipe(self.group.turn) for _ in range(size)]
        self.processes = _Processes(self.group, self._pipes)
        self.executor = OwnWorkExecutor(cast(RankedEngine, self), buckets)
        self.workers = [self.executor.own]
        self.workers += [RankWorker(self.engines[rank], num_slots, rows[rank], buckets) for rank in range(1, size)]
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(1, size)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.frames.put(None)
        for thread in self._threads:
            thread.join()

    def settle(self) -> None:
        """Wait until the other ranks have done all their works."""
        for pipe in self._pipes:
            pipe.frames.join()

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
        pipe = self._pipes[rank]
        try:
            serve_rank(pipe, self.workers[rank])
        except EOFError:
            pass
        except BaseException as error:
            pipe.reports.put(error)
            self.group.end()
            pipe.leave()
            while pipe.frames.get() is not None:
                pipe.frames.task_done()

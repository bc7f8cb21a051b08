"""The part of one rank in works that all ranks do together, if every rank has sequences of its own.

    rank 0 --frame: (lens, work)--> serve_rank --> RankWorker --> DeviceExecutor, Prompts
       ^                                                |
       '------------------- report ---------------------'

A rank reports the tokens of a round when the device has them, and takes further work meanwhile. It reports the results
of a chunk before it goes on. After computed tokens that are not scored, and after a warm-up, it says that it is done,
with an empty report. So rank 0 may hand the pages of these tokens over as soon as it goes on. A rank says nothing of
other work: catching up comes right before a round, and the rest writes no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from ..engine import Engine
from ..products.ranked import RankRows
from ..progress import Progress
from ..prompts.prompts import Prompts
from ..rounds.device_executor import DeviceExecutor
from ..work import CatchUp, Chunk, ChunkReport, Forget, LoadSlot, Recompute, Round, RoundTokens, WarmUp
from .agreement import OwnWork
from .processes import REPORT
from .work_frames import Report, decode, encode

_PAUSE_S = 5e-5  # while a round is under way: a wait for the next work, then a look at the round
_MESSAGES = msgspec.msgpack.Decoder(tuple[tuple[int, ...], bytes])


class Pipe(Protocol):
    """The end of a pipe that a rank has, as a `Connection` of multiprocessing."""

    def poll(self, timeout: float, /) -> bool: ...

    def recv_bytes(self) -> bytes: ...

    def send_bytes(self, buf: bytes, /) -> None: ...


class RankWorker:
    """Does the works of one rank, in order. Owns the rank's slots and what is kept of its prompts."""

    def __init__(self, engine: Engine, num_slots: int, rows: RankRows, buckets: Sequence[int] = ()) -> None:
        """`rows`: the number of rows of every rank, which the products of `engine` read. `num_slots`: 0 on a node that
        runs no rounds."""
        self.executor = DeviceExecutor(engine, num_slots, buckets)
        self._prompts = Prompts(engine)
        self._rows = rows
        self._num_under_way = 0

    def warm_up(self, work: WarmUp, progress: Progress | None = None) -> None:
        """Capture, on CUDA, the graphs of the node's kinds of work. All ranks do it at once. `progress` counts them."""
        if self.executor.num_slots:
            self.executor.warm_up(progress, expects_prompts=work.expects_prompts)
        else:
            self._prompts.warm_up(progress)

    @property
    def is_under_way(self) -> bool:
        """Whether a round was begun and not collected."""
        return self._num_under_way > 0

    def collect(self) -> RoundTokens:
        """Wait for the oldest round that was not collected, and return its report."""
        self._num_under_way -= 1
        return self.executor.collect()

    def do(self, lens: tuple[int, ...], work: OwnWork) -> Report | None:
        """Do a work, and wait for its report if it has one. Of a Round, which `collect` reports, and of work on slots
        nothing is waited for. `lens`: rows of every rank in the target's forward."""
        self._rows.lens = lens
        match work:
            case Chunk():
                submitted = self._prompts.submit(work)
                submitted.draft()
                first_tokens = [each.first_tokens() for each in submitted.tails]
                return ChunkReport(submitted.wait(), first_tokens, [each.wait_rows() for each in submitted.tails])
            case Forget():
                self._prompts.forget(work.key)
                return None
            case Round():
                self.executor.submit(work)
                self._num_under_way += 1
            case Recompute():
                self.executor.submit(work)
                report = self.executor.collect_scores() if work.is_scored else None
                self.executor.wait_chunks()
                return report
            case CatchUp() | LoadSlot():
                self.executor.submit(work)
            case WarmUp():
                self.warm_up(work)
        return None


def is_awaited(work: OwnWork | None) -> bool:
    """Return whether rank 0 waits until a rank has done this work."""
    return isinstance(work, Round | Chunk | Recompute | WarmUp)


def message(lens: tuple[int, ...], work: OwnWork) -> bytes:
    """Return the frame of a work to another rank."""
    return msgspec.msgpack.encode((lens, encode(work)))


def serve_rank(pipe: Pipe, worker: RankWorker) -> NoReturn:
    """Do works and send reports, in the order of the works, until the pipe is closed (EOFError)."""
    while True:
        while worker.is_under_way and not pipe.poll(0.0 if worker.executor.is_done else _PAUSE_S):
            if worker.executor.is_done:
                _report(pipe, worker.collect())
        lens, frame = _MESSAGES.decode(pipe.recv_bytes())
        work: OwnWork = decode(frame)
        while worker.is_under_way and is_awaited(work) and not isinstance(work, Round):
            _report(pipe, worker.collect())
        report = worker.do(lens, work)
        if report is not None or (is_awaited(work) and not isinstance(work, Round)):
            _report(pipe, report)


def _report(pipe: Pipe, report: Report | None) -> None:
    pipe.send_bytes(REPORT + (b"" if report is None else encode(report)))

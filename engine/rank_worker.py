"""The part of one rank in works that all ranks do together, if every rank has sequences of its own.

    rank 0 --frame: (lens, work)--> serve_rank --> RankWorker --> DeviceExecutor, Prompts
       ^                                                |
       '------------------- report ---------------------'

A rank reports the tokens of a round and the results of a chunk. After computed tokens that are not scored, and after a
warm-up, it says that it is done, with an empty report. So no rank writes pages when rank 0 goes on: rank 0 may hand
these pages over, or fill them anew. A rank says nothing of other work: catching up comes right before a round, and the
rest writes no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from .agreement import OwnWork
from .device_executor import DeviceExecutor
from .engine import Engine
from .products.ranked import RankRows
from .progress import Progress
from .prompts import Prompts
from .rank_processes import REPORT
from .work import CatchUp, Chunk, ChunkReport, Forget, LoadSlot, Recompute, Round, WarmUp
from .work_frames import Report, decode, encode

_MESSAGES = msgspec.msgpack.Decoder(tuple[tuple[int, ...], bytes])


class Pipe(Protocol):
    """The end of a pipe that a rank has, as a `Connection` of multiprocessing."""

    def recv_bytes(self) -> bytes: ...

    def send_bytes(self, buf: bytes, /) -> None: ...


class RankWorker:
    """Does the works of one rank, one at a time. Owns the rank's slots and what is kept of its prompts."""

    def __init__(self, engine: Engine, num_slots: int, rows: RankRows, buckets: Sequence[int] = ()) -> None:
        """`rows`: the number of rows of every rank, which the products of `engine` read. `num_slots`: 0 on a node that
        runs no rounds."""
        self.executor = DeviceExecutor(engine, num_slots, buckets)
        self._prompts = Prompts(engine)
        self._rows = rows

    def warm_up(self, work: WarmUp, progress: Progress | None = None) -> None:
        """Capture, on CUDA, the graphs of the node's kinds of work. All ranks do it at once. `progress` counts them."""
        if self.executor.num_slots:
            self.executor.warm_up(progress, expects_prompts=work.expects_prompts)
        else:
            self._prompts.warm_up(progress)

    def do(self, lens: tuple[int, ...], work: OwnWork) -> Report | None:
        """Do a work, and wait for its report if it has one. `lens`: rows of every rank in the target's forward."""
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
                return self.executor.collect()
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
    """Do works and send reports, until the pipe is closed (EOFError)."""
    while True:
        lens, frame = _MESSAGES.decode(pipe.recv_bytes())
        work: OwnWork = decode(frame)
        report = worker.do(lens, work)
        if is_awaited(work):
            pipe.send_bytes(REPORT + (b"" if report is None else encode(report)))

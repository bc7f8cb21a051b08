"""The processes of ranks 1 and above of a node, and the pipes to them. Rank 0 is this process.

    rank 0 --frame--> rank i        work (work_frames.py), in the order of submission
    rank i --frame--> rank 0        ARRIVED and READY once, reports that rank 0 asked for, or the error by which the
                                    rank ended
    rank i --report-> rank 0        of handoffs, at any time (handoff_line.py)
    rank i --beat---> rank 0        while the process runs (ranks/watch.py)

A rank ends when its pipe is closed, and the kernel kills it when this process ends, so none outlives it. Signals of the
terminal or of a service manager do not end it: rank 0 decides when ranks leave. A rank that died or hangs ends all
others: their pools no longer hold the same state.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from ...metadata import service_manager
from ...metadata.errors import BatonError, RankLost
from ...metadata.logs import error_in_words
from ...metadata.parent import die_with
from .group import START_TIMEOUT_S
from .handoff_line import HandoffLine
from .watch import RankWatch, beat
from .work_frames import encode

ARRIVED, READY, REPORT, ERROR = b"@", b"+", b"=", b"-"
_LEAVE_S = 5.0  # for a rank that was told to leave
_EXIT_S = 1.0  # between the end of a rank's pipe and the end of its process


class RankProcesses:
    """Owns the processes and pipes of ranks 1 to size - 1. Context manager: leaving it ends all of them."""

    def __init__(
        self,
        size: int,
        run: Callable[..., None],
        *args: Any,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start `run(connection, reports, rank, *args)` in a new process for each rank; `reports` is its end of the
        pipe for reports of handoffs. `run` and `args` must be importable and picklable by the spawn of multiprocessing.
        A report that rank 0 waits for longer than `timeout_s` raises, or before `watch` longer than
        `start_timeout_s`."""
        self.size = size
        self._timeout_s, self._service_timeout_s = start_timeout_s, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._reports: list[Connection] = []  # of handoffs: ends of the pipes from ranks 1 and above, in order
        self._said: dict[int, str] = {}  # the errors that ranks sent, or why the watch killed them
        self._why: str | None = None  # all ranks were ended
        self._on_loss: list[Callable[[], None]] = []
        self._on_watch: Callable[[], None] | None = None
        beats: list[Connection] = []
        # if nobody calls `stop`, since an exit of multiprocessing would wait for the ranks
        atexit.register(self._kill)
        try:
            for rank in range(1, size):
                beats.append(self._start(run, rank, args))
        except BaseException:  # a signal ends the start
            self._kill()
            raise
        self.handoff_line = HandoffLine(lambda rank, order: self.send(rank, encode(order)), self._reports, self.end)
        self._watch = RankWatch(beats, self._kill_silent, self._lose)

    def _start(self, run: Callable[..., None], rank: int, args: tuple[Any, ...]) -> Connection:
        """Start the process of a rank. Return the pipe from which its beats come."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = cast(tuple[Connection, Connection], context.Pipe())
        reports, reporter = cast(tuple[Connection, Connection], context.Pipe(duplex=False))
        hears, says = cast(tuple[Connection, Connection], context.Pipe(duplex=False))
        target_args = (run, theirs, reporter, says, os.getpid(), rank, *args)
        process = context.Process(target=_run_rank, args=target_args, name=f"rank {rank}")
        process.daemon = True
        self._processes.append(process)
        process.start()
        for end in (theirs, reporter, says):  # so that its end is seen here
            end.close()
        self._pipes.append(ours)
        self._reports.append(reports)
        return hears

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of ranks 1 and above."""
        return [process.pid for process in self._processes]

    def wait_arrived(self) -> None:
        """Wait until every rank runs and is about to meet the others. Raises RankLost if one has ended: the group would
        wait for it until its timeout."""
        for rank in range(1, len(self._processes) + 1):
            self._receive(rank, ARRIVED)

    def wait_ready(self) -> None:
        """Wait until every rank has loaded its share. Raises RankLost if one cannot."""
        for rank in range(1, len(self._processes) + 1):
            self._receive(rank, READY)

    def watch(self) -> None:
        """From now on, end a rank that is silent, or that takes longer than a rank may in service. Before service it
        may do both: it loads, or compiles kernels."""
        self._timeout_s = self._service_timeout_s
        if self._on_watch is not None:
            self._on_watch()
        self._watch.start()

    def silences_s(self) -> tuple[float, ...]:
        """Return for how many seconds each of ranks 1 and above has been silent. Any thread may call it."""
        return self._watch.silences_s()

    def when_watched(self, do: Callable[[], None]) -> None:
        """Call `do` when `watch` is called."""
        self._on_watch = do

    def when_lost(self, do: Callable[[], None]) -> None:
        """Call `do` in the thread of the watch as soon as a rank has ended."""
        self._on_loss.append(do)

    def send(self, rank: int, frame: bytes) -> None:
        """Send work to a rank. Raises RankLost if it is gone."""
        try:
            self._pipes[rank - 1].send_bytes(frame)
        except OSError:
            raise self.end(f"rank {rank} is gone") from None

    def report(self, rank: int) -> bytes:
        """Wait for the next report of a rank. Raises RankLost if it is gone or hangs."""
        return self._receive(rank, REPORT)

    def check(self) -> None:
        """Raise RankLost if a rank has died. A node calls it when it is idle."""
        if any(process.exitcode is not None for process in self._processes):
            raise self.end("a rank has died")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Do this process's part of a work. An error that leaves the ranks with unlike states raises RankLost."""
        try:
            yield
        except RankLost:
            raise
        except (RuntimeError, BatonError) as error:
            raise self.end(f"rank 0 could not finish its work: {error}") from error

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Use what ranks have computed. An operation or a step that a rank did not join raises RankLost."""
        try:
            yield
        except (RuntimeError, RankLost) as error:
            raise self.end(f"rank 0 could not finish its work: {error}") from error

    def stop(self) -> None:
        """Tell all ranks to leave, and end those that do not."""
        atexit.unregister(self._kill)
        self._watch.close()
        self._close_pipes()
        for process in self._processes:
            process.join(_LEAVE_S)
        self._kill()

    def end(self, what: str) -> RankLost:
        """End all ranks at once. Return the error that says which ranks have ended before, or `what` if all ran. A
        later call returns the same error."""
        if self._why is not None:
            return RankLost(self._why)
        self._watch.close()
        ended = wait([process.sentinel for process in self._processes], _EXIT_S)
        for process in self._processes:
            if process.sentinel in ended:  # its exit code may come a moment later
                process.join(_EXIT_S)
        fates = [fate for rank in range(1, len(self._processes) + 1) if (fate := self._fate(rank))]
        self._kill()
        self._close_pipes()
        self._why = f"{'; '.join(fates) or what}; all ranks were ended, start the node again"
        return RankLost(self._why)

    def _receive(self, rank: int, kind: bytes) -> bytes:
        pipe, process = self._pipes[rank - 1], self._processes[rank - 1]
        if not wait([pipe, process.sentinel], self._timeout_s):
            raise self.end(f"rank {rank} did not answer within {self._timeout_s:g} s")
        frame = self._read(rank)
        if frame[:1] != kind:
            raise self.end(f"rank {rank} failed: {self._said.get(rank, 'it has left')}")
        return frame[1:]

    def _read(self, rank: int) -> bytes:
        """Return the next frame of a rank, without waiting: nothing if there is none."""
        pipe = self._pipes[rank - 1]
        try:
            frame = pipe.recv_bytes() if pipe.poll() else b""
        except (OSError, EOFError):
            return b""
        if frame[:1] == ERROR:
            self._said[rank] = frame[1:].decode(errors="replace")
        return frame

    def _fate(self, rank: int) -> str | None:
        """Return how a rank has ended, with the error that it sent; None if it runs."""
        process = self._processes[rank - 1]
        if process.exitcode is None:
            return None
        while self._read(rank):  # reports that nobody asked for, then the error
            pass
        said = f": {self._said[rank]}" if rank in self._said else ""
        return f"rank {rank} (process {process.pid}) ended with exit code {process.exitcode}{said}"

    def _kill_silent(self, rank: int, what: str) -> None:
        """End a rank that the watch does not hear. This process may wait for it in an operation, which then fails."""
        process = self._processes[rank - 1]
        if process.exitcode is None:
            self._said[rank] = f"it {what}"
            process.kill()

    def _lose(self, rank: int) -> None:
        del rank
        for do in self._on_loss:
            do()

    def _close_pipes(self) -> None:
        for pipe in (*self._pipes, *self._reports):
            pipe.close()

    def _kill(self) -> None:
        for process in self._processes:
            if process.pid is None:
                continue  # it was not started
            if process.exitcode is None:
                process.kill()  # a stopped process ends by no other signal
            process.join()


def _run_rank(
    run: Callable[..., None],
    connection: Connection,
    reports: Connection,
    beats: Connection,
    parent: int,
    rank: int,
    *args: Any,
) -> None:
    """Run a rank in its process, a child of process `parent`, and send the error that ends it.

    The node logs the error, so a defect is sent without its message, which may quote a prompt.
    """
    die_with(parent)
    service_manager.forget()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    beat(beats)
    try:
        run(connection, reports, rank, *args)
    except EOFError:
        return  # rank 0 has closed the pipe, or is gone
    except Exception as error:
        try:
            connection.send_bytes(ERROR + error_in_words(error).encode(errors="replace")[:4096])
        except OSError:
            return
        raise SystemExit(1) from None

"""The liveness of the ranks of a node: each rank says every now and then that it runs, and rank 0 listens.

    rank i: thread `beat` --pipe--> rank 0: thread of RankWatch --a rank is silent--> it is killed

A collective operation waits for all ranks, so one that was stopped would hold the others for as long as the operation's
timeout. The death of the silent rank ends the operation at once. A rank that runs and waits in error is not silent: the
timeout of the operation ends it. A rank that died is seen by processes.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

BEAT_S = 0.2  # between two signs of life
SILENCE_S = 3.0  # longer than a busy machine holds a process up, since the end of a rank costs a start of the node
_MAX_GAP_S = 0.5  # between two looks of this process; after a longer one it was away itself


def beat(pipe: Connection) -> None:
    """Say from a thread that this process runs, until it ends."""
    threading.Thread(target=_beat, args=(pipe,), name="rank-beat", daemon=True).start()


def _beat(pipe: Connection) -> None:
    with suppress(OSError):  # rank 0 is gone
        while True:
            pipe.send_bytes(b".")
            time.sleep(BEAT_S)


class RankWatch:
    """Listens to the ranks from `start` to `close`."""

    def __init__(
        self,
        pipes: Sequence[Connection],
        on_silence: Callable[[int, str], None],
        on_end: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`pipes`: of ranks 1 and above, in order. `on_silence(rank, what)` is called in the thread of the watch, at
        most once per rank, and `on_end(rank)` when the rank has ended, for this or another reason."""
        self._pipes = dict(enumerate(pipes, start=1))
        self._on_silence, self._on_end = on_silence, on_end
        self._heard: dict[int, float] = {}  # when each rank was heard last; only values change once the watch runs
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._heard = dict.fromkeys(self._pipes, time.monotonic())
        self._thread.start()

    def silences_s(self) -> tuple[float, ...]:
        """Return for how many seconds each rank has been silent, in order; nothing before `start`. Any thread may call
        it."""
        now = time.monotonic()
        return tuple(max(0.0, now - heard) for heard in self._heard.values())

    def close(self) -> None:
        """Stop listening. May be called twice, and from the thread of the watch."""
        self._is_stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        heard = self._heard
        while not self._is_stopped.wait(BEAT_S):
            away_s, looked = time.monotonic() - looked, time.monotonic()
            for rank, pipe in list(self._pipes.items()):
                try:
                    if away_s > _MAX_GAP_S or _drain(pipe):
                        heard[rank] = looked
                    elif looked - heard[rank] > SILENCE_S:
                        self._on_silence(rank, f"was silent for {SILENCE_S:g} s")
                        self._leave(rank)
                except (OSError, EOFError):  # it has ended, which is seen elsewhere, too
                    self._leave(rank)

    def _leave(self, rank: int) -> None:
        del self._pipes[rank]
        self._on_end(rank)


def _drain(pipe: Connection) -> bool:
    """Return whether the rank has said something since the last call."""
    has_said = False
    while pipe.poll():
        pipe.recv_bytes()
        has_said = True
    return has_said

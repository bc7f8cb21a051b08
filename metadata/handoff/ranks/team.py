"""The ranks of a decode node, as its rank 0 sees them: its own puller, and the line to the others.

A node with one rank has a puller of its own once it meets a prefill node with several.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from ..endpoint import Endpoint
from ..schema.kv_layout import KvLayout
from ..schema.schema import kv_layouts
from .orders import ExpectPages, FetchedPages, FetchFailed, PullOrder, PullReport, RankLine, SourceLost
from .puller import RankPuller


class RankTeam:
    """Gives orders to all ranks, and collects what they report. `line` reaches the other ranks; None: there are
    none."""

    def __init__(self, end: Endpoint, line: RankLine | None, answer_s: float) -> None:
        self._end, self._line, self._answer_s = end, line, answer_s
        self.size = 1 if line is None else line.size
        self.layouts: Sequence[KvLayout] = kv_layouts(end.schema)
        self._own: RankPuller | None = None

    def send(self, rank: int, order: PullOrder) -> None:
        """Give an order to a rank, rank 0 included. Raises RankLost."""
        if rank:
            assert self._line is not None, rank
            self._line.send(rank, order)
            return
        if self._own is None:
            self._own = RankPuller(self._end, answer_s=self._answer_s)
        self._own.do(order)

    def expect(self, pages: Sequence[int]) -> None:
        """Announce to the other ranks that fetches will write these pages."""
        for rank in range(1, self.size):
            self.send(rank, ExpectPages(tuple(pages)))

    def poll(self) -> list[tuple[int, PullReport]]:
        """Let rank 0's puller work, and return the reports of all ranks, each with its rank. Raises RankLost."""
        reports: list[tuple[int, PullReport]] = []
        if self._own is not None:
            reports += [(0, report) for report in self._own.poll()]
        for rank, report in () if self._line is None else self._line.receive():
            assert isinstance(report, FetchedPages | FetchFailed | SourceLost), (rank, report)
            reports.append((rank, report))
        return reports

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets, or their file descriptors, that the loop polls for input."""
        own = [] if self._own is None else self._own.sockets()
        return [*own, *(() if self._line is None else self._line.descriptors())]

    def wait_s(self) -> float | None:
        """Return how many seconds the loop may wait on the sockets before it must poll; None: no limit."""
        return None if self._own is None else self._own.wait_s()

    def close(self) -> None:
        """Close rank 0's links. The other ranks close theirs when they end."""
        if self._own is not None:
            self._own.close()

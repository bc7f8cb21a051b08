"""The line of handoffs between rank 0 of a node and its other ranks, both ends.

    rank 0                                       rank i
    HandoffServer  --orders--> HandoffLine       --pipe of its work--> RankHandoff.do --> PageServer
                   <-reports-- its end `serving` <--pipe of reports--- RankHandoff
    HandoffClient  <---------> its end `pulling` <---the same pipes--> RankHandoff    --> RankPuller

Orders take the way of all other work, so they are done in its order. Reports have a pipe of their own per rank, because
they come at any time. metadata/handoff/ranks/orders.py lists both.

A rank never waits until a report is read: rank 0 may wait in an operation of the group for this rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import UnionType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import zmq

from ...metadata.errors import RankLost
from ...metadata.handoff.ranks.orders import PullOrder, PullReport, ServeOrder, ServeReport
from .work_frames import HandoffOrder, HandoffReport, decode, encode

OrderT = TypeVar("OrderT", PullOrder, ServeOrder)
ReportT = TypeVar("ReportT", PullReport, ServeReport)


class HandoffLine:
    """Rank 0's side, with an end for the server and one for the client of its node. `send_order(rank, order)` sends an
    order behind all work that the rank was sent before. `reports` are the pipes from ranks 1 and above, in order.
    `lost` makes the error of a rank that is gone."""

    def __init__(
        self,
        send_order: Callable[[int, HandoffOrder], None],
        reports: Sequence[Connection],
        lost: Callable[[str], RankLost] = RankLost,
    ) -> None:
        self._send_order, self._reports, self._lost = send_order, tuple(reports), lost
        self.serving: LineEnd[ServeOrder, ServeReport] = LineEnd(self, len(reports) + 1)
        self.pulling: LineEnd[PullOrder, PullReport] = LineEnd(self, len(reports) + 1)

    def send(self, rank: int, order: HandoffOrder) -> None:
        """Send an order to a rank."""
        self._send_order(rank, order)

    def collect(self) -> None:
        """Give the reports that have come to their ends. Does not wait. Raises RankLost if a rank is gone."""
        for rank, pipe in enumerate(self._reports, 1):
            try:
                while pipe.poll():
                    report: HandoffReport = decode(pipe.recv_bytes())
                    if isinstance(report, ServeReport):
                        self.serving.reports.append((rank, report))
                    else:
                        self.pulling.reports.append((rank, report))
            except (EOFError, OSError):
                raise self._lost(f"rank {rank} is gone: its pipe for handoffs is closed") from None

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when a report comes."""
        return [pipe.fileno() for pipe in self._reports]


class LineEnd(Generic[OrderT, ReportT]):
    """The end of a line for orders and reports of one kind (metadata/handoff/ranks/orders.py: RankLine). Only the line
    fills `reports`."""

    def __init__(self, line: HandoffLine, size: int) -> None:
        self._line, self.size = line, size
        self.reports: list[tuple[int, ReportT]] = []

    @property
    def has_reports(self) -> bool:
        """Whether reports are here that the other end has read from the pipes."""
        return bool(self.reports)

    def send(self, rank: int, order: OrderT) -> None:
        """Send an order to a rank."""
        self._line.send(rank, order)

    def receive(self) -> list[tuple[int, ReportT]]:
        """Return the reports that have come, and the rank of each. Does not wait. Raises RankLost if a rank is gone."""
        self._line.collect()
        received, self.reports = self.reports, []
        return received

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when a report comes."""
        return self._line.descriptors()


class HandoffMember(Protocol):
    """The part of a rank in handoffs: a PageServer or a RankPuller."""

    orders: ClassVar[UnionType]  # that it does

    def do(self, order: Any) -> None:
        """Do an order of rank 0."""
        ...

    def poll(self) -> Sequence[HandoffReport]:
        """Serve the links, bounded. Return the reports for rank 0."""
        ...

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Return the sockets that are polled for input."""
        ...

    def wait_s(self) -> float | None:
        """Return how many seconds the rank may wait on the sockets before it must poll; None: no limit."""
        ...


class RankHandoff:
    """A rank's side. `work` is the pipe from which the rank's loop takes work and orders; `reports` leads to rank 0.
    `members` do the orders; `add` brings another one."""

    def __init__(self, work: Connection, reports: Connection, *members: HandoffMember) -> None:
        self._work, self._members = work, list(members)
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_send, args=(reports, self._frames), name="handoff reports", daemon=True).start()

    def add(self, member: HandoffMember) -> None:
        """Let this member do its orders, too."""
        self._members.append(member)

    def do(self, order: HandoffOrder) -> None:
        """Do an order that came as work."""
        next(member for member in self._members if isinstance(order, member.orders)).do(order)

    def wait(self) -> None:
        """Serve the links until there is work, or until rank 0 is gone, which shows as work. Call it before each
        receive. It serves at least once, so that a busy rank serves too."""
        self._serve()
        while not self._work.poll():
            poller = zmq.Poller()
            poller.register(self._work.fileno(), zmq.POLLIN)
            for socket in (each for member in self._members for each in member.sockets()):
                poller.register(socket, zmq.POLLIN)
            waits = [wait_s for member in self._members if (wait_s := member.wait_s()) is not None]
            poller.poll(max(0, int(1000 * min(waits))) if waits else None)
            self._serve()

    def _serve(self) -> None:
        for report in (each for member in self._members for each in member.poll()):
            self._frames.put(encode(report))


def _send(pipe: Connection, frames: SimpleQueue[bytes]) -> None:
    """Send frames until rank 0 is gone, which the rank's loop learns from the pipe of its work."""
    with suppress(OSError):
        while True:
            pipe.send_bytes(frames.get())

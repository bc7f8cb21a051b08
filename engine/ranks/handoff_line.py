"""The line of handoffs between rank 0 of a node and its other ranks, both ends.

    rank 0                                              rank i
    HandoffServer     --orders--> HandoffLine.send      --pipe of its work--> RankHandoff.do --> PageServer
    or HandoffClient  <-reports-- HandoffLine.receive   <--pipe of reports--- RankHandoff        or RankPuller

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
from typing import Any, Protocol

import zmq

from ...metadata.errors import RankLost
from .work_frames import HandoffOrder, HandoffReport, decode, encode


class HandoffLine:
    """Rank 0's end (metadata/handoff/ranks/orders.py: RankLine). `send_order(rank, order)` sends an order behind all
    work that the rank was sent before. `reports` are the pipes from ranks 1 and above, in order. `lost` makes the error
    of a rank that is gone."""

    def __init__(
        self,
        send_order: Callable[[int, HandoffOrder], None],
        reports: Sequence[Connection],
        lost: Callable[[str], RankLost] = RankLost,
    ) -> None:
        self._send_order, self._reports, self._lost = send_order, tuple(reports), lost
        self.size = len(reports) + 1

    def send(self, rank: int, order: HandoffOrder) -> None:
        """Send an order to a rank."""
        self._send_order(rank, order)

    def receive(self) -> list[tuple[int, HandoffReport]]:
        """Return the reports that have come, and the rank of each. Does not wait. Raises RankLost if a rank is gone."""
        received: list[tuple[int, HandoffReport]] = []
        for rank, pipe in enumerate(self._reports, 1):
            try:
                while pipe.poll():
                    received.append((rank, decode(pipe.recv_bytes())))
            except (EOFError, OSError):
                raise self._lost(f"rank {rank} is gone: its pipe for handoffs is closed") from None
        return received

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when a report comes."""
        return [pipe.fileno() for pipe in self._reports]


class HandoffMember(Protocol):
    """The part of a rank in handoffs. On a prefill node it is a PageServer, on a decode node a RankPuller."""

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
    """A rank's end. `work` is the pipe from which the rank's loop takes work and orders; `reports` leads to rank 0."""

    def __init__(self, work: Connection, reports: Connection, member: HandoffMember) -> None:
        self._work, self._member = work, member
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_send, args=(reports, self._frames), name="handoff reports", daemon=True).start()

    def do(self, order: HandoffOrder) -> None:
        """Do an order that came as work."""
        self._member.do(order)

    def wait(self) -> None:
        """Serve the links until there is work, or until rank 0 is gone, which shows as work. Call it before each
        receive. It serves at least once, so that a busy rank serves too."""
        self._serve()
        while not self._work.poll():
            poller = zmq.Poller()
            poller.register(self._work.fileno(), zmq.POLLIN)
            for socket in self._member.sockets():
                poller.register(socket, zmq.POLLIN)
            wait_s = self._member.wait_s()
            poller.poll(None if wait_s is None else max(0, int(1000 * wait_s)))
            self._serve()

    def _serve(self) -> None:
        for report in self._member.poll():
            self._frames.put(encode(report))


def _send(pipe: Connection, frames: SimpleQueue[bytes]) -> None:
    """Send frames until rank 0 is gone, which the rank's loop learns from the pipe of its work."""
    with suppress(OSError):
        while True:
            pipe.send_bytes(frames.get())

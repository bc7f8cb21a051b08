"""A node's place in the cluster: its link to the router, its heartbeat, its leaving. Both kinds of node have one.

while not membership.is_over:
    is_busy = node.step()             # drains membership.receive()
    membership.report()
    if not is_busy: membership.wait() # until a message, a signal or a deadline
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from ..errors import Refused
from ..wire.messages import Drain, Flush, Hello, Inspect, Leaving, LedgerReport, TokenizerFile, ToRouter
from ..wire.node_info import Load, NodeStats, PoolLedger
from ..wire.request import Unit
from .curve import KeyPair
from .link import Link
from .liveness import HeartbeatThread
from .session import Joined, RouterChanged, RouterLost, RouterRefused, RouterSession, Work

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
IDLE_LIMIT_S = 10.0
APART_S = 5.0  # a node without a router says so that often
REPORT_INTERVAL_S = 0.1
_LINGER_MS = 500  # what the last words of a leaving node may take


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The router that asked for the node's work is gone, or is another one: everything of it must be freed."""

    reason: str


class Books(Protocol):
    """Who owns the pages."""

    def ledger(self) -> PoolLedger: ...

    def flush(self) -> object:
        """Empty the prefix cache of what nobody uses."""
        ...


class DataLink(Protocol):
    """The node's end of the data links."""

    def wait_s(self) -> float | None:
        """How long the node may sleep at most, seconds; None: for ever."""
        ...

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What wakes the node besides the router's messages."""
        ...

    def close(self) -> None: ...


class Member(Protocol):
    """What the membership needs of its node."""

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        ...

    @property
    def cache(self) -> Books: ...

    @property
    def handoff(self) -> DataLink: ...

    def load(self) -> Load: ...

    def stats(self) -> NodeStats: ...

    def units(self) -> tuple[Unit, ...]: ...

    def tickets(self) -> tuple[Unit, ...]: ...


class Membership:
    """Belongs to the node's thread. `member` is given once the node exists."""

    member: Member

    def __init__(
        self,
        hello: Hello,
        router_address: str,
        tokenizer: Callable[[], TokenizerFile],
        keys: KeyPair | None,
        drain_timeout_s: float,
    ) -> None:
        self._link = Link(router_address, hello.node_id, hello.epoch, keys)
        load = Load(free_pages=hello.capacity.num_pages, running=0, waiting=0)
        self._pulse = HeartbeatThread(router_address, hello.node_id, hello.epoch, keys, load=load)
        self._session = RouterSession(hello, self._link.send, tokenizer)
        self._router_address = router_address
        self._node_id, self._keys = hello.node_id, keys
        self._apart_at = time.monotonic()
        self._drain_timeout_s = drain_timeout_s
        self._leaving_until: float | None = None
        self._reported_at = 0.0
        self._is_asked_to_leave = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def start(self) -> None:
        """Says Hello and begins to beat."""
        logger.info("looking for the router at %s", self._router_address)
        self._session.start()
        self._pulse.start()

    def install_signals(self) -> None:
        """SIGTERM and SIGINT drain the node; the second one ends it at once. Main thread only."""
        signal.set_wakeup_fd(self._wake_writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def receive(self) -> list[Work | RouterGone]:
        """The router's work since the last call, in order. Raises Refused when the router wants no such node."""
        self._complain_without_router()
        work: list[Work | RouterGone] = []
        todo = self._session.take(self._link.receive())
        self._pulse.speak(self._session.protocol)
        for item in todo:
            match item:
                case Joined() if self._leaving_until is not None:
                    self.send(Leaving(done=False))
                case Joined():
                    pass
                case RouterChanged(router_epoch=epoch):
                    work.append(RouterGone(f"the router is another one now ({epoch})"))
                case RouterLost(silence_s=silence_s):
                    work.append(RouterGone(f"no word from the router for {silence_s:.1f} s"))
                case RouterRefused(reason=reason):
                    raise Refused(reason)
                case Inspect(query=query):
                    self._report_ledger(query)
                case Flush(query=query):
                    self.member.cache.flush()
                    self._report_ledger(query)
                case Drain():
                    self._is_asked_to_leave = True
                case _:
                    work.append(item)
        return work

    def send(self, message: ToRouter) -> None:
        """Never waits. A message that finds the queue full is lost; the router asks again (Resend). So is one for a
        router that is gone, where the next one may not know such messages."""
        session = self._session
        if message.since > session.protocol and not session.is_joined:
            return
        if not self._link.send(message, session.protocol) and session.is_joined:
            logger.warning("the queue to the router is full: lost a %s", type(message).__name__)

    def enter(self, phase: str, limit_s: float) -> None:
        """The node begins something that should take `limit_s` at most."""
        self._pulse.enter(phase, limit_s)

    def report(self) -> None:
        """The figures that the next beats carry; called every step, it collects them often enough for every beat."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self._pulse.report(self.member.load(), self.member.stats())

    def wait(self) -> None:
        """Sleep until a message, a signal or the member's deadline."""
        self.enter("idle", IDLE_LIMIT_S)
        poller = zmq.Poller()
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        for zmq_socket in (self._link.socket, *self.member.handoff.sockets()):
            poller.register(zmq_socket, zmq.POLLIN)
        wait_s = self.member.handoff.wait_s()
        poller.poll(max(0, int(1000 * (IDLE_WAIT_S if wait_s is None else min(IDLE_WAIT_S, wait_s)))))
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(64)

    @property
    def is_over(self) -> bool:
        """Whether the node may go: it was asked to, and holds nothing any more or has run out of time."""
        if self._is_asked_to_leave and self._leaving_until is None:
            logger.info("leaving: taking nothing new, %s", "nothing held" if self.member.is_idle else "finishing")
            self._leaving_until = time.monotonic() + self._drain_timeout_s
            self.send(Leaving(done=False))
        if self._leaving_until is None:
            return False
        return self.member.is_idle or time.monotonic() > self._leaving_until

    @property
    def dropped_frames(self) -> int:
        return self._link.dropped_frames

    def close(self) -> None:
        """Last words, then closes everything."""
        self.send(Leaving(done=True))
        self._pulse.close()
        self._link.socket.linger = _LINGER_MS
        self._link.close()
        signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._is_asked_to_leave:
            self._drain_timeout_s = 0.0
            self._leaving_until = 0.0
        self._is_asked_to_leave = True
        logger.info("received %s", signal.Signals(number).name)

    def _complain_without_router(self) -> None:
        now = time.monotonic()
        if self._session.is_joined:
            self._apart_at = now
        elif now - self._apart_at >= APART_S:
            self._apart_at = now
            doubt = "with the same --keys"
            if self._keys is not None and self._keys.allow_list is not None:
                line = f"{self._node_id} {self._keys.public.decode()}"
                doubt = f"with the key that {self._keys.allow_list.path} says, and does its --allow-list say `{line}`"
            logger.warning(
                "no router has welcomed this node at %s: does one run there, %s?", self._router_address, doubt
            )

    def _report_ledger(self, query: int) -> None:
        member = self.member
        self.send(
            LedgerReport(
                query=query,
                pool=member.cache.ledger(),
                requests=member.units(),
                tickets=member.tickets(),
                load=member.load(),
                stats=member.stats(),
            )
        )

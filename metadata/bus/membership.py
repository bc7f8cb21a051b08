"""A node's membership in the cluster: its link to the router, its heartbeat, its leaving. Both roles use it.

while not membership.is_over:
    is_busy = node.step()             # drains membership.receive()
    membership.report()
    if not is_busy: membership.wait() # until a message, a signal or a deadline
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from ..cache.changes import WatchedCache
from ..cache.news import CacheNews
from ..errors import Refused
from ..service_manager import has_manager, notify
from ..wire.membership import (
    IDLE,
    CachedPages,
    Drain,
    Flush,
    Hello,
    Inspect,
    Leaving,
    LedgerReport,
    TellPages,
    TokenizerFile,
)
from ..wire.messages import ToRouter
from ..wire.node_info import Load, NodeStats, PoolLedger
from ..wire.request import Unit
from .curve import KeyPair
from .link import Link, Outlook
from .liveness import HeartbeatThread
from .session import Joined, RouterChanged, RouterLost, RouterRefused, RouterSession, RouterWork, SessionEvent
from .sockets import HANDSHAKE_MS

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
IDLE_LIMIT_S = 10.0
UNWELCOME_LOG_S = 10.0  # after which a node without a router logs that; then after twice as long, and so on
MAX_UNWELCOME_LOG_S = 240.0  # between two such lines at most
REPORT_INTERVAL_S = 0.1
_LINGER_MS = 500  # how long the last message of a leaving node may take


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The router that gave this node its work is lost or was replaced. The node must free everything of that work."""

    reason: str


class PageLedger(WatchedCache, Protocol):
    """The node's page ledger and prefix cache."""

    def ledger(self) -> PoolLedger: ...

    def tail_ledger(self) -> PoolLedger | None:
        """Count the tail pages; None: the model has none."""
        ...

    def flush(self) -> object:
        """Remove unreferenced pages from the prefix cache."""
        ...


class DataLink(Protocol):
    """The node's end of the data links."""

    def wait_s(self) -> float | None:
        """Return how many seconds the node may sleep at most; None: no limit."""
        ...

    def sockets(self) -> Sequence[zmq.Socket[bytes] | int]:
        """Return the sockets, or their file descriptors, that wake the node besides the router's."""
        ...

    def allow_for(self, round_trip_s: float) -> None:
        """Give peers more time, since a message to the router and back takes so long."""
        ...

    def close(self) -> None: ...


class Member(Protocol):
    """The interface of a node that its membership uses."""

    @property
    def is_idle(self) -> bool:
        """Whether the node holds nothing for any request."""
        ...

    @property
    def cache(self) -> PageLedger: ...

    @property
    def handoff(self) -> DataLink: ...

    def load(self) -> Load: ...

    def stats(self) -> NodeStats: ...

    def units(self) -> tuple[Unit, ...]: ...

    def tickets(self) -> tuple[Unit, ...]: ...


class Membership:
    """The membership of one node. Used by the node's main thread. `member` is set once the node exists."""

    member: Member

    def __init__(
        self,
        hello: Hello,
        router_address: str,
        tokenizer: Callable[[], TokenizerFile],
        keys: KeyPair | None,
        drain_timeout_s: float,
        rank_silences_s: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        """`rank_silences_s`: as of `HeartbeatThread`."""
        self._link = Link(router_address, hello.node_id, hello.epoch, keys)
        load = Load.of_idle(hello.capacity)
        self._heartbeat = HeartbeatThread(
            router_address, hello.node_id, hello.epoch, keys, load=load, rank_silences_s=rank_silences_s
        )
        self._session = RouterSession(
            hello, self._link.send, tokenizer, round_trip_s=lambda: self._heartbeat.round_trip_s
        )
        self._news = CacheNews(self._send_news)
        self._num_welcomes = 0
        self._router_address = router_address
        self._node_id, self._keys = hello.node_id, keys
        self._unwelcome_at, self._unwelcome_log_s = time.monotonic(), UNWELCOME_LOG_S
        self._drain_timeout_s = drain_timeout_s
        self._leaving_until: float | None = None
        self._reported_at = 0.0
        self._is_asked_to_leave = False
        self._has_manager = has_manager()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def start(self) -> None:
        """Say Hello and start the heartbeat."""
        logger.info("looking for the router at %s", self._router_address)
        notify("starting", f"looking for the router at {self._router_address}")
        self._session.start()
        self._heartbeat.start()

    def install_signals(self) -> None:
        """Make SIGTERM and SIGINT drain the node; a second one ends it at once. Main thread only."""
        signal.set_wakeup_fd(self._wake_writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def receive(self) -> list[RouterWork | RouterGone]:
        """Return the router's work since the last call, in order. Raises Refused if the router refuses this node."""
        self._complain_without_router()
        work: list[RouterWork | RouterGone] = []
        todo = self._session.take(self._link.receive())
        num_welcomes = sum(isinstance(item, Joined) for item in todo)
        if num_welcomes:
            notify("ready" if not self._num_welcomes else None, f"serves the router at {self._router_address}")
        self._num_welcomes += num_welcomes
        self._heartbeat.speak(self._session.protocol, self._num_welcomes)
        for item in todo:
            self._keep_news(item)
            match item:
                case Joined() if self._leaving_until is not None:
                    self.send(Leaving(done=False))
                case Joined():
                    pass
                case RouterChanged(router_epoch=epoch):
                    work.append(RouterGone(f"the router is another one now ({epoch})"))
                case RouterLost(silence_s=silence_s):
                    notify(words=f"has lost the router at {self._router_address}, and looks for it")
                    work.append(RouterGone(f"no message from the router for {silence_s:.1f} s"))
                case RouterRefused(reason=reason):
                    raise Refused(f"the router refused this node: {reason}")
                case Inspect(query=query):
                    self._report_ledger(query)
                case Flush(query=query):
                    self.member.cache.flush()
                    self._report_ledger(query)
                case TellPages():
                    self._news.begin_anew()
                case Drain():
                    self._is_asked_to_leave = True
                case _:
                    work.append(item)
        return work

    def send(self, message: ToRouter) -> None:
        """Send a message to the router; never wait. If the queue is full the message is lost, and the router asks again
        (Resend). A message that the next router may not know is not sent while no router has welcomed the node."""
        session = self._session
        if message.since > session.protocol and not session.is_joined:
            return
        if not self._link.send(message, session.protocol) and session.is_joined:
            logger.warning("the queue to the router is full: lost a %s", type(message).__name__)

    def enter(self, phase: str, limit_s: float) -> None:
        """Record that the node begins a phase that should take `limit_s` at most."""
        self._heartbeat.enter(phase, limit_s)

    def report(self) -> None:
        """Update the figures of the next heartbeats, at most once per REPORT_INTERVAL_S, and tell the router what the
        prefix cache holds. Called every step."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            if self._has_manager:
                notify("alive")
            self._heartbeat.report(self.member.load(), self.member.stats())
            self.member.handoff.allow_for(self._heartbeat.round_trip_s)
        self._news.tell(now)

    def wait(self, also: Sequence[int] = ()) -> None:
        """Sleep until a message, a signal or the node's deadline, or until one of the descriptors `also` can be
        read."""
        self.enter(IDLE, IDLE_LIMIT_S)
        poller = zmq.Poller()
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        for zmq_socket in (self._link.socket, *self.member.handoff.sockets(), *also):
            poller.register(zmq_socket, zmq.POLLIN)
        waits_s = IDLE_WAIT_S, self.member.handoff.wait_s(), self._news.wait_s(time.monotonic())
        poller.poll(max(0, math.ceil(1000 * min(each for each in waits_s if each is not None))))
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(64)

    @property
    def is_leaving(self) -> bool:
        """Whether the node was asked to leave."""
        return self._is_asked_to_leave

    def leave(self, why: str) -> None:
        """Leave as after SIGTERM."""
        logger.info("leaves: %s", why)
        self._is_asked_to_leave = True

    @property
    def is_over(self) -> bool:
        """Whether the node may exit: it was asked to leave, and holds nothing any more or has run out of time."""
        if self._is_asked_to_leave and self._leaving_until is None:
            logger.info("leaving: taking nothing new, %s", "nothing held" if self.member.is_idle else "finishing")
            self._leaving_until = time.monotonic() + self._drain_timeout_s
            notify("stopping", f"finishes its requests, in {self._drain_timeout_s:g} s", limit_s=self._drain_timeout_s)
            self.send(Leaving(done=False))
        if self._leaving_until is None:
            return False
        return self.member.is_idle or time.monotonic() > self._leaving_until

    @property
    def dropped_frames(self) -> int:
        return self._link.dropped_frames

    def close(self) -> None:
        """Tell the router that the node leaves now, and close everything."""
        self.send(Leaving(done=True))
        self._heartbeat.close()
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
            self._unwelcome_at, self._unwelcome_log_s = now, UNWELCOME_LOG_S
        elif now - self._unwelcome_at >= self._unwelcome_log_s:
            self._unwelcome_at = now
            self._unwelcome_log_s = min(2 * self._unwelcome_log_s, MAX_UNWELCOME_LOG_S)
            where, why = self._router_address, self._why_unwelcome()
            logger.warning("no router has welcomed this node at %s: %s", where, why)
            notify("starting", f"no router has welcomed this node at {where}: {why}")

    def _why_unwelcome(self) -> str:
        """Return why a router has not welcomed this node. A router of an earlier release does not always answer a key
        that its allow-list lacks, so such a handshake looks like a slow one."""
        is_listed = self._keys is not None and self._keys.allow_list is not None
        return _why_unwelcome(self._link.outlook, self._key_advice(), is_listed=is_listed)

    def _key_advice(self) -> str:
        """Return what to look at if the router refuses this node's key."""
        if self._keys is None:
            return "does the router there run with --keys? Then this node needs the same file"
        if self._keys.allow_list is None:
            return "does the router there have the same --keys?"
        line = f"{self._node_id} {self._keys.public.decode()}"
        return f"has the router the key that {self._keys.allow_list.path} says, and does its --allow-list say `{line}`?"

    def _keep_news(self, item: RouterWork | SessionEvent) -> None:
        """Begin the news of the node's cached pages with a router, and end it."""
        match item:
            case Joined(page_key=key) if key:
                self._news.begin(self.member.cache, key)
            case RouterChanged() | RouterLost():
                self._news.end()
            case _:
                pass

    def _send_news(self, news: CachedPages) -> bool:
        return self._link.send(news, self._session.protocol)

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
                tail_pool=member.cache.tail_ledger(),
            )
        )


def _why_unwelcome(outlook: Outlook, key_advice: str, *, is_listed: bool) -> str:
    """Return why a router has not welcomed a node, as far as the node can tell, and what to look at."""
    match outlook:
        case "unreachable":
            return "nothing answers there. Does a router run, is --router right, and does the network let it through?"
        case "refused":
            return f"something answers there and ends the handshake; {key_advice}"
        case "too slow":
            return (
                f"something answers there, but the handshake was not done within {HANDSHAKE_MS / 1000:g} s: is it a "
                "router, and is the network very slow, or does it lose packets?" + (f" Or: {key_advice}" * is_listed)
            )
        case "connected":
            return "the connection stands, but no answer to this node's Hello has come; the router's log may say why"

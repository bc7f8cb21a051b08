"""A node's membership in the cluster: its channels to the routers, its leaving. Both roles use it.

A node joins every router of its setting. Each has a channel of its own (channel.py), and no router knows of another. A
router that is lost takes its own work with it, and nothing else.

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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from ..cache.changes import WatchedCache
from ..errors import Refused
from ..service_manager import has_manager, notify
from ..wire.membership import (
    IDLE,
    CanaryTold,
    Cordon,
    Drain,
    Flush,
    ForgetSalts,
    Hello,
    Inspect,
    Leaving,
    LedgerReport,
    Proven,
    TellCanary,
    TellPages,
    TokenizerFile,
)
from ..wire.messages import ToRouter
from ..wire.node_info import Load, NodeStats, PoolLedger, Service, TierLedger
from ..wire.protocol import Message
from ..wire.request import Unit
from .channel import ChannelEvent, RouterChannel, RouterGone, TurnedAway
from .curve import KeyPair
from .router_addresses import RouterAddresses
from .session import Joined, RouterWork

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
IDLE_LIMIT_S = 10.0
REPORT_INTERVAL_S = 0.1
ALIAS_S = 10.0  # without a router at its first address, its other ones are tried
UNHEARD_S = 3.0  # then twice as long, and so on
_LINGER_MS = 500  # how long the last message of a leaving node may take


class PageLedger(WatchedCache, Protocol):
    """The node's page ledger and prefix cache."""

    def ledger(self) -> PoolLedger: ...

    def tail_ledger(self) -> PoolLedger | None:
        """Count the tail pages; None: the model has none."""
        ...

    def tier_ledger(self) -> TierLedger | None:
        """Count the slots of the host tier; None: the node has none."""
        ...

    def forget(self, salt_prefix: str) -> int:
        """Remove the pages of all salts that begin so, in all tiers, but those with references. Return how many."""
        ...

    def flush(self) -> object:
        """Remove unreferenced pages from the prefix cache."""
        ...


class DataLink(Protocol):
    """The node's ends of the data links, or one of them."""

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
    def links(self) -> DataLink:
        """The node's data links."""
        ...

    def load(self) -> Load: ...

    def stats(self) -> NodeStats: ...

    def units(self) -> tuple[Unit, ...]: ...

    def num_units(self) -> Counter[str]:
        """Count the units by the epoch of the router that they are of."""
        ...

    def tickets(self) -> tuple[Unit, ...]: ...


class Membership:
    """The membership of one node. Used by the node's main thread. `member` is set once the node exists."""

    member: Member

    def __init__(
        self,
        hello: Hello,
        routers: str,
        tokenizer: Callable[[], TokenizerFile],
        keys: KeyPair | None,
        drain_timeout_s: float,
        rank_silences_s: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        """`routers`: the setting `router`. `rank_silences_s`: as of `HeartbeatThread`."""
        self._hello, self._keys = hello, keys
        self._tokenizer, self._rank_silences_s = tokenizer, rank_silences_s
        self._routers = routers
        self._addresses = RouterAddresses(routers)
        self._channels: list[RouterChannel] = []
        self._aliases: dict[str, str] = {}  # further addresses of a router: the address of its channel
        self._num_unheard = Counter[str]()  # by address: how often nothing came by a connection that stood
        self._refusals: dict[str, str] = {}  # by address of the router
        self._service = Service()
        self._proven: tuple[str, ...] = ()  # as of the last Proven of any router
        self._has_joined = False
        self._drain_timeout_s = drain_timeout_s
        self._leaving_until: float | None = None
        self._reported_at = 0.0
        self._is_asked_to_leave = False
        self._has_manager = has_manager()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._is_started = False
        self._num_dropped = 0  # frames, of channels that are closed
        for address in self._addresses.current:
            self._open(address)

    def start(self) -> None:
        """Say Hello to all routers, and start the heartbeats."""
        notify("starting", f"looking for the router at {self._routers}")
        self._is_started = True
        for channel in self._channels:
            channel.start()
        self._addresses.start()

    def install_signals(self) -> None:
        """Make SIGTERM and SIGINT drain the node; a second one ends it at once. Main thread only."""
        signal.set_wakeup_fd(self._wake_writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @property
    def routers(self) -> list[str]:
        """The epochs of the routers that have welcomed this node and are there."""
        return [channel.router for channel in self._channels if channel.router is not None]

    def routers_that_know(self, kind: type[Message]) -> list[str]:
        """The epochs of those routers to which a message of this type can be sent."""
        return [channel.router for channel in self._channels if channel.router is not None and channel.knows(kind)]

    def receive(self) -> list[RouterWork | RouterGone]:
        """Return the routers' work since the last call, in order per router. Raises Refused if a router refuses this
        node, and no other has welcomed it."""
        work: list[RouterWork | RouterGone] = []
        self._follow_addresses(work)
        for channel in self._channels:
            for item in channel.receive():
                self._take(channel, item, work)
            words = channel.unwelcome_words()
            if words is not None:
                logger.warning("%s", words)
                if not self.routers:
                    notify("starting", words)
        able = (each.router for each in self._channels if each.router is not None and each.knows(TellCanary))
        canary_router = min(able, default="")
        if canary_router != self._service.canary_router:
            self._serve_as(msgspec.structs.replace(self._service, canary_router=canary_router))
        return work

    def send(self, message: ToRouter, router: str) -> None:
        """Send a message to the router of this epoch; never wait. It is dropped if that router is gone: its work is
        freed."""
        for channel in self._channels:
            if channel.router == router:
                channel.send(message)
                return

    def send_all(self, message: ToRouter) -> None:
        """Send a message to every router; to one that has not welcomed this node, too."""
        for channel in self._channels:
            channel.send(message)

    def enter(self, phase: str, limit_s: float) -> None:
        """Record that the node begins a phase that should take `limit_s` at most."""
        for channel in self._channels:
            channel.heartbeat.enter(phase, limit_s)

    def report(self) -> None:
        """Update the figures of the next heartbeats, at most once per REPORT_INTERVAL_S, and tell the routers what the
        prefix cache holds. Called every step."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            if self._has_manager:
                notify("alive")
            load, stats = self.member.load(), self.member.stats()
            for channel in self._channels:
                channel.heartbeat.report(load, stats, self._service)
            trips_s = (channel.heartbeat.round_trip_s for channel in self._channels)
            self.member.links.allow_for(max(trips_s, default=0.0))
        for channel in self._channels:
            channel.news.tell(now)

    def wait(self, also: Sequence[int] = ()) -> None:
        """Sleep until a message, a signal or the node's deadline, or until one of the descriptors `also` can be
        read."""
        self.enter(IDLE, IDLE_LIMIT_S)
        poller = zmq.Poller()
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        for zmq_socket in (*(each.link.socket for each in self._channels), *self.member.links.sockets(), *also):
            poller.register(zmq_socket, zmq.POLLIN)
        now = time.monotonic()
        waits_s = [self.member.links.wait_s(), *(channel.news.wait_s(now) for channel in self._channels)]
        wait_s = min((each for each in waits_s if each is not None), default=IDLE_WAIT_S)
        poller.poll(max(0, math.ceil(1000 * min(IDLE_WAIT_S, wait_s))))
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
            self.send_all(Leaving(done=False))
        if self._leaving_until is None:
            return False
        return self.member.is_idle or time.monotonic() > self._leaving_until

    @property
    def dropped_frames(self) -> int:
        return self._num_dropped + sum(channel.link.dropped_frames for channel in self._channels)

    def close(self) -> None:
        """Tell the routers that the node leaves now, and close everything."""
        self._addresses.close()
        self.send_all(Leaving(done=True))
        for channel in self._channels:
            channel.close(_LINGER_MS)
        signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._is_asked_to_leave:
            self._drain_timeout_s = 0.0
            self._leaving_until = 0.0
        self._is_asked_to_leave = True
        logger.info("received %s", signal.Signals(number).name)

    # --- channels ---

    def _follow_addresses(self, work: list[RouterWork | RouterGone]) -> None:
        """Open channels to new addresses. Close those of addresses that are no longer named, once no router is there.

        If several lead to one router, close them all and connect anew by the first one: a router hears only the latest
        connection of a node, and that may be another one for messages than for heartbeats. A connection by which
        nothing comes is made anew for the same reason."""
        named = self._addresses.current
        away_s = {channel.address: channel.away_s for channel in self._channels}
        self._aliases = {alias: at for alias, at in self._aliases.items() if away_s.get(at, ALIAS_S) < ALIAS_S}
        firsts: dict[str, str] = {}  # by epoch
        epochs = Counter(channel.session.router_epoch for channel in self._channels)
        for channel in list(self._channels):
            address, epoch = channel.address, channel.session.router_epoch
            if epoch is not None and epochs[epoch] > 1:
                first = firsts.setdefault(epoch, address)
                if first != address:
                    logger.info("%s and %s are addresses of one router", first, address)
                    self._aliases[address] = first
            elif address not in named and channel.router is None:
                logger.info("no router is called %s any more", address)
            elif self.routers and channel.is_unheard and channel.away_s > UNHEARD_S * 2 ** self._num_unheard[address]:
                self._num_unheard[address] += 1
            else:
                continue
            self._close(channel, work)
        present = {channel.address for channel in self._channels}
        for address in named:
            if address not in present and address not in self._aliases:
                self._open(address)

    def _close(self, channel: RouterChannel, work: list[RouterWork | RouterGone]) -> None:
        if channel.router is not None:
            work.append(RouterGone(channel.router, "it has several addresses, and the node connects anew"))
        self._num_dropped += channel.link.dropped_frames
        self._channels.remove(channel)
        channel.close()

    def _open(self, address: str) -> None:
        load = Load.of_idle(self._hello.capacity)
        hello = msgspec.structs.replace(self._hello, proven=self._proven if self.routers else ())
        channel = RouterChannel(address, hello, self._tokenizer, self._keys, load, self._rank_silences_s)
        self._channels.append(channel)
        if self._is_started:
            channel.start()

    def _take(self, channel: RouterChannel, item: ChannelEvent, work: list[RouterWork | RouterGone]) -> None:
        match item:
            case Joined(page_key=key):
                if key:
                    channel.news.begin(self.member.cache, key)
                notify(None if self._has_joined else "ready", f"serves the router at {channel.address}")
                self._has_joined = True
                del self._num_unheard[channel.address]
                self._refusals.pop(channel.address, None)
                if self._leaving_until is not None:
                    channel.send(Leaving(done=False))
            case RouterGone():
                notify(words=f"has lost the router at {channel.address}, and looks for it")
                work.append(item)
            case TurnedAway(reason=reason):
                if not self.routers:
                    raise Refused(f"the router refused this node: {reason}")
                if self._refusals.get(channel.address) != reason:
                    self._refusals[channel.address] = reason
                    logger.error("the router at %s refused this node, which serves others: %s", channel.address, reason)
            case Inspect(query=query):
                self._report_ledger(channel, query)
            case Flush(query=query):
                self.member.cache.flush()
                self._serve_as(msgspec.structs.replace(self._service, num_flushes=self._service.num_flushes + 1))
                self._report_ledger(channel, query)
            case ForgetSalts(prefix=prefix):
                num_freed = self.member.cache.forget(prefix)
                logger.info("%d cached pages of a tenant that is gone were removed", num_freed)
            case TellPages():
                channel.news.begin_anew()
            case Proven(epochs=epochs):
                self._proven = epochs
                for each in self._channels:
                    each.session.remember(epochs)
            case TellCanary(outcome=outcome):
                for each in self._channels:
                    if each is not channel and each.router is not None and each.knows(CanaryTold):
                        each.send(CanaryTold(outcome))
            case Cordon(is_cordoned=is_cordoned):
                if is_cordoned != self._service.is_cordoned:
                    logger.info("is drained by an operator" if is_cordoned else "is put back by an operator")
                self._serve_as(msgspec.structs.replace(self._service, is_cordoned=is_cordoned))
            case Drain():
                self._is_asked_to_leave = True
            case _:
                work.append(item)

    def _serve_as(self, service: Service) -> None:
        """Tell all routers, by the next heartbeats."""
        self._service = service
        self._reported_at = 0.0

    def _report_ledger(self, channel: RouterChannel, query: int) -> None:
        member = self.member
        channel.send(
            LedgerReport(
                query=query,
                pool=member.cache.ledger(),
                requests=member.units(),
                tickets=member.tickets(),
                load=member.load(),
                stats=member.stats(),
                tail_pool=member.cache.tail_ledger(),
                routers=dict.fromkeys(self.routers, 0) | member.num_units(),
                host_tier=member.cache.tier_ledger(),
            )
        )


class DataLinks:
    """Both ends of a node, in the interface of one. None: the node has no such end."""

    def __init__(self, *ends: DataLink | None) -> None:
        self._ends = [end for end in ends if end is not None]

    def wait_s(self) -> float | None:
        """Return the shortest of the ends' waits."""
        return min((wait for wait in (end.wait_s() for end in self._ends) if wait is not None), default=None)

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets of all ends."""
        return [socket for end in self._ends for socket in end.sockets()]

    def allow_for(self, round_trip_s: float) -> None:
        """Give the peers of all ends more time."""
        for end in self._ends:
            end.allow_for(round_trip_s)

    def close(self) -> None:
        """Close all ends."""
        for end in self._ends:
            end.close()

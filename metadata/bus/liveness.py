"""Liveness: the heartbeat of a node, and what the router concludes from it.

`HeartbeatThread` is a thread of the node with a socket of its own, because a ZeroMQ socket belongs to one thread. It
connects to the router under the node's routing id plus `:beat`, and the hub reports its messages as the node's. The
thread needs the interpreter lock only for microseconds. So it keeps sending heartbeats while the main loop hangs in
Python, in a lock, or in C code that released the interpreter lock (torch, sockets). A heartbeat says in which phase the
loop is and for how long. C code that keeps the interpreter lock silences the thread; the router then finds the node
dead instead of stuck.

While the loop waits for messages and nothing changes, heartbeats are rare, and each says when the next one comes at the
latest. A change is told as soon as ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..wire.frames import encode
from ..wire.membership import IDLE, Heartbeat
from ..wire.node_info import Load, NodeStats, Service
from ..wire.protocol import PROTOCOL_MIN
from .connections import TcpConnection, time_limit_s
from .curve import KeyPair
from .link import connect_dealer
from .router_addresses import RouterKey
from .sockets import HEARTBEAT_SUFFIX, UNACKNOWLEDGED_S, open_monitor, routing_id, send_frames

HEARTBEAT_INTERVAL_S = 0.2
RARE_INTERVAL_S = 1.0  # between heartbeats of a node that is idle and unchanged
PEER_SILENCE_S = 1.5
MAX_SILENCE_S = 6.0  # a node whose heartbeats come late is dead after so long at the latest
MEAN_GAPS = 4.0  # a node is dead after so many mean gaps between its heartbeats, and not before PEER_SILENCE_S
_NEW_SHARE = 0.1  # of the last gap in the mean

_MAX_FRAME_BYTES = 1024  # nobody writes to a heartbeat socket
_RARE_SINCE = 8  # protocol of Heartbeat.interval_s
_MAX_CHECK_GAP_S = 0.3  # the router checks four times per second


class _Phase(NamedTuple):
    step: int
    name: str
    since: float
    limit_s: float


class _Agreed(NamedTuple):
    """The protocol in which the router is addressed, and the number of Welcomes that the node has had."""

    protocol: int
    num_welcomes: int


class HeartbeatThread:
    """Sends one node's heartbeats from `start` to `close`. Raises ConfigError as Link does."""

    def __init__(
        self,
        router_address: str,
        node_id: str,
        epoch: str,
        keys: KeyPair | None,
        *,
        load: Load,
        interval_s: float = HEARTBEAT_INTERVAL_S,
        rank_silences_s: Callable[[], tuple[float, ...]] = tuple,
        router_key: RouterKey | None = None,
    ) -> None:
        """`router_key`: the link's; None: one of its own. `rank_silences_s`: returns for how long each of the node's
        other ranks has been silent. The thread calls it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._address, self._identity, self._keys = router_address, routing_id(node_id, epoch) + HEARTBEAT_SUFFIX, keys
        self._router_key = router_key or RouterKey(keys)
        try:
            self._socket, self._monitor = self._open()
        except BaseException:
            self._context.term()
            raise
        self._interval_s, self._rank_silences_s = interval_s, rank_silences_s
        # each is one reference, replaced as a whole, so the thread never sees half of a change
        self._phase = _Phase(0, "starting", time.monotonic(), 60.0)
        self._figures = (load, NodeStats(), Service())
        self._agreed = _Agreed(PROTOCOL_MIN, 0)
        self._num_lost = 0  # welcomes of routers whose connection has closed
        self._connection: TcpConnection | None = None
        self.round_trip_s = 0.0  # to the router
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread. The time before, in which the node loaded and compiled, is no part of a phase."""
        self._phase = self._phase._replace(since=time.monotonic())
        self._thread.start()

    def enter(self, phase: str, limit_s: float) -> None:
        """Record that the main loop begins a phase that should take `limit_s` at most. Counts as a step. Costs a
        microsecond."""
        assert 0 < len(phase) <= 128 and limit_s >= 0, (phase, limit_s)
        self._phase = _Phase(self._phase.step + 1, phase, time.monotonic(), limit_s)

    def report(self, load: Load, stats: NodeStats, service: Service = Service()) -> None:  # noqa: B008 - immutable
        """Set what the next heartbeats carry."""
        self._figures = (load, stats, service)

    def speak(self, protocol: int, num_welcomes: int) -> None:
        """Set the protocol in which the router is addressed from now on, and how many Welcomes the node has had.

        When the connection closes, the next router may be an older one. So the oldest protocol is used from then on,
        until the node has had one more Welcome."""
        self._agreed = _Agreed(protocol, num_welcomes)

    def close(self) -> None:
        """Stop the thread and close its socket. May be called twice."""
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._close_sockets()
        self._context.term()

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket that connects to the router, and one that tells when the connection closes."""
        self._expected = self._router_key.current
        socket = connect_dealer(
            self._context,
            self._address,
            self._identity,
            self._keys,
            self._expected,
            max_frame=_MAX_FRAME_BYTES,
            is_immediate=True,
        )
        try:
            return socket, open_monitor(socket, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        except BaseException:
            socket.close()
            raise

    def _close_sockets(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _protocol(self) -> int:
        """Return the protocol in which the router is addressed now. Takes the monitor's events."""
        agreed = self._agreed
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_CONNECTED:
                    self._connection = TcpConnection(event["value"])
                else:
                    self._num_lost, self._connection = agreed.num_welcomes, None
        return agreed.protocol if agreed.num_welcomes > self._num_lost else PROTOCOL_MIN

    def _run(self) -> None:
        told: tuple[Load, NodeStats, Service, int] | None = None
        told_at = 0.0
        while True:
            if self._router_key.current != self._expected:
                self._close_sockets()
                self._socket, self._monitor = self._open()
                self._num_lost, self._connection = self._agreed.num_welcomes, None
            protocol = self._protocol()
            if self._connection is not None:
                self.round_trip_s = self._connection.follow_round_trip(UNACKNOWLEDGED_S)
            phase, (load, stats, service) = self._phase, self._figures
            now, silences_s = time.monotonic(), self._rank_silences_s()
            is_quiet = phase.name == IDLE and not silences_s and protocol >= _RARE_SINCE
            interval_s = RARE_INTERVAL_S if is_quiet else self._interval_s
            heartbeat = Heartbeat(
                phase.step,
                phase.name,
                max(now - phase.since, 0.0),
                phase.limit_s,
                load,
                stats,
                silences_s,
                self.round_trip_s,
                service,
                interval_s,
            )
            news = load, stats, service, self._agreed.num_welcomes
            if not is_quiet or news != told or now - told_at > RARE_INTERVAL_S - self._interval_s / 2:
                told, told_at = news, now
                try:
                    send_frames(self._socket, encode(heartbeat, protocol))
                except zmq.Again:  # no router at present; the socket keeps trying to connect
                    told = None
            if self._is_stopped.wait(self._interval_s):
                return


def late_s(heartbeat: Heartbeat) -> float:
    """Return how much later than usual the next heartbeat may come."""
    return max(0.0, min(heartbeat.interval_s, RARE_INTERVAL_S) - HEARTBEAT_INTERVAL_S)


PeerState = Literal["alive", "stuck", "dead"]
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Change(Generic[_K]):
    """A change of a peer's state; `reason` says why, in words for the log."""

    peer: _K
    state: PeerState
    reason: str


@dataclass(slots=True)
class _Peer:
    heard_at: float
    state: PeerState
    gap_s: float = HEARTBEAT_INTERVAL_S  # between heartbeats, the mean of the last few
    round_trip_s: float | None = None  # to the node, as it says; None: no heartbeat has come yet
    late_s: float = 0.0  # `late_s` of its last heartbeat


class PeerLiveness(Generic[_K]):
    """State of each node as the router sees it: alive, stuck or dead. A node is stuck if its present phase takes longer
    than the limit of that phase. A node is dead if it is silent for too long.

    A busy machine sends heartbeats late, and a lost packet delays them by round trips. Therefore a node may be silent
    for longer in three cases: its last heartbeats were far apart, it measures a long round trip, or its first heartbeat
    has not come yet (heartbeats have a connection of their own). A node that starts is never stuck.

    The router calls `check` a few times per second. If the router itself was held up, its nodes get that time on top,
    because their heartbeats lie unread in its socket.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, silence_s: float = PEER_SILENCE_S) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._peers: dict[_K, _Peer] = {}
        self._checked_at = clock()

    def add(self, peer: _K) -> None:
        """Watch a peer, which is alive now."""
        self._peers[peer] = _Peer(self._clock(), "alive")

    def remove(self, peer: _K) -> None:
        """Stop watching the peer. An unknown peer is ignored."""
        self._peers.pop(peer, None)

    def hear(self, peer: _K, heartbeat: Heartbeat) -> Change[_K] | None:
        """Record a heartbeat. Return the change of state that it causes, if any. Heartbeats of unknown peers are
        ignored."""
        entry = self._peers.get(peer)
        if entry is None:
            return None
        now = self._clock()
        entry.gap_s += _NEW_SHARE * (max(0.0, now - entry.heard_at - entry.late_s) - entry.gap_s)
        entry.heard_at, entry.round_trip_s, entry.late_s = now, heartbeat.round_trip_s, late_s(heartbeat)
        if heartbeat.step == 0 or heartbeat.phase_age_s <= heartbeat.phase_limit_s:
            return self._change(peer, entry, "alive", f"in {heartbeat.phase!r}, step {heartbeat.step}")
        reason = (
            f"in {heartbeat.phase!r} for {heartbeat.phase_age_s:.1f} s, over its limit of {heartbeat.phase_limit_s:g} s"
        )
        return self._change(peer, entry, "stuck", reason)

    def check(self) -> list[Change[_K]]:
        """Return the peers that have become dead by silence since the last check."""
        now = self._clock()
        gap_s, self._checked_at = now - self._checked_at, now
        changes: list[Change[_K]] = []
        for peer, entry in self._peers.items():
            entry.heard_at = min(entry.heard_at + max(0.0, gap_s - _MAX_CHECK_GAP_S), now)
            silence_s = now - entry.heard_at - entry.late_s
            limit_s = MAX_SILENCE_S
            if entry.round_trip_s is not None:
                limit_s = time_limit_s(self._silence_s, entry.round_trip_s)
            if silence_s > max(limit_s, min(MEAN_GAPS * entry.gap_s, MAX_SILENCE_S)):
                change = self._change(peer, entry, "dead", f"silent for {now - entry.heard_at:.1f} s")
                changes += [change] if change else []
        return changes

    def state(self, peer: _K) -> PeerState | None:
        """Return the peer's state; None if it is not watched."""
        entry = self._peers.get(peer)
        return entry.state if entry else None

    def _change(self, peer: _K, entry: _Peer, state: PeerState, reason: str) -> Change[_K] | None:
        if entry.state == state:
            return None
        entry.state = state
        return Change(peer, state, reason)

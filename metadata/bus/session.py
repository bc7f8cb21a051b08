"""A node's session with the router: an automaton without sockets.

    apart  --any router message / Welcome-->  Hello said  --Welcome-->  joined
      ^                                           ^  |                    |
      |  no router message for 5 s, or no         |  '--Refusal           |  another router epoch, or HelloAgain:
      |  connection for CUT_S: RouterLost         '-----------------------'  RouterChanged, Hello said again
      '-------------------------------------------------------------------'

After a Welcome both sides start with no work. When the router gets a Hello, it gives up all work that it had on this
node. On RouterChanged and RouterLost the node frees all that it holds. It drops work from a router that has not
welcomed it. If a Hello is lost, the router gets heartbeats of an unknown node (liveness.py) and answers HelloAgain.

The first Hello uses the oldest protocol that this node knows. Every router that could welcome the node understands it.
A router that knows a newer protocol asks with HelloAgain for a Hello in that one, and welcomes the node after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ..wire.membership import (
    HandedOn,
    Hello,
    HelloAgain,
    Keep,
    Proven,
    Refusal,
    RouterHeartbeat,
    TellCanary,
    TellPages,
    TokenizerFile,
    Welcome,
)
from ..wire.messages import Cancel, Compute, OfOperator, Prefill, Resend, Reserve, ToNode, ToRouter
from .connections import time_limit_s

logger = logging.getLogger(__name__)

ROUTER_SILENCE_S = 5.0
CUT_S = 0.7  # a router whose connection has ended is back before, or it is gone: it gives its nodes' work up at once
HELLO_INTERVAL_S = 0.5  # when a Hello crosses several HelloAgain, it is not repeated for each
PROVEN_S = 60.0  # what a router said of pairs is forgotten when no router has been there for so long
WELCOME_TIMEOUT_S = 4.8  # Hello is repeated to a router that has not answered for this long; over its CROSSING_S


@dataclass(frozen=True, slots=True)
class Joined:
    """The router welcomed this node. Both speak `protocol`. `page_key`: of `Welcome`."""

    router_epoch: str
    protocol: int
    page_key: bytes = b""


@dataclass(frozen=True, slots=True)
class RouterChanged:
    """Another router answers, or the router has forgotten this node. Free all work of the old one. The session has
    already said Hello again."""

    router_epoch: str


@dataclass(frozen=True, slots=True)
class RouterLost:
    """No router message came for `silence_s`, or the connection has ended and does not come back: free everything of
    this router. The session keeps trying."""

    silence_s: float


@dataclass(frozen=True, slots=True)
class RouterRefused:
    """This node can be paired with no other: log the reason and exit with status 1."""

    reason: str


RouterWork = (
    Reserve | Compute | Prefill | Cancel | Resend | Keep | HandedOn | OfOperator | TellPages | TellCanary | Proven
)
SessionEvent = Joined | RouterChanged | RouterLost | RouterRefused


class RouterSession:
    """A node's session. The node passes every message of `Link.receive` to `take`, and acts on what `take` returns, in
    order.

    `send(message, protocol)` is `Link.send`. `tokenizer` makes the file that a router may ask for in its Welcome.
    `round_trip_s` returns the measured round trip to the router. The node calls `take([])` at least every second, so
    that the session keeps its deadlines.
    """

    def __init__(
        self,
        hello: Hello,
        send: Callable[[ToRouter, int], bool],
        tokenizer: Callable[[], TokenizerFile],
        clock: Callable[[], float] = time.monotonic,
        round_trip_s: Callable[[], float] = float,
        cut_s: Callable[[], float] = float,
    ) -> None:
        """`cut_s`: returns for how long the connection has been gone, as `Link.cut_s`."""
        self._cut_s = cut_s
        self._round_trip_s = round_trip_s
        self._hello = hello
        self._send = send
        self._tokenizer = tokenizer
        self._clock = clock
        self._router_epoch: str | None = None
        self._is_joined = False
        self._heard_at = clock()
        self._hello_at = -math.inf
        self._is_hello_due = False
        self._hello_protocol = hello.protocol_min  # of the last Hello
        self.protocol = hello.protocol_min  # the router is addressed in it
        self.ignored = 0  # how much work came from a router that had not welcomed this node

    @property
    def router_epoch(self) -> str | None:
        """The epoch of the router in view; None if there is none."""
        return self._router_epoch

    @property
    def is_joined(self) -> bool:
        """True between Welcome and the end of that router, as far as this node knows."""
        return self._is_joined

    def start(self) -> None:
        """Say Hello. The message waits in the link until a router is there."""
        self._say_hello(self._hello.protocol_min)

    def remember(self, proven: tuple[str, ...]) -> None:
        """Say in the next Hello with which nodes this one works, as the last Proven of any router says."""
        self._hello = msgspec.structs.replace(self._hello, proven=proven)

    def take(self, messages: Iterable[ToNode]) -> list[RouterWork | SessionEvent]:
        """Return what the node has to do after these messages, in order: events of the session, and the router's
        work."""
        todo: list[RouterWork | SessionEvent] = []
        for message in messages:
            self._take(message, todo)
        now = self._clock()
        silence_s = now - self._heard_at
        if silence_s > PROVEN_S:
            self.remember(())
        is_cut = self._cut_s() > CUT_S
        if self._router_epoch is not None and (silence_s > self._limit_s or is_cut):
            more = ", and its connection is closed" if is_cut else ""
            logger.warning("no message from the router for %.1f s%s", silence_s, more)
            self._router_epoch = None
            self._part()
            todo.append(RouterLost(silence_s))
        elif self._is_hello_due or (self._is_unanswered and now - self._hello_at > WELCOME_TIMEOUT_S):
            self._say_hello(self._hello_protocol if self._is_hello_due else self._hello.protocol_min)
        return todo

    @property
    def _limit_s(self) -> float:
        """How long the router may be silent."""
        return time_limit_s(ROUTER_SILENCE_S, self._round_trip_s())

    @property
    def _is_unanswered(self) -> bool:
        return self._router_epoch is not None and not self._is_joined

    def _take(self, message: ToNode, todo: list[RouterWork | SessionEvent]) -> None:
        self._heard_at = self._clock()
        if message.router_epoch != self._router_epoch:
            self._meet(message, todo)
        if isinstance(message, Welcome):
            self._join(message, todo)
        elif isinstance(message, Refusal):
            todo.append(RouterRefused(message.reason))
        elif isinstance(message, HelloAgain):
            self._rejoin(message, todo)
        elif isinstance(message, RouterHeartbeat):
            pass  # it only proves that the router lives
        elif not self._is_joined:
            self.ignored += 1
        else:
            todo.append(message)

    def _meet(self, message: ToNode, todo: list[RouterWork | SessionEvent]) -> None:
        """Handle the first message of a router of another epoch, or of the first router."""
        self._router_epoch = message.router_epoch
        if self._is_joined:
            self._abandon(todo, "the router is another one now")
        if not isinstance(message, Welcome | Refusal | HelloAgain):  # these answer a Hello, or ask for one
            self._say_hello_again(self._hello.protocol_min)

    def _join(self, message: Welcome, todo: list[RouterWork | SessionEvent]) -> None:
        if self._is_joined:
            self._abandon(todo, "the router welcomed this node afresh")
        self.protocol = self._known(message.protocol)
        logger.info("joined router %s, protocol %d", message.router_epoch, self.protocol)
        if message.notice:
            logger.warning("the router says: %s", message.notice)
        self._is_joined = True
        if self.protocol < Proven.since:
            self.remember(())  # this router will not say when a pair is no longer right
        todo.append(Joined(message.router_epoch, self.protocol, message.page_key))
        if message.need_tokenizer:
            self._send(self._tokenizer(), self.protocol)

    def _rejoin(self, message: HelloAgain, todo: list[RouterWork | SessionEvent]) -> None:
        if self._is_joined:
            self._abandon(todo, "the router has forgotten this node")
        protocol = self._known(message.protocol)
        if protocol > self._hello_protocol:  # the router has the Hello, and wants its newer fields
            self._say_hello(protocol)
        else:
            self._say_hello_again(protocol)

    def _abandon(self, todo: list[RouterWork | SessionEvent], why: str) -> None:
        logger.warning("%s: freeing all its requests", why)
        self._part()
        self._hello_at = -math.inf
        todo.append(RouterChanged(self._router_epoch or ""))

    def _part(self) -> None:
        """End the membership. The next router may be an older version, so it is addressed in the oldest protocol."""
        self._is_joined = False
        self.protocol = self._hello.protocol_min

    def _known(self, protocol: int) -> int:
        return min(max(self._hello.protocol_min, protocol), self._hello.protocol_max)

    def _say_hello_again(self, protocol: int) -> None:
        if self._clock() - self._hello_at >= HELLO_INTERVAL_S:
            self._say_hello(protocol)

    def _say_hello(self, protocol: int) -> None:
        self._hello_protocol = protocol
        self._is_hello_due = not self._send(msgspec.structs.replace(self._hello, protocol=protocol), protocol)
        self._hello_at = self._clock()

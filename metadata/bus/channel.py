"""A node's channel to one router: the connection, the heartbeat and the session with it. A node has one per router.

router --Link--> RouterSession --> work, Joined, RouterGone, TurnedAway
node   --------> Link, in the protocol of the session          HeartbeatThread --> router
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..cache.changes import CacheNews
from ..wire.membership import Hello, TokenizerFile
from ..wire.messages import ToRouter
from ..wire.node_info import Load
from ..wire.protocol import Message
from .curve import KeyPair
from .link import Link, Outlook
from .liveness import HeartbeatThread
from .session import Joined, RouterChanged, RouterLost, RouterRefused, RouterSession, RouterWork
from .sockets import HANDSHAKE_MS

logger = logging.getLogger(__name__)

UNWELCOME_LOG_S = (
    10.0  # after which a node that a router has not welcomed logs that; then after twice as long, and so on
)
MAX_UNWELCOME_LOG_S = 240.0  # between two such lines at most


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The router of this epoch, which gave this node work, is lost or was replaced. The node must free all of that
    work."""

    router: str
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The router refuses this node. `reason` says why."""

    reason: str


ChannelEvent = RouterWork | Joined | RouterGone | TurnedAway


class RouterChannel:
    """The channel to the router at one address. Used by the node's main thread. The caller closes it. Raises
    ConfigError as Link does."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        tokenizer: Callable[[], TokenizerFile],
        keys: KeyPair | None,
        load: Load,
        rank_silences_s: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        """`rank_silences_s`: as of `HeartbeatThread`."""
        self.address = address
        self.link = Link(address, hello.node_id, hello.epoch, keys)
        try:
            self.heartbeat = HeartbeatThread(
                address,
                hello.node_id,
                hello.epoch,
                keys,
                load=load,
                rank_silences_s=rank_silences_s,
                router_key=self.link.router_key,
            )
        except BaseException:
            self.link.close()
            raise
        self.session = RouterSession(
            hello,
            self.link.send,
            tokenizer,
            round_trip_s=lambda: self.heartbeat.round_trip_s,
            cut_s=lambda: self.link.cut_s,
        )
        self.news = CacheNews(lambda news: self.link.send(news, self.session.protocol))
        self._node_id, self._keys = hello.node_id, keys
        self._num_welcomes = 0
        self._welcomed_by: str | None = None
        self._seen_at = self._unwelcome_at = time.monotonic()
        self._unwelcome_log_s = UNWELCOME_LOG_S

    @property
    def away_s(self) -> float:
        """For how long no router has been in view here, as of the last `receive`."""
        return time.monotonic() - self._seen_at

    @property
    def is_unheard(self) -> bool:
        """Whether a connection stands by which nothing has come. ZeroMQ leaves one so if a later connection to the same
        router takes over the node's routing id."""
        return self.session.router_epoch is None and self.link.outlook == "connected"

    @property
    def router(self) -> str | None:
        """The epoch of the router that has welcomed this node and is there; None: there is none."""
        return self._welcomed_by

    def knows(self, kind: type[Message]) -> bool:
        """Whether a message of this type can be sent to, or come from, the router."""
        return kind.since <= self.session.protocol

    def start(self) -> None:
        """Say Hello and start the heartbeat."""
        logger.info("looking for the router at %s", self.address)
        self.session.start()
        self.heartbeat.start()

    def receive(self) -> list[ChannelEvent]:
        """Return what has come from the router since the last call, in order."""
        events: list[ChannelEvent] = []
        messages = self.link.receive()
        if self.link.is_anew:
            self.session.start()
        for item in self.session.take(messages):
            match item:
                case Joined(router_epoch=epoch):
                    self._num_welcomes += 1
                    self._welcomed_by = epoch
                    events.append(item)
                case RouterChanged(router_epoch=epoch):
                    self._part(f"the router is another one now ({epoch})", events)
                case RouterLost(silence_s=silence_s):
                    self._part(f"no message from the router for {silence_s:.1f} s", events)
                case RouterRefused(reason=reason):
                    events.append(TurnedAway(reason))
                case _:
                    events.append(item)
        if self.session.router_epoch is not None:
            self._seen_at = time.monotonic()
        self.heartbeat.speak(self.session.protocol, self._num_welcomes)
        return events

    def send(self, message: ToRouter) -> None:
        """Send a message to the router; never wait. If the queue is full the message is lost, and the router asks again
        (Resend). A message that the next router may not know is not sent while no router has welcomed the node."""
        session = self.session
        if message.since > session.protocol and not session.is_joined:
            return
        if not self.link.send(message, session.protocol) and session.is_joined:
            logger.warning("the queue to the router is full: lost a %s", type(message).__name__)

    def unwelcome_words(self) -> str | None:
        """Return a sentence if no router has welcomed this node here for a while, and it is time to say so; else
        None."""
        now = time.monotonic()
        if self.session.is_joined:
            self._unwelcome_at, self._unwelcome_log_s = now, UNWELCOME_LOG_S
        elif now - self._unwelcome_at >= self._unwelcome_log_s:
            self._unwelcome_at = now
            self._unwelcome_log_s = min(2 * self._unwelcome_log_s, MAX_UNWELCOME_LOG_S)
            return f"no router has welcomed this node at {self.address}: {self._why_unwelcome()}"
        return None

    def close(self, linger_ms: int = 0) -> None:
        """Close the connections. Messages that are queued have `linger_ms` to leave."""
        self.news.end()
        self.heartbeat.close()
        self.link.socket.linger = linger_ms
        self.link.close()

    def _part(self, reason: str, events: list[ChannelEvent]) -> None:
        self.news.end()
        if self._welcomed_by is not None:
            events.append(RouterGone(self._welcomed_by, reason))
        self._welcomed_by = None

    def _why_unwelcome(self) -> str:
        """Return why a router has not welcomed this node. A router of an earlier release does not always answer a key
        that its allow-list lacks, so such a handshake looks like a slow one."""
        is_listed = self._keys is not None and self._keys.allow_list is not None
        return why_unwelcome(self.link.outlook, self._key_advice(), is_listed=is_listed)

    def _key_advice(self) -> str:
        """Return what to look at if the router refuses this node's key."""
        if self._keys is None:
            return "does the router there run with --keys? Then this node needs the same file"
        if self._keys.allow_list is None:
            return "does the router there have the same --keys?"
        line, names = f"{self._node_id} {self._keys.public.decode()}", self._keys.allow_list.router_names
        has = f"the key of {names[0]}" if len(names) == 1 else f"one of the keys of {', '.join(names)}"
        return (
            f"has the router {has} in allow-list {self._keys.allow_list.path}, and does its own --allow-list say "
            f"`{line}`?"
        )


def why_unwelcome(outlook: Outlook, key_advice: str, *, is_listed: bool) -> str:
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

"""A prefill node's port for pages: sealed messages between two processes that have a data link under CURVE.

The prefill node grants each link that needs it one connection, and puts name, password and keys into its welcome. The
decode node then sends its pulls here, and the pages come back in their order. sealing.py has the messages.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import zmq

from ..bus.addresses import page_port_of, parse_address
from ..bus.connections import PortWatch
from ..bus.descriptors import NodePort, limit_of_descriptors
from ..bus.sockets import bound_address, receive_frames, send_frames, sender_key
from ..errors import ProtocolError, StaleMessage
from ..wire.data_link import LinkWelcome, PagePortWelcome, Pages, Pull
from ..wire.frames import decode_frame, encode
from .data_socket import bind_page_socket
from .sealing import KEY_BYTES, Opener, Sealer

logger = logging.getLogger(__name__)

_PULL_FRAME_BYTES = 64 << 10
_pull_decoder = msgspec.msgpack.Decoder(Pull)


class PageGrant:
    """The right of one link to pull pages at the port, over one connection. `is_plain`: the pages are authenticated,
    and readable on the network."""

    def __init__(self, port: int, *, is_plain: bool) -> None:
        self.guest, self.password = secrets.token_hex(16), secrets.token_hex(16)
        self._port, self._keys = port, (secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES))
        self.opener, self.sealer = Opener(self._keys[0]), Sealer(self._keys[1], is_plain=is_plain)
        self.holder = b""  # the link that has it
        self.is_used = False  # a connection has been made with it
        self.route: bytes | None = None  # the connection of the last valid pull

    def welcome(self, welcome: LinkWelcome) -> PagePortWelcome:
        """Return the welcome with what the decode node needs to connect. It must be sent under CURVE."""
        pull_key, page_key = self._keys
        return PagePortWelcome(
            **msgspec.structs.asdict(welcome),
            port=self._port,
            guest=self.guest,
            password=self.password,
            pull_key=pull_key,
            page_key=page_key,
        )


class PagePort:
    """The socket of the port. A grant ends when its owner drops it. The owner of the port calls `close`."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Raises zmq.ZMQError if `address` cannot be bound."""
        self._grants: WeakValueDictionary[bytes, PageGrant] = WeakValueDictionary()  # by guest
        self.socket = bind_page_socket(address, self, _PULL_FRAME_BYTES, context)
        self._watch = PortWatch(self.socket, NodePort(limit_of_descriptors()))
        self.number = parse_address(bound_address(self.socket)).port or 0

    @classmethod
    def beside(cls, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> PagePort | None:
        """Return the port of a node that was told to listen at `address` for data links; None, with a warning, if it
        can have none."""
        own = page_port_of(address)
        if own is None:
            return None
        try:
            return cls(own, context)
        except zmq.ZMQError as error:
            logger.warning("no port for pages at %s (%s): pages go under CURVE, more slowly", own, error.strerror)
            return None

    def grant(self, *, is_plain: bool) -> PageGrant:
        """Return a new grant."""
        grant = PageGrant(self.number, is_plain=is_plain)
        self._grants[grant.guest.encode()] = grant
        return grant

    def admits(self, name: bytes, password: bytes) -> bool:
        """Return whether a guest may connect, and use up the grant."""
        grant = self._grants.get(name)
        if grant is None or grant.is_used or not hmac.compare_digest(grant.password.encode(), password):
            return False
        grant.is_used = True
        return True

    def receive(self) -> tuple[PageGrant, Pull]:
        """Return the next pull, and the grant under which it was sent. Raises zmq.Again if no message waits, and
        ProtocolError if it is not a pull of a link that is still open."""
        sender, *bodies = receive_frames(self.socket, 2, least=2, copy=False)
        grant = self._grants.get(sender_key(bodies[0]))
        if grant is None:
            raise StaleMessage("a pull on a link that is over")
        if len(bodies) != 1:
            raise ProtocolError(f"a sealed pull of {len(bodies)} frames, not 1")
        pull = decode_frame(_pull_decoder, grant.opener.open(bodies[0].bytes).header)
        self._watch.know(int(bodies[0].get(zmq.SRCFD)))
        grant.route = sender.bytes
        return grant, pull

    def send(self, grant: PageGrant, message: Pages, data: Any, protocol: int) -> zmq.MessageTracker:
        """Send pages to the sender of the last pull, in `protocol`. `data` is their bytes, as a buffer that must not
        change before the tracker says that it was sent. Raises zmq.ZMQError if the connection is gone."""
        assert grant.route is not None, message.unit
        tracker = send_frames(self.socket, grant.route, *grant.sealer.seal(encode(message, protocol), data), track=True)
        assert tracker is not None
        return tracker

    def close(self) -> None:
        """Close the socket."""
        self._watch.close()
        self.socket.close(linger=0)

"""Hostile bytes on the TCP ports, below ZeroMQ's messages, where libzmq reads them; and at the page port, hostile
messages of a decode node that was let in."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import Any

import zmq
from fuzz_frames import hostile_frame, noise
from fuzz_targets import Target
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, unit
from samples import make_sample

from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.data_link import Pages, Pull

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_EVERY = 20  # inputs between two honest transfers


class SocketTarget(Target):
    """A handoff server that listens on loopback. Now and then it must serve an honest decode node."""

    name = "TCP port"

    def __init__(self) -> None:
        super().__init__()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server, self.source = make_server(context=self.context)
        host, port = self.server.address.removeprefix("tcp://").split(":")
        self.address = (host, int(port))
        self.number = 0

    def feed(self, rng: random.Random) -> None:
        with socket.create_connection(self.address) as peer, contextlib.suppress(OSError):
            peer.sendall(self._bytes(rng))
        self.server.poll()
        self.number += 1
        if self.number % _EVERY == 0:
            self._serve_honest()

    def close(self) -> None:
        self._serve_honest()
        for node in (self.server, *self.source):
            node.close()
        self.context.destroy(linger=0)

    def _bytes(self, rng: random.Random) -> bytes:
        """Return noise, or ZMTP 3.0 that goes wrong in the greeting, the handshake, or a frame's length."""
        if rng.random() < 0.2:
            return rng.choice([noise(rng), b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * rng.randint(1, 64)])
        frame = rng.choice([b"\x00\x04junk", b"\x01\x00" * 50 + b"\x00\x00", b"\x02" + b"\x7f" * 8, noise(rng)])
        data = bytearray(_GREETING + _READY + frame)
        for _ in range(rng.choice([0, 1, 3])):
            data[rng.randint(0, len(data) - 1)] ^= 1 << rng.randint(0, 7)
        return bytes(data[: rng.choice([len(data), rng.randint(0, len(data))])])

    def _serve_honest(self) -> None:
        client, target = make_client(context=self.context)
        self._serve(client)
        for node in (client, *target):
            node.close()

    def _serve(self, client: Any) -> None:
        """Hand one page over to an honest decode node."""
        ticket = unit(f"h{self.number}")
        self.server.open(ticket, 1)
        self.server.offer(ticket, [0], [5], [1])
        self.server.finish(ticket, make_row(SCHEMA))
        client.claim(ticket, peer_of(self.server), 0, [3])
        events: list[Any] = []
        deadline = time.monotonic() + 10
        while not (named(events, Arrived) and named(events, TicketEnded)):
            events += [*client.poll(), *self.server.poll()]
            assert time.monotonic() < deadline, events
        self.num_accepted += 1


class PagePortTarget(SocketTarget):
    """A page port. It takes noise of strangers, and unsealed, wrongly sealed and hostile messages of a decode node that
    is let in. The same node must be served now and then."""

    name = "page port"

    def __init__(self) -> None:
        Target.__init__(self)
        self.context = zmq.Context()
        shared: dict[str, Any] = {"context": self.context, "keys": KeyPair.generate(), "transports": ("aes",)}
        self.server, self.source = make_server(**shared)
        self.client, self.target = make_client(**shared)
        port = self.server._links._port
        assert port is not None
        self.address = ("127.0.0.1", port.number)
        self.number = 0
        self._serve_honest()

    def feed(self, rng: random.Random) -> None:
        transport: Any = self.client._links.by_epoch[self.server.end.epoch].transport
        message = hostile_frame(rng, make_sample(rng.choice([Pull, Pages]), rng))
        sealed = transport._sealer.seal(message)
        match rng.randrange(4):
            case 0:
                super().feed(rng)
                return
            case 1:
                transport._socket.send_multipart([noise(rng) for _ in range(rng.choice([1, 2]))])
            case 2:
                transport._socket.send_multipart(sealed * rng.choice([1, 2]))
            case _:
                transport._socket.send_multipart([bytes(sealed[0][: rng.randint(0, len(sealed[0]))])])
        self.server.poll()
        self.number += 1
        if self.number % _EVERY == 0:
            self._serve_honest()

    def close(self) -> None:
        for node in (self.client, *self.target):
            node.close()
        for node in (self.server, *self.source):
            node.close()
        self.context.destroy(linger=0)

    def _serve_honest(self) -> None:
        self._serve(self.client)

"""Hostile bytes on the TCP ports, below ZeroMQ's messages, where libzmq reads them."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import Any

import zmq
from fuzz_frames import noise
from fuzz_targets import Target
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, unit

from baton.metadata.handoff.tickets import TicketEnded
from baton.metadata.handoff.transfer import Arrived

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
        ticket = unit(f"h{self.number}")
        client, target = make_client(context=self.context)
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
        for node in (client, *target):
            node.close()

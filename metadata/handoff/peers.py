"""What a handoff server knows of decode nodes: the socket they come to, their open links, who can hand over at all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import zmq

from ..bus.addresses import any_port_of, host_identity, parse_address, require_keys
from ..bus.curve import KeyPair, secure_server
from ..bus.sockets import configure_socket
from ..errors import ConfigError
from ..wire.messages import CudaWelcome, LinkHello, LinkWelcome, ToDecode
from ..wire.node_info import HandoffSchema
from ..wire.protocol import PROTOCOL_MIN, encode, known
from .schema import differences

LINK_BEAT_MS = 200  # libzmq's own heartbeat: it notices a stopped host or process, not a hanging loop
LINK_SILENCE_MS = 1000
CONTROL_FRAME_BYTES = 8 << 20
_SAME_HOST = ("cuda", "local")  # they read the peer's memory


@dataclass(slots=True)
class DecodePeer:
    """The other end of an open link. `unsent` are messages of pages that wait for the wire."""

    node_id: str
    epoch: str
    transport: str
    protocol: int  # in which it is addressed
    greeting: tuple[LinkHello, LinkWelcome] | None = None  # its last hello, and the answer
    unsent: list[zmq.MessageTracker] = field(default_factory=list[zmq.MessageTracker])

    @property
    def num_unsent(self) -> int:
        self.unsent = [tracker for tracker in self.unsent if not tracker.done]
        return len(self.unsent)


def objections(
    schema: HandoffSchema, fingerprints: tuple[str, str | None], transports: Collection[str], hello: LinkHello
) -> list[str]:
    """Why the two nodes cannot hand over, naming both values ("here" is the prefill node); empty when they can."""
    reasons = differences(schema, hello.layout)
    theirs = (hello.target_fingerprint, hello.draft_fingerprint)
    for name, here, there in zip(("target", "draft"), fingerprints, theirs, strict=True):
        if here != there:
            reasons.append(f"{name} weights: {here} here, {there} there")
    if not any(can_use(name, transports, hello) for name in hello.transports):
        hosts = "same host" if hello.host == host_identity() else "another host"
        reasons.append(f"transports: {', '.join(transports)} here, {', '.join(hello.transports)} there ({hosts})")
    return reasons


def can_use(transport: str, transports: Collection[str], hello: LinkHello) -> bool:
    """Return whether pages can travel by `transport`, if it is one of ours, to the decode node that says this hello."""
    if transport == "cuda" and (not hello.inbox or known(hello.protocol) < CudaWelcome.since):
        return False
    return transport in transports and (transport not in _SAME_HOST or hello.host == host_identity())


def frame_for(peer: DecodePeer | None, message: ToDecode) -> bytes:
    """The message in a protocol that the decode node understands; None: nothing is known of it."""
    return encode(message, PROTOCOL_MIN if peer is None else peer.protocol)


def bind_data_socket(
    bind_host: str, keys: KeyPair | None, context: zmq.Context[zmq.Socket[bytes]] | None
) -> zmq.Socket[bytes]:
    """A ROUTER socket that listens on any free port of `bind_host`. Raises ConfigError for a host that is none of this
    machine's, or that others can reach while there are no keys. The caller closes the socket."""
    address = any_port_of(bind_host)
    require_keys(address, keys)
    parse_address(address)
    socket = (zmq.Context[zmq.Socket[bytes]].instance() if context is None else context).socket(zmq.ROUTER)
    configure_socket(socket, address, max_frame=CONTROL_FRAME_BYTES)
    socket.set(zmq.HEARTBEAT_IVL, LINK_BEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, LINK_SILENCE_MS)
    socket.router_mandatory = True
    if keys is not None:
        secure_server(socket, keys)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot serve pages on {address}: {error.strerror}") from error
    return socket

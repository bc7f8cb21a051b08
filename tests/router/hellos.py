"""Hellos of nodes without a process, and a registry that they join without sockets."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity, Load, ModelCard, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.router.nodes.node import Node
from baton.router.nodes.registry import Registry

from .fake_nodes import make_layout

BEAT = m.Heartbeat(1, "idle", 0.0, 10.0, Load(free_pages=8, running=0, waiting=0), NodeStats())


def make_hello(
    role: str = "decode",
    name: str = "d0",
    *,
    epoch: str = "e",
    model: str = "fake",
    tokenizer: str = "a" * 16,
    **changes: Any,
) -> m.Hello:
    """Return the Hello of a small node that serves a model with a tokenizer (digest). `changes` replace its fields."""
    hello = m.Hello(
        role=role,  # type: ignore[arg-type]
        node_id=name,
        epoch=epoch,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        layout=make_layout(),
        target_fingerprint="f" * 16,
        draft_fingerprint=None,
        model=ModelCard(model, 512, 1000, (), None, tokenizer, None),
        capacity=Capacity(num_pages=8, page_size=16, max_running=4),
        data_address="",
        protocol=PROTOCOL_MAX,
    )
    return msgspec.structs.replace(hello, **changes)


class ClockedRegistry:
    """A registry without sockets. It records sent messages, joins and losses, and its clock is turned by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: defaultdict[bytes, list[m.ToNode]] = defaultdict(list)
        self.protocols: defaultdict[bytes, list[int]] = defaultdict(list)  # of the messages sent
        self.joined: list[Node] = []
        self.lost: list[tuple[Node, str]] = []
        self.registry = Registry("r" * 16, self._send, self.joined.append, lambda *what: self.lost.append(what))

    @property
    def joined_epochs(self) -> list[str]:
        return [node.hello.epoch for node in self.joined]

    def hello(self, epoch: str = "e", name: str = "d0", role: str = "decode", **changes: Any) -> bytes:
        """Let a node say Hello; return its routing id."""
        peer = f"{name}:{epoch}".encode()
        self.registry.hello(peer, make_hello(role, name, epoch=epoch, **changes), self.now)
        return peer

    def join(self, epoch: str = "e", name: str = "d0", role: str = "decode", **changes: Any) -> Node:
        """Let a node say Hello and return it; it must be welcomed."""
        return self.registry.nodes[self.hello(epoch, name, role, **changes)]

    def after(self, seconds: float, *beating: bytes) -> None:
        """Let time pass in which these nodes send heartbeats."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for peer in beating:
                self.registry.beat(self.registry.nodes[peer], BEAT, self.now)
            self.registry.check(self.now)

    def answers(self, peer: bytes) -> list[type]:
        """Return the types of the messages that a node received."""
        return [type(message) for message in self.sent[peer]]

    def refusal(self, peer: bytes) -> str:
        """Return the reason of the only message that a node received, a Refusal."""
        (message,) = self.sent[peer]
        assert isinstance(message, m.Refusal), message
        return message.reason

    def _send(self, peer: bytes, message: m.ToNode, protocol: int) -> bool:
        self.sent[peer].append(message)
        self.protocols[peer].append(protocol)
        return True

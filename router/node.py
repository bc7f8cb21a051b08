"""Nodes as the router sees them, and the groups in which they can be paired.

A group is the nodes that can hand requests over to each other: equal handoff schema, weights, model name and
tokenizer. Several groups can serve one model; a request never moves between groups. Within a group a prefill and a
decode node make a pair when a protocol version exists that both and the router know, so that versions can be upgraded
one node at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..metadata.bus.sockets import routing_id
from ..metadata.wire.messages import Heartbeat, Hello
from ..metadata.wire.node_info import Load, ModelCard, NodeStats, Peer, Role
from ..metadata.wire.protocol import PROTOCOL_MIN, Message, agreed
from ..metadata.wire.request import Unit
from .text.tokenizer import ChatTemplate, TextTokenizer

if TYPE_CHECKING:
    from .cancels import Unacked

ROLES: tuple[Role, ...] = ("prefill", "decode")


class GroupKey(NamedTuple):
    """What nodes must agree on to be paired."""

    schema_digest: str
    target: str
    draft: str | None
    model: str
    tokenizer: str


class Node:
    """One life (epoch) of a prefill or decode node, as the router sees it."""

    __slots__ = (
        "beat",
        "evict_at",
        "full_since",
        "group",
        "hello",
        "is_cordoned",
        "is_leaving",
        "is_reachable",
        "last_seen",
        "load",
        "pledged_pages",
        "prefilling",
        "protocol",
        "refused_at_free",
        "routing_id",
        "unacked",
        "units",
        "welcomed_at",
    )

    def __init__(self, hello: Hello, group: Group, now: float) -> None:
        self.routing_id = routing_id(hello.node_id, hello.epoch)
        self.hello = hello
        self.protocol = agreed(hello.protocols) or PROTOCOL_MIN  # in which it is addressed
        self.group = group
        self.load = Load(free_pages=hello.capacity.num_pages, running=0, waiting=0)
        self.beat: Heartbeat | None = None
        self.last_seen = self.welcomed_at = now
        self.is_leaving = False  # by its own word
        self.is_cordoned = False  # drained by an operator
        self.evict_at: float | None = None  # what it holds then moves elsewhere
        self.is_reachable = True  # False between a message that could not be sent and the next beat
        # What the router has given it since, or is giving it now
        self.prefilling: dict[tuple[str, int], int] = {}  # (rid, attempt) -> prompt tokens expected to be computed
        self.units: set[Unit] = set()  # decode: reserved or running
        self.pledged_pages = 0  # decode: reserved by requests whose answer is not here yet
        self.full_since: float | None = None  # decode: it refused, and has not shown more room since
        self.refused_at_free = 0
        self.unacked: dict[tuple[str, int], Unacked] = {}  # Cancels sent, by (rid, attempt)

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def is_draining(self) -> bool:
        """It takes nothing new."""
        return self.is_leaving or self.is_cordoned

    def shares_protocol(self, other: Hello) -> bool:
        """Whether a protocol version exists that it, the other node and the router know."""
        return agreed(self.hello.protocols, other.protocols) is not None

    def knows(self, kind: type[Message]) -> bool:
        """Whether a message of this type can be sent to it."""
        return kind.since <= self.protocol

    def peer_of(self, other: Node) -> Peer:
        """How the other node, its counterpart, addresses it."""
        protocol = agreed(self.hello.protocols, other.hello.protocols) or 0
        hello = self.hello
        return Peer(node_id=hello.node_id, epoch=hello.epoch, data_address=hello.data_address, protocol=protocol)

    @property
    def stats(self) -> NodeStats:
        return self.beat.stats if self.beat is not None else NodeStats()

    def set_load(self, load: Load) -> None:
        """New figures from the node itself; they may lift "full"."""
        self.load = load
        if self.full_since is not None and (load.free_pages > self.refused_at_free or load.running == 0):
            self.full_since = None

    def mark_full(self, now: float) -> None:
        """It refused a reservation: do not ask again before it shows more room, or a while has passed."""
        self.full_since = now
        self.refused_at_free = self.load.free_pages


class Group:
    """Nodes that can be paired with each other, and what serving their model takes."""

    def __init__(self, key: GroupKey, hello: Hello) -> None:
        self.key = key
        self.card: ModelCard = hello.model
        self.layout = hello.layout
        self.nodes: dict[bytes, Node] = {}
        self.tokenizer: TextTokenizer | None = None
        self.has_bad_tokenizer = False  # one came that cannot be read
        self.template: ChatTemplate | None = ChatTemplate.of(hello.model)
        self.created = int(time.time())

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def live(self, role: Role) -> list[Node]:
        """Nodes of a role that take new work."""
        return [
            node for node in self.nodes.values() if node.role == role and not node.is_draining and node.is_reachable
        ]

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Prefill and decode nodes that take new work and know a common protocol."""
        for prefill in self.live("prefill"):
            for decode in self.live("decode"):
                if prefill.shares_protocol(decode.hello):
                    yield prefill, decode

    @property
    def is_paired(self) -> bool:
        """There is a pair of nodes, and text can become ids."""
        return self.tokenizer is not None and any(True for _ in self.pairs())

    @property
    def context_len(self) -> int:
        """Tokens of prompt plus output that every node of the group takes."""
        return min((node.hello.model.context_len for node in self.nodes.values()), default=self.card.context_len)

    def most_pages(self, role: Role) -> int:
        """Pages of the largest pool of a role."""
        return max((node.hello.capacity.num_pages for node in self.live(role)), default=0)

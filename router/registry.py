"""Who is there: nodes, and the groups in which they can be paired.

A group is the nodes that can hand requests over to each other: equal handoff schema, weights, model name and
tokenizer. Several groups can serve one model; a request never moves between groups. Within a group a prefill and a
decode node make a pair when a protocol version exists that both and the router know, so that versions can be upgraded
one node at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..metadata import schema
from ..metadata.bus import routing_id
from ..metadata.errors import ProtocolError
from ..metadata.hello import apart
from ..metadata.liveness import Change, PeerLiveness
from ..metadata.logs import Throttle
from ..metadata.messages import (
    Beat,
    Hello,
    HelloAgain,
    Leaving,
    Refusal,
    TokenizerFile,
    ToNode,
    Welcome,
)
from ..metadata.node_info import Load, ModelCard, NodeStats, Peer, Role
from ..metadata.protocol import PROTOCOL_MIN, Message, agreed, is_newer
from ..metadata.request import Unit
from .comings import LOSS_WORDS, Comings, Loss
from .mismatch import loneliness, misfit
from .newcomers import SILENCE_S, Newcomers, Obstacle, taken
from .tokenizer import ChatTemplate, TextTokenizer

if TYPE_CHECKING:
    from .cancels import Unacked

logger = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_EMPTY_GROUPS = 16  # without nodes, kept for those that come back
MAX_LINES = 32  # logged in a second of nodes that come and go
TOKENIZER_S = 5.0  # a tokenizer that has not come for so long is asked for again


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
        self.beat: Beat | None = None
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


class Registry:
    """All nodes and groups. Talks to nodes through `send`; tells of joined and lost nodes through callbacks."""

    def __init__(
        self,
        epoch: str,
        send: Callable[[bytes, ToNode, int], bool],
        on_joined: Callable[[Node], None],
        on_lost: Callable[[Node, str], None],
    ) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.comings = Comings()
        self._tokenizers: dict[str, TextTokenizer] = {}
        self._liveness: PeerLiveness[bytes] = PeerLiveness()
        self._newcomers = Newcomers()
        self._lines = Throttle(most=MAX_LINES)
        self._epoch = epoch
        self._send = send
        self._on_joined = on_joined
        self._on_lost = on_lost

    def greet_again(self, peer: bytes) -> None:
        """Answers a peer that is not known."""
        if peer not in self._newcomers:
            self._send(peer, HelloAgain(router_epoch=self._epoch), PROTOCOL_MIN)

    def hello(self, peer: bytes, hello: Hello, now: float) -> None:
        """A node introduces itself: it is let in, or refused with both sides' values; not at once where who is in its
        way may be dead."""
        known = self.nodes.get(peer)
        if known is not None:
            self.lose(known, "anew")
        protocol = agreed(hello.protocols)
        if protocol is not None and is_newer(Hello, max(PROTOCOL_MIN, hello.protocol), protocol):
            self._send(peer, HelloAgain(router_epoch=self._epoch, protocol=protocol), protocol)
            return
        obstacle = self._obstacle(hello, now)
        if obstacle is not None and self._newcomers.waits(peer, hello, obstacle.heard_at, now):
            return
        self._newcomers.remove(peer)
        if obstacle is not None:
            self._refuse(peer, hello, obstacle.reason)
            return
        try:
            node = self._admit(hello, now)
        except ProtocolError as error:
            self._refuse(peer, hello, str(error))
            return
        notice = loneliness(node, self.nodes.values()) or ""
        self._log(
            logging.INFO,
            "node %s (%s) joined: model %s, %d pages, %s",
            node.node_id,
            node.role,
            hello.model.name,
            hello.capacity.num_pages,
            schema.describe(hello.layout),
        )
        if notice:
            self._log(logging.WARNING, "node %s: %s", node.node_id, notice)
        self._welcome(node, now, notice)
        self._on_joined(node)

    def _welcome(self, node: Node, now: float, notice: str = "") -> None:
        node.welcomed_at = now
        self._send(
            node.routing_id,
            Welcome(
                router_epoch=self._epoch,
                protocol=node.protocol,
                need_tokenizer=node.group.tokenizer is None,
                notice=notice,
            ),
            node.protocol,
        )

    def take_tokenizer(self, node: Node, file: TokenizerFile) -> None:
        """A node sent its tokenizer. Raises ProtocolError when it is not the one it spoke of, or cannot be read."""
        digest = node.group.key.tokenizer
        if file.digest != digest:
            raise ProtocolError(f"node {node.node_id} sent tokenizer {file.digest}, not {digest}", node=node.node_id)
        if digest not in self._tokenizers:
            node.group.has_bad_tokenizer = True  # until it is known to be good
            self._tokenizers[digest] = TextTokenizer.from_compressed(file.data, digest)
            node.group.has_bad_tokenizer = False
        for group in self.groups.values():
            if group.key.tokenizer == digest and group.tokenizer is None:
                group.tokenizer = self._tokenizers[digest]

    def beat(self, node: Node, beat: Beat, now: float) -> None:
        """A heartbeat. A node that says it is stuck is given up; it comes back with a new Hello when it moves again."""
        node.last_seen = now
        node.is_reachable = True
        node.beat = beat
        node.set_load(beat.load)
        is_lacking = node.group.tokenizer is None and not node.group.has_bad_tokenizer
        if is_lacking and now - node.welcomed_at > TOKENIZER_S:  # it was lost
            self._welcome(node, now)
        self._apply(self._liveness.hear(node.routing_id, beat))

    def leaving(self, node: Node, message: Leaving) -> None:
        """A node drains, or goes."""
        node.is_leaving = True
        if message.done:
            self.lose(node, None)
        else:
            self._log(logging.INFO, "node %s (%s) drains", node.node_id, node.role)

    def lose(self, node: Node, loss: Loss | None, reason: str | None = None) -> None:
        """A node is gone, by its own word if `loss` is None; what it held is moved by whom `on_lost` tells."""
        if self.nodes.pop(node.routing_id, None) is None:
            return
        reason = reason or (LOSS_WORDS[loss] if loss is not None else "it left")
        self.comings.gone(node, None if node.is_leaving else loss, time.monotonic())
        del node.group.nodes[node.routing_id]
        self._liveness.remove(node.routing_id)
        node.is_leaving = True
        level = logging.INFO if loss is None else logging.WARNING
        self._log(level, "node %s (%s) is gone: %s", node.node_id, node.role, reason)
        self._on_lost(node, reason)

    def connection_lost(self, peer: bytes) -> None:
        """A node's connection closed: it is dead, or comes back and introduces itself."""
        self._newcomers.remove(peer)
        if peer in self.nodes:
            self.lose(self.nodes[peer], "closed")

    def check(self, now: float) -> None:
        """Gives up nodes that are silent, answers those that wait for it. To be called several times a second."""
        for change in self._liveness.check():
            self._apply(change)
        for peer, hello, _ in self._newcomers:
            self.hello(peer, hello, now)

    def trim(self, is_used: Callable[[Group], bool]) -> list[Group]:
        """Forgets the oldest groups without nodes, but for a few and those in use. Returns them."""
        empty = [group for group in self.groups.values() if not group.nodes]
        old = [group for group in empty[: max(0, len(empty) - MAX_EMPTY_GROUPS)] if not is_used(group)]
        for group in old:
            del self.groups[group.key]
        if old:
            digests = {group.key.tokenizer for group in self.groups.values()}
            self._tokenizers = {digest: each for digest, each in self._tokenizers.items() if digest in digests}
        return old

    def groups_of(self, model: str) -> list[Group]:
        """The groups that serve a model name, also those without nodes just now."""
        return [group for group in self.groups.values() if group.key.model == model]

    def models(self) -> Iterator[Group]:
        """One group a model name that can serve now."""
        names: set[str] = set()
        for group in self.groups.values():
            if group.is_paired and group.key.model not in names:
                names.add(group.key.model)
                yield group

    def unready_reason(self) -> str | None:
        """Return in words what is missing before a request can be served."""
        if not self.nodes:
            return "no node has joined"
        lonely = [reason for node in self.nodes.values() if (reason := loneliness(node, self.nodes.values()))]
        if lonely:
            return lonely[0]
        if not any(group.tokenizer for group in self.groups.values() if group.nodes):
            return "no tokenizer has arrived yet"
        roles = {node.role for node in self.nodes.values()}
        missing = [role for role in ROLES if role not in roles]
        return f"no {missing[0]} node has joined" if missing else None

    def _apply(self, change: Change[bytes] | None) -> None:
        if change is not None and change.state != "alive" and change.peer in self.nodes:
            self.lose(self.nodes[change.peer], change.state, f"{change.state}: {change.reason}")

    def _admit(self, hello: Hello, now: float) -> Node:
        key = _key_of(hello)
        group = self.groups.get(key)
        if group is None:
            group = Group(key, hello)
            self.groups[key] = group
        group.tokenizer = group.tokenizer or self._tokenizers.get(key.tokenizer)
        node = Node(hello, group, now)
        self.nodes[node.routing_id] = node
        group.nodes[node.routing_id] = node
        self.comings.joined(node, now)
        self._liveness.add(node.routing_id)
        return node

    def _obstacle(self, hello: Hello, now: float) -> Obstacle | None:
        """Why this node cannot be let in now. A namesake that has been silent for long loses its name."""
        namesake = next((node for node in self.nodes.values() if node.node_id == hello.node_id), None)
        if namesake is not None and now - namesake.last_seen < SILENCE_S:
            return Obstacle(taken(hello), namesake.last_seen)
        if namesake is not None:
            self.lose(namesake, "replaced")
        if agreed(hello.protocols) is None:
            return Obstacle(apart(hello.protocols), math.inf)
        return misfit(hello, self.groups.get(_key_of(hello)), self.nodes.values())

    def _refuse(self, peer: bytes, hello: Hello, reason: str) -> None:
        self._log(logging.WARNING, "node %s (%s) refused: %s", hello.node_id, hello.role, reason)
        self._send(peer, Refusal(router_epoch=self._epoch, reason=reason[:4096]), PROTOCOL_MIN)

    def _log(self, level: int, words: str, *values: object) -> None:
        """One line of a node that comes or goes, unless there were too many just now."""
        if self._lines.is_due():
            logger.log(level, words, *values)


def _key_of(hello: Hello) -> GroupKey:
    return GroupKey(
        schema.digest(hello.layout),
        hello.target_fingerprint,
        hello.draft_fingerprint,
        hello.model.name,
        hello.model.tokenizer_digest,
    )

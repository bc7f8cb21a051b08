"""The registry keeps the joined nodes and their groups. It welcomes nodes, refuses them, and records their loss.

    Hello --> welcomed (joined) --> lost: it left, its connection closed, it is silent or stuck, or its name was taken
      |  '--> refused, with the values that do not match
      '-----> unanswered until the nodes in its way are known to be alive or lost, then one of the above

A process may be restarted within milliseconds after a kill, before its closed connection or its silence shows that the
old process is dead. Its Hello then meets nodes that seem to be in its way: one of the same name, or nodes of its model
that it cannot be paired with because they had another configuration. The registry answers such a Hello when one of
those nodes sent another heartbeat (refused), or when all of them are lost (welcomed).

The registry also keeps the tokenizers, one per digest. It asks a welcomed node for the file if its group has none.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...metadata.bus.liveness import Change, PeerLiveness
from ...metadata.cache.names import KEY_BYTES
from ...metadata.errors import ProtocolError
from ...metadata.handoff.schema import schema
from ...metadata.logs import Throttle
from ...metadata.wire.frames import apart
from ...metadata.wire.membership import (
    Heartbeat,
    Hello,
    HelloAgain,
    Leaving,
    Refusal,
    TokenizerFile,
    Welcome,
)
from ...metadata.wire.messages import ToNode
from ...metadata.wire.protocol import PROTOCOL_MIN, agreed, is_newer
from ...metadata.wire.request import MAX_TEXT
from ..text.tokenizer import TextTokenizer
from .mismatch import incompatible_nodes, missing_partner, refusal
from .node import GroupKey, Node, NodeGroup
from .node_history import LOSS_WORDS, Loss, NodeHistories
from .prompt_role import LocalPrefill

logger = logging.getLogger(__name__)

MAX_EMPTY_GROUPS = 16  # groups without nodes that are kept, since their nodes may come back
MAX_LINES = 32  # log lines per second on nodes that join, leave and are refused
TOKENIZER_S = 10.0  # a tokenizer file that has not arrived after this time is asked for again
NAME_SILENCE_S = 1.0  # a node whose heartbeat is so late loses its name to a new node
PROOF_S = 0.5  # a heartbeat read this long after a Hello proves that its sender lived when the Hello was sent
MAX_WAITING = 64  # Hellos that wait for an answer
CROSSING_S = 4.5  # a Hello that comes so soon after the Welcome may have crossed it, also if a message takes a second


class _Obstacle(NamedTuple):
    """Why a node cannot be welcomed now. `heard_at`: the last heartbeat of the nodes in its way, inf if there are none
    (then nothing will change)."""

    reason: str
    heard_at: float


class _WaitingHello(NamedTuple):
    """A Hello without an answer, and when the first Hello of its node came."""

    hello: Hello
    since: float


class Registry:
    """All joined nodes and their groups.

    It sends to nodes through `send(routing_id, message, protocol)`, and calls `on_joined(node)` after a node joined and
    `on_lost(node, reason)` after it removed a node.
    """

    def __init__(
        self,
        epoch: str,
        send: Callable[[bytes, ToNode, int], bool],
        on_joined: Callable[[Node], None],
        on_lost: Callable[[Node, str], None],
        local_prefill: LocalPrefill = "never",
    ) -> None:
        self.nodes: dict[bytes, Node] = {}  # by routing id
        self.groups: dict[GroupKey, NodeGroup] = {}
        self.histories = NodeHistories()
        self._tokenizers: dict[str, TextTokenizer] = {}  # by digest
        self._liveness: PeerLiveness[bytes] = PeerLiveness()
        self._waiting: dict[bytes, _WaitingHello] = {}  # by routing id
        self._lines = Throttle(most=MAX_LINES)
        self._local_prefill: LocalPrefill = local_prefill
        self._page_key = secrets.token_bytes(KEY_BYTES)
        self._epoch = epoch
        self._send = send
        self._on_joined = on_joined
        self._on_lost = on_lost

    def greet_again(self, peer: bytes) -> None:
        """Ask an unknown sender for its Hello, unless its Hello is here and waits for an answer."""
        if peer not in self._waiting:
            self._send(peer, HelloAgain(router_epoch=self._epoch), PROTOCOL_MIN)

    def hello(self, peer: bytes, hello: Hello, now: float) -> None:
        """Welcome the node, refuse it, ask for its Hello in a newer protocol, or let it wait for an answer.

        A node that is known and says Hello again has started anew: its old self is lost first. A Hello that was said
        before the node could read the Welcome is ignored. If the Welcome was lost, the node says Hello again later.
        """
        known = self.nodes.get(peer)
        if known is not None and now - known.welcomed_at < CROSSING_S:
            return
        if known is not None:
            self.lose(known, "anew", now)
        protocol = agreed(hello.protocols)
        if protocol is not None and is_newer(Hello, max(PROTOCOL_MIN, hello.protocol), protocol):
            self._send(peer, HelloAgain(router_epoch=self._epoch, protocol=protocol), protocol)
            return
        obstacle = self._obstacle(hello, now)
        if obstacle is not None and self._may_wait(peer, hello, obstacle, now):
            return
        self._waiting.pop(peer, None)
        if obstacle is not None:
            self._refuse(peer, hello, obstacle.reason)
            return
        try:
            node = self._admit(hello, now)
        except ProtocolError as error:
            self._refuse(peer, hello, str(error))
            return
        notice = missing_partner(node, self.nodes.values()) or ""
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

    def take_tokenizer(self, node: Node, file: TokenizerFile) -> None:
        """Give the tokenizer that a node sent to all groups that need it.

        Raises ProtocolError if the file is not the one of the node's Hello, or cannot be read.
        """
        digest = node.group.key.tokenizer
        if file.digest != digest:
            raise ProtocolError(
                f"node {node.node_id} sent a tokenizer of digest {file.digest}, but its Hello promised {digest}; "
                "restart the node with one tokenizer file",
                node=node.node_id,
            )
        if digest not in self._tokenizers:
            node.group.has_bad_tokenizer = True  # stays so if reading fails
            self._tokenizers[digest] = TextTokenizer.from_compressed(file.data, digest)
            node.group.has_bad_tokenizer = False
        for group in self.groups.values():
            if group.key.tokenizer == digest and group.tokenizer is None:
                group.tokenizer = self._tokenizers[digest]

    def beat(self, node: Node, beat: Heartbeat, now: float) -> None:
        """Record a node's heartbeat. A node that reports itself stuck is lost until it says Hello again."""
        node.heard(beat, now)
        lacks_tokenizer = node.group.tokenizer is None and not node.group.has_bad_tokenizer
        if lacks_tokenizer and now - node.welcomed_at > TOKENIZER_S:  # the Welcome or the file was lost
            self._welcome(node, now)
        self._apply(self._liveness.hear(node.routing_id, beat), now)

    def leaving(self, node: Node, message: Leaving, now: float) -> None:
        """Record that a node takes no new requests because it was told to stop, or that it has stopped (`done`)."""
        node.leave()
        if message.done:
            self.lose(node, None, now)
        else:
            self._log(logging.INFO, "node %s (%s) drains", node.node_id, node.role)

    def lose(self, node: Node, loss: Loss | None, now: float, reason: str | None = None) -> None:
        """Remove a node. `loss` is None if the node announced that it leaves; `reason` replaces the words of `loss`."""
        if self.nodes.pop(node.routing_id, None) is None:
            return
        reason = reason or (LOSS_WORDS[loss] if loss is not None else "it left")
        self.histories.departed(node, None if node.is_leaving else loss, now)
        del node.group.nodes[node.routing_id]
        self._liveness.remove(node.routing_id)
        node.leave()
        level = logging.INFO if loss is None else logging.WARNING
        self._log(level, "node %s (%s) is gone: %s", node.node_id, node.role, reason)
        self._on_lost(node, reason)
        for rank in () if loss is None else self._ranks_of(node):
            self.lose(rank, "group", now)

    def connection_lost(self, peer: bytes, now: float) -> None:
        """Lose the node whose connection closed. If its process lives, it says Hello again."""
        self._waiting.pop(peer, None)
        if peer in self.nodes:
            self.lose(self.nodes[peer], "closed", now)

    def check(self, now: float) -> None:
        """Lose silent nodes, and try again to answer the Hellos that wait. Call it several times per second."""
        for change in self._liveness.check():
            self._apply(change, now)
        for peer, waiting in list(self._waiting.items()):
            self.hello(peer, waiting.hello, now)

    def trim(self, is_used: Callable[[NodeGroup], bool]) -> list[NodeGroup]:
        """Remove and return the oldest groups without nodes; keep the last MAX_EMPTY_GROUPS and those in use.

        Tokenizers that no group needs any more are removed as well.
        """
        empty = [group for group in self.groups.values() if not group.nodes]
        old = [group for group in empty[: max(0, len(empty) - MAX_EMPTY_GROUPS)] if not is_used(group)]
        for group in old:
            del self.groups[group.key]
        if old:
            digests = {group.key.tokenizer for group in self.groups.values()}
            self._tokenizers = {digest: each for digest, each in self._tokenizers.items() if digest in digests}
        return old

    def groups_of(self, model: str) -> list[NodeGroup]:
        """Return the groups that serve a model name, those without nodes included."""
        return [group for group in self.groups.values() if group.key.model == model]

    def models(self) -> Iterator[NodeGroup]:
        """Yield one group per model name that can be served now."""
        names: set[str] = set()
        for group in self.groups.values():
            if group.can_serve and group.key.model not in names:
                names.add(group.key.model)
                yield group

    def _admit(self, hello: Hello, now: float) -> Node:
        key = _key_of(hello)
        group = self.groups.get(key)
        if group is None:
            group = NodeGroup(key, hello, self._local_prefill, self._page_key)
            self.groups[key] = group
        group.tokenizer = group.tokenizer or self._tokenizers.get(key.tokenizer)
        node = Node(hello, group, now)
        self.nodes[node.routing_id] = node
        group.nodes[node.routing_id] = node
        self.histories.joined(node, now)
        self._liveness.add(node.routing_id)
        ranks = self._ranks_of(node)
        if hello.place is not None and len(ranks) == hello.place.size:
            for rank in ranks:
                rank.complete()
        return node

    def _ranks_of(self, node: Node) -> list[Node]:
        """Return the joined nodes that live and die with a node, itself included."""
        return [other for other in node.group.nodes.values() if other.unit_key == node.unit_key]

    def _welcome(self, node: Node, now: float, notice: str = "") -> None:
        node.welcome(now)
        self._send(
            node.routing_id,
            Welcome(
                router_epoch=self._epoch,
                protocol=node.protocol,
                need_tokenizer=node.group.tokenizer is None,
                notice=notice,
                page_key=self._page_key,
            ),
            node.protocol,
        )

    def _refuse(self, peer: bytes, hello: Hello, reason: str) -> None:
        self._log(logging.WARNING, "node %s (%s) refused: %s", hello.node_id, hello.role, reason)
        self._send(peer, Refusal(router_epoch=self._epoch, reason=reason[:MAX_TEXT]), PROTOCOL_MIN)

    def _obstacle(self, hello: Hello, now: float) -> _Obstacle | None:
        """Return why this node cannot be welcomed now. A silent node of the same name is lost here."""
        namesake = next((node for node in self.nodes.values() if node.node_id == hello.node_id), None)
        if namesake is not None and namesake.silence_s(now) < NAME_SILENCE_S:
            reason = f"a node called {hello.node_id!r} is already here; give this one another --node-id"
            return _Obstacle(reason, namesake.last_seen)
        if namesake is not None:
            self.lose(namesake, "replaced", now)
        if agreed(hello.protocols) is None:
            return _Obstacle(apart(hello.protocols), math.inf)
        if (num_pools := hello.capacity.num_pools) > 1:
            reason = f"its {num_pools} ranks are one node, as in protocol 6: start it from a newer release"
            return _Obstacle(reason, math.inf)
        incompatible = incompatible_nodes(hello, self.groups.get(_key_of(hello)), self.nodes.values())
        return _Obstacle(refusal(hello, incompatible), incompatible[0].last_seen) if incompatible else None

    def _may_wait(self, peer: bytes, hello: Hello, obstacle: _Obstacle, now: float) -> bool:
        """Return whether the Hello stays unanswered; False if a node in its way proved to live, or too many wait.

        A Hello that is repeated does not wait longer: its node's first one counts.
        """
        first = self._waiting.get(peer)
        since = now if first is None else first.since
        if obstacle.heard_at - since > PROOF_S or (first is None and len(self._waiting) >= MAX_WAITING):
            return False
        self._waiting[peer] = _WaitingHello(hello, since)
        return True

    def _apply(self, change: Change[bytes] | None, now: float) -> None:
        if change is not None and change.state != "alive" and change.peer in self.nodes:
            self.lose(self.nodes[change.peer], change.state, now, f"{change.state}: {change.reason}")

    def _log(self, level: int, words: str, *values: object) -> None:
        """Log one line on a node that comes or goes, unless MAX_LINES of this second are used up."""
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


def overdue(nodes: Iterable[Node], now: float) -> list[Node]:
    """Return the drained nodes whose time is over, once each, and only when another node could take their work."""
    over = [node for node in nodes if node.must_evict(now) and node.group.live(node.role)]
    for node in over:
        node.evicted()
    return over

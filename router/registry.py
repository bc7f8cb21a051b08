"""All nodes and groups: who joins, who is refused, who is lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..metadata.bus.liveness import Change, PeerLiveness
from ..metadata.bus.throttle import Throttle
from ..metadata.errors import ProtocolError
from ..metadata.handoff import schema
from ..metadata.wire.hello import apart
from ..metadata.wire.messages import Heartbeat, Hello, HelloAgain, Leaving, Refusal, TokenizerFile, ToNode, Welcome
from ..metadata.wire.protocol import PROTOCOL_MIN, agreed, is_newer
from .comings import LOSS_WORDS, Comings, Loss
from .mismatch import loneliness, misfit
from .newcomers import SILENCE_S, Newcomers, Obstacle, taken
from .text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    pass

from .node import ROLES, Group, GroupKey, Node

logger = logging.getLogger(__name__)

MAX_EMPTY_GROUPS = 16  # without nodes, kept for those that come back
MAX_LINES = 32  # logged in a second of nodes that come and go
TOKENIZER_S = 5.0  # a tokenizer that has not come for so long is asked for again


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
        node.welcome(now)
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

    def beat(self, node: Node, beat: Heartbeat, now: float) -> None:
        """A heartbeat. A node that says it is stuck is given up; it comes back with a new Hello when it moves again."""
        node.heard(beat, now)
        is_lacking = node.group.tokenizer is None and not node.group.has_bad_tokenizer
        if is_lacking and now - node.welcomed_at > TOKENIZER_S:  # it was lost
            self._welcome(node, now)
        self._apply(self._liveness.hear(node.routing_id, beat))

    def leaving(self, node: Node, message: Leaving) -> None:
        """A node drains, or goes."""
        node.leave()
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
        node.leave()
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

"""Nodes that an operator takes out of service, and puts back. They stay joined, so that this can be undone.

A drain belongs to the node's name. A node that dies, or loses the router, and comes back is drained still. One that
leaves by its own word has been stopped by somebody: what comes next under its name serves.
"""

from __future__ import annotations

import logging
import time

from .absence import drain_words
from .errors import Conflict, NotFound
from .node import Node
from .registry import Registry
from .rescheduling import Moves

logger = logging.getLogger(__name__)


class Drains:
    """What a draining node has not finished in time goes on elsewhere, as soon as another node could take it."""

    def __init__(self, registry: Registry, moves: Moves) -> None:
        self._registry = registry
        self._moves = moves
        self._names: set[str] = set()

    def begin(self, node_id: str, timeout_s: float) -> Node:
        """The node takes nothing new, and has `timeout_s` to finish what it holds. Raises NotFound."""
        node = self._node(node_id)
        self._names.add(node_id)
        node.is_cordoned = True
        node.evict_at = time.monotonic() + timeout_s
        logger.info("node %s (%s) drains: an operator has asked for it", node.node_id, node.role)
        return node

    def undo(self, node_id: str) -> Node:
        """The node takes requests again. Raises NotFound, and Conflict when it leaves by its own word."""
        is_known = node_id in self._names
        self._names.discard(node_id)
        try:
            node = self._node(node_id)
        except NotFound as error:
            if is_known:  # it was lost while it drained: it will take requests when it comes back
                raise NotFound(f"{error}; it will not drain when it comes back") from None
            raise
        node.is_cordoned, node.evict_at = False, None
        if node.is_leaving:
            raise Conflict(f"{drain_words(node)}; that cannot be undone")
        logger.info("node %s (%s) takes requests again", node.node_id, node.role)
        return node

    def joined(self, node: Node) -> None:
        """A node has joined; maybe it was drained when it was lost."""
        if node.node_id in self._names and not node.is_cordoned:
            node.is_cordoned = True
            logger.info("node %s (%s) has come back; it drains still", node.node_id, node.role)

    def left(self, node: Node) -> None:
        """A node has left by its own word."""
        self._names.discard(node.node_id)

    def check(self, now: float) -> None:
        """To be called a few times a second."""
        for node in self._registry.nodes.values():
            if node.evict_at is not None and now >= node.evict_at and node.group.live(node.role):
                node.evict_at = None
                self._moves.evict(node, "its time to drain is over")

    def _node(self, node_id: str) -> Node:
        for node in self._registry.nodes.values():
            if node.node_id == node_id:
                return node
        names = ", ".join(sorted(node.node_id for node in self._registry.nodes.values())) or "none"
        raise NotFound(f"node {node_id!r} is not here; joined are: {names}")

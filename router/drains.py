"""Nodes that an operator takes out of service, and puts back. They stay joined, so that this can be undone."""

from __future__ import annotations

import logging
import time

from .errors import NotFound
from .moves import Moves
from .registry import Node, Registry

logger = logging.getLogger(__name__)


class Drains:
    """What a draining node has not finished in time goes on elsewhere, as soon as another node could take it."""

    def __init__(self, registry: Registry, moves: Moves) -> None:
        self._registry = registry
        self._moves = moves

    def begin(self, node_id: str, timeout_s: float) -> Node:
        """The node takes nothing new, and has `timeout_s` to finish what it holds. Raises NotFound."""
        node = self._node(node_id)
        node.is_cordoned = True
        node.evict_at = time.monotonic() + timeout_s
        logger.info("node %s (%s) drains: an operator has asked for it", node.node_id, node.role)
        return node

    def undo(self, node_id: str) -> Node:
        """The node takes requests again, unless it leaves by its own word. Raises NotFound."""
        node = self._node(node_id)
        node.is_cordoned, node.evict_at = False, None
        logger.info("node %s (%s) takes requests again", node.node_id, node.role)
        return node

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

"""Nodes that an operator takes out of service and puts back. They stay joined, so that a drain can be undone.

A drain belongs to the name of a node. A node that dies, or loses the router, and comes back is still drained. If a node
announces that it leaves, somebody has stopped it on purpose. This ends the drain: the next node of that name serves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..errors import Conflict, NotFound
from ..placement.availability import drain_words
from .node import Node

logger = logging.getLogger(__name__)


class Drains:
    """Names of the nodes that operators drain. `nodes` is a view of the nodes that have joined."""

    def __init__(self, nodes: Mapping[bytes, Node]) -> None:
        self._nodes = nodes
        self._names: set[str] = set()

    def begin(self, node_id: str, evict_at: float) -> Node:
        """Give the node no new work. At `evict_at` its unfinished work moves to other nodes. Raises NotFound."""
        node = self._node(node_id)
        self._names.add(node_id)
        node.cordon(evict_at)
        logger.info("node %s (%s) drains: an operator has asked for it", node.node_id, node.role)
        return node

    def undo(self, node_id: str) -> Node:
        """Let the node take requests again. Raises NotFound, and Conflict if the node itself said that it leaves."""
        is_known = node_id in self._names
        self._names.discard(node_id)
        try:
            node = self._node(node_id)
        except NotFound as error:
            if is_known:  # it was lost while it drained: it will take requests when it comes back
                raise NotFound(f"{error}; it will not drain when it comes back") from None
            raise
        node.uncordon()
        if node.is_leaving:
            raise Conflict(f"{drain_words(node)}; that cannot be undone")
        logger.info("node %s (%s) takes requests again", node.node_id, node.role)
        return node

    def joined(self, node: Node) -> None:
        """A node has joined. If it was drained when it was lost, it still is."""
        if node.node_id in self._names and not node.is_cordoned:
            node.cordon()
            logger.info("node %s (%s) has come back; it drains still", node.node_id, node.role)

    def left(self, node: Node) -> None:
        """A node has left by its own word."""
        self._names.discard(node.node_id)

    def due(self, now: float) -> list[Node]:
        """Return the nodes whose time is over, once each, and only when another node could take their work."""
        due = [node for node in self._nodes.values() if node.must_evict(now) and node.group.live(node.role)]
        for node in due:
            node.evicted()
        return due

    def _node(self, node_id: str) -> Node:
        for node in self._nodes.values():
            if node.node_id == node_id:
                return node
        names = ", ".join(sorted(node.node_id for node in self._nodes.values())) or "none"
        raise NotFound(f"node {node_id!r} is not here; joined are: {names}")

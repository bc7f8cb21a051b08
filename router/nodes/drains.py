"""Drains: nodes that an operator takes out of service, and puts back.

Drained nodes stay joined, so that a drain can be undone. A drain belongs to the name of a node. A node that dies, or
loses the router, and comes back is still drained. If a node announces that it leaves, somebody has stopped it on
purpose. This ends the drain: the next node of that name serves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...metadata.wire.membership import Cordon
from ...metadata.wire.node_info import Service
from ..errors import Conflict, NotFound
from .availability import drain_words
from .node import Node

logger = logging.getLogger(__name__)

_SAYS = {True: "drained by an operator", False: "put back by an operator"}


class Drains:
    """Remembers which nodes operators have drained.

    `nodes` has the nodes that have joined, by routing id. The registry adds and removes them.

    The router tells a node that it is drained or put back, and the node tells its other routers by its heartbeats. The
    router repeats this until a heartbeat of the node agrees; until then it goes by what it has told, not by the
    heartbeat. A node of an older release cannot be told, so it is drained at this router alone."""

    def __init__(self, nodes: Mapping[bytes, Node]) -> None:
        self._nodes = nodes
        self._names: set[str] = set()
        self.told: dict[bytes, bool] = {}  # by routing id: whether it is cordoned, not confirmed by a heartbeat yet

    def begin(self, node_id: str, evict_at: float) -> None:
        """Give the node, or all ranks of the group, no new work. At `evict_at` its unfinished work moves elsewhere.
        Raises NotFound."""
        nodes = self._nodes_of(node_id)
        self._names.add(nodes[0].unit)
        for node in nodes:
            node.cordon(evict_at)
            self.told[node.routing_id] = True
        logger.info("node %s (%s) drains: an operator has asked for it", nodes[0].unit, nodes[0].role)

    def undo(self, node_id: str) -> list[Node]:
        """Let the node, or all ranks of the group, take requests again, and return them. Raises NotFound, and Conflict
        if the node itself said that it leaves."""
        is_known = node_id in self._names
        self._names.discard(node_id)
        try:
            nodes = self._nodes_of(node_id)
        except NotFound as error:
            if is_known:  # it was lost while it drained: it will take requests when it comes back
                raise NotFound(f"{error}; it will not drain when it comes back") from None
            raise
        self._names.discard(nodes[0].unit)
        for node in nodes:
            node.uncordon()
            self.told[node.routing_id] = False
            if node.is_leaving:
                raise Conflict(f"{drain_words(node)}; that cannot be undone")
        logger.info("node %s (%s) takes requests again", nodes[0].unit, nodes[0].role)
        return nodes

    def joined(self, node: Node) -> None:
        """A node has joined. If it was drained when it was lost, it still is."""
        if node.unit in self._names and not node.is_cordoned:
            node.cordon()
            self.told[node.routing_id] = True
            logger.info("node %s (%s) has come back; it drains still", node.node_id, node.role)

    def to_tell(self) -> list[tuple[Node, bool]]:
        """Return the nodes that have not confirmed whether they are cordoned. To be called several times per second, as
        long as some were `told`."""
        self.told = {peer: value for peer, value in self.told.items() if peer in self._nodes}
        told = [(self._nodes[peer], value) for peer, value in self.told.items()]
        return [(node, value) for node, value in told if node.knows(Cordon)]

    def heard(self, node: Node, service: Service, evict_at: float) -> bool:
        """A node says whether it is cordoned, which is news, or some were `told`: an operator may have asked another
        router for it. Its unfinished work moves elsewhere at `evict_at`. Return whether it takes requests again."""
        told = self.told.get(node.routing_id)
        if told is not None:
            if told == service.is_cordoned:
                del self.told[node.routing_id]
            return False
        if service.is_cordoned == node.is_cordoned:
            return False
        logger.info("another router says: %s (%s) is %s", node.unit, node.role, _SAYS[service.is_cordoned])
        if service.is_cordoned:
            self._names.add(node.unit)
            node.cordon(evict_at)
        else:
            self._names.discard(node.unit)
            node.uncordon()
        return not service.is_cordoned

    def left(self, node: Node) -> None:
        """A node has left by its own word."""
        self._names.discard(node.unit)

    def _nodes_of(self, name: str) -> list[Node]:
        """Return the node of this name, or the ranks of the group of this name or with such a rank."""
        for node in self._nodes.values():
            if name in (node.node_id, node.unit):
                return [other for other in self._nodes.values() if other.unit_key == node.unit_key]
        names = ", ".join(sorted({node.unit for node in self._nodes.values()})) or "none"
        raise NotFound(f"node {name!r} is not here; joined are: {names}")

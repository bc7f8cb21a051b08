"""Cancel is a message with an acknowledgement: it is repeated until the node says that nothing is held any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ..metadata.messages import Cancel, Cancelled, ToNode
from .registry import Node

logger = logging.getLogger(__name__)

ACK_S = 1.0  # repeated when not acknowledged for so long
MAX_TIMES = 4


class Cancels:
    """Sends Cancel to nodes. What is not acknowledged yet is kept with the node, and dies with it."""

    def __init__(self, epoch: str, send: Callable[[Node, ToNode], bool]) -> None:
        self._epoch = epoch
        self._send = send

    def send(self, node: Node, rid: str, attempt: int, choices: Iterable[int], reason: str) -> None:
        """Choices are always named: other attempts of the same request may run on the same node."""
        named = tuple(sorted(choices))
        message = Cancel(router_epoch=self._epoch, rid=rid, attempt=attempt, choices=named, reason=reason)
        node.unacked[(rid, attempt)] = (time.monotonic(), 1, message)
        self._send(node, message)

    def acknowledged(self, node: Node, message: Cancelled) -> None:
        """The node holds nothing of it any more."""
        node.unacked.pop((message.rid, message.attempt), None)

    def repeat(self, node: Node, now: float) -> None:
        """Sends again what is overdue; to be called a few times a second."""
        for key, (sent_at, times, message) in list(node.unacked.items()):
            if now - sent_at < ACK_S:
                continue
            if times >= MAX_TIMES:
                logger.warning("node %s did not acknowledge Cancel", node.node_id, extra={"rid": key[0]})
                del node.unacked[key]
                continue
            node.unacked[key] = (now, times + 1, message)
            self._send(node, message)

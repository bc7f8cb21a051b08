"""Cancel is a message with an acknowledgement: it is repeated until the node says that nothing is held any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..metadata.wire.messages import Cancel, Cancelled, Reserved, ToNode
from .node import Node
from .request import Request

logger = logging.getLogger(__name__)

ACK_S = 0.25  # repeated when not acknowledged for so long, then for twice that, and so on
MAX_ACK_S = 8.0


class Unacked(NamedTuple):
    """A Cancel on its way, of all choices of an attempt that were cancelled so far."""

    message: Cancel
    due_at: float
    wait_s: float
    num_acks: int  # that must come: one for each time it was sent with other choices


class Cancels:
    """Sends Cancel to nodes. What is not acknowledged yet is kept with the node, and dies with it."""

    def __init__(self, epoch: str, send: Callable[[Node, ToNode], bool]) -> None:
        self._epoch = epoch
        self._send = send

    def send(self, node: Node, rid: str, attempt: int, choices: Iterable[int], reason: str) -> None:
        """Choices are always named: other attempts of the same request may run on the same node."""
        before = node.unacked.get((rid, attempt))
        named = set(choices).union(before.message.choices or () if before is not None else ())
        message = Cancel(
            router_epoch=self._epoch, rid=rid, attempt=attempt, choices=tuple(sorted(named)), reason=reason
        )
        num_acks = 1 + (before.num_acks if before is not None else 0)
        node.unacked[(rid, attempt)] = Unacked(message, time.monotonic() + ACK_S, ACK_S, num_acks)
        self._send(node, message)

    def send_unwanted(self, node: Node, message: Reserved, request: Request | None) -> None:
        """An answer to a reservation that nobody awaits: it is too late, or it has come twice."""
        attempt = request.attempts.get(message.attempt) if request is not None else None
        wanted = attempt.choices if attempt is not None and attempt.decode is node else set[int]()
        unwanted = [choice for choice in message.granted if choice not in wanted]
        if unwanted:
            self.send(node, message.rid, message.attempt, unwanted, "it is over")

    def acknowledged(self, node: Node, message: Cancelled) -> None:
        """The node holds nothing any more of what one message named."""
        key = (message.rid, message.attempt)
        unacked = node.unacked.get(key)
        if unacked is None:
            return
        if unacked.num_acks > 1:
            node.unacked[key] = unacked._replace(num_acks=unacked.num_acks - 1)
        else:
            del node.unacked[key]

    def repeat(self, node: Node, now: float) -> None:
        """Sends again what is overdue; to be called a few times a second. There is no last time: a node that lives
        answers, and one that does not is given up with all it has."""
        for key, unacked in list(node.unacked.items()):
            if now < unacked.due_at:
                continue
            if unacked.wait_s >= MAX_ACK_S:
                logger.warning("node %s does not acknowledge Cancel", node.node_id, extra={"rid": key[0]})
            wait_s = min(2 * unacked.wait_s, MAX_ACK_S)
            node.unacked[key] = Unacked(unacked.message, now + wait_s, wait_s, 1)
            self._send(node, unacked.message)

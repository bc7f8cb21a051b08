"""Cancel messages that nodes have not acknowledged yet. Each is repeated until its node answers Cancelled."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from ...metadata.wire.messages import Cancel, Cancelled, Reserved
from ..nodes.node import Node
from ..requests.request import Request
from .effects import Effects, Send

logger = logging.getLogger(__name__)

ACK_S = 0.25  # a Cancel is repeated after so long, then after twice that, and so on
MAX_ACK_S = 8.0
LATE_S = 120.0  # answers are expected for so long after a Cancel has ended: longer than a node may be in one step


class Unacked(NamedTuple):
    """A Cancel under way. It names all choices of the attempt that were cancelled so far."""

    message: Cancel
    due_at: float
    wait_s: float
    num_sent: int  # messages that name all these choices
    num_older: int  # answers still to come to messages that named fewer choices


class Late(NamedTuple):
    """Answers still to come to a Cancel that has ended, to its other copies."""

    num_acks: int
    until: float


class Cancels:
    """Cancels under way, by node, request and attempt. A Cancel ends when the node answers or is gone.

    An answer does not say which message it belongs to, but a node answers messages in their order. So the router
    counts: the first answers belong to the messages that named fewer choices, one to each. If such a message or its
    answer was lost, the count is reached later, because the Cancel is repeated.
    """

    def __init__(self, epoch: str, effects: Effects) -> None:
        self._epoch = epoch
        self._effects = effects
        self._unacked: dict[Node, dict[tuple[str, int], Unacked]] = {}
        self._late: dict[tuple[Node, str, int], Late] = {}

    @property
    def num_unacked(self) -> int:
        """Cancels that no node has acknowledged yet."""
        return sum(map(len, self._unacked.values()))

    def send(self, node: Node, rid: str, attempt: int, choices: Iterable[int], reason: str, now: float) -> None:
        """Cancel choices of an attempt. They are always named: other attempts of the request may run on the node."""
        of_node = self._unacked.setdefault(node, {})
        before = of_node.get((rid, attempt))
        named = set(choices).union(before.message.choices or () if before is not None else ())
        message = Cancel(
            router_epoch=self._epoch, rid=rid, attempt=attempt, choices=tuple(sorted(named)), reason=reason
        )
        num_sent, num_older = 1, self._late.pop((node, rid, attempt), Late(0, now)).num_acks
        if before is not None and before.message.choices == message.choices:
            num_sent, num_older = before.num_sent + 1, before.num_older
        elif before is not None:
            num_older = before.num_older + before.num_sent
        of_node[rid, attempt] = Unacked(message, now + ACK_S, ACK_S, num_sent, num_older)
        self._effects.append(Send(node, message))

    def send_unwanted(self, node: Node, message: Reserved, request: Request | None, now: float) -> None:
        """Cancel what a node granted in an answer that nobody awaits: it came too late or twice."""
        attempt = request.attempts.get(message.attempt) if request is not None else None
        wanted = attempt.choices if attempt is not None and attempt.decode is node else set[int]()
        unwanted = [choice for choice in message.granted if choice not in wanted]
        if unwanted:
            self.send(node, message.rid, message.attempt, unwanted, "it is over", now)

    def acknowledged(self, node: Node, message: Cancelled) -> None:
        """Record the answer to one message: the node holds nothing any more of the choices that it named."""
        of_node, key = self._unacked.get(node, {}), (message.rid, message.attempt)
        unacked = of_node.get(key)
        if unacked is None:
            self._acknowledged_late(node, *key)
        elif unacked.num_older:  # the node answers, so the next copy need not wait for long
            due_at = unacked.due_at - unacked.wait_s + ACK_S
            of_node[key] = unacked._replace(due_at=due_at, wait_s=ACK_S, num_older=unacked.num_older - 1)
        else:
            del of_node[key]
            if unacked.num_sent > 1:
                self._late[node, *key] = Late(unacked.num_sent - 1, unacked.due_at + LATE_S)

    def forget(self, node: Node) -> None:
        """Forget the Cancels of a node that is gone."""
        self._unacked.pop(node, None)
        for key in [key for key in self._late if key[0] is node]:
            del self._late[key]

    def repeat(self, now: float) -> None:
        """Send overdue Cancels again. To be called several times per second. It repeats without limit: a live
        node answers, and the registry removes a dead one."""
        for key in [key for key, late in self._late.items() if now > late.until]:
            del self._late[key]
        for node, of_node in self._unacked.items():
            for key, unacked in list(of_node.items()):
                if now < unacked.due_at:
                    continue
                if unacked.wait_s >= MAX_ACK_S:
                    logger.warning("node %s does not acknowledge Cancel", node.node_id, extra={"rid": key[0]})
                wait_s = min(2 * unacked.wait_s, MAX_ACK_S)
                of_node[key] = unacked._replace(due_at=now + wait_s, wait_s=wait_s, num_sent=unacked.num_sent + 1)
                self._effects.append(Send(node, unacked.message))

    def _acknowledged_late(self, node: Node, rid: str, attempt: int) -> None:
        late = self._late.pop((node, rid, attempt), None)
        if late is not None and late.num_acks > 1:
            self._late[node, rid, attempt] = late._replace(num_acks=late.num_acks - 1)

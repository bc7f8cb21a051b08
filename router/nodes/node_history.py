"""Restarts and losses of nodes, by node name. A history outlives its node, and goes on when the node comes back."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Literal

from ...metadata.wire.node_info import Role
from .node import Node

MAX_NAMES = 512  # histories kept; when there are more, absent nodes are forgotten, the longest absent first
RECENT_S = 600.0  # losses and returns within this time are reported to operators
MAX_RETURNS = 100  # remembered per name

Loss = Literal["closed", "dead", "stuck", "anew", "replaced", "group"]  # how a node was lost; a label of a metric
LOSS_WORDS: dict[Loss, str] = {
    "closed": "its connection closed",
    "dead": "it fell silent",
    "stuck": "it was stuck",
    "anew": "it introduced itself anew",
    "replaced": "a newer process of the same name has joined",
    "group": "another rank of its group was lost",
}


class NodeHistory:
    """Losses and returns of the nodes of one name."""

    __slots__ = (
        "epoch",
        "is_here",
        "last_loss",
        "losses",
        "lost_at",
        "node_id",
        "num_restarts",
        "returns",
        "role",
        "unit",
    )

    def __init__(self, node: Node) -> None:
        self.node_id = node.node_id
        self.role: Role = node.role
        self.unit = node.unit
        self.epoch = node.hello.epoch  # of the last process that joined
        self.is_here = True
        self.num_restarts = 0  # joins under another epoch than before
        self.losses: Counter[Loss] = Counter()
        self.last_loss: Loss | None = None
        self.lost_at: float | None = None  # None if the node is here, or if it announced that it leaves
        self.returns: deque[float] = deque(maxlen=MAX_RETURNS)  # times of joins after a loss

    def num_returns(self, now: float) -> int:
        """Return how often a node of this name recently came back after a loss."""
        return sum(now - at < RECENT_S for at in self.returns)

    def is_missing(self, now: float) -> bool:
        """Return whether the node was lost recently and has not come back."""
        return self.lost_at is not None and now - self.lost_at < RECENT_S


class NodeHistories:
    """All histories. The registry owns them and reports every join and every departure."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, NodeHistory] = OrderedDict()

    def joined(self, node: Node, now: float) -> None:
        """Record that a node joined."""
        history = self._histories.get(node.node_id)
        if history is None:
            history = self._histories[node.node_id] = NodeHistory(node)
        elif history.epoch != node.hello.epoch:
            history.num_restarts += 1
            if history.lost_at is not None:
                history.returns.append(now)
        history.epoch, history.role, history.is_here, history.lost_at = node.hello.epoch, node.role, True, None
        self._histories.move_to_end(node.node_id)
        absent = [name for name, each in self._histories.items() if not each.is_here]
        for name in absent[: max(0, len(self._histories) - MAX_NAMES)]:
            del self._histories[name]

    def departed(self, node: Node, loss: Loss | None, now: float) -> None:
        """Record that a node is gone. `loss` is None if it announced that it leaves."""
        history = self._histories.get(node.node_id)
        if history is None:
            return
        history.is_here = False
        if loss is not None:
            history.losses[loss] += 1
            history.last_loss, history.lost_at = loss, now

    def __iter__(self) -> Iterator[NodeHistory]:
        return iter(list(self._histories.values()))

    def num_restarts(self, node_id: str) -> int:
        """Return how often nodes of this name joined again under another epoch."""
        history = self._histories.get(node_id)
        return history.num_restarts if history is not None else 0

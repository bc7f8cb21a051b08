"""How often nodes came back and were lost, by name, whether or not they are here now."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .node import Node

MAX_NAMES = 512  # remembered; those that have been away for longest are forgotten first
RECENT_S = 600.0  # who was lost, or came back, within so long is spoken of

Loss = Literal["closed", "dead", "stuck", "anew", "replaced"]
LOSS_WORDS: dict[Loss, str] = {
    "closed": "its connection closed",
    "dead": "it fell silent",
    "stuck": "it was stuck",
    "anew": "it introduced itself anew",
    "replaced": "another life of it has joined",
}


class Coming:
    """History of the nodes of one name."""

    __slots__ = ("epoch", "is_here", "last_loss", "losses", "lost_at", "node_id", "num_restarts", "returns", "role")

    def __init__(self, node: Node) -> None:
        self.node_id = node.node_id
        self.role = node.role
        self.epoch = node.hello.epoch
        self.is_here = True
        self.num_restarts = 0  # joined again under another epoch
        self.losses: Counter[Loss] = Counter()
        self.last_loss: Loss | None = None
        self.lost_at: float | None = None  # None: it is here, or it left by its own word
        self.returns: deque[float] = deque(maxlen=100)  # when it joined again after a loss

    def num_returns(self, now: float) -> int:
        """How often it came back lately."""
        return sum(now - at < RECENT_S for at in self.returns)

    def is_missing(self, now: float) -> bool:
        """Whether it was lost lately and is not back."""
        return self.lost_at is not None and now - self.lost_at < RECENT_S


class Comings:
    """Belongs to the registry, which tells it of every node that joins or goes."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, Coming] = OrderedDict()

    def joined(self, node: Node, now: float) -> None:
        """A node has joined."""
        coming = self._names.get(node.node_id)
        if coming is None:
            coming = self._names[node.node_id] = Coming(node)
        elif coming.epoch != node.hello.epoch:
            coming.num_restarts += 1
            if coming.lost_at is not None:
                coming.returns.append(now)
        coming.epoch, coming.role, coming.is_here, coming.lost_at = node.hello.epoch, node.role, True, None
        self._names.move_to_end(node.node_id)
        away = [name for name, each in self._names.items() if not each.is_here]
        for name in away[: max(0, len(self._names) - MAX_NAMES)]:
            del self._names[name]

    def gone(self, node: Node, loss: Loss | None, now: float) -> None:
        """A node is gone; `loss` None: by its own word."""
        coming = self._names.get(node.node_id)
        if coming is None:
            return
        coming.is_here = False
        if loss is not None:
            coming.losses[loss] += 1
            coming.last_loss, coming.lost_at = loss, now

    def __iter__(self) -> Iterator[Coming]:
        return iter(list(self._names.values()))

    def num_restarts(self, node_id: str) -> int:
        """How often the nodes of a name have joined again under another epoch."""
        coming = self._names.get(node_id)
        return coming.num_restarts if coming is not None else 0

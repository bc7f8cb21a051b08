"""Orders to nodes about their prefix caches: to keep texts of a node that leaves, and to forget those of a tenant that
is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ...metadata.wire.membership import ForgetSalts, HandedOn, HandOn, Keep
from ...metadata.wire.node_info import Lender
from ..nodes.node import Node
from ..requests.request import Request
from .effects import Effects, Send

FORGET_S = 5.0  # from the last request of a tenant that is gone until nodes remove its pages again


class CachedTexts:
    """Tells nodes to keep texts of a node that leaves, and to remove pages of tenants that are gone; remembers what it
    has told. `nodes`: the nodes that have joined, by routing id; the registry changes it."""

    def __init__(self, epoch: str, nodes: Mapping[bytes, Node], effects: Effects) -> None:
        self._epoch, self._nodes, self._effects = epoch, nodes, effects
        self._handed_on: Counter[bytes] = Counter()  # pages of nodes that have left, by the routing id of their heir
        self.forgotten: dict[str, float] = {}  # beginnings of salts, and when nodes are told again to forget them

    def hand_on(self, node: Node, message: HandOn) -> None:
        """A node leaves, and names a text that it has cached. Tell the node of its role with most room of it."""
        heirs = [
            each
            for each in node.group.live(node.role)
            if each is not node and each.hello.borrows and each.knows(Keep) and each.shares_protocol(node)
        ]
        self._effects.append(Send(node, HandedOn(router_epoch=self._epoch, has_heir=bool(heirs))))
        if heirs:
            heir = max(heirs, key=lambda each: each.load.free_pages - self._handed_on[each.routing_id])
            self._handed_on[heir.routing_id] += message.num_pages
            lender = Lender(node.peer_of(heir), message.num_pages)
            kept = Keep(
                router_epoch=self._epoch, lender=lender, token_ids=message.token_ids, cache_salt=message.cache_salt
            )
            self._effects.append(Send(heir, kept))

    def lost(self, node: Node) -> None:
        """A node is gone."""
        self._handed_on.pop(node.routing_id, None)

    def forget(self, prefix: str, now: float) -> None:
        """Have the cached pages of all salts that begin so removed."""
        self.forgotten[prefix] = now + FORGET_S
        self._tell_forgotten(prefix)

    def repeat(self, requests: Iterable[Request], now: float) -> None:
        """Have them removed again some time after the last of `requests` with such a salt, since it leaves pages."""
        for prefix, due in list(self.forgotten.items()):
            if any(request.cache_salt.startswith(prefix) for request in requests):
                self.forgotten[prefix] = now + FORGET_S
            elif now >= due:
                del self.forgotten[prefix]
                self._tell_forgotten(prefix)

    def _tell_forgotten(self, prefix: str) -> None:
        for node in self._nodes.values():
            if node.knows(ForgetSalts):
                self._effects.append(Send(node, ForgetSalts(router_epoch=self._epoch, prefix=prefix)))

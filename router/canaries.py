"""Orders of the health of pairs: canaries to start or to give up, and groups in which a pair became ready."""

from __future__ import annotations

from typing import NamedTuple

from ..metadata.errors import BatonError
from .node import Group
from .queue import Pinned
from .registry import Registry
from .request import Request


class StartCanary(NamedTuple):
    """Send this request to these nodes now, outside the waiting queue."""

    request: Request
    nodes: Pinned


class GiveUpCanary(NamedTuple):
    """End this request with an error."""

    request: Request
    error: BatonError


class PairsReady(NamedTuple):
    """A pair of the group became ready: requests that wait may get nodes."""

    group: Group


Order = StartCanary | GiveUpCanary | PairsReady


class Canaries:
    """Collects orders until the dispatcher takes them."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._orders: list[Order] = []

    def submit_canary(self, request: Request, pair: Pinned) -> bool:
        """Have a canary started. If its nodes have no room, its listener gets PairFull."""
        self._orders.append(StartCanary(request, pair))
        return True

    def fail(self, request: Request, error: BatonError) -> None:
        """Have a canary ended."""
        self._orders.append(GiveUpCanary(request, error))

    def pump(self, group: Group) -> None:
        """Have waiting requests of the group try again."""
        self._orders.append(PairsReady(group))

    def take(self) -> list[Order]:
        """Return the orders since the last call."""
        orders, self._orders = self._orders, []
        return orders

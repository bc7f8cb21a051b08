"""Asks of routers for room on a full node, in the order of their age.

    refuse --> waiting --(room)--> told --grant--> served
                  |                  '--(GRANT_S)--> lapsed
                  '--(not repeated for REPEAT_S)---> lapsed

Several routers share a node, and none knows which requests wait in another one. When the node refuses a request, it
notes an ask for that router, with the age of the request. The age is a duration, because the clocks of hosts differ.
When pages are freed, the node tells the router of the oldest ask, and grants room to no other router meanwhile. The
caller passes the time in monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

GRANT_S = 2.0  # a router that was told of room has so long to ask again
REPEAT_S = 3.0  # an ask that is not repeated for so long is over; routers repeat theirs every two seconds


@dataclass(slots=True)
class _Ask:
    born: float  # when the request came to its router
    refused_at: float
    num_releases: int  # of the node's pages, when it was refused last
    told_at: float | None = None


class Asks:
    """The asks of all routers, one per router: that of its oldest request."""

    def __init__(self) -> None:
        self._asks: dict[str, _Ask] = {}

    def may_take(self, router: str, now: float) -> bool:
        """Return whether the router may get room now: no other router has an older ask."""
        oldest = self._oldest(now)
        return oldest is None or oldest == router

    def refuse(self, router: str, waited_s: float, num_releases: int, now: float) -> None:
        """Enter an ask. `waited_s`: since the request came to its router. `num_releases`: how often the node has freed
        pages so far."""
        ask = self._asks.get(router)
        born = now - waited_s if ask is None else min(ask.born, now - waited_s)
        self._asks[router] = _Ask(born, now, num_releases)

    def grant(self, router: str) -> None:
        """The router got what it asked for."""
        self._asks.pop(router, None)

    def forget(self, router: str) -> None:
        """The router is gone."""
        self._asks.pop(router, None)

    def next_to_tell(self, num_releases: int, now: float) -> str | None:
        """Return the router of the oldest ask if it is to be told that the node has freed pages since it was refused,
        else None. It counts as told."""
        router = self._oldest(now)
        if router is None:
            return None
        ask = self._asks[router]
        if ask.told_at is not None or num_releases <= ask.num_releases:
            return None
        ask.told_at = now
        return router

    def _oldest(self, now: float) -> str | None:
        """Return the router of the oldest ask. Asks that have lapsed are removed."""
        for router, ask in list(self._asks.items()):
            is_late = ask.told_at is not None and now - ask.told_at > GRANT_S
            if is_late or now - ask.refused_at > REPEAT_S:
                del self._asks[router]
        return min(self._asks, key=lambda router: self._asks[router].born, default=None)

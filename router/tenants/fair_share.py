"""Fair shares: divides the nodes of a group between tenants by virtual token counters (VTC, arXiv 2401.00588).

Each tenant has a counter of the tokens that were computed for it, divided by its weight. Of the tenants that wait, the
one with the least counter is served next. If two are equal, it is the one that was served longer ago.

    a tenant begins to wait    its counter is raised to the least of those that wait: absence saves nothing up. If none
                               waits, to that of the last one that waited
    its prompt gets nodes      the counter grows by the prompt tokens that are probably not cached
    the cached part is known   the counter is corrected
    output tokens arrive       the counter grows by them

So between two tenants that wait all the time, the computed tokens per weight differ by no more than what both may have
under way at once. Pure logic: no clock. The counter of a tenant never falls (a refund is set off against its next
tokens), so the order can be a heap whose entries are brought up to date when they come to its top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

MAX_IDLE = 4096  # counters kept of tenants that do not wait

_T = TypeVar("_T")
CacheScope = Literal["tenant", "key"]  # whose requests share cached prefixes


class Tenant(NamedTuple):
    """The owner of requests. A tenant of weight 2 gets twice the tokens of one of weight 1."""

    name: str = "default"
    weight: float = 1.0


DEFAULT = Tenant()


class Share:
    """The counter of one tenant in one group."""

    __slots__ = ("_refund", "cost", "counter", "name", "served_at", "stamp")

    def __init__(self, tenant: Tenant = DEFAULT, counter: float = 0.0) -> None:
        self.name = tenant.name
        self.cost = 1.0 / tenant.weight  # of one token
        self.counter = counter
        self.served_at = 0  # the number of the grant
        self.stamp = 0  # of its only valid entry in the heap; 0: it does not wait
        self._refund = 0.0

    def charge(self, num_tokens: int) -> None:
        """Tokens were computed for the tenant. A negative number corrects an earlier one."""
        cost = num_tokens * self.cost
        if cost < 0.0:
            self._refund -= cost
        elif self._refund:
            paid = min(cost, self._refund)
            self._refund -= paid
            self.counter += cost - paid
        else:
            self.counter += cost

    @property
    def rank(self) -> tuple[float, int]:
        """Key of the order between tenants; the least is served next."""
        return self.counter, self.served_at


UNSHARED = Share()  # for requests that no queue has taken, such as canaries; nobody reads it


class FairShares:
    """The counters of all tenants of a group, and the order in which those that wait are served."""

    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._heap: list[tuple[float, int, int, Share]] = []  # rank, stamp
        self._num_stamps = 0
        self._num_served = 0
        self._num_waiting = 0
        self._last = 0.0  # the counter of the last tenant that waited
        self.waiting_weight = 0.0  # of all tenants that wait

    def begin(self, tenant: Tenant) -> Share:
        """A tenant begins to wait. Return its share."""
        least = self.least
        share = self._shares.get(tenant.name)
        if share is None:
            self._forget_idle()
            share = self._shares[tenant.name] = Share(tenant, least)
        assert not share.stamp, f"{tenant.name} waits already"
        share.cost = 1.0 / tenant.weight
        share.counter = max(share.counter, least)
        self._num_waiting += 1
        self.waiting_weight += tenant.weight
        self._push(share)
        return share

    def end(self, share: Share) -> None:
        """A tenant has nothing left that waits."""
        share.stamp = 0
        self._last = share.counter
        self._num_waiting -= 1
        self.waiting_weight = self.waiting_weight - 1.0 / share.cost if self._num_waiting else 0.0

    def served(self, share: Share) -> None:
        """A request of the tenant got its nodes."""
        self._num_served += 1
        share.served_at = self._num_served

    @property
    def are_several(self) -> bool:
        """Whether another tenant than the default one has waited here, so that more may come."""
        return len(self._shares) > 1 or (len(self._shares) == 1 and DEFAULT.name not in self._shares)

    @property
    def least(self) -> float:
        """The counter at which a tenant starts that begins to wait now."""
        top = self._top()
        return self._last if top is None else top.counter

    def is_next(self, tenant: Tenant) -> bool:
        """Whether no tenant that waits would be served before this one, if it waited too."""
        share = self._shares.get(tenant.name)
        return share is None or share.counter <= self.least

    def part(self, tenant: Tenant) -> float:
        """Return the tenant's part of the nodes while it waits."""
        share = self._shares.get(tenant.name)
        is_counted = share is not None and share.stamp
        return tenant.weight / (self.waiting_weight + (0.0 if is_counted else tenant.weight))

    def turns(self, take: Callable[[Share], tuple[_T, int] | None]) -> Iterator[_T]:
        """Yield the waiting items of all tenants in the order of service.

        `take` returns the next thing of a tenant and its number of tokens; None if it has no more. For the time of the
        iteration, what was yielded counts as served. Each step takes time in the logarithm of the number of tenants.
        """
        again: list[tuple[float, int, Share]] = []  # tenants of which something was yielded
        borrowed: list[Share] = []
        num_yielded = 0
        try:
            while True:
                top = self._top()
                if again and (top is None or again[0][0] < top.counter):
                    counter, _, share = heapq.heappop(again)
                elif top is not None:
                    share, counter = top, top.counter
                    heapq.heappop(self._heap)
                    borrowed.append(share)
                else:
                    return
                taken = take(share)
                if taken is not None:
                    num_yielded += 1
                    heapq.heappush(again, (counter + taken[1] * share.cost, num_yielded, share))
                    yield taken[0]
        finally:
            for share in borrowed:
                if share.stamp:
                    self._push(share)

    def _push(self, share: Share) -> None:
        self._num_stamps += 1
        share.stamp = self._num_stamps
        heapq.heappush(self._heap, (*share.rank, share.stamp, share))

    def _top(self) -> Share | None:
        """Return the tenant that is served next. Brings the top of the heap up to date."""
        heap = self._heap
        while heap:
            counter, served_at, stamp, share = heap[0]
            if share.stamp != stamp:
                heapq.heappop(heap)
            elif (counter, served_at) == share.rank:
                return share
            else:
                heapq.heapreplace(heap, (*share.rank, stamp, share))
        return None

    def _forget_idle(self) -> None:
        """Forget the counters of idle tenants when there are many: most would be raised anyway when they return."""
        if len(self._shares) >= MAX_IDLE + 2 * self._num_waiting:
            self._shares = {name: share for name, share in self._shares.items() if share.stamp}

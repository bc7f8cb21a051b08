"""Pace of a group, learned from its last requests: how long a new request would wait, and how long it would then take.

A grant gives a request its nodes. The router tells a refused client when to come again, and promises it a grant at that
time. The promised grants of a tenant follow each other at its part of the present pace, in the order of the refusals:

    a request is refused     a promise is added behind the others
    its time has come        the promise ends, whether or not the client comes
    nodes have room again    half of the promises end, because their clients do not keep the nodes busy

So no client has to stay away for longer than the nodes need to serve the clients that were refused before it.
"""

from __future__ import annotations

import heapq

from ...metadata.estimate import Estimate
from ..tenants.fair_share import DEFAULT

MAX_RETRY_S = 60.0  # no client is told to come back later than that
NUM_SPREADS = 2  # a request that takes so many spreads longer than the mean is an exception
MEMORY = 16  # measurements that a mean remembers
KEPT = 8  # measurements that still count when nodes become full again: requests may have changed since
SOON_S = (1.0, 3.0)  # range of times to come again before any pace is known
_HALF = 20  # so many clients get the earlier half of that range


class Pace:
    """The pace of one group. Times are monotonic seconds.

    The time between two grants predicts how fast a queue moves only while nodes are full (since `blocked_since`).
    """

    def __init__(self) -> None:
        self.blocked_since: float | None = None
        self._granted_at = 0.0
        self._interval = Estimate(memory=MEMORY)  # between grants
        self._service = Estimate(memory=MEMORY)  # from the grant to the end
        self._per_token = Estimate(memory=MEMORY)  # the same per output token
        # by tenant: a heap of the times at which refused clients are expected back
        self._promises: dict[str, list[float]] = {}

    def blocked(self, now: float) -> None:
        """The first request of the queue found no room."""
        if self.blocked_since is None:
            self.blocked_since = now
            self._interval.fade(KEPT)

    def unblocked(self) -> None:
        """No request waits for room."""
        if self.blocked_since is not None:
            self.blocked_since = None
            halves = {tenant: sorted(times)[: len(times) // 2] for tenant, times in self._promises.items()}
            self._promises = {tenant: times for tenant, times in halves.items() if times}

    def granted(self, now: float) -> None:
        """A request was given its nodes."""
        if self.blocked_since is not None:
            self._interval.observe(now - max(self.blocked_since, self._granted_at))
        self._granted_at = now

    def served(self, service_s: float, num_tokens: int) -> None:
        """A request ended after `service_s` with nodes, and with so many output tokens."""
        self._service.observe(service_s)
        self._per_token.observe(service_s / max(1, num_tokens))

    def wait_s(self, num_before: int) -> float:
        """Return how long a request waits behind so many others; 0 if nodes have room or nothing is known."""
        if self.blocked_since is None:
            return 0.0
        return (num_before + 1) * self._interval.mean

    def service_s(self, max_tokens: int) -> float:
        """Return how long most requests of at most so many tokens take once they have nodes; 0 if nothing is known."""
        return min(self._service.upper(NUM_SPREADS), max_tokens * self._per_token.upper(NUM_SPREADS))

    def retry_after_s(
        self, now: float, num_excess: int, num_running: int = 1, tenant: str = DEFAULT.name, part: float = 1.0
    ) -> float:
        """Return when a refused request should come again. `num_excess` requests of its tenant must leave before there
        is room for it; `num_running` are served now. `part`: the tenant's part of the grants.

        Each refused request gets a time of its own: if all came back at once, all but one would be refused again.
        """
        position = max(1, num_excess) + self.num_promised(now, tenant)
        interval = self._interval_s(now, max(1, num_running))
        if interval is None:
            earliest, latest = SOON_S
            after_s = earliest + (latest - earliest) * position / (position + _HALF)
        else:
            after_s = position * interval / part
        if after_s >= MAX_RETRY_S:
            return MAX_RETRY_S  # so do all after it until some promises end: it need not be counted
        heapq.heappush(self._promises.setdefault(tenant, []), now + after_s)
        return after_s

    def num_promised(self, now: float, tenant: str = DEFAULT.name) -> int:
        """Return how many refused clients of a tenant are still expected back."""
        promises = self._promises.get(tenant, [])
        while promises and promises[0] <= now:
            heapq.heappop(promises)
        if not promises:
            self._promises.pop(tenant, None)
        return len(promises)

    def _interval_s(self, now: float, num_running: int) -> float | None:
        """Return the time between grants while nodes are full, None if nothing is known. An overdue grant counts as if
        it came now. An average of few samples is shortened: a client that comes too early is told a better time, but
        one that comes too late leaves nodes idle."""
        since = 0.0 if self.blocked_since is None else now - max(self.blocked_since, self._granted_at)
        known = ((self._interval, 1), (self._service, num_running))
        guesses = [_believed(each.mean / number, each.count) for each, number in known if each.count]
        if self._interval.count >= min(2 * num_running, MEMORY):
            return min(guesses) + max(0.0, since - self._interval.mean) / (self._interval.count + 1)
        # The running requests may have begun together: then the first grants come late and all at once
        if guesses:
            return max(min(guesses), since / num_running)
        return since / num_running if since >= SOON_S[0] else None


def _believed(mean: float, num_samples: int) -> float:
    return mean if num_samples == MEMORY else mean * num_samples / (num_samples + 2)

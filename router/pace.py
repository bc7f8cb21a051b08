"""How fast a group serves, learned from its last requests: how long one that comes now would wait, and then take.

Those who are refused are told when to come again. They are promised grants one after the other, at the present pace:

    refused     a promise is made, for after those that are outstanding
    its time    has come: the promise is over, whether its client comes or not
    nodes have room again    half of the outstanding promises are void: their clients do not keep nodes busy

So nobody is sent away for longer than it takes to serve those who were sent away. A pace that turns out faster than the
one of earlier promises brings new promises nearer.
"""

from __future__ import annotations

import heapq

MAX_RETRY_S = 60.0  # nobody is told to come back later than that
NUM_SPREADS = 2  # above the mean: what takes longer is an exception
MEMORY = 16  # samples of a moving average
KEPT = 8  # of them, when nodes are full anew: requests may be others now
SOON_S = (1.0, 3.0)  # when those come again who are refused before anything is known
_HALF = 20  # of those, so many are told the earlier half of that time


class Average:
    """Moving averages of a figure and of its distance from that, over about MEMORY samples; None until there is one."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.spread = 0.0
        self.num_samples = 0

    def add(self, value: float) -> None:
        """Takes a sample in. The first ones weigh the same."""
        self.num_samples = min(self.num_samples + 1, MEMORY)
        if self.mean is None:
            self.mean = value
            return
        self.spread += (abs(value - self.mean) - self.spread) / self.num_samples
        self.mean += (value - self.mean) / self.num_samples

    def fade(self, num_samples: int) -> None:
        """Limit the weight of earlier samples to that of so many."""
        self.num_samples = min(self.num_samples, num_samples)


class Pace:
    """The pace of one group. Times are monotonic seconds.

    Only while nodes are full the time between two grants says how fast a queue would move: `blocked_since`.
    """

    def __init__(self) -> None:
        self.blocked_since: float | None = None
        self._granted_at = 0.0
        self._interval = Average()  # between grants
        self._service = Average()  # from the grant to the end
        self._per_token = Average()  # the same, for each output token
        self._promises: list[float] = []  # a heap: when those who were sent away are expected back

    def blocked(self, now: float) -> None:
        """The first who waits found no room."""
        if self.blocked_since is None:
            self.blocked_since = now
            self._interval.fade(KEPT)

    def unblocked(self) -> None:
        """Nobody waits, or whoever waits has found room."""
        if self.blocked_since is not None:
            self.blocked_since = None
            self._promises = sorted(self._promises)[: len(self._promises) // 2]

    def granted(self, now: float) -> None:
        """A request was given its nodes."""
        if self.blocked_since is not None:
            self._interval.add(now - max(self.blocked_since, self._granted_at))
        self._granted_at = now

    def served(self, service_s: float, num_tokens: int) -> None:
        """A request ended so long after its grant, with so many output tokens."""
        self._service.add(service_s)
        self._per_token.add(service_s / max(1, num_tokens))

    def wait_s(self, num_before: int) -> float:
        """How long a request waits before which so many are served; 0 where nodes have room or nothing is known."""
        if self.blocked_since is None or self._interval.mean is None:
            return 0.0
        return (num_before + 1) * self._interval.mean

    def service_s(self, max_tokens: int) -> float:
        """How long most requests of so many tokens at most take once they have nodes; 0 where nothing is known."""
        if self._service.mean is None or self._per_token.mean is None:
            return 0.0
        per_token = self._per_token.mean + NUM_SPREADS * self._per_token.spread
        return min(self._service.mean + NUM_SPREADS * self._service.spread, per_token * max_tokens)

    def retry_after_s(self, now: float, num_excess: int, num_running: int = 1) -> float:
        """When a request that is refused should come again, which `num_excess` others must leave for, while
        `num_running` are served.

        Each one who is refused is promised a grant of its own, after those promised to the ones refused before: if all
        came back at once, all but one would be refused again.
        """
        place = max(1, num_excess) + self.num_promised(now)
        interval = self._interval_s(now, max(1, num_running))
        if interval is None:
            earliest, latest = SOON_S
            after_s = earliest + (latest - earliest) * place / (place + _HALF)
        else:
            after_s = place * interval
        if after_s >= MAX_RETRY_S:
            return MAX_RETRY_S  # as everybody after it, until some promises are over: it need not be counted
        heapq.heappush(self._promises, now + after_s)
        return after_s

    def num_promised(self, now: float) -> int:
        """How many of those who were sent away are still expected back."""
        while self._promises and self._promises[0] <= now:
            heapq.heappop(self._promises)
        return len(self._promises)

    def _interval_s(self, now: float, num_running: int) -> float | None:
        """The time between grants while nodes are full; None as long as nothing tells. A grant that is overdue counts
        as one that comes now. Of few samples less is believed: who comes too early is told a better time, who comes too
        late leaves nodes idle."""
        since = 0.0 if self.blocked_since is None else now - max(self.blocked_since, self._granted_at)
        mean, num_samples = self._interval.mean, self._interval.num_samples
        guesses = [] if mean is None else [_believed(mean, num_samples)]
        if self._service.mean is not None:
            guesses.append(_believed(self._service.mean / num_running, self._service.num_samples))
        if mean is not None and num_samples >= min(2 * num_running, MEMORY):
            return min(guesses) + max(0.0, since - mean) / (num_samples + 1)
        # Those who run may have begun together: then the first grants come late, and in one moment
        if guesses:
            return max(min(guesses), since / num_running)
        return since / num_running if since >= SOON_S[0] else None


def _believed(mean: float, num_samples: int) -> float:
    return mean if num_samples == MEMORY else mean * num_samples / (num_samples + 2)

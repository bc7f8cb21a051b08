"""How fast a group serves, learned from its last requests: how long one that comes now would wait, and then take."""

from __future__ import annotations

MAX_RETRY_S = 60.0  # nobody is told to come back later than that
NUM_SPREADS = 2  # above the mean: what takes longer is an exception
_WEIGHT = 1 / 16  # of a new sample in a moving average


class Average:
    """Moving averages of a figure and of its distance from that; None until there is a sample."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.spread = 0.0

    def add(self, value: float) -> None:
        """Takes a sample in."""
        if self.mean is None:
            self.mean = value
            return
        self.spread += _WEIGHT * (abs(value - self.mean) - self.spread)
        self.mean += _WEIGHT * (value - self.mean)


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
        self._promised_at = 0.0  # when the last of those who were sent away is expected back

    def blocked(self, now: float) -> None:
        """The first who waits found no room."""
        if self.blocked_since is None:
            self.blocked_since = now

    def unblocked(self) -> None:
        """Nobody waits, or whoever waits has found room."""
        self.blocked_since = None

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

    def retry_after_s(self, now: float, num_excess: int) -> float:
        """When a request that is refused should come again, which `num_excess` others must leave for.

        Each one who is refused is promised a grant of its own, after those promised to the ones refused before: if all
        came back at once, all but one would be refused again.
        """
        interval = self._interval.mean or 1.0
        earliest = now + max(1, num_excess) * interval
        self._promised_at = min(max(earliest, self._promised_at + interval), now + MAX_RETRY_S)
        return self._promised_at - now

"""Rates and percentiles: what happened between two snapshots of GET /live.

The router counts since its start. If it has started again (another `epoch`), everything since that start is the
difference. A node counts since its own start, so a node that has started again is left out until the next snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import structs

from ..router.http.page.types import EndedRequests, Latencies, LatencyBuckets, LiveTotals, NodeCounters, Snapshot

WINDOW_S = 10.0  # what is shown now covers this time, on the page, too (RECENT_S)
_NONE = LiveTotals(
    requests=EndedRequests(0, 0, 0, 0),
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    transfer_bytes=0,
    transfer_pages=0,
    moves=0,
    preemptions=0,
    num_rounds=0,
    num_drafted=0,
    accepted_at=[],
)


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """Two percentiles of a latency, in seconds."""

    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class NodeRates:
    """Tokens and bytes of one node per second."""

    computed_tokens_per_s: float
    generated_tokens_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates, shares and percentiles of a time of `seconds`. None: nothing happened that the figure could be made of."""

    seconds: float
    requests: EndedRequests
    output_tokens: int
    moves: int
    requests_per_s: float  # requests that are done
    tokens_per_s: float
    cached_share: float | None  # of prompt tokens
    tokens_per_round: float | None
    acceptance: float | None  # share of drafted tokens
    ttft: LatencyQuantiles | None
    itl: LatencyQuantiles | None
    queue: LatencyQuantiles | None
    handoff: LatencyQuantiles | None
    nodes: dict[str, NodeRates]


def rates(old: Snapshot | None, new: Snapshot) -> Rates:
    """Return what happened from `old` to `new`; since the router's start, if `old` is None or of an earlier start."""
    if old is None or old.router.epoch != new.router.epoch:
        old = _at_start(new)
    seconds = max(new.router.uptime_s - old.router.uptime_s, 1e-3)  # `at` may step when a clock is set
    before, after = old.totals, new.totals
    ended = (b - a for a, b in zip(structs.astuple(before.requests), structs.astuple(after.requests), strict=True))
    requests = EndedRequests(*ended)
    output_tokens = after.output_tokens - before.output_tokens
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    nodes = _serving_on(old, new)
    counters = [(before, after)] if new.sees == "counts" else list(nodes.values())
    tokens_per_round, acceptance = _speculation(counters)
    latencies = {
        name: _percentiles(getattr(old.latencies, name), getattr(new.latencies, name))
        for name in Latencies.__struct_fields__
    }
    return Rates(
        seconds=seconds,
        requests=requests,
        output_tokens=output_tokens,
        moves=after.moves - before.moves,
        requests_per_s=requests.done / seconds,
        tokens_per_s=output_tokens / seconds,
        cached_share=(after.cached_tokens - before.cached_tokens) / prompt_tokens if prompt_tokens else None,
        tokens_per_round=tokens_per_round,
        acceptance=acceptance,
        nodes={
            name: NodeRates(
                (b.computed_tokens - a.computed_tokens) / seconds,
                (b.generated_tokens - a.generated_tokens) / seconds,
                (b.bytes_moved - a.bytes_moved) / seconds,
            )
            for name, (a, b) in nodes.items()
        },
        **latencies,
    )


class Window:
    """The snapshots of the last WINDOW_S, and what happened between the first and the last of them."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()

    def add(self, snapshot: Snapshot) -> Rates | None:
        """Return what happened in the window that ends with `snapshot`. None: it is the first one of this router."""
        kept = self._snapshots
        if kept and kept[-1].router.epoch != snapshot.router.epoch:
            kept.clear()
        kept.append(snapshot)
        while len(kept) > 2 and snapshot.router.uptime_s - kept[1].router.uptime_s >= WINDOW_S:
            kept.popleft()
        return rates(kept[0], snapshot) if len(kept) > 1 else None


@dataclass(slots=True)
class Sums:
    """Sums since the first snapshot, over restarts of the router."""

    requests: EndedRequests = field(default=EndedRequests(0, 0, 0, 0))
    tokens: int = 0
    busy_s: float = 0.0  # time in which tokens came
    moves: int = 0
    _last: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Add what happened since the last snapshot."""
        last, self._last = self._last, snapshot
        now = rates(last, snapshot)
        ended = zip(structs.astuple(self.requests), structs.astuple(now.requests), strict=True)
        self.requests = EndedRequests(*map(sum, ended))
        self.tokens += now.output_tokens
        self.busy_s += now.seconds if now.output_tokens else 0.0
        self.moves += now.moves


def _at_start(snapshot: Snapshot) -> Snapshot:
    """Return what a snapshot would have been at the router's start."""
    empty = {
        name: structs.replace(buckets, counts=[0] * len(buckets.counts))
        for name, buckets in structs.asdict(snapshot.latencies).items()
    }
    router = structs.replace(snapshot.router, uptime_s=0.0)
    return structs.replace(snapshot, router=router, totals=_NONE, latencies=Latencies(**empty), nodes=[])


def _serving_on(old: Snapshot, new: Snapshot) -> dict[str, tuple[NodeCounters, NodeCounters]]:
    """Return the counters before and after of each node that is in both snapshots and has not started again."""
    before = {node.id: node.counters for node in old.nodes if node.counters is not None}
    both = {node.id: (before[node.id], node.counters) for node in new.nodes if node.counters and node.id in before}
    return {
        name: (a, b)
        for name, (a, b) in both.items()
        if b.steps >= a.steps and b.computed_tokens >= a.computed_tokens and b.generated_tokens >= a.generated_tokens
    }


def _speculation(
    counters: list[tuple[NodeCounters, NodeCounters]] | list[tuple[LiveTotals, LiveTotals]],
) -> tuple[float | None, float | None]:
    """Return tokens per round, and the share of drafted tokens that was accepted."""
    num_rounds = num_drafted = num_accepted = 0
    for before, after in counters:
        num_rounds += after.num_rounds - before.num_rounds
        num_drafted += after.num_drafted - before.num_drafted
        num_accepted += sum(after.accepted_at) - sum(before.accepted_at)
    if num_rounds <= 0 or num_accepted < 0:  # sums over nodes fall if one is lost
        return None, None
    return 1 + num_accepted / num_rounds, num_accepted / num_drafted if num_drafted > 0 else None


def _percentiles(old: LatencyBuckets, new: LatencyBuckets) -> LatencyQuantiles | None:
    """Return the percentiles of the values that came in between; None if none came."""
    counts = [b - a for a, b in zip(old.counts, new.counts, strict=True)]
    return (
        LatencyQuantiles(*(_percentile(new.bounds_s, counts, share) for share in (0.5, 0.95))) if sum(counts) else None
    )


def _percentile(bounds_s: Sequence[float], counts: list[int], share: float) -> float:
    """Return a percentile; the values of a bucket count as spread evenly. Above the last bound it is that bound."""
    rank = share * sum(counts)
    for (low, high), count in zip(pairwise([0.0, *bounds_s]), counts, strict=False):
        if count and rank <= count:
            return low + (high - low) * rank / count
        rank -= count
    return bounds_s[-1]

"""Snapshots of the service. They are read from the books of the registry, the queues, the requests and the metrics, and
nothing is counted for them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import pairwise, zip_longest
from math import inf
from typing import NamedTuple, cast

from msgspec import structs

from ....metadata.version import package_version
from ....metadata.wire.node_info import NodeStats
from ...dispatching.runner import RunningDispatcher
from ...figures.metrics import INTERVAL_S, LATENCY_S, Metrics
from ...nodes.node import Node, NodeGroup
from ...nodes.node_history import LOSS_WORDS, NodeHistory
from ...requests.request import Request, Sequence
from ...requests.trace import Span
from .owned_pages import NodePages
from .reasons import GroupQueue, PairStanding, Standing, group_queue, node_standing, pair_standing, why_waits
from .types import (
    EndedRequests,
    Latencies,
    LatencyBuckets,
    LiveCounts,
    LiveNode,
    LivePair,
    LiveRequest,
    LiveRouter,
    LiveStage,
    LiveTotals,
    LiveWait,
    NodeCounters,
    OwnedPages,
    Sees,
    Snapshot,
)

MAX_REQUESTS = 200  # of the newest live ones
GONE_S = 60.0  # for so long a lost node is shown
_WAITING = ("queue", "reserve", "prefill", "local prefill", "handoff", "paused")  # stages without new tokens
_COUNTERS = {  # names of metrics -> fields of LiveTotals
    "baton_prompt_tokens_total": "prompt_tokens",
    "baton_cached_tokens_total": "cached_tokens",
    "baton_transfer_bytes_total": "transfer_bytes",
    "baton_transfer_pages_total": "transfer_pages",
    "baton_moved_requests_total": "moves",
}
_HISTOGRAMS = {
    "baton_ttft_seconds_bucket": "ttft",
    "baton_queue_seconds_bucket": "queue",
    "baton_transfer_seconds_bucket": "handoff",
}
_OUTCOMES = "baton_requests_total"


class Snapshots:
    """Reads snapshots. `why_not_ready()` says what is missing before requests are served as meant."""

    def __init__(
        self,
        dispatcher: RunningDispatcher,
        metrics: Metrics,
        why_not_ready: Callable[[], str | None],
        is_draining: Callable[[], bool],
    ) -> None:
        self.pages = NodePages(dispatcher)
        self._dispatcher, self._metrics = dispatcher, metrics
        self._why_not_ready, self._is_draining = why_not_ready, is_draining
        self._began = time.monotonic()

    def close(self) -> None:
        """Ask nodes nothing more."""
        self.pages.close()

    def read(self, sees: Sees, *, with_pages: bool = True) -> Snapshot:
        """Return the state of the service now. `with_pages`: nodes are asked for their pages by owner."""
        now, registry = time.monotonic(), self._dispatcher.registry
        requests = [request for request in self._dispatcher.requests.values() if not request.is_canary]
        snapshot = Snapshot(
            at=round(time.time(), 3),
            sees=sees,
            router=self._router(sees, now),
            models=sorted(group.key.model for group in registry.models()),
            counts=LiveCounts(self._dispatcher.queues.num_waiting, sum(map(_is_running, requests))),
            totals=self._totals([node.stats for node in registry.nodes.values()]),
            latencies=self._latencies(),
        )
        if sees == "counts":
            return snapshot
        standings = self._pair_standings()
        stages = self._stages(requests, now)
        newest = nlargest(MAX_REQUESTS, stages, key=lambda stage: stage.request.created_at)
        return structs.replace(
            snapshot,
            nodes=[
                *self._nodes(standings, now, with_pages=with_pages),
                *filter(None, (_gone(each, now) for each in registry.histories)),
            ],
            pairs=[
                LivePair(prefill.node_id, decode.node_id, *standing)
                for prefill, decode, standing in standings
                if prefill is not None
            ],
            requests=[_live_request(stage, now) for stage in newest],
            num_requests=len(stages),
            waits=_waits(stages, now),
        )

    def _router(self, sees: Sees, now: float) -> LiveRouter:
        reason = "the router is shutting down" if self._is_draining() else self._why_not_ready()
        return LiveRouter(
            version=package_version(),
            epoch=self._dispatcher.epoch,
            uptime_s=round(now - self._began, 3),
            is_ready=reason is None,
            is_draining=self._is_draining(),
            reason=reason if reason is None or sees == "everything" else "no request could be served now",
        )

    def _totals(self, stats: list[NodeStats]) -> LiveTotals:
        sums, outcomes = Counter[str](), Counter[str]()
        for sample in self._metrics.samples(*_COUNTERS, _OUTCOMES):
            if sample.name == _OUTCOMES:
                outcomes[sample.labels["outcome"]] += int(sample.value)
            else:
                sums[_COUNTERS[sample.name]] += int(sample.value)
        accepted = zip_longest(*(each.accepted_at for each in stats), fillvalue=0)
        return LiveTotals(
            requests=EndedRequests(**{name: outcomes[name] for name in EndedRequests.__struct_fields__}),
            output_tokens=sum(self._metrics.of_tokens.num_tokens.values()),
            preemptions=sum(each.preemptions for each in stats),
            num_rounds=sum(each.num_rounds for each in stats),
            num_drafted=sum(each.num_drafted for each in stats),
            accepted_at=[sum(at) for at in accepted],
            **{name: sums[name] for name in _COUNTERS.values()},
        )

    def _latencies(self) -> Latencies:
        found: dict[str, Counter[float]] = {name: Counter() for name in _HISTOGRAMS.values()}
        for sample in self._metrics.samples(*_HISTOGRAMS):
            found[_HISTOGRAMS[sample.name]][float(sample.labels["le"])] += int(sample.value)
        buckets: dict[str, LatencyBuckets] = {}
        for name, up_to in found.items():
            sums = [up_to[bound] for bound in (*LATENCY_S, inf)]
            buckets[name] = LatencyBuckets(LATENCY_S, [each - before for before, each in pairwise([0, *sums])])
        return Latencies(itl=LatencyBuckets(INTERVAL_S, self._metrics.of_tokens.intervals), **buckets)

    def _pair_standings(self) -> list[_Pair]:
        """Return the states of all pairs, and of the decode nodes alone that compute prompts."""
        health = self._dispatcher.health
        return [
            _Pair(*nodes, pair_standing(health, *nodes))
            for group in self._dispatcher.registry.groups.values()
            for nodes in (*group.pairs(), *((None, node) for node in group.local_nodes()))
        ]

    def _nodes(self, pairs: list[_Pair], now: float, *, with_pages: bool) -> Iterator[LiveNode]:
        registry, pages = self._dispatcher.registry, self.pages.look() if with_pages else {}
        of_node: defaultdict[Node, list[PairStanding]] = defaultdict(list)
        for prefill, decode, standing in pairs:
            of_node[decode].append(standing)
            if prefill is not None:
                of_node[prefill].append(standing)
        for node in registry.nodes.values():
            standing = node_standing(node, of_node[node], registry, now)
            yield _live_node(node, standing, pages.get(node.node_id), now)

    def _stages(self, requests: Iterable[Request], now: float) -> list[_Stage]:
        """Return where each live request is."""
        queues, health = self._dispatcher.queues, self._dispatcher.health
        of_group: dict[NodeGroup, GroupQueue] = {}
        stages: list[_Stage] = []
        for request in requests:
            group = request.group
            if group not in of_group:
                of_group[group] = group_queue(group, queues.waiting_in(group), health, now)
            stages.append(_stage(request, of_group[group]))
        return stages


class _Stage(NamedTuple):
    """Where a live request is: its first choice that still runs, the last span of that, and what it waits for."""

    request: Request
    sequence: Sequence
    span: Span
    wait: str


class _Pair(NamedTuple):
    prefill: Node | None
    decode: Node
    standing: PairStanding


def _is_running(request: Request) -> bool:
    return any(attempt.dispatched for attempt in request.attempts.values())


def _live_node(node: Node, standing: Standing, pages: OwnedPages | None, now: float) -> LiveNode:
    hello, beat, load, stats = node.hello, node.beat, node.load, node.stats
    place = hello.place
    return LiveNode(
        id=node.node_id,
        role=node.role,
        model=hello.model.name,
        group=None if place is None else place.group,
        rank=0 if place is None else place.rank,
        num_ranks=hello.capacity.num_ranks if place is None else place.size,
        state=standing.state,
        why=standing.why,
        last_seen_s=round(now - node.last_seen, 3),
        phase=None if beat is None else beat.phase,
        phase_age_s=None if beat is None else round(beat.phase_age_s, 3),
        step=None if beat is None else beat.step,
        pages=pages,
        free_pages=load.free_pages,
        num_pages=node.num_pages,
        free_tails=load.free_tails,
        num_tails=hello.capacity.num_tails,
        page_size=hello.capacity.page_size,
        max_running=node.max_running,
        running=load.running,
        waiting=load.waiting,
        tickets=load.tickets,
        queued_tokens=load.queued_tokens,
        round_s=round(load.round_s, 6),
        counters=NodeCounters(**{name: getattr(stats, name) for name in NodeCounters.__struct_fields__}),
    )


def _gone(history: NodeHistory, now: float) -> LiveNode | None:
    """Return a node that was lost lately and has not come back."""
    if history.lost_at is None or history.last_loss is None or now - history.lost_at > GONE_S:
        return None
    return LiveNode(
        id=history.node_id,
        role=history.role,
        model="",
        group=history.unit if history.unit != history.node_id else None,
        rank=0,
        num_ranks=1,
        state="gone",
        why=LOSS_WORDS[history.last_loss],
        last_seen_s=round(now - history.lost_at, 3),
    )


def _stage(request: Request, queue: GroupQueue) -> _Stage:
    sequence = next((each for each in request.sequences if each.finish_reason is None), request.sequences[0])
    span = request.timeline.last_span(sequence.index)
    return _Stage(request, sequence, span, why_waits(request, sequence.attempt, span, queue))


def _live_request(stage: _Stage, now: float) -> LiveRequest:
    request, sequence, span, wait = stage
    attempt = sequence.attempt
    prefill, decode = (attempt.prefill, attempt.decode) if attempt is not None else (None, None)
    return LiveRequest(
        rid=request.rid,
        model=request.group.key.model,
        stage=cast(LiveStage, span.name),
        node=span.node,
        prefill="" if prefill is None else prefill.node_id,
        decode="" if decode is None else decode.node_id,
        num_prompt=len(request.prompt_ids),
        num_tokens=request.num_generated,
        age_s=round(now - request.created_at, 3),
        why="; ".join(filter(None, (wait, request.timeline.placement(sequence.index)))),
    )


def _waits(stages: Iterable[_Stage], now: float) -> list[LiveWait]:
    """Return where requests wait, and why: those that wait longest first."""
    ages: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for request, _, span, wait in stages:
        if span.name in _WAITING:
            ages[span.name, wait].append(round(now - request.created_at, 3))
    waits = [LiveWait(where, why, len(each), max(each)) for (where, why), each in ages.items()]
    return sorted(waits, key=lambda wait: wait.oldest_s, reverse=True)

"""Metrics for Prometheus. Counts per request use prometheus_client. Counts per token use a histogram of our own, which
is much cheaper. Metrics of nodes are read from the registry when Prometheus asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...metadata.version import package_version
from ...metadata.wire.messages import Admitted, PrefillDone
from ..nodes.node import Node
from ..nodes.prompt_role import PromptPlace
from ..nodes.registry import Registry
from ..requests.request import Request
from ..requests.request import Sequence as Output
from ..tenants.fair_share import DEFAULT
from ..waiting.admission import Queues
from .other_names import VLLM, OtherNames, old_names
from .service_figures import ServiceFigures, TenantFigures

MetricNames = Literal["baton", "vllm"]
MoveReason = Literal["lost", "failed", "drained"]  # a node was lost, an attempt failed, or a drain ran out of time
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
INTERVAL_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
disable_created_metrics()  # they double the counters' series, and nobody reads them
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class TokenFigures(Collector):
    """Output tokens and inter-token latency, by model."""

    def __init__(self) -> None:
        self.num_tokens: dict[str, int] = {}
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, model: str, interval_s: float, num_tokens: int) -> None:
        """Count `num_tokens` that came `interval_s` after the tokens before them, as intervals of equal length."""
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(INTERVAL_S) + 1)
            self._sums[model] = 0.0
        counts[bisect_left(INTERVAL_S, interval_s / num_tokens)] += num_tokens
        self._sums[model] += interval_s

    @property
    def intervals(self) -> list[int]:
        """Numbers of intervals between output tokens, of all models: up to each bound of INTERVAL_S, and above them."""
        return [sum(counts) for counts in zip([0] * (len(INTERVAL_S) + 1), *self._counts.values(), strict=True)]

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("baton_output_tokens", "Tokens sent to clients.", labels=["model"])
        for model, count in self.num_tokens.items():
            tokens.add_metric([model], count)
        yield tokens
        intervals = HistogramMetricFamily("baton_itl_seconds", "Time between output tokens.", labels=["model"])
        for model, counts in self._counts.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*map(str, INTERVAL_S), "+Inf"), counts, strict=True):
                total += count
                buckets.append((bound, total))
            intervals.add_metric([model], buckets, self._sums[model])  # pyright: ignore[reportArgumentType]
        yield intervals


class NodeFigures(Collector):
    """Metrics that nodes report in heartbeats, restarts and losses of nodes, and the number of waiting requests."""

    def __init__(self, registry: Registry, num_waiting: Callable[[], int]) -> None:
        self._registry = registry
        self._num_waiting = num_waiting

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_waiting_requests", "Requests without nodes yet.", value=self._num_waiting())
        nodes = list(self._registry.nodes.values())
        labels = ["node", "role", "model"]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"baton_node_{name}", text, labels=labels)
            for node in nodes:
                gauge.add_metric([node.node_id, node.role, node.hello.model.name], value(node))
            yield gauge
        for name in _COUNTERS:
            counter = CounterMetricFamily(f"baton_node_{name}", f"{name} since the node's start.", labels=labels)
            for node in nodes:
                counter.add_metric([node.node_id, node.role, node.hello.model.name], getattr(node.stats, name))
            yield counter
        for name, field in _OF_HOST.items():
            counter = CounterMetricFamily(f"baton_node_{name}", f"{name} of the host and disk tiers.", labels=labels)
            for node in nodes:
                value = 0 if node.stats.host is None else getattr(node.stats.host, field)
                counter.add_metric([node.node_id, node.role, node.hello.model.name], value)
            yield counter
        accepted = CounterMetricFamily(
            "baton_node_accepted_drafts", "Drafts accepted, by their place in a round.", labels=[*labels, "position"]
        )
        for node in nodes:
            for position, count in enumerate(node.stats.accepted_at, 1):
                accepted.add_metric([node.node_id, node.role, node.hello.model.name, str(position)], count)
        yield accepted
        yield from _figures_of_ranks(nodes)
        yield from self._comings()

    def _comings(self) -> Iterator[Metric]:
        """Restarts and losses by node name, whether or not the node is here."""
        restarts = CounterMetricFamily(
            "baton_node_restarts", "Times that a node joined again after a new start.", labels=["node", "role"]
        )
        losses = CounterMetricFamily(
            "baton_node_losses", "Times that a node was lost, by how.", labels=["node", "role", "reason"]
        )
        for coming in self._registry.histories:
            restarts.add_metric([coming.node_id, coming.role], coming.num_restarts)
            for loss, count in coming.losses.items():
                losses.add_metric([coming.node_id, coming.role, loss], count)
        yield restarts
        yield losses


def _figures_of_ranks(nodes: Iterable[Node]) -> Iterator[Metric]:
    """Figures that differ by rank. A node has some of them: see `_BY_RANK`."""
    for kind, name, text, first, values in _BY_RANK:
        family = kind(f"baton_node_rank_{name}", text, labels=["node", "role", "model", "rank"])
        for node in nodes:
            place = node.hello.place
            start = place.rank if place is not None and first == 0 else first
            for rank, value in enumerate(values(node), start):
                family.add_metric([node.node_id, node.role, node.hello.model.name, str(rank)], value)
        yield family


# kind, name, text, first rank, and the values of this rank and those above
_BY_RANK: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, int, Callable[[Node], Sequence[float]]], ...
] = (
    (
        GaugeMetricFamily,
        "free_pages",
        "Pages of the rank's own pool that are free, or cached without a reference.",
        0,
        lambda node: [rank.free_pages for rank in node.load.ranks],
    ),
    (
        GaugeMetricFamily,
        "running",
        "Requests that run on the rank alone.",
        0,
        lambda node: [rank.running for rank in node.load.ranks],
    ),
    (
        CounterMetricFamily,
        "idle_rounds",
        "Rounds in which other ranks had sequences and this one had none.",
        0,
        lambda node: node.stats.idle_rounds,
    ),
    (
        GaugeMetricFamily,
        "silent_seconds",
        "Seconds since the rank's process said that it runs.",
        1,
        lambda node: node.beat.rank_silences_s if node.beat is not None else (),
    ),
)
_GAUGES: tuple[tuple[str, str, Callable[[Node], float]], ...] = (
    ("ranks", "Ranks that share the node's model.", lambda node: node.hello.capacity.num_ranks),
    ("pages", "KV pages that requests may use.", lambda node: node.hello.capacity.num_pages),
    ("free_pages", "Pages free, or cached without a reference.", lambda node: node.load.free_pages),
    ("tail_pages", "Tail pages that requests may use.", lambda node: node.hello.capacity.num_tails),
    ("free_tail_pages", "Tail pages free, or cached without a reference.", lambda node: node.load.free_tails),
    ("running", "Requests that run.", lambda node: node.load.running),
    ("waiting", "Requests that wait on the node.", lambda node: node.load.waiting),
    ("tickets", "Handoffs that are open.", lambda node: node.load.tickets),
    (
        "quarantined_slots",
        "Slots of NIXL's staging ring whose reads were given up and are not over.",
        lambda node: node.load.quarantined_slots,
    ),
    ("queued_tokens", "Prompt tokens still to compute.", lambda node: node.load.queued_tokens),
    (
        "prompt_token_seconds",
        "Seconds per prompt token under the present load; 0: not measured.",
        lambda node: node.load.prompt_token_s,
    ),
    ("round_seconds", "Seconds of a round of a decode node; 0: not measured.", lambda node: node.load.round_s),
    (
        "told_pages",
        "Cached pages, tail pages included, that the node has told the router.",
        lambda node: len(node.cache),
    ),
    (
        "late_cache_news",
        "1: the node's news of cached pages is late, so that its load alone counts.",
        lambda node: node.cache.state(time.monotonic()) == "late",
    ),
    (
        "host_pages",
        "Pages and tail pages that the host tier has room for.",
        lambda node: 0 if node.stats.host is None else node.stats.host.num_slots,
    ),
    (
        "used_host_pages",
        "Pages and tail pages in the host tier.",
        lambda node: 0 if node.stats.host is None else node.stats.host.num_used,
    ),
    (
        "cache_file_bytes",
        "Bytes of the files of cached pages.",
        lambda node: 0 if node.stats.host is None else node.stats.host.file_bytes,
    ),
    (
        "draining",
        "1: it takes nothing new, as it drains or leaves.",
        lambda node: node.is_draining,
    ),
)
_OF_HOST = {  # counters of the host tier, and the fields that have them
    "pages_stored": "num_stored",
    "pages_restored": "num_restored",
    "restore_seconds": "restore_seconds",
    "files_written": "files_written",
    "files_read": "files_read",
    "files_damaged": "files_damaged",
    "disk_failures": "disk_failures",
}
_COUNTERS = (
    "steps",
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "borrowed_tokens",
    "generated_tokens",
    "preemptions",
    "pages_moved",
    "bytes_moved",
    "checksum_failures",
    "dropped_frames",
    "transfer_seconds",
    "num_rounds",
    "num_drafted",
    "masked_rounds",
    "late_masks",
    "mask_seconds",
)


class Metrics:
    """All metrics of the router. With the names "vllm", some have vLLM's names as well as Baton's."""

    def __init__(self, names: MetricNames = "baton") -> None:
        registry = CollectorRegistry()
        self._registry = registry
        others = (*old_names(), *(VLLM if names == "vllm" else ()))
        self._page: Collector = OtherNames(registry, others) if others else registry
        self._requests = _counter(registry, "baton_requests", "Requests by outcome.", ["model", "outcome"])
        self._ended = _counter(
            registry, "baton_finished_outputs", "Outputs of finished requests by why they ended.", ["model", "reason"]
        )
        self._moved = _counter(
            registry, "baton_moved_requests", "Times that a request went on on other nodes.", ["model", "reason"]
        )
        self._placed = _counter(
            registry,
            "baton_placed_prompts",
            "Prompts given to prefill nodes (remote) or decode nodes (local), by reason.",
            ["model", "place", "reason"],
        )
        self._http = _counter(registry, "baton_http_responses", "HTTP responses.", ["status"])
        self._ttft = _histogram(registry, "baton_ttft_seconds", "Time to first token.")
        self._e2e = _histogram(registry, "baton_e2e_seconds", "Time from a request to its end.")
        self._queue = _histogram(registry, "baton_queue_seconds", "Time a request waited in the router for nodes.")
        self._prefill_queue = _histogram(
            registry, "baton_prefill_queue_seconds", "Time a prompt waited on its prefill node."
        )
        self._compute = _histogram(registry, "baton_prefill_compute_seconds", "Time a prompt took to compute.")
        self._transfer = _histogram(registry, "baton_transfer_seconds", "Time from claim to admission on decode.")
        self._bytes = _counter(registry, "baton_transfer_bytes", "KV bytes handed over.", ["model"])
        self._pages = _counter(registry, "baton_transfer_pages", "KV pages handed over.", ["model"])
        self._prompt = _counter(registry, "baton_prompt_tokens", "Prompt tokens of finished requests.", ["model"])
        self._cached = _counter(registry, "baton_cached_tokens", "Those found in a prefix cache.", ["model"])
        self._tokens, self.tenants = TokenFigures(), TenantFigures()
        registry.register(self._tokens)
        registry.register(self.tenants)
        ProcessCollector(registry=registry)
        build = Gauge("baton_build_info", "1; the label is Baton's version.", ["version"], registry=registry)
        build.labels(package_version()).set(1)

    def watch_nodes(self, nodes: Registry, num_waiting: Callable[[], int]) -> None:
        """Add the metrics of nodes."""
        self._registry.register(NodeFigures(nodes, num_waiting))

    def watch_service(
        self, nodes: Registry, queues: Queues, requests: Mapping[str, Request], is_ready: Callable[[], bool]
    ) -> None:
        """Add the metrics of the whole service."""
        self._registry.register(ServiceFigures(nodes, queues, requests, is_ready))
        self.tenants.num_waiting = lambda: queues.num_waiting_of

    def page(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self._page)

    @property
    def of_tokens(self) -> TokenFigures:
        """Output tokens, and the intervals between them."""
        return self._tokens

    def samples(self, *names: str) -> Iterator[Sample]:
        """Yield the samples of these names. They belong to counters or histograms of requests."""
        for family in self._registry.restricted_registry(names).collect():
            yield from family.samples

    def count_http(self, status: int) -> None:
        """An HTTP response was begun. Answers to probes do not count."""
        self._http(status).inc()

    def count_request(self, model: str, outcome: str, tenant: str = DEFAULT.name) -> None:
        """A request ended: done, failed, cancelled or refused."""
        self._requests(model, outcome).inc()
        self.tenants.counts[tenant].outcomes[outcome] += 1

    def moved(self, request: Request, reason: MoveReason) -> None:
        """A request goes on on other nodes."""
        self._moved(request.group.key.model, reason).inc()

    def placed(self, request: Request, place: PromptPlace) -> None:
        """A prefill or a decode node computes a prompt."""
        self._placed(request.group.key.model, place.where, place.reason).inc()

    def dispatched(self, request: Request, now: float) -> None:
        """A request has nodes for the first time."""
        self._queue(request.group.key.model).observe(now - request.timeline.queued_at)

    def tokens(self, request: Request, sequence: Output, num_tokens: int, now: float) -> None:
        """A sequence has new tokens. To be called before their time is noted."""
        model = request.group.key.model
        seen_at = sequence.seen_at
        if seen_at is None and request.first_token_at is None:
            self._ttft(model).observe(now - request.created_at)
        if num_tokens:
            self._tokens.num_tokens[model] = self._tokens.num_tokens.get(model, 0) + num_tokens
            if seen_at is not None:
                self._tokens.observe(model, now - seen_at, num_tokens)

    def done(self, request: Request, now: float) -> None:
        """A request ended as it should."""
        model = request.group.key.model
        self._requests(model, "done").inc()
        for sequence in request.sequences:
            self._ended(model, sequence.finish_reason).inc()
        self._e2e(model).observe(now - request.created_at)
        self._prompt(model).inc(len(request.prompt_ids))
        self._cached(model).inc(request.num_cached or 0)
        counts = self.tenants.counts[request.tenant.name]
        counts.outcomes["done"] += 1
        counts.num_prompt += len(request.prompt_ids)
        counts.num_cached += request.num_cached or 0

    def prefill(self, node: Node, message: PrefillDone) -> None:
        """A prefill node has finished a prompt."""
        self._prefill_queue(node.hello.model.name).observe(message.queue_s)
        self._compute(node.hello.model.name).observe(message.compute_s)

    def transfer(self, node: Node, message: Admitted) -> None:
        """A decode node has all pages of a sequence."""
        model = node.hello.model.name
        self._transfer(model).observe(message.transfer_s)
        self._bytes(model).inc(message.num_bytes)
        self._pages(model).inc(message.num_pages)


def _counter(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> Callable[..., Counter]:
    """Register a counter. Return a function that returns its series with these values of the labels, and remembers it:
    prometheus_client would take a lock and copy the values each time."""
    return cache(Counter(name, text, labels, registry=registry).labels)


def _histogram(registry: CollectorRegistry, name: str, text: str) -> Callable[[str], Histogram]:
    """Register a histogram. Return a function that returns its series of a model, and remembers it."""
    return cache(Histogram(name, text, ["model"], buckets=LATENCY_S, registry=registry).labels)

"""Figures of the whole service for Prometheus: what gateways and autoscalers read, and the figures of each tenant.

Totals are read when Prometheus asks. Figures of tenants are counted as they happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..nodes.node import Node
from ..nodes.registry import Registry
from ..requests.request import Request
from ..tenants.fair_share import DEFAULT
from ..waiting.admission import Queues

MAX_TENANTS = 200  # that have series of their own
OTHER = "other"  # the label of all further ones


class TenantCounts:
    """Counts of one tenant."""

    __slots__ = ("num_cached", "num_output", "num_prompt", "outcomes")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_prompt = self.num_cached = 0  # tokens of finished requests
        self.num_output = 0


class CountsByTenant(dict[str, TenantCounts]):
    """Counts of the first MAX_TENANTS tenants that are asked for. All others have the counts `rest`."""

    def __init__(self) -> None:
        super().__init__({DEFAULT.name: TenantCounts()})
        self.rest = TenantCounts()

    def __missing__(self, tenant: str) -> TenantCounts:
        if len(self) >= MAX_TENANTS or tenant == OTHER:
            return self.rest
        counts = self[tenant] = TenantCounts()
        return counts


class TenantFigures(Collector):
    """Requests and tokens by tenant."""

    def __init__(self) -> None:
        self.counts = CountsByTenant()
        self.num_waiting: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "baton_tenant_requests", "Requests by tenant and outcome.", labels=["tenant", "outcome"]
        )
        everyone = {**self.counts, OTHER: self.counts.rest}
        for tenant, counts in everyone.items():
            for outcome, count in counts.outcomes.items():
                requests.add_metric([tenant, outcome], count)
        yield requests
        for name, text, value in _BY_TENANT:
            family = CounterMetricFamily(f"baton_tenant_{name}", text, labels=["tenant"])
            for tenant, counts in everyone.items():
                if counts is not self.counts.rest or value(counts):
                    family.add_metric([tenant], value(counts))
            yield family
        waiting = GaugeMetricFamily("baton_tenant_waiting_requests", "Requests without nodes yet.", labels=["tenant"])
        sums: Counter[str] = Counter()
        for tenant, count in self.num_waiting().items():
            sums[tenant if tenant in self.counts else OTHER] += count
        for tenant in (*self.counts, *({OTHER} & sums.keys())):
            waiting.add_metric([tenant], sums[tenant])
        yield waiting


_BY_TENANT: tuple[tuple[str, str, Callable[[TenantCounts], int]], ...] = (
    ("prompt_tokens", "Prompt tokens of finished requests.", lambda counts: counts.num_prompt),
    ("cached_tokens", "Those found in a prefix cache.", lambda counts: counts.num_cached),
    ("output_tokens", "Tokens sent to clients.", lambda counts: counts.num_output),
)


class ServiceFigures(Collector):
    """The load of the service, in all and by model, and whether it is ready."""

    def __init__(
        self, registry: Registry, queues: Queues, requests: Mapping[str, Request], is_ready: Callable[[], bool]
    ) -> None:
        self._registry, self._queues, self._requests, self._is_ready = registry, queues, requests, is_ready

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_ready", "1: GET /ready answers 200.", value=int(self._is_ready()))
        groups = list(self._registry.groups.values())
        running: Counter[str] = Counter({group.key.model: 0 for group in groups})
        waiting = running.copy()
        nodes: dict[str, list[Node]] = {group.key.model: [] for group in groups}
        for request in self._requests.values():
            if not request.is_canary and any(attempt.dispatched for attempt in request.attempts.values()):
                running[request.group.key.model] += 1
        for group in groups:
            waiting[group.key.model] += len(self._queues.waiting_in(group))
            nodes[group.key.model] += group.nodes.values()
        yield GaugeMetricFamily("baton_running_requests", "Requests that nodes work on.", value=running.total())
        usage = kv_usage(self._registry.nodes.values())
        yield GaugeMetricFamily("baton_kv_usage", "Part of the KV pages that requests use, 0 to 1.", value=usage)
        for name, text, values in (
            ("running_requests", "Requests that nodes work on.", running),
            ("waiting_requests", "Requests without nodes yet.", waiting),
            ("kv_usage", "Part of the KV pages that requests use, 0 to 1.", {m: kv_usage(nodes[m]) for m in nodes}),
        ):
            family = GaugeMetricFamily(f"baton_model_{name}", text, labels=["model"])
            for model, value in values.items():
                family.add_metric([model], value)
            yield family
        info = GaugeMetricFamily(
            "baton_kv_cache_info",
            "1; the labels are the tokens of a page and the number of pages that kv_usage counts.",
            labels=["model", "page_size", "num_pages"],
        )
        for model in nodes:
            num_pages: Counter[int] = Counter()  # by page size
            for node in _kv_nodes(nodes[model]):
                num_pages[node.hello.capacity.page_size] += node.hello.capacity.num_pages
            for page_size, count in num_pages.items():
                info.add_metric([model, str(page_size), str(count)], 1)
        yield info


def _kv_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return the decode nodes, where sequences stay; all nodes if none of them is a decode node."""
    nodes = list(nodes)
    return [node for node in nodes if node.role == "decode"] or nodes


def kv_usage(nodes: Iterable[Node]) -> float:
    """Return the part of the KV pages in use on the decode nodes; on all nodes if none of them is a decode node.
    Of kept pages and tail pages, return the larger part."""
    nodes = _kv_nodes(nodes)
    kept = _used(sum(node.hello.capacity.num_pages for node in nodes), sum(node.load.free_pages for node in nodes))
    return max(
        kept, _used(sum(node.hello.capacity.num_tails for node in nodes), sum(node.load.free_tails for node in nodes))
    )


def _used(num_pages: int, num_free: int) -> float:
    return min(1.0, max(0.0, 1.0 - num_free / num_pages)) if num_pages else 0.0

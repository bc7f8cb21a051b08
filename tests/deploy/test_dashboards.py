"""The Grafana dashboard and the alert rules ask only for metrics, labels and values that a router exports."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.metadata.wire.membership import Heartbeat
from baton.metadata.wire.node_info import Load, NodeStats

from ..router.conftest import RunningRouter
from ..router.fake_nodes import FakeCluster

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"
OF_PROMETHEUS = {"job", "instance"}  # labels that Prometheus adds when it scrapes
Labels = dict[str, set[str]]  # label -> its values


def panels() -> Iterator[dict[str, Any]]:
    board = json.loads((DASHBOARDS / "grafana.json").read_text())
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())["groups"]
    return group["rules"]


QUERIES = [  # what it is for, the expression, and the text that names labels of its result
    *((panel["title"], each["expr"], each["legendFormat"]) for panel in panels() for each in panel["targets"]),
    *((rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in rules()),
]


@pytest.fixture(scope="module")
def exported() -> Iterator[dict[str, Labels]]:
    """The labels of each metric of a router whose nodes served requests, speculated, failed, and were lost."""
    router = RunningRouter()
    cluster = FakeCluster(router.router.node_address, lambda prompt, choice: [5, 6, 7, 1])
    try:
        for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1")):
            cluster.add(role, name)
        router.wait_ready()
        assert router.request("POST", "/v1/completions", {"model": "fake", "prompt": "hello"})[0] == 200
        yield router.call(lambda: labels_of(after_faults(router)))
    finally:
        cluster.close()
        router.close()


def after_faults(router: RunningRouter) -> str:
    metrics, registry = router.router.metrics, router.router.dispatcher.registry
    decode, lost = (node for node in registry.nodes.values() if node.role == "decode")
    metrics.count_request("fake", "failed")
    metrics._moved("fake", "lost").inc()
    stats = NodeStats(num_rounds=4, num_drafted=8, accepted_at=(3, 1))
    decode.heard(Heartbeat(1, "idle", 0.0, 10.0, Load(free_pages=8, running=0, waiting=0), stats), 0.0)
    registry.connection_lost(lost.routing_id, 0.0)
    return metrics.page().decode()


def labels_of(page: str) -> dict[str, Labels]:
    found: dict[str, Labels] = {}
    for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
        labels = found.setdefault(sample.name, defaultdict(set))
        for name, value in sample.labels.items():
            labels[name].add(value)
    return found


def parsed(expression: str) -> promql.Expr:
    """Return the syntax tree, with a value for the variables that Grafana fills in."""
    return promql.parse(expression.replace("$__rate_interval", "5m").replace("$__range", "1h"))


def nodes_of(tree: promql.Expr) -> list[Any]:
    found: list[Any] = []
    promql.walk(tree, found.append)
    return found


def test_every_expression_asks_for_what_is_there(exported: dict[str, Labels]) -> None:
    for title, expression, words in QUERIES:
        check(title, expression, words, exported)


def check(title: str, expression: str, words: str, exported: dict[str, Labels]) -> None:
    """Check the metrics, labels and values that an expression names, and the labels of its result that `words` name."""
    nodes = nodes_of(parsed(expression))
    selectors = [node.vector_selector if isinstance(node, promql.MatrixSelector) else node for node in nodes]
    selectors = [each for each in selectors if isinstance(each, promql.VectorSelector)]
    assert selectors
    known = set(OF_PROMETHEUS)
    for selector in selectors:
        assert selector.name in exported, title
        labels = exported[selector.name]
        known |= labels.keys()
        for matcher in selector.matchers.matchers:
            is_variable = matcher.value.startswith("$")
            assert matcher.name in labels and (is_variable or matcher.value in labels[matcher.name]), matcher
    for node in nodes:
        modifier = node.modifier if isinstance(node, promql.AggregateExpr | promql.BinaryExpr) else None
        modifier = modifier.matching if isinstance(node, promql.BinaryExpr) and modifier is not None else modifier
        assert modifier is None or set(modifier.labels) <= known, title
    shown = re.findall(r"\{\{ ?(?:\$labels\.)?(\w+)", words.replace("{{ $value", ""))
    kept = [set(node.modifier.labels) for node in nodes if isinstance(node, promql.AggregateExpr) and node.modifier]
    visible = set.union(*kept) if kept else set() if has_aggregate(nodes) else known
    assert set(shown) <= visible, f"{title}: its text names a label that the result does not have"


def has_aggregate(nodes: list[Any]) -> bool:
    return any(isinstance(node, promql.AggregateExpr) for node in nodes)


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"].keys() == {"severity"}, rule
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


def test_panels_lie_side_by_side() -> None:
    """As Grafana draws them: no two overlap, and each describes itself."""
    cells = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and all(0 <= x < 24 for x, _ in cells)
    assert all(panel["description"] for panel in panels())

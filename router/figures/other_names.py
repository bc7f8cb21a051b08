"""Metrics under a second name: that of vLLM, which dashboards and gateways read, or the one of an older release.

`VLLM` and `REPLACED` are the mappings. Nothing is counted a second time: the values are read from Baton's own metrics
when Prometheus asks. With `--metrics-names baton` and nothing replaced, nothing of this exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...metadata.deprecation import Replaced

_OF_MODEL: Mapping[str, str] = MappingProxyType({"model": "model_name"})


class Name(NamedTuple):
    """A second name and the metric of Baton that has its values. `labels`: their names by ours, None if they are the
    same; a label that is not listed is left out. `values`: their values by ours of labels whose values differ; other
    series are left out."""

    theirs: str
    ours: str
    text: str
    labels: Mapping[str, str] | None = _OF_MODEL
    values: Mapping[str, Mapping[str, str]] = MappingProxyType({})


VLLM = (
    Name("vllm:num_requests_waiting", "baton_model_waiting_requests", "Requests without nodes yet."),
    Name("vllm:num_requests_running", "baton_model_running_requests", "Requests that nodes work on."),
    Name("vllm:kv_cache_usage_perc", "baton_model_kv_usage", "Part of the KV pages that requests use, 0 to 1."),
    Name(
        "vllm:cache_config_info",
        "baton_kv_cache_info",
        "1; the labels are the tokens of a page and the number of pages.",
        {**_OF_MODEL, "page_size": "block_size", "num_pages": "num_gpu_blocks"},
    ),
    Name("vllm:time_to_first_token_seconds", "baton_ttft_seconds", "Time to first token."),
    Name("vllm:inter_token_latency_seconds", "baton_itl_seconds", "Time between output tokens."),
    Name("vllm:e2e_request_latency_seconds", "baton_e2e_seconds", "Time from a request to its end."),
    Name("vllm:request_queue_time_seconds", "baton_queue_seconds", "Time a request waited in the router for nodes."),
    Name("vllm:prefix_cache_queries", "baton_prompt_tokens", "Prompt tokens of finished requests."),
    Name("vllm:prefix_cache_hits", "baton_cached_tokens", "Those found in a prefix cache."),
    Name("vllm:prompt_tokens", "baton_prompt_tokens", "Prompt tokens of finished requests."),
    Name("vllm:generation_tokens", "baton_output_tokens", "Tokens sent to clients."),
    Name(
        "vllm:request_success",
        "baton_finished_outputs",
        "Outputs by why they ended.",
        {**_OF_MODEL, "reason": "finished_reason"},
    ),
    Name(
        "vllm:request_success",
        "baton_requests",
        "Outputs by why they ended.",
        {**_OF_MODEL, "outcome": "finished_reason"},
        {"outcome": {"cancelled": "abort", "failed": "error"}},
    ),
)
# Metrics whose old names are still there, without `_total`. The old one's help text is the warning.
REPLACED: tuple[Replaced, ...] = ()


def old_names() -> tuple[Name, ...]:
    """Return the old names of metrics."""
    return tuple(Name(each.old, each.new, f"{each.words}.", None) for each in REPLACED if each.new is not None)


class OtherNames(Collector):
    """Collects all metrics of `ours`, then those of `names` under their second names."""

    def __init__(self, ours: Collector, names: Sequence[Name]) -> None:
        self._ours, self._names = ours, names

    def collect(self) -> Iterator[Metric]:
        ours: dict[str, Metric] = {}
        for family in self._ours.collect():
            ours[family.name] = family
            yield family
        theirs: dict[str, Metric] = {}
        for name in self._names:
            source = ours[name.ours]
            family = theirs.setdefault(name.theirs, Metric(name.theirs, name.text, source.type))
            family.samples += _renamed(name, source)
        yield from theirs.values()


def _renamed(name: Name, source: Metric) -> Iterator[Sample]:
    for sample in source.samples:
        if name.labels is None:
            yield sample._replace(name=name.theirs + sample.name.removeprefix(name.ours))
        elif all(sample.labels[label] in values for label, values in name.values.items()):
            labels = {
                name.labels.get(label, label): name.values.get(label, {}).get(value, value)
                for label, value in sample.labels.items()
                if label in name.labels or label == "le"
            }
            yield sample._replace(name=name.theirs + sample.name.removeprefix(name.ours), labels=labels)

"""A request's timeline as OpenTelemetry spans. The only module that imports OpenTelemetry; tracing.py imports it.

the request, a child of the client's span where it sent `traceparent`
  choice N, where there are several
    a part
      a chunk of the prompt
"""

from __future__ import annotations

import time
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from .parts import ChoiceLife, Part, RequestTimeline, timeline_of
from .trace import Timeline


class Spans:
    """Makes spans, with the times of the timeline, for the processors of `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def batched(cls, exporter: SpanExporter) -> Spans:
        """Spans that a thread sends, in batches; when its queue is full they are dropped."""
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def export(self, timeline: Timeline) -> None:
        """Makes all spans of a request that is over."""
        life = timeline_of(timeline, time.monotonic())
        clock = _Clock(self._tracer, int(timeline.received_at * 1e9))
        client = self._propagator.extract(timeline.trace_context)
        root = clock.start(f"generate {life.model}", 0.0, client, SpanKind.SERVER)
        if root.is_recording():  # else the sampler, or the client by its flags, wants none of it
            root.set_attributes(_about(life))
            if life.outcome == "failed":
                root.set_status(Status(StatusCode.ERROR, life.error))
            for choice in life.choices:
                self._choice(choice, root, life, clock)
        clock.end(root, life.total_s)

    def close(self) -> None:
        """Sends what is left. Blocks."""
        self._provider.shutdown()

    def _choice(self, choice: ChoiceLife, root: Span, life: RequestTimeline, clock: _Clock) -> None:
        if len(life.choices) == 1:
            _parts(choice, root, clock)
            return
        span = clock.start(f"choice {choice.index}", 0.0, set_span_in_context(root))
        span.set_attribute("gen_ai.usage.output_tokens", choice.num_tokens)
        _parts(choice, span, clock)
        clock.end(span, life.total_s)


class _Clock(NamedTuple):
    """Seconds since the request came -> nanoseconds since 1970."""

    tracer: Tracer
    begun_ns: int

    def start(self, name: str, at_s: float, context: Context, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return self.tracer.start_span(name, context, kind, start_time=self.begun_ns + round(at_s * 1e9))

    def end(self, span: Span, at_s: float) -> None:
        span.end(self.begun_ns + round(at_s * 1e9))


def _parts(choice: ChoiceLife, parent: Span, clock: _Clock) -> None:
    for part in choice.parts:
        span = clock.start(part.name, part.start_s, set_span_in_context(parent))
        span.set_attributes(_figures(part))
        at_s, until_s = part.start_s, part.start_s + part.seconds
        for chunk in part.chunks:
            at_s = min(until_s, at_s + chunk.waited_s)
            child = clock.start("chunk", at_s, set_span_in_context(span))
            child.set_attributes({"baton.num_chunks": chunk.num_chunks, "baton.num_tokens": chunk.num_tokens})
            at_s = min(until_s, at_s + chunk.compute_s)
            clock.end(child, at_s)
        clock.end(span, until_s)


def _figures(part: Part) -> dict[str, AttributeValue]:
    """What is known of the part beside its time."""
    values = {name: getattr(part, name) for name in part.__struct_fields__}
    skipped = ("name", "start_s", "seconds", "chunks")
    return {f"baton.{name}": value for name, value in values.items() if value and name not in skipped}


def _about(life: RequestTimeline) -> dict[str, AttributeValue]:
    """Names are those of the semantic conventions for generative AI where they have one."""
    reasons = [choice.finish_reason for choice in life.choices if choice.finish_reason is not None]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": life.model,
        "gen_ai.response.id": life.rid,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": life.num_prompt,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in life.choices),
        "baton.num_cached": life.num_cached or 0,
        "baton.outcome": life.outcome,
    }
    if life.ttft_s is not None:
        attributes["baton.ttft_s"] = life.ttft_s
    if life.client_id is not None:
        attributes["baton.client_id"] = life.client_id
    return attributes


def _resource() -> Resource:
    """As OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say; without a name there, baton-router."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "baton-router"}))
    return resource

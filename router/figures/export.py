"""Export of finished traces as OpenTelemetry spans, if a standard environment variable names an endpoint.

    the request, a child of the client's span if the client sent `traceparent`
      choice N, if there are several
        a span of the trace
          a chunk of the prompt

Without an endpoint, nothing is exported and OpenTelemetry is not imported: functions import it, not this module.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ...metadata.version import install_command
from ..requests.trace import RequestTrace, Span, TraceRecorder

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

SETTLE_S = 1.0  # a prefill node may report its times after the end of a request
CLOSE_S = 3.0  # for the last spans, when the router stops
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
NO_FIGURES = {"name", "start_s", "seconds", "prefill_times", "pull_times", "chunks", "sample_s", "last_s", "admit_s"}


class TraceExport:
    """Makes the OpenTelemetry spans of each request a little after its end. Belongs to the event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()
        self._waiting: dict[TraceRecorder, asyncio.TimerHandle] = {}

    def over(self, recorder: TraceRecorder) -> None:
        """Exports this request soon, because it is over."""
        self._waiting[recorder] = asyncio.get_running_loop().call_later(SETTLE_S, self.export, recorder)

    def export(self, recorder: TraceRecorder) -> None:
        """Make all spans of a request now, unless the sampler or the client's trace flags decide against it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._waiting.pop(recorder, None)
        trace = recorder.read(time.monotonic())
        begun_ns, client = int(trace.received_at * 1e9), self._propagator.extract(recorder.trace_context)

        def add(name: str, parent: Context, start_s: float, end_s: float, attributes: dict[str, Any]) -> Context:
            """Make a span and return the context for its children. They may end after it: all times are given."""
            start_ns = begun_ns + round(start_s * 1e9)
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)
            span.end(begun_ns + round(end_s * 1e9))
            return set_span_in_context(span)

        name = f"generate {trace.model}"
        root = self._tracer.start_span(name, client, SpanKind.SERVER, _about(trace), start_time=begun_ns)
        if trace.outcome == "failed":
            root.set_status(Status(StatusCode.ERROR, trace.error))
        root.end(begun_ns + round(trace.total_s * 1e9))
        if not root.get_span_context().trace_flags.sampled:
            return
        for sequence in trace.sequences:
            parent = set_span_in_context(root)
            if len(trace.sequences) > 1:
                attributes = {"gen_ai.usage.output_tokens": sequence.num_tokens}
                parent = add(f"choice {sequence.index}", parent, 0.0, trace.total_s, attributes)
            for span in sequence.spans:
                at_s, end_s = span.start_s, span.start_s + span.seconds
                context = add(span.name, parent, at_s, end_s, _figures(span))
                for chunk in span.prefill_times.chunks:
                    start_s = min(end_s, at_s + chunk.waited_s)
                    at_s = min(end_s, start_s + chunk.compute_s)
                    attributes = {"baton.num_chunks": chunk.num_chunks, "baton.num_tokens": chunk.num_tokens}
                    add("chunk", context, start_s, at_s, attributes)

    async def close(self) -> None:
        """Exports the waiting requests, and waits at most CLOSE_S until they are sent."""
        for recorder, timer in list(self._waiting.items()):
            timer.cancel()
            self.export(recorder)
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)  # may outlive the router
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_S)
        if thread.is_alive():
            logger.warning("the last traces could not be sent within %.0f s", CLOSE_S)


def configured_export(environ: Mapping[str, str]) -> TraceExport | None:
    """Return the export that the standard variables ask for, None if they ask for none or if packages are missing."""
    endpoint = next(filter(None, map(environ.get, ENDPOINTS)), None)
    if endpoint is None:
        return None
    protocol = next(filter(None, map(environ.get, PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning("traces go out as http/protobuf, not %s", protocol)
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        export = TraceExport(_batched(exporter))
    except ImportError as error:
        logger.warning("no traces: %s is missing: %s", error.name, install_command("otel"))
        return None
    logger.info("traces of requests go to %s", endpoint)
    return export


def _batched(exporter: SpanExporter) -> TracerProvider:
    """Return a provider with the service name baton-router unless another is set. Its thread sends spans in batches.
    Spans are dropped while its queue is full."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "baton-router"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _figures(span: Span) -> dict[str, Any]:
    """Attributes for all that is known of a span besides its time."""
    values = {**structs.asdict(span.prefill_times), **structs.asdict(span.pull_times), **structs.asdict(span)}
    return {f"baton.{name}": value for name, value in values.items() if value and name not in NO_FIGURES}


def _about(trace: RequestTrace) -> dict[str, Any]:
    """Attributes of a request, named by the semantic conventions for generative AI if these have a name."""
    attributes = {
        "gen_ai.request.model": trace.model,
        "gen_ai.response.id": trace.rid,
        "gen_ai.response.finish_reasons": [each.finish_reason for each in trace.sequences if each.finish_reason],
        "gen_ai.usage.input_tokens": trace.num_prompt,
        "gen_ai.usage.output_tokens": trace.num_tokens,
        "baton.num_cached": trace.num_cached or 0,
        "baton.outcome": trace.outcome,
        "baton.ttft_s": trace.ttft_s,
        "baton.client_id": trace.client_id,
    }
    return {name: value for name, value in attributes.items() if value is not None}

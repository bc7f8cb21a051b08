"""Traces, where an exporter is configured: requests become OpenTelemetry spans (spans.py) when they are over.

Nothing of OpenTelemetry is imported, and nothing is done, unless a standard variable names an endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from .trace import Timeline

logger = logging.getLogger(__name__)

SETTLE_S = 1.0  # what prefill tells of a request may come after its end
CLOSE_S = 3.0  # for the last spans, when the router stops
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Exporter(Protocol):
    """Who makes spans (spans.Spans)."""

    def export(self, timeline: Timeline, /) -> None:
        """Hands over a request's spans; does not wait for them to be sent."""
        ...

    def close(self) -> None:
        """Sends what is left. Blocks."""
        ...


class Tracing:
    """Exports each request a little after its end. Belongs to the event loop."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._waiting: dict[Timeline, asyncio.TimerHandle] = {}

    def over(self, timeline: Timeline) -> None:
        """A request is over."""
        self._waiting[timeline] = asyncio.get_running_loop().call_later(SETTLE_S, self._export, timeline)

    async def close(self) -> None:
        """Exports what waits, as far as that takes no longer than CLOSE_S."""
        for timeline, timer in list(self._waiting.items()):
            timer.cancel()
            self._export(timeline)
        thread = threading.Thread(target=self._exporter.close, name="traces", daemon=True)  # which nobody need wait for
        thread.start()
        deadline = time.monotonic() + CLOSE_S
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if thread.is_alive():
            logger.warning("the last traces could not be sent within %.0f s", CLOSE_S)

    def _export(self, timeline: Timeline) -> None:
        del self._waiting[timeline]
        self._exporter.export(timeline)


def tracing_from(environ: Mapping[str, str]) -> Tracing | None:
    """What the standard variables ask for; None where they ask for nothing, or the packages are not there."""
    endpoint = next((environ[name] for name in ENDPOINTS if environ.get(name)), None)
    if endpoint is None:
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning("traces go out as http/protobuf, not %s", protocol)
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        spans = import_module(".spans", __package__)
    except ImportError as error:
        logger.warning("no traces: %s is missing: pip install 'baton-serve[otel]'", error.name)
        return None
    logger.info("traces of requests go to %s", endpoint)
    return Tracing(spans.Spans.batched(exporter))

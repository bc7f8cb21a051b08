"""OpenTelemetry spans have the times and figures of the trace, and lie below the client's own span."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from baton.metadata.version import install_command
from baton.router.figures import export as export_module
from baton.router.figures.export import TraceExport, configured_export

from ..conftest import System
from ..dispatching.test_runner import wait_until
from ..requests.test_trace import Traced, whole_life

TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collected:
    """Makes spans and keeps them."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.export = TraceExport(self.provider)

    def all(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.all() if span.kind is SpanKind.SERVER]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.all() if span.parent and span.parent.span_id == parent.context.span_id]


def length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def check_sums(collected: Collected, parent: ReadableSpan) -> list[ReadableSpan]:
    """The spans below follow each other from the parent's beginning to its end."""
    children = collected.below(parent)
    assert children[0].start_time == parent.start_time
    assert children[-1].end_time == parent.end_time
    for child, following in pairwise(children):
        assert child.end_time == following.start_time
    return children


def test_spans_and_chunks_become_spans() -> None:
    traced, trace = whole_life()
    collected = Collected()
    collected.export.export(traced.recorder)
    [root] = collected.roots()
    assert (root.name, root.parent, length_s(root)) == ("generate demo", None, 9.5)
    assert root.start_time == int(trace.received_at * 1e9)
    children = check_sums(collected, root)
    assert [(span.name, length_s(span)) for span in children] == [
        (span.name, pytest.approx(span.seconds, abs=1e-9)) for span in trace.sequences[0].spans
    ]
    by_name = {span.name: span for span in children}
    assert by_name["pull"].attributes is not None
    assert by_name["pull"].attributes["baton.num_bytes"] == 3_000_000
    assert by_name["pull"].attributes["baton.node"] == "d0"
    chunks = collected.below(by_name["prefill"])
    assert [(span.name, length_s(span)) for span in chunks] == [("chunk", 0.25), ("chunk", 0.125)]
    assert chunks[-1].end_time == by_name["prefill"].end_time
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 628
    assert root.attributes["gen_ai.usage.output_tokens"] == 21


def test_choices_have_spans_of_their_own_and_errors_a_status() -> None:
    traced = Traced(3)
    traced.recorder.queued(1.0)
    traced.sequences[1].received += [1, 2]
    traced.recorder.begin(traced.sequences[1:2], "finish", 3.0)
    traced.end("failed", 4.0, "the model broke")
    collected = Collected()
    collected.export.export(traced.recorder)
    [root] = collected.roots()
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "the model broke"
    below = collected.below(root)
    assert sorted(span.name for span in below) == ["choice 0", "choice 1", "choice 2"]
    assert sorted(len(check_sums(collected, span)) for span in below) == [2, 2, 3]


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_clients_trace_goes_on_and_its_flags_are_obeyed(flags: str) -> None:
    recorder = whole_life()[0].recorder
    recorder.trace_context = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-{flags}", "tracestate": "a=b"}
    collected = Collected()
    collected.export.export(recorder)
    if flags == "00":
        assert collected.all() == []
        return
    [root] = collected.roots()
    assert root.parent is not None
    assert (root.parent.span_id, root.context.trace_id) == (int(CLIENT_SPAN, 16), int(TRACE, 16))
    assert {span.context.trace_id for span in collected.all()} == {int(TRACE, 16)}
    assert root.context.trace_state.get("a") == "b"


def test_a_malformed_traceparent_begins_a_new_trace() -> None:
    recorder = whole_life()[0].recorder
    recorder.trace_context = {"traceparent": "00-xyz", "tracestate": "\x00"}
    collected = Collected()
    collected.export.export(recorder)
    assert collected.roots()[0].parent is None


def test_a_request_through_the_router(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SETTLE_S", 0.0)
    collected = Collected()
    system.router.router.dispatcher.on_over = collected.export.over
    headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "x-request-id": "mine"}
    body = {"model": "fake", "prompt": "hello", "max_tokens": 100}
    status, answer, _ = system.router.request("POST", "/v1/completions", body, headers)
    assert status == 200
    [root] = wait_until(collected.roots)
    assert root.parent is not None
    assert root.parent.span_id == int(CLIENT_SPAN, 16)
    assert root.attributes is not None
    assert root.attributes["gen_ai.response.id"] == answer["id"]
    assert root.attributes["baton.client_id"] == "mine"
    assert "decode" in [span.name for span in check_sums(collected, root)]


async def test_what_waits_is_exported_before_the_end() -> None:
    collected = Collected()
    for recorder in (whole_life()[0].recorder, whole_life()[0].recorder):
        collected.export.over(recorder)
    assert collected.all() == []
    await collected.export.close()
    assert len(collected.roots()) == 2


class Hanging(SpanProcessor):
    """Does not end before `released` is set."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def shutdown(self) -> None:
        self.released.wait(10)


async def test_an_exporter_that_hangs_does_not_keep_the_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export_module, "CLOSE_S", 0.01)
    collected, hanging = Collected(), Hanging()
    collected.provider.add_span_processor(hanging)
    await collected.export.close()
    hanging.released.set()
    assert "could not be sent" in caplog.text


def test_only_a_standard_variable_starts_the_export(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="baton.router.figures.export")
    made: list[Any] = []

    def importing(name: str) -> SimpleNamespace:
        made.append(name)
        return SimpleNamespace(OTLPSpanExporter=InMemorySpanExporter)

    monkeypatch.setattr(export_module, "import_module", importing)
    assert configured_export({}) is None
    assert configured_export({"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_SERVICE_NAME": "x"}) is None
    assert made == []
    export = configured_export({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", PROTOCOL: "grpc"})
    assert export is not None
    assert "http://127.0.0.1:4318" in caplog.text
    assert "not grpc" in caplog.text
    asyncio.run(export.close())


PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def test_a_missing_package_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def importing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(export_module, "import_module", importing)
    assert configured_export({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is None
    assert install_command("otel") in caplog.text


@pytest.mark.parametrize(("environ", "name"), [({}, "baton-router"), ({"OTEL_SERVICE_NAME": "ours"}, "ours")])
async def test_the_services_name(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], name: str) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    exporter = InMemorySpanExporter()
    package = SimpleNamespace(OTLPSpanExporter=lambda: exporter)
    monkeypatch.setattr(export_module, "import_module", lambda _: package)
    export = configured_export({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert export is not None
    export.over(whole_life()[0].recorder)
    await export.close()
    spans = exporter.get_finished_spans()
    assert len(spans) > 1
    assert {span.resource.attributes["service.name"] for span in spans} == {name}


def test_the_router_starts_without_opentelemetry() -> None:
    code = "import sys, baton.router.main; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Traces of requests: their spans have no gaps, sum up to the whole, and name what happened."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from thinned import num_examples

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import ChunkTimes, Ended, Preemption, PrefillTimes, PullTimes, Unit
from baton.router.requests.trace import (
    MAX_SPANS,
    FinishedTraces,
    Outcome,
    RequestTrace,
    SequenceTrace,
    Span,
    TraceRecorder,
    _steps,
)

NO_TIMES, NO_PULL = PrefillTimes(), PullTimes()
CHUNKS = (ChunkTimes(1, 512, 0.0, 0.25), ChunkTimes(1, 100, 0.125, 0.125))


class Traced:
    """A request with fake sequences, and its recorder, which begins at `begun`."""

    def __init__(self, num_choices: int = 1, begun: float = 0.0, num_prompt: int = 4) -> None:
        self.recorder = TraceRecorder("r", "demo", num_prompt, num_choices, begun)
        self.sequences: list[Any] = [
            SimpleNamespace(index=index, received=[], finish_reason=None, attempt=None) for index in range(num_choices)
        ]

    @property
    def one(self) -> Any:
        """The first sequence."""
        return self.sequences[0]

    def reserve(self, number: int, now: float) -> None:
        """A decode node is asked for pages of all sequences."""
        self.recorder.begin(self.sequences, "reserve", now, fake_attempt(number))

    def dispatch(self, number: int, now: float) -> None:
        """All sequences get their nodes."""
        for sequence in self.sequences:
            sequence.attempt = fake_attempt(number)
        self.recorder.begin(self.sequences, "prefill", now, fake_attempt(number))

    def end(self, outcome: Outcome, now: float, error: str | None = None) -> RequestTrace:
        """The request ends; its trace, read later."""
        request: Any = SimpleNamespace(num_cached=16, first_token_at=None, sequences=self.sequences)
        self.recorder.over(request, outcome, error, now)
        trace = self.recorder.read(now + 5)
        assert self.recorder.read(now + 6) == trace
        check_sums(trace)
        return trace


def fake_attempt(number: int, decode: str = "d0") -> Any:
    return SimpleNamespace(number=number, prefill=SimpleNamespace(node_id="p0"), decode=SimpleNamespace(node_id=decode))


def prefill_done(attempt: int, queue_s: float, compute_s: float, times: PrefillTimes = NO_TIMES) -> m.PrefillDone:
    return m.PrefillDone("r", attempt, queue_s, compute_s, 16, Load(free_pages=1, running=0, waiting=0), times)


def admitted(attempt: int, transfer_s: float, times: PullTimes = NO_PULL) -> m.Admitted:
    return m.Admitted(Unit("r", 0, attempt), transfer_s, 3, 3_000_000, 1, times)


def names(trace: RequestTrace) -> list[str]:
    """Names of the first sequence's spans."""
    return [span.name for span in trace.sequences[0].spans]


def check_sums(trace: RequestTrace) -> None:
    """Each sequence's spans follow each other from the request's beginning to its end."""
    for sequence in trace.sequences:
        assert trace.total_s == 0 or sequence.spans[0].start_s == 0
        assert all(span.seconds >= 0 for span in sequence.spans)
        for span, following in pairwise(sequence.spans):
            assert span.start_s + span.seconds == pytest.approx(following.start_s, abs=1e-9)
        assert sum(span.seconds for span in sequence.spans) == pytest.approx(trace.total_s, abs=1e-9)
        assert sequence.num_tokens == sum(span.num_tokens for span in sequence.spans)


def seconds(sequence: SequenceTrace) -> dict[str, float]:
    return {span.name: span.seconds for span in sequence.spans}


def whole_life() -> tuple[Traced, RequestTrace]:
    """A request in which every span takes some seconds, all of them sums of powers of two."""
    traced = Traced(begun=100.0, num_prompt=628)
    recorder, sequence = traced.recorder, traced.one
    recorder.queued(100.25)
    traced.reserve(0, 101.0)
    traced.dispatch(0, 101.5)
    sequence.received += [7]
    recorder.first_token(sequence, 103.0)
    recorder.admitted(sequence, admitted(0, 0.75, PullTimes("local", 0.25, 0.125, 2)), 104.0)
    recorder.prefill_done("p0", prefill_done(0, 0.5, 0.5, PrefillTimes(0.25, 2, 5, CHUNKS)))
    sequence.received += range(20)
    preemption = Preemption(1, 4, 9, 1.0, 2.0, 0.5)
    ended = Ended("length", None, 628, 21, 16, 8, 40, 12, num_steps=10, preemptions=(preemption,))
    recorder.ended(sequence, ended)
    recorder.ended(sequence, ended)  # a message that comes twice changes nothing
    recorder.begin([sequence], "finish", 109.0)
    return traced, traced.end("done", 109.5)


def test_every_span_of_a_request() -> None:
    _, trace = whole_life()
    assert trace.total_s == 9.5
    assert [(span.name, span.seconds, span.node, span.num_tokens) for span in trace.sequences[0].spans] == [
        ("receive", 0.25, "", 0),
        ("queue", 0.75, "", 0),
        ("reserve", 0.5, "d0", 0),
        ("dispatch", 0.25, "p0", 0),
        ("prefill queue", 0.5, "p0", 0),
        ("prefill", 0.5, "p0", 0),
        ("first token", 0.25, "p0", 1),
        ("offer", 0.625, "p0", 0),
        ("pull", 0.25, "d0", 0),
        ("admission", 0.125, "d0", 0),
        ("decode", 1.0, "d0", 9),
        ("preempted", 2.0, "d0", 0),
        ("recompute", 0.5, "d0", 0),
        ("decode", 1.5, "d0", 11),
        ("finish", 0.5, "", 0),
    ]
    spans = {span.name: span for span in trace.sequences[0].spans}
    prefill, pull, decode = spans["prefill"], spans["pull"], spans["decode"]
    assert (prefill.num_prompt, prefill.num_cached, prefill.prefill_times.chunks) == (612, 16, CHUNKS)
    assert (prefill.prefill_times.num_offers, prefill.prefill_times.early_pages) == (2, 5)
    assert (pull.num_pages, pull.num_bytes, pull.had_pages, pull.moving_s) == (3, 3_000_000, 1, 0.75)
    assert (pull.gb_per_s, pull.way, pull.pull_times.num_repeated) == (0.004, "through shared memory", 2)
    assert (decode.num_steps, decode.num_drafted, decode.num_accepted) == (6, 40, 12)


def test_a_transport_that_has_no_words_is_shown_by_its_name() -> None:
    for transport, way in (("satellite", "by satellite"), ("", "")):
        traced = Traced()
        traced.recorder.queued(0.5)
        traced.dispatch(0, 1.0)
        traced.recorder.first_token(traced.one, 2.0)
        traced.recorder.admitted(traced.one, admitted(0, 0.5, PullTimes(transport, 0.5)), 3.0)
        (pull,) = (span for span in traced.end("done", 4.0).spans if span.name == "pull")
        assert pull.way == way


def test_the_keys_of_the_answer() -> None:
    """People and programs read them, so they stay whatever the attributes are called."""
    request = msgspec.to_builtins(whole_life()[1])
    keys = "rid client_id model outcome received_at total_s ttft_s num_prompt error num_cached choices"
    assert " ".join(request) == keys
    [choice] = request["choices"]
    assert list(choice) == ["index", "finish_reason", "num_tokens", "parts"]
    spans = {span["name"]: set(span) - {"name", "start_s", "seconds", "node", "attempt"} for span in choice["parts"]}
    assert spans["prefill"] == {"num_prompt", "num_cached", "prefill_times"}
    assert spans["pull"] == {"num_pages", "num_bytes", "had_pages", "moving_s", "gb_per_s", "way", "pull_times"}
    assert spans["decode"] == {"num_tokens", "num_steps", "num_drafted", "num_accepted"}
    assert spans["preempted"] == {"num_preemptions"}
    assert spans["reserve"] == set()


@pytest.mark.parametrize("told", [0.0, 0.3, 1e9, float("inf")])
def test_durations_never_leave_the_span_they_are_placed_in(told: float) -> None:
    """Nodes may be slow, late, or wrong: their clocks are not ours."""
    traced = Traced()
    recorder, sequence = traced.recorder, traced.one
    recorder.queued(1.0)
    traced.dispatch(0, 2.0)
    recorder.first_token(sequence, 3.0)
    recorder.admitted(sequence, admitted(0, told, PullTimes("zmq", told, told)), 4.0)
    recorder.prefill_done("p0", prefill_done(0, told, told, PrefillTimes(told)))
    recorder.ended(sequence, Ended("stop", 1, 4, 2, 0, preemptions=(Preemption(1, 5, 5, told, told, told),)))
    check_sums(recorder.read(4.5))
    recorder.begin([sequence], "finish", 5.0)
    trace = traced.end("done", 6.0)
    assert trace.total_s == 6.0
    assert seconds(trace.sequences[0])["finish"] == 1.0


def test_runs_have_no_more_steps_and_tokens_than_the_node_reports_in_all() -> None:
    """A node may be wrong about a preemption; then too the runs sum up, and none has a negative count."""
    traced = Traced()
    recorder, sequence = traced.recorder, traced.one
    traced.dispatch(0, 1.0)
    recorder.first_token(sequence, 2.0)
    recorder.admitted(sequence, admitted(0, 0.0), 3.0)
    sequence.received += range(8)
    preemptions = (Preemption(1, 5, 9, 0.1, 0.1, 0.1), Preemption(2, 3, 2, 0.1, 0.1, 0.1))
    recorder.ended(sequence, Ended("stop", 1, 8, 8, 0, num_steps=6, preemptions=preemptions))
    recorder.begin([sequence], "finish", 5.0)
    runs = [span for span in traced.end("done", 6.0).sequences[0].spans if span.name == "decode"]
    assert [span.num_steps for span in runs] == [5, 1, 0]
    assert [span.num_tokens for span in runs] == [8, 0, 0]


def random_stretch(rng: random.Random, traced: Traced, number: int, now: float) -> float:
    """Lets some of what may happen in an attempt happen to some sequences. Returns the time after it."""
    recorder, attempt = traced.recorder, fake_attempt(number, rng.choice(["d0", "d1"]))
    some = rng.sample(traced.sequences, rng.randint(1, len(traced.sequences)))
    one, told = some[0], [rng.random() for _ in range(3)]
    one.attempt = attempt
    preempted = Ended("length", None, 1, 1, 0, preemptions=(Preemption(1, 1, 1, *told),))
    events: list[Callable[[float], None]] = [
        lambda at: recorder.queued(at),
        lambda at: recorder.begin(some, "reserve", at, attempt),
        lambda at: recorder.refused(some),
        lambda at: recorder.begin(some, "prefill", at, attempt),
        lambda at: recorder.first_token(one, at),
        lambda at: recorder.admitted(one, admitted(number, told[0], PullTimes("zmq", told[1], told[2])), at),
        lambda at: recorder.prefill_done("p0", prefill_done(number, told[0], told[1])),
        lambda at: recorder.ended(one, preempted),
        lambda at: recorder.begin([one], "queue", at, reason="it died"),
        lambda at: recorder.begin([one], "paused", at, reason="it does not read"),
        lambda at: recorder.begin([one], "queue", at),
        lambda at: recorder.begin([one], "finish", at),
    ]
    for event in events:
        now += rng.choice([0.0, rng.random(), -0.01])
        one.received += [1] * rng.randint(0, 3)
        if rng.random() < 0.8:
            event(now)
            if rng.random() < 0.1:
                check_sums(recorder.read(now))
    return now


def test_any_order_of_events_sums_up() -> None:
    """Random requests, with moves, refusals, lost messages and times out of order."""
    for seed in range(num_examples(100)):
        rng = random.Random(seed)
        now = 50.0
        traced = Traced(rng.randint(1, 3), begun=now)
        for number in range(rng.randint(1, 40)):
            now = random_stretch(rng, traced, number, now)
        traced.end("failed", now + 1)
        assert all(len(sequence.spans) <= MAX_SPANS for sequence in traced.recorder.trace.sequences)


def test_prefill_of_another_attempt_or_node_is_not_believed() -> None:
    traced, trace = whole_life()
    traced.recorder.prefill_done("p1", prefill_done(0, 9.0, 9.0))
    traced.recorder.prefill_done("p0", prefill_done(3, 9.0, 9.0))
    traced.recorder.prefill_done("p0", prefill_done(0, 9.0, 9.0))  # a message that comes twice
    traced.recorder.admitted(traced.one, admitted(3, 9.0), 200.0)
    assert traced.recorder.read(0.0) == trace
    assert names(trace).count("prefill queue") == 1


def test_a_late_report_divides_a_trace_that_was_read() -> None:
    traced = Traced()
    traced.dispatch(0, 1.0)
    traced.recorder.first_token(traced.one, 3.0)
    assert names(traced.end("failed", 4.0)) == ["receive", "prefill", "handoff"]
    traced.recorder.prefill_done("p0", prefill_done(0, 0.5, 1.0))
    [sequence] = traced.recorder.read(5.0).sequences
    assert seconds(sequence) == {"receive": 1.0, "dispatch": 0.5, "prefill queue": 0.5, "prefill": 1.0, "handoff": 1.0}


def test_reports_about_nothing_take_bounded_memory() -> None:
    """A wrong node may report any number of attempts. The first and the last reports are kept."""
    traced = Traced()
    traced.dispatch(0, 1.0)
    traced.recorder.first_token(traced.one, 2.0)
    tracemalloc.start()
    for number in range(1000):
        traced.recorder.prefill_done("p0", prefill_done(number, 0.25, 0.25))
    assert tracemalloc.get_traced_memory()[0] < 100_000
    tracemalloc.stop()
    traced.recorder.begin([traced.one], "prefill", 3.0, fake_attempt(999))
    traced.recorder.first_token(traced.one, 4.0)
    assert names(traced.end("failed", 5.0)).count("prefill queue") == 2


def test_refusals_do_not_add_spans() -> None:
    traced = Traced()
    traced.recorder.queued(0.0)
    for number in range(1000):
        traced.reserve(number, float(number))
        traced.recorder.refused(traced.sequences)
    traced.reserve(1000, 1000.0)
    traced.dispatch(1000, 1001.0)
    [sequence] = traced.end("failed", 1002.0).sequences
    assert seconds(sequence) == {"queue": 1000.0, "reserve": 1.0, "prefill": 1.0}
    assert sequence.spans[0].num_refused == 1000


def test_a_pause_is_no_move() -> None:
    traced = Traced()
    traced.recorder.queued(1.0)
    traced.recorder.begin([traced.one], "paused", 2.0, reason="its client does not read")
    traced.recorder.begin([traced.one], "queue", 5.0)
    trace = traced.end("cancelled", 6.0)
    assert [(span.name, span.seconds, span.reason) for span in trace.sequences[0].spans] == [
        ("receive", 1.0, ""),
        ("queue", 1.0, ""),
        ("paused", 3.0, "its client does not read"),
        ("queue", 1.0, ""),
    ]
    assert trace.line().num_moves == 0
    traced.recorder.begin([traced.one], "queue", 7.0, reason="it died")
    assert traced.recorder.read(8.0).line().num_moves == 1


def test_admissions_that_do_not_belong_are_passed_over() -> None:
    """An admission of an old attempt, of a sequence without nodes, and the same one twice."""
    traced = Traced()
    recorder, sequence = traced.recorder, traced.one
    recorder.queued(1.0)
    recorder.admitted(sequence, admitted(0, 0.5), 2.0)
    traced.dispatch(1, 3.0)
    recorder.admitted(sequence, admitted(0, 0.5), 4.0)
    assert names(recorder.read(4.0)) == ["receive", "queue", "prefill"]
    recorder.admitted(sequence, admitted(1, 0.5), 5.0)  # the message of the first token is late
    expected = ["receive", "queue", "prefill", "pull", "decode"]
    assert names(recorder.read(6.0)) == expected
    recorder.first_token(sequence, 6.0)
    recorder.admitted(sequence, admitted(1, 0.5), 7.0)
    assert names(recorder.read(8.0)) == expected


def test_headers_of_the_clients_span_are_kept_if_they_are_short() -> None:
    recorder = Traced().recorder
    recorder.came_from("its own id", {"tracestate": "a=b", "cookie": "c"})
    assert recorder.trace.client_id == "its own id" and not recorder.trace_context
    recorder.came_from(None, {"traceparent": "t", "tracestate": "a" * 10_000, "cookie": "c"})
    assert recorder.trace_context == {"traceparent": "t"}
    recorder.came_from(None, {"traceparent": "t", "tracestate": "a=b"})
    assert recorder.trace_context == {"traceparent": "t", "tracestate": "a=b"}


def test_a_request_that_moves_endlessly_takes_bounded_memory() -> None:
    traced = Traced()
    for number in range(500):
        traced.recorder.begin([traced.one], "queue", 3.0 * number, reason="x" * 10_000)
        traced.reserve(number, 3.0 * number + 1)
        traced.dispatch(number, 3.0 * number + 2)
    trace = traced.end("failed", 1500.0, "x" * 10_000)
    [sequence] = trace.sequences
    assert len(traced.recorder.trace.sequences[0].spans) == MAX_SPANS
    assert sequence.num_forgotten == 1501 - MAX_SPANS
    assert sequence.spans[-1].attempt == 499
    assert 100 < max(len(span.reason) for span in sequence.spans) < 1000
    assert 100 < len(trace.error or "") < 1000


def test_the_last_ones_are_kept() -> None:
    finished = FinishedTraces(most=10)
    for index in range(7):
        finished.add(TraceRecorder(f"r{index}", "demo", 4, 3, float(index)))
    assert [recorder.trace.rid for recorder in finished] == ["r6", "r5", "r4"]
    assert finished.get("r3") is None
    finished.add(TraceRecorder("large", "demo", 4, 100, 9.0))
    assert [recorder.trace.rid for recorder in finished] == ["large"]


def test_tokens_from_host_memory_are_those_of_their_spans() -> None:
    report = Ended("length", None, 10, 4, 0, preemptions=(Preemption(1, 1, 1, 0.1, 0.1, 0.1, 32),), num_restored=16)
    run, _, recompute, last = _steps(Span("decode", 0.0, 1.0, "d0", 0, num_tokens=4), 1.0, Span(""), report)
    assert (run.num_restored, recompute.num_restored, last.num_restored) == (16, 32, 0)
    done = m.PrefillDone("r", 0, 0.0, 0.1, 8, Load(1, 0, 0), PrefillTimes(num_restored=8))
    *_, prefill, _ = _steps(Span("prefill", 0.0, 1.0, "p0", 0, num_prompt=10), 1.0, Span(""), done)
    assert prefill.num_restored == 8

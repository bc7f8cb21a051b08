"""Traces of requests: their spans have no gaps, sum up to the whole, and name what happened."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import Ended, Preemption, Unit
from baton.metadata.wire.times import ChunkTimes, PrefillTimes, PullTimes
from baton.router.trace import (
    MAX_SPANS,
    Explanation,
    FinishedTraces,
    Outcome,
    RequestTrace,
    SequenceTrace,
    Span,
    TraceRecorder,
)

from .conftest import System
from .fake_nodes import FakeNode
from .test_runner import own, wait_until

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
        self.recorder.reserving(self.sequences, fake_attempt(number), now)

    def dispatch(self, number: int, now: float) -> None:
        """All sequences get their nodes."""
        for sequence in self.sequences:
            sequence.attempt = fake_attempt(number)
        self.recorder.dispatched(self.sequences, fake_attempt(number), now)

    def end(self, outcome: Outcome, now: float, error: str | None = None) -> RequestTrace:
        """The request ends; its trace, read later."""
        request: Any = SimpleNamespace(num_cached=16, first_token_at=None, sequences=self.sequences)
        self.recorder.over(request, outcome, error, now)
        trace = self.recorder.read(now + 5)
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
    recorder.finishing(sequence, 109.0)
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
    assert (pull.gb_per_s, pull.pull_times.transport, pull.pull_times.num_repeated) == (0.004, "local", 2)
    assert (decode.num_steps, decode.num_drafted, decode.num_accepted) == (6, 40, 12)


def test_the_keys_of_the_answer() -> None:
    """People and programs read them, so they stay whatever the attributes are called."""
    request = msgspec.to_builtins(whole_life()[1])
    keys = "rid client_id model outcome received_at total_s ttft_s num_prompt error num_cached choices"
    assert " ".join(request) == keys
    [choice] = request["choices"]
    assert list(choice) == ["index", "finish_reason", "num_tokens", "parts"]
    spans = {span["name"]: set(span) - {"name", "start_s", "seconds", "node", "attempt"} for span in choice["parts"]}
    assert spans["prefill"] == {"num_prompt", "num_cached", "prefill_times"}
    assert spans["pull"] == {"num_pages", "num_bytes", "had_pages", "moving_s", "gb_per_s", "pull_times"}
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
    recorder.finishing(sequence, 5.0)
    trace = traced.end("done", 6.0)
    assert trace.total_s == 6.0
    assert seconds(trace.sequences[0])["finish"] == 1.0


def random_stretch(rng: random.Random, traced: Traced, number: int, now: float) -> float:
    """Lets some of what may happen in an attempt happen to some sequences. Returns the time after it."""
    recorder, attempt = traced.recorder, fake_attempt(number, rng.choice(["d0", "d1"]))
    some = rng.sample(traced.sequences, rng.randint(1, len(traced.sequences)))
    one, told = some[0], [rng.random() for _ in range(3)]
    one.attempt = attempt
    preempted = Ended("length", None, 1, 1, 0, preemptions=(Preemption(1, 1, 1, *told),))
    events: list[Callable[[float], None]] = [
        lambda at: recorder.queued(at),
        lambda at: recorder.reserving(some, attempt, at),
        lambda at: recorder.refused(some),
        lambda at: recorder.dispatched(some, attempt, at),
        lambda at: recorder.first_token(one, at),
        lambda at: recorder.admitted(one, admitted(number, told[0], PullTimes("zmq", told[1], told[2])), at),
        lambda at: recorder.prefill_done("p0", prefill_done(number, told[0], told[1])),
        lambda at: recorder.ended(one, preempted),
        lambda at: recorder.moved(one, "it died", at),
        lambda at: recorder.paused(one, "it does not read", at),
        lambda at: recorder.resumed(one, at),
        lambda at: recorder.finishing(one, at),
    ]
    for event in events:
        now += rng.choice([0.0, rng.random(), -0.01])
        one.received += [1] * rng.randint(0, 3)
        if rng.random() < 0.8:
            event(now)
            check_sums(recorder.read(now))
    return now


def test_any_order_of_events_sums_up() -> None:
    """Random requests, with moves, refusals, lost messages and times out of order."""
    for seed in range(100):
        rng = random.Random(seed)
        now = 50.0
        traced = Traced(rng.randint(1, 3), begun=now)
        for number in range(rng.randint(1, 40)):
            now = random_stretch(rng, traced, number, now)
        trace = traced.end("failed", now + 1)
        assert all(len(sequence.spans) <= MAX_SPANS for sequence in trace.sequences)


def test_prefill_of_another_attempt_or_node_is_not_believed() -> None:
    traced, trace = whole_life()
    traced.recorder.prefill_done("p1", prefill_done(0, 9.0, 9.0))
    traced.recorder.prefill_done("p0", prefill_done(3, 9.0, 9.0))
    traced.recorder.prefill_done("p0", prefill_done(0, 9.0, 9.0))  # a message that comes twice
    traced.recorder.admitted(traced.one, admitted(3, 9.0), 200.0)
    assert traced.recorder.read(0.0) == trace
    assert names(trace).count("prefill queue") == 1


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
    traced.recorder.paused(traced.one, "its client does not read", 2.0)
    traced.recorder.resumed(traced.one, 5.0)
    trace = traced.end("cancelled", 6.0)
    assert [(span.name, span.seconds, span.reason) for span in trace.sequences[0].spans] == [
        ("receive", 1.0, ""),
        ("queue", 1.0, ""),
        ("paused", 3.0, "its client does not read"),
        ("queue", 1.0, ""),
    ]
    assert trace.num_moves == 0
    traced.recorder.moved(traced.one, "it died", 7.0)
    assert traced.recorder.trace.num_moves == 1


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
        traced.recorder.moved(traced.one, "x" * 10_000, 3.0 * number)
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


def explain(system: System, rid: str) -> list[RequestTrace]:
    status, body, _ = system.router.request("GET", f"/debug/requests/{rid}")
    assert status == 200, body
    traces = msgspec.convert(body, Explanation).requests
    for trace in traces:
        check_sums(trace)
    return traces


def spans_of(trace: RequestTrace) -> dict[str, Span]:
    return {span.name: span for span in trace.spans}


def listed(system: System, query: str = "") -> list[dict[str, Any]]:
    status, body, _ = system.router.request("GET", f"/debug/requests?{query}")
    assert status == 200, body
    return body["requests"]


@contextmanager
def held(system: System) -> Iterator[list[Any]]:
    """Has a request decode during the block and end with it. Yields a list, which gets the answer at the end."""
    system.behaviour.hold = threading.Event()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(system.complete()))
    thread.start()
    yield answers
    system.behaviour.hold.set()
    thread.join(10)


def refuse(node: FakeNode, message: m.Prefill) -> bool:
    node.link.send(m.Failed(Unit(message.rid, 0, message.attempt), "internal_error", "the model broke", False))
    return True


def reporting(node: FakeNode, message: m.Prefill) -> bool:
    """Serves a prefill and reports its chunks late: the request may be over by then."""
    send = node.link.send

    def send_more(sent: Any) -> bool:
        if isinstance(sent, m.PrefillDone):
            sent = msgspec.structs.replace(sent, times=PrefillTimes(0.0, 1, 0, CHUNKS))
        return send(sent)

    node.link.send = send_more  # type: ignore[method-assign]
    node.prefill(message)
    node.link.send = send  # type: ignore[method-assign]
    return True


def await_chunks(system: System, rid: str) -> None:
    """Waits for the prefill node's report of its chunks, which comes after the rest."""
    wait_until(lambda: any(span.prefill_times.chunks for span in explain(system, rid)[0].spans))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_from_its_arrival_to_its_end(system: System, stream: bool) -> None:
    system.behaviour.answer_prefill = reporting
    status, _, headers = system.complete(stream=stream)
    assert status == 200
    num_tokens = len(system.say(system.text))
    rid = headers["x-request-id"]
    await_chunks(system, rid)
    [trace] = explain(system, rid)
    assert (trace.outcome, trace.model, trace.client_id, trace.error) == ("done", "fake", None, None)
    assert trace.ttft_s is not None and 0 < trace.ttft_s <= trace.total_s
    [sequence] = trace.sequences
    assert (sequence.num_tokens, sequence.finish_reason) == (num_tokens, "stop")
    order = ["queue", "reserve", "prefill", "pull", "decode", "finish"]
    assert [name for name in names(trace) if name in order] == order
    spans = spans_of(trace)
    assert (spans["pull"].num_bytes, spans["pull"].gb_per_s) == (1024, 0.001)
    assert spans["prefill"].prefill_times.chunks == CHUNKS
    assert (spans["prefill"].node, spans["decode"].node) == ("p0", "d0")


def test_one_token_needs_no_handoff_and_is_reported_after_its_end(system: System) -> None:
    system.behaviour.answer_prefill = reporting
    rid = system.complete(max_tokens=1)[2]["x-request-id"]
    await_chunks(system, rid)
    assert not {"reserve", "offer", "pull", "decode"} & set(names(explain(system, rid)[0]))


def test_choices_and_prompts_have_their_own_spans(system: System) -> None:
    _, body, headers = system.complete(prompt=["hello", "what"], n=3)
    traces = explain(system, headers["x-request-id"])
    assert [trace.rid for trace in traces] == [f"{body['id']}-1", f"{body['id']}-0"]
    assert [len(trace.sequences) for trace in traces] == [3, 3]
    assert explain(system, f"{body['id']}-0") == traces[1:]


def test_a_part_of_an_id_is_no_id(system: System) -> None:
    _, body, _ = system.complete(prompt=["hello", "what"])
    whole = body["id"]
    kind, _, digits = whole.partition("-")
    cut = [kind, f"{kind}-", f"{kind}-{digits[:-1]}", f"{whole}-"]
    for wanted in (*cut, f"{whole}-2", f"{whole}-0-0", digits, "chatcmpl", "-"):
        status, answer, _ = system.router.request("GET", f"/debug/requests/{wanted}")
        assert status == 404, (wanted, answer)
    assert len(explain(system, whole)) == 2


def test_a_live_request(system: System) -> None:
    with held(system):
        wait_until(lambda: any(names(explain(system, line["rid"])[0])[-1] == "decode" for line in listed(system)))
        [line] = listed(system, "outcome=live")
        assert (line["num_tokens"], line["outcome"]) == (1, "live")
    assert names(explain(system, line["rid"])[0])[-1] == "finish"
    assert listed(system, "outcome=live") == []


def test_a_move_shows_its_reason(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    with held(system) as answers:
        decodes = [node for node in system.cluster.nodes if node.role == "decode"]
        victim = wait_until(lambda: next((node for node in decodes if own(node, m.Reserve)), None))
        victim.stop()
        wait_until(lambda: listed(system)[0]["num_moves"])
    [trace] = explain(system, answers[0][2]["x-request-id"])
    assert names(trace).count("queue") == 2
    assert f"decode node {victim.name}" in next(span.reason for span in trace.spans if span.reason)
    assert spans_of(trace)["decode"].node != victim.name
    assert [line["num_moves"] for line in listed(system, f"node={victim.name}")] == [1]


def test_waiting_for_a_full_node_is_queueing(system: System) -> None:
    tried: list[str] = []

    def full_at_first(node: FakeNode, message: m.Reserve) -> bool:
        tried.append(message.rid)
        if tried.count(message.rid) > 2:
            return False
        node.link.send(m.Reserved(message.rid, message.attempt, (), Load(free_pages=0, running=1, waiting=0)))
        node.post(m.CapacityFreed(node.load()))
        return True

    system.behaviour.answer_reserve = full_at_first
    [trace] = explain(system, system.complete()[2]["x-request-id"])
    assert names(trace).count("queue") == names(trace).count("reserve") == 1
    assert spans_of(trace)["queue"].num_refused == 2
    assert tried == [trace.rid] * 3


def test_a_paused_request(system: System) -> None:
    dispatcher = system.router.router.dispatcher

    def decoding() -> Any:
        running = [each for each in dispatcher.requests.values() if not each.is_canary]
        return running[0] if running and running[0].timeline.trace.spans[-1].name == "decode" else None

    with held(system) as answers:
        request = wait_until(lambda: system.router.call(decoding))
        system.router.call(lambda: dispatcher.set_paused(request, True))
        system.router.call(lambda: dispatcher.set_paused(request, False))
    [trace] = explain(system, answers[0][2]["x-request-id"])
    order = [name for name in names(trace) if name in ("queue", "decode", "paused", "finish")]
    assert order == ["queue", "decode", "paused", "queue", "decode", "finish"]
    assert spans_of(trace)["paused"].reason == "its client does not read"


def test_a_client_that_leaves_and_an_error(system: System) -> None:
    system.behaviour.answer_prefill = refuse
    system.complete()
    system.behaviour.answer_prefill = lambda node, message: True  # never answers
    connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "fake", "prompt": "hello"}), {"x-request-id": "mine"}
    )
    wait_until(lambda: listed(system, "outcome=live"))
    connection.close()
    system.router.wait_idle()
    lines = listed(system)
    assert [line["outcome"] for line in lines] == ["cancelled", "failed"]
    assert "the model broke" in (explain(system, lines[1]["rid"])[0].error or "")
    assert explain(system, lines[0]["rid"])[0].error == "the client left"


def test_every_answer_carries_the_id_to_explain(system: System) -> None:
    """Whole answers, streams, errors before and after the request was queued; the client's own id goes first."""
    for body in ({}, {"stream": True}, {"n": 2}):
        rid = system.complete(**body)[2]["x-request-id"]
        assert explain(system, rid)[0].rid == rid
    for body in (b"{", b'{"model": "fake", "prompt": ""}', b'{"model": "none", "prompt": "x"}'):
        status, _, headers = system.router.request("POST", "/v1/completions", body)
        assert status >= 400
        assert headers["x-request-id"].startswith("cmpl-")
    assert system.router.request("POST", "/v1/chat/completions", b"{")[2]["x-request-id"].startswith("chatcmpl-")
    system.behaviour.answer_prefill = refuse
    rid = system.complete()[2]["x-request-id"]
    assert explain(system, rid)[0].outcome == "failed"
    system.behaviour.answer_prefill = None
    for _ in range(2):
        body = {"model": "fake", "prompt": "hello", "max_tokens": 3}
        _, answer, headers = system.router.request("POST", "/v1/completions", body, {"x-request-id": "my own"})
        assert headers["x-request-id"] == "my own"
    assert [trace.client_id for trace in explain(system, "my%20own")] == ["my own"] * 2
    assert explain(system, answer["id"])[0].client_id == "my own"


def test_the_time_of_turning_text_into_tokens_is_shown(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    group = system.router.call(lambda: next(iter(system.router.router.dispatcher.registry.groups.values())))
    encode = group.tokenizer.encode

    async def slow(*args: Any, **more: Any) -> list[int]:
        await asyncio.sleep(0.05)
        return await encode(*args, **more)

    monkeypatch.setattr(group.tokenizer, "encode", slow)
    [trace] = explain(system, system.complete()[2]["x-request-id"])
    assert spans_of(trace)["receive"].seconds >= 0.05
    assert trace.ttft_s is not None and trace.ttft_s >= 0.05


def test_filters(system: System) -> None:
    for _ in range(3):
        system.complete()

    def count(query: str) -> int:
        return len(listed(system, query))

    assert [count(query) for query in ("", "limit=2", "outcome=done", "outcome=failed")] == [3, 2, 3, 0]
    assert [count(query) for query in ("model=fake", "model=x", "node=p0", "node=x", "min_s=100")] == [3, 0, 3, 0, 0]
    for query, words in (
        ("outcome=x", "'x'; the filters are outcome (live, done,"),
        ("min_s=x", "min_s (seconds)"),
        ("limit=-1", "limit: Expected `int` >= 0"),
        ("colour=red", "unknown field `colour`"),
    ):
        status, body, _ = system.router.request("GET", f"/debug/requests?{query}")
        assert status == 400
        assert words in body["error"]["message"]
        assert body["error"]["param"] == query.partition("=")[0]


def test_an_unknown_id(system: System) -> None:
    status, body, _ = system.router.request("GET", "/debug/requests/cmpl-x")
    assert status == 404
    for word in ("cmpl-x", "x-request-id", "1024", "/debug/requests"):
        assert word in body["error"]["message"]
    assert listed(system) == [], "canaries are not listed"

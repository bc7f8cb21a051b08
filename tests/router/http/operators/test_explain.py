"""GET /debug/requests and /debug/requests/{rid}: what they tell of live, finished, moved and failed requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import RequestError
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import PrefillTimes, Unit
from baton.router.http.operators.explain import DEFAULT_LIMIT, Filter
from baton.router.requests.trace import Explanation, RequestTrace, Span, TraceRecorder

from ...conftest import RunningRouter, System
from ...dispatching.test_runner import ignore, own, wait_until
from ...fake_nodes import FakeNode
from ...requests.test_trace import CHUNKS, Traced, check_sums, fake_attempt, names


def recorder(decode: str = "d0", *, is_over: bool = False) -> TraceRecorder:
    """A request that began at 0 and was given nodes; it ended at 5 or lives."""
    traced = Traced()
    traced.recorder.begin(traced.sequences, "reserve", 1.0, fake_attempt(0, decode))
    traced.recorder.begin(traced.sequences, "prefill", 2.0, fake_attempt(0, decode))
    if is_over:
        traced.end("done", 5.0)
    return traced.recorder


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ({}, (True, True)),
        ({"outcome": "live"}, (True, False)),
        ({"outcome": "done"}, (False, True)),
        ({"node": "d1"}, (False, True)),
        ({"node": "p0"}, (True, True)),
        ({"node": "d"}, (False, False)),
        ({"model": "demo"}, (True, True)),
        ({"model": "dem"}, (False, False)),
        ({"min_s": "5"}, (True, True)),
        ({"min_s": "5.1"}, (True, False)),  # the live one lasts on
        ({"outcome": "live", "node": "d1"}, (False, False)),  # all filters must fit
    ],
)
def test_what_a_filter_lets_pass(query: dict[str, str], fits: tuple[bool, bool]) -> None:
    live, done = recorder(), recorder("d1", is_over=True)
    assert tuple(Filter.of(query).matches(each, 8.0) for each in (live, done)) == fits


def test_the_default_limit_and_a_wrong_filter() -> None:
    assert Filter.of({}).limit == DEFAULT_LIMIT and Filter.of({"limit": "0"}).limit == 0
    for query in ({"limit": "-1"}, {"limit": "1000000000"}, {"min_s": "x"}, {"outcome": "over"}, {"colour": "red"}):
        with pytest.raises(RequestError, match="the filters are outcome") as caught:
            Filter.of(query)
        assert caught.value.param == next(iter(query))


def test_the_newest_come_first_and_no_more_than_asked_for(system: System) -> None:
    rids = [system.complete(max_tokens=2)[2]["x-request-id"] for _ in range(3)]
    assert [line["rid"] for line in listed(system)] == rids[::-1]
    assert [line["rid"] for line in listed(system, "limit=2")] == rids[:0:-1]
    assert listed(system, "limit=0") == []


@pytest.mark.parametrize(
    ("keys", "key", "status"),
    [({}, None, 404), ({"api_key": "a"}, "a", 403), ({"api_key": "a", "admin_key": "b"}, "b", 404)],
)
def test_an_api_key_opens_the_routes_of_operators_on_loopback_but_no_texts(
    make_router: Callable[..., RunningRouter], keys: dict[str, str], key: str | None, status: int
) -> None:
    router, headers = make_router(**keys), {"Authorization": f"Bearer {key}"} if key else {}
    assert router.request("GET", "/debug/requests", headers=headers)[0] == 200
    found, body, _ = router.request("GET", "/debug/requests/unknown/text", headers=headers)
    assert found == status and ("--admin-key" in body["error"]["message"]) == (status == 403)


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
    thread.join()


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
    assert f"decode node {victim.name}" in next(
        span.reason for span in trace.spans if span.name == "queue" and span.reason
    )
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
    system.behaviour.answer_prefill = ignore
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
    assert spans_of(trace)["receive"].seconds >= 0.049, "a sleep may end a clock tick early"
    assert trace.ttft_s is not None and trace.ttft_s >= 0.049


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

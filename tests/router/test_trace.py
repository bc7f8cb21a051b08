"""The parts of a request's life: they have no gaps, sum up to the whole, and name what happened."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import Ended, Preemption, Unit
from baton.metadata.wire.times import ChunkTimes, PrefillTimes, PullTimes
from baton.router.parts import ChoiceLife, RequestTimeline, timeline_of
from baton.router.trace import MAX_MARKS, Finished, Timeline

from .conftest import System
from .fake_nodes import FakeNode
from .test_dispatcher import own, wait_until

NO_TIMES, NO_PULL = PrefillTimes(), PullTimes()
CHUNKS = (ChunkTimes(1, 512, 0.0, 0.25), ChunkTimes(1, 100, 0.125, 0.125))


def fake_choices(num: int) -> list[Any]:
    return [SimpleNamespace(index=index, received=[], finish_reason=None) for index in range(num)]


def fake_attempt(number: int, decode: str | None = "d0") -> Any:
    node = SimpleNamespace(node_id=decode) if decode is not None else None
    return SimpleNamespace(number=number, prefill=SimpleNamespace(node_id="p0"), decode=node)


def prefill_done(attempt: int, queue_s: float, compute_s: float, times: PrefillTimes = NO_TIMES) -> m.PrefillDone:
    return m.PrefillDone("r", attempt, queue_s, compute_s, 16, Load(free_pages=1, running=0, waiting=0), times)


def admitted(attempt: int, transfer_s: float, times: PullTimes = NO_PULL) -> m.Admitted:
    return m.Admitted(Unit("r", 0, attempt), transfer_s, 3, 3_000_000, 1, times)


def end(timeline: Timeline, choices: list[Any], outcome: Any, now: float) -> RequestTimeline:
    request: Any = SimpleNamespace(num_cached=16, first_token_at=None, sequences=choices)
    timeline.over(request, outcome, None, now)
    return timeline_of(timeline, now + 5)


def names(life: RequestTimeline | dict[str, Any], choice: int = 0) -> list[str]:
    if isinstance(life, RequestTimeline):
        return [part.name for part in life.choices[choice].parts]
    return [part["name"] for part in life["choices"][choice]["parts"]]


def check_sums(life: RequestTimeline) -> None:
    """Each choice's parts follow each other from the request's beginning to its end."""
    for choice in life.choices:
        assert choice.parts[0].start_s == 0
        assert all(part.seconds >= 0 for part in choice.parts)
        for part, following in pairwise(choice.parts):
            assert part.start_s + part.seconds == pytest.approx(following.start_s, abs=1e-9)
        assert sum(part.seconds for part in choice.parts) == pytest.approx(life.total_s, abs=1e-9)


def seconds(choice: ChoiceLife) -> dict[str, float]:
    return {part.name: part.seconds for part in choice.parts}


def whole_life() -> tuple[Timeline, list[Any], RequestTimeline]:
    """A life in which every stage takes some seconds, all of them sums of powers of two."""
    choices = fake_choices(1)
    timeline = Timeline("r", "demo", 628, 1, 100.0)
    attempt = fake_attempt(0)
    timeline.queued(100.25)
    timeline.reserving(choices, attempt, 101.0)
    timeline.dispatched(choices, attempt, 101.5)
    choices[0].received += [7]
    timeline.first_token(choices[0], 103.0)
    times = PullTimes("local", 0.25, 0.125, 2)
    timeline.admitted(choices[0], admitted(0, 0.75, times), 104.0)
    timeline.prefill_done("p0", prefill_done(0, 0.5, 0.5, PrefillTimes(0.25, 2, 5, CHUNKS)))
    choices[0].received += range(20)
    preemption = Preemption(1, 4, 9, 1.0, 2.0, 0.5)
    ended = Ended("length", None, 628, 21, 16, 8, 40, 12, num_steps=10, preemptions=(preemption,))
    timeline.ended(choices[0], ended)
    timeline.finishing(choices[0], 109.0)
    return timeline, choices, end(timeline, choices, "done", 109.5)


def test_every_part_of_a_life() -> None:
    _, _, life = whole_life()
    check_sums(life)
    assert life.total_s == 9.5
    assert [(part.name, part.seconds, part.node, part.num_tokens) for part in life.choices[0].parts] == [
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
    parts = {part.name: part for part in life.choices[0].parts}
    prefill, pull, decode = parts["prefill"], parts["pull"], parts["decode"]
    assert (prefill.num_prompt, prefill.num_cached, prefill.chunks) == (612, 16, CHUNKS)
    assert (prefill.num_offers, prefill.early_pages) == (2, 5)
    assert (pull.num_pages, pull.num_bytes, pull.had_pages, pull.moving_s) == (3, 3_000_000, 1, 0.75)
    assert (pull.gb_per_s, pull.transport, pull.num_repeated) == (0.004, "local", 2)
    assert (decode.num_steps, decode.num_drafted, decode.num_accepted) == (6, 40, 12)


@pytest.mark.parametrize("told", [0.0, 0.3, 1e9, float("inf")])
def test_durations_never_leave_the_part_they_are_placed_in(told: float) -> None:
    """Nodes may be slow, late, or wrong: their clocks are not ours."""
    choices = fake_choices(1)
    timeline, attempt = Timeline("r", "demo", 4, 1, 0.0), fake_attempt(0)
    timeline.queued(1.0)
    timeline.dispatched(choices, attempt, 2.0)
    timeline.first_token(choices[0], 3.0)
    timeline.admitted(choices[0], admitted(0, told, PullTimes("zmq", told, told)), 4.0)
    timeline.prefill_done("p0", prefill_done(0, told, told, PrefillTimes(told)))
    timeline.ended(choices[0], Ended("stop", 1, 4, 2, 0, preemptions=(Preemption(1, 5, 5, told, told, told),)))
    timeline.finishing(choices[0], 5.0)
    life = end(timeline, choices, "done", 6.0)
    check_sums(life)
    assert life.total_s == 6.0
    assert seconds(life.choices[0])["finish"] == 1.0


def random_stretch(rng: random.Random, timeline: Timeline, choices: list[Any], number: int, now: float) -> float:
    """Some of what may happen to some choices in an attempt, each event a while after the other. The time after."""
    attempt = fake_attempt(number, rng.choice(["d0", "d1"]))
    some = rng.sample(choices, rng.randint(1, len(choices)))
    one, told = some[0], [rng.random() for _ in range(3)]
    preempted = Ended("length", None, 1, 1, 0, preemptions=(Preemption(1, 1, 1, *told),))
    events: list[Callable[[float], None]] = [
        lambda at: timeline.queued(at),
        lambda at: timeline.reserving(some, attempt, at),
        lambda at: timeline.refused(some),
        lambda at: timeline.dispatched(some, attempt, at),
        lambda at: timeline.first_token(one, at),
        lambda at: timeline.admitted(one, admitted(number, told[0], PullTimes("zmq", told[1], told[2])), at),
        lambda at: timeline.prefill_done("p0", prefill_done(number, told[0], told[1])),
        lambda at: timeline.ended(one, preempted),
        lambda at: timeline.moved(one, "it died", at),
        lambda at: timeline.paused(one, "it does not read", at),
        lambda at: timeline.resumed(one, at),
        lambda at: timeline.finishing(one, at),
    ]
    for event in events:
        now += rng.choice([0.0, rng.random(), -0.01])
        one.received += [1] * rng.randint(0, 3)
        if rng.random() < 0.8:
            event(now)
    return now


def test_any_order_of_events_sums_up() -> None:
    """Random lives, with moves, refusals, lost messages and times out of order."""
    for seed in range(100):
        rng = random.Random(seed)
        choices, now = fake_choices(rng.randint(1, 3)), 50.0
        timeline = Timeline("r", "demo", 10, len(choices), now)
        for number in range(rng.randint(1, 40)):
            now = random_stretch(rng, timeline, choices, number, now)
        life = end(timeline, choices, "failed", now + 1)
        check_sums(life)
        for choice, track in zip(life.choices, timeline.tracks, strict=True):
            assert len(track.marks) <= MAX_MARKS
            assert choice.num_tokens >= sum(part.num_tokens for part in choice.parts)


def test_prefill_of_another_attempt_or_node_is_not_believed() -> None:
    timeline, choices, _ = whole_life()
    timeline.prefill_done("p1", prefill_done(0, 9.0, 9.0))
    timeline.prefill_done("p0", prefill_done(3, 9.0, 9.0))
    timeline.admitted(choices[0], admitted(3, 9.0), 200.0)
    check_sums(timeline_of(timeline, 0.0))
    assert names(timeline_of(timeline, 0.0)).count("prefill queue") == 1
    assert seconds(timeline_of(timeline, 0.0).choices[0])["prefill queue"] == 0.5


def test_refusals_do_not_add_marks() -> None:
    choices = fake_choices(1)
    timeline = Timeline("r", "demo", 4, 1, 0.0)
    timeline.queued(0.0)
    for number in range(1000):
        timeline.reserving(choices, fake_attempt(number), float(number))
        timeline.refused(choices)
    timeline.reserving(choices, fake_attempt(1000), 1000.0)
    timeline.dispatched(choices, fake_attempt(1000), 1001.0)
    life = end(timeline, choices, "failed", 1002.0)
    check_sums(life)
    assert seconds(life.choices[0]) == {"queue": 1000.0, "reserve": 1.0, "prefill": 1.0}
    assert life.choices[0].parts[0].num_refused == 1000


def test_a_pause_is_no_move() -> None:
    choices = fake_choices(1)
    timeline = Timeline("r", "demo", 4, 1, 0.0)
    timeline.queued(1.0)
    timeline.paused(choices[0], "its client does not read", 2.0)
    timeline.resumed(choices[0], 5.0)
    life = end(timeline, choices, "cancelled", 6.0)
    check_sums(life)
    assert [(part.name, part.seconds, part.reason) for part in life.choices[0].parts] == [
        ("receive", 1.0, ""),
        ("queue", 1.0, ""),
        ("paused", 3.0, "its client does not read"),
        ("queue", 1.0, ""),
    ]
    assert timeline.num_moves == 0
    timeline.moved(choices[0], "it died", 7.0)
    assert timeline.num_moves == 1


def test_admissions_that_do_not_belong_are_passed_over() -> None:
    """Of an attempt that is over, of one that has no nodes yet, and the same one twice."""
    choices = fake_choices(1)
    timeline = Timeline("r", "demo", 4, 1, 0.0)
    timeline.queued(1.0)
    timeline.admitted(choices[0], admitted(0, 0.5), 2.0)
    timeline.dispatched(choices, fake_attempt(1), 3.0)
    timeline.admitted(choices[0], admitted(0, 0.5), 4.0)
    assert timeline.tracks[0].last.stage == "prefill"
    timeline.admitted(choices[0], admitted(1, 0.5), 5.0)  # prefill's own message of the first token is late
    assert [mark.stage for mark in timeline.tracks[0].marks][-2:] == ["handoff", "decode"]
    num_marks = len(timeline.tracks[0].marks)
    timeline.first_token(choices[0], 6.0)
    timeline.admitted(choices[0], admitted(1, 0.5), 7.0)
    assert len(timeline.tracks[0].marks) == num_marks


def test_headers_of_the_clients_span_are_kept_where_they_are_short() -> None:
    timeline = Timeline("r", "demo", 4, 1, 0.0)
    timeline.came_from("its own id", {"tracestate": "a=b", "cookie": "c"})
    assert timeline.client_id == "its own id" and not timeline.trace_context
    timeline.came_from(None, {"traceparent": "t", "tracestate": "a" * 10_000, "cookie": "c"})
    assert timeline.trace_context == {"traceparent": "t"}
    timeline.came_from(None, {"traceparent": "t", "tracestate": "a=b"})
    assert timeline.trace_context == {"traceparent": "t", "tracestate": "a=b"}


def test_a_life_of_endless_moves_is_bounded() -> None:
    choices = fake_choices(1)
    timeline = Timeline("r", "demo", 4, 1, 0.0)
    for number in range(500):
        timeline.moved(choices[0], "x" * 10_000, 3.0 * number)
        timeline.reserving(choices, fake_attempt(number), 3.0 * number + 1)
        timeline.dispatched(choices, fake_attempt(number), 3.0 * number + 2)
    life = end(timeline, choices, "failed", 1500.0)
    check_sums(life)
    assert len(timeline.tracks[0].marks) == MAX_MARKS
    assert life.choices[0].num_forgotten == 1501 - MAX_MARKS
    assert life.choices[0].parts[-1].attempt == 499
    assert 100 < max(len(mark.reason) for mark in timeline.tracks[0].marks) < 1000
    request: Any = SimpleNamespace(num_cached=None, first_token_at=None, sequences=choices)
    timeline.over(request, "failed", "x" * 10_000, 1500.0)
    assert 100 < len(timeline.error or "") < 1000


def test_the_last_ones_are_kept() -> None:
    finished = Finished(most=10)
    for index in range(7):
        finished.add(Timeline(f"r{index}", "demo", 4, 3, float(index)))
    assert [timeline.rid for timeline in finished] == ["r6", "r5", "r4"]
    assert finished.get("r3") is None
    finished.add(Timeline("large", "demo", 4, 100, 9.0))
    assert [timeline.rid for timeline in finished] == ["large"]


# --- through the router -----------------------------------------------------------------------------------------


def explain(system: System, rid: str) -> list[dict[str, Any]]:
    status, body, _ = system.router.request("GET", f"/debug/requests/{rid}")
    assert status == 200, body
    for life in body["requests"]:
        for choice in life["choices"]:
            assert sum(part.get("seconds", 0) for part in choice["parts"]) == pytest.approx(life["total_s"], abs=1e-9)
    return body["requests"]


def telling(node: FakeNode, message: m.Prefill) -> bool:
    """A prefill node that tells its chunks, though late: the request may be over by then."""
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
    """What the prefill node tells of its chunks comes after the rest."""
    wait_until(lambda: any("chunks" in part for part in explain(system, rid)[0]["choices"][0]["parts"]))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_from_its_arrival_to_its_end(system: System, stream: bool) -> None:
    system.behaviour.answer_prefill = telling
    status, _, headers = system.complete(stream=stream)
    assert status == 200
    num_tokens = len(system.say(system.text))
    rid = headers["x-request-id"]
    await_chunks(system, rid)
    [life] = explain(system, rid)
    assert (life["outcome"], life["model"], life["client_id"], life["error"]) == ("done", "fake", None, None)
    assert 0 < life["ttft_s"] <= life["total_s"]
    [choice] = life["choices"]
    assert (choice["num_tokens"], choice["finish_reason"]) == (num_tokens, "stop")
    assert sum(part.get("num_tokens", 0) for part in choice["parts"]) == num_tokens
    order = ["queue", "reserve", "prefill", "pull", "decode", "finish"]
    assert [name for name in names(life) if name in order] == order
    parts = {part["name"]: part for part in choice["parts"]}
    assert (parts["pull"]["num_bytes"], parts["pull"]["gb_per_s"]) == (1024, 0.001)
    assert parts["prefill"]["chunks"] == [[1, 512, 0.0, 0.25], [1, 100, 0.125, 0.125]]
    assert (parts["prefill"]["node"], parts["decode"]["node"]) == ("p0", "d0")


def test_one_token_needs_no_handoff_and_is_told_of_when_it_is_over(system: System) -> None:
    system.behaviour.answer_prefill = telling
    rid = system.complete(max_tokens=1)[2]["x-request-id"]
    await_chunks(system, rid)
    parts = names(explain(system, rid)[0])
    assert not {"reserve", "offer", "pull", "decode"} & set(parts)


def test_choices_and_prompts_have_their_own_parts(system: System) -> None:
    _, body, headers = system.complete(prompt=["hello", "what"], n=3)
    lives = explain(system, headers["x-request-id"])
    assert [life["rid"] for life in lives] == [f"{body['id']}-1", f"{body['id']}-0"]
    assert [len(life["choices"]) for life in lives] == [3, 3]
    assert explain(system, f"{body['id']}-0") == lives[1:]


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
    system.behaviour.hold = threading.Event()
    thread = threading.Thread(target=system.complete)
    thread.start()

    def live() -> list[dict[str, Any]]:
        return system.router.request("GET", "/debug/requests?outcome=live")[1]["requests"]

    wait_until(lambda: any(names(explain(system, line["rid"])[0])[-1] == "decode" for line in live()))
    [line] = live()
    assert (line["num_tokens"], line["outcome"]) == (1, "live")
    system.behaviour.hold.set()
    thread.join(10)
    assert names(explain(system, line["rid"])[0])[-1] == "finish"
    assert system.router.request("GET", "/debug/requests?outcome=live")[1]["requests"] == []


def test_a_move_is_told_with_its_reason(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    system.behaviour.hold = threading.Event()
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(system.complete()))
    thread.start()
    decodes = [node for node in system.cluster.nodes if node.role == "decode"]
    victim = wait_until(lambda: next((node for node in decodes if own(node, m.Reserve)), None))
    victim.stop()
    wait_until(lambda: system.router.request("GET", "/debug/requests?outcome=live")[1]["requests"][0]["num_moves"])
    system.behaviour.hold.set()
    thread.join(10)
    [life] = explain(system, result[0][2]["x-request-id"])
    assert names(life).count("queue") == 2
    moved = [part for part in life["choices"][0]["parts"] if part.get("reason")]
    assert f"decode node {victim.name}" in moved[0]["reason"]
    nodes = [part["node"] for part in life["choices"][0]["parts"] if part["name"] == "decode"]
    assert nodes[-1] != victim.name
    listed = system.router.request("GET", f"/debug/requests?node={victim.name}")[1]["requests"]
    assert [line["num_moves"] for line in listed] == [1]


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
    [life] = explain(system, system.complete()[2]["x-request-id"])
    assert names(life).count("queue") == names(life).count("reserve") == 1
    assert next(part for part in life["choices"][0]["parts"] if part["name"] == "queue")["num_refused"] == 2
    assert tried == [life["rid"]] * 3


def test_a_paused_request(system: System) -> None:
    system.behaviour.hold = threading.Event()
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(system.complete()))
    thread.start()
    life = system.router.router.dispatcher

    def decoding() -> Any:
        running = [each for each in life.requests.values() if not each.is_canary]
        return running[0] if running and running[0].timeline.tracks[0].last.stage == "decode" else None

    request = wait_until(lambda: system.router.call(decoding))
    system.router.call(lambda: life.set_paused(request, True))
    system.router.call(lambda: life.set_paused(request, False))
    system.behaviour.hold.set()
    thread.join(10)
    [told] = explain(system, result[0][2]["x-request-id"])
    order = [name for name in names(told) if name in ("queue", "decode", "paused", "finish")]
    assert order == ["queue", "decode", "paused", "queue", "decode", "finish"]
    paused = next(part for part in told["choices"][0]["parts"] if part["name"] == "paused")
    assert paused["reason"] == "its client does not read"


def test_a_client_that_leaves_and_an_error(system: System) -> None:
    def refuse(node: FakeNode, message: m.Prefill) -> bool:
        node.link.send(m.Failed(Unit(message.rid, 0, message.attempt), "internal_error", "the model broke", False))
        return True

    system.behaviour.answer_prefill = refuse
    system.complete()
    system.behaviour.answer_prefill = lambda node, message: True  # never answers
    connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "fake", "prompt": "hello"}), {"x-request-id": "mine"}
    )
    wait_until(lambda: system.router.request("GET", "/debug/requests?outcome=live")[1]["requests"])
    connection.close()
    system.router.wait_idle()
    lines = system.router.request("GET", "/debug/requests")[1]["requests"]
    assert [line["outcome"] for line in lines] == ["cancelled", "failed"]
    assert "the model broke" in explain(system, lines[1]["rid"])[0]["error"]
    assert explain(system, lines[0]["rid"])[0]["error"] == "the client left"


def test_every_answer_carries_the_id_to_explain(system: System) -> None:
    """Whole answers, streams, errors before and after the request was queued; the client's own id goes first."""
    for body in ({}, {"stream": True}, {"n": 2}):
        rid = system.complete(**body)[2]["x-request-id"]
        assert explain(system, rid)[0]["rid"] == rid
    for body in (b"{", b'{"model": "fake", "prompt": ""}', b'{"model": "none", "prompt": "x"}'):
        status, _, headers = system.router.request("POST", "/v1/completions", body)
        assert status >= 400
        assert headers["x-request-id"].startswith("cmpl-")
    assert system.router.request("POST", "/v1/chat/completions", b"{")[2]["x-request-id"].startswith("chatcmpl-")

    def refuse(node: FakeNode, message: m.Prefill) -> bool:
        node.link.send(m.Failed(Unit(message.rid, 0, message.attempt), "internal_error", "the model broke", False))
        return True

    system.behaviour.answer_prefill = refuse
    rid = system.complete()[2]["x-request-id"]
    assert explain(system, rid)[0]["outcome"] == "failed"
    system.behaviour.answer_prefill = None
    for _ in range(2):
        body = {"model": "fake", "prompt": "hello", "max_tokens": 3}
        _, answer, headers = system.router.request("POST", "/v1/completions", body, {"x-request-id": "my own"})
        assert headers["x-request-id"] == "my own"
    assert [life["client_id"] for life in explain(system, "my%20own")] == ["my own"] * 2
    assert explain(system, answer["id"])[0]["client_id"] == "my own"


def test_the_time_of_turning_text_into_tokens_is_told(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    group = system.router.call(lambda: next(iter(system.router.router.dispatcher.registry.groups.values())))
    encode = group.tokenizer.encode

    async def slow(*args: Any, **more: Any) -> list[int]:
        await asyncio.sleep(0.05)
        return await encode(*args, **more)

    monkeypatch.setattr(group.tokenizer, "encode", slow)
    [life] = explain(system, system.complete()[2]["x-request-id"])
    assert life["choices"][0]["parts"][0]["name"] == "receive"
    assert life["choices"][0]["parts"][0]["seconds"] >= 0.05
    assert life["ttft_s"] >= 0.05


def test_filters(system: System) -> None:
    for _ in range(3):
        system.complete()

    def count(query: str) -> int:
        status, body, _ = system.router.request("GET", f"/debug/requests?{query}")
        assert status == 200, body
        return len(body["requests"])

    assert [count(query) for query in ("", "limit=2", "outcome=done", "outcome=failed")] == [3, 2, 3, 0]
    assert [count(query) for query in ("model=fake", "model=x", "node=p0", "node=x", "min_s=100")] == [3, 0, 3, 0, 0]
    for query, word in (
        ("outcome=x", "done"),
        ("min_s=x", "seconds"),
        ("limit=-1", "limit"),
        ("colour=red", "outcome"),
    ):
        status, body, _ = system.router.request("GET", f"/debug/requests?{query}")
        assert status == 400
        assert word in body["error"]["message"]


def test_an_unknown_id(system: System) -> None:
    status, body, _ = system.router.request("GET", "/debug/requests/cmpl-x")
    assert status == 404
    for word in ("cmpl-x", "x-request-id", "1024", "/debug/requests"):
        assert word in body["error"]["message"]
    assert system.router.request("GET", "/debug/requests")[1]["requests"] == [], "canaries are none"

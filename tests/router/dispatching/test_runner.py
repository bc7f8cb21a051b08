"""The client's text stays whole when tokens are lost, doubled or reordered, nodes fail or die, and clients leave."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from patience import Patience

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import Unit, unpack_ids
from baton.router.config import RouterConfig
from baton.router.dispatching import runner
from baton.router.dispatching.effects import Effect, Ledger
from baton.router.figures.metrics import Metrics
from baton.router.waiting.admission import PATIENCE_S

from ..conftest import System
from ..fake_nodes import FakeNode


def own(node: FakeNode, kind: type) -> list[Any]:
    """Return the messages of this kind that do not belong to a canary."""
    return [message for message in node.got(kind) if not message.rid.startswith("canary")]


def ignore(node: FakeNode, message: Any) -> bool:
    """Never answer; but a canary may still be under way when a test begins."""
    return not is_canary(message)


def shuffle(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
    random.Random(3).shuffle(steps)
    return steps


def double(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
    return [step for step in steps for _ in range(2)]


def overlap(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
    """Begin every message with the tokens of the two messages before it."""
    unit = steps[0].units[0]
    reserve = node.reserved[(unit.rid, unit.choice, unit.attempt)]
    output = node.output(reserve.request, unpack_ids(reserve.request.prompt_ids), unit.choice)
    return [
        node.tokens(unit, reserve.request, output, max(0, place - 2), min(place, 2) + 1) for place in range(len(output))
    ]


def late_first(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
    """Send the second token after all others."""
    return [steps[0], *steps[2:], steps[1]]


def drop_some(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
    return steps[:3] + steps[5:]


@pytest.mark.parametrize("change", [shuffle, double, overlap, late_first])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_any_order_give_the_whole_text(
    system: System, change: Callable[..., list[m.Tokens]], stream: bool
) -> None:
    system.behaviour.change_tokens = change
    assert text_of(system, stream=stream) == system.text
    assert not own_resends(system)


def test_lost_tokens_are_asked_for(system: System) -> None:
    system.behaviour.change_tokens = drop_some
    begun = time.monotonic()
    status, body, _ = system.complete()
    assert (status, body["choices"][0]["text"]) == (200, system.text)
    assert time.monotonic() - begun > 0.2
    assert [resend.first for resend in own_resends(system)] == [3]


def test_lost_tokens_are_asked_for_at_the_node_that_lost_them(system: System) -> None:
    """Prefill's first token may come after decode has repeated it. Decode lost tokens, so decode is asked."""

    def late(node: FakeNode, message: m.Prefill) -> bool:
        send = node.link.send
        node.link.send = lambda each: node.post(each, 0.1) if isinstance(each, m.Tokens) else send(each)
        node.prefill(message)
        node.link.send = send
        return True

    system.behaviour.change_tokens = drop_some
    system.behaviour.answer_prefill = late
    assert text_of(system, stream=False) == system.text
    assert [resend.first for resend in own_resends(system)] == [3]
    assert not own(system.cluster.by_name("p0"), m.Resend)


def test_lost_tokens_that_do_not_come_again_move_the_request(system: System) -> None:
    def drop_in_the_first_attempt(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
        return drop_some(node, steps) if steps[0].units[0].attempt == 0 else steps

    system.behaviour.change_tokens = drop_in_the_first_attempt
    system.behaviour.resend = False
    status, body, _ = system.complete()
    assert (status, body["choices"][0]["text"]) == (200, system.text)
    prefills = own(system.cluster.by_name("p0"), m.Prefill)
    assert [prefill.attempt for prefill in prefills] == [0, 1]
    assert unpack_ids(prefills[1].request.received_ids) == system.say(system.text)[:3]
    assert prefills[1].request.params == prefills[0].request.params


def test_a_failed_attempt_is_repeated_after_the_received_tokens(system: System) -> None:
    def fail_after_five(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
        unit = steps[0].units[0]
        if unit.attempt > 0:
            return steps
        for step in steps[:5]:
            node.link.send(step)
        node.reserved.pop((unit.rid, unit.choice, unit.attempt))
        node.link.send(m.Failed(unit, "transfer_error", "a page was damaged", True))
        return steps[:1]

    system.behaviour.change_tokens = fail_after_five
    _, body, _ = system.complete(n=2)
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 2
    assert body["usage"]["completion_tokens"] == 2 * len(system.say(system.text))


def test_failures_end_in_one_clear_error(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.behaviour.answer_prefill = lambda node, message: not is_canary(message) and fail_transfer(node, message)
    status, body, _ = system.complete(n=3)
    assert status == 503
    assert "4 attempts" in body["error"]["message"]
    assert "the disk is on fire" not in body["error"]["message"]
    assert "4 attempts; the last: prefill node p0: the disk is on fire" in caplog.text
    assert len(own(system.cluster.by_name("p0"), m.Prefill)) >= 4
    system.behaviour.answer_prefill = None
    assert system.complete()[0] == 200


def test_an_error_in_mid_stream_is_the_last_event(system: System, caplog: pytest.LogCaptureFixture) -> None:
    def fail_after_five(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
        for step in steps[:5]:
            node.link.send(step)
        node.link.send(m.Failed(steps[0].units[0], "internal_error", "the model broke", False))
        return steps[:1]

    system.behaviour.change_tokens = fail_after_five
    events = stream_events(system)
    error = json.loads(events[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "node_failed")
    assert "the model broke" not in error["message"]
    assert "decode node d0: the model broke" in caplog.text
    assert sum("error" in event for event in events) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_dead_node_costs_no_text(make_system: Callable[..., System], role: str, stream: bool) -> None:
    """The rest of the text is computed on other nodes, whichever node dies."""
    system = make_system().up(2, 2)
    system.behaviour.hold = threading.Event()
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(text_of(system, stream=stream)))
    thread.start()
    kind = m.Prefill if role == "prefill" else m.Reserve
    victim = wait_until(lambda: next((n for n in system.cluster.nodes if n.role == role and own(n, kind)), None))
    if role == "prefill":  # before its handoff is over
        assert system.behaviour.hold is not None
    victim.stop()
    time.sleep(0.2)
    system.behaviour.hold.set()
    thread.join()
    assert result == [system.text]
    system.router.wait_idle()


@pytest.mark.timing
def test_a_silent_node_is_given_up(make_system: Callable[..., System]) -> None:
    system = make_system().up(1, 2)
    system.behaviour.hold = threading.Event()
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(text_of(system, stream=True)))
    thread.start()
    victim = wait_until(lambda: next((n for n in system.cluster.nodes if own(n, m.Reserve)), None))
    victim.is_silent = True
    victim.take = lambda message: None  # type: ignore[method-assign]
    other = next(node for node in system.cluster.nodes if node.role == "decode" and node is not victim)
    begun = time.monotonic()
    other_got = wait_until(lambda: own(other, m.Reserve), timeout=4)
    assert other_got
    assert 1.0 < time.monotonic() - begun < 2.5
    system.behaviour.hold.set()
    thread.join()
    assert result == [system.text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["before the first token", "in mid-stream"])
def test_a_client_that_leaves_cancels_both_legs(system: System, stream: bool, moment: str) -> None:
    system.behaviour.hold = threading.Event()
    prefill, decode = system.cluster.by_name("p0"), system.cluster.by_name("d0")
    if moment == "before the first token":
        system.behaviour.answer_prefill = ignore
    else:
        system.behaviour.answer_prefill = first_token_only
    connection = http.client.HTTPConnection(system.router.url.removeprefix("http://"), timeout=10)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_until(lambda: own(prefill, m.Prefill))
    if stream and moment == "in mid-stream":
        assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    for node in (prefill, decode):
        cancel = wait_until(lambda node=node: own(node, m.Cancel))
        assert [each.rid for each in cancel] == [own(prefill, m.Prefill)[0].rid]
    system.router.wait_idle()
    system.behaviour.answer_prefill = None
    system.behaviour.hold.set()
    assert system.complete()[0] == 200


def test_cancel_is_repeated_until_acknowledged(system: System) -> None:
    system.behaviour.ack_cancels = False
    assert system.complete(stop="quick")[0] == 200
    cancels = wait_until(lambda: len(own(system.cluster.by_name("d0"), m.Cancel)) >= 2 or None, timeout=4)
    assert cancels
    system.behaviour.ack_cancels = True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step_tokens", [1, 3, 50])
@pytest.mark.parametrize("stop", ["quick", "ck br", ["zzz", "naïve"], "é", "t", "the"])
def test_a_stop_string_ends_the_text_before_it(
    system: System, stop: str | list[str], step_tokens: int, stream: bool
) -> None:
    system.behaviour.step_tokens = step_tokens
    stops = [stop] if isinstance(stop, str) else stop
    expected = min((system.text.split(each, 1)[0] for each in stops), key=len)
    assert text_of(system, stream=stream, stop=stop) == expected


def test_stop_string_counts_accepted_tokens(system: System) -> None:
    ids = system.say(system.text)
    stop_at = next(n for n in range(len(ids)) if "quick" in system.tokenizer.decode(ids[:n]))
    for step_tokens in (1, 3, 50):
        system.behaviour.step_tokens = step_tokens
        _, body, _ = system.complete(stop="quick", return_token_ids=True)
        choice = body["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "quick")
        assert body["usage"]["completion_tokens"] == stop_at
        assert choice["token_ids"] == ids[:stop_at]
    _, body, _ = system.complete(stop="quick", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "the quick"


def test_stop_string_cancels_one_choice_of_two(system: System) -> None:
    system.cluster.generate_by(lambda prompt, choice: system.say("one STOP two" if choice == 0 else "one two three"))
    _, body, _ = system.complete(n=2, stop="STOP")
    assert [choice["text"] for choice in body["choices"]] == ["one ", "one two three"]
    cancels = wait_until(lambda: own(system.cluster.by_name("d0"), m.Cancel))
    assert {cancel.choices for cancel in cancels} == {(0,)}


def test_min_tokens_comes_before_stop_strings(system: System) -> None:
    system.cluster.generate_by(lambda prompt, choice: system.say("a STOP b STOP c"))
    first = len(system.tokenizer.inner.encode("a STOP b").ids)
    _, body, _ = system.complete(stop="STOP", min_tokens=first)
    assert body["choices"][0]["text"] == "a STOP b "


def test_stop_token_is_counted_and_not_shown(system: System) -> None:
    ids = system.say(system.text)
    _, body, _ = system.complete(stop_token_ids=[ids[4]], return_token_ids=True)
    choice = body["choices"][0]
    first = ids.index(ids[4])
    assert choice["text"] == system.tokenizer.decode(ids[:first])
    assert choice["token_ids"] == ids[: first + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[4])


def test_ignore_eos_continues_after_the_end_token(system: System) -> None:
    system.cluster.generate_by(lambda prompt, choice: [*system.say("a b"), *system.say("c d e f g h")])
    _, body, _ = system.complete(max_tokens=8, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["finish_reason"] == "length"


def test_first_token_can_end_a_request(system: System) -> None:
    system.cluster.generate_by(lambda prompt, choice: [1])
    _, body, _ = system.complete()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 1


def test_a_request_ends_with_504_after_request_timeout_s(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 0.5}).up()
    system.behaviour.hold = threading.Event()
    status, body, _ = system.complete()
    assert (status, body["error"]["code"]) == (504, "timeout")
    assert "longer than its limit of 0.5 s" in body["error"]["message"]
    system.router.wait_idle()


def test_sigterm_finishes_running_requests_and_refuses_new_ones(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    system.behaviour.step_s = 0.02
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(text_of(system, stream=True)))
    thread.start()
    wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
    router = system.router
    import asyncio

    drained = asyncio.run_coroutine_threadsafe(router.router.drain(), router._loop)
    wait_until(lambda: router.router.api.is_draining or None)
    assert system.complete()[0] == 503
    assert router.request("GET", "/ready")[0] == 503
    drained.result()
    thread.join(60)
    assert result == [system.text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_a_request_may_have_a_time_limit_of_its_own(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch, phase: str, stream: bool
) -> None:
    """The request ends in one clear error, and requests behind it are served."""
    system = make_system().up()
    limit_s = 1.0 if phase == "decoding" else 0.2  # a busy machine takes a while to come there
    assert phase == "decoding" or limit_s < PATIENCE_S, "one that waits longer may be given up as late before"
    dispatcher = system.router.router.dispatcher
    submit = dispatcher.submit

    def limited(request: Any) -> None:
        request.deadline = request.created_at + limit_s
        submit(request)

    monkeypatch.setattr(dispatcher, "submit", limited)
    system.behaviour.hold = threading.Event()
    if phase == "queued":
        system.behaviour.answer_reserve = refuse
    elif phase == "prefilling":
        system.behaviour.answer_prefill = ignore
    status, body, _ = system.complete(stream=stream)
    message = json.loads(stream_of(body)[-1]) if stream and phase == "decoding" else body
    assert status == (200 if stream and phase == "decoding" else 504)
    assert f"longer than its limit of {limit_s:g} s" in message["error"]["message"]
    system.router.wait_idle()


def test_a_running_request_can_be_aborted(system: System) -> None:
    system.behaviour.hold = threading.Event()
    dispatcher = system.router.router.dispatcher
    results: list[Any] = []
    prompts = ["a", "b"]
    thread = threading.Thread(target=lambda: results.append(system.complete(prompt=prompts)))
    thread.start()
    reserves = wait_until(lambda: (own(system.cluster.by_name("d0"), m.Reserve)[1:] or None) and own_reserves(system))
    rids = {reserve.rid for reserve in reserves}
    system.router.call(lambda: [dispatcher.abort(dispatcher.requests[rid], "an operator said so") for rid in rids])
    thread.join(60)
    status, body, _ = results[0]
    assert (status, body["error"]["code"]) == (499, "cancelled")
    assert "an operator said so" in body["error"]["message"]
    system.router.wait_idle()


def own_reserves(system: System) -> list[Any]:
    return own(system.cluster.by_name("d0"), m.Reserve)


def refuse(node: FakeNode, message: Any) -> bool:
    if not is_canary(message):
        node.link.send(m.Reserved(message.rid, message.attempt, (), Load(free_pages=0, running=1, waiting=0)))
    return not is_canary(message)


def is_canary(message: Any) -> bool:
    return message.rid.startswith("canary")


def fail_transfer(node: FakeNode, message: m.Prefill) -> bool:
    for choice in message.choices:
        unit = Unit(message.rid, choice, message.attempt)
        node.link.send(m.Failed(unit, "transfer_error", "the disk is on fire", True))
    return True


def first_token_only(node: FakeNode, message: m.Prefill) -> bool:
    if is_canary(message):  # it may still be under way when a test begins, and would wait for its pages
        return False
    output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
    node.link.send(node.tokens(Unit(message.rid, 0, message.attempt), message.request, output, 0, 1))
    return True


def own_resends(system: System) -> list[m.Resend]:
    nodes = system.cluster.nodes
    return [each for node in nodes for each in node.got(m.Resend) if not each.unit.rid.startswith("canary")]


def text_of(system: System, *, stream: bool, **body: Any) -> str:
    if not stream:
        status, answer, _ = system.complete(**body)
        assert status == 200, answer
        return answer["choices"][0]["text"]
    events = stream_events(system, **body)
    assert events[-1] == "[DONE]", events[-1]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    return "".join(choice["text"] for choice in choices)


def stream_events(system: System, **body: Any) -> list[str]:
    status, raw, _ = system.complete(stream=True, **body)
    assert status == 200, raw
    return stream_of(raw)


def stream_of(raw: bytes) -> list[str]:
    return [event.removeprefix("data: ") for event in raw.decode().strip().split("\n\n")]


def wait_until(
    get: Callable[[], Any], describe: Callable[[], str] = lambda: "it did not happen in time", timeout: float = 30.0
) -> Any:
    patience = Patience(timeout)
    while not patience.is_over():
        value = get()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(describe())


def test_pools_too_small_for_the_load_serve_every_request(make_system: Callable[..., System]) -> None:
    """There are long prompts, many choices, and two nodes of each role. No pool is ever overdrawn."""
    system = make_system(num_pages=16, max_running=3).up(2, 2)
    prompts = ["a " * (10 + 7 * (place % 9)) for place in range(40)]
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda each: system.complete(prompt=each[1], n=1 + each[0] % 4), enumerate(prompts)))
    for place, (status, body, _) in enumerate(answers):
        assert status == 200, body
        assert [choice["text"] for choice in body["choices"]] == [system.text] * (1 + place % 4)
    system.router.wait_idle()


class AskedNodes:
    """Two nodes in a dispatcher's place, and the questions for their ledgers that were sent to them."""

    def __init__(self, *_args: object) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.nodes = [SimpleNamespace(node_id=name, routing_id=name.encode()) for name in ("p0", "d0")]
        self.registry = SimpleNamespace(nodes={node.routing_id: node for node in self.nodes})
        self.requests = self.finished = self.health = self.queues = self.cancels = None  # nobody asks for them

    def ask_ledgers(self, query: int, _now: float, *, flush: bool) -> list[Effect]:
        self.asked.append((query, flush))
        return []

    def on_message(self, peer: bytes, message: Any, _now: float) -> list[Effect]:
        node: Any = self.registry.nodes[peer]
        return [Ledger(node, message)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> AskedNodes:
    nodes = AskedNodes()
    monkeypatch.setattr(runner, "Dispatcher", lambda *_args: nodes)
    return nodes


def running() -> Any:
    return runner.RunningDispatcher(RouterConfig(), "epoch", Metrics())


async def test_each_asker_gets_the_ledgers_of_its_own_question(asked: AskedNodes) -> None:
    dispatcher = running()
    first = asyncio.create_task(dispatcher.ledgers(flush=False))
    second = asyncio.create_task(dispatcher.ledgers(flush=False))
    await asyncio.sleep(0)
    assert asked.asked == [(1, False), (2, False)]
    answers = {(node.routing_id, query): SimpleNamespace(query=query) for query in (2, 1) for node in asked.nodes}
    for (peer, _), answer in answers.items():
        dispatcher.on_message(peer, answer)
    for query, task in ((1, first), (2, second)):
        assert await task == {name: answers[name.encode(), query] for name in ("p0", "d0")}
    dispatcher.on_message(b"p0", SimpleNamespace(query=1))  # too late: the question is over


async def test_the_ledger_of_a_silent_node_is_none(asked: AskedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEDGER_S", 0.01)
    assert await running().ledgers(flush=True) == {"p0": None, "d0": None}
    assert asked.asked == [(1, True)]

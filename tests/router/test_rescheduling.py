"""Requests go on elsewhere: what counts against them, what does not, who waits for a node and for how long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Capacity
from baton.metadata.wire.request import Unit, unpack_ids
from baton.router.rescheduling import MAX_LOSSES

from .conftest import System
from .fake_nodes import FakeNode
from .test_runner import fail_transfer, is_canary, own, stream_events, text_of, wait_until

Make = Callable[..., System]


class Asking:
    """One streamed request in a thread of its own."""

    def __init__(self, system: System, **body: Any) -> None:
        self.events: list[str] = []
        self._system, self._body = system, body
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        self.events = stream_events(self._system, **self._body)

    def join(self, timeout: float = 20.0) -> Asking:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def text(self, choice: int = 0) -> str:
        assert self.events[-1] == "[DONE]", self.events[-1]
        pieces = [json.loads(event)["choices"][0] for event in self.events[:-1]]
        return "".join(piece["text"] for piece in pieces if piece["index"] == choice)


def holder(system: System) -> FakeNode:
    """The decode node that has the request now."""
    return wait_until(
        lambda: next(
            (node for node in system.cluster.nodes if node.role == "decode" and node.is_alive() and has_own(node)), None
        )
    )


def has_own(node: FakeNode) -> bool:
    return any(not rid.startswith("canary") for rid, _, _ in node.reserved)


def test_killed_nodes_do_not_count_as_attempts(make_system: Make) -> None:
    """More decode nodes die under a stream, at once after its first token, than an attempt may fail."""
    system = make_system(router={"max_attempts": 2}).up(1, 2)
    system.behaviour.hold = threading.Event()
    asking = Asking(system, n=2)
    for place in range(4):
        victim = holder(system)
        wait_until(lambda place=place: not_first_attempts(system) >= place)
        system.cluster.add("decode", f"fresh-{place}")
        victim.stop()
    holder(system)
    system.behaviour.hold.set()
    assert asking.join().text(0) == asking.text(1) == system.text


def not_first_attempts(system: System) -> int:
    return max((prefill.attempt for prefill in own(system.cluster.by_name("p0"), m.Prefill)), default=-1)


def test_a_request_that_kills_every_node_is_given_up(make_system: Make) -> None:
    """Fakes that drop out and come back when they are given it: no bound but this one would end that."""
    system = make_system().up()
    dispatcher = system.router.router.dispatcher

    def die(node: FakeNode, message: m.Prefill) -> bool:
        if is_canary(message):
            return False
        peer = next(peer for peer, known in dispatcher.registry.nodes.items() if known.node_id == "p0")
        system.router.call(lambda: dispatcher.on_connection_lost(peer))
        return True

    system.behaviour.answer_prefill = die
    status, body, _ = system.complete()
    assert status == 503
    assert f"{MAX_LOSSES + 1} nodes were lost under it" in body["error"]["message"]
    system.behaviour.answer_prefill = None


def test_failures_are_counted_for_each_choice_and_forgotten_when_it_gets_on(make_system: Make) -> None:
    """Each of 8 choices fails 3 times in a row, gets on, and fails 3 times again: never 4 times in a row."""
    system = make_system(router={"max_attempts": 4}).up()
    system.text = "the quick brown fox jumps over lazy dogs " * 2
    num_failed = [0] * 8

    def fail(node: FakeNode, steps: list[m.Tokens]) -> list[m.Tokens]:
        unit = steps[0].units[0]
        if num_failed[unit.choice] == 6:
            return steps
        for step in steps[:4] if num_failed[unit.choice] in (0, 3) else ():
            node.link.send(step)
        num_failed[unit.choice] += 1
        node.reserved.pop((unit.rid, unit.choice, unit.attempt))
        node.link.send(m.Failed(unit, "unavailable", "not now", True))
        return steps[:1]

    system.behaviour.change_tokens = fail
    _, body, _ = system.complete(n=8)
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 8
    assert num_failed == [6] * 8


@pytest.mark.parametrize("stop", ["ck br", "fox", None])
def test_text_is_whole_wherever_the_node_dies(make_system: Make, stop: str | None) -> None:
    """After each number of tokens: stop strings that lie across the cut, bytes of one character on both its sides."""
    system = make_system().up(1, 2)
    expected = system.text if stop is None else system.text.split(stop)[0]
    for place in range(len(system.say(system.text))):
        system.behaviour.change_tokens = lambda node, steps, place=place: die_after(system, node, steps, place)
        asking = Asking(system, **({} if stop is None else {"stop": stop, "min_tokens": 2}))
        assert asking.join().text() == expected, f"cut after {place} tokens"
        wait_until(lambda: len(system.router.router.dispatcher.registry.nodes) == 3)
        wait_until(lambda: len(pairs_ready(system)) == 2)


def die_after(system: System, node: FakeNode, steps: list[m.Tokens], place: int) -> list[m.Tokens]:
    """The node of the first attempt sends so many messages and is gone for the router."""
    if steps[0].units[0].attempt > 0:
        return steps
    for step in steps[:place]:
        node.link.send(step)
    node.reserved.clear()
    node.link.send(m.Leaving(done=True))
    return steps[:1]


def pairs_ready(system: System) -> list[Any]:
    body = system.router.request("GET", "/debug/nodes")[1]
    return [pair for pair in body["pairs"] if pair["state"] == "ready"]


def test_what_failed_on_a_node_that_dies_right_after_is_forgiven(make_system: Make) -> None:
    """Peers notice a death first, and say that the transfer failed: no attempt is used up by that."""
    system = make_system(router={"max_attempts": 1}).up(2, 1)
    dispatcher = system.router.router.dispatcher
    system.behaviour.hold = threading.Event()
    asking = Asking(system)
    holder(system)

    def fail_and_die() -> None:
        (request,) = (each for each in dispatcher.requests.values() if not each.is_canary)
        (attempt,) = request.attempts.values()
        attempt.prefill_done = False
        attempt.admitted.clear()
        choice = request.sequences[0]
        choice.note_end(attempt, is_loss=False)
        request.note_failure(attempt)
        dispatcher.on_connection_lost(attempt.prefill.routing_id)
        assert not choice.failures and not request.failed_pairs and choice.num_losses == 1

    system.router.call(fail_and_die)
    system.behaviour.hold.set()
    assert asking.join().text() == system.text


def test_a_prefill_node_lost_after_the_pages_have_arrived_moves_nothing(make_system: Make) -> None:
    system = make_system().up(1, 1)
    system.behaviour.hold = threading.Event()
    system.behaviour.answer_prefill = lambda node, message: not is_canary(message) and hand_over(node, message)
    asking = Asking(system)
    prefill = system.cluster.by_name("p0")
    dispatcher = system.router.router.dispatcher
    wait_until(lambda: any(attempt.admitted for g in dispatcher.requests.values() for attempt in g.attempts.values()))
    prefill.stop()
    wait_until(lambda: len(dispatcher.registry.nodes) == 1)
    system.behaviour.hold.set()
    assert asking.join().text() == system.text
    assert [prefill.attempt for prefill in own(prefill, m.Prefill)] == [0]
    system.router.wait_idle()


def hand_over(node: FakeNode, message: m.Prefill) -> bool:
    """Prefill without its last word, PrefillDone."""
    output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
    node.link.send(node.tokens(Unit(message.rid, 0, message.attempt), message.request, output, 0, 1))
    decode = next(other for other in node.cluster.nodes if message.decode and other.epoch == message.decode.epoch)
    decode.handoffs.put((message, 0, output))
    return True


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_log_probabilities_of_the_prompt_are_computed_again(make_system: Make, max_tokens: int) -> None:
    """All tokens are there and prefill dies before it could tell of the prompt."""
    system = make_system().up(2, 1)
    system.behaviour.answer_prefill = lambda node, message: (
        not is_canary(message)
        and (message.attempt == 0 and (hand_over(node, message) if message.decode else first_token(node, message)))
    )
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(system.complete(echo=True, logprobs=1, max_tokens=max_tokens))
    )
    thread.start()
    dispatcher = system.router.router.dispatcher
    wait_until(
        lambda: any(each.sequences[0].finish_reason for each in dispatcher.requests.values() if not each.is_canary)
    )
    victim = wait_until(lambda: next((n for n in system.cluster.nodes if own(n, m.Prefill)), None))
    victim.stop()
    thread.join(10)
    status, body, _ = results[0]
    assert status == 200, body
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) > 3
    system.router.wait_idle()


def first_token(node: FakeNode, message: m.Prefill) -> bool:
    output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
    node.link.send(node.tokens(Unit(message.rid, 0, message.attempt), message.request, output, 0, 1))
    return True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_for_a_new_node_of_a_role(make_system: Make, role: str) -> None:
    """Those under way, and those that come meanwhile."""
    system = make_system().up()
    system.behaviour.hold = threading.Event()
    if role == "prefill":
        system.behaviour.answer_prefill = lambda node, message: not is_canary(message) and node.name == "p0"
    asking = Asking(system)
    holder(system)
    system.cluster.by_name("p0" if role == "prefill" else "d0").stop()
    dispatcher = system.router.router.dispatcher
    wait_until(lambda: len(dispatcher.registry.nodes) == 1)
    later = Asking(system)
    wait_until(lambda: dispatcher.queues.num_waiting == 2)
    system.behaviour.hold.set()
    system.cluster.add(role, "fresh")
    assert asking.join().text() == later.join().text() == system.text


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nobody_waits_longer_than_stated(make_system: Make, role: str) -> None:
    system = make_system(router={"node_wait_s": 0.4}).up()
    system.behaviour.hold = threading.Event()
    system.behaviour.answer_prefill = lambda node, message: not is_canary(message)
    asking: list[Any] = []
    thread = threading.Thread(target=lambda: asking.append(system.complete()))
    thread.start()
    holder(system)
    system.cluster.by_name("p0" if role == "prefill" else "d0").stop()
    thread.join(10)
    status, body, _ = asking[0]
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert f"no {role} node is left" in body["error"]["message"] and "0.4 s" in body["error"]["message"]
    system.router.wait_idle()
    status, body, _ = system.complete()  # the time is over: turned away at once
    assert status == 503


def test_nobody_waits_for_ever_for_a_pool_that_is_gone(make_system: Make) -> None:
    """The only pool that could hold the request dies; small requests behind it are served."""
    system = make_system(router={"node_wait_s": 0.4}).up(1, 1)
    system.behaviour.hold = threading.Event()
    asking: list[Any] = []
    thread = threading.Thread(target=lambda: asking.append(system.complete(prompt="a " * 100)))
    thread.start()
    holder(system)
    system.cluster.add("decode", "small", capacity=Capacity(num_pages=5, page_size=16, max_running=4))
    wait_until(lambda: len(system.router.router.dispatcher.registry.nodes) == 3)
    system.cluster.by_name("d0").stop()
    small = Asking(system, max_tokens=5)
    thread.join(10)
    assert asking[0][0] == 503
    assert "none has room for" in asking[0][1]["error"]["message"]
    system.behaviour.hold.set()
    small.join()
    system.router.wait_idle()


def test_a_pair_whose_transfer_fails_is_taken_out_probed_and_put_back(make_system: Make) -> None:
    """The other pair serves meanwhile; the bad one gets canaries only, and requests again when one has passed."""
    system = make_system().up(1, 1)
    system.cluster.add("prefill", "p1")  # of equal nodes the one that came first is taken
    wait_until(lambda: states(system) == {"p0": "ready", "p1": "ready"})
    is_broken = threading.Event()
    is_broken.set()

    def fail_on_p0(node: FakeNode, message: m.Prefill) -> bool:
        return node.name == "p0" and is_broken.is_set() and fail_transfer(node, message)

    system.behaviour.answer_prefill = fail_on_p0
    for place in range(4):
        assert text_of(system, stream=False, prompt=f"{place}") == system.text
    p0 = system.cluster.by_name("p0")
    assert len(own(p0, m.Prefill)) == 1, "the broken pair got requests"
    assert "disk is on fire" in states(system)["p0"] and states(system)["p1"] == "ready"
    wait_until(lambda: len([each for each in p0.got(m.Prefill) if is_canary(each)]) >= 2)
    is_broken.clear()
    wait_until(lambda: states(system)["p0"] == "ready", timeout=8)
    system.behaviour.answer_prefill = None
    for place in range(8):
        system.complete(prompt=f"again {place}")
    assert len(own(p0, m.Prefill)) > 1


def test_requests_wait_for_the_probe_of_the_only_pair(make_system: Make) -> None:
    """It fails for good: they end in one error that says why."""
    system = make_system(router={"node_wait_s": 0.5}).up()
    system.behaviour.answer_prefill = fail_transfer
    status, body, _ = system.complete()
    assert status == 503
    assert "its nodes cannot work together now" in body["error"]["message"]
    system.behaviour.answer_prefill = None
    system.router.wait_ready(8)
    assert text_of(system, stream=False) == system.text


def test_clients_that_leave_say_nothing_of_a_pair(make_system: Make) -> None:
    """Nodes tell of a transfer that failed because its client had left, before they hear of that or after."""
    system = make_system().up()
    system.behaviour.hold = threading.Event()
    system.behaviour.answer_prefill = lambda node, message: not is_canary(message)
    dispatcher = system.router.router.dispatcher
    for place in range(6):
        thread = threading.Thread(target=system.complete)
        thread.start()
        prefill = wait_until(lambda place=place: own(system.cluster.by_name("p0"), m.Prefill)[place:])[0]
        request = system.router.call(lambda rid=prefill.rid: dispatcher.requests[rid])
        system.router.call(lambda request=request: dispatcher.abort(request, "as if it had left"))
        thread.join(60)
        failed = m.Failed(Unit(prefill.rid, 0, prefill.attempt), "transfer_error", "revoked", True)
        system.cluster.by_name("d0").post(failed)
    num_canaries = len([each for each in system.cluster.by_name("p0").got(m.Prefill) if is_canary(each)])
    system.behaviour.answer_prefill = None
    system.behaviour.hold.set()
    assert text_of(system, stream=False) == system.text
    assert states(system)["p0"] == "ready"
    assert len([each for each in system.cluster.by_name("p0").got(m.Prefill) if is_canary(each)]) == num_canaries


def test_an_operator_drains_a_node_and_puts_it_back(make_system: Make) -> None:
    """It finishes what it has; what it has not finished in time goes on elsewhere, without a repeat or a gap."""
    system = make_system().up(1, 2)
    system.behaviour.hold = threading.Event()
    dispatcher = system.router.router.dispatcher
    asking = Asking(system)
    victim = holder(system)
    other = next(node for node in system.cluster.nodes if node.role == "decode" and node is not victim)
    system.router.call(lambda: dispatcher.drain(victim.name, 0.3))
    later = Asking(system, prompt="later")
    wait_until(lambda: own(other, m.Reserve))
    assert own(other, m.Reserve)[0].rid != own(victim, m.Reserve)[0].rid
    wait_until(lambda: len(own(other, m.Reserve)) == 2)  # its time is over: moved
    wait_until(lambda: own(victim, m.Cancel))
    system.behaviour.hold.set()
    assert asking.join().text() == later.join().text() == system.text
    assert len(own(victim, m.Reserve)) == 1
    system.router.call(lambda: dispatcher.undrain(victim.name))
    num_before = len(own(victim, m.Reserve))
    for place in range(4):
        system.complete(prompt=f"more {place}")
    assert len(own(victim, m.Reserve)) + len(own(other, m.Reserve)) == num_before + 6
    assert victim.is_alive() and victim.got(m.Drain) == []


def test_a_node_that_leaves_with_work_hands_it_on(make_system: Make) -> None:
    """SIGTERM, and the time to drain is over: what it held moves, and does not count as a failure."""
    system = make_system(router={"max_attempts": 1}).up(1, 2)
    system.behaviour.hold = threading.Event()
    asking = Asking(system)
    victim = holder(system)
    victim.is_silent, victim.take = True, lambda message: None  # type: ignore[method-assign]
    victim.post(m.Leaving(done=False))
    victim.post(m.Leaving(done=True))
    wait_until(lambda: len(system.router.router.dispatcher.registry.nodes) == 2)
    victim.stop()
    system.behaviour.hold.set()
    assert asking.join().text() == system.text


def states(system: System) -> dict[str, str]:
    body = system.router.request("GET", "/debug/nodes")[1]
    return {pair["prefill"]: pair["state"] for pair in body["pairs"]}

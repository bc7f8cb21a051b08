"""Rescheduling moves requests to other nodes: which failures count, how long a request waits, when it is given up.

The first tests run a router with fake nodes. Those at the end call Rescheduling and its collaborators directly.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import BatonError
from baton.metadata.wire import messages as m
from baton.metadata.wire.messages import Cancel, Compute
from baton.metadata.wire.node_info import Capacity
from baton.metadata.wire.request import SamplingParams, TokenLogprobs, Unit, unpack_ids
from baton.router.dispatching.cancels import Cancels
from baton.router.dispatching.effects import Send
from baton.router.dispatching.rescheduling import MAX_LOSSES, Rescheduling
from baton.router.dispatching.reservations import Reservations
from baton.router.dispatching.streams import TokenStreams
from baton.router.http.server.errors import body_of, status_of
from baton.router.nodes.node import Node, NodeGroup
from baton.router.requests.attempt import Attempt
from baton.router.requests.request import Request
from baton.router.waiting.admission import Bounds, Queues, RefusedRequest
from baton.router.waiting.entry import Entry

from ..conftest import System
from ..fake_nodes import FakeNode
from ..sites import add_node, make_group
from .test_dispatcher import Client, World, load
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
    """Return the decode node that has the request now."""
    return wait_until(
        lambda: next(
            (node for node in system.cluster.nodes if node.role == "decode" and node.is_alive() and has_own(node)), None
        )
    )


def has_own(node: FakeNode) -> bool:
    return any(not rid.startswith("canary") for rid, _, _ in node.reserved)


def test_killed_nodes_do_not_count_as_attempts(make_system: Make) -> None:
    """More decode nodes die under a stream, each right after its first token, than max_attempts allows failures."""
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
    """The fake nodes leave and return whenever they get the request. Only this bound ends that."""
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
    """Each of 8 choices fails 3 times in a row, makes progress, and fails 3 times again: never 4 times in a row."""
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
def test_the_text_is_whole_after_whichever_token_the_node_dies(make_system: Make, stop: str | None) -> None:
    """Stop strings and the bytes of one character lie across the cut in some cases."""
    system = make_system().up(1, 2)
    expected = system.text if stop is None else system.text.split(stop)[0]
    for place in range(len(system.say(system.text))):
        system.behaviour.change_tokens = lambda node, steps, place=place: die_after(system, node, steps, place)
        asking = Asking(system, **({} if stop is None else {"stop": stop, "min_tokens": 2}))
        assert asking.join().text() == expected, f"cut after {place} tokens"
        wait_until(lambda: len(system.router.router.dispatcher.registry.nodes) == 3)
        wait_until(lambda: len(pairs_ready(system)) == 2)


def die_after(system: System, node: FakeNode, steps: list[m.Tokens], place: int) -> list[m.Tokens]:
    """Let the node of the first attempt send so many messages and then die."""
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


def test_a_failure_right_before_the_death_of_its_node_uses_up_no_attempt(make_system: Make) -> None:
    """Peers notice a death first and report a failed transfer."""
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
    """Prefill as usual, but without the last message, PrefillDone."""
    output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
    node.link.send(node.tokens(Unit(message.rid, 0, message.attempt), message.request, output, 0, 1))
    decode = next(other for other in node.cluster.nodes if message.decode and other.epoch == message.decode.epoch)
    decode.handoffs.put((message, 0, output))
    return True


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_log_probabilities_of_the_prompt_are_computed_again(make_system: Make, max_tokens: int) -> None:
    """All tokens have arrived, but prefill dies before it reports the log-probabilities of the prompt."""
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
    thread.join()
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
    """Both running and new requests wait."""
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
def test_no_request_waits_longer_than_node_wait_s(make_system: Make, role: str) -> None:
    system = make_system(router={"node_wait_s": 0.4})
    system.cluster.add("decode", "d0", protocol_max=Compute.since - 1)  # it cannot compute prompts
    system.up(1, 0)
    system.behaviour.hold = threading.Event()
    system.behaviour.answer_prefill = lambda node, message: not is_canary(message)
    asking: list[Any] = []
    thread = threading.Thread(target=lambda: asking.append(system.complete()))
    thread.start()
    holder(system)
    system.cluster.by_name("p0" if role == "prefill" else "d0").stop()
    thread.join()
    status, body, _ = asking[0]
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert f"no {role} node is left" in body["error"]["message"] and "0.4 s" in body["error"]["message"]
    system.router.wait_idle()
    status, body, _ = system.complete()  # the time is over: turned away at once
    assert status == 503


def test_no_request_waits_for_ever_for_a_pool_that_is_gone(make_system: Make) -> None:
    """The only pool that could hold the request dies. Small requests behind it are served."""
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
    thread.join()
    assert asking[0][0] == 503
    assert "none has room for" in asking[0][1]["error"]["message"]
    system.behaviour.hold.set()
    small.join()
    system.router.wait_idle()


def test_a_pair_with_a_failed_transfer_is_taken_out_probed_and_put_back(make_system: Make) -> None:
    """The other pair serves meanwhile. The failed pair gets only canaries until one passes."""
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
    """The probe fails for good, so the requests end with one error that says why."""
    system = make_system(router={"node_wait_s": 0.5}).up()
    system.behaviour.answer_prefill = fail_transfer
    status, body, _ = system.complete()
    assert status == 503
    assert "its nodes cannot work together now" in body["error"]["message"]
    system.behaviour.answer_prefill = None
    system.router.wait_ready(8)
    assert text_of(system, stream=False) == system.text


def test_failures_caused_by_clients_that_leave_do_not_count_against_a_pair(make_system: Make) -> None:
    """Nodes report a transfer that failed because its client left, before or after they hear of the cancel."""
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
    """The node finishes its requests. Those not finished in time continue elsewhere without a repeat or a gap."""
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
    """The node got SIGTERM and its time to drain is over. Its requests move, and this does not count as a failure."""
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


# --- Rescheduling alone: which nodes are told, what is queued again ---------------------------------------------------


def make_node(name: str, group: NodeGroup) -> Node:
    return add_node(group, "prefill" if name.startswith("p") else "decode", name)


class Moving:
    """A request of several choices, all on (p0, d0), with the real collaborators of Rescheduling."""

    def __init__(self, num_choices: int = 2, *, max_attempts: int = 3, **more: Any) -> None:
        self.group = make_group()
        self.request = self.make_request("r", num_choices, **more)
        self.p0, self.d0, self.d1 = (make_node(name, self.group) for name in ("p0", "d0", "d1"))
        self.requests = {"r": self.request}
        self.kinds: list[str] = []  # why it moved
        metrics: Any = SimpleNamespace(moved=lambda request, kind: self.kinds.append(kind))
        self.effects: list[Any] = []
        self.queues = Queues(Bounds(100, 1 << 20, 60.0))
        self.reservations = Reservations("e")
        cancels = Cancels("e", self.effects)
        streams = TokenStreams("e", self.requests, metrics, self.effects)
        self.moves = Rescheduling(
            self.requests, self.queues, self.reservations, streams, cancels, metrics, max_attempts
        )
        self.errors: list[BatonError] = []
        self.attempt = self.begin(self.d0)

    def make_request(self, rid: str, num_choices: int, **more: Any) -> Request:
        nobody: Any = None
        params = SamplingParams(max_tokens=50)
        return Request(rid, self.group, [5, 6, 7], params, nobody, num_choices=num_choices, now=0.0, **more)

    def begin(self, decode: Node, *, dispatched: bool = True) -> Attempt:
        """Give nodes to all choices. If not `dispatched`, only begin their reservation."""
        choices = tuple(range(len(self.request.sequences)))
        attempt = self.request.begin_attempt(set(choices), self.p0, decode, 1.0)
        attempt.dispatched = dispatched
        if not dispatched:
            entry = Entry(self.request, choices)
            self.queues.add(entry)
            self.reservations.begin(entry, attempt, decode, 1.0)
            return attempt
        for sequence in self.request.sequences:
            sequence.attempt = attempt
        decode.reserve("r", attempt.number, choices, 2)
        self.p0.begin_prompt("r", attempt.number, 3, 0.0)
        return attempt

    def receive(self, num_tokens: int) -> None:
        for sequence in self.request.sequences:
            sequence.received += [9] * num_tokens

    def fail(self, choices: set[int], reason: str, at: Node | None = None, attempt: Attempt | None = None) -> None:
        self.end(self.moves.failed(self.request, attempt or self.attempt, choices, reason, 2.0, at=at))

    def lose(self, node: Node, reason: str = "silent") -> None:
        self.end(self.moves.lost(node, reason, 2.0))

    def evict(self, node: Node) -> None:
        self.end(self.moves.evict(node, "its time to drain is over", 2.0))

    def end(self, refused: list[RefusedRequest]) -> None:
        """End refused requests as the dispatcher does."""
        for request, error in refused:
            if not request.is_over:
                request.is_over = True
                self.errors.append(error)

    @property
    def queued(self) -> list[tuple[int, ...]]:
        """The choices of the queue's entries, the first in front. (77,) stands for the other request."""
        waiting = self.queues.waiting_in(self.group)
        return [entry.choices if entry.request is self.request else (77,) for entry in waiting]

    @property
    def cancels(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """The cancels that were sent: node, attempt, choices."""
        sent = [effect for effect in self.effects if isinstance(effect, Send) and isinstance(effect.message, Cancel)]
        return [(each.node.node_id, each.message.attempt, each.message.choices) for each in sent]  # type: ignore


@pytest.fixture
def moving() -> Moving:
    moving = Moving()
    moving.queues.add(Entry(moving.make_request("somebody else", 1), (0,)))
    return moving


def test_a_failure_moves_its_choice_and_leaves_the_others(moving: Moving) -> None:
    moving.receive(5)
    moving.fail({1}, "an offer was lost", moving.d0)
    assert moving.queued == [(1,), (77,)]
    assert moving.cancels == [("p0", 0, (1,))], "d0 has said that it holds nothing"
    assert moving.d0.units_of("r", 0) == {0} and moving.p0.num_prompts == 1
    assert moving.attempt.choices == {0} and list(moving.request.attempts) == [0]
    assert moving.request.sequences[1].attempt is None and moving.request.sequences[0].attempt is moving.attempt
    assert moving.request.has_failed_on(moving.p0, moving.d0)


def test_moved_choices_are_queued_in_order_before_other_requests(moving: Moving) -> None:
    moving.fail({0, 1, 5}, "tokens were lost")
    assert moving.queued == [(0,), (1,), (77,)]
    assert sorted(moving.cancels) == [("d0", 0, (0, 1)), ("p0", 0, (0, 1))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing and moving.request.attempts == {}


def test_failures_of_ended_attempts_move_nothing(moving: Moving) -> None:
    moving.attempt.choices.clear()
    moving.fail({0}, "late")
    del moving.request.attempts[0]
    moving.attempt.choices.add(0)
    moving.fail({0}, "later")
    moving.request.attempts[0], moving.request.is_over = moving.attempt, True
    moving.fail({0}, "too late")
    assert moving.queued == [(77,)] and moving.cancels == [] and not moving.errors


def test_failures_in_a_row_end_a_request_and_progress_resets_the_count(moving: Moving) -> None:
    for number in range(8):
        attempt = moving.begin(moving.d0) if number else moving.attempt
        moving.receive(2)  # more than the first token
        moving.fail({0, 1}, "why", attempt=attempt)
    assert not moving.errors
    for number in range(2):
        moving.receive(number)  # a first token is no progress: every prefill node gives it
        moving.fail({0, 1}, "secret words", attempt=moving.begin(moving.d0))
    (error,) = moving.errors
    assert "after 3 attempts" in str(error) and "secret words" in str(error)
    assert error.shown == "given up after 3 attempts"  # type: ignore[attr-defined]


def test_a_canary_is_never_moved() -> None:
    for name in ("failed", "lost"):
        moving = Moving(1, is_canary=True)
        if name == "failed":
            moving.fail({0}, "why")
        else:
            moving.lose(moving.d0, "silent")
        assert len(moving.errors) == 1 and moving.queued == []


def test_deaths_of_decode_nodes_end_a_request_only_after_max_losses(moving: Moving) -> None:
    for number in range(MAX_LOSSES):
        node = make_node(f"dead-{number}", moving.group)
        moving.attempt = moving.begin(node)
        moving.lose(node, "its connection closed")
        assert ("p0", moving.attempt.number, (0, 1)) in moving.cancels
        assert node.node_id not in [name for name, _, _ in moving.cancels]
    assert not moving.errors and moving.request.sequences[0].failures == []
    node = make_node("d-last", moving.group)
    moving.begin(node)
    moving.lose(node, "its connection closed")
    assert f"after {MAX_LOSSES + 1} nodes" in str(moving.errors[0])


def test_failures_on_a_node_that_dies_are_forgiven(moving: Moving) -> None:
    moving.fail({0, 1}, "it does not answer")
    assert moving.request.sequences[0].failures
    moving.lose(moving.d0, "silent")
    assert not moving.request.sequences[0].failures and not moving.request.has_failed_on(moving.p0, moving.d0)


def test_if_a_prefill_node_dies_choices_that_are_not_admitted_move(moving: Moving) -> None:
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(1,), (77,)] and moving.cancels == [("d0", 0, (1,))]
    assert moving.attempt.prefill_done and moving.attempt.nodes == [moving.d0]
    moving.lose(moving.p0, "twice")
    assert moving.queued == [(1,), (77,)]


def test_a_prefill_node_that_dies_after_its_work_moves_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(77,)] and moving.cancels == []


def test_if_a_prefill_node_dies_before_dispatch_its_reservation_is_taken_back(moving: Moving) -> None:
    """The reservation has no answer yet, and its choices are still queued."""
    moving.fail({0, 1}, "why")
    moving.moves.leave_nodes(moving.request, "it is queued once", 2.0)
    moving.effects.clear()
    attempt = moving.begin(moving.d1, dispatched=False)
    moving.lose(moving.p0, "silent")
    assert len(moving.reservations) == 0 and moving.request.attempts == {}
    assert moving.cancels == [("d1", attempt.number, (0, 1))] and moving.queued == [(77,), (0, 1)]


def test_log_probabilities_that_died_with_prefill_are_computed_again() -> None:
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(0,)], "decode goes on, but the prompt must be scored"
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.attempt.choices.clear()
    moving.request.sequences[0].finish_reason = "length"
    moving.lose(moving.p0, "silent")
    assert moving.queued == [(0,)] and moving.request.attempts == {}
    moving = Moving(1, wants_prompt_logprobs=True)
    moving.request.prompt_logprobs = (TokenLogprobs(-1.0, (), ()),)
    moving.attempt.admitted.add(0)
    moving.lose(moving.p0, "silent")
    assert moving.queued == []


@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_draining_node_hands_on_all_that_it_holds(name: str, dispatched: bool) -> None:
    moving = Moving()
    if not dispatched:
        moving.moves.leave_nodes(moving.request, "it is reserved for again", 2.0)
        moving.effects.clear()
        for sequence in moving.request.sequences:
            sequence.restart()
        moving.begin(moving.d0, dispatched=False)
    moving.evict(getattr(moving, name))
    assert moving.queued == ([(0,), (1,)] if dispatched else [(0, 1)])
    assert moving.request.attempts == {} and len(moving.reservations) == 0
    told = {"p0", "d0"} if dispatched else {"d0"}  # prefill knows nothing of it yet
    assert {cancelled for cancelled, _, _ in moving.cancels} == told
    assert moving.request.sequences[0].failures == [] and moving.request.sequences[0].num_losses == 0


def test_a_prefill_node_that_has_done_its_part_hands_on_nothing(moving: Moving) -> None:
    moving.attempt.prefill_done = True
    moving.evict(moving.p0)
    assert moving.queued == [(77,)]


def test_a_request_leaves_a_node_that_cannot_be_reached(moving: Moving) -> None:
    moving.end(moving.moves.unreachable(moving.request, moving.attempt, moving.d0, 2.0))
    assert moving.queued == [(0,), (1,), (77,)] and moving.cancels == [("p0", 0, (0, 1))]
    assert moving.request.sequences[0].num_losses == 1 and moving.request.sequences[0].failures == []


def test_a_pause_holds_nothing_and_resumes_in_order(moving: Moving) -> None:
    moving.receive(4)
    moving.request.sequences[1].finish_reason = "stop"
    moving.attempt.choices.discard(1)
    moving.d0.release("r", 0, (1,))
    moving.moves.pause(moving.request, "its client does not read", 2.0)
    assert moving.queued == [(77,)] and moving.request.attempts == {}
    assert sorted(moving.cancels) == [("d0", 0, (0,)), ("p0", 0, (0,))]
    assert moving.d0.holds_nothing and moving.p0.holds_nothing
    assert moving.request.sequences[0].attempt is None and moving.request.sequences[0].num_before == 4
    moving.moves.resume(moving.request, 3.0)
    assert moving.queued == [(0,), (77,)]


def test_several_choices_resume_in_their_order(moving: Moving) -> None:
    moving.moves.pause(moving.request, "its client does not read", 2.0)
    moving.moves.resume(moving.request, 3.0)
    assert moving.queued == [(0,), (1,), (77,)]


def test_moves_are_counted_by_their_reason() -> None:
    for event, kind in (
        (lambda moving: moving.fail({0}, "no"), "failed"),
        (lambda moving: moving.end(moving.moves.unreachable(moving.request, moving.attempt, moving.d0, 2.0)), "lost"),
        (lambda moving: moving.evict(moving.d0), "drained"),
    ):
        moving = Moving()
        event(moving)
        assert moving.kinds == [kind]


def test_a_request_survives_the_restart_of_its_only_decode_node(make_system: Callable[..., System]) -> None:
    system = make_system().up()
    system.behaviour.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(system.complete)
        wait_until(lambda: own(system.cluster.by_name("d0"), m.Reserve))
        system.cluster.by_name("d0").stop()
        time.sleep(0.3)
        system.behaviour.hold.set()
        system.cluster.nodes.pop()
        system.cluster.add("decode", "d0")
        status, body, _ = future.result(60)
    assert (status, body["choices"][0]["text"]) == (200, system.text)


# --- out of memory ---


class Starved(World):
    """Nodes that run out of memory when the test says so."""

    def begin(self, client: Client) -> m.Prefill:
        """Let the decode node that was asked last grant the reservation. Return what the prefill node is asked for."""
        name, asked = next((to, each) for to, each in reversed(self.sent) if isinstance(each, m.Reserve))
        assert asked.rid == client.request.rid
        self.say(name, m.Reserved(asked.rid, asked.attempt, asked.choices, load(90)))
        return next(each for _, each in reversed(self.sent) if isinstance(each, m.Prefill))

    def pair_of(self, prefill: m.Prefill) -> tuple[str, str]:
        """Return the names of the nodes of an attempt."""
        name = next(to for to, each in self.sent if each is prefill)
        assert prefill.decode is not None
        return name, prefill.decode.node_id

    def run_out(self, name: str, asked: m.Prefill, *choices: int) -> None:
        for choice in choices or asked.choices:
            words = f"no memory left on {name}; lower max_running"
            self.say(name, m.Failed(Unit(asked.rid, choice, asked.attempt), "out_of_memory", words, True))

    def pairs(self) -> list[tuple[str, str]]:
        return [self.pair_of(each) for _, each in self.sent if isinstance(each, m.Prefill)]

    def check_error(self, client: Client, where: str) -> None:
        """Check that the request has ended with one error that names the cause and the fix, and that no node gets it
        any more."""
        assert client.num_ends == 1 and client.errors
        error, num_sent = client.errors[0], len(self.pairs())
        body = body_of(error).error
        assert (status_of(error), body.code) == (503, "out_of_memory")
        assert f"ran out of memory {where}: shorten its prompt" in body.message and "lower max_running" in body.message
        assert "no memory left on" in str(error) and "no memory left on" not in body.message, "a node's words: log only"
        self.wait(30.0)
        assert len(self.pairs()) == num_sent and client.num_ends == 1
        self.check_books()


def other(name: str) -> str:
    return name[0] + str(1 - int(name[1]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_request_that_ran_out_of_memory_on_two_nodes_gets_no_third(
    role: str, num_nodes: int, is_streaming: bool
) -> None:
    """It goes to another node of the role first, although other pairs with the first node have not failed."""
    names = {"prefill": ["p0", "d0"], "decode": ["d0", "p0"]}[role]
    more = [f"{role[0]}{place}" for place in range(1, num_nodes)] + [f"{names[1][0]}1"]
    world = Starved(*names, *more)
    client = world.submit()
    place = 0 if role == "prefill" else 1
    tried: list[str] = []
    for num_tries in (1, 2):
        asked = world.begin(client)
        pair = world.pair_of(asked)
        tried.append(pair[place])
        if is_streaming and role == "decode":
            first = len(unpack_ids(asked.request.received_ids))
            world.hand_over(asked, *pair)
            world.tokens(pair[1], asked, first + 1, [41, 42, 43])
        assert len(world.pairs()) == num_tries and not client.num_ends
        for name in (name for name in [*names, *more] if name[0] == "d"):  # load invites an untried pair with the node
            world.beat(name, free_pages=90 if (name == pair[1]) == (role == "decode") else 50)
        world.run_out(pair[place], asked)
    assert len(set(tried)) == 2, tried
    world.check_error(client, "on two nodes")
    assert bool(client.ids) == (is_streaming and role == "decode")


def test_one_prefill_and_one_decode_node_are_two_nodes() -> None:
    world = Starved("p0", "p1", "d0", "d1", "d2")
    client = world.submit()
    asked = world.begin(client)
    first = world.pair_of(asked)
    world.run_out(first[0], asked)
    asked = world.begin(client)
    prefill, decode = world.pair_of(asked)
    assert prefill == other(first[0])
    world.hand_over(asked, prefill, decode)
    world.run_out(decode, asked)
    world.check_error(client, "on two nodes")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_only_node_of_its_role_is_tried_once_more(role: str) -> None:
    world = Starved()
    client = world.submit()
    for num_tries in (1, 2):
        asked = world.begin(client)
        assert world.pairs() == [("p0", "d0")] * num_tries and not client.num_ends
        world.run_out("p0" if role == "prefill" else "d0", asked)
    world.check_error(client, f"twice on the only {role} node")


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_choices_that_run_out_of_memory_together_count_once(num_nodes: int) -> None:
    """Each choice tries again by itself. The first one that runs out a second time ends all, once."""
    world = Starved("p0", *[f"d{place}" for place in range(num_nodes)])
    client = world.submit(n=3)
    asked = world.begin(client)
    _, decode = world.pair_of(asked)
    world.hand_over(asked, "p0", decode)
    world.run_out(decode, asked, 2)
    assert not client.num_ends
    world.run_out(decode, asked, 0)
    assert not client.num_ends and world.got(decode, m.Cancel) == [], "choice 1 runs on"
    again = world.begin(client)
    second = world.pair_of(again)[1]
    assert (second != decode) == (num_nodes > 1) and len(again.choices) == 1
    world.hand_over(again, "p0", second)
    world.tokens(decode, asked, 1, [41, 42], choice=1)
    world.run_out(second, again)
    assert client.ids[1] == [40, 41, 42]
    world.check_error(client, "on two nodes" if num_nodes > 1 else "twice on the only decode node")


def test_a_request_waits_for_the_node_on_which_it_has_not_run_out_of_memory() -> None:
    """The other node is full. The one that ran out has room, but not for this request."""
    world = Starved("p0", "d0", "d1")
    client = world.submit(max_tokens=8)
    asked = world.begin(client)
    decode = world.pair_of(asked)[1]
    free = other(decode)
    world.node(free).refuse(world.now)
    world.hand_over(asked, "p0", decode)
    world.run_out(decode, asked)
    assert len(world.got(decode, m.Reserve)) == 1 and not world.got(free, m.Reserve)
    world.say(free, m.CapacityFreed(load(100)))
    again = world.begin(client)
    assert world.pair_of(again) == ("p0", free)
    world.hand_over(again, "p0", free)
    world.tokens(free, again, 2, list(range(42, 48)), reason="length")
    assert client.num_done == 1 and not client.errors
    world.check_books()


def test_progress_and_the_loss_of_a_node_do_not_forget_that_it_ran_out_of_memory() -> None:
    world = Starved("p0", "d0", "d1")
    client = world.submit()
    asked = world.begin(client)
    decode = world.pair_of(asked)[1]
    world.hand_over(asked, "p0", decode)
    world.tokens(decode, asked, 1, [41, 42, 43])
    world.run_out(decode, asked)
    world.lose(decode)
    world.join(f"{decode[0]}7")
    again = world.begin(client)
    second = world.pair_of(again)[1]
    assert second != decode
    world.hand_over(again, "p0", second)
    world.tokens(second, again, 5, [45, 46, 47])
    world.run_out(second, again)
    world.check_error(client, "on two nodes")

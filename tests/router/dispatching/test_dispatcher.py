"""The dispatcher as an automaton: timed events go in, effects come out. There is no socket, thread or sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import pytest

from baton.metadata.errors import BatonError, Overloaded, ProtocolError, RequestError, Unavailable
from baton.metadata.wire import messages as m
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Ended, SamplingParams, TokenLogprobs, Unit, pack_ids, unpack_ids
from baton.router.config import RouterConfig
from baton.router.dispatching import cached_texts
from baton.router.dispatching.cancels import ACK_S, MAX_ACK_S
from baton.router.dispatching.dispatcher import SLOW_TICK_S, Dispatcher
from baton.router.dispatching.effects import Done, Effect, Error, Output, Send
from baton.router.dispatching.reservations import ANSWER_S, ASK_S
from baton.router.dispatching.streams import GAP_S, MAX_RESENDS, SILENCE_S
from baton.router.errors import DeadlineExceeded, RequestCancelled
from baton.router.figures.metrics import Metrics
from baton.router.nodes.node import FULL_S, NodeGroup
from baton.router.requests.delta import Delta, TextOptions
from baton.router.requests.request import Request, Sequence
from baton.router.waiting.admission import Asked

from ..sites import make_hello, text_tokenizer

METRICS = Metrics()
STATS = NodeStats()
IDS = [40, 41, 42, 43, 44, 45]  # ordinary tokens


class Client:
    """The listener of a request. It checks that the request ends once."""

    def __init__(self) -> None:
        self.request: Any = None
        self.ids: dict[int, list[int]] = {}
        self.num_done = 0
        self.errors: list[BatonError] = []

    def on_delta(self, sequence: Sequence, delta: Delta, /) -> None:
        assert not self.num_ends, "output after the end"
        self.ids.setdefault(sequence.index, []).extend(delta.token_ids)

    def on_done(self, _request: Request, /) -> None:
        self.num_done += 1

    def on_error(self, _request: Request, error: BatonError, /) -> None:
        self.errors.append(error)

    @property
    def num_ends(self) -> int:
        return self.num_done + len(self.errors)


class World:
    """A dispatcher, its clock, and nodes that do what the test says. There are no canaries."""

    def __init__(
        self, *names: str, protocol_max: int = PROTOCOL_MAX, sizes: dict[str, int] | None = None, **settings: Any
    ) -> None:
        self.now = time.monotonic()
        self.dispatcher = Dispatcher(RouterConfig(**settings), "e", METRICS)
        self.dispatcher.health.look = lambda now: []  # type: ignore[method-assign]
        self.dispatcher.health.is_usable = lambda prefill, _: prefill is not None  # type: ignore[method-assign]
        self.sent: list[tuple[str, m.ToNode]] = []
        self.order: list[Effect] = []
        self.unreachable: set[str] = set()  # names of nodes to which nothing can be sent
        self.num_submitted = 0
        for name in names or ("p0", "d0"):
            self.join(name, protocol_max=protocol_max, **(sizes or {}))
        self.group.tokenizer = text_tokenizer()

    @property
    def group(self) -> NodeGroup:
        (group,) = self.dispatcher.registry.groups.values()
        return group

    def node(self, name: str) -> Any:
        return self.dispatcher.registry.nodes[f"{name}:1".encode()]

    def join(self, name: str, protocol_max: int = PROTOCOL_MAX, **sizes: Any) -> None:
        hello = make_hello("prefill" if name[0] == "p" else "decode", name, **sizes)
        hello = msgspec.structs.replace(hello, protocol_max=protocol_max)
        self.do(self.dispatcher.on_message(f"{name}:1".encode(), hello, self.now))

    def lose(self, name: str) -> None:
        self.do(self.dispatcher.on_connection_lost(f"{name}:1".encode(), self.now))

    def say(self, name: str, message: m.ToRouter) -> None:
        self.do(self.dispatcher.on_message(f"{name}:1".encode(), message, self.now))

    def beat(self, name: str, free_pages: int = 100) -> None:
        self.say(name, m.Heartbeat(1, "idle", 0.0, 10.0, load(free_pages), STATS))

    def wait(self, seconds: float) -> None:
        """Let time pass, with ticks as the event loop makes them."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            self.do(self.dispatcher.tick(self.now))

    def do(self, effects: list[Effect]) -> None:
        """Apply effects as the runner does."""
        due = list(effects)
        while due:
            effect = due.pop(0)
            self.order.append(effect)
            if isinstance(effect, Send):
                if effect.node.node_id in self.unreachable:
                    due += self.dispatcher.on_send_failed(effect.node, effect.message, self.now)
                else:
                    self.sent.append((effect.node.node_id, effect.message))
            elif isinstance(effect, Output):
                effect.sequence.request.listener.on_delta(effect.sequence, effect.delta)
            elif isinstance(effect, Done):
                effect.request.listener.on_done(effect.request)
            elif isinstance(effect, Error):
                effect.request.listener.on_error(effect.request, effect.error)

    def submit(self, *, prompt_len: int = 3, max_tokens: int = 20, n: int = 1, stop: str = "", **more: Any) -> Client:
        self.num_submitted += 1
        client = Client()
        options = TextOptions((stop,) if stop else ())
        params = SamplingParams(max_tokens=max_tokens)
        client.request = Request(
            f"r{self.num_submitted}", self.group, [5] * prompt_len, params, client,
            num_choices=n, options=options, now=self.now, **more,
        )  # fmt: skip
        self.do(self.dispatcher.submit(client.request, self.now))
        return client

    def got(self, name: str, kind: Any) -> list[Any]:
        """Return the messages of a kind that a node received."""
        return [message for to, message in self.sent if to == name and isinstance(message, kind)]

    def grant(self, name: str = "d0") -> m.Reserve:
        """Let a decode node grant the last reservation that it was asked for."""
        reserve = self.got(name, m.Reserve)[-1]
        self.say(name, m.Reserved(reserve.rid, reserve.attempt, reserve.choices, load(90)))
        return reserve

    def tokens(
        self, name: str, asked: Any, first: int, ids: Seq[int], *, choice: int = 0, reason: str | None = None
    ) -> None:
        unit = Unit(asked.rid, choice, asked.attempt)
        ended = {0: Ended(reason, None, 3, first + len(ids), 0)} if reason else {}  # type: ignore[arg-type]
        columns = pack_ids([first]), pack_ids([len(ids)]), pack_ids(ids)
        self.say(name, m.Tokens((unit,), *columns, ended=ended))

    def tokens_of(self, name: str, *asked: tuple[Any, int], first: int, ids: Seq[int]) -> None:
        """Send the last tokens of several (reservation, choice) in one message."""
        units = tuple(Unit(each.rid, choice, each.attempt) for each, choice in asked)
        num = len(units)
        columns = pack_ids([first] * num), pack_ids([len(ids)] * num), pack_ids(list(ids) * num)
        ended = {row: Ended("length", None, 3, first + len(ids), 0) for row in range(num)}
        self.say(name, m.Tokens(units, *columns, ended=ended))

    def hand_over(self, asked: Any, prefill: str = "p0", decode: str = "d0") -> None:
        """Send the first token from prefill, admit all pages, and send PrefillDone."""
        request = self.dispatcher.requests[asked.rid]
        for choice in asked.choices:
            first = len(request.sequences[choice].received)
            self.tokens(prefill, asked, first, IDS[first : first + 1], choice=choice)
            self.say(decode, m.Admitted(Unit(asked.rid, choice, asked.attempt), 0.1, 2, 4096, 0))
        self.say(prefill, m.PrefillDone(asked.rid, asked.attempt, 0.0, 0.0, 0, load(100)))

    def running(self, client: Client | None = None, **body: Any) -> tuple[Client, m.Reserve]:
        """Return a request that decodes and has its first token."""
        client = client or self.submit(**body)
        asked = self.grant()
        self.hand_over(asked)
        return client, asked

    def acknowledge_all(self) -> None:
        for name, message in self.sent:
            if isinstance(message, m.Cancel) and f"{name}:1".encode() in self.dispatcher.registry.nodes:
                self.say(name, m.Cancelled(message.rid, message.attempt))

    def check_books(self) -> None:
        """Check that nothing is left of any request after the nodes have acknowledged all cancels."""
        self.acknowledge_all()
        for _ in range(4):  # messages that could not be sent are repeated
            if self.dispatcher.cancels.num_unacked:
                self.wait(MAX_ACK_S)
                self.acknowledge_all()
        assert not self.dispatcher.requests and not self.dispatcher.queues.num_waiting
        assert not len(self.dispatcher.reservations) and not self.dispatcher.cancels.num_unacked
        assert all(node.holds_nothing for node in self.dispatcher.registry.nodes.values())


def load(free_pages: int, running: int = 1) -> Load:
    return Load(free_pages=free_pages, running=running, waiting=0)


def test_the_life_of_a_request() -> None:
    world = World()
    client = world.submit(max_tokens=4)
    (reserve,) = world.got("d0", m.Reserve)
    assert (reserve.choices, reserve.prefill.node_id) == ((0,), "p0") and not world.got("p0", m.Prefill)
    world.grant()
    (prefill,) = world.got("p0", m.Prefill)
    assert (prefill.rid, prefill.attempt, prefill.decode.node_id) == (reserve.rid, 0, "d0")
    world.hand_over(reserve)
    world.tokens("d0", reserve, 0, IDS[:2])  # decode repeats the first one
    world.tokens("d0", reserve, 2, IDS[2:4], reason="length")
    assert (client.ids, client.num_done, client.errors) == ({0: IDS[:4]}, 1, [])
    assert not world.got("d0", m.Cancel) and not world.got("p0", m.Cancel)
    world.check_books()
    assert [recorder.trace.rid for recorder in world.dispatcher.finished] == ["r1"]


def test_choices_that_end_in_one_message_need_no_cancel() -> None:
    world = World()
    client, asked = world.running(max_tokens=3, n=3)
    world.tokens_of("d0", (asked, 0), (asked, 1), (asked, 2), first=1, ids=IDS[1:3])
    assert (client.num_done, client.ids) == (1, dict.fromkeys(range(3), IDS[:3]))
    assert not world.got("d0", m.Cancel) and not world.got("p0", m.Cancel)
    world.check_books()


def test_a_fault_in_one_request_keeps_no_other_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    (good, first), (bad, second) = (world.running(max_tokens=3) for _ in range(2))

    def break_down(*_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Sequence, "merge", lambda *args, real=Sequence.merge: (
        break_down() if args[0].request is bad.request else real(*args)
    ))  # fmt: skip
    with pytest.raises(RuntimeError, match="a defect"):
        world.tokens_of("d0", (first, 0), (second, 0), first=1, ids=IDS[1:3])
    world.wait(0.1)
    assert (good.num_done, good.ids) == (1, {0: IDS[:3]}) and not bad.num_ends


def test_a_drained_node_that_comes_back_gets_nothing_at_any_moment() -> None:
    world = World()
    world.wait(SLOW_TICK_S)  # the group could serve, so requests may wait for its nodes
    world.do(world.dispatcher.drain("p0", 5.0, world.now))
    world.lose("p0")
    client = world.submit(max_tokens=1)
    world.sent.clear()
    world.join("p0")
    assert world.node("p0").is_cordoned and not world.got("p0", m.Prefill) and not client.num_ends


def test_nodes_forget_a_tenant_at_once_and_again_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_texts, "FORGET_S", 0.5)
    world = World()
    _, asked = world.running(max_tokens=3)
    world.dispatcher.requests[asked.rid].cache_salt = "acme 1"

    def prefixes(name: str) -> list[str]:
        return [each.prefix for each in world.got(name, m.ForgetSalts)]

    world.do(world.dispatcher.forget_salts("acme", world.now))
    assert prefixes("p0") == prefixes("d0") == ["acme"]
    world.wait(1.0)
    assert prefixes("d0") == ["acme"], "its request goes on"
    world.tokens("d0", asked, 1, IDS[1:3], reason="length")
    world.wait(0.5 + 2 * SLOW_TICK_S)
    assert prefixes("p0") == prefixes("d0") == ["acme"] * 2
    world.wait(1.0)
    assert prefixes("d0") == ["acme"] * 2


@pytest.mark.parametrize("role", "pd")
def test_the_texts_of_a_leaving_node_go_to_the_node_of_its_role_with_most_room(role: str) -> None:
    leaving, second, third = (f"{role}{number}" for number in range(3))
    world = World("p0", "p1", "p2", "d0", "d1", "d2")
    for name, free_pages in (("p0", 90), ("p1", 60), ("p2", 70), ("d0", 90), ("d1", 60), ("d2", 70)):
        world.node(name).hello = msgspec.structs.replace(world.node(name).hello, borrows=True)
        world.beat(name, free_pages)
    world.say(leaving, m.Leaving(done=False))
    for text in range(4):
        world.say(leaving, m.HandOn(token_ids=pack_ids([text] * 9), cache_salt="tenant", num_pages=8))
    assert [each.has_heir for each in world.got(leaving, m.HandedOn)] == [True] * 4
    kept = {name: world.got(name, m.Keep) for name in (leaving, second, third)}
    assert [len(each) for each in kept.values()] == [0, 1, 3]
    assert {(each.lender.peer.node_id, each.lender.num_pages, each.cache_salt) for each in kept[third]} == {
        (leaving, 8, "tenant")
    }
    world.lose(second)
    world.lose(third)
    world.say(leaving, m.HandOn(token_ids=pack_ids([1] * 9), cache_salt="", num_pages=8))
    assert not world.got(leaving, m.HandedOn)[-1].has_heir


def test_one_token_needs_no_decode_node() -> None:
    world = World("p0")
    client = world.submit(max_tokens=1)
    (prefill,) = world.got("p0", m.Prefill)
    assert prefill.decode is None
    world.tokens("p0", prefill, 0, IDS[:1], reason="length")
    assert client.num_done == 1
    world.say("p0", m.PrefillDone(prefill.rid, 0, 0.0, 0.0, 0, load(100)))
    world.check_books()


def test_a_refused_request_waits_and_blocks_those_behind_it() -> None:
    world = World()
    world.submit(prompt_len=300)
    large = world.got("d0", m.Reserve)[-1]
    world.say("d0", m.Reserved(large.rid, 0, (), load(10)))
    world.submit()
    assert [each.rid for each in world.got("d0", m.Reserve)] == ["r1"]
    world.say("d0", m.CapacityFreed(load(100)))
    assert [each.rid for each in world.got("d0", m.Reserve)] == ["r1", "r1"]
    world.grant()
    assert [each.rid for each in world.got("d0", m.Reserve)] == ["r1", "r1", "r2"]


def test_a_node_that_refused_is_asked_again_after_a_while() -> None:
    world = World()
    world.submit()
    asked = world.got("d0", m.Reserve)[-1]
    world.say("d0", m.Reserved(asked.rid, 0, (), load(99)))
    world.wait(FULL_S - SLOW_TICK_S)
    assert len(world.got("d0", m.Reserve)) == 1
    world.wait(2 * SLOW_TICK_S)
    assert len(world.got("d0", m.Reserve)) == 2


def test_choices_that_were_not_granted_wait_and_become_another_attempt() -> None:
    world = World()
    client = world.submit(n=3, max_tokens=2)
    asked = world.got("d0", m.Reserve)[-1]
    world.say("d0", m.Reserved(asked.rid, 0, (0, 1), load(1)))
    assert world.got("p0", m.Prefill)[0].choices == (0, 1)
    world.say("d0", m.CapacityFreed(load(100)))
    again = world.grant()
    assert (again.attempt, again.choices) == (1, (2,))
    for reserve, prefill in zip((asked, again), world.got("p0", m.Prefill), strict=True):
        world.hand_over(prefill)
        for choice in prefill.choices:
            world.tokens("d0", reserve, 1, IDS[1:2], choice=choice, reason="length")
    assert client.num_done == 1 and client.ids == dict.fromkeys(range(3), IDS[:2])
    world.check_books()


def test_an_empty_node_that_refuses_ends_the_request_unless_there_is_another() -> None:
    world = World("p0", "d0", "d1")
    client = world.submit()
    (first,) = [name for name in ("d0", "d1") if world.got(name, m.Reserve)]
    other = "d1" if first == "d0" else "d0"
    for name, attempt in ((first, 0), (other, 1)):
        assert not client.errors
        world.say(name, m.Reserved("r1", attempt, (), load(100, running=0)))
    assert isinstance(client.errors[0], RequestError) and client.num_ends == 1
    world.check_books()


@pytest.mark.parametrize("moment", ["reserving", "prefilling", "decoding"])
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_if_a_node_is_lost_its_request_continues_elsewhere(moment: str, victim: str) -> None:
    world = World()
    client = world.submit(max_tokens=4)
    asked: Any = world.got("d0", m.Reserve)[-1]
    if moment != "reserving":
        world.grant()
    if moment == "decoding":
        world.tokens("p0", asked, 0, IDS[:1])
        world.tokens("d0", asked, 1, IDS[1:2])
    world.lose(victim)
    survivor = "d0" if victim == "p0" else "p0"
    told = world.got(survivor, m.Cancel)
    assert [each.attempt for each in told] == ([] if (moment, survivor) == ("reserving", "p0") else [0])
    fresh = f"{victim[0]}1"
    world.join(fresh)
    prefill, decode = (fresh, "d0") if victim == "p0" else ("p0", fresh)
    again = world.grant(decode)
    num_before = 2 if moment == "decoding" else 0
    assert again.attempt == 1 and unpack_ids(again.request.received_ids) == IDS[:num_before]
    world.tokens(decode, asked, num_before, IDS[5:])  # of the first attempt: dropped
    world.hand_over(again, prefill, decode)
    world.tokens(decode, again, num_before, IDS[num_before:4], reason="length")
    assert (client.ids, client.num_done, client.errors) == ({0: IDS[:4]}, 1, [])
    world.check_books()


def test_a_small_node_that_refuses_though_it_is_empty_is_asked_once_per_request() -> None:
    """A node may draft so many tokens that it needs more room than the router knows. The larger node is busy first."""
    world = World("p0", "d0")
    world.join("d1", num_pages=600, max_running=1)
    world.submit()
    world.grant("d1")  # the larger one of two idle nodes
    world.submit()
    world.say("d0", m.Reserved("r2", 0, (), load(100, running=0)))
    world.submit()  # waits behind r2
    for _ in range(5):
        world.say("d0", m.CapacityFreed(load(100, running=0)))
        world.wait(1.0)
    assert [each.rid for each in world.got("d0", m.Reserve)] == ["r2"]


def test_failures_in_a_row_end_in_one_clear_error() -> None:
    world = World(max_attempts=3)
    client = world.submit()
    for attempt in range(3):
        assert not client.errors
        asked = world.grant()
        assert asked.attempt == attempt
        world.say("d0", m.Failed(Unit(asked.rid, 0, attempt), "internal_error", "no memory", True))
    assert "after 3 attempts" in str(client.errors[0]) and client.num_ends == 1
    world.check_books()


def test_a_cancel_is_repeated_until_it_is_acknowledged() -> None:
    world = World()
    client, asked = world.running()
    world.do(world.dispatcher.cancel(client.request, "the client left", world.now))
    assert [each.choices for each in world.got("d0", m.Cancel)] == [(0,)] and not world.got("p0", m.Cancel)
    world.wait(5 * ACK_S)
    assert len(world.got("d0", m.Cancel)) == 3, "after ACK_S, and after twice that"
    world.tokens("d0", asked, 1, IDS[1:2])  # crossed the Cancel
    world.say("d0", m.Cancelled(asked.rid, 0))
    world.wait(20.0)
    assert len(world.got("d0", m.Cancel)) == 3 and client.num_ends == 0 and client.ids == {0: IDS[:1]}
    world.check_books()


def test_cancels_of_one_attempt_are_acknowledged_one_by_one() -> None:
    """The second cancel names more choices and may be lost, so the answer to the first does not count for it."""
    world = World()
    client, asked = world.running(n=3, stop="j")
    for choice in (0, 2):  # "j" is found in two choices, one after the other
        world.tokens("d0", asked, 1, text_tokenizer().inner.encode("j").ids, choice=choice)
    assert [each.choices for each in world.got("d0", m.Cancel)] == [(0,), (0, 2)]
    world.say("d0", m.Cancelled(asked.rid, 0))
    assert world.dispatcher.cancels.num_unacked == 1
    world.wait(ACK_S + 2 * SLOW_TICK_S)
    assert world.got("d0", m.Cancel)[-1].choices == (0, 2)
    world.say("d0", m.Cancelled(asked.rid, 0))
    assert not world.dispatcher.cancels.num_unacked and client.num_ends == 0


def test_a_grant_that_comes_after_the_cancel_is_cancelled_too() -> None:
    world = World()
    client = world.submit()
    world.do(world.dispatcher.cancel(client.request, "the client left", world.now))
    world.acknowledge_all()
    num_before = len(world.got("d0", m.Cancel))
    world.grant()
    assert len(world.got("d0", m.Cancel)) == num_before + 1 and not world.got("p0", m.Prefill)
    world.check_books()


def test_an_abort_tells_the_client_once() -> None:
    world = World()
    client, _ = world.running()
    for _ in range(2):
        world.do(world.dispatcher.abort(client.request, "an operator said so", world.now))
    assert client.num_ends == 1 and isinstance(client.errors[0], RequestCancelled)
    world.check_books()


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_a_deadline_ends_a_request_in_any_phase(phase: str) -> None:
    world = World()
    if phase == "queued":
        world.unreachable.add("d0")
    client = world.submit(timeout_s=0.2)
    if phase != "queued":
        asked = world.grant()
        if phase == "decoding":
            world.hand_over(asked)
    world.wait(0.1)
    assert not client.errors
    world.wait(0.1 + 2 * SLOW_TICK_S)
    assert isinstance(client.errors[0], DeadlineExceeded) and "limit of 0.2 s" in str(client.errors[0])
    assert client.num_ends == 1
    world.check_books()


def test_a_decode_node_that_cannot_be_reached_costs_no_time() -> None:
    world = World("p0", "d0", "d1")
    world.unreachable = {"d0"}
    client = world.submit(max_tokens=2)
    assert world.got("d1", m.Reserve) and not world.node("d0").is_reachable
    assert world.node("d0").holds_nothing
    asked = world.grant("d1")
    world.hand_over(asked, decode="d1")
    world.tokens("d1", asked, 1, IDS[1:2], reason="length")
    assert client.num_done == 1
    world.check_books()


def test_a_request_waits_for_the_only_node_that_cannot_be_reached() -> None:
    world = World()
    world.unreachable = {"d0"}
    client = world.submit()
    world.wait(1.0)
    assert not world.got("d0", m.Reserve) and not client.errors and world.dispatcher.queues.num_waiting == 1
    world.unreachable.clear()
    world.beat("d0")
    assert len(world.got("d0", m.Reserve)) == 1


def test_a_request_moves_away_from_an_unreachable_prefill_node() -> None:
    world = World("p0", "p1", "d0")
    world.unreachable = {"p0"}
    world.submit()
    world.grant()
    assert not world.got("p0", m.Prefill) and world.node("p0").holds_nothing
    assert [each.attempt for each in world.got("d0", m.Cancel)] == [0]
    world.grant()
    assert world.got("p1", m.Prefill)[0].attempt == 1


def test_a_reservation_without_an_answer_is_asked_for_again_and_then_given_up() -> None:
    world = World()
    world.submit()
    world.wait(ASK_S + 2 * SLOW_TICK_S)
    first, second = world.got("d0", m.Reserve)
    assert second == msgspec.structs.replace(first, waited_s=second.waited_s)
    assert first.waited_s == 0.0 and ASK_S <= second.waited_s <= ASK_S + 2 * SLOW_TICK_S, "the request's age"
    world.unreachable = {"d0"}  # an earlier copy may have arrived: its answer is still awaited
    world.wait(ASK_S + 2 * SLOW_TICK_S)
    world.unreachable.clear()
    world.beat("d0")
    assert len(world.dispatcher.reservations) == 1
    world.wait(ANSWER_S)
    assert world.got("d0", m.Cancel)[0].attempt == 0 and world.got("d0", m.Reserve)[-1].attempt == 1


def test_missing_tokens_are_asked_for_and_then_the_request_moves() -> None:
    world = World()
    client, asked = world.running()
    world.tokens("d0", asked, 3, IDS[3:4])
    world.wait(GAP_S - 0.05)
    assert not world.got("d0", m.Resend)
    world.wait(0.15)
    assert [each.first for each in world.got("d0", m.Resend)] == [1]
    world.tokens("d0", asked, 1, IDS[1:3])
    assert client.ids == {0: IDS[:4]}, "what lay beyond the gap was kept"
    world.tokens("d0", asked, 5, IDS[5:])
    world.wait((MAX_RESENDS + 2) * (GAP_S + 0.1))
    assert len(world.got("d0", m.Resend)) == 1 + MAX_RESENDS
    assert world.got("d0", m.Cancel) and world.got("d0", m.Reserve)[-1].attempt == 1
    assert unpack_ids(world.got("d0", m.Reserve)[-1].request.received_ids) == IDS[:4]


def test_after_silence_the_node_that_owes_a_token_is_asked() -> None:
    world = World()
    world.submit()
    asked = world.grant()
    world.wait(SILENCE_S + 2 * SLOW_TICK_S)
    assert len(world.got("p0", m.Resend)) == 1 and not world.got("d0", m.Resend), "the first token is prefill's"
    world.hand_over(asked)
    world.wait(SILENCE_S + 2 * SLOW_TICK_S)
    assert len(world.got("d0", m.Resend)) == 1


def test_a_stop_string_ends_a_sequence_and_frees_its_nodes() -> None:
    world = World()
    client, asked = world.running(stop="j")
    world.order.clear()
    world.tokens("d0", asked, 1, text_tokenizer().inner.encode("j").ids)
    assert client.num_done == 1 and client.request.sequences[0].finish_reason == "stop"
    assert world.got("d0", m.Cancel)[0].reason == "a stop string was found"
    told = [type(effect) for effect in world.order if isinstance(effect, Output | Done)]
    assert told == [Output, Done]
    world.check_books()


def test_a_paused_request_holds_nothing_and_continues_from_its_last_token() -> None:
    world = World()
    client, asked = world.running(max_tokens=4)
    world.do(world.dispatcher.set_paused(client.request, True, world.now))
    world.acknowledge_all()
    assert world.node("d0").holds_nothing and world.node("p0").holds_nothing
    world.tokens("d0", asked, 1, IDS[1:2])
    world.do(world.dispatcher.set_paused(client.request, False, world.now))
    again = world.grant()
    assert unpack_ids(again.request.received_ids) == IDS[:1]
    world.hand_over(again)
    world.tokens("d0", again, 2, IDS[2:4], reason="length")
    assert (client.ids, client.num_done) == ({0: IDS[:4]}, 1)
    world.check_books()


def test_a_drain_moves_its_requests_when_its_time_is_over_and_another_node_serves() -> None:
    world = World()
    world.running()
    world.do(world.dispatcher.drain("d0", 1.0, world.now))
    world.wait(3.0)
    assert not world.got("d0", m.Cancel), "no other node could take it"
    world.join("d1")
    world.wait(2 * SLOW_TICK_S)
    assert {each.attempt for each in world.got("d0", m.Cancel)} == {0} and world.got("d1", m.Reserve)[0].attempt == 1
    world.do(world.dispatcher.undrain("d0", world.now))
    assert world.node("d0").is_live


def test_no_request_waits_for_a_node_longer_than_node_wait_s() -> None:
    world = World(node_wait_s=2.0)
    world.wait(SLOW_TICK_S)
    world.lose("d0")
    client = world.submit()  # a pair was there lately
    world.wait(1.9)
    assert not client.errors
    world.wait(0.1 + 3 * SLOW_TICK_S)
    assert isinstance(client.errors[0], Unavailable) and "no decode node is left" in str(client.errors[0])
    with pytest.raises(Unavailable):
        world.submit()
    world.check_books()


@pytest.mark.parametrize(("first", "later"), [("d0", "p0"), ("p0", "d0")])
def test_a_request_waits_for_the_other_role_while_nodes_come_back_to_a_new_router(first: str, later: str) -> None:
    world = World(first, node_wait_s=2.0)
    world.wait(1.5)
    client = world.submit(max_tokens=2)
    world.wait(1.5)
    world.join(later)
    asked = world.grant()
    world.hand_over(asked)
    world.tokens("d0", asked, 1, IDS[1:2], reason="length")
    assert (client.num_done, client.errors) == (1, [])
    world.check_books()


@pytest.mark.parametrize("name", ["d0", "p0"])
def test_nobody_waits_for_a_role_that_does_not_join_for_longer_than_stated(name: str) -> None:
    world = World(name, node_wait_s=2.0, protocol_max=m.Compute.since - 1)  # it cannot compute prompts
    client = world.submit()
    world.wait(2.0 + 3 * SLOW_TICK_S)
    role = "prefill" if name == "d0" else "decode"
    assert isinstance(client.errors[0], Unavailable) and f"no {role} node is left" in str(client.errors[0])
    with pytest.raises(Unavailable, match=f"no {role} node serves model"):
        world.submit()
    world.check_books()


def test_a_full_queue_makes_room_for_a_higher_priority() -> None:
    world = World("p0", max_waiting=1)
    world.join("d0", max_running=1)
    world.submit()
    world.grant()
    waiting = world.submit(priority=1)
    asked = Asked(1, 3, 20, 0, 60.0)
    with pytest.raises(Overloaded):
        world.do(world.dispatcher.make_room(world.group, asked._replace(priority=1), world.now))
    assert not waiting.errors
    world.do(world.dispatcher.make_room(world.group, asked, world.now))
    assert isinstance(waiting.errors[0], Overloaded) and waiting.num_ends == 1


def test_log_probabilities_of_the_prompt_are_awaited() -> None:
    world = World()
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = world.grant()
    world.tokens("p0", asked, 0, IDS[:1])
    world.say("d0", m.Admitted(Unit(asked.rid, 0, 0), 0.1, 2, 4096, 0))
    world.tokens("d0", asked, 1, IDS[1:2], reason="length")
    assert not client.num_ends
    told = (TokenLogprobs(-1.0, (), ()),) * 2
    world.say("p0", m.PrefillDone(asked.rid, 0, 0.0, 0.0, 0, load(100), prompt_logprobs=told))
    assert client.num_done == 1 and client.request.prompt_logprobs == told
    world.check_books()


@pytest.mark.parametrize("num_sent", [0, 1])
def test_log_probabilities_of_a_part_of_the_prompt_are_not_taken(num_sent: int) -> None:
    """A prefill node that dropped the request before its prompt was computed sends those that it has."""
    world = World("p0", "d0", "p1", "d1")
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = world.grant()
    told = (TokenLogprobs(-1.0, (), ()),)
    world.say("p0", m.PrefillDone(asked.rid, 0, 0.0, 0.0, 0, load(100), prompt_logprobs=told * num_sent))
    world.say("d0", m.Failed(Unit(asked.rid, 0, 0), "transfer_error", "a link closed", retryable=True))
    again = world.grant("d1") if world.got("d1", m.Reserve) else world.grant()
    assert again.attempt == 1 and again.request.prompt_logprobs and client.num_ends == 0


def test_a_node_that_never_sends_the_whole_prompts_log_probabilities_ends_the_request_with_an_error() -> None:
    world = World("p0", "d0")
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = world.grant()
    world.tokens("p0", asked, 0, IDS[:1])
    world.say("d0", m.Admitted(Unit(asked.rid, 0, 0), 0.1, 2, 4096, 0))
    world.say("p0", m.PrefillDone(asked.rid, 0, 0.0, 0.0, 0, load(100), prompt_logprobs=()))
    world.tokens("d0", asked, 1, IDS[1:2], reason="length")
    assert (client.num_ends, client.num_done) == (1, 0) and "log-probabilities" in str(client.errors[0])
    world.check_books()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_pause_while_only_the_prompts_log_probabilities_are_missing_has_them_computed_again(is_lost: bool) -> None:
    """Its prefill node computes them still, or died, so that the request waits for another."""
    world = World("p0", "d0", request_timeout_s=5.0)
    client = world.submit(max_tokens=2, wants_prompt_logprobs=True)
    asked = world.grant()
    world.tokens("p0", asked, 0, IDS[:1])
    world.say("d0", m.Admitted(Unit(asked.rid, 0, 0), 0.1, 2, 4096, 0))
    world.tokens("d0", asked, 1, IDS[1:2], reason="length")
    if is_lost:
        world.lose("p0")
    world.do(world.dispatcher.set_paused(client.request, True, world.now))
    assert not world.dispatcher.queues.num_waiting
    assert all(node.holds_nothing for node in world.dispatcher.registry.nodes.values())
    world.wait(SILENCE_S + 2 * SLOW_TICK_S)
    assert not world.got("p0", m.Resend) and not client.num_ends, "no node owes it anything"
    if is_lost:
        world.join("p0")
    told = (TokenLogprobs(-1.0, (), ()),) * 2
    world.do(world.dispatcher.set_paused(client.request, False, world.now))
    again = world.got("p0", m.Prefill)[-1]
    assert again.attempt == 1 and again.decode is None and again.request.prompt_logprobs
    world.tokens("p0", again, 2, IDS[2:3], reason="length")  # prefill samples a token after each prompt
    world.say("p0", m.PrefillDone(again.rid, 1, 0.0, 0.0, 0, load(100), prompt_logprobs=told))
    assert (client.num_done, client.ids, client.request.prompt_logprobs) == (1, {0: IDS[:2]}, told)
    world.check_books()


MISFITS = [([0], [2], [40]), ([-1], [1], [40]), ([0], [-1], [40]), ([0], [1], [-40]), ([0], [1], [40, 41])]


@pytest.mark.parametrize(("firsts", "counts", "ids"), MISFITS)
def test_tokens_whose_columns_do_not_fit_are_refused_and_the_request_moves(
    firsts: list[int], counts: list[int], ids: list[int]
) -> None:
    world = World(max_attempts=2)
    client, _ = world.running(max_tokens=4)
    for attempt in (0, 1):
        message = m.Tokens((Unit("r1", 0, attempt),), pack_ids(firsts), pack_ids(counts), pack_ids(ids))
        with pytest.raises(ProtocolError) as caught:
            world.say("d0", message)
        assert caught.value.node == "d0" and client.ids == {0: IDS[:1]}
        world.wait(0.05)
        assert [each.attempt for each in world.got("d0", m.Cancel)] == [*range(attempt + 1)]
        assert client.num_ends == attempt
        if not attempt:
            assert unpack_ids(world.grant().request.received_ids) == IDS[:1]
    assert "after 2 attempts" in str(client.errors[0]) and "node d0: Tokens" in str(client.errors[0])
    world.check_books()


def test_a_request_whose_node_sends_more_than_max_tokens_goes_on_elsewhere() -> None:
    world = World("p0", "d0")
    client, asked = world.running(max_tokens=3)
    other, beside = world.running(max_tokens=3)
    world.join("d1")
    world.tokens("d0", beside, 1, IDS[1:2])
    world.tokens("d0", asked, 1, IDS[1:4], reason="length")
    assert [(each.rid, each.attempt) for each in world.got("d0", m.Cancel)] == [(asked.rid, 0)]
    again = world.grant("d1")
    assert (again.rid, again.attempt) == (asked.rid, 1) and unpack_ids(again.request.received_ids) == IDS[:1]
    world.hand_over(again, decode="d1")
    world.tokens("d1", again, 2, IDS[2:3], reason="length")
    world.tokens("d0", beside, 2, IDS[2:3], reason="length")
    assert client.ids == other.ids == {0: IDS[:3]} and (client.num_done, other.num_done) == (1, 1)
    world.check_books()


def test_an_unknown_node_is_asked_for_its_hello() -> None:
    world = World()
    (effect,) = world.dispatcher.on_message(b"d9:1", m.CapacityFreed(load(1)), world.now)
    assert isinstance(effect.message, m.HelloAgain)  # type: ignore[union-attr]


def test_a_shutdown_ends_every_request_with_an_error() -> None:
    world = World()
    clients = [world.submit() for _ in range(3)]
    world.do(world.dispatcher.close(world.now))
    assert [client.num_ends for client in clients] == [1, 1, 1]
    world.check_books()


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_and_the_books_balance_under_random_events(seed: int) -> None:
    """Nodes answer, refuse, fail, die, return and cannot be reached; clients leave, pause and continue."""
    rng = random.Random(seed)
    world = World("p0", "p1", "d0", "d1")
    clients: list[Client] = []
    left: set[int] = set()
    for _ in range(300):
        clients += step(world, rng, clients, left)
    world.unreachable.clear()
    for client in clients:
        world.do(world.dispatcher.cancel(client.request, "the end", world.now))
    for index, client in enumerate(clients):
        assert client.num_ends <= 1, index
        for ids in client.ids.values():
            assert ids == (IDS * 4)[: len(ids)], "a token was lost, doubled or of another attempt"
    world.check_books()


def step(world: World, rng: random.Random, clients: list[Client], left: set[int]) -> list[Client]:
    """Make one random event. Return the new clients."""
    name = rng.choice(["p0", "p1", "d0", "d1"])
    is_there = f"{name}:1".encode() in world.dispatcher.registry.nodes
    match rng.randrange(14):
        case 0:
            try:
                return [world.submit(n=rng.choice([1, 1, 3]), max_tokens=rng.choice([1, 5, 20]))]
            except BatonError:
                pass
        case 1 if clients:
            world.do(world.dispatcher.cancel(rng.choice(clients).request, "it left", world.now))
        case 2 if clients:
            world.do(world.dispatcher.set_paused(rng.choice(clients).request, rng.random() < 0.5, world.now))
        case 3 if rng.random() < 0.2:
            world.lose(name) if is_there else world.join(name)
        case 4:
            world.unreachable ^= {name} if rng.random() < 0.2 else set()
            if is_there:
                world.beat(name)
        case 5:
            world.wait(rng.choice([0.05, 0.3, 2.5]))
        case 6:
            world.acknowledge_all()
        case 7 if not is_there:
            world.join(name)
        case _ if is_there:
            answer(world, rng, name)
        case _:
            pass
    return []


def answer(world: World, rng: random.Random, name: str) -> None:
    """Let a node send an answer to something that it was asked for."""
    asked = world.got(name, m.Reserve | m.Prefill)[-6:]
    if not asked:
        return
    message = rng.choice(asked)
    request = world.dispatcher.requests.get(message.rid)
    choice = rng.choice(message.choices)
    if isinstance(message, m.Reserve) and rng.random() < 0.4:
        granted = message.choices[: rng.randint(0, len(message.choices))] if rng.random() < 0.3 else message.choices
        world.say(name, m.Reserved(message.rid, message.attempt, granted, load(90)))
    elif rng.random() < 0.1:
        world.say(name, m.Failed(Unit(message.rid, choice, message.attempt), "unavailable", "no", True))
    elif isinstance(message, m.Prefill) and rng.random() < 0.4:
        world.say(name, m.PrefillDone(message.rid, message.attempt, 0.0, 0.0, 0, load(100)))
    elif request is not None:
        received = len(request.sequences[choice].received)
        first = max(0, received + rng.choice([0, 0, 0, -1, 2]))
        num_left = max(1, request.params.max_tokens - first)
        ids = (IDS * 4)[first : first + min(num_left, rng.choice([1, 1, 2]))]
        if rng.random() < 0.3:
            world.say(name, m.Admitted(Unit(message.rid, choice, message.attempt), 0.1, 2, 4096, 0))
        reason = "length" if first + len(ids) >= request.params.max_tokens else None
        world.tokens(name, message, first, ids, choice=choice, reason=reason)


def test_a_node_whose_news_of_cached_pages_has_a_gap_is_asked_to_begin_anew() -> None:
    world = World()

    def news(number: int) -> m.CachedPages:
        return m.CachedPages(number=number, stored=b"", removed=b"", num_changes=0, is_whole=True)

    for number in (0, 1):
        world.say("p0", news(number))
    assert not any(isinstance(message, m.TellPages) for _, message in world.sent)
    world.say("p0", news(3))
    assert [name for name, message in world.sent if isinstance(message, m.TellPages)] == ["p0"]


@pytest.mark.parametrize("protocol_max", [PROTOCOL_MAX, m.TellPages.since - 1])
def test_a_node_that_is_silent_about_changes_that_it_counts_is_asked_if_it_understands(protocol_max: int) -> None:
    world = World(protocol_max=protocol_max)
    beat = m.Heartbeat(1, "idle", 0.0, 10.0, load(100), NodeStats(cache_changes=7))
    for _ in range(40):
        world.say("d0", beat)
        world.wait(0.1)
    asked = [name for name, message in world.sent if isinstance(message, m.TellPages)]
    assert asked == (["d0"] if protocol_max == PROTOCOL_MAX else [])

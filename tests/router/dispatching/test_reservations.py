"""Reservations: a decode node is asked for pages until it answers, and its books follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import msgspec
import pytest

from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire import messages as m
from baton.metadata.wire.membership import IDLE, Heartbeat
from baton.metadata.wire.messages import Compute, Reserve, Reserved
from baton.metadata.wire.node_info import Load, NodeStats
from baton.metadata.wire.request import unpack_ids
from baton.router.dispatching import reservations, streams
from baton.router.dispatching.reservations import ANSWER_S, ASK_S, Reservations
from baton.router.nodes.node import Node
from baton.router.requests.attempt import Attempt
from baton.router.requests.request import Request
from baton.router.waiting.entry import Entry

from ..conftest import System
from ..fake_nodes import FakeNode
from ..sites import add_node, make_group, make_request
from .test_runner import own, text_of


class Site:
    """A request of 3 choices whose decode node is asked at time 0 for the pages of two of them."""

    def __init__(self, *, has_prefill: bool = True) -> None:
        group = make_group()
        self.prefill: Node | None = add_node(group, "prefill", "p0") if has_prefill else None
        self.decode, self.other = add_node(group, "decode", "d0"), add_node(group, "decode", "d1")
        self.request: Request = make_request(group, prompt_len=20, num_choices=3)
        self.entry = Entry(self.request, (0, 1, 2))
        self.reservations = Reservations("epoch")
        self.attempt: Attempt = self.request.begin_attempt({1, 2}, self.prefill, self.decode, 0.0)
        self.asked = self.reservations.begin(self.entry, self.attempt, self.decode, 0.0)

    def reserved(self, *granted: int, attempt: int = 0, rid: str = "r") -> Reserved:
        return Reserved(rid, attempt, granted, Load(free_pages=90, running=1, waiting=0))

    def check_open(self) -> None:
        """Check that the reservation waits for its answer."""
        assert len(self.reservations) == 1 and self.entry.attempt is self.attempt
        assert self.reservations.get("r", self.attempt.number) is self.entry
        assert self.decode.units_of("r", self.attempt.number) == {1, 2}
        assert self.decode.pledged_pages == 2 * (self.entry.need.decode_pages or 0) > 0

    def check_over(self) -> None:
        """Check that the reservation is over."""
        assert len(self.reservations) == 0 and self.entry.attempt is None
        assert self.reservations.get("r", self.attempt.number) is None
        assert self.decode.pledged_pages == 0
        assert self.reservations.repeat(1e6) == [] and self.reservations.overdue(1e6) == []


def test_the_node_is_asked_and_its_books_have_it() -> None:
    site = Site()
    site.check_open()
    assert isinstance(site.asked, Reserve) and site.prefill is not None
    assert (site.asked.router_epoch, site.asked.rid, site.asked.attempt) == ("epoch", "r", 0)
    assert site.asked.choices == (1, 2) and site.asked.prefill == site.prefill.peer_of(site.decode)
    assert unpack_ids(site.asked.request.prompt_ids) == [5] * 20


def test_without_a_prefill_node_the_decode_node_is_asked_to_compute() -> None:
    site = Site(has_prefill=False)
    site.check_open()
    assert isinstance(site.asked, Compute) and site.asked.choices == (1, 2)
    assert [type(message) for _, message in site.reservations.repeat(ASK_S + 0.1)] == [Compute]


@pytest.mark.parametrize("granted", [(1, 2), (2,), (0, 2, 7), ()])
def test_an_answer_ends_the_reservation_and_keeps_the_granted_choices(granted: tuple[int, ...]) -> None:
    site = Site()
    answer = site.reserved(*granted)
    kept = tuple(choice for choice in (1, 2) if choice in granted)
    assert site.reservations.answered(site.decode, answer) == (site.entry, site.attempt, kept)
    site.check_over()
    assert site.decode.units_of("r", 0) == set(kept)
    assert site.reservations.answered(site.decode, answer) is None, "a second answer"
    assert site.decode.units_of("r", 0) == set(kept)


def test_an_unexpected_answer_changes_nothing() -> None:
    site = Site()
    assert site.reservations.answered(site.other, site.reserved(1, 2)) is None
    assert site.reservations.answered(site.decode, site.reserved(1, 2, attempt=1)) is None
    assert site.reservations.answered(site.decode, site.reserved(1, 2, rid="s")) is None
    site.check_open()


def test_the_node_is_asked_again_until_it_answers() -> None:
    site, asked_at = Site(), list[float]()
    for tick in range(1, 21):  # 2.5 s
        for node, message in site.reservations.repeat(tick / 8):
            assert node is site.decode and message == msgspec.structs.replace(site.asked, waited_s=message.waited_s)
            asked_at.append(tick / 8)
    assert asked_at == [ASK_S + 0.125, 2 * (ASK_S + 0.125), 3 * (ASK_S + 0.125), 4 * (ASK_S + 0.125)]
    assert site.attempt.num_asks == 5
    site.check_open()
    site.reservations.answered(site.decode, site.reserved(1))
    site.check_over()


def test_a_node_in_one_step_since_it_was_asked_is_not_late() -> None:
    """It has not read the question. After its step it has the usual time."""
    site, now = Site(), ANSWER_S + 5.0
    assert [attempt for _, attempt in site.reservations.overdue(now)] == [site.attempt]
    cases = (("decode", now + 0.2, False), ("decode", now - 3.0, True), (IDLE, now, True), ("decode", 1e3, True))
    for phase, age_s, is_late in cases:
        site.decode.heard(beat_of(phase, age_s), now)
        assert bool(site.reservations.overdue(now)) == is_late, (phase, age_s)


def beat_of(phase: str, age_s: float) -> Heartbeat:
    return Heartbeat(7, phase, age_s, 60.0, Load(free_pages=90, running=1, waiting=0), NodeStats())


def test_a_repeat_names_the_choices_that_are_left() -> None:
    site = Site()
    site.attempt.choices.discard(1)
    [(_, message)] = site.reservations.repeat(ASK_S + 0.1)
    assert message.choices == (2,)


def test_a_reservation_is_overdue_however_often_it_was_asked_for() -> None:
    site = Site()
    for tick in range(1, 8 * round(ANSWER_S) + 1):
        site.reservations.repeat(tick / 8)
        assert site.reservations.overdue(tick / 8) == []
    assert site.reservations.overdue(ANSWER_S + 0.01) == [(site.request, site.attempt)]
    site.check_open()


def test_a_reservation_is_taken_back_once() -> None:
    site = Site()
    assert site.reservations.take_back(site.request, site.attempt) is site.entry
    site.check_over()
    assert site.decode.holds_nothing
    again = site.request.begin_attempt({0}, site.prefill, site.decode, 1.0)
    site.reservations.begin(site.entry, again, site.decode, 1.0)
    assert site.reservations.take_back(site.request, site.attempt) is None
    assert len(site.reservations) == 1 and site.entry.attempt is again and site.decode.units_of("r", 1) == {0}
    assert site.reservations.answered(site.decode, site.reserved(1, 2)) is None, "it comes too late"


def test_a_granted_reservation_cannot_be_taken_back() -> None:
    site = Site()
    site.reservations.answered(site.decode, site.reserved(1, 2))
    assert site.reservations.take_back(site.request, site.attempt) is None
    assert site.decode.units_of("r", 0) == {1, 2}


def test_an_answer_to_a_reservation_twice_cancels_nothing(system: System) -> None:
    answers: list[m.Reserved] = []

    def grant_twice(node: FakeNode, message: m.Reserve) -> bool:
        node.reserve(message)
        answers.append(m.Reserved(message.rid, message.attempt, message.choices, node.load()))
        node.link.send(answers[-1])
        return True

    system.behaviour.answer_reserve = grant_twice
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    cancels = system.cluster.by_name("d0").got(m.Cancel)
    assert len(answers) == 1 and not cancels, cancels


@pytest.mark.parametrize("lost", ["Reserve", "Reserved"])
def test_a_lost_reservation_is_asked_for_again(system: System, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The reservation or its answer is lost. The node repeats what it granted, and the request keeps its attempt."""
    monkeypatch.setattr(reservations, "ASK_S", 0.1)
    asked: list[m.Reserve] = []

    def lose(node: FakeNode, message: m.Reserve) -> bool:
        if message.rid.startswith("canary"):
            return False
        asked.append(message)
        if len(asked) == 1 and lost == "Reserve":
            return True
        node.reserved.update({(message.rid, choice, message.attempt): message for choice in message.choices})
        if len(asked) > 1:
            node.link.send(m.Reserved(message.rid, message.attempt, message.choices, node.load()))
        return True

    system.behaviour.answer_reserve = lose
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert len(asked) == 2 and asked[1] == msgspec.structs.replace(asked[0], waited_s=asked[1].waited_s)
    assert not system.cluster.by_name("d0").got(m.Cancel)


def test_messages_that_may_be_lost_are_asked_for_within_2_s() -> None:
    assert reservations.ASK_S <= streams.SILENCE_S <= 2.0


def test_a_reservation_is_asked_for_again_before_its_claims_are_given_up() -> None:
    assert inspect.signature(HandoffServer).parameters["lease_s"].default > reservations.ASK_S


def test_partial_grants_are_dispatched_at_once(make_system: Callable[..., System]) -> None:
    """There is room for two of four choices. Granted choices are dispatched at once, as attempts of their own."""
    system = make_system(max_running=64, num_pages=4).up()
    _, body, _ = system.complete(prompt="a " * 12, n=4)
    assert [choice["text"] for choice in body["choices"]] == [system.text] * 4
    prefills = own(system.cluster.by_name("p0"), m.Prefill)
    assert sorted(choice for prefill in prefills for choice in prefill.choices) == [0, 1, 2, 3]
    assert len({prefill.attempt for prefill in prefills}) == len(prefills) >= 2
    assert len({(prefill.rid, prefill.request.params.seed) for prefill in prefills}) == 1
    system.router.wait_idle()


def test_n_choices_cost_one_prefill(system: System) -> None:
    system.complete(n=8)
    assert [prefill.choices for prefill in own(system.cluster.by_name("p0"), m.Prefill)] == [tuple(range(8))]


def test_a_full_node_is_asked_again_when_it_announces_room(make_system: Callable[..., System]) -> None:
    """The node refuses though its figures promise room. The request waits until the node announces capacity."""
    system = make_system().up()
    refused = 0

    def refuse_twice(node: FakeNode, message: m.Reserve) -> bool:
        nonlocal refused
        if message.rid.startswith("canary") or refused == 2:
            return False
        refused += 1
        load = node.load()
        busy = m.Load(free_pages=0, running=1, waiting=0)
        node.link.send(m.Reserved(message.rid, message.attempt, (), busy))
        node.post(m.CapacityFreed(load), after_s=0.1)
        return True

    system.behaviour.answer_reserve = refuse_twice
    assert text_of(system, stream=False) == system.text
    assert refused == 2


def test_a_request_that_an_empty_node_refuses_ends_with_an_error(make_system: Callable[..., System]) -> None:
    """The prompt fits by the figures, but the empty node refuses it. The request must not wait for ever."""
    system = make_system().up()

    def refuse(node: FakeNode, message: m.Reserve) -> bool:
        node.link.send(m.Reserved(message.rid, message.attempt, (), node.load()))
        return True

    system.behaviour.answer_reserve = refuse
    status, body, _ = system.complete()
    assert (status, body["error"]["param"]) == (400, "prompt")
    system.behaviour.answer_reserve = None
    system.router.wait_idle()

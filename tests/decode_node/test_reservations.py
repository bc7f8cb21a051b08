"""Reservations: granted in order, all or nothing per choice, and announced again after a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.decode_node.outbox import Outbox
from baton.decode_node.reservations import Reservations
from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.metadata.wire.messages import CapacityFreed, Compute, Reserved
from baton.metadata.wire.node_info import Load
from baton.metadata.wire.request import GenerationRequest, SamplingParams, Unit, pack_ids


class Desk:
    """Reservations over a real scheduler and pool, and the messages that they sent."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[Any] = []
        self.answers: list[Reserved] = []
        self.failed: list[tuple[Unit, str]] = []
        self.outbox = Outbox()
        self.scheduler = DecodeScheduler(engine.cache, 4, 64, context_len=engine.context_len)
        self.reservations = Reservations(
            self.scheduler,
            self.outbox,
            lambda: Load(free_pages=engine.cache.available, running=0, waiting=0),
            lambda message, router: self.sent.append((router, message)),
            self._fail,
            vocab_size=engine.model_config.vocab_size,
            context_len=engine.context_len,
        )

    def ask(
        self,
        rid: str,
        num_tokens: int,
        choices: tuple[int, ...] = (0,),
        token: int = 1,
        router: str = "router",
        waited_s: float = 0.0,
    ) -> tuple[int, ...]:
        """Return the choices that were granted."""
        generation = GenerationRequest(pack_ids([token] * num_tokens), SamplingParams(max_tokens=4))
        granted = self.reservations.grant(Compute(router, rid, 0, choices, generation, waited_s))
        to, answer = self.sent.pop()
        self.answers.append(answer)
        assert to == router and isinstance(answer, Reserved) and (answer.rid, answer.attempt) == (rid, 0)
        assert {each.unit.choice for each in granted} in (set(), set(answer.granted))
        return answer.granted

    def finish(self, rid: str) -> None:
        for sequence in self.scheduler.find(rid, 0, None):
            self.scheduler.finish(sequence)

    def _fail(self, router: str, unit: Unit, code: str, message: str, *, is_retryable: bool) -> None:
        assert message and not is_retryable and router == "router"
        self.failed.append((unit, code))


@pytest.fixture
def desk(engine: Engine) -> Iterator[Desk]:
    desk = Desk(engine)
    yield desk
    for sequence in list(desk.scheduler):
        desk.scheduler.finish(sequence)
    engine.cache.flush()
    ledger = engine.cache.ledger()
    assert ledger.free + ledger.padding == engine.pool.num_pages, ledger


def test_choices_are_granted_in_order_while_they_fit(desk: Desk) -> None:
    assert desk.ask("a", 30, (0, 1, 2)) == (0, 1), "two take 8 pages each"
    assert desk.ask("bb", 30) == ()


def test_a_message_that_comes_twice_reserves_once(desk: Desk) -> None:
    assert desk.ask("a", 10) == desk.ask("a", 10) == (0,)
    assert len(list(desk.scheduler)) == 1


def test_a_request_that_cannot_run_fails_and_reserves_nothing(desk: Desk) -> None:
    assert desk.ask("a", 3, token=1 << 20) == ()
    assert desk.failed == [(Unit("a", 0, 0), "invalid_request_error")]
    desk.reservations.announce_capacity()
    assert desk.sent == []


def test_capacity_is_announced_once_after_a_refusal(desk: Desk) -> None:
    assert desk.ask("a", 40) == (0,) and desk.ask("bb", 40) == ()
    desk.reservations.announce_capacity()
    assert desk.sent == [], "nothing has become free"
    desk.finish("a")
    desk.reservations.announce_capacity()
    desk.reservations.announce_capacity()
    assert [(to, type(message)) for to, message in desk.sent] == [("router", CapacityFreed)]


def test_capacity_is_not_announced_without_a_refusal(desk: Desk) -> None:
    assert desk.ask("a", 10) == (0,)
    desk.finish("a")
    desk.reservations.announce_capacity()
    assert desk.sent == []


def test_the_router_with_the_oldest_request_gets_the_room_that_becomes_free(desk: Desk) -> None:
    assert desk.ask("a", 40) == (0,)
    assert desk.ask("bb", 40, router="young", waited_s=1.0) == desk.ask("ccc", 40, router="old", waited_s=5.0) == ()
    desk.finish("a")
    desk.reservations.announce_capacity()
    desk.reservations.announce_capacity()
    assert [(to, type(message)) for to, message in desk.sent] == [("old", CapacityFreed)]
    desk.sent.clear()
    assert desk.ask("bb", 4, router="young", waited_s=1.1) == (), "it is not its turn, although it would fit"
    assert desk.answers[-1].load.running == 1, "the node must not seem to be empty: that would mean that it never fits"
    assert desk.ask("ccc", 40, router="old", waited_s=5.1) == (0,)
    desk.finish("ccc")
    desk.reservations.announce_capacity()
    assert [to for to, _ in desk.sent] == ["young"]


def test_a_router_that_is_gone_keeps_no_turn(desk: Desk) -> None:
    assert desk.ask("a", 40) == (0,)
    assert desk.ask("bb", 40, router="old", waited_s=5.0) == desk.ask("ccc", 4, router="young") == ()
    desk.reservations.forget("old")
    assert desk.ask("ccc", 4, router="young") == (0,)

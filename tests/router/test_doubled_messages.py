"""A message that arrives twice does what it does once, and one that never arrives is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from baton.metadata.bus.link import Link
from baton.metadata.handoff.server import HandoffServer
from baton.metadata.wire import messages as m
from baton.metadata.wire.request import Unit, pack_ids, unpack_ids
from baton.router import cancels, registry, reservations, streams

from .conftest import System
from .fake_nodes import FakeNode


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


def test_a_choice_that_its_node_lost_silently_moves(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENCE_S", 0.3)
    lost: list[Unit] = []

    def forget(node: FakeNode, message: m.Prefill) -> bool:
        if lost or message.rid.startswith("canary"):
            return False
        lost.append(Unit(message.rid, 0, message.attempt))
        node.link.send(m.PrefillDone(message.rid, message.attempt, 0.0, 0.0, 0, node.load()))
        return True

    system.behaviour.answer_prefill = forget
    answered: list[Any] = []

    def answer_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            answered.append(message)
            decode.link.send(m.Failed(message.unit, "unavailable", "not known", retryable=True))
        else:
            FakeNode.take(decode, message)

    decode = system.cluster.by_name("d0")
    decode.take = answer_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert [message.unit for message in answered] == lost


def test_a_lost_first_token_is_asked_for_where_decode_has_nothing_to_repeat_it(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token was lost on its way, and so were the offers: decode waits for them as long as prefill lives."""
    monkeypatch.setattr(streams, "SILENCE_S", 0.3)
    asked: list[tuple[str, int]] = []
    prefill, decode = system.cluster.by_name("p0"), system.cluster.by_name("d0")

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        return not asked and not message.rid.startswith("canary")

    def answer_prefill_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(("prefill", message.first))
            first = m.Tokens((message.unit,), pack_ids([0]), pack_ids([1]), pack_ids(system.say(system.text)[:1]))
            prefill.link.send(first)
        else:
            FakeNode.take(prefill, message)

    def answer_decode_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(("decode", message.first))
            monkeypatch.setattr(streams, "SILENCE_S", 60.0)  # the next attempt may take longer than 0.3 s
            decode.link.send(m.Failed(message.unit, "transfer_error", "an offer was lost", retryable=True))
        else:
            FakeNode.take(decode, message)

    system.behaviour.answer_prefill = lose
    prefill.take, decode.take = answer_prefill_resend, answer_decode_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert asked == [("prefill", 0), ("decode", 1)]


@pytest.mark.parametrize("lost", ["Reserve", "Reserved"])
def test_a_lost_reservation_is_asked_for_again(system: System, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Lost on its way, or its answer: the node answers what it has granted, and the request keeps its attempt."""
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
    assert len(asked) == 2 and asked[0] == asked[1]
    assert not system.cluster.by_name("d0").got(m.Cancel)


def test_a_lost_last_offer_is_asked_for_soon_after_the_first_token(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENCE_S", 0.2)
    decode, asked = system.cluster.by_name("d0"), list[int]()
    handed_over: list[Any] = []

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        if message.rid.startswith("canary"):
            return False
        unit, first = Unit(message.rid, 0, message.attempt), pack_ids(system.say(system.text)[:1])
        node.link.send(m.Tokens((unit,), pack_ids([0]), pack_ids([1]), first))
        node.link.send(m.PrefillDone(message.rid, message.attempt, 0.0, 0.0, 0, node.load()))
        handed_over.append((message, 0, system.say(system.text)))
        return True

    def answer_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(message.first)
            decode.handoffs.put(handed_over[0])  # prefill has offered once more
        else:
            FakeNode.take(decode, message)

    system.behaviour.answer_prefill = lose
    decode.take = answer_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)
    assert asked[0] == 1


def test_what_may_have_been_lost_is_asked_for_within_2_s() -> None:
    assert reservations.ASK_S <= streams.SILENCE_S <= 2.0


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_log_probabilities_of_a_prompt_whose_last_word_was_lost_are_computed_again(
    system: System, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """All tokens are there; PrefillDone, which carries them, is not."""
    monkeypatch.setattr(streams, "SILENCE_S", 0.2)
    asked: list[m.Resend] = []
    prefill, decode = system.cluster.by_name("p0"), system.cluster.by_name("d0")

    def lose(node: FakeNode, message: m.Prefill) -> bool:
        if message.attempt > 0 or message.rid.startswith("canary"):
            return False
        output = node.output(message.request, unpack_ids(message.request.prompt_ids), 0)
        node.link.send(node.tokens(Unit(message.rid, 0, 0), message.request, output, 0, 1))
        if message.decode is not None:
            decode.handoffs.put((message, 0, output))
        return True

    def answer_resend(message: m.ToNode) -> None:
        if isinstance(message, m.Resend):
            asked.append(message)
            prefill.link.send(m.Failed(message.unit, "unavailable", "not known", retryable=True))
        else:
            FakeNode.take(prefill, message)

    system.behaviour.answer_prefill = lose
    prefill.take = answer_resend  # type: ignore[method-assign]
    status, answer, _ = system.complete(echo=True, logprobs=1, max_tokens=max_tokens)
    assert status == 200 and asked[0].first >= 1, answer
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) > 3
    system.router.wait_idle()


def test_a_lost_tokenizer_is_asked_for_again(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "TOKENIZER_S", 0.2)
    lost: list[str] = []
    send = Link.send

    def lose(link: Link, message: m.ToRouter) -> bool:
        if isinstance(message, m.TokenizerFile) and len(lost) < 2:  # of both nodes
            lost.append(message.digest)
            return True
        return send(link, message)

    monkeypatch.setattr(Link, "send", lose)
    system = make_system().up()
    assert len(lost) == 2
    status, answer, _ = system.complete()
    assert (status, answer["choices"][0]["text"]) == (200, system.text)


def test_a_cancel_that_is_lost_three_times_arrives_within_2_s() -> None:
    waits_s = [cancels.ACK_S * 2**number for number in range(3)]
    assert sum(waits_s) < 2.0


def test_a_reservation_is_asked_for_again_before_its_claims_are_given_up() -> None:
    assert inspect.signature(HandoffServer).parameters["lease_s"].default > reservations.ASK_S

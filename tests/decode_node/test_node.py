"""The decode node: what a sequence leaves in a slot, when the device has no memory, and which round arrivals join."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import coach, force_steps, rounds_paused
from node_pair import ROUTER_EPOCH, NodePair, node_pairs, params, replace

from baton.engine.pace.step_times import StepTimes
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.metadata.handoff import pull_link
from baton.metadata.wire.messages import Cancel, Failed
from baton.metadata.wire.request import Unit

PROMPT = [17, 4, 250, 33, 17, 4, 250, 99, 8]
WANTS = params(12, temperature=1.0, seed=3)  # what requests beside a fault ask for
SETTINGS = {"page_size": 4, "max_running": 3, "speculative": "ngram", "draft_steps": 3}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]) -> Iterator[NodePair]:
    """An adaptive pair with the n-gram drafter, which drafts in every round."""
    monkeypatch.setattr(StepTimes, "measure", lambda *_: StepTimes({(1, 0): 1.0, (1, 1): 1.0}))
    with closing(NodePair(checkpoint("llama"), prefill=SETTINGS, decode=SETTINGS, is_adaptive=True)) as pair:
        force_steps(pair, lambda _: 3)
        yield pair
        pair.check_books()


def test_a_sequence_does_not_inherit_the_acceptance_of_the_slot_it_gets(pair: NodePair) -> None:
    chooser, results = pair.decode.pacing.chooser, pair.results
    assert chooser is not None
    wants = params(24, temperature=1.0, seed=3)
    pair.submit("plain", PROMPT, replace(wants, draft_steps=0))
    truth = PROMPT + pair.run()["plain", 0].ids
    coach(pair.decode.executor.engine.drafter, {3: truth}, lambda *_: True)
    pair.submit("mostly wrong", PROMPT, params(60, temperature=1.0, seed=4))
    pair.submit("always right", PROMPT, wants)
    with rounds_paused(pair):
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
    pair.step_until(lambda: results["always right", 0].ended)
    wrong, right, unused = map(chooser.acceptance, range(3))
    assert wrong + 0.05 < unused < right - 0.05, (wrong, unused, right)
    chooser._num_resting = 5
    with rounds_paused(pair):  # no round has run with them yet
        pair.submit("next", PROMPT, wants)
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
        assert [each.slot for each in pair.decode.scheduler.running] == [0, 1]
        assert list(map(chooser.acceptance, range(3))) == [wrong, unused, unused]
        assert chooser._num_resting == 0, "another sequence is a reason to try again"
    pair.run()


def test_a_round_that_a_chunk_of_another_rank_delays_takes_the_time_of_a_round_with_a_chunk(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, clock, settled = pair.decode.rounds, pair.decode._clock, list[bool]()
    submit, settle = rounds.submit, clock.settle

    def settling(since: float, num_steps: int, *, has_chunk: bool) -> float:
        settled.append(has_chunk)
        return settle(since, num_steps, has_chunk=has_chunk)

    monkeypatch.setattr(clock, "settle", settling)
    monkeypatch.setattr(rounds, "submit", lambda *args: submit(*args)._replace(is_delayed=True))
    pair.submit("delayed", PROMPT, WANTS)
    pair.run()
    assert len(settled) > 2 and all(settled)
    monkeypatch.setattr(rounds, "submit", submit)
    settled.clear()
    pair.submit("plain", PROMPT, WANTS)
    pair.run()
    assert len(settled) > 2 and not any(settled)


def proposals_of(pair: NodePair, rid: str, prompt: Sequence[int], cache_salt: str) -> list[list[int]]:
    """Return the proposals for a request, round by round."""
    drafter, found = pair.decode.executor.engine.drafter, list[list[int]]()
    lookup = drafter.lookup

    def looking(*rest: Any) -> list[int]:
        found.append(lookup(*rest))
        return found[-1]

    drafter.lookup = looking
    pair.submit(rid, prompt, params(12, temperature=1.0, seed=7), cache_salt=cache_salt)
    pair.run()
    drafter.lookup = lookup
    return found


def test_no_proposal_comes_from_another_salt_or_from_the_last_sequence_in_the_slot(pair: NodePair) -> None:
    """A finished text is found only by requests with the same cache salt."""
    alone = proposals_of(pair, "first", PROMPT, "one")
    proposals_of(pair, "between", [5, *PROMPT[::-1], 6], "another")
    for cache_salt in ("", "a third", "a fourth"):
        assert proposals_of(pair, f"of {cache_salt}", PROMPT, cache_salt) == alone
    assert proposals_of(pair, "again", PROMPT, "one") != alone
    assert not pair.decode.executor.engine.drafter._own, "texts of ended sequences"


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 376.00 MiB")


MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path]) -> Iterator[MakePair]:
    """`make_pair(overlaps=True)`: a pair of which the test takes the device's memory away."""
    with node_pairs() as start:

        def make(**more: Any) -> NodePair:
            settings = {"page_size": 4, "max_running": 3, "chunk_tokens": 4}
            return start(checkpoint("llama"), prefill=settings, decode=settings, **more)

        yield make


def check_that_it_goes_on(pair: NodePair, expected: list[int]) -> None:
    pair.check_books()
    pair.submit("after", PROMPT, WANTS)
    assert pair.run()["after", 0].ids == expected


def failures(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> list[Failed]:
    """Return a list that grows by each Failed message that the decode node sends."""
    sent, send = list[Failed](), pair.decode.membership.send

    def noting(message: Any, router: str) -> Any:
        if isinstance(message, Failed):
            sent.append(message)
        return send(message, router)

    monkeypatch.setattr(pair.decode.membership, "send", noting)
    return sent


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_without_memory_ends_its_sequences_with_one_error_each(
    overlaps: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the round before still come, and the node goes on."""
    pair = make_pair(overlaps=overlaps)
    pair.submit("alone", PROMPT, WANTS)
    expected = pair.run()["alone", 0].ids
    sent = failures(pair, monkeypatch)
    for rid in ("one", "two"):
        pair.submit(rid, PROMPT, WANTS)
    pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
    pair.step()
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.executor.engine.model, "logits", no_memory)
        pair.run()
    assert sorted((each.unit.rid, each.code, each.retryable) for each in sent) == [
        ("one", "out_of_memory", True),
        ("two", "out_of_memory", True),
    ]
    assert all("no memory left for a round of" in each.message for each in sent)
    for rid in ("one", "two"):
        result = pair.results[rid, 0]
        assert result.failed is not None and 0 < len(result.ids) < 12
        assert result.ids == expected[: len(result.ids)]
    check_that_it_goes_on(pair, expected)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_local_prompt_without_memory_ends_alone(
    overlaps: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(overlaps=overlaps)
    pair.submit("other", PROMPT, WANTS)
    pair.step_until(lambda: pair.decode.scheduler.running)
    sent = failures(pair, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.executor.engine, "compute", no_memory)
        patch.setattr(pair.decode.executor, "_begin_mixed", no_memory)
        pair.submit("local", PROMPT[::-1], WANTS, is_local=True)
        pair.run()
    assert [(each.unit.rid, each.code) for each in sent] == [("local", "out_of_memory")]
    expected = pair.results["other", 0].ids
    assert len(expected) == 12 and pair.results["other", 0].failed is None
    check_that_it_goes_on(pair, expected)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_sequence_without_memory_for_its_parameters_ends_alone(
    is_local: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    pair.submit("other", PROMPT, WANTS)
    pair.step_until(lambda: pair.decode.scheduler.running)
    sent = failures(pair, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.executor.slots, "_per_token", no_memory)
        pair.submit("penalized", PROMPT, replace(WANTS, repetition_penalty=1.2), is_local=is_local)
        pair.run()
    assert [(each.unit.rid, each.code) for each in sent] == [("penalized", "out_of_memory")]
    expected = pair.results["other", 0].ids
    check_that_it_goes_on(pair, expected)


# --- a sequence whose pages arrive while the device computes joins the round after ---


FIRST, SECOND = [5, 6, 7, 8, 9], [each % 300 for each in range(3, 60)]


@pytest.fixture
def pulling(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[NodePair]:
    """A pair whose decode node runs `first` in overlapping rounds, and has been offered all pages of `second`, of which
    it copies one at each look."""
    both: dict[str, Any] = {"page_size": 4, "max_running": 3, "speculative": "none"}
    with node_pairs() as start:
        pair = start(checkpoint("llama"), prefill=both, decode=both, overlaps=True)
        pair.submit("first", FIRST, params(60))
        pair.step_until(lambda: len(pair.results["first", 0].ids) > 3)
        pair.submit("second", SECOND, params(12))
        pair.step_until(lambda: pair.decode.scheduler.reserved)
        while not pair.prefill.scheduler.handing_over or pair.prefill._under_way is not None:
            pair.prefill.step()
            pair._receive()  # the reservation may still be under way, and the prompt with it
            pair._dispatch()
        for _ in range(10):  # the claim may still be under way, and the offers after it
            pair.prefill.step()
            time.sleep(0.01)
        assert pair.decode.scheduler.reserved and pair.decode._under_way is not None
        monkeypatch.setattr(pull_link, "POLL_BYTES", 1)
        yield pair
        monkeypatch.undo()
        pair.run()


def computes(monkeypatch: pytest.MonkeyPatch, pulling: NodePair, *, is_done: bool, seconds: float) -> None:
    """Let the device be at work on the round under way, and need the next one after so many seconds."""
    until = time.monotonic() + seconds
    monkeypatch.setattr(DeviceExecutor, "is_done", property(lambda _: is_done))
    monkeypatch.setattr(pulling.decode._clock, "submit_by", lambda *_, **__: until)
    monkeypatch.setattr(pulling.decode, "_answer_reservations", lambda: None)  # it would wait, too


def members(pulling: NodePair) -> list[str]:
    assert pulling.decode._under_way is not None
    return [sequence.unit.rid for sequence in pulling.decode._under_way.sequences]


@pytest.mark.timing
def test_pages_that_come_in_time_join_the_next_round(pulling: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pulling, is_done=False, seconds=30.0)
    started = time.monotonic()
    pulling.decode.step()
    assert members(pulling) == ["first", "second"]
    assert not pulling.decode.scheduler.reserved and time.monotonic() - started < 10.0, "it waits for nothing more"


def test_a_local_prompt_that_comes_in_time_is_computed_beside_the_next_round(
    pulling: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing announces it. A node that has computed one waits for the next."""
    pulling.submit("local", FIRST[::-1], params(2), is_local=True)
    pulling.step_until(lambda: all(pulling.results[rid, 0].ended is not None for rid in ("second", "local")))
    assert members(pulling) == ["first"] and not pulling.decode.scheduler.reserved
    computes(monkeypatch, pulling, is_done=False, seconds=5.0)
    taken, looks = pulling.decode._take_arrivals, 0

    def take() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            pulling.submit("late", FIRST * 2, params(2), is_local=True)
            pulling._dispatch()
        pulling._receive()
        pulling._dispatch()
        taken()

    monkeypatch.setattr(pulling.decode, "_take_arrivals", take)
    pulling.decode.step()
    assert looks > 3
    assert pulling.decode._under_way.chunk is not None, "its prompt is beside the round that was about to begin"


@pytest.mark.parametrize(("is_done", "seconds"), [(True, 30.0), (False, -1.0)])
def test_no_pages_delay_a_round_that_the_device_needs(
    is_done: bool, seconds: float, pulling: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes(monkeypatch, pulling, is_done=is_done, seconds=seconds)
    pulling.decode.step()
    assert members(pulling) == ["first"] and pulling.decode.scheduler.reserved


def test_a_wait_ends_when_the_device_is_done(pulling: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pulling, is_done=False, seconds=30.0)
    looks = 0

    def is_done(_: object) -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    monkeypatch.setattr(DeviceExecutor, "is_done", property(is_done))
    pulling.decode.step()
    assert looks == 5 and members(pulling) == ["first"], "the last look tells whether arrivals took too long"


@pytest.mark.parametrize("looks_s", [[0.3, 0.0], [0.0, 0.3]])
def test_arrivals_that_outlast_the_round_under_way_count_as_other_work(
    looks_s: list[float], pulling: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the chooser takes their time for the round's. The device is done after the second look."""
    computes(monkeypatch, pulling, is_done=False, seconds=30.0)
    clock, left = pulling.decode._clock, looks_s.copy()
    before = clock._other_s

    def take() -> None:
        time.sleep(left.pop(0))
        if not left:
            monkeypatch.setattr(DeviceExecutor, "is_done", property(lambda _: True))

    monkeypatch.setattr(pulling.decode, "_take_arrivals", take)
    pulling.decode._await_arrivals()
    assert not left and (clock._other_s - before >= 0.3) == (looks_s[-1] == 0.3)


def test_a_cancel_ends_the_wait(pulling: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pulling, is_done=False, seconds=30.0)
    [unit] = pulling.decode.scheduler.reserved
    taken = pulling.decode._take_arrivals
    looks = 0

    def take() -> None:
        nonlocal looks
        looks += 1
        taken()
        if looks == 2:
            pulling.decode._drop(pulling.decode.scheduler.reserved[unit], "cancelled")

    monkeypatch.setattr(pulling.decode, "_take_arrivals", take)
    pulling.decode.step()
    assert looks == 2 and members(pulling) == ["first"]
    pulling.prefill._cancel(unit.rid, unit.attempt, None)
    pulling.results["second", 0].failed = Failed(unit=unit, code="cancelled", message="", retryable=False)


def test_a_reservation_is_answered_while_the_device_computes(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt waits for the answer. A message of another kind waits for the next step."""
    both: dict[str, Any] = {"page_size": 4, "max_running": 3, "speculative": "none"}
    with node_pairs() as start:
        pair = start(checkpoint("llama"), prefill=both, decode=both, overlaps=True)
        pair.submit("first", FIRST, params(40))
        pair.step_until(lambda: len(pair.results["first", 0].ids) > 3)
        node, received, first = pair.decode, pair.decode.membership.receive, Unit("first", 0, 0)
        answer_reservations = node._answer_reservations
        calls: list[bool] = []
        monkeypatch.setattr(node, "_answer_reservations", lambda: calls.append(node._under_way is not None))
        node.step()
        assert calls == [True], "each step answers once, with a round under way and the next one submitted"
        computes(monkeypatch, pair, is_done=False, seconds=30.0)

        def receive() -> list[Any]:
            """Return what comes, and a cancel after the reservation."""
            return [*received(), *([Cancel(ROUTER_EPOCH, "first", 0, (0,), "")] if node.scheduler.reserved else [])]

        monkeypatch.setattr(node.membership, "receive", receive)
        pair.submit("second", SECOND, params(4))
        pair._dispatch()
        answer_reservations()
        assert [unit.rid for unit in node.scheduler.reserved] == ["second"]
        assert node.scheduler.get(first) is not None and [type(each) for each in node._put_off] == [Cancel]
        answer_reservations()  # it waits for nothing
        node._take_arrivals()
        assert node.scheduler.get(first) is None and not node._put_off
        monkeypatch.undo()
        pair.step_until(lambda: pair.results["second", 0].ended)
        assert len(pair.results["second", 0].ids) == 4

"""A sequence whose pages arrive while the device computes joins the round after: the node submits that one late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pair import NodePair, node_pairs, params

from baton.engine.device_executor import DeviceExecutor
from baton.metadata.handoff import client
from baton.metadata.wire.messages import Failed

FIRST, SECOND = [5, 6, 7, 8, 9], [each % 300 for each in range(3, 60)]


@pytest.fixture
def pair(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[NodePair]:
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
        time.sleep(0.05)  # for the offers to come
        assert pair.decode.scheduler.reserved and pair.decode._under_way is not None
        monkeypatch.setattr(client, "POLL_BYTES", 1)
        yield pair
        monkeypatch.undo()
        pair.run()


def computes(monkeypatch: pytest.MonkeyPatch, pair: NodePair, *, is_done: bool, seconds: float) -> None:
    """Let the device be at work on the round under way, and need the next one after so many seconds."""
    until = time.monotonic() + seconds
    monkeypatch.setattr(DeviceExecutor, "is_done", property(lambda _: is_done))
    monkeypatch.setattr(pair.decode._clock, "submit_by", lambda _: until)


def members(pair: NodePair) -> list[str]:
    assert pair.decode._under_way is not None
    return [sequence.unit.rid for sequence in pair.decode._under_way.sequences]


def test_pages_that_come_in_time_join_the_next_round(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pair, is_done=False, seconds=30.0)
    started = time.monotonic()
    pair.decode.step()
    assert members(pair) == ["first", "second"]
    assert not pair.decode.scheduler.reserved and time.monotonic() - started < 10.0, "it waits for nothing more"


@pytest.mark.parametrize(("is_done", "seconds"), [(True, 30.0), (False, -1.0)])
def test_no_pages_delay_a_round_that_the_device_needs(
    is_done: bool, seconds: float, pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes(monkeypatch, pair, is_done=is_done, seconds=seconds)
    pair.decode.step()
    assert members(pair) == ["first"] and pair.decode.scheduler.reserved


def test_a_wait_ends_when_the_device_is_done(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pair, is_done=False, seconds=30.0)
    looks = 0

    def is_done(_: object) -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    monkeypatch.setattr(DeviceExecutor, "is_done", property(is_done))
    pair.decode.step()
    assert looks == 4 and members(pair) == ["first"]


def test_a_cancel_ends_the_wait(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> None:
    computes(monkeypatch, pair, is_done=False, seconds=30.0)
    [unit] = pair.decode.scheduler.reserved
    taken = pair.decode._take_arrivals
    looks = 0

    def take() -> None:
        nonlocal looks
        looks += 1
        taken()
        if looks == 2:
            pair.decode._drop(pair.decode.scheduler.reserved[unit], "cancelled")

    monkeypatch.setattr(pair.decode, "_take_arrivals", take)
    pair.decode.step()
    assert looks == 2 and members(pair) == ["first"]
    pair.prefill._cancel(unit.rid, unit.attempt, None)
    pair.results["second", 0].failed = Failed(unit=unit, code="cancelled", message="", retryable=False)

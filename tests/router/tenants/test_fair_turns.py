"""Turns of callers: one caller's queue delays another by one piece of work, and is bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.metadata.errors import Overloaded, Unavailable
from baton.router.tenants.fair_turns import ASKER, FairTurns


async def run_as(turns: FairTurns, caller: str, done: list[str], hold: threading.Event) -> None:
    ASKER.set(caller)

    def work() -> None:
        hold.wait(5)
        done.append(caller)

    await turns.run(work)


async def test_callers_take_turns_and_a_queue_is_bounded_per_caller() -> None:
    turns, hold, done = FairTurns("texts", 1, 3), threading.Event(), list[str]()
    tasks = [asyncio.create_task(run_as(turns, caller, done, hold)) for caller in "aaaaabbc"]
    await asyncio.sleep(0.01)
    tasks[1].cancel()  # one that waits, and one that runs
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    hold.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["a", "a", "b", "c", "a", "b"]
    assert isinstance(results[4], Overloaded), "a has one running and three waiting"
    assert isinstance(results[0], asyncio.CancelledError) and isinstance(results[1], asyncio.CancelledError)
    await run_as(turns, "d", done, hold)
    turns.close(lambda: None)


async def test_what_waits_at_the_end_is_refused() -> None:
    turns, hold, done = FairTurns("texts", 1, 3), threading.Event(), list[str]()
    tasks = [asyncio.create_task(run_as(turns, "a", done, hold)) for _ in range(2)]
    await asyncio.sleep(0.01)
    turns.close(lambda: done.append("last"))
    with pytest.raises(Unavailable):
        await tasks[1]
    hold.set()
    await tasks[0]
    with pytest.raises(Unavailable):
        await turns.run(lambda: None)

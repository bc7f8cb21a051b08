"""Ranks of a group step together and sleep together."""

from __future__ import annotations

import operator
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from thread_ranks import ThreadRanks, in_threads

from baton.decode_node.config import DecodeConfig
from baton.engine.pace.draft_length import DraftShape
from baton.engine.products.ranked import RankRows
from baton.engine.ranks import steps as group_steps
from baton.engine.ranks.board import Board
from baton.engine.ranks.group import TIMEOUT_S
from baton.engine.ranks.steps import GroupSteps
from baton.engine.work import BatchRow, Recompute
from baton.metadata.errors import ChunkOutOfMemory, OutOfMemory, RankLost


class Stays:
    """The membership of a node that stays. Notes the phases that it enters."""

    is_leaving = False

    def __init__(self) -> None:
        self.phases: list[str] = []

    def leave(self, why: str) -> None:
        raise AssertionError(why)

    def enter(self, phase: str, limit_s: float) -> None:
        assert limit_s == TIMEOUT_S
        self.phases.append(phase)


def test_a_rank_that_sleeps_is_woken_by_the_first_that_has_work(boards: list[Board]) -> None:
    steps = [GroupSteps(board, RankRows(), "group", "epoch") for board in boards]
    idle: list[tuple[int, tuple[int, ...]]] = []
    for rank, each in enumerate(steps):
        each.prepare(lambda agreed, rank=rank: idle.append((rank, agreed.lens)), shape=DraftShape(2))
    num_waits = 0

    def sleep(descriptors: Sequence[int]) -> None:
        nonlocal num_waits
        num_waits += 1
        assert select.select(descriptors, [], [], 50.0)[0], "nobody woke this rank"

    def rest(each: GroupSteps) -> None:
        while not each.join():
            each.sleep(sleep)

    def work() -> None:
        time.sleep(0.05)
        assert steps[0].agree_round(4, DraftShape(1)) == DraftShape(1)

    in_threads([work, lambda: rest(steps[1]), lambda: rest(steps[2])])
    assert sorted(idle) == [(1, (8, 0, 0)), (2, (8, 0, 0))]
    assert num_waits <= 4, "an idle rank does not spin"
    assert [each.num_idle for each in steps] == [0, 1, 1]


def test_a_rank_that_worked_in_a_step_does_not_join_the_next_one_idly(boards: list[Board]) -> None:
    """Otherwise a fast rank would make slower ones idle in every second step."""
    two = [GroupSteps(board, RankRows(), "group", "epoch") for board in boards]

    def run(each: GroupSteps) -> None:
        for _ in range(50):

            def step() -> bool:
                each.begin_round(1, DraftShape(0))
                return False

            assert each.run(step, Stays())

    in_threads([lambda each=each: run(each) for each in two])
    assert [each.num_idle for each in two] == [0, 0, 0]


def test_a_rank_whose_work_waits_joins_the_steps_of_others(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is busy, but runs no forward now. When the others step no more, their streams have ended."""
    monkeypatch.setattr(group_steps, "_QUIET_S", 600.0)
    steps = [GroupSteps(board, RankRows(), "group", "epoch") for board in boards]
    steps[0].watch_streams(lambda: (3, False))

    memberships = [Stays() for _ in steps]

    def waiting() -> None:
        while steps[1].num_idle < 2:
            assert steps[1].run(lambda: True, memberships[1])

    def idle() -> None:
        while steps[2].num_idle < 2:
            steps[2].run(lambda: False, memberships[2])

    in_threads([lambda: [steps[0].agree_round(1, DraftShape(0)) for _ in range(2)], waiting, idle])
    assert memberships[2].phases == ["group"] * 2, "a rank that joins for minutes is not stuck"
    assert steps[1].streams_elsewhere == (3, False) and steps[0].streams_elsewhere == (0, False)
    monkeypatch.setattr(group_steps, "_QUIET_S", 0.0)
    assert steps[1].streams_elsewhere == (0, False)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_rank_without_memory_ends_the_longest_chunk_and_no_other_work(boards: list[Board], lacking: int) -> None:
    """Also if the rank that lacks memory has no chunk, or no work at all. Nothing of the forward has begun."""
    steps = [GroupSteps(board, RankRows(), "group", "epoch") for board in boards]
    ran: list[tuple[int, ...]] = []
    for rank, each in enumerate(steps):
        room = 20 if rank == lacking else 1000
        has_room = partial(operator.ge, room)
        each.prepare(lambda agreed: ran.append(agreed.lens), shape=DraftShape(1), has_room=has_room)
    ended = threading.Event()

    def long_chunk() -> None:
        with pytest.raises(ChunkOutOfMemory, match=f"rank {lacking} has no memory left for a chunk of 30 tokens"):
            steps[0].begin_chunk([BatchRow([1] * 30, 0, [1])])
        ended.set()
        while not steps[0].join():
            time.sleep(1e-3)

    def rounds() -> None:
        assert steps[1].agree_round(3, DraftShape(1)) == DraftShape(1)
        ran.append(steps[1]._rows.lens)

    def idle() -> None:
        num_joined = 0
        while num_joined < 2:
            num_joined += steps[2].join()

    in_threads([long_chunk, rounds, idle])
    assert ended.is_set() and ran == [(0, 6, 0)] * 3


def test_memory_that_lacks_after_the_forward_ends_one_request(checkpoint: Callable[..., Path]) -> None:
    """No other rank waits any more. In the forward they do, so the group ends."""
    model = checkpoint("llama", num_hidden_layers=1)
    drafting = {"speculative": "standalone", "draft_model": str(model), "draft_steps": 1}
    config = DecodeConfig(model=str(model), device="cpu", threads=1, page_size=4, num_pages=16, **drafting)
    work = Recompute([BatchRow([3, 4, 5], 0, [1], 0)], [[3, 4, 5, 6]])
    lacks = torch.OutOfMemoryError("no memory")
    with ThreadRanks(2, config, num_slots=2) as ranks:
        engine, submit = ranks.engines[0], partial(ranks.executors[0].submit, work)
        assert engine.drafter is not None
        with mock.patch.object(engine.drafter, "observe_prompt", side_effect=lacks):
            error = ranks.do({0: partial(raised, submit)})[0]
        assert isinstance(error, OutOfMemory) and not isinstance(error, RankLost)
        ranks.do({0: submit, 1: partial(ranks.executors[1].submit, work)})
        assert all(engine.kv[:, 1].any() for engine in ranks.engines)
        ranks.do({0: lambda: None, 1: lambda: None})
        with mock.patch.object(engine.model, "forward_with_aux", side_effect=lacks):
            error = ranks.do({0: partial(raised, submit)})[0]
            ranks.group.end()
    assert isinstance(error, RankLost) and "other ranks wait in a forward" in str(error)


def raised(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None

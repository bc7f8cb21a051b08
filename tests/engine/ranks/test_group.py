"""Collective operations of several processes against the same operations in one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fork_context
from group_ranks import LENS, PAIR_LENS, SIZE, WIDTH, be_late, leave_rank, rows_of, run_rank
from torch import Tensor

from baton.engine.ranks.group import OneRank
from baton.kernels.products.norm import add_rms_norm_


def _start(target: Any, size: int, meeting: Path) -> tuple[list[Any], Any]:
    context = fork_context()
    results = context.Queue()
    ranks = [context.Process(target=target, args=(rank, str(meeting), results)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    return ranks, results


def test_ranks_in_processes_of_their_own_compute_what_one_process_computes(tmp_path: Path) -> None:
    ranks, results = _start(run_rank, SIZE, tmp_path / "meeting")
    answers = {rank: (pid, values) for rank, pid, values in (results.get(timeout=60) for _ in ranks)}
    for rank in ranks:
        rank.join(10)
    assert len({os.getpid(), *(pid for pid, _ in answers.values())}) == SIZE + 1

    def sum_of(num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        first, *others = (rows_of(rank, num_rows, dtype) for rank in range(SIZE))
        for other in others:
            first += other
        return first

    sends = [rows_of(rank, sum(PAIR_LENS[rank])).split(PAIR_LENS[rank]) for rank in range(SIZE)]
    for rank, (_, values) in answers.items():
        expected = {
            "sum": sum_of(4),
            "sum of nothing": torch.zeros(0, WIDTH),
            "sum of bfloat16": sum_of(4, torch.bfloat16),
            "max": torch.tensor([[2, 0], [5, 1 << 40]]),
            "gather": torch.cat([rows_of(each, LENS[each]) for each in range(SIZE)]),
            "gather of nothing": torch.zeros(0, WIDTH),
            "gather_columns": torch.cat([rows_of(each, 4) for each in range(SIZE)], 1)[:, :-1],
            "exchange_columns": torch.cat([rows_of(each, sum(LENS)).split(LENS)[rank] for each in range(SIZE)], 1)[
                :, :-1
            ],
            "reduce_scatter": sum_of(sum(LENS)).split(LENS)[rank],
            "sum_norm_": add_rms_norm_(torch.ones(4, WIDTH), sum_of(4), torch.ones(WIDTH), 1e-5),
            "reduce_scatter_norm_": add_rms_norm_(
                torch.ones(LENS[rank], WIDTH), sum_of(sum(LENS)).split(LENS)[rank], torch.ones(WIDTH), 1e-5
            ),
            "told": torch.tensor(list(b"rank 0")),
            "all_to_all": torch.cat([sends[sender][rank] for sender in range(SIZE)]),
        }
        for name, value in expected.items():
            assert values[name] == (value.tolist(), value.shape, str(value.dtype)), (rank, name)


def test_a_rank_whose_peer_died_gets_an_error(tmp_path: Path) -> None:
    ranks, results = _start(leave_rank, 2, tmp_path / "meeting")
    assert results.get(timeout=60) != "no error"
    for rank in ranks:
        rank.join(10)


def test_the_time_that_an_operation_may_wait_can_change(tmp_path: Path) -> None:
    """Before service it is longer."""
    ranks, results = _start(be_late, 2, tmp_path / "meeting")
    assert 0.2 < results.get(timeout=100) < 50.0, "the usual limit is longer"
    for rank in ranks:
        rank.kill()
        rank.join()


def test_one_rank_returns_what_it_is_given() -> None:
    group, rows = OneRank(), rows_of(0, 3)
    for value in (
        group.sum(rows),
        group.max(rows),
        group.gather(rows, [3]),
        group.gather_columns(rows, WIDTH),
        group.exchange_columns(rows, [3], WIDTH),
        group.reduce_scatter(rows, [3]),
        group.all_to_all(rows, [[3]]),
    ):
        assert value is rows
    both = [torch.ones(3, WIDTH), torch.ones(3, WIDTH)]
    normed = group.reduce_scatter_norm_(both[0], rows, torch.ones(WIDTH), 1e-5, [3])
    assert torch.equal(normed, add_rms_norm_(both[1], rows, torch.ones(WIDTH), 1e-5)) and torch.equal(*both)
    with pytest.raises(AssertionError):
        group.gather(rows, [2])

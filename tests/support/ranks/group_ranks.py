"""Ranks of a group: each function runs in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.ranks.group import CpuGroup
from baton.engine.ranks.ranks import Ranks

SIZE = 3
WIDTH = 5
LENS = (2, 0, 3)  # the second rank is idle
PAIR_LENS = ((1, 0, 2), (0, 0, 0), (2, 1, 0))


def rows_of(rank: int, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows that no other rank has: values whose sum depends on the order of its terms."""
    generator = torch.Generator().manual_seed(1 + rank)
    return (torch.randn(num_rows, WIDTH, generator=generator) * 10.0 ** (3 * rank)).to(dtype)


def results_of(group: CpuGroup, rank: int) -> dict[str, Tensor]:
    total = sum(LENS)
    return {
        "sum": group.sum(rows_of(rank, 4)),
        "sum of nothing": group.sum(rows_of(rank, 0)),
        "sum of bfloat16": group.sum(rows_of(rank, 4, torch.bfloat16)),
        "max": group.max(torch.tensor([[rank, -rank], [5 - rank, 1 << 40]])),
        "gather": group.gather(rows_of(rank, LENS[rank]), LENS),
        "gather of nothing": group.gather(rows_of(rank, 0), [0] * SIZE),
        "gather_columns": group.gather_columns(rows_of(rank, 4), SIZE * WIDTH - 1),
        "exchange_columns": group.exchange_columns(rows_of(rank, total), LENS, SIZE * WIDTH - 1),
        "reduce_scatter": group.reduce_scatter(rows_of(rank, total), LENS),
        "sum_norm_": group.sum_norm_(torch.ones(4, WIDTH), rows_of(rank, 4), torch.ones(WIDTH), 1e-5),
        "reduce_scatter_norm_": group.reduce_scatter_norm_(
            torch.ones(LENS[rank], WIDTH), rows_of(rank, total), torch.ones(WIDTH), 1e-5, LENS
        ),
        "told": torch.tensor(list(Ranks(group).tell(b"rank %d" % rank))),
        "all_to_all": group.all_to_all(rows_of(rank, sum(PAIR_LENS[rank])), PAIR_LENS),
    }


def run_rank(rank: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    group = CpuGroup(rank, SIZE, Path(meeting))
    values = {name: (value.tolist(), value.shape, str(value.dtype)) for name, value in results_of(group, rank).items()}
    results.put((rank, os.getpid(), values))
    group.close()


def be_late(rank: int, meeting: str, results: Any) -> None:
    """Come to the first operation after a second, which rank 0 waits, and never to the second one."""
    group = CpuGroup(rank, 2, Path(meeting))
    time.sleep(rank)
    group.sum(torch.ones(3))
    if rank == 1:
        time.sleep(60)
    group.limit(0.3)
    began = time.monotonic()
    try:
        group.sum(torch.ones(3))
    except RuntimeError:
        results.put(time.monotonic() - began)


def leave_rank(rank: int, meeting: str, results: Any) -> None:
    """Meet, and let the last rank die before the first operation.

    It dies only when rank 0 has met it too: a rank whose peer dies before that gets its error from the meeting."""
    group = CpuGroup(rank, 2, Path(meeting), timeout_s=5.0)
    has_met = Path(meeting).with_name("rank 0 has met")
    if rank == 1:
        deadline = time.monotonic() + 60.0
        while not has_met.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os._exit(1)
    has_met.touch()
    try:
        group.sum(torch.ones(3))
    except RuntimeError as error:
        results.put(str(error))
    else:
        results.put("no error")

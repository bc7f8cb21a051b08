"""Sums over ranks on GPUs: two processes that share one GPU, two on GPUs of their own, and two streams of a process.

Processes that share a GPU take turns on it, a few milliseconds each, so a meeting takes as long."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_ranks
import pytest
import torch
from peer_cases import Case, Tensors, check, local_group, new_blocks, results

from baton.kernels.ranks.all_reduce import CONTROL

BF16, FP16, FP32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
CASES = [
    *(Case("sum", (num_rows, 4096), dtype) for num_rows in (1, 64, 8192) for dtype in (FP32, BF16)),
    *(Case("sum_norm_", (num_rows, 4096), dtype) for num_rows in (1, 64, 8192) for dtype in (FP32, BF16)),
    Case("sum", (33, 4096), FP16),
    Case("sum", (3, 1001), BF16),
    Case("sum", (129, 77), FP32),
    Case("sum", (0, 4096), BF16),
    Case("sum", (7, 3), INT64),
    Case("max", (64,), INT64),
    Case("max", (4096, 5), INT64),
    Case("max", (64, 4096), BF16),
    Case("gather", (64, 4096), BF16),
    Case("gather", (5, 33), FP32),
    Case("gather", (6, 2), INT64),
    Case("gather_columns", (1, 64128), BF16),
    Case("gather_columns", (64, 64128), BF16),
    Case("gather_columns", (7, 48), FP32),
    Case("exchange_columns", (64, 64128), BF16),
    Case("exchange_columns", (70, 33), FP32),
    Case("reduce_scatter", (64, 4096), BF16),
    Case("reduce_scatter", (0, 4096), BF16),
    Case("equal_scatter", (6 * 64, 4096), BF16),
    Case("equal_scatter", (6, 4096), FP32),
    Case("equal_scatter", (6 * 1024, 4096), BF16),
    Case("reduce_scatter_norm_", (6, 4096), BF16, num_parts=4),
    Case("reduce_scatter_norm_", (6 * 64, 4096), BF16),
    Case("reduce_scatter_norm_", (6 * 1024, 4096), BF16),
    Case("reduce_scatter_norm_", (12, 1001), FP16),
    Case("reduce_scatter_norm_", (0, 4096), BF16),
    Case("reduce_scatter_norm_", (6, 16384), BF16),  # a slot does not hold a row for each rank
    Case("all_to_all", (64, 129), FP32),
    Case("sum_norm_", (5, 1001), BF16),
    Case("sum_norm_", (66, 300), FP16),
    Case("sum_norm_", (0, 4096), BF16),
    Case("sum_norm_", (1, 4096), BF16, num_parts=4),
    Case("sum_norm_", (64, 5120), BF16, num_parts=2),
    Case("sum_norm_", (2, 16384), BF16),
    Case("sum_norm_", (2, 20000), BF16),  # a row that no slot holds
    Case("sum", (1, 4096), BF16),
]
REPLAYS = 200


def devices() -> list[Any]:
    two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
    return [
        pytest.param(["cuda:0"], id="one-gpu"),
        pytest.param(["cuda:0", "cuda:1"], marks=two, id="two-gpus"),
    ]


def run_ranks(
    function: Callable[..., None], meeting: Path, on: list[str], *args: Any, num_answers: int = 2, size: int = 2
) -> dict[int, tuple[int, list[str], dict[str, float]]]:
    """Return the answers of the ranks: process id, errors, seconds."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(
            target=function, args=(rank, size, str(meeting), on[rank % len(on)], answers, *args), daemon=True
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    found = {}
    try:
        end = time.monotonic() + 400
        while len(found) < num_answers and time.monotonic() < end:
            try:
                rank, *answer = answers.get(timeout=1)
                found[rank] = tuple(answer)
            except queue.Empty:
                if all(each.exitcode is not None for each in ranks):
                    break
        for each in ranks:
            each.join(20 if len(found) == num_answers else 0)
        assert len(found) == num_answers, [each.exitcode for each in ranks]
        return found
    finally:
        for each in ranks:
            each.kill()
            each.join()


@pytest.mark.parametrize("on", devices())
def test_every_operation_has_the_bits_of_the_specification(tmp_path: Path, on: list[str]) -> None:
    found = run_ranks(cuda_ranks.run_cases, tmp_path / "meeting", on, CASES)
    assert len({pid for pid, _, _ in found.values()}) == 2
    for rank, (_, errors, seconds) in found.items():
        print(rank, *(f"{case}: {each * 1e3:.1f} ms" for case, each in seconds.items()), sep="\n    ")
        assert not errors, errors


def test_three_ranks_on_one_gpu(tmp_path: Path) -> None:
    found = run_ranks(cuda_ranks.run_cases, tmp_path / "meeting", ["cuda:0"], CASES[6:], num_answers=3, size=3)
    assert not any(errors for _, errors, _ in found.values()), found


@pytest.mark.parametrize("on", devices())
def test_a_graph_is_replayed_with_changing_inputs(tmp_path: Path, on: list[str]) -> None:
    found = run_ranks(cuda_ranks.run_graph, tmp_path / "meeting", on, REPLAYS)
    assert not any(errors for _, errors, _ in found.values()), found


@pytest.mark.parametrize(
    ("how", "least_s", "most_s"),
    [
        ("dies", 2.5, 6.0),
        ("dies in a wait", 2.5, 6.0),
        ("does not come", 2.5, 6.0),
        ("is abandoned", 0.3, 2.0),
    ],
)
def test_the_loss_of_a_rank_is_noticed(tmp_path: Path, how: str, least_s: float, most_s: float) -> None:
    """The limit is 3 s. The host ends the wait sooner if it knows."""
    found = run_ranks(cuda_ranks.lose_rank, tmp_path / "meeting", ["cuda:0"], how, num_answers=1)
    _, errors, seconds = found[0]
    assert errors and "waited too long for another rank" in errors[0], found
    assert least_s < seconds["noticed"] < most_s, seconds


def test_two_streams_of_one_process() -> None:
    """Each stream replays a graph of its rank, many meetings without a pause: slots are not overwritten too early."""
    blocks = new_blocks(2, "cuda")
    groups = [local_group(rank, blocks, int(10e9)) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in groups]
    cases = [
        Case("sum", (70, 4096), BF16),
        Case("sum_norm_", (64, 4096), BF16),
        Case("sum_norm_", (1, 4096), BF16),
        Case("sum", (700, 4096), BF16),
    ]
    inputs = [[Tensors.of(case, rank, "cuda") for case in cases] for rank in range(2)]
    starts = [case.hidden().cuda() for case in cases]

    def work(rank: int) -> list[list[torch.Tensor]]:
        found = []
        for case, tensors, start in zip(cases, inputs[rank], starts, strict=True):
            if tensors.hidden is not None:
                tensors.hidden.copy_(start)
            found.append(results(case, groups[rank], tensors))
        return found

    for group, stream, rank in zip(groups, streams, range(2), strict=True):  # compile; nobody waits
        group._blocks.control[CONTROL.has_failed] = 1
        with torch.cuda.stream(stream):
            work(rank)
        torch.cuda.synchronize()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in groups], []
    for graph, stream, rank in zip(graphs, streams, range(2), strict=True):
        with torch.cuda.graph(graph, stream=stream):
            outs.append(work(rank))
    for group in groups:
        group._blocks.control[CONTROL.has_failed] = 0
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for rank, group in enumerate(groups):
        group.check()
        for case, actual in zip(cases, outs[rank], strict=True):
            check(case, rank, 2, [each.cpu() for each in actual])

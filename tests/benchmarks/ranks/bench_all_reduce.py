"""Sums over two ranks with residual and norm: microseconds per call inside a CUDA graph.

    python tests/benchmarks/ranks/bench_all_reduce.py [--rows 1 4 16 64] [--size 4096] [--json FILE]

    one launch   two ranks on one GPU: every launch has the lanes of both, so they surely run at once. Their blocks lie
                 in the same memory, so no time of a link is in it: the figures are what the kernel costs by itself,
                 flags included
    processes    two ranks in processes of their own with a GPU each (only with two GPUs), beside NCCL

    norm          `add_rms_norm_` of one GPU without a sum: what a node of one rank does at this place
    sum           `all_reduce`
    sum and norm  `all_reduce_norm_`
    with parts    the same, of a product that leaves 4 float32 parts to be summed

A call's time is that of a graph of 200 calls over their number, the median of 9 replays.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import flags, report

from baton.engine.ranks.group import CpuGroup
from baton.engine.state.mapped_blocks import MappedBlocks
from baton.kernels.products.triton_norm import add_rms_norm_
from baton.kernels.ranks.all_reduce import BLOCK_BYTES, CONTROL, PeerBlocks
from baton.kernels.ranks.triton_all_reduce import _launch, all_reduce, all_reduce_norm_, tile_size

DTYPE = torch.bfloat16
NUM_CALLS, NUM_REPLAYS, NUM_PARTS = 200, 9, 4
LIMIT_NS = 20_000_000_000
Call = Callable[[], object]


def calls(num_rows: int, size: int, blocks: PeerBlocks) -> dict[str, Call]:
    """Return the calls of one rank by name. All ranks have the same, in the same order."""
    device = blocks.own.device
    x, hidden = (torch.randn(num_rows, size, dtype=DTYPE, device=device) for _ in range(2))
    weight = torch.ones(size, dtype=DTYPE, device=device)
    parts = torch.randn(NUM_PARTS, num_rows, size, device=device)
    return {
        "norm": lambda: add_rms_norm_(hidden, x, weight, 1e-5),
        "sum": lambda: all_reduce(x, blocks),
        "sum and norm": lambda: all_reduce_norm_(hidden, x, weight, 1e-5, blocks),
        "with parts": lambda: all_reduce_norm_(hidden, parts, weight, 1e-5, blocks),
    }


def captured(call: Call, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(NUM_CALLS):
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, before: Call = lambda: None) -> float:
    """Return the time of a call in the graph. `before` is called before each replay."""
    times = []
    for _ in range(NUM_REPLAYS + 1):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / NUM_CALLS * 1e3)
    return statistics.median(times[1:])


def launch_both(x: Tensor, hidden: Tensor, weight: Tensor, blocks: PeerBlocks, *, norms: bool) -> None:
    """Launch a sum of both ranks: `x` [2, num_parts, num_rows, size], `hidden` [2, num_rows, size]."""
    num_rows, size = hidden.shape[1:]
    num_elements, out = num_rows * size, torch.empty_like(hidden)
    if not norms:
        size = tile_size(num_elements, x.itemsize)
        num_rows = triton.cdiv(num_elements, size)
    norm = (hidden, weight, 1e-5) if norms else None
    _launch(x, blocks, out, num_rows, size, num_elements, "sum", norm, x.shape[1], num_ranks=2)


def bench_one_gpu(row_counts: Sequence[int], size: int) -> list[dict[str, Any]]:
    device = torch.device("cuda:0")
    owns = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    control = torch.zeros(len(CONTROL), dtype=torch.int64, pin_memory=True)
    control[CONTROL.limit] = LIMIT_NS
    blocks = PeerBlocks(0, torch.tensor([own.data_ptr() for own in owns], device=device), owns[0], control)
    weight, stream, results = torch.ones(size, dtype=DTYPE, device=device), torch.cuda.Stream(), []
    for num_rows in row_counts:
        x, hidden = (torch.randn(2, num_rows, size, dtype=DTYPE, device=device) for _ in range(2))
        parts = torch.randn(2, NUM_PARTS, num_rows, size, device=device)
        ours: dict[str, Call] = {
            "norm": partial(add_rms_norm_, hidden[0], x[0], weight, 1e-5),
            "sum": partial(launch_both, x.unsqueeze(1), hidden, weight, blocks, norms=False),
            "sum and norm": partial(launch_both, x.unsqueeze(1), hidden, weight, blocks, norms=True),
            "with parts": partial(launch_both, parts, hidden, weight, blocks, norms=True),
        }
        for name, call in ours.items():
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            us = replay_us(captured(call, stream))
            assert not control[CONTROL.has_failed], f"{name}: a rank waited too long"
            results.append({"ranks": "one launch", "name": name, "rows": num_rows, "us": us})
    return results


def bench_rank(rank: int, meeting: str, row_counts: Sequence[int], size: int, answers: Any) -> None:
    """Measure as one of two ranks with a GPU each."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    host = CpuGroup(rank, 2, Path(meeting))
    memory = MappedBlocks(host, device, LIMIT_NS / 1e9)
    nccl = dist.new_group(backend="nccl", device_id=device)
    stream, results = torch.cuda.Stream(), []
    for num_rows in row_counts:
        x = torch.randn(num_rows, size, dtype=DTYPE, device=device)
        hidden, weight = torch.zeros_like(x), torch.ones(size, dtype=DTYPE, device=device)

        def with_nccl(x: Tensor = x) -> None:
            dist.all_reduce(x, group=nccl)

        def with_nccl_and_norm(x: Tensor = x, hidden: Tensor = hidden, weight: Tensor = weight) -> None:
            dist.all_reduce(x, group=nccl)
            add_rms_norm_(hidden, x, weight, 1e-5)

        ours = calls(num_rows, size, memory.blocks)
        for name, call in (ours | {"NCCL": with_nccl, "NCCL, then norm": with_nccl_and_norm}).items():
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            us = replay_us(captured(call, stream), lambda: host.sum(torch.zeros(1)))
            results.append({"ranks": "two processes", "name": name, "rows": num_rows, "us": us})
    assert not memory.blocks.control[CONTROL.has_failed], "a rank waited too long"
    answers.put((rank, results))
    host.sum(torch.zeros(1))
    memory.close()
    os._exit(0)  # NCCL's own end may wait for the other rank


def bench_processes(row_counts: Sequence[int], size: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (f"{folder}/meeting", row_counts, size, answers)
        ranks = [context.Process(target=bench_rank, args=(rank, *args), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        try:
            return dict(answers.get(timeout=300) for _ in ranks)[0]
        finally:
            for rank in ranks:
                rank.kill()


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--size", type=int, default=4096)
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    print(f"{num_gpus} x {torch.cuda.get_device_name()}, bfloat16, rows of {options.size}")
    results = bench_one_gpu(options.rows, options.size)
    if num_gpus > 1:
        results += bench_processes(options.rows, options.size)
    report(options, "all-reduce", results, unit="us", about={"size": options.size})


if __name__ == "__main__":
    main()

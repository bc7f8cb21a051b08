"""Ranks in processes of their own whose GPUs map each other's memory. Each function runs in such a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peer_cases import Case, Tensors, check, results, run

from baton.engine.ranks.cuda_group import CudaGroup
from baton.engine.ranks.group import CpuGroup
from baton.engine.state.mapped_blocks import MappedBlocks

LIMIT_S = 60.0


def meet(rank: int, size: int, meeting: str, device: str, limit_s: float = LIMIT_S) -> CudaGroup:
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    host = CpuGroup(rank, size, Path(meeting))
    return CudaGroup(host, MappedBlocks(host, torch.device(device), limit_s))


def run_cases(rank: int, size: int, meeting: str, device: str, answers: Any, cases: Sequence[Case]) -> None:
    """Do all cases, and answer with what is wrong with the results, and how long each took."""
    group = meet(rank, size, meeting, device)
    errors, seconds = [], {}
    for case in cases:
        started = time.monotonic()
        actual = run(case, group, device)
        seconds[str(case)] = time.monotonic() - started
        try:
            group.check()
            check(case, rank, size, actual)
        except (AssertionError, RuntimeError) as error:
            errors.append(f"{case}: {error}")
    host = group.max(torch.tensor([rank]))  # numbers of the host go beside the GPU
    if host.tolist() != [size - 1]:
        errors.append(f"host numbers: {host}")
    answers.put((rank, os.getpid(), errors, seconds))
    group.max(torch.zeros(1))  # nobody leaves before
    group.close()


def run_graph(rank: int, size: int, meeting: str, device: str, answers: Any, num_replays: int) -> None:
    """Capture some operations, and replay them with inputs of their own each time."""
    group = meet(rank, size, meeting, device)
    cases = [
        Case("sum_norm_", (3, 4096), torch.bfloat16),
        Case("sum", (70, 300), torch.bfloat16),
        Case("max", (5, 1), torch.int64),
        Case("gather", (6, 128), torch.float32),
        Case("sum_norm_", (1, 4096), torch.bfloat16, num_parts=4),
        Case("reduce_scatter_norm_", (6, 4096), torch.bfloat16, num_parts=4),
        Case("equal_scatter", (12, 4096), torch.bfloat16),
    ]
    inputs = [Tensors.of(case, rank, device) for case in cases]

    def all_results() -> list[list[torch.Tensor]]:
        return [results(case, group, tensors) for case, tensors in zip(cases, inputs, strict=True)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        all_results()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = all_results()
    errors: list[str] = []
    for seed in range(num_replays):
        for case, tensors in zip(cases, inputs, strict=True):
            tensors.fill(case, rank, seed)
        graph.replay()
        if seed % 3 == 0:  # an operation outside the graph takes part in the same counts
            run(cases[1], group, device)
        torch.cuda.synchronize()
        try:
            group.check()
            for case, actual in zip(cases, out, strict=True):
                check(case, rank, size, [each.cpu() for each in actual], seed)
        except (AssertionError, RuntimeError) as error:
            errors.append(f"replay {seed}: {error}")
            break
    answers.put((rank, os.getpid(), errors, {}))
    group.max(torch.zeros(1))
    group.close()


def lose_rank(rank: int, size: int, meeting: str, device: str, answers: Any, how: str) -> None:
    """Let rank 1 die, or never come, and answer with the time after which rank 0 has noticed, and with what error."""
    group = meet(rank, size, meeting, device, limit_s=3.0)
    x = torch.ones(64, 4096, device=device)
    group.sum(x)
    torch.cuda.synchronize()
    group.check()
    if rank == 1:
        if how == "dies in a wait":
            group.sum(x)
            group.sum(x)  # rank 0 does one operation less
        time.sleep(0.5)
        if how == "does not come":
            time.sleep(8)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "dies in a wait":
        group.sum(x)
        torch.cuda.synchronize()
        time.sleep(1.0)
    started = time.monotonic()
    if how == "is abandoned":
        threading.Timer(0.5, group.abandon).start()
    for _ in range(20):  # only the first one waits
        group.sum(x)
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    try:
        group.check()
    except RuntimeError as error:
        answers.put((rank, os.getpid(), [str(error)], {"noticed": seconds}))
    else:
        answers.put((rank, os.getpid(), [], {"noticed": seconds}))
    torch.ones(3, device=device).sum().item()  # the device works still

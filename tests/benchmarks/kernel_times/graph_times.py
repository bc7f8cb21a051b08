"""Times of kernels in CUDA graphs: the frame of the programs beside this file.

A kernel is measured by a graph of its calls. They go round copies of what it reads, so many that their data exceed the
L2 cache several times (`copies`), except where a decode step has its inputs in L2. A time is the median replay, divided
by the number of calls. The result is checked before; a wrong one ends the program with an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import flags, report

COLD_BYTES = 500e6  # ten times the L2 cache
BYTES_PER_S, FLOP_PER_S = 4.7e12, 802e12  # of an H200: a streaming sum, a large matrix product
REPLAYS = 15
IS_TIMED = torch.cuda.is_available()


class Kernel(NamedTuple):
    """A kernel at one shape."""

    name: str
    calls: Sequence[Callable[[], object]]
    num_bytes: float = 0.0  # that a call must move
    num_flop: float = 0.0
    check: Callable[[], float | None] | None = None  # raises AssertionError; may return an error to print
    num_rounds: int = 1  # of all calls in a graph


def measure(
    doc: str | None,
    figure: str,
    parts: dict[str, Callable[[argparse.Namespace], Iterable[Kernel]]],
    **numbers: Sequence[int],
) -> None:
    """Run a program: `--only` chooses parts. Each of `numbers` is a flag with several values, such as `--rows 1 8`."""
    parser = flags(doc)
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    for name, values in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, nargs="+", default=list(values))
    options = parser.parse_args()
    print(torch.cuda.get_device_name() if IS_TIMED else "no GPU: results are compared, nothing is timed")
    with torch.inference_mode():
        found = (timed(part, kernel) for part in options.only for kernel in parts[part](options))
        report(options, figure, found, unit="us")


def timed(part: str, kernel: Kernel) -> dict[str, Any]:
    """Return the row of a kernel."""
    error = None if kernel.check is None else kernel.check()
    row: dict[str, Any] = {"part": part, "kernel": kernel.name, "error": error}
    if not IS_TIMED:
        return row
    us = microseconds(kernel.calls, kernel.num_rounds)
    floor = 1e6 * max(kernel.num_bytes / BYTES_PER_S, kernel.num_flop / FLOP_PER_S)
    row |= {"us": us, "GB/s": kernel.num_bytes / us / 1e3 or None, "TFLOP/s": kernel.num_flop / us / 1e6 or None}
    return row | {"of the floor": us / floor if floor else None}


def microseconds(calls: Sequence[Callable[[], object]], num_rounds: int = 1) -> float:
    """Return the time of a call: the graph holds `calls` `num_rounds` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still make what the calls read
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / (len(calls) * num_rounds)


def copies(num_bytes: float, least: int = 2, most: int = 64) -> int:
    """Return how many copies of so many bytes no cache holds."""
    return max(least, min(most, int(COLD_BYTES // num_bytes) + 1))


def each(call: Callable[[Any], object], inputs: Iterable[Any]) -> list[Callable[[], object]]:
    """Return calls that go round `inputs`."""
    return [lambda one=one: call(one) for one in inputs]


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype).mul_(scale)


def close(found: Callable[[], Tensor], expected: Callable[[], Tensor], tolerance: float = 2e-2) -> Callable[[], None]:
    """Return the check that two results are close."""

    def check() -> None:
        torch.testing.assert_close(found(), expected(), atol=tolerance, rtol=tolerance)

    return check


def relative(found: Callable[[], Tensor], exact: Callable[[], Tensor], tolerance: float) -> Callable[[], float]:
    """Return the check that gives the norm of the difference over that of the result."""

    def check() -> float:
        true = exact()
        error = float((found().to(true.dtype) - true).norm() / true.norm())
        assert error < tolerance, error
        return error

    return check


def same(
    found: Callable[[], Any], expected: Callable[[], Any], changed: Sequence[Tensor] = (), tolerance: float = 0.0
) -> Callable[[], None]:
    """Return the check that two calls give the same tensors, and change `changed` alike from the same start."""

    def check() -> None:
        before = [tensor.clone() for tensor in changed]
        results: list[list[Tensor]] = []
        for call in (expected, found):
            for tensor, start in zip(changed, before, strict=True):
                tensor.copy_(start)
            results.append([*_tensors(call()), *(tensor.clone() for tensor in changed)])
        for ours, theirs in zip(results[1][-len(results[0]) :], results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)

    return check


def _tensors(result: Any) -> Iterator[Tensor]:
    if result is not None:
        yield from [result] if isinstance(result, Tensor) else result

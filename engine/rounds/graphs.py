"""CUDA graphs of rounds: one for each bucket, number of steps and kind of sampling, replayed in one launch.

A graph holds `run_round` itself, or `catch_up`, over the bucket's static inputs and the slots. Capturing runs it over
padding alone, so it changes no sequence. Requests with different sampling share a few kinds: extra processing does not
change a row that did not ask for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...kernels.operations import captures
from ..progress import Progress, tracked
from ..sampling.state import KINDS, Needs, covering
from .capture import captured
from .inputs import InputBlock
from .sizes import round_sizes

logger = logging.getLogger(__name__)

Step = TypeVar("Step")  # which of its graphs: the draft shape of a round, the number of rows to catch up on
Result = TypeVar("Result")


def graph_sizes(kv: torch.Tensor, max_running: int) -> list[int]:
    """Return the buckets worth a graph, `round_sizes`; none if kernels would read values on the host."""
    return round_sizes(max_running) if captures(kv.device) else []


class _Key(NamedTuple, Generic[Step]):
    size: int  # of the bucket
    step: Step
    kind: Needs


@dataclass(frozen=True, slots=True, eq=False)
class _Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    result: Result  # static tensors that every replay writes


class RoundGraphs(Generic[Step, Result]):
    """Owns the graphs of one function. Graphs share their inputs on the device and their memory with other
    `RoundGraphs` that get the same: one graph runs at a time."""

    def __init__(
        self,
        name: str,
        run: Callable[[InputBlock, Step, Needs], Result],
        inputs: Sequence[InputBlock],
        padding: int,
        pool: Any,
    ) -> None:
        """`run` reads nothing of a tensor on the host; `inputs` of each bucket, on the device; `padding` a slot; `pool`
        the memory (`torch.cuda.graph_pool_handle`)."""
        self._name = name
        self._run = run
        self._inputs = {each.num_seqs: each for each in inputs}
        self._padding = padding
        self._captured: dict[_Key[Step], _Captured[Result]] = {}
        self._pool = pool

    def capture(self, steps: Sequence[Step], progress: Progress | None = None) -> None:
        """Capture the graphs of all buckets and KINDS, largest first, so that the smaller ones fit in its memory.
        `progress` counts graphs. Raises torch.OutOfMemoryError."""
        torch.cuda.empty_cache()  # as each capture does, so that the difference is the graphs'
        started, before = time.monotonic(), torch.cuda.memory_reserved()
        for key in tracked(list(starmap(_Key, product(sorted(self._inputs, reverse=True), steps, KINDS))), progress):
            self._capture(key)
        logger.info(
            "%d graphs of %s captured in %.1f s, %d MiB",
            len(self._captured),
            self._name,
            time.monotonic() - started,
            (torch.cuda.memory_reserved() - before) >> 20,
        )

    def replay(self, inputs: InputBlock, step: Step, needs: Needs) -> Result:
        """Run the graph of a step, which has been captured. `inputs` have a bucket's size, and lie in host memory that
        stays as it is until the device has read it. The result is static: read it before the next replay."""
        key = _Key(inputs.num_seqs, step, covering(needs))
        self._inputs[key.size].copy_(inputs)
        found = self._captured[key]
        found.graph.replay()
        return found.result

    def _capture(self, key: _Key[Step]) -> None:
        inputs = self._inputs[key.size]
        inputs.fill_with_padding(self._padding)
        self._captured[key] = _Captured(*captured(lambda: self._run(inputs, key.step, key.kind), self._pool))

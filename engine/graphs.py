"""CUDA graphs of rounds: one for each bucket, number of steps and kind of sampling, replayed in one launch.

What is captured is `run_round` itself, or `catch_up`, over the bucket's static inputs and the slots. Capturing runs it
over padding alone, so it reaches nobody. Requests that ask for different steps of sampling share a few kinds: to do
more than a row asks for changes nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Generic, NamedTuple, TypeVar

import torch

from ..kernels import gpu
from ..metadata.wire.request import MAX_TOP_LOGPROBS
from .capture import captured
from .draft_shape import DraftShape
from .progress import Progress, tracked
from .round_inputs import RoundInputs
from .sampling_state import Needs

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

GREEDY = Needs()
SAMPLED = Needs(is_random=True)
FILTERED = Needs(is_random=True, ranks=True, cuts=True)
EVERYTHING = Needs(True, True, True, True, True, True, MAX_TOP_LOGPROBS)
KINDS = (GREEDY, SAMPLED, FILTERED, EVERYTHING)


def covering(needs: Needs) -> Needs:
    """The least of KINDS that does all that `needs` asks for."""
    if needs.processes or needs.num_logprobs is not None:
        return EVERYTHING
    if needs.ranks or needs.cuts:
        return FILTERED
    return SAMPLED if needs.is_random else GREEDY


def graph_sizes(kv: torch.Tensor, max_running: int) -> list[int]:
    """Buckets worth a graph: powers of two and `max_running`; none where kernels would read values on the host."""
    if not gpu.compiled(kv):
        return []
    return sorted(
        {*(1 << power for power in range(max_running.bit_length()) if 1 << power <= max_running), max_running}
    )


class CatchUp(NamedTuple):
    """Not a round: catching up on so many rows that rounds without drafts left out, before one that drafts."""

    num_rows: int


class _Key(NamedTuple):
    size: int  # of the bucket
    work: DraftShape | CatchUp
    kind: Needs


@dataclass(frozen=True, slots=True, eq=False)
class _Captured(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    result: Result  # static tensors that every replay writes


class RoundGraphs(Generic[Result]):
    """Owns the graphs, their inputs on the device and their memory, which all share: one runs at a time."""

    def __init__(
        self,
        run: Callable[[RoundInputs, DraftShape | CatchUp, Needs], Result],
        inputs: Sequence[RoundInputs],
        padding: int,
    ) -> None:
        """`run` reads nothing of a tensor on the host; `inputs` of each bucket, on the device; `padding` a slot."""
        self._run = run
        self._inputs = {len(each.slots): each for each in inputs}
        self._padding = padding
        self._captured: dict[_Key, _Captured[Result]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self, works: Sequence[DraftShape | CatchUp], kinds: Sequence[Needs], progress: Progress | None = None
    ) -> None:
        """All buckets, largest first, so that the smaller ones fit in its memory. `progress` counts graphs."""
        started, before = time.monotonic(), torch.cuda.memory_reserved()
        for key in tracked(list(starmap(_Key, product(sorted(self._inputs, reverse=True), works, kinds))), progress):
            self._capture(key)
        logger.info(
            "%d round graphs captured in %.1f s, %d MiB",
            len(self._captured),
            time.monotonic() - started,
            (torch.cuda.memory_reserved() - before) >> 20,
        )

    def replay(self, inputs: RoundInputs, work: DraftShape | CatchUp, needs: Needs) -> Result:
        """Of a bucket's size, in host memory that stays as it is until the device has read it. The result is static:
        read it before the next replay. A kind of sampling that nobody asked for before is captured now."""
        key = _Key(len(inputs.slots), work, covering(needs))
        found = self._captured.get(key) or self._capture(key)
        self._inputs[key.size].copy_(inputs)
        found.graph.replay()
        return found.result

    def _capture(self, key: _Key) -> _Captured[Result]:
        inputs = self._inputs[key.size]
        inputs.block.zero_()
        inputs.slots.fill_(self._padding)
        found = _Captured(*captured(lambda: self._run(inputs, key.work, key.kind), self._pool))
        self._captured[key] = found
        return found

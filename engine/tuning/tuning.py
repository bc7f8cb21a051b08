"""Choice of the fastest kernel for each small product of a model, measured on the GPU when a node starts.

A product of a decode step takes as long as reading its weights, so its best launch configuration depends on the shape,
the GPU and the number of rows (kernels/products/linear_configs.py). It also depends on the kernels around the product,
which may start early (`gpu.dependent_launch`) or add the parts of the product. So a candidate is timed in a chain of
products (product_chains.py), as a CUDA graph over the model's own weights. One shape after the other tries its
candidates, the largest first, while the others keep the best that is known.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...kernels.compile_ahead import compile_all
from ...kernels.products.linear_configs import (
    CHOSEN,
    ROW_CLASSES,
    Config,
    DoesNotFitError,
    ProductShape,
    candidates,
    default,
    trying,
)
from ..attention.context import AttentionContext
from ..device import kind_of
from ..models.decoder import DecoderModel
from ..progress import Progress
from ..ranks.ranks import Ranks
from .product_chains import Chain, Use, find_chains
from .tuning_file import TuningFile, decode, encode

logger = logging.getLogger(__name__)

BUDGET_S = 22.0  # of one start; shapes that are not measured by then take their defaults until the next start
NUM_REPLAYS = 6
NUM_FINALISTS = 4
NUM_ALIKE = 12  # candidates of 8 rows that 4 and 16 rows try, whose kernels are the same
NUM_TURNS = 5  # in which finalists are timed again, one after the other
LEAST_GAIN = 0.003  # of a chain's time, below which the default is kept
MOST_ERROR = 0.02  # of a candidate's result relative to torch's; rounding to 16 bits is a few thousandths
_ORDER = (1, 8, 4, 16, 32, 64)  # ROW_CLASSES, the most frequent first
_ALIKE = {4: 8, 16: 8}  # classes of rows whose kernels are those of another

Timer = Callable[[Callable[[], object]], Callable[[], float]]  # work -> a function that times it, in seconds


def tune(
    model: DecoderModel,
    drafter: object,
    step: Callable[[int], AttentionContext],
    progress: Progress | None = None,
) -> None:
    """Choose a configuration for every small product of a model and its drafter (or None), and keep it for the next
    start. Choices that the file has are taken from there. `step` returns the attention of a decode step over the
    model's pool, given its number of rows. `progress` counts shapes."""
    chains = find_chains(model, drafter)
    file = TuningFile.of(model.device)
    kept = file.read()
    CHOSEN.update(kept)
    if not _missing(chains):
        return
    with file.alone() as has_waited:
        if has_waited:
            kept = file.read()
            CHOSEN.update(kept)
        if not _missing(chains):
            return
        started, before = time.monotonic(), len(CHOSEN)
        num_sms = torch.cuda.get_device_properties(model.device).multi_processor_count
        with torch.inference_mode(), _enough_memory():
            measure(chains, step, GraphTimer(), num_sms, progress, started + BUDGET_S)
        num_measured, num_left = len(CHOSEN) - before, len(_missing(chains))
        took = f"{num_measured} products measured in {time.monotonic() - started:.1f} s"
        took += f", {num_left} left for the next start" if num_left else ""
        is_kept = file.write(kept | CHOSEN)
    logger.info("%s%s", took, f", kept in {file.path}" if is_kept else "")
    torch.cuda.empty_cache()


@contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        logger.warning("products that need more memory to be measured keep their defaults: %s", error)


def use_file(device: torch.device) -> None:
    """Take the choices of the file, and measure nothing."""
    CHOSEN.update(TuningFile.of(device).read())


def share_choices(ranks: Ranks) -> None:
    """Take the choices of rank 0 on all ranks. A product that every rank has whole, as a drafter's input projection,
    must have the same bits on each, so the same kernel computes it. All ranks must call it."""
    if ranks.group.size > 1:
        chosen = decode(ranks.tell(encode(dict(CHOSEN))))
        CHOSEN.clear()
        CHOSEN.update(chosen)


def _missing(chains: Sequence[Chain]) -> set[ProductShape]:
    """Return the shapes without a choice."""
    return {use.shape(rows) for chain in chains for use in chain.uses for rows in ROW_CLASSES} - set(CHOSEN)


def measure(
    chains: Sequence[Chain],
    step: Callable[[int], AttentionContext] | None,
    timer: Timer,
    num_sms: int,
    progress: Progress | None,
    deadline: float,
) -> None:
    """Write the fastest configuration of every shape that has none to CHOSEN. Shapes that are not begun by `deadline`
    (time.monotonic()) are left out."""
    num_total = len(_missing(chains))
    ranked: dict[ProductShape, list[Config | None]] = {}
    for num_rows in _ORDER:
        started, uses = time.monotonic(), {use.shape(num_rows): use for chain in chains for use in chain.uses}
        tried = {shape: _candidates(shape, ranked, num_sms) for shape in uses if shape not in CHOSEN}
        usable = _usable({shape: (uses[shape], configs) for shape, configs in tried.items()}, num_rows, deadline)
        attention, compiled = None if step is None else step(num_rows), time.monotonic()
        for chain in chains:
            shapes = {use.shape(num_rows) for use in chain.uses}.intersection(usable).difference(CHOSEN)
            weight = chain.uses[0].weight
            x = torch.randn(num_rows, chain.in_size, device=weight.device, dtype=weight.dtype)
            run = functools.partial(chain.run, x, torch.ones_like(x[0]), attention)
            for shape in sorted(shapes, key=lambda shape: (-shape.out_size * shape.in_size, shape)):
                if time.monotonic() > deadline:
                    return
                ranked[shape] = _ranked(shape, usable[shape], run, timer)
                CHOSEN[shape] = ranked[shape][0]
                if progress is not None:
                    progress(num_total - len(_missing(chains)), num_total)
        words = "%d candidates for %d rows: compiled in %.1f s, measured in %.1f s"
        num_tried, now = sum(map(len, tried.values())), time.monotonic()
        logger.debug(words, num_tried, num_rows, compiled - started, now - compiled)


def _candidates(
    shape: ProductShape, ranked: Mapping[ProductShape, list[Config | None]], num_sms: int
) -> list[Config | None]:
    """Return the configurations to try: the best of another number of rows if the kernels are the same."""
    before = ranked.get(shape._replace(max_rows=_ALIKE.get(shape.max_rows, 0)))
    if before is None:
        return candidates(shape, num_sms)
    return list(dict.fromkeys([default(shape), None, *before[:NUM_ALIKE]]))


def _ranked(
    shape: ProductShape, configs: Sequence[Config | None], run: Callable[[], object], timer: Timer
) -> list[Config | None]:
    """Return the configurations, that with which `run` is fastest first. The first of `configs` keeps its place unless
    another is faster by LEAST_GAIN."""
    timers: dict[Config | None, Callable[[], float]] = {}
    for config in configs:
        with trying({shape: config}):
            timers[config] = timer(run)
    times = {config: timed() for config, timed in timers.items()}
    order = sorted(times, key=times.__getitem__)
    finalists = dict.fromkeys([configs[0], *order[:NUM_FINALISTS]], math.inf)
    for _ in range(NUM_TURNS):
        for config, least in finalists.items():
            finalists[config] = min(least, timers[config]())
    best = min(finalists, key=finalists.__getitem__)
    first = best if finalists[best] < (1 - LEAST_GAIN) * finalists[configs[0]] else configs[0]
    return [first, *(config for config in order if config != first)]


def _usable(
    tried: Mapping[ProductShape, tuple[Use, Sequence[Config | None]]], num_rows: int, deadline: float
) -> dict[ProductShape, list[Config | None]]:
    """Compile all candidates in parallel, because that takes longer than measuring them, and launch them one after the
    other. Return those that fit the GPU and whose result is that of torch's product. After `deadline` none is
    compiled."""
    if any(kind_of(use.weight.device).is_apart for use, _ in tried.values()):  # the interpreter compiles nothing
        jobs = [partial(_run, use, num_rows, config, deadline) for use, configs in tried.values() for config in configs]
        compile_all(jobs, os.cpu_count() or 1)
    return {
        shape: [config for config in configs if _is_usable(use, num_rows, config, deadline)]
        for shape, (use, configs) in tried.items()
    }


@torch.inference_mode()
def _run(use: Use, num_rows: int, config: Config | None, deadline: float) -> Tensor | None:
    """Return the product of a fixed input by this configuration; None after `deadline`. Raises DoesNotFitError."""
    if time.monotonic() > deadline:
        return None
    weight = use.weight
    count = num_rows * weight.shape[1]
    x = torch.arange(count, device=weight.device, dtype=torch.float32).sin_().to(weight.dtype).view(num_rows, -1)
    norm = torch.ones_like(x[0])
    if kind_of(weight.device).is_apart:
        torch.cuda.synchronize()  # a kernel may read its norm before the kernel ahead of it ends
    with trying({use.shape(num_rows): config}):
        return use.run(x, norm).float()


def _is_usable(use: Use, num_rows: int, config: Config | None, deadline: float) -> bool:
    expected = _run(use, num_rows, None, deadline)
    try:
        actual = _run(use, num_rows, config, deadline)
    except DoesNotFitError:
        return False
    if expected is None or actual is None:
        return False
    error = float((actual - expected).norm() / expected.norm())
    if error > MOST_ERROR:
        shape = use.shape(num_rows)
        logger.warning("%s is not used for %s: its result differs from torch's by %.3f", config, shape, error)
    return not error > MOST_ERROR


class GraphTimer:
    """A `Timer` by CUDA graphs, which share one memory pool, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._anchor = self._captured(lambda: torch.zeros(1, device="cuda"))  # a pool without graphs is gone

    def __call__(self, run: Callable[[], object]) -> Callable[[], float]:
        """Capture `run`. Return a function that replays it NUM_REPLAYS times and returns the least time."""
        return functools.partial(_replay_seconds, self._captured(run))

    def _captured(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            run()
            graph.capture_end()
        return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    graph.replay()
    for event in events:
        event.record()
        graph.replay()
    events[-1].synchronize()
    return min(one.elapsed_time(two) for one, two in itertools.pairwise(events)) / 1e3

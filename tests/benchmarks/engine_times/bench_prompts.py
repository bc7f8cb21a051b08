"""Time one short prompt on a prefill node: by the host's clock, on the device, and by number of kernel launches.

If the kernels fill a small part of the time, CUDA graphs of prefill would pay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.metadata.wire.messages import Prefill
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids
from baton.prefill_node.chunk_work import submit
from baton.prefill_node.request import Request, new_request
from baton.prefill_node.scheduler import PrefillScheduler

LENGTHS = (16, 64, 256, 1024)
_WARM_UP = 5
_TIMES = 30


class _Call(NamedTuple):
    """The seconds of one call."""

    wall_s: float
    submit_s: float  # until the host begins to wait
    device_s: float  # from the first to the last thing that is asked of the device, by its own clock


def small_prompt(engine: Engine, num_tokens: int, times: int = _TIMES) -> dict[str, Any]:
    """Return medians of whole calls, each alone: chunk, first token, draft state.

    `idle_share` is the share of the host's time in which no kernel ran. The time is taken without a trace, the kernels
    with one. On a CPU there are no device figures.
    """
    prompts, scheduler = Prompts(engine), PrefillScheduler(engine.cache, 1, max(num_tokens, 8192))

    def call() -> _Call:
        return _prefill(prompts, scheduler, num_tokens)

    for _ in range(_WARM_UP):
        call()
    calls = [call() for _ in range(times)]
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "wall_ms": statistics.median(each.wall_s for each in calls) * 1e3,
        "submit_ms": statistics.median(each.submit_s for each in calls) * 1e3,
    }
    if engine.device.type == "cuda":
        row["device_ms"] = statistics.median(each.device_s for each in calls) * 1e3
        spans = _traced(call, times)
        row["kernels_ms"] = busy(spans) / times / 1e3
        row["launches"] = len(spans) / times
        row["idle_share"] = 1 - row["kernels_ms"] / row["wall_ms"]
    return row


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _prefill(prompts: Prompts, scheduler: PrefillScheduler, num_tokens: int) -> _Call:
    request = _request(prompts, num_tokens)
    scheduler.submit(request)
    scheduler.start()
    plan = scheduler.plan()
    assert len(plan) == 1, "the pool has no room for the prompt"
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if prompts.runs_ahead else []
    if marks:
        torch.cuda.synchronize()
        marks[0].record()
    begun = time.perf_counter()
    chunk = submit(prompts, plan).submitted
    chunk.draft()
    submitted = time.perf_counter()
    if marks:
        marks[1].record()
    for tails in chunk.tails:
        tails.first_tokens()
        tails.wait_rows()
    done = time.perf_counter()
    if marks:
        marks[1].synchronize()
    for unit in request.choices:
        request.end_ticket(unit)
    scheduler.remove(request)
    return _Call(done - begun, submitted - begun, marks[0].elapsed_time(marks[1]) / 1e3 if marks else 0.0)


def _request(prompts: Prompts, num_tokens: int) -> Request:
    ids = [at % min(1000, prompts.vocab_size) for at in range(num_tokens)]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    generation = GenerationRequest(prompt_ids=pack_ids(ids), params=params)
    peer = Peer(node_id="nobody", epoch="0" * 16)
    message = Prefill("router", "bench", 0, (0,), generation, peer)
    request = new_request(message, key=0, vocab_size=prompts.vocab_size, context_len=prompts.context_len)
    for unit in request.choices:
        request.open_ticket(unit)
    return request


def _traced(call: Callable[[], object], times: int) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of everything that the device did, copies included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    return [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if str(event.device_type).endswith("CUDA")
    ]

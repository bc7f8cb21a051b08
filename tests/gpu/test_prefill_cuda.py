"""A prefill node on CUDA submits a chunk, first tokens and drafts included, without waiting for the device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from gpu_nodes import SPECULATIONS
from waits import no_waiting

from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.metadata.wire.messages import Prefill
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids
from baton.prefill_node.chunk_work import ChunkUnderWay, submit
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.request import new_request
from baton.prefill_node.scheduler import PrefillScheduler, StepPlan

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
DEVICE = "cuda"
ASKS = (  # prompt's length, choices, parameters
    (7, 1, {"temperature": 0.0}),
    (40, 2, {"temperature": 1.0, "seed": 3, "top_p": 0.9, "num_logprobs": 2}),
    (65, 1, {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "min_tokens": 2, "stop_ids": (5,)}),
    (300, 1, {"temperature": 0.0}),  # does not end in the chunk
)


def make_plan(engine: Engine) -> tuple[PrefillScheduler, StepPlan]:
    """Plan 256 tokens of requests that a decode node takes over."""
    scheduler = PrefillScheduler(engine.cache, 64, 256)
    for index, (length, n, settings) in enumerate(ASKS):
        ids = [(7 * index + 3 * at) % 90 + 1 for at in range(length)]
        params = SamplingParams(max_tokens=4, **settings)
        generation = GenerationRequest(prompt_ids=pack_ids(ids), params=params, prompt_logprobs=index == 0)
        decode = Peer(node_id="d", epoch="e" * 16)
        message = Prefill("router", str(index), 0, tuple(range(n)), generation, decode)
        sizes = {"vocab_size": engine.model_config.vocab_size, "context_len": engine.context_len}
        request = new_request(message, key=index, **sizes)
        for unit in request.choices:
            request.open_ticket(unit)
        scheduler.submit(request)
    scheduler.start()
    return scheduler, scheduler.plan()


def read(chunk: ChunkUnderWay) -> list[Any]:
    """Return everything that it brought."""
    found: list[Any] = list(chunk.submitted.wait().logprobs)
    for tails in chunk.submitted.tails:
        found += tails.first_tokens()
        found += tails.wait_rows()
    return found


@pytest.mark.parametrize("name", SPECULATIONS)
def test_a_chunk_and_the_ends_of_its_prompts_are_submitted_without_waiting(name: str) -> None:
    settings = {"device": DEVICE, "dtype": "float32", "num_pages": 200, "prefix_cache": False, **SPECULATIONS[name]}
    engine = Engine(PrefillConfig(model=str(DEMO), **settings))
    prompts, expected = Prompts(engine), list[Any]()
    for is_checked in (False, True):
        scheduler, plan = make_plan(engine)
        with no_waiting() if is_checked else nullcontext():
            chunk = submit(prompts, plan)
            chunk.submitted.draft()
        found = read(chunk)
        expected = expected or found
        assert found == expected and len(found) == 4 + 3 + 3
        for request in list(scheduler):
            for unit in request.choices:
                request.end_ticket(unit)
            scheduler.remove(request)
            prompts.forget(request.key)

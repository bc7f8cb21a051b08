"""Each rank computes the chunk of its own prompts, and the node gets all results as those of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from solo import Solo
from thread_ranks import ThreadRanks

from baton.engine.ranks.own_work_prompts import OwnWorkPrompts
from baton.engine.work import ChunkReport, FirstTokens, HandoffRows, Scores
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.parts import PrefillParts
from baton.prefill_node.ranked_chunks import DoneChunk

from .conftest import MakeRequest

CHUNK, PAGE_SIZE, NUM_PAGES = 8, 4, 20


def test_reports_of_ranks_are_one_report() -> None:
    first, second = FirstTokens([1], [None]), FirstTokens([2], [None])
    rows = HandoffRows([b"row"])
    chunk = DoneChunk.of(
        [
            ChunkReport(Scores(2.0, 3.0, [[]]), [[first]], [[rows]]),
            ChunkReport(Scores(1.0, 5.0, []), [], []),
            ChunkReport(Scores(1.5, 4.0, [[], []]), [[second], []], [[rows], []]),
        ]
    )
    assert chunk.wait() == Scores(1.0, 5.0, [[], [], []]) and chunk.is_done
    assert [tails.first_tokens() for tails in chunk.tails] == [[first], [second], []]
    assert [tails.wait_rows() for tails in chunk.tails] == [[rows], [rows], []]


def test_ranks_compute_the_prompts_of_one_scheduler(make_request: MakeRequest, checkpoint: Callable[..., Path]) -> None:
    """First tokens are those of one process. One rank is idle in some steps."""
    model = checkpoint("llama")
    config = PrefillConfig(model=str(model), device="cpu", threads=1, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    one = Solo(model, speculative="ngram")
    requests = [make_request("r" * number, size) for number, size in enumerate((20, 6, 9, 1), start=1)]
    found: dict[str, int | None] = {}
    with ThreadRanks(2, config) as ranks:
        prompts = OwnWorkPrompts(ranks.executor)
        parts = PrefillParts.on_ranks(prompts, ranks.engine.caches, 3, CHUNK)
        scheduler, num_idle = parts.scheduler, 0
        for request in requests:
            scheduler.submit(request)
        assert scheduler.start() == requests
        while plan := scheduler.plan():
            num_idle += len({planned.request.rank for planned in plan}) == 1
            under_way = parts.submit(plan)
            assert len(under_way.submitted.wait().logprobs) == len(plan)
            for ends, tails in zip(under_way.ends, under_way.submitted.tails, strict=True):
                tails.draft()
                assert len(tails.wait_rows()) == len(ends)
                for end, first in zip(ends, tails.first_tokens(), strict=True):
                    found[end.request.rid] = first.token_ids[0]
            for request, _ in plan:
                if request.is_submitted:
                    scheduler.hand_over(request)
        assert prompts.keys == {request.key for request in requests}
        for request in requests:
            prompts.forget(request.key)
        assert not prompts.keys and not ranks.executor.own._prompts.keys
    assert {request.rank for request in requests} == {0, 1} and num_idle > 0
    for request in requests:
        assert found[request.rid] == one.start(request.token_ids, request.generation.params).generated[0]

"""The times that a pair of nodes reports for a request: chunks, pulls, rounds and preemptions add up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from node_pair import NodePair, params


@pytest.mark.parametrize("transport", ["local", "zmq"])
def test_chunks_and_pulls(checkpoint: Callable[..., Path], transport: str) -> None:
    settings = {"page_size": 4, "chunk_tokens": 6, "transport": transport}
    pair = NodePair(checkpoint("llama"), prefill=settings, decode=settings, overlaps=transport == "zmq")
    rng = random.Random(0)
    begun = time.monotonic()
    pair.submit("r", [rng.randrange(50) for _ in range(27)], params(10))
    ended = pair.run()["r", 0].ended
    took = time.monotonic() - begun
    done, admitted = pair.done["r"], pair.admitted[-1]
    pair.close()
    chunks = done.times.chunks
    assert [(chunk.num_chunks, chunk.num_tokens) for chunk in chunks] == [(1, 6)] * 4 + [(1, 3)]
    spent = sum(chunk.waited_s + chunk.compute_s for chunk in chunks)
    assert 0 < spent <= done.compute_s + 1e-6
    assert done.queue_s + done.compute_s + done.times.sample_s <= took
    assert (done.times.num_offers, done.times.early_pages) == (5, 6)
    assert admitted.times.transport == transport
    assert admitted.times.num_repeated == 0
    assert 0 <= admitted.times.last_s <= took
    assert 0 < admitted.times.admit_s <= took
    assert ended is not None
    assert (ended.num_steps, ended.preemptions) == (9, ())


def test_preemptions(checkpoint: Callable[..., Path]) -> None:
    settings = {"page_size": 4, "chunk_tokens": 8}
    pair = NodePair(checkpoint("llama"), prefill=settings, decode={**settings, "num_pages": 14})
    rng = random.Random(1)
    begun = time.monotonic()
    for index in range(4):
        pair.submit(f"r{index}", [rng.randrange(50) for _ in range(9)], params(20))
    results = pair.run()
    took = time.monotonic() - begun
    num_preemptions = pair.decode.stats().preemptions
    pair.close()
    ends = [result.ended for result in results.values() if result.ended is not None]
    told = [each for ended in ends for each in ended.preemptions]
    assert 0 < num_preemptions == sum(each.num_preemptions for each in told)
    for ended in ends:
        assert ended.num_steps == 19, "every round gave one token, before and after preemptions"
        spent = sum(each.ran_s + each.waited_s + each.recompute_s for each in ended.preemptions)
        assert spent <= took
        assert all(each.waited_s > 0 for each in ended.preemptions)
        assert sum(each.num_steps for each in ended.preemptions) <= 19

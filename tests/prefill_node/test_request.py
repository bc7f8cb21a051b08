"""A request on the prefill node: its choices, its block tables, and the times that it reports."""

from __future__ import annotations

import pytest

from baton.engine.engine import Engine
from baton.engine.state.prefix_cache import Lease
from baton.metadata.errors import RequestError
from baton.metadata.wire.messages import Prefill
from baton.metadata.wire.request import MAX_CHUNKS, GenerationRequest, SamplingParams, Unit, pack_ids
from baton.prefill_node.request import new_request

from .conftest import MakeRequest


def empty_lease(engine: Engine) -> Lease:
    return engine.cache.acquire([], "", 0)


def test_a_message_becomes_a_request(make_request: MakeRequest) -> None:
    request = make_request("r", 9, n=2, attempt=3, received=2)
    assert list(request.choices) == [Unit("r", 0, 3), Unit("r", 1, 3)]
    assert (request.prompt_len, request.num_received, len(request.token_ids)) == (7, 2, 9)
    assert [state.num_generated for state in request.choices.values()] == [2, 2]


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    generation = GenerationRequest(pack_ids([1, 1 << 20]), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError):
        new_request(Prefill("router", "r", 0, (0,), generation, None), key=0, vocab_size=512, context_len=64)


def test_choices_share_all_pages_but_the_tail(engine: Engine, make_request: MakeRequest) -> None:
    request = make_request("r", 16, n=3)
    request.start(empty_lease(engine), [1, 2, 3, 4], [11, 12, 21, 22], num_shared=2, num_cached=0)
    assert [request.block_table(index) for index in range(3)] == [[1, 2, 3, 4], [1, 2, 11, 12], [1, 2, 21, 22]]
    request.give_up_pages()
    assert request.lease is None and request.block_table(0) == []


def test_chunks_of_a_long_prompt_are_joined_in_the_report(engine: Engine, make_request: MakeRequest) -> None:
    num_chunks = 3 * MAX_CHUNKS
    request = make_request("r", num_chunks)
    request.start(empty_lease(engine), [], [], num_shared=0, num_cached=0)
    now = request.started
    for _ in range(num_chunks):
        request.submit_chunk(1)
        request.finish_chunk(1, now + 1.0, now + 3.0)
        now += 3.0
    assert request.is_submitted and request.is_computed
    chunks = request.times.chunks
    assert len(chunks) <= MAX_CHUNKS
    assert sum(chunk.num_chunks for chunk in chunks) == sum(chunk.num_tokens for chunk in chunks) == num_chunks
    assert sum(chunk.waited_s for chunk in chunks) == pytest.approx(num_chunks)
    assert sum(chunk.compute_s for chunk in chunks) == pytest.approx(2 * num_chunks)


def test_pages_offered_before_the_end_count_as_early(engine: Engine, make_request: MakeRequest) -> None:
    request = make_request("r", 12)
    request.start(empty_lease(engine), [1, 2, 3], [], num_shared=3, num_cached=0)
    request.finish_chunk(8, 0.0, 0.0)
    request.offer_pages(2)
    request.finish_chunk(4, 0.0, 0.0)
    request.offer_pages(3)
    assert (request.times.num_offers, request.times.early_pages, request.num_offered) == (2, 2, 3)

"""Fixtures of the prefill node's tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.engine import Engine
from baton.metadata.wire.messages import Prefill
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.request import Request, new_request

MakeRequest = Callable[..., Request]
DECODE_EPOCH = "d1" * 8  # the epoch of handoff_nodes.make_client


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    """A small model with 20 pages of 4 tokens. Tests of one file share it and give all pages back."""
    return Engine(PrefillConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=20))


@pytest.fixture
def make_request(engine: Engine) -> MakeRequest:
    """`make_request("r", 9, n=2)`: a request of nine tokens with two choices, which a decode node takes over."""
    keys = itertools.count()

    def make(
        rid: str,
        num_tokens: int,
        *,
        n: int = 1,
        attempt: int = 0,
        received: int = 0,
        has_decode: bool = True,
        cache_salt: str = "",
        prompt_logprobs: bool = False,
    ) -> Request:
        ids = [(7 * index + len(rid)) % 50 for index in range(num_tokens)]
        prompt_ids, received_ids = pack_ids(ids[: num_tokens - received]), pack_ids(ids[num_tokens - received :])
        params = SamplingParams(max_tokens=8, temperature=0.0)
        generation = GenerationRequest(prompt_ids, params, received_ids, cache_salt, prompt_logprobs)
        decode = Peer(node_id="decode", epoch=DECODE_EPOCH) if has_decode else None
        message = Prefill("router", rid, attempt, tuple(range(n)), generation, decode)
        sizes = {"vocab_size": engine.model_config.vocab_size, "context_len": engine.context_len}
        return new_request(message, key=next(keys), **sizes)

    return make

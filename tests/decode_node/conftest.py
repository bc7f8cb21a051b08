"""Fixtures of the decode node's tests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafters
import pytest
from matrix import Plain

from baton.decode_node.config import DecodeConfig
from baton.decode_node.sequence import Sequence, new_sequence
from baton.engine.engine import Engine
from baton.metadata.wire.messages import Compute, Reserve
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids

MakeSequence = Callable[..., Sequence]


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, Plain]]:
    """`plain(name)`: the model that a drafter is for, and its output without speculation, computed once per model."""
    plain_of = functools.cache(Plain.of)

    def get(name: str) -> tuple[Path, Plain]:
        model = drafters.target_of(name, checkpoint)
        return model, plain_of(model)

    return get


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    """A small model with 20 pages of 4 tokens. Tests of one file share it and give all pages back."""
    return Engine(DecodeConfig(model=str(checkpoint("llama")), device="cpu", threads=1, page_size=4, num_pages=20))


@pytest.fixture
def make_sequence(engine: Engine) -> MakeSequence:
    """`make_sequence("r", 9)`: a sequence with a prompt of nine tokens, younger than those made before. `is_local`: the
    decode node computes the prompt."""
    orders = itertools.count()

    def make(
        rid: str,
        num_tokens: int,
        *,
        choice: int = 0,
        attempt: int = 0,
        received: int = 0,
        max_tokens: int = 8,
        is_local: bool = False,
        **more: Any,
    ) -> Sequence:
        ids = [(7 * index + len(rid)) % 50 for index in range(num_tokens)]
        prompt_ids, received_ids = pack_ids(ids[: num_tokens - received]), pack_ids(ids[num_tokens - received :])
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)
        work = "router", rid, attempt, (choice,), GenerationRequest(prompt_ids, params, received_ids)
        message = Compute(*work) if is_local else Reserve(*work, Peer("prefill-0", "epoch"))
        sizes = {"vocab_size": engine.model_config.vocab_size, "context_len": engine.context_len}
        return new_sequence(message, choice, next(orders), **sizes)

    return make

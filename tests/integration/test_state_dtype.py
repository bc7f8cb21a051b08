"""Nodes whose recurrent states are in bfloat16: the engine against transformers with a cache that rounds at the ends of
blocks, and all ways to one text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import ASKS, PAGE_SIZE, Cell, Plain, run_cell
from model_pools import pages_for
from node_pair import node_pairs
from own_mtp import with_qwen_mtp
from thinned import thinned
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts import known_tokens
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.schema import differences, kv_layouts

LENGTH = 34
NEAR = 2e-3  # of logits up to 8: sums in another order round a number to the other neighbour, rarely
SHORT = {"state_dtype": "bfloat16"}


def engine_of(model: Path, **settings: Any) -> Engine:
    common: dict[str, Any] = {"device": "cpu", "threads": 1, "page_size": PAGE_SIZE, "num_pages": 80}
    return Engine(EngineConfig(model=str(model), **(common | settings)))


@torch.inference_mode()
def logits_of(engine: Engine, token_ids: list[int], chunk: int) -> Tensor:
    """Return the logits of all tokens, [num_tokens, vocab_size]."""
    (pages, tail), found = pages_for(engine.pool, len(token_ids)), []
    assert tail is not None
    for start in range(0, len(token_ids), chunk):
        some = token_ids[start : start + chunk]
        found.append(engine.forward([BatchRow(some, start, pages, len(some), tail=tail.pages)]))
    engine.pool.release(pages + tail.own)
    return torch.cat(found)


@torch.inference_mode()
def reference(model: Path, token_ids: list[int], block: int) -> Tensor:
    """Return the logits of transformers, whose states are rounded to bfloat16 after every `block` tokens."""
    own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    cache, found = DynamicCache(config=own.config), []
    for start in range(0, len(token_ids), block):
        given = torch.tensor([token_ids[start : start + block]])
        found.append(own(input_ids=given, past_key_values=cache, use_cache=True).logits[0])
        states = [each for layer in cache.layers for each in getattr(layer, "recurrent_states", {}).values()]
        assert len(states) == 3
        for state in states:
            state.copy_(state.bfloat16())
    return torch.cat(found)


@pytest.mark.parametrize("family", thinned(["qwen3_next", "qwen3_5_text", "kimi_linear"], lambda i, *_: i == 2))
def test_logits_are_those_of_a_cache_that_rounds_at_edges(family: str, checkpoint: Callable[..., Path]) -> None:
    """States that are rounded at every token, or not at all, give other logits."""
    model = checkpoint(family)
    token_ids = torch.randint(1, 512, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    at_edges, by_token = (reference(model, token_ids, block) for block in (PAGE_SIZE, 1))
    exact = logits_of(engine_of(model), token_ids, LENGTH)
    assert min(float((at_edges - each).abs().max()) for each in (by_token, exact)) > 10 * NEAR
    engine = engine_of(model, **SHORT)
    for chunk in (3, PAGE_SIZE, LENGTH):
        found = logits_of(engine, token_ids, chunk)
        assert float((found - at_edges).abs().max()) < NEAR, chunk


# --- nodes ---


@pytest.fixture(autouse=True)
def ranks_know_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are shorter than what ranks get to know around a chunk. Let them know what a drafter reads."""
    monkeypatch.setattr(known_tokens, "MARGIN", 4)


@pytest.mark.parametrize(
    ("family", "algorithm", "prefill", "decode"),
    thinned(
        [
            ("qwen3_next", "mtp", {"transport": "zmq"}, {"transport": "zmq"}),
            ("qwen3_5_text", "ngram", {"tp": 2}, {}),
            ("kimi_linear", "ngram", {}, {"tp": 2}),
        ],
        lambda i, *_: i == 0,
    ),
)
def test_output_does_not_depend_on_how_it_is_computed(
    family: str,
    algorithm: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Chunks of 5 tokens, batches, drafts, prefix hits, preemptions, and ranks that have some heads each."""
    model = checkpoint(family)
    if algorithm == "mtp":
        model = with_qwen_mtp(model, tmp_path / "model")
    plain = Plain.of(model, ASKS[:4], **SHORT)
    both = {"page_size": PAGE_SIZE, "num_pages": 190, "max_running": 10, "chunk_tokens": 5, **SHORT}
    both |= {"speculative": algorithm, "draft_steps": 3}
    with node_pairs() as start:
        pair = start(model, prefill={**both, **prefill}, decode={**both, **decode})
        for cell in (Cell(False, True, False), Cell(True, True, True)):
            run_cell(pair, cell, plain.cases)
        assert pair.decode.rounds.stats.num_drafted > 0


def test_states_have_half_the_bytes_and_unlike_nodes_refuse_each_other(checkpoint: Callable[..., Path]) -> None:
    short, exact = (engine_of(checkpoint("qwen3_next"), **each) for each in (SHORT, {}))
    sizes = [[layout.page_bytes for layout in kv_layouts(each.schema)] for each in (short, exact)]
    assert sizes[0][:-1] == sizes[1][:-1] and 2 * sizes[0][-1] == sizes[1][-1]
    assert [pool.dtype for pool in short.target_pools.further.values()][-1] == torch.bfloat16
    [line] = differences(short.schema, exact.schema)  # the sentence with which the nodes refuse each other
    assert line.startswith("target.delta_states: ") and "bfloat16) of 8 positions here" in line, line
    assert "float32) of 8 positions there" in line, line
    assert short.rounds_coarsely and exact.rounds_coarsely == exact.model_config.rounds_coarsely("float32")


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama", {}, "state_dtype is bfloat16, but LlamaForCausalLM has no recurrent states; leave --state-dtype out"),
        (
            "qwen3_next",
            {"speculative": "mtp", "draft_topk": 2},
            "draft_topk is 2, but Qwen3NextForCausalLM keeps states in bfloat16, and paths of a tree .* --draft-topk 1",
        ),
    ],
)
def test_what_has_no_states_in_bfloat16_is_refused(
    family: str, settings: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint(family)
    if "speculative" in settings:
        model = with_qwen_mtp(model, tmp_path / "model")
    with pytest.raises(ConfigError, match=words):
        engine_of(model, **SHORT, **settings)

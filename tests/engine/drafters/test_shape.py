"""Which chains and trees a configuration asks for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads import write_head

from baton.decode_node.config import DecodeConfig
from baton.engine.draft_shape import DraftShape
from baton.engine.engine import Engine
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema import differences


@pytest.fixture
def load(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Engine]:
    model = checkpoint("llama")

    def make(kind: str, speculative: str, **settings: Any) -> Engine:
        head = tmp_path / kind
        if kind not in ("ngram", "standalone", "none") and not head.exists():
            write_head(head, kind, model)
        draft = {"ngram": None, "none": None, "standalone": str(model)}.get(kind, str(head))
        common: dict[str, Any] = {"model": str(model), "device": "cpu", "threads": 1, "page_size": 4, "num_pages": 8}
        return Engine(DecodeConfig(**common, speculative=speculative, draft_model=draft, **settings))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({}, DraftShape(5)),
        ({"draft_steps": 3}, DraftShape(3)),
        ({"draft_steps": 3, "draft_tokens": 3}, DraftShape(3)),
        ({"draft_topk": 2}, DraftShape(5, 2, 18)),  # all candidates of so small a tree
        ({"draft_topk": 4, "draft_steps": 3}, DraftShape(3, 4, 24)),
        ({"draft_topk": 8}, DraftShape(5, 8, 63)),
        ({"draft_topk": 3, "draft_steps": 2, "draft_tokens": 5}, DraftShape(2, 3, 5)),
        ({"draft_topk": 3, "draft_steps": 1}, DraftShape(1, 3, 3)),
    ],
)
def test_sensible_values_where_unset(load: Callable[..., Engine], settings: dict[str, Any], shape: DraftShape) -> None:
    drafter = load("eagle", "eagle", **settings).drafter
    assert drafter is not None and drafter.shape == shape


@pytest.mark.parametrize(
    ("kind", "speculative", "settings", "words"),
    [
        ("eagle", "eagle", {"draft_steps": 0}, ("draft_steps 0", "--speculative none")),
        ("eagle", "eagle", {"draft_steps": 0, "draft_topk": 2}, ("draft_steps 0", "draft_topk 2", "tree")),
        ("eagle", "eagle", {"draft_steps": 16}, ("draft_steps 16", "1 to 15")),
        ("eagle", "eagle", {"draft_topk": 0}, ("draft_topk 0", "1 to 16")),
        ("eagle", "eagle", {"draft_topk": 17}, ("draft_topk 17", "1 to 16")),
        ("eagle", "eagle", {"draft_tokens": 9}, ("draft_tokens 9", "draft_topk 1", "has 5")),
        ("eagle", "eagle", {"draft_topk": 2, "draft_tokens": 4}, ("draft_tokens 4", "5 to 18")),
        ("eagle", "eagle", {"draft_topk": 2, "draft_tokens": 19}, ("draft_tokens 19", "5 to 18")),
        ("standalone", "standalone", {"draft_topk": 2}, ("standalone", "chains only", "draft_topk is 2")),
        ("ngram", "ngram", {"draft_topk": 2}, ("ngram", "chains only", "draft_topk is 2")),
        ("none", "none", {"draft_topk": 2}, ("none", "chains only", "draft_topk is 2")),
        ("mtp3-mimo", "mtp", {"draft_topk": 2}, ("3 MTP layers", "chains only", "draft_topk is 2")),
        ("mtp3-mimo", "mtp", {"draft_steps": 4}, ("draft_steps is 4", "3 MTP layers")),
    ],
)
def test_what_makes_no_chain_or_tree_is_refused(
    load: Callable[..., Engine], kind: str, speculative: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(kind, speculative, **settings)
    assert all(word in str(raised.value) for word in words), raised.value


def test_nodes_of_unlike_branches_do_not_pair(load: Callable[..., Engine]) -> None:
    chain, tree = load("eagle", "eagle").schema, load("eagle", "eagle", draft_topk=3).schema
    assert differences(chain, tree) == [
        "row order: first_token num_cached num_logprobs logprobs top_ids topk_index recurrent_hidden here, first_token"
        " num_cached num_logprobs logprobs top_ids topk_index topk_score recurrent_hidden there",
        "row.topk_index: 1 x int32 here, 3 x int32 there",
        "row.topk_score: absent here, 3 x float32 there",
    ]


def test_steps_are_each_nodes_own(load: Callable[..., Engine]) -> None:
    assert load("eagle", "eagle", draft_steps=2).schema == load("eagle", "eagle", draft_steps=5).schema

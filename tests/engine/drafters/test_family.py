"""State that each drafter declares to hand over, as the table of docs/architecture.md lists it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafters import ALL, settings, target_of
from heads import LAYERED
from layouts import LOOKAHEAD, SOURCES, WITH_DRAFT_POOL

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.family import Speculation
from baton.engine.drafters.speculation import read_speculation
from baton.metadata.handoff.schema.schema import differences, wire_name
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

KINDS = ("ngram", *ALL)


def read(
    kind: str, checkpoint: Callable[..., Path], directory: Path, **changes: Any
) -> tuple[Speculation, HandoffSchema]:
    model = target_of(kind, checkpoint)
    target = read_model_config(model)
    config = DecodeConfig(**(settings(kind, model, directory, steps=3) | changes))
    found = read_speculation(config, model, target, "float32")
    pool = PoolLayout(
        num_layers=target.num_layers, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, dtype="float32"
    )
    return found, found.schema(pool, 4, checksums=True)


@pytest.mark.parametrize("kind", KINDS)
def test_states_come_from_where_the_design_says(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    found, schema = read(kind, checkpoint, tmp_path)
    layout, sources = found.hidden, SOURCES[found.algorithm]
    num_layers = 3 if kind in LAYERED else 1
    assert layout.extend == sources.get("extend")
    # MiMo's layers are not chained: each takes the target's state
    assert layout.recurrent == (None if kind == "mtp3-mimo" else sources.get("recurrent"))
    assert layout.num_aux == sources.get("num_aux", 0)
    assert layout.num_target_rows == num_layers - 1
    assert schema.key_lookahead == LOOKAHEAD.get(found.algorithm, 0) * num_layers


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_has_what_the_drafter_hands_over(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    found, schema = read(kind, checkpoint, tmp_path)
    names = {field.name for field in schema.row}
    assert schema.algorithm == wire_name(found.algorithm)
    assert (schema.draft is not None) == (found.algorithm in WITH_DRAFT_POOL)
    assert bool(schema.frozen_layers) == (kind == "frozen-kv-mtp")
    assert ("topk_index" in names) == (kind not in ("ngram", "standalone", "frozen-kv-mtp"))
    assert ("target_rows" in names) == (found.hidden.num_target_rows > 0)
    assert ("recurrent_hidden" in names) == (found.hidden.recurrent is not None and "target_rows" not in names)


def test_nodes_of_unlike_branches_do_not_pair(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    _, chain = read("eagle", checkpoint, tmp_path)
    _, tree = read("eagle", checkpoint, tmp_path, draft_topk=3)
    assert differences(chain, tree) == [
        "row order: first_token num_cached num_logprobs logprobs top_ids topk_index recurrent_hidden here, first_token"
        " num_cached num_logprobs logprobs top_ids topk_index topk_score recurrent_hidden there",
        "row.topk_index: 1 x int32 here, 3 x int32 there",
        "row.topk_score: absent here, 3 x float32 there",
    ]


def test_steps_are_each_nodes_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    here, there = (read("eagle", checkpoint, tmp_path, draft_steps=steps)[1] for steps in (2, 5))
    assert here == there


def test_without_a_drafter_nothing_is_loaded(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama")
    none = read_speculation(DecodeConfig(speculative="none"), model, read_model_config(model), "float32")
    assert none.make is None and none.fingerprint is None and none.describe(model) == "none"

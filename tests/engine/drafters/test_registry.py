"""What a configuration and the model's directory make of the drafter, and of the schema that two nodes compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from handoff_nodes import make_client, make_server, named, peer_of, spin, unit
from heads import ALGORITHM, write_head

from baton.decode_node.config import DecodeConfig
from baton.engine.drafters.registry import Speculation, read_speculation
from baton.engine.model_config import ModelConfig
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.transfer import TransferFailed
from baton.metadata.wire.node_info import HandoffSchema, PoolLayout

Checkpoints = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", num_hidden_layers=3)


def frozen_schema(model: Path, directory: Path, layers: list[int]) -> HandoffSchema:
    """What a node with a frozen-KV head says when it meets another: all that differs is what its file names."""
    head = write_head(directory / f"frozen-{layers}", "frozen-kv-mtp", model, target_layers=layers)
    config = DecodeConfig(speculative="frozen-kv-mtp", draft_model=str(head))
    target = ModelConfig.from_dir(model)
    pool = PoolLayout(num_layers=3, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, dtype="float32")
    return read_speculation(config, model, target, "float32").schema(pool, 4, checksums=True)


def test_nodes_whose_heads_read_other_layers_refuse_each_other(model: Path, tmp_path: Path) -> None:
    """Same tensors, same settings: without the map in the schema they would pair, and draft from other layers."""
    here, there = (frozen_schema(model, tmp_path, layers) for layers in ([0, 2], [0, 1]))
    server, source = make_server(here)
    client, target = make_client(there)
    try:
        server.open(unit(), 1)
        client.claim(unit(), peer_of(server), 0, [3])
        events = spin([server, client], lambda events: named(events, TransferFailed), timeout_s=1.0)
        failed = named(events, TransferFailed)[0]
        assert failed.is_refused and "frozen_layers: 0, 2 here, 0, 1 there" in failed.reason, failed
    finally:
        for each in (*source, *target, server, client):
            each.close()


def fingerprint(model: Path, directory: Path, kind: str, **changes: Any) -> str | None:
    head = write_head(directory, kind, model, **changes)
    config = DecodeConfig(speculative=ALGORITHM[kind], draft_model=str(head))
    return read_speculation(config, model, ModelConfig.from_dir(model), "float32").fingerprint


UNLIKE = [
    ("mtp3-deepseek", {"mtp_chained": False}),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}),
    (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 0]}},
    ),
    ("eagle3", {"norm_before_residual": True}),
]


@pytest.mark.parametrize(
    ("kind", "changes"), UNLIKE, ids=lambda each: each if isinstance(each, str) else list(each)[-1]
)
def test_nodes_whose_heads_have_the_same_weights_and_other_settings_refuse_each_other(
    kind: str, changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """The schema does not show these settings: without them in the fingerprint the nodes would pair."""
    plain, again = (fingerprint(model, tmp_path / name, kind) for name in ("plain", "again"))
    other = fingerprint(model, tmp_path / "other", kind, **changes)
    assert plain == again and None not in (plain, other)
    server, source = make_server(fingerprints=("f" * 16, plain))
    client, target = make_client(fingerprints=("f" * 16, other))
    try:
        server.open(unit(), 1)
        client.claim(unit(), peer_of(server), 0, [3])
        events = spin([server, client], lambda events: named(events, TransferFailed), timeout_s=1.0)
        failed = named(events, TransferFailed)[0]
        assert failed.is_refused and f"draft weights: {plain} here, {other} there" in failed.reason, failed
    finally:
        for each in (*source, *target, server, client):
            each.close()


def test_a_head_of_other_weights_has_another_fingerprint(model: Path, tmp_path: Path) -> None:
    for kind in ("eagle", "frozen-kv-mtp"):
        assert fingerprint(model, tmp_path / f"{kind}0", kind) != fingerprint(
            model, tmp_path / f"{kind}1", kind, seed=1
        )


def test_drafting_from_the_own_text_has_no_fingerprint(model: Path) -> None:
    assert read(model, speculative="ngram").fingerprint is None


# --- what the model's directory recommends ------------------------------------------------------------------------


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A checkpoint that a test may add files to."""
    return make_checkpoint(tmp_path / "own", num_hidden_layers=3)


def recommend(model: Path, **fields: Any) -> None:
    (model / "speculation.json").write_text(json.dumps(fields))


def read(model: Path, **settings: Any) -> Speculation:
    return read_speculation(DecodeConfig(model=str(model), **settings), model, ModelConfig.from_dir(model), "float32")


def test_the_directory_says_how_nodes_speculate_that_are_not_told(own_model: Path) -> None:
    assert read(own_model).algorithm == "none"
    assert read(own_model).describe(own_model) == "none"
    head = write_head(own_model / "eagle", "eagle", own_model)
    assert read(own_model).algorithm == "none", "a drafter alone is no recommendation"
    recommend(own_model, speculative="eagle", draft_steps=4)
    chosen = read(own_model)
    assert (chosen.algorithm, chosen.shape.num_steps, chosen.draft_dir) == ("eagle", 4, head)
    assert chosen.describe(own_model) == "eagle, 4 steps, drafter eagle/"
    recommend(own_model, speculative="ngram")
    assert read(own_model).describe(own_model) == "ngram, 5 steps"


def test_a_recommended_mtp_head_drafts_a_step_a_layer_unless_the_file_says_less(own_model: Path) -> None:
    write_head(own_model / "mtp3", "mtp3-deepseek", own_model)
    recommend(own_model, speculative="mtp")
    assert read(own_model).describe(own_model) == "mtp, 3 steps, drafter mtp3/"
    recommend(own_model, speculative="mtp", draft_steps=1)
    assert read(own_model).describe(own_model) == "mtp, 1 step, drafter mtp3/"


def test_explicit_settings_win(own_model: Path, tmp_path: Path) -> None:
    write_head(own_model / "eagle", "eagle", own_model)
    recommend(own_model, speculative="eagle", draft_steps=4)
    assert read(own_model, speculative="none").algorithm == "none"
    assert read(own_model, speculative="ngram").shape.num_steps == 5, "the file's steps are of its own algorithm"
    assert read(own_model, speculative="eagle").shape.num_steps == 5
    assert read(own_model, draft_steps=2).describe(own_model) == "eagle, 2 steps, drafter eagle/"
    assert read(own_model, draft_topk=2).describe(own_model) == "eagle, 4 steps, 2 branches, drafter eagle/"
    other = write_head(tmp_path / "other", "eagle", own_model)
    told = read(own_model, speculative="eagle", draft_model=str(other))
    assert told.describe(own_model) == f"eagle, 5 steps, drafter {other}/"
    with pytest.raises(ConfigError, match=r"draft_model .*other needs --speculative"):
        read(own_model, draft_model=str(other))
    (own_model / "speculation.json").write_text("{")
    assert read(own_model, speculative="none").algorithm == "none", "a file that nobody asks is not read"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculative": "auto"}, "auto"),
        ({"speculative": "medusa"}, "medusa"),
        ({"draft_steps": 3}, "speculative"),
        ({"speculative": "ngram", "draft_steps": 0}, "draft_steps"),
        ({"speculative": "ngram", "draft_steps": 16}, "draft_steps"),
        ({"speculative": "ngram", "draft_step": 3}, "draft_step"),
    ],
)
def test_a_recommendation_that_is_none_is_refused_by_name(own_model: Path, fields: Any, words: str) -> None:
    recommend(own_model, **fields)
    with pytest.raises(ModelError, match=rf"speculation\.json: .*{words}"):
        read(own_model)


def test_a_recommended_drafter_must_be_there(own_model: Path) -> None:
    recommend(own_model, speculative="eagle")
    with pytest.raises(ConfigError, match=r"speculative eagle needs --draft-model DIR: .*own ships no drafter"):
        read(own_model)

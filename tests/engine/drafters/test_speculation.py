"""The chain or tree that a configuration asks for, and what is refused.

Nodes compare the fingerprints of their drafters and refuse each other if these differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handoff_nodes import check_refused, make_client, make_server
from heads import ALGORITHM, write_head

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.family import Speculation
from baton.engine.drafters.speculation import read_speculation
from baton.engine.pace.draft_length import DraftShape
from baton.metadata.errors import ConfigError

Checkpoints = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", num_hidden_layers=3)


def read(model: Path, **settings: Any) -> Speculation:
    return read_speculation(DecodeConfig(model=str(model), **settings), model, read_model_config(model), "float32")


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
def test_sensible_values_where_unset(settings: dict[str, Any], shape: DraftShape, model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, "eagle", model)
    assert read(model, speculative="eagle", draft_model=str(head), **settings).shape == shape


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        ("eagle", {"draft_steps": 0}, ("draft_steps 0", "--speculative none")),
        ("eagle", {"draft_steps": 0, "draft_topk": 2}, ("draft_steps 0", "draft_topk 2", "tree")),
        ("eagle", {"draft_steps": 16}, ("draft_steps 16", "1 to 15")),
        ("eagle", {"draft_topk": 0}, ("draft_topk 0", "1 to 16")),
        ("eagle", {"draft_topk": 17}, ("draft_topk 17", "1 to 16")),
        ("eagle", {"draft_tokens": 9}, ("draft_tokens 9", "draft_topk 1", "has 5")),
        ("eagle", {"draft_tokens": 4}, ("draft_tokens 4", "draft_topk 1", "has 5")),
        ("eagle", {"draft_topk": 2, "draft_tokens": 4}, ("draft_tokens 4", "5 to 18")),
        ("eagle", {"draft_topk": 2, "draft_tokens": 19}, ("draft_tokens 19", "5 to 18")),
        ("standalone", {"draft_topk": 2}, ("standalone", "chains only", "draft_topk is 2")),
        ("ngram", {"draft_topk": 2}, ("ngram", "chains only", "draft_topk is 2")),
        ("none", {"draft_topk": 2}, ("none", "chains only", "draft_topk is 2")),
    ],
)
def test_what_makes_no_chain_or_tree_is_refused(
    algorithm: str, settings: dict[str, Any], words: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    drafts = {"eagle": write_head(tmp_path, "eagle", model), "standalone": model}
    draft = str(drafts[algorithm]) if algorithm in drafts else None
    with pytest.raises(ConfigError) as raised:
        read(model, speculative=algorithm, draft_model=draft, **settings)
    assert all(word in str(raised.value) for word in words), raised.value


def fingerprint(model: Path, directory: Path, kind: str, **changes: Any) -> str | None:
    head = write_head(directory, kind, model, **changes)
    config = DecodeConfig(speculative=ALGORITHM[kind], draft_model=str(head))
    return read_speculation(config, model, read_model_config(model), "float32").fingerprint


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
    server, client = make_server(fingerprints=("f" * 16, plain)), make_client(fingerprints=("f" * 16, other))
    check_refused(server, client, f"draft weights: {plain} here, {other} there")


def test_a_head_of_other_weights_has_another_fingerprint(model: Path, tmp_path: Path) -> None:
    for kind in ("eagle", "frozen-kv-mtp"):
        assert fingerprint(model, tmp_path / f"{kind}0", kind) != fingerprint(
            model, tmp_path / f"{kind}1", kind, seed=1
        )


def test_drafting_from_the_own_text_has_no_fingerprint(model: Path) -> None:
    assert read(model, speculative="ngram").fingerprint is None

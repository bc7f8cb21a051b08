"""The drafter that a configuration and the model's directory name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, shard
from heads import write_head
from own_mtp import with_mtp

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.drafters.family import Speculation
from baton.engine.drafters.speculation import read_speculation
from baton.metadata.errors import ConfigError, ModelError


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A checkpoint that a test may add files to."""
    return make_checkpoint(tmp_path / "own", num_hidden_layers=3)


def recommend(model: Path, **fields: Any) -> None:
    (model / "speculation.json").write_text(json.dumps(fields))


def read(model: Path, **settings: Any) -> Speculation:
    return read_speculation(DecodeConfig(model=str(model), **settings), model, read_model_config(model), "float32")


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


def test_a_checkpoint_with_prediction_layers_drafts_by_them(own_model: Path, tmp_path: Path) -> None:
    """If config.json promises layers that the files do not hold, or the other way round, nothing is drafted."""
    source = make_checkpoint(tmp_path / "plain", "glm4_moe")
    assert read(source).algorithm == "none", "transformers writes num_nextn_predict_layers, and no layers"
    model = with_mtp(source, tmp_path / "model")
    for num_files in (1, 2):
        assert read(model).describe(model) == "mtp, 5 steps, by the model's own layers"
        assert read(model, speculative="mtp", draft_steps=2).draft_dir == model
        if num_files == 1:
            shard(model, 2)
    recommend(model, speculative="none")
    assert read(model).algorithm == "none"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    (model / "speculation.json").unlink()
    assert read(model).algorithm == "none"
    with pytest.raises(ConfigError, match="speculative mtp needs --draft-model"):
        read(own_model, speculative="mtp")


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

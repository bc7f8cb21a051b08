"""GLM-4.5's config.json. Its output is compared in test_qwen3_moe.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafted_text import check_drafted_text
from own_mtp import with_mtp
from ties import Reference

from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ModelError


def changed(source: Path, path: Path, **fields: Any) -> Path:
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_published_files_have_the_share_beside_the_other_fields(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Files from before `rope_parameters`; half of a head is rotated if they do not say."""
    source = checkpoint("glm4_moe", attention_bias=True)
    for fields, expected in (({"partial_rotary_factor": 0.5}, 12), ({}, 12), ({"partial_rotary_factor": 1.0}, None)):
        old = {"rope_parameters": None, "rope_theta": 1000000, "rope_scaling": None}
        config = read_model_config(changed(source, tmp_path / repr(fields), **old, **fields))
        assert (config.rotary_dim, config.rope.theta) == (expected, 1000000.0)
        assert (config.qkv_bias, config.attention_bias, config.qk_norm) == (True, False, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5 rotates 36 of 24 numbers of a head"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor = 0.3 rotates 7 of 24"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "partial_rotary_factor = 0.5 is not served beside"),
        ({"first_k_dense_replace": None, "n_group": 3}, r"n_group = 3 does not divide n_routed_experts \(7\)"),
    ],
)
def test_refusals_name_the_value(
    fields: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    fields = {"rope_parameters": None} | fields
    with pytest.raises(ModelError, match=words):
        read_model_config(changed(checkpoint("glm4_moe"), tmp_path / "model", **fields))


def test_its_own_layer_drafts_through_the_handoff(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With no setting at all. The text is the target's."""
    model = with_mtp(checkpoint("glm4_moe"), tmp_path / "model")
    reference = Reference(model)
    check_drafted_text(model, reference)
    assert reference.num_ties == 0

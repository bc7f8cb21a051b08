"""MiniMax-M2's config.json. Its output is compared in test_qwen3_moe.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.checkpoint.read_config import read_model_config
from baton.metadata.errors import ModelError


def test_published_files_name_the_numbers_that_are_rotated(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, path = checkpoint("minimax_m2"), tmp_path / "model"
    shutil.copytree(source, path)
    fields = json.loads((source / "config.json").read_text())
    fields |= {"rope_parameters": None, "rope_theta": 5000000, "rotary_dim": 8, "use_qk_norm": True}
    fields |= {"scoring_func": "sigmoid"}
    (path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(path)
    assert (config.rotary_dim, config.rope.theta, config.has_wide_norms, config.qk_norm) == (8, 5e6, True, False)
    assert config.experts is not None
    assert (config.experts.scoring, config.experts.has_bias, config.experts.inner_size) == ("sigmoid", True, 48)
    assert config.experts.layers == (0, 1) and config.experts.norm_topk_prob
    (path / "config.json").write_text(json.dumps(fields | {"scoring_func": "softmax"}))
    with pytest.raises(ModelError, match="scoring_func = 'softmax' is not served for this architecture; sigmoid is"):
        read_model_config(path)

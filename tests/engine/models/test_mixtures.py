"""The tensors that a mixture calls for, by the names of a family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from published_configs import PUBLISHED, write_config

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.weights import ListedWeights
from baton.engine.models.mixtures import MixtureNames, read_mixture


def names_of(published: str, tmp_path: Path, names: MixtureNames, **changes: Any) -> set[str]:
    config = read_model_config(write_config(tmp_path / published, PUBLISHED[published]))
    assert config.experts is not None
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, num_experts=1, **changes))
    listed = ListedWeights((), None)
    read_mixture(config, listed, "mlp", names)
    return {spec.name for spec in listed.specs}


def test_biases_and_shared_experts_are_read_if_the_file_promises_them(tmp_path: Path) -> None:
    experts = {f"mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")} | {"mlp.gate.weight"}
    assert names_of("Qwen3-30B-A3B", tmp_path, MixtureNames()) == experts
    shared = {f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    found = names_of("DeepSeek-V3", tmp_path, MixtureNames(), num_groups=1, num_active_groups=1)
    assert found == experts | shared | {"mlp.gate.e_score_correction_bias"}

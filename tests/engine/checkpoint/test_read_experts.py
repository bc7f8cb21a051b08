"""The settings of mixtures in config.json, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint.config_file import ConfigFile
from baton.engine.checkpoint.model_config import ExpertsConfig
from baton.engine.checkpoint.read_experts import num_experts_of, read_deepseek_experts
from baton.metadata.errors import ModelError

V2_LITE: dict[str, Any] = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
V3: dict[str, Any] = V2_LITE | {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def file(path: Path, fields: dict[str, Any]) -> ConfigFile:
    (path / "config.json").write_text(json.dumps(fields))
    return ConfigFile(path / "config.json")


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    expected = ExpertsConfig(64, 6, 1408, False, tuple(range(1, 27)), shared_size=2816)
    assert read_deepseek_experts(file(tmp_path, V2_LITE), "softmax") == expected


def test_a_file_that_does_not_say_which_layers_are_dense_is_refused(tmp_path: Path) -> None:
    nothing = {"first_k_dense_replace": None, "mlp_layer_types": None}
    with pytest.raises(ModelError, match="first_k_dense_replace = None must be a whole number of at least 0"):
        read_deepseek_experts(file(tmp_path, V2_LITE | nothing), "softmax")
    listed = {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] * 26 + ["sparse"]}
    assert read_deepseek_experts(file(tmp_path, V2_LITE | listed), "softmax").layers == (26,)


def test_deepseek_v2_has_groups_ranked_by_their_best_expert(tmp_path: Path) -> None:
    fields = V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}
    found = read_deepseek_experts(file(tmp_path, fields), "softmax")
    assert (found.num_groups, found.num_active_groups, found.num_ranking, found.has_bias) == (8, 3, 1, False)


def test_deepseek_v3(tmp_path: Path) -> None:
    expected = ExpertsConfig(
        256, 8, 2048, True, tuple(range(3, 61)), "sigmoid", True, 8, 4, num_ranking=2, scaling=2.5, shared_size=2048
    )
    assert read_deepseek_experts(file(tmp_path, V3), "sigmoid") == expected


def test_files_may_leave_settings_out(tmp_path: Path) -> None:
    fields = {name: V3[name] for name in V3 if name not in ("scoring_func", "topk_method", "n_group", "topk_group")}
    found = read_deepseek_experts(file(tmp_path, fields | {"n_shared_experts": None}), "sigmoid")
    assert (found.scoring, found.has_bias, found.num_groups, found.shared_size) == ("sigmoid", True, 1, 0)


def test_the_number_of_experts_has_two_spellings(tmp_path: Path) -> None:
    for name in ("num_experts", "num_local_experts"):
        assert num_experts_of(file(tmp_path, {name: 7})) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not served for this architecture; noaux_tc is"),
        ({"n_group": 7}, r"n_group = 7 does not divide n_routed_experts \(256\)"),
        ({"topk_group": 9}, r"topk_group = 9 is more than there are groups \(8\)"),
        ({"n_group": 64, "topk_group": 1}, "n_group = 64 leaves a token fewer than 8 experts to choose from"),
        ({"num_experts_per_tok": 257}, r"num_experts_per_tok = 257 is more than there are experts \(256\)"),
        ({"mlp_layer_types": ["dense"] * 60}, "mlp_layer_types = .* must list 61 layers, each dense or sparse"),
        ({"mlp_layer_types": ["sparse"] * 61}, r"mlp_layer_types = .* differs from first_k_dense_replace \(3\)"),
        ({"n_routed_experts": None}, "n_routed_experts = None must be a whole number"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_deepseek_experts(file(tmp_path, V3 | change), "sigmoid")


def test_another_score_than_that_of_the_family_is_refused(tmp_path: Path) -> None:
    for other in ("softmax", "tanh"):
        with pytest.raises(ModelError, match=f"scoring_func = '{other}' is not served for this architecture; sigmoid"):
            read_deepseek_experts(file(tmp_path, V3 | {"scoring_func": other}), "sigmoid")
    with pytest.raises(ModelError, match=r"topk_method = 'noaux_tc' is not served .*; greedy and group_limited_greedy"):
        read_deepseek_experts(file(tmp_path, V2_LITE | {"topk_method": "noaux_tc"}), "softmax")

"""MiMo-V2-Flash: its config.json and pools. test_odd_shapes.py compares its numbers and its text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_text import check_drafted_text
from node_pair import params
from own_mtp import OwnMtpOracle, with_mtp
from published_configs import PUBLISHED
from quantized import SCHEMES, RoundingReference, quantized
from recorded_roundings import recorded_roundings
from solo import Solo
from ties import Reference

from baton.engine.checkpoint.model_config import ModelConfig, RopeConfig, WindowConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.ranks.shares import check_shares
from baton.metadata.errors import ConfigError, ModelError
from baton.metadata.handoff.schema.schema import make_schema, page_bytes, pool_words, pools

MIMO = PUBLISHED["mimo-v2-flash"]
SHARES = (("full_attention", 0.334), ("sliding_attention", 0.5))
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return read_model_config(directory)


def test_a_published_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config = read(tmp_path, MIMO)
    assert (config.head_dim, config.value_dim, config.rotary_dim, config.value_scale) == (192, 128, 64, 0.707)
    assert config.sliding_window[:7] == (None, *[129] * 4, None, 129) and config.sliding_window[-1] is None
    assert (config.rope, config.rms_norm_eps) == (RopeConfig(theta=5e6), 1e-5)
    assert config.window == WindowConfig(RopeConfig(theta=1e4), 8, 192, has_pool=True)
    assert config.experts is not None and config.experts.layers == tuple(range(1, 48)) and config.experts.scaling == 1
    spelled = {
        key: value for key, value in MIMO.items() if not key.startswith(("swa_num", "swa_head", "swa_v", "hybrid"))
    }
    assert read(tmp_path, spelled) == config, "each sixth layer has no window anyway"


def test_a_file_that_transformers_completed_says_everything_twice(tmp_path: Path) -> None:
    completed = MIMO | {
        "layer_types": [("full_attention", "sliding_attention")[each] for each in MIMO["hybrid_layer_pattern"]],
        "mlp_layer_types": ["dense", *["sparse"] * 47],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": MIMO[theta], "partial_rotary_factor": 0.334}
            for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "swa_rope_theta"))
        },
    }
    assert read(tmp_path, completed) == read(tmp_path, MIMO)
    assert read(tmp_path, MIMO | {"layer_types": None, "mlp_layer_types": None}) == read(tmp_path, MIMO)
    for key, other in {
        "rope_theta": 1e6,
        "swa_rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "hybrid_layer_pattern": [0] * 48,
        "moe_layer_freq": [1] * 48,
        "layernorm_epsilon": 1e-6,
    }.items():
        with pytest.raises(ModelError, match=r"differs from .* correct the wrong one"):
            read(tmp_path, completed | {key: other})


def test_a_token_takes_as_many_bytes_as_its_keys_and_values_are_wide(tmp_path: Path) -> None:
    schema = make_schema(read(tmp_path, MIMO).pool("bfloat16"), page_size=64)
    assert {name: pool_words(pool) for name, pool in pools(schema).items()} == {
        "target": "9 layers x (k: 4 heads x 192 bfloat16)",
        "target.window": "39 layers x (k: 8 heads x 192 bfloat16)",
        "target.values": "9 layers x (v: 4 heads x 128 bfloat16)",
        "target.window_values": "39 layers x (v: 8 heads x 128 bfloat16)",
    }
    assert page_bytes(schema) == 64 * 2 * (9 * 4 + 39 * 8) * (192 + 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v_head_dim": 256, "swa_v_head_dim": None}, r"v_head_dim = 256 is not served; 192 \(head_dim\) or less is"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads = 4 is not served; 8 is"),
        ({"swa_head_dim": 128}, "swa_head_dim = 128 is not served; 192 is"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout"),
        ({"hybrid_layer_pattern": "1"}, "must be lists"),
        (
            {"rope_parameters": {kind: {"rope_theta": 1e4, "partial_rotary_factor": share} for kind, share in SHARES}},
            "sliding_attention.partial_rotary_factor = 0.5 is not served; that of full_attention .0.334. is",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, MIMO | changes)


def test_each_of_its_prediction_layers_proposes_one_token(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """All take the target's states. Layer m takes token i + 1 + m, which the layers before it may have proposed."""
    model = with_mtp(checkpoint("mimo_v2_flash"), tmp_path / "model", 3)
    layers = [OwnMtpOracle(model, layer=layer) for layer in range(3)]
    solo = Solo(model, speculative="mtp", draft_model=str(model))
    sequence = solo.start(random.Random(1).choices(range(1, 512), k=20), params(30), chunk=7)
    for num_steps in (3, 0, 2, 3, 1):
        tokens, num = [*sequence.token_ids], len(sequence.token_ids) - 1
        states = layers[0].target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for layer, oracle in enumerate(layers):
            tokens.append(oracle.proposed(states, tokens[1 + layer : 1 + layer + num]))
        if not sequence.num_missed:
            assert solo.executor.slots._draft.tokens[sequence.slot].tolist() == tokens[-3:]
        solo.round([sequence], num_steps)
    assert len(sequence.generated) > 5


def test_it_drafts_by_them_through_the_handoff(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = with_mtp(checkpoint("mimo_v2_flash"), tmp_path / "model", 3)
    reference = Reference(model)
    check_drafted_text(model, reference, speculative="mtp", draft_steps=3)
    assert reference.num_ties == reference.num_router_ties == 0


def test_it_may_be_in_fp8_blocks_which_its_heads_cut(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Through the handoff, with the text of a model that rounds alike. Numbers of heads are ordered behind the product
    then, since rows of weights would leave their block."""
    plain = with_mtp(checkpoint("mimo_v2_flash"), tmp_path / "plain")
    scheme = SCHEMES["blocks"]
    model = quantized(plain, tmp_path / "fp8", scheme)
    with recorded_roundings() as roundings:
        reference = RoundingReference(plain, scheme, roundings)
        check_drafted_text(model, reference, speculative="mtp", draft_steps=3)
    assert reference.num_ties == 0, reference.num_ties
    config = read(tmp_path, MIMO | {"quantization_config": FP8_BLOCKS})
    check_shares(config, 2, "mimo")
    with pytest.raises(ConfigError, match="4 ranks would have 192 numbers of KV heads each, which cuts a block"):
        check_shares(config, 4, "mimo")


def test_narrow_values_are_not_kept_in_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="values narrower than keys, which are kept in the model's type"):
        read(tmp_path, MIMO).pool("bfloat16", "fp8")

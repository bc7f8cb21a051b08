"""Sizes that follow from a model's configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.model_config import ExpertsConfig, ModelConfig
from baton.engine.rope import RopeConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=24, context_len=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=False, qkv_bias=False, attention_bias=False, mlp_bias=False, qk_norm=False,
    sliding_window=(None,) * 4, checkpoint_dtype="bfloat16", eos_token_ids=(2,), bos_token_id=None,
)  # fmt: skip


def test_heads_need_not_be_as_wide_as_the_state() -> None:
    assert (CONFIG.q_size, CONFIG.kv_size) == (96, 48)
    assert CONFIG.layer_products == 64 * (96 + 2 * 48) + 96 * 64 + 3 * 64 * 128


def test_only_the_experts_of_a_token_are_multiplied() -> None:
    experts = ExpertsConfig(num_experts=16, num_active=2, inner_size=32, norm_topk_prob=True, layers=(0, 1, 2, 3))
    assert replace(CONFIG, experts=experts).layer_products == 64 * (96 + 2 * 48) + 96 * 64 + 3 * 64 * 2 * 32


@pytest.mark.parametrize(("hc_mult", "collapsed", "width"), [(1, False, 64), (4, False, 256), (4, True, 64)])
def test_the_state_for_drafters_has_all_streams_unless_it_is_collapsed(
    hc_mult: int, collapsed: bool, width: int
) -> None:
    config = replace(CONFIG, hc_mult=hc_mult, hands_over_collapsed=collapsed)
    assert config.handoff_hidden_size == width and config.spec_hidden_size == 64 * hc_mult

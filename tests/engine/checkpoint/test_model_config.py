"""Sizes that follow from a model's configuration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.engine.checkpoint.model_config import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    yarn_attention_factor,
)
from baton.engine.checkpoint.quantization import ONLINE_FP8, Quantization
from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.kv_layout import KvLayout

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=24, context_len=256, rms_norm_eps=1e-6, rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=False, qkv_bias=False, attention_bias=False, mlp_bias=False, qk_norm=False,
    sliding_window=(None,) * 4, checkpoint_dtype="bfloat16", eos_token_ids=(2,), bos_token_id=None,
)  # fmt: skip


def test_heads_need_not_be_as_wide_as_the_state() -> None:
    assert (CONFIG.q_size, CONFIG.kv_size) == (96, 48)
    assert CONFIG.layer_products == 64 * (96 + 2 * 48) + 96 * 64 + 3 * 64 * 128


EXPERTS = ExpertsConfig(num_experts=16, num_active=2, inner_size=32, norm_topk_prob=True, layers=(0, 1, 2, 3))


def test_only_the_experts_of_a_token_are_multiplied() -> None:
    assert replace(CONFIG, experts=EXPERTS).layer_products == 64 * (96 + 2 * 48) + 96 * 64 + 3 * 64 * 2 * 32


@pytest.mark.parametrize(("hc_mult", "collapsed", "width"), [(1, False, 64), (4, False, 256), (4, True, 64)])
def test_the_state_for_drafters_has_all_streams_unless_it_is_collapsed(
    hc_mult: int, collapsed: bool, width: int
) -> None:
    config = replace(CONFIG, hc_mult=hc_mult, hands_over_collapsed=collapsed)
    assert config.handoff_hidden_size == width and config.spec_hidden_size == 64 * hc_mult


def test_fp8_and_experts_in_16_bits_round_coarsely() -> None:
    mixture, fp8 = replace(CONFIG, experts=EXPERTS), replace(CONFIG, quantization=ONLINE_FP8)
    weights_alone = replace(CONFIG, quantization=Quantization("rows", "none"))
    assert not CONFIG.rounds_coarsely("bfloat16") and not weights_alone.rounds_coarsely("bfloat16")
    assert mixture.rounds_coarsely("bfloat16") and not mixture.rounds_coarsely("float32")
    assert fp8.rounds_coarsely("float32")
    assert CONFIG.rounds_coarsely("float32", "fp8")


@pytest.mark.parametrize(("page_size", "bytes_per_token"), [(16, 2 * 8 * (128 + 4)), (1, 2 * 8 * (128 + 16))])
def test_a_pool_in_fp8_has_a_scale_for_each_token_and_head(page_size: int, bytes_per_token: int) -> None:
    """0.516 of 16 bits for heads of 128, if blocks need no padding."""
    config = replace(CONFIG, num_kv_heads=8, head_dim=128)
    pools = [config.pool("bfloat16", kv_dtype) for kv_dtype in ("auto", "fp8")]
    plain, fp8 = (KvLayout.of(pool, page_size).page_layer_bytes for pool in pools)
    assert fp8 == page_size * bytes_per_token and plain == page_size * 2 * 8 * 128 * 2
    assert page_size == 1 or round(fp8 / plain, 3) == 0.516


def test_latents_in_fp8_are_refused_in_words() -> None:
    latent = LatentConfig(16, None, plain_dim=8, rope_dim=8, value_dim=8, is_interleaved=False, scale=1.0)
    config = replace(CONFIG, architecture="DeepseekV3ForCausalLM", latent=latent, num_kv_heads=1)
    assert config.pool("bfloat16").planes
    with pytest.raises(ConfigError, match="kv_dtype is fp8, but DeepseekV3ForCausalLM has latents"):
        config.pool("bfloat16", "fp8")


@pytest.mark.parametrize(
    ("factor", "mscale", "all_dim", "expected"),
    [
        (32.0, None, None, 0.1 * math.log(32) + 1),
        (1.0, None, None, 1.0),
        (40.0, 1.0, 1.0, 1.0),
        (40.0, 0.707, 1.0, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        (40.0, 0.707, None, 0.1 * math.log(40) + 1),  # both or none count
    ],
)
def test_yarn_attention_factor(factor: float, mscale: float | None, all_dim: float | None, expected: float) -> None:
    assert yarn_attention_factor(factor, mscale, all_dim) == pytest.approx(expected)

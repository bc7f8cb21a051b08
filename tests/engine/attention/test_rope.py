"""Frequencies and rotations against transformers, far beyond the original context."""

from __future__ import annotations

import pytest
import torch

from baton.engine.attention.attention import RotaryEmbedding, rotary_order
from baton.engine.checkpoint.model_config import RopeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.kernels.products.rotary import apply_rotary_, rotary_ref

CONFIGS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-no-ramp": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_cosines_and_sines_equal_transformers(name: str, tmp_path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=256,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(CONFIGS[name]),
    )
    config.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path)
    positions = torch.tensor([0, 1, 17, 63, 64, 4095, 8192, 40_000, 131_071])
    cos, sin = RotaryEmbedding(ours.rope, 128, torch.device("cpu"))(positions, torch.float32)
    their_cos, their_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    # An angle of 1e5 radians has steps of 0.008 in float32: equal frequencies are what counts there.
    torch.testing.assert_close(cos[:, 0], their_cos[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(cos[:5, 0], their_cos[0, :5], atol=1e-5, rtol=0)
    sign = torch.cat((-torch.ones(64), torch.ones(64)))
    torch.testing.assert_close(sin[:, 0] * sign, their_sin[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(sin[:5, 0] * sign, their_sin[0, :5], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_rotation_equals_the_reference(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 7, 16, generator=generator).to(dtype)
    cos, sin = RotaryEmbedding(RopeConfig(), 16, torch.device("cpu"))(torch.tensor([0, 3, 9, 100, 5]), dtype)
    expected = rotary_ref(wide[:, :6], cos, sin)
    sign = torch.cat((-torch.ones(8), torch.ones(8))).to(dtype)
    theirs, _ = apply_rotary_pos_emb(wide[:, :6], wide[:, :6], cos[:, 0], (sin * sign)[:, 0], unsqueeze_dim=1)
    torch.testing.assert_close(expected, theirs, atol=0, rtol=0)
    last = wide[:, 6].clone()
    ours = apply_rotary_(wide[:, :6], cos, sin)
    torch.testing.assert_close(ours, expected, atol=1e-6 if dtype == torch.float32 else 0.02, rtol=0)
    assert ours.data_ptr() == wide.data_ptr() and torch.equal(wide[:, 6], last)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(24, 12), (16, 4), (8, 6), (8, 8)])
def test_a_part_of_a_head_is_rotated_as_in_its_own_order(head_dim: int, rotary_dim: int) -> None:
    """Rows in `rotary_order`, rotated as a whole head, are the rows of which the first `rotary_dim` are rotated."""
    positions, order = torch.tensor([0, 3, 250]), rotary_order(head_dim, rotary_dim)
    x = torch.randn(3, 1, head_dim, generator=torch.Generator().manual_seed(0))
    expected, ours = x.clone(), x[..., order].clone()
    part = expected[..., :rotary_dim].contiguous()
    cpu = torch.device("cpu")
    apply_rotary_(part, *RotaryEmbedding(RopeConfig(), rotary_dim, cpu)(positions, torch.float32))
    expected[..., :rotary_dim] = part
    apply_rotary_(ours, *RotaryEmbedding(RopeConfig(), head_dim, cpu, rotary_dim)(positions, torch.float32))
    assert sorted(order) == list(range(head_dim))
    torch.testing.assert_close(ours, expected[..., order])

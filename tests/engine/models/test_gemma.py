"""Gemma 3: published files. Both Gemmas: numbers in 16 bits. Text and logits are compared in test_odd_shapes.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_pools import pools_of
from published_configs import PUBLISHED, write_config
from ties import Reference

from baton.engine.checkpoint.model_config import RopeConfig, WindowConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.registry import load_model
from baton.engine.ranks.shares import check_shares
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.metadata.errors import ModelError

SMALL, LARGE = PUBLISHED["Gemma-3-1B"], PUBLISHED["Gemma-3-27B"]


def test_published_files_are_read(tmp_path: Path) -> None:
    small = read_model_config(write_config(tmp_path, SMALL))
    assert small.sliding_window == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert (small.rope, small.window) == (
        RopeConfig(theta=1e6),
        WindowConfig(RopeConfig(theta=1e4), 1, 256, has_pool=False),
    )
    assert (small.tie_word_embeddings, small.query_factor, small.eos_token_ids) == (True, 1.0, (1, 106))
    large = read_model_config(write_config(tmp_path, LARGE))
    assert (large.rope, large.window) == (
        RopeConfig("linear", 1e6, 8.0),
        WindowConfig(RopeConfig(theta=1e4), 16, 128, has_pool=False),
    )
    assert not large.has_window_pool
    assert (large.vocab_size, large.context_len, large.tie_word_embeddings) == (262208, 131072, True)
    assert large.query_factor == pytest.approx((128 / 168) ** 0.5)
    check_shares(large, 8, "gemma")


def test_both_spellings_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    old = read_model_config(write_config(tmp_path, SMALL | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}))
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {key: value for key, value in SMALL.items() if not key.startswith("rope")}
    assert read_model_config(write_config(tmp_path, fields | {"rope_parameters": new})) == old


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not served for Gemma3ForCausalLM"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not served .*; 'gelu_pytorch_tanh' is"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not served"),
        ({"sliding_window": None}, "no sliding window is switched on"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be a positive number"),
        ({"rope_parameters": {"rope_theta": 1e6}}, r"rope_parameters.rope_theta = 1000000.0 is unknown"),
        (
            {"rope_parameters": {"sliding_attention": {"mrope_interleaved_by": 2}}},
            r"rope_parameters.sliding_attention.mrope_interleaved_by = 2 is unknown",
        ),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(write_config(tmp_path, SMALL | fields))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_norms_in_16_bits_are_rounded_once(family: str, checkpoint: Callable[..., Path]) -> None:
    """As transformers does, which multiplies by the weights of norms in float32. Rounded weights fail the bound."""
    model = checkpoint(family, tie_word_embeddings=True)
    ids = list(range(5, 60))
    config = read_model_config(model)
    loaded = load_model(model, config, torch.bfloat16, "cpu")
    pools = pools_of(config, 16, 6, dtype=torch.bfloat16)
    ours = loaded.logits(loaded.forward(ForwardBatch.build([BatchRow(ids, 0, [1, 2, 3, 4])], 16, "cpu"), pools)).float()
    with torch.inference_mode():
        theirs = Reference(model, "bfloat16").model(torch.tensor([ids])).logits[0].float()
        exact = Reference(model).model(torch.tensor([ids])).logits[0]
    assert (ours - exact).norm() < 1.1 * (theirs - exact).norm()

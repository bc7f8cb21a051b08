"""Qwen3-Next and Qwen3.5: published files, refusals, and the prediction layer. Their numbers and their text are
compared in test_odd_shapes.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_pools import pools_of
from own_mtp import qwen_mtp_states, with_qwen_mtp
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.tensor_names import layer_prefixes
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.head_file import read_head
from baton.engine.models.mtp import load_mtp
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError, ModelError

PAGE_SIZE = 4


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_the_prediction_layer_equals_its_formula(family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = with_qwen_mtp(checkpoint(family), tmp_path / "model")
    config = read_model_config(model)
    file, target = read_head(model, config), load_model(model, config, torch.float32, "cpu")
    [head] = load_mtp(file, layer_prefixes(file.names), target)
    ids = random.Random(1).choices(range(1, 512), k=21)
    hidden = torch.randn(len(ids), config.hidden_size, generator=torch.Generator().manual_seed(3))
    pages, position, states = [3, 1, 5, 2, 7, 4, 6], 0, []
    pools = pools_of(head.config, PAGE_SIZE, 9)
    for num in (9, 1, 11):
        new = slice(position, position + num)
        batch = ForwardBatch.build([BatchRow(ids[new], position, pages)], PAGE_SIZE, "cpu")
        with torch.inference_mode():
            states.append(head.forward(batch, pools, hidden[new]))
        position += num
    expected = qwen_mtp_states(model, ids, hidden)
    torch.testing.assert_close(torch.cat(states), expected, atol=1e-4, rtol=0)
    assert torch.equal(head.logits(expected), target.logits(expected))  # the norm is part of the state


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types = .* is not served; a mixture of linear_attention and"),
        ({"linear_num_key_heads": 4}, r"linear_num_key_heads = 4 does not divide linear_num_value_heads \(6\)"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim = None must be a whole number"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not served for Qwen3_5ForCausalLM; True is"),
        (
            {"mamba_ssm_dtype": "bfloat16"},
            "mamba_ssm_dtype = 'bfloat16' is not served for Qwen3_5ForCausalLM; 'float32'",
        ),
    ],
)
def test_refusals_name_the_value(
    fields: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3_5_text") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=words):
        read_model_config(tmp_path)


def test_every_fourth_layer_has_attention_unless_the_file_lists_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3_next") / "config.json").read_text())
    for interval, expected in (({}, (0, 1, 2)), ({"full_attention_interval": 2}, (0, 2))):
        (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": None} | interval))
        delta = read_model_config(tmp_path).delta
        assert delta is not None and delta.layers == expected


def test_trees_of_drafts_are_refused_on_a_gpu(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.engine.choose_device", lambda _: torch.device("cuda"))
    model = with_qwen_mtp(checkpoint("qwen3_next"), tmp_path / "model")
    config = EngineConfig(model=str(model), speculative="mtp", draft_topk=2, num_pages=8)
    with pytest.raises(ConfigError, match=r"draft_topk is 2, .* as Qwen3NextForCausalLM has, verify chains alone"):
        Engine(config)


@pytest.mark.parametrize(("page_size", "chains", "trees"), [(4, 8, 24), (16, 32, 48), (64, 128, 192), (256, 128, 192)])
def test_a_tail_is_longer_by_the_longest_path_if_drafts_are_trees(
    page_size: int, chains: int, trees: int, checkpoint: Callable[..., Path]
) -> None:
    config = read_model_config(checkpoint("qwen3_next")).with_tail()
    for each, window in ((config, chains), (config.with_trees(16), trees)):
        assert {pool.window for pool in each.pool("bfloat16", page_size=page_size).further} == {window}


def test_a_page_has_a_row_of_each_token_and_the_states_that_end_in_it(checkpoint: Callable[..., Path]) -> None:
    config = read_model_config(checkpoint("qwen3_5_text"))
    for page_size in (4, 16, 64, 128):
        kv, rows, updates, states = (
            config.pool("bfloat16", page_size=page_size),
            *config.pool("bfloat16", page_size=page_size).further,
        )
        assert (kv.num_layers, rows.num_layers, updates.num_layers, states.num_layers) == (1, 3, 3, 3)
        [plane] = updates.planes
        assert plane.dtype == "float32" and (plane.num_heads, plane.head_dim) == (2, 48)  # 3 x 10 + 12 + 3, padded
        [plane] = states.planes
        num_states = max(1, page_size // 64)
        assert plane.dtype == "float32" and plane.num_heads == 2
        assert (
            page_size * plane.head_dim
            >= num_states * 3 * 12 * 10
            > (page_size - page_size // num_states) * plane.head_dim
        )


@pytest.mark.parametrize("name", ["mtp.layers.1.mlp.more.weight", "mtp.more.weight"])
def test_a_tensor_of_prediction_layers_that_nobody_reads_is_refused(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = with_qwen_mtp(checkpoint("qwen3_5_text"), tmp_path / "model", num_layers=2)
    tensors = load_file(model / "model.safetensors") | {name: torch.ones(2)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = read_model_config(model)
    file, target = read_head(model, config), load_model(model, config, torch.float32, "cpu")
    with pytest.raises(ModelError, match=f"has tensors that no layout served here uses: {name}"):
        load_mtp(file, layer_prefixes(file.names), target)


@pytest.mark.parametrize(("page_size", "window"), [(64, 128), (16, 32), (4, 8), (3, 4), (2, 5), (6, 5)])
def test_tail_pages_hold_the_block_before_and_what_a_convolution_reads(
    page_size: int, window: int, checkpoint: Callable[..., Path]
) -> None:
    """Blocks of 64, 16, 4, 1, 2 and 2 tokens, and a convolution over four."""
    config = read_model_config(checkpoint("qwen3_next"))
    assert config.delta is not None and config.delta.num_taps == 4
    assert [each.window(page_size) for each in config.further] == [window] * 3

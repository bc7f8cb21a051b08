"""The EAGLE-like head over residual streams equals its formula. Other tensors, and other streams, are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import check_head, make_pool
from heads import HYPER, write_head
from plain_heads import Plain, PlainHead
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.head_file import check_state_width, read_head
from baton.engine.models.heads import load_eagle
from baton.engine.models.hyper_eagle import HyperEagleHead
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.metadata.errors import ConfigError, ModelError

SIZE, STREAMS, PAGE_SIZE = 40, 3, 3
WIDTH = STREAMS * SIZE
Checkpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("hyper_llama", hidden_size=SIZE, hc_mult=STREAMS)


def load(model: Path, head: Path) -> HyperEagleHead:
    config = read_model_config(model)
    loaded = load_eagle(read_head(head, config), load_model(model, config, torch.float32, "cpu"))
    assert isinstance(loaded, HyperEagleHead)
    return loaded


def change(head: Path, changed: Callable[[Tensors], object]) -> Path:
    tensors = load_file(head / "model.safetensors")
    changed(tensors)
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    return head


def write_two_layers(model: Path, directory: Path, **sizes: int) -> Path:
    """Write a head whose second layer is the first one of another head."""
    other = load_file(write_head(directory / "other", HYPER, model, seed=1, **sizes) / "model.safetensors")
    second = {name.replace("layers.0.", "layers.1."): each for name, each in other.items() if "layers.0." in name}
    head = write_head(directory / "head", HYPER, model, num_hidden_layers=2, **sizes)
    return change(head, lambda tensors: tensors.update(second))


@pytest.mark.parametrize("chunk", [20, 3])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 10), (6, 3, 24)], ids=str)
def test_states_logits_and_kv_equal_the_formula(
    num_heads: int, num_kv_heads: int, head_dim: int, num_layers: int, chunk: int, model: Path, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    if num_layers == 1:
        head = write_head(tmp_path, HYPER, model, **sizes)
    else:
        head = write_two_layers(model, tmp_path, **sizes)
    check_head(load(model, head), PlainHead(HYPER, head, Plain(model)), WIDTH, PAGE_SIZE, chunk)


@pytest.mark.parametrize("name", ["hidden_norm.weight", "layers.0.attn_hc.mix", "layers.0.ffn_hc.read"])
def test_each_part_of_the_formula_counts(name: str, model: Path, tmp_path: Path) -> None:
    """The comparison itself: without one tensor's own numbers it does not pass."""
    head = write_head(tmp_path, HYPER, model)
    plain = PlainHead(HYPER, head, Plain(model))
    plain.tensors[name] = plain.tensors[name].flip(0)
    with pytest.raises(AssertionError, match="not close"):
        check_head(load(model, head), plain, WIDTH, PAGE_SIZE, 20)


def test_both_phases_compute_the_same(model: Path, tmp_path: Path) -> None:
    """The target's states and the head's own have one form."""
    head = load(model, write_head(tmp_path, HYPER, model))
    hidden = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
    at = torch.tensor([4, 2])
    batch = ForwardBatch.uniform(torch.tensor([[3], [9]]), at[:, None], at + 1, torch.tensor([[1, 2], [3, 4]]), 3)
    kv = make_pool(head.config, PAGE_SIZE)
    with torch.inference_mode():
        states = [head.forward(batch, ModelPools(kv), hidden, is_extend=is_extend) for is_extend in (True, False)]
    assert torch.equal(states[0], states[1]) and states[0].shape == (2, WIDTH)


def test_zero_rows_have_the_width_of_all_streams(model: Path, tmp_path: Path) -> None:
    head = load(model, write_head(tmp_path, HYPER, model))
    batch = ForwardBatch.build([], PAGE_SIZE, "cpu")
    states = head.forward(batch, ModelPools(make_pool(head.config, PAGE_SIZE)), torch.zeros(0, WIDTH), is_extend=True)
    assert states.shape == (0, WIDTH) and head.logits(states).shape == (0, 512)


def test_copies_of_the_targets_ends_are_not_read(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, HYPER, model)
    copies = {f"{name}.weight": torch.ones(512, SIZE) for name in ("embed_tokens", "lm_head")}
    plain = PlainHead(HYPER, head, Plain(model))  # of the file without them
    check_head(load(model, change(head, lambda tensors: tensors.update(copies))), plain, WIDTH, PAGE_SIZE, 20)


REFUSED: list[tuple[Callable[[Tensors], Any], list[str]]] = [
    (lambda t: t.pop("hidden_norm.weight"), ["lacks tensors", "hidden_norm.weight"]),
    (lambda t: t.pop("layers.0.ffn_hc.write"), ["lacks tensors", "ffn_hc.write"]),
    (lambda t: t.pop("layers.0.input_layernorm.weight"), ["lacks tensors", "input_layernorm.weight"]),
    (lambda t: t.update({"fc.weight": torch.ones(WIDTH, 2 * SIZE)}), ["fc.weight", "120, 80", "120, 160"]),
    (lambda t: t.update({"layers.0.attn_hc.mix": torch.ones(4, 4)}), ["attn_hc.mix", "4, 4", "3, 3"]),
    (lambda t: t.update({"fc.extra": torch.ones(2)}), ["fc.extra", "no layout served here uses"]),
    (
        lambda t: t.update({"layers.1.input_layernorm.weight": torch.ones(SIZE)}),
        ["layers.1.input_layernorm.weight", "no layout served here uses"],
    ),
]


@pytest.mark.parametrize(("damage", "words"), REFUSED)
def test_tensors_that_are_missing_unknown_or_of_a_wrong_shape_are_refused(
    damage: Callable[[Tensors], Any], words: list[str], model: Path, tmp_path: Path
) -> None:
    head = change(write_head(tmp_path, HYPER, model), damage)
    with pytest.raises(ModelError) as raised:
        load(model, head)
    assert all(word in str(raised.value) for word in [*words, str(head)]), raised.value


def test_heads_for_other_streams_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Both numbers of streams, and both widths, are in the message."""
    four, two, one = checkpoint("hyper_llama"), checkpoint("hyper_llama", hc_mult=2), checkpoint("llama")
    head = write_head(tmp_path / "head", "hyper-eagle", four)
    check_state_width(read_head(head, read_model_config(four)), read_model_config(four))
    for other, words in ((two, "128 (hc_mult 2)"), (one, "64 (hc_mult 1)")):
        with pytest.raises(ConfigError) as error:
            check_state_width(read_head(head, read_model_config(other)), read_model_config(other))
        assert "states of 256 numbers (hc_mult 4)" in str(error.value) and words in str(error.value)
    for kind in ("eagle", "mtp-deepseek"):
        file = read_head(write_head(tmp_path / kind, kind, one), read_model_config(four))
        with pytest.raises(ConfigError, match=r"64 numbers \(hc_mult 1\).*256 \(hc_mult 4\)"):
            check_state_width(file, read_model_config(four))

"""MTP layers of both layouts equal the formulas of docs/drafter_checkpoints.md, and other tensors are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from direct import check_head, make_pool
from heads import write_head
from plain_heads import Plain, PlainHead
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.tensor_names import layer_prefixes
from baton.engine.models.head_file import read_head
from baton.engine.models.mtp import MtpHead, load_layers, load_mtp, takes_chained_states
from baton.engine.models.registry import load_model
from baton.engine.ranks.ranks import ONE_RANK
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.errors import ModelError

SIZE, PAGE_SIZE = 40, 3
ODD = [  # heads, KV heads, head_dim
    {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
]
PREFIX = {"mtp-deepseek": "model.layers.2", "mtp-mimo": "model.mtp_layers.0"}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", hidden_size=SIZE)


def load(model: Path, head: Path, dtype: torch.dtype = torch.float32) -> tuple[MtpHead, ...]:
    config = read_model_config(model)
    file = read_head(head, config)
    return load_mtp(file, layer_prefixes(file.names), load_model(model, config, dtype, "cpu"))


def change(head: Path, changed: Callable[[Tensors], object]) -> Path:
    tensors = load_file(head / "model.safetensors")
    changed(tensors)
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    return head


def with_biases(tensors: Tensors) -> None:
    """Add the biases of Qwen2's attention, which MiMo's files have and config.json does not mention."""
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.linspace(-1, 1, len(tensors[name]))


@pytest.mark.parametrize("chunk", [20, 3])
@pytest.mark.parametrize("sizes", ODD, ids=["group of 5", "head_dim 24"])
@pytest.mark.parametrize("kind", PREFIX)
def test_states_logits_and_kv_equal_the_formula(
    kind: str, sizes: dict[str, int], chunk: int, model: Path, tmp_path: Path
) -> None:
    head = change(write_head(tmp_path / "head", kind, model, **sizes), with_biases)
    (layer,) = load(model, head)
    check_head(layer, PlainHead(kind, head, Plain(model)), SIZE, PAGE_SIZE, chunk)


def test_a_bias_that_is_dropped_is_noticed(model: Path, tmp_path: Path) -> None:
    """The comparison itself."""
    head = write_head(tmp_path / "head", "mtp-mimo", model, **ODD[0])
    (layer,) = load(model, head)
    plain = PlainHead("mtp-mimo", change(head, with_biases), Plain(model))
    with pytest.raises(AssertionError, match="not close"):
        check_head(layer, plain, SIZE, PAGE_SIZE, 20)


@pytest.mark.parametrize("kind", PREFIX)
def test_only_mimo_leaves_out_the_embedding_at_position_0(kind: str, model: Path, tmp_path: Path) -> None:
    (layer,) = load(model, write_head(tmp_path / "head", kind, model))
    hidden = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(3))

    def state(token: int, position: int) -> torch.Tensor:
        batch = ForwardBatch.build([BatchRow([token], position, [1])], PAGE_SIZE, "cpu")
        with torch.inference_mode():
            return layer.forward(batch, ModelPools(make_pool(layer.config, PAGE_SIZE).zero_()), hidden)

    assert torch.equal(state(7, 0), state(8, 0)) == (kind == "mtp-mimo")
    assert not torch.equal(state(7, 1), state(8, 1))


@pytest.mark.parametrize("kind", PREFIX)
def test_zero_rows_have_the_same_widths(kind: str, model: Path, tmp_path: Path) -> None:
    (layer,) = load(model, write_head(tmp_path / "head", kind, model))
    kv = make_pool(layer.config, PAGE_SIZE)
    states = layer.forward(ForwardBatch.build([], PAGE_SIZE, "cpu"), ModelPools(kv), torch.zeros(0, SIZE))
    assert states.shape == (0, SIZE) and layer.logits(states).shape == (0, 512)


@pytest.mark.parametrize("kind", ["mtp3-deepseek", "mtp3-mimo"])
def test_several_layers_are_read_in_the_order_of_their_numbers(kind: str, model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", kind, model)
    plain = PlainHead(kind, head, Plain(model))
    layers = load(model, head)
    assert len(layers) == 3 and all(layer.layout.skips_first == ("mimo" in kind) for layer in layers)
    names = "final_layernorm" if "mimo" in kind else "shared_head.norm"
    for layer, prefix in zip(layers, plain.prefixes, strict=True):
        assert torch.equal(layer.final_norm, plain.tensors[f"{prefix}.{names}.weight"])


@pytest.mark.parametrize(
    ("kind", "default"),
    [("mtp-deepseek", True), ("mtp-mimo", False), ("mtp3-deepseek", True), ("mtp3-mimo", False)],
)
def test_layers_are_chained_by_their_layout_unless_config_json_says_otherwise(
    kind: str, default: bool, model: Path, tmp_path: Path
) -> None:
    for settings, expected in (({}, default), ({"mtp_chained": True}, True), ({"mtp_chained": False}, False)):
        head = write_head(tmp_path / json.dumps(settings), kind, model, **settings)
        assert takes_chained_states(read_head(head, read_model_config(model))) == expected


def test_layers_are_read_in_the_targets_dtype_on_its_device_with_the_heads_own_format(
    model: Path, tmp_path: Path
) -> None:
    """Each layer has the configuration of one full-attention layer, and the rotary share of config.json."""
    file = read_head(write_head(tmp_path / "head", "mtp3-deepseek", model), read_model_config(model))
    scheme: Any = object()
    given = replace(file.config, quantization=scheme, num_layers=3, sliding_window=(5, 5, 5), rotary_dim=4)
    target: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("meta"))
    found: Any = load_layers(replace(file, config=given), ("p", "q"), target, ONE_RANK, lambda *read: read)
    assert [prefix for _, prefix, *_ in found] == ["p", "q"]
    source, _, config, rotary, ends = found[0]
    assert (source.dtype, source.device, source.quantization, ends) == (torch.bfloat16, target.device, scheme, target)
    assert (config.num_layers, config.sliding_window) == (1, (None,))
    assert rotary._frequencies.device.type == "meta"
    target.device = torch.device("cpu")
    (_, _, _, rotary, _), *_ = load_layers(replace(file, config=given), ("p",), target, ONE_RANK, lambda *read: read)
    cos, _ = rotary(torch.tensor([1000]), torch.float32)
    assert (cos.flatten() == 1.0).sum() == cos.numel() - 4, "the other numbers of a head are not rotated"


def test_a_layer_in_bfloat16_computes_in_bfloat16(model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", "mtp-deepseek", model)
    (layer,) = load(model, head, torch.bfloat16)
    batch = ForwardBatch.build([BatchRow([7, 8], 0, [1])], PAGE_SIZE, "cpu")
    with torch.inference_mode():
        kv = make_pool(layer.config, PAGE_SIZE, torch.bfloat16)
        assert layer.forward(batch, ModelPools(kv), torch.ones(2, SIZE, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_output_layer_is_told_how_ranks_divide_the_rows(model: Path, tmp_path: Path) -> None:
    (layer,) = load(model, write_head(tmp_path / "head", "mtp-mimo", model))
    target: Any = SimpleNamespace(logits=lambda *given: given)
    lens: Any = object()
    assert replace(layer, target=target).logits(torch.ones(1, SIZE), lens)[1] is lens


@pytest.mark.parametrize("kind", PREFIX)
def test_the_rest_of_the_target_and_copies_of_its_ends_are_ignored(kind: str, model: Path, tmp_path: Path) -> None:
    """Published layers lie in the target's own file."""
    prefix, head = PREFIX[kind], write_head(tmp_path / "head", kind, model)
    (before,) = load(model, head)
    copies = {f"{prefix}.{name}.weight": torch.ones(512, SIZE) for name in ("embed_tokens", "shared_head.head")}
    change(head, lambda tensors: tensors.update(load_file(model / "model.safetensors") | copies))
    (after,) = load(model, head)
    assert torch.equal(before.final_norm, after.final_norm)
    states = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(before.logits(states), after.logits(states))


def _wrong_shape(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.ones(SIZE, SIZE)


REFUSED: list[tuple[str, Callable[[Tensors, str], Any], list[str]]] = [
    ("mtp-deepseek", lambda t, p: t.pop(f"{p}.enorm.weight"), ["lacks tensors", "enorm.weight"]),
    ("mtp-deepseek", lambda t, p: t.pop(f"{p}.self_attn.k_proj.weight"), ["lacks tensors", "k_proj.weight"]),
    ("mtp-mimo", lambda t, p: t.pop(f"{p}.final_layernorm.weight"), ["lacks tensors", "final_layernorm.weight"]),
    ("mtp-deepseek", lambda t, p: _wrong_shape(t, f"{p}.eh_proj.weight"), ["eh_proj.weight", "40, 40", "40, 80"]),
    ("mtp-mimo", lambda t, p: _wrong_shape(t, f"{p}.input_proj.weight"), ["input_proj.weight", "40, 40", "40, 80"]),
    ("mtp-deepseek", lambda t, p: t.update({f"{p}.mlp.gate.weight": torch.ones(4, SIZE)}), ["mlp.gate.weight", "uses"]),
    ("mtp-mimo", lambda t, p: t.update({f"{p}.self_attn.q_norm.weight": torch.ones(8)}), ["q_norm.weight", "uses"]),
]


@pytest.mark.parametrize(("kind", "damage", "words"), REFUSED)
def test_tensors_that_are_missing_unknown_or_of_a_wrong_shape_are_refused(
    kind: str, damage: Callable[[Tensors, str], Any], words: list[str], model: Path, tmp_path: Path
) -> None:
    head = change(write_head(tmp_path / "head", kind, model), lambda tensors: damage(tensors, PREFIX[kind]))
    with pytest.raises(ModelError) as raised:
        load(model, head)
    assert all(word in str(raised.value) for word in [*words, str(head)]), raised.value

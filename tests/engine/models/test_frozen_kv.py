"""The FROZEN_KV_MTP head equals the formula over a target's KV, writes none, and refuses what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_device
from direct import close, make_pool, shuffled_pages, stored
from heads import write_head
from plain_heads import Plain, PlainFrozenHead
from safetensors.torch import load_file, save_file

from baton.engine.attention import attention
from baton.engine.checkpoint.model_config import WindowConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.frozen_kv import FrozenKvHead, read_frozen_kv
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.kernels.operations import preferring
from baton.metadata.errors import BatonError, ConfigError, ModelError

SIZE, OWN_SIZE, PAGE_SIZE = 40, 24, 3
GROUP = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 5e5}
LENGTHS = [1, 8, 21]  # of the target's KV
Checkpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", hidden_size=SIZE, num_hidden_layers=3, **GROUP)


def load(model: Path, head: Path) -> tuple[FrozenKvHead, DecoderModel]:
    config = read_model_config(model)
    target = load_model(model, config, torch.float32, "cpu")
    return FrozenKvHead(read_frozen_kv(head, config), target), target


def write(model: Path, directory: Path, **changes: Any) -> Path:
    """Write a head of another width than the target's, which reads the target's layers in another order."""
    theta = json.loads((model / "config.json").read_text())["rope_parameters"]["rope_theta"]
    own: dict[str, Any] = {"hidden_size": OWN_SIZE, "target_layers": [2, 0], "rope_theta": theta}
    return write_head(directory, "frozen-kv-mtp", model, **own | changes)


def change(head: Path, changed: Callable[[Tensors], object]) -> Path:
    tensors = load_file(head / "model.safetensors")
    changed(tensors)
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    return head


@torch.inference_mode()
def check_steps(model: Path, directory: Path, other: PlainFrozenHead | None = None) -> None:
    """Compare three steps of sequences of unlike lengths in one batch, each step with the state of the one before."""
    head, target = load(model, directory)
    plain = other or PlainFrozenHead(directory, Plain(model))
    generator = torch.Generator().manual_seed(4)
    kv, pages = make_pool(target.config, PAGE_SIZE), shuffled_pages(len(LENGTHS), 8)
    kv[:, 1:].normal_(generator=generator)
    rows = [stored(kv, each, length) for each, length in zip(pages, LENGTHS, strict=True)]
    hidden, before = torch.randn(len(LENGTHS), SIZE, generator=generator), kv.clone()
    expected, lengths = list(hidden), torch.tensor(LENGTHS)
    for _ in range(3):
        tokens = torch.randint(1, 512, (len(LENGTHS), 1), generator=generator)
        batch = ForwardBatch.uniform(tokens, lengths[:, None] - 1, lengths, torch.tensor(pages), PAGE_SIZE)
        hidden, logits = head.forward(batch, kv, hidden)
        for i, token in enumerate(tokens.flatten().tolist()):
            expected[i], scores = plain.step(expected[i], token, rows[i])
            close(hidden[i], expected[i])
            close(logits[i], scores)
    assert torch.equal(kv, before), "the head stores no KV"


@pytest.mark.parametrize("kind", [None, "reference"], ids=["where pages lie", "gathered"])
@pytest.mark.parametrize("sizes", [GROUP, WIDE], ids=["group of 5", "head_dim 24"])
def test_states_and_logits_equal_the_formula(
    sizes: dict[str, Any], kind: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama", hidden_size=SIZE, num_hidden_layers=3, **sizes)
    head = write(model, tmp_path / "head")
    if kind is None:
        check_steps(model, head)
        return
    with preferring(kind):
        check_steps(model, head)


@pytest.mark.skipif(not triton_device.IS_INTERPRETED, reason="a GPU runs the kernels themselves (tests/gpu)")
def test_it_attends_by_the_kernels_of_a_gpu(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, on tensors that the CPU's own kernels could read too."""
    model = checkpoint("llama", hidden_size=SIZE, num_hidden_layers=3, **GROUP)
    monkeypatch.setattr(attention, "attend_stored", lambda *_: pytest.fail("the CPU's kernel was called"))
    with preferring("triton"):
        check_steps(model, write(model, tmp_path / "head"))


def test_an_output_matrix_of_its_own_wins(model: Path, tmp_path: Path) -> None:
    """`lm_head.weight` is the output matrix if the file has one; else `embed_tokens.weight` is."""
    output = torch.randn(512, OWN_SIZE, generator=torch.Generator().manual_seed(9))
    check_steps(model, change(write(model, tmp_path / "head"), lambda t: t.update({"lm_head.weight": output})))


def test_layers_of_the_target_in_another_order_are_noticed(model: Path, tmp_path: Path) -> None:
    """The comparison itself."""
    head = write(model, tmp_path / "head")
    plain = PlainFrozenHead(head, Plain(model))
    plain.config["target_layers"] = [0, 2]
    with pytest.raises(AssertionError, match="not close"):
        check_steps(model, head, plain)


FITS: list[tuple[dict[str, Any], type[BatonError], str]] = [
    ({"target_layers": [0, 3]}, ConfigError, r"target_layers \[0, 3\]; the target has layers 0 to 2"),
    ({"target_layers": [-1, 0]}, ConfigError, r"target_layers \[-1, 0\]; the target has layers 0 to 2"),
    ({"target_layers": ["0", 1]}, ConfigError, r"target_layers \['0', 1\]"),
    ({"target_layers": [0]}, ModelError, r"no FROZEN_KV_MTP head: .* target_layers, one for each of 2 layers"),
    ({"target_layers": [0, 1, 2]}, ModelError, r"no FROZEN_KV_MTP head: .* target_layers, one for each of 2 layers"),
    ({"target_layers": None}, ModelError, "no FROZEN_KV_MTP head"),
    ({"backbone_hidden_size": None}, ModelError, "no FROZEN_KV_MTP head"),
    ({"backbone_hidden_size": 32}, ConfigError, "backbone_hidden_size is 32; the target's is 40"),
    ({"num_key_value_heads": 5}, ConfigError, "num_key_value_heads is 5; the target's is 1"),
    ({"head_dim": 16}, ConfigError, "head_dim is 16; the target's is 10"),
    ({"vocab_size": 500}, ConfigError, "vocab_size is 500; the target's is 512"),
    ({"rope_theta": 5e5}, ConfigError, r"rope_theta is 500000\.0; the target's is 10000\.0"),
]


@pytest.mark.parametrize(("changes", "error", "words"), FITS)
def test_a_configuration_that_does_not_fit_the_target_is_refused(
    changes: dict[str, Any], error: type[BatonError], words: str, model: Path, tmp_path: Path
) -> None:
    head = write(model, tmp_path / "head")
    config = json.loads((head / "config.json").read_text()) | changes
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words) as raised:
        read_frozen_kv(head, read_model_config(model))
    assert str(head) in str(raised.value)


def test_a_target_with_less_or_more_of_anything_is_refused(model: Path, tmp_path: Path) -> None:
    head, target = write(model, tmp_path / "head"), read_model_config(model)
    other: Any = object()
    for field, words in (("latent", "latents"), ("compressed", "entries of tokens")):
        with pytest.raises(ConfigError, match=f"attends to keys and values of heads; the target's pool has {words}"):
            read_frozen_kv(head, replace(target, **{field: other}))
    for name, field in (
        ("backbone_hidden_size", "hidden_size"),
        ("num_key_value_heads", "num_kv_heads"),
        ("head_dim", "head_dim"),
        ("vocab_size", "vocab_size"),
        ("rope_theta", "theta"),
    ):
        right = target.rope.theta if field == "theta" else getattr(target, field)
        for other in (right - 1, right + 1):
            changed: dict[str, Any] = (
                {"rope": replace(target.rope, theta=other)} if field == "theta" else {field: other}
            )
            with pytest.raises(ConfigError, match=rf"{name} is {right}; the target's is {other}"):
                read_frozen_kv(head, replace(target, **changed))
    assert read_frozen_kv(head, target).target_layers == (2, 0)
    unlike = replace(target, window=WindowConfig(target.rope, target.num_kv_heads, 2 * target.head_dim, has_pool=True))
    with pytest.raises(ConfigError, match="attends to layers with equal heads; the target's layers have unlike heads"):
        read_frozen_kv(head, unlike)


REFUSED: list[tuple[Callable[[Tensors], Any], list[str]]] = [
    (lambda t: t.pop("pre_projection.weight"), ["lacks tensors", "pre_projection.weight"]),
    (lambda t: t.pop("model.layers.1.mlp.down_proj.weight"), ["lacks tensors", "layers.1.mlp.down_proj.weight"]),
    (lambda t: t.pop("model.embed_tokens.weight"), ["lacks tensors", "embed_tokens.weight"]),
    (
        lambda t: t.update({"post_projection.weight": torch.ones(OWN_SIZE, SIZE)}),
        ["post_projection.weight", "24, 40", "40, 24"],
    ),
    (
        lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(10, OWN_SIZE)}),
        ["layers.1.self_attn.k_proj.weight", "no layout served here uses"],
    ),
    (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(OWN_SIZE)}),
        ["layers.2.input_layernorm.weight", "no layout served here uses"],
    ),
]


@pytest.mark.parametrize(("damage", "words"), REFUSED)
def test_tensors_that_are_missing_unknown_or_of_a_wrong_shape_are_refused(
    damage: Callable[[Tensors], Any], words: list[str], model: Path, tmp_path: Path
) -> None:
    head = change(write(model, tmp_path / "head"), damage)
    with pytest.raises(ModelError) as raised:
        load(model, head)
    assert all(word in str(raised.value) for word in [*words, str(head)]), raised.value

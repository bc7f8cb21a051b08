"""Loading: sharded and single files, fusing, progress, and tensors that do not fit the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import shard
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.fingerprint import fingerprint
from baton.engine.checkpoint.quantization import Quantization
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.weights import ListedWeights, in_order
from baton.engine.layers.decoder import DecoderBody
from baton.engine.models.decoder import DecoderModel, DecoderStack
from baton.engine.models.registry import load_model, tensor_specs
from baton.engine.products.dense import DenseProduct
from baton.metadata.errors import ModelError

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture
def model_dir(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A private copy, to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def load(model_dir: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderModel:
    return load_model(model_dir, read_model_config(model_dir), dtype, CPU, **options)


def bodies(model: DecoderModel) -> list[DecoderBody]:
    assert isinstance(model.stack, DecoderStack)
    return [layer.body for layer in model.stack.layers]


def replace(model_dir: Path, **changes: torch.Tensor | None) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}, path)


def test_specs_are_what_transformers_writes(checkpoint: Checkpoint) -> None:
    for family, config in (("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {})):
        model_dir = checkpoint(family, **config)
        written = {name: tuple(tensor.shape) for name, tensor in load_file(model_dir / "model.safetensors").items()}
        assert {spec.name: spec.shape for spec in tensor_specs(read_model_config(model_dir))} == written


def test_sharded_equals_single(model_dir: Path) -> None:
    single = load(model_dir)
    shard(model_dir, 3)
    sharded = load(model_dir)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(bodies(sharded), bodies(single), strict=True):
        assert torch.equal(ours.attention.qkv(x), theirs.attention.qkv(x)) and torch.equal(ours.mlp(x), theirs.mlp(x))
    assert torch.equal(sharded.logits(x), single.logits(x))


def test_progress_reaches_the_total_and_the_file_may_go(model_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load(model_dir, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    size = sum(tensor.nbytes for tensor in load_file(model_dir / "model.safetensors").values())
    assert seen[-1] == (size, size)
    ids, x = torch.arange(512), torch.ones(1, 64)
    embedded, logits = model.embed(ids), model.logits(x)
    (model_dir / "model.safetensors").write_bytes(b"")  # were anything still mapped, reading it would kill the process
    assert torch.equal(model.embed(ids), embedded) and torch.equal(model.logits(x), logits)
    assert all(body.mlp(x).isfinite().all() and body.mlp_norm.isfinite().all() for body in bodies(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_stay_as_they_are(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    model = load(checkpoint("llama"), dtype)
    products = [body.attention.qkv.product for body in bodies(model)]
    assert all(isinstance(each, DenseProduct) and each.weight.dtype == dtype for each in products)
    assert model.embed(torch.tensor([0])).dtype == model.dtype == dtype


@pytest.mark.parametrize("size", [0, 4, 200, -1])
@pytest.mark.parametrize("action", [load, fingerprint])
def test_truncated_file(model_dir: Path, size: int, action: Callable[[Path], object]) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or cut short"):
        action(model_dir)


def test_missing_tensor(model_dir: Path) -> None:
    replace(model_dir, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lacks tensors .* model.layers.1.mlp.up_proj.weight$"):
        load(model_dir)


def test_tensors_that_would_be_ignored(model_dir: Path) -> None:
    replace(model_dir, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(model_dir)
    replace(model_dir, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"does not use \(model.layers.0.self_attn.q_proj.bias\)"):
        load(model_dir)


LEFT_OVER = (
    "lm_head.bias",
    "model.embed_norm.weight",
    "model.layers.2.mlp.up_proj.weight",
    "model.mtp.layers.0.eh_proj.weight",
    "mtp.0.e_proj.weight",
    "mtp.fc.weight",
    "score.weight",
)


@pytest.mark.parametrize("name", LEFT_OVER)
def test_tensors_beside_the_layers_are_not_ignored(name: str, model_dir: Path) -> None:
    replace(model_dir, **{name: torch.zeros(64)})
    with pytest.raises(ModelError, match=rf"has tensors that LlamaForCausalLM does not use \({name}\)"):
        load(model_dir)


OWN_MTP = [
    ("llama", "model.layers.2.eh_proj.weight", True),
    ("llama", "model.mtp_layers.0.input_proj.weight", True),
    ("glm4_moe", "model.layers.2.eh_proj.weight", True),
    ("deepseek_v3", "model.layers.2.eh_proj.weight", True),
    ("deepseek_v4", "mtp.0.e_proj.weight", True),
    ("llama", "model.layers.1.eh_proj.weight", False),
    ("glm4_moe", "model.mtp_layers.0.input_proj.weight", False),
    ("qwen3_moe", "model.layers.2.eh_proj.weight", False),
    ("gpt_oss", "model.layers.2.eh_proj.weight", False),
    ("deepseek_v4", "model.layers.4.eh_proj.weight", False),
]


@pytest.mark.parametrize(("family", "name", "is_known"), OWN_MTP)
def test_only_prediction_layers_of_the_family_are_left_out(
    family: str, name: str, is_known: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    replace(model_dir, **{name: torch.zeros(64)})
    if is_known:
        load(model_dir)
    else:
        with pytest.raises(ModelError, match=rf"has tensors that \w+ does not use \({name}\)"):
            load(model_dir)


def test_tied_embeddings_may_be_stored_twice(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama", tie_word_embeddings=True), tmp_path / "model"))
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    replace(model_dir, **{"lm_head.weight": embedding.clone()})
    load(model_dir)


@pytest.mark.parametrize(
    "name", ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "kv_scale"]
)
def test_scales_of_a_cache_in_fp8_are_not_needed(name: str, model_dir: Path) -> None:
    replace(model_dir, **{f"model.layers.1.self_attn.{name}": torch.ones(())})
    load(model_dir)


def test_layers_of_one_input_in_two_formats_are_refused() -> None:
    both = {"q.weight", "k.weight", "q.weight_scale", "k.weight_scale"}
    ListedWeights(both, Quantization("rows", "rows")).fused({"q": 8, "k": 4}, 16, bias=False)
    weights = ListedWeights(both - {"k.weight_scale"}, Quantization("rows", "rows"))
    with pytest.raises(ModelError, match=r"q has a weight_scale, but k has none; .* quantize both or neither"):
        weights.fused({"q": 8, "k": 4}, 16, bias=False)


def test_rows_are_put_in_order_with_their_scales() -> None:
    order = torch.tensor([1, 0, 3, 2])
    weight = torch.arange(8.0).view(4, 2)
    expected = weight[[1, 0, 3, 2]]
    assert torch.equal(in_order(weight, order, 1), expected)
    assert torch.equal(in_order(weight.to(torch.float8_e4m3fn), order, 1).float(), expected)
    assert torch.equal(in_order(weight[:, 0], order, 1), expected[:, 0])  # a bias
    assert torch.equal(in_order(torch.tensor(2.0), order, 1), torch.tensor(2.0))  # one scale for all rows
    scales = torch.rand(2, 1)
    assert torch.equal(in_order(scales, order, 2), scales)  # each row stays in its block
    assert torch.equal(in_order(scales, torch.tensor([2, 3, 1, 0]), 2), scales.flip(0))  # both blocks move
    with pytest.raises(ModelError, match="rows of blocks of 3 that share a scale cannot be put into another order"):
        in_order(scales, torch.tensor([0, 1, 3, 2, 4, 5]), 3)

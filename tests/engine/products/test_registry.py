"""A format with tensors of its own is one line in the list: its checkpoint is listed, checked, read and served."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.checkpoint.checkpoint import FLOATS
from baton.engine.checkpoint.quantization import Quantization
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel, DecoderStack
from baton.engine.models.registry import load_model, tensor_specs
from baton.engine.products import registry
from baton.engine.products.base import Product, StoredTensor, WeightSource
from baton.engine.products.dense import DenseProduct
from baton.engine.products.linear import Linear
from baton.kernels.products.norm import Norm
from baton.metadata.errors import ModelError

SCALED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
Checkpoint = Callable[..., Path]


@dataclass
class ScaledProduct(Product):
    """Eight-bit floats with one scale for each projection: two tensors, one of them without rows to fuse."""

    weight: Tensor  # [out_size, in_size] float8_e4m3fn
    scale: Tensor  # [out_size, 1]
    bias: Tensor | None
    in_size: int
    out_size: int

    @classmethod
    def tensors(cls, out_size: int, in_size: int, quantization: Quantization | None) -> Mapping[str, StoredTensor]:
        del quantization
        return {
            "weight": StoredTensor((out_size, in_size), ("F8_E4M3",)),
            "weight_scale": StoredTensor((), FLOATS),
        }

    @classmethod
    def build(cls, source: WeightSource) -> Self:
        weight = torch.cat([part.view(torch.int8) for part in source.parts("weight")]).view(torch.float8_e4m3fn)
        scales = torch.stack(source.parts("weight_scale"))
        scale = scales.repeat_interleave(torch.tensor(source.out_sizes)).unsqueeze(1)
        return cls(weight, scale, source.bias, source.in_size, sum(source.out_sizes))

    def __call__(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        assert norm is None and residual is None
        return F.linear(x, self.weight.float() * self.scale, self.bias)


@pytest.fixture
def scaled(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint some of whose weights are scaled 8-bit floats, beside a plain one of the same values."""
    shutil.copytree(checkpoint("llama", attention_bias=True), tmp_path / "scaled")
    shutil.copytree(tmp_path / "scaled", tmp_path / "plain")
    tensors = load_file(tmp_path / "scaled" / "model.safetensors")
    plain = dict(tensors)
    for index, name in enumerate(sorted(name for name in tensors if name.endswith(SCALED))):
        scale = torch.tensor(0.5 + index / 8)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        plain[name] = tensors[name].float() * scale
    save_file(tensors, tmp_path / "scaled" / "model.safetensors", {"format": "pt"})
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    return tmp_path / "scaled"


def load(model_dir: Path) -> DecoderModel:
    return load_model(model_dir, read_model_config(model_dir), torch.float32, "cpu")


def test_without_the_format_the_checkpoint_is_refused(scaled: Path) -> None:
    with pytest.raises(ModelError, match=r"is F8_E4M3; only F32, BF16, F16 are served"):
        load(scaled)


def test_a_new_format_is_one_line(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PRODUCTS", (ScaledProduct, *registry.PRODUCTS))
    names = load_file(scaled / "model.safetensors").keys()
    assert {spec.name for spec in tensor_specs(read_model_config(scaled), names)} == set(names)
    ours, plain, x = load(scaled), load(scaled.parent / "plain"), torch.randn(3, 64)
    assert isinstance(ours.stack, DecoderStack) and isinstance(plain.stack, DecoderStack)
    for layer, theirs in zip(ours.stack.layers, plain.stack.layers, strict=True):
        attention, mlp = layer.body.attention, layer.body.mlp
        assert isinstance(attention.qkv.product, ScaledProduct)
        assert not isinstance(attention.out.product, ScaledProduct)  # plain in the file
        torch.testing.assert_close(attention.qkv(x), theirs.body.attention.qkv(x))
        torch.testing.assert_close(mlp(x), theirs.body.mlp(x))


def test_a_scale_of_another_shape_is_refused(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PRODUCTS", (ScaledProduct, *registry.PRODUCTS))
    path = scaled / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight_scale"
    save_file(load_file(path) | {name: torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"weight_scale has shape \[2\], config.json calls for \[\]"):
        load(scaled)


def test_a_layer_of_two_formats_is_refused(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection of q, k and v is plain: no format has all tensors, and nothing is misread."""
    monkeypatch.setattr(registry, "PRODUCTS", (ScaledProduct, *registry.PRODUCTS))
    path, name = scaled / "model.safetensors", "model.layers.0.self_attn.k_proj.weight"
    tensors = load_file(path)
    del tensors[f"{name}_scale"]
    save_file(tensors | {name: torch.zeros(32, 64)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"q_proj.weight is F8_E4M3"):
        load(scaled)


def test_a_format_that_no_product_serves_here_is_refused(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(ScaledProduct):
        @classmethod
        def build(cls, source: WeightSource) -> Self | None:
            return None

    monkeypatch.setattr(registry, "PRODUCTS", (Elsewhere, *registry.PRODUCTS))
    with pytest.raises(ModelError, match=r"weights of weight and weight_scale in torch.float32 are not served on cpu"):
        load(scaled)


def test_every_weight_has_a_product() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight, x = torch.randn(6, 4).to(dtype), torch.ones(2, 4, dtype=dtype)
        torch.testing.assert_close(Linear.of(weight.clone())(x), F.linear(x, weight), atol=1e-2, rtol=1e-2)
    assert registry.PRODUCTS[-1] is DenseProduct  # it serves what the others leave

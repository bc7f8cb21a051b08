"""Models with FP8 weights against transformers' model, whose layers are made to round as the format says."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_pools import pools_of
from quantized import ONLINE, SCHEMES, Scheme, quantized, rounding_model
from recorded_roundings import recorded_roundings
from safetensors.torch import load_file, save_file
from thinned import is_whole, thinned
from ties import IndexCuts
from torch import Tensor

from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.quantization import ONLINE_FP8, Quantization
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderModel, DecoderStack
from baton.engine.models.registry import load_model
from baton.engine.products.base import WeightShard, WeightSource
from baton.engine.products.fp8 import Fp8Product, Fp8ProductOnCpu
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.kernels.operations import preferring
from baton.kernels.products.fp8 import dequantized
from baton.metadata.errors import ModelError

Checkpoint = Callable[..., Path]
PAGE_SIZE = 4
ODD = {  # blocks of 128 are cut off in every direction, and q, k and v begin within blocks
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "attention_bias": True,
}
CHUNKS = (1, 5, 13, 20, 1, 1, 1, 17, 1) if is_whole() else (1, 5, 13, 1, 1, 17)
TOLERANCE = 2e-4
MAX_FOLLOWED = 2e-4  # of all numbers: sums are about 1e-6 of a number apart, and a step is 1/15 of it or more


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", **ODD)


def forward(model: DecoderModel, config: ModelConfig, ids: list[int], chunks: tuple[int, ...]) -> Tensor:
    """Return the logits of all ids, computed chunk by chunk."""
    pages = list(range(1, 1 + -(-len(ids) // PAGE_SIZE)))
    pools = pools_of(config, PAGE_SIZE, len(pages) + 1, float("nan"), model.dtype)
    position, logits = 0, list[Tensor]()
    for size in chunks:
        row = BatchRow(ids[position : position + size], position, pages, num_logits=size)
        batch = ForwardBatch.build([row], PAGE_SIZE, "cpu")
        logits.append(model.logits(model.forward(batch, pools)[batch.logit_rows]))
        position += size
    return torch.cat(logits).float()


def check(model: DecoderModel, config: ModelConfig, plain: Path, scheme: Scheme) -> None:
    """Compare logits of all rows. Where either rounding is right, transformers' model takes ours."""
    ids = random.Random(0).choices(range(512), k=sum(CHUNKS))
    with recorded_roundings() as roundings:
        ours = forward(model, config, ids, CHUNKS)
        roundings.read()
    reference = rounding_model(plain, scheme, roundings)
    with torch.inference_mode(), IndexCuts():
        theirs = reference(torch.tensor([ids])).logits[0]
    error = (ours - theirs).abs().amax(1)
    assert error.max() < TOLERANCE, error  # roundings of another scheme differ by about 1
    assert roundings.num_followed <= MAX_FOLLOWED * roundings.num_rounded, roundings.num_followed


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_equals_transformers_that_rounds_alike(name: str, plain: Path, tmp_path: Path) -> None:
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    config = read_model_config(path)
    model = load_model(path, config, torch.float32, "cpu")
    assert isinstance(model.stack, DecoderStack)
    for layer in model.stack.layers:
        products = (layer.body.attention.qkv.product, layer.body.attention.out.product)
        assert all(isinstance(product, Fp8ProductOnCpu) for product in products)
    check(model, config, plain, SCHEMES[name])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_plain_checkpoint_is_rounded_while_it_is_read(family: str, checkpoint: Checkpoint) -> None:
    plain = checkpoint(family, **(ODD if family == "llama" else {"q_lora_rank": 48}))
    config = dataclasses.replace(read_model_config(plain), quantization=ONLINE_FP8)
    model = load_model(plain, config, torch.float32, "cpu")
    check(model, config, plain, ONLINE)
    assert not isinstance(model._lm_head.linear.product, Fp8ProductOnCpu)


def test_indexers_are_in_fp8_like_other_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """But for the weights of their heads, which the checkpoint keeps."""
    plain = checkpoint("deepseek_v32", hidden_size=160)
    path = quantized(plain, tmp_path / "fp8", SCHEMES["ue8m0"])
    config = read_model_config(path)
    model = load_model(path, config, torch.float32, "cpu")
    assert isinstance(model.stack, DecoderStack)
    for layer in model.stack.layers:
        indexer = layer.body.attention.indexer
        assert all(isinstance(each.product, Fp8ProductOnCpu) for each in (indexer.up, indexer.key))
    check(model, config, plain, SCHEMES["ue8m0"])


@pytest.mark.parametrize("family", thinned(["qwen3_next", "qwen3_5_text"], lambda i, _: i == 0))
def test_delta_rules_are_in_fp8_but_for_their_b_and_a(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Blocks of 128 rows are a head of the delta rule, and half a head of attention, a part of which is rotated."""
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
    plain = checkpoint(family, hidden_size=160, num_attention_heads=2, num_key_value_heads=1, **heads)
    path = quantized(plain, tmp_path / "fp8", SCHEMES["blocks"])
    config = read_model_config(path)
    model = load_model(path, config, torch.float32, "cpu")
    assert isinstance(model.stack, DecoderStack) and config.has_cut_heads
    first, second = model.stack.layers[0].body.attention.inputs
    assert isinstance(first.product, Fp8ProductOnCpu) and not isinstance(second.product, Fp8ProductOnCpu)
    check(model, config, plain, SCHEMES["blocks"])


@pytest.mark.parametrize("name", thinned(["blocks", "w8a8", "fp8-static"], lambda i, _: i < 2))
def test_attention_to_latents_multiplies_by_the_numbers_that_stored_weights_stand_for(
    name: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The heads' 5 * 44 rows are cut off within a block, and so is the latent."""
    sizes = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 5}
    if name == "blocks":
        sizes |= {"q_lora_rank": 48, "first_k_dense_replace": 1}  # and experts in the second layer
    plain = checkpoint("deepseek_v3", **sizes)
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    config = read_model_config(path)
    check(load_model(path, config, torch.float32, "cpu"), config, plain, SCHEMES[name])


@pytest.mark.parametrize("name", thinned(["w8a8", "w8a8-static"], lambda i, _: i == 0))
def test_scales_stay_with_rows_in_another_order(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows of queries and keys are in another order if a part of each head is rotated. One scale has no order."""
    plain = checkpoint("glm4_moe", first_k_dense_replace=2)
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    config = read_model_config(path)
    assert config.rotary_dim == 12
    check(load_model(path, config, torch.float32, "cpu"), config, plain, SCHEMES[name])


@pytest.mark.parametrize("name", ["blocks", "w8a8", "fp8-static", "w8a16"])
def test_the_product_of_a_gpu_has_the_same_numbers(name: str, plain: Path, tmp_path: Path) -> None:
    """The reference of the kernels, in place of the float32 form of a CPU."""
    path = quantized(plain, tmp_path / name, SCHEMES[name])
    config, prefix = read_model_config(path), "model.layers.1.self_attn."
    tensors, x = load_file(path / "model.safetensors"), torch.randn(7, 160, generator=torch.Generator().manual_seed(3))
    assert config.quantization is not None
    source = Stored({name.removeprefix(prefix): each for name, each in tensors.items()}, config.quantization)
    ours, theirs = Fp8ProductOnCpu.build(source), Fp8Product.build(source)
    assert ours is not None
    torch.testing.assert_close(theirs(x), ours(x), atol=1e-4, rtol=1e-5)
    with preferring("reference"):
        torch.testing.assert_close(theirs(x.bfloat16()).float(), ours(x.bfloat16().float()), atol=0.05, rtol=0.01)


class Stored(WeightSource):
    """q, k and v of tensors in memory."""

    NAMES = ("q_proj", "k_proj", "v_proj")

    def __init__(self, tensors: dict[str, Tensor], quantization: Quantization) -> None:
        self.tensors, self.quantization = tensors, quantization
        self.out_sizes = tuple(len(tensors[f"{name}.weight"]) for name in self.NAMES)
        self.in_size = tensors["q_proj.weight"].shape[1]
        self.dtype, self.device = torch.float32, torch.device("cpu")

    @property
    def bias(self) -> Tensor | None:
        return torch.cat(self.parts("bias"))

    def has(self, name: str) -> bool:
        return f"q_proj.{name}" in self.tensors

    def parts(self, name: str) -> list[Tensor]:
        return [self.tensors[f"{each}.{name}"] for each in self.NAMES]

    def fused(self, name: str) -> Tensor:
        return torch.cat(self.parts(name))


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_share_blocks(dim: int) -> None:
    values = torch.randn(384, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    whole, shards = dequantized(values, scales, 128), []
    size = 3 - dim
    for rank in range(size):
        shard = WeightShard(rank, size, dim)  # type: ignore[arg-type]
        own = shard.take_scales(scales, 0, values.shape[dim], 128)
        shards.append(dequantized(shard.take(values, 0), own, 128))
    assert torch.equal(torch.cat(shards, dim), whole)


def test_ranks_do_not_divide_a_block() -> None:
    with pytest.raises(ModelError, match="2 ranks cannot share 384 rows of a weight whose scales belong to 128 of"):
        WeightShard(1, 2, 0).take_scales(torch.ones(3, 2), 0, 384, 128)


def test_ranks_have_the_scales_of_whole_rows_and_tensors() -> None:
    column = torch.rand(8, 1)
    assert torch.equal(WeightShard(1, 2, 0).take_scales(column, 0, 8, 1), column[4:])
    padded = WeightShard(1, 2, 0, pads=True).take_scales(torch.ones(40, 1), 0, 40, 1)
    assert padded.flatten().tolist() == [1.0] * 8 + [0.0] * 24  # as the rows of the weight are
    assert torch.equal(WeightShard(1, 2, 1).take_scales(column, 0, 64, 64), column)
    assert torch.equal(WeightShard(1, 2, 1).take_scales(torch.tensor(2.0), 0, 64, 1), torch.tensor(2.0))


def test_a_missing_scale_is_named(plain: Path, tmp_path: Path) -> None:
    path = quantized(plain, tmp_path / "blocks", SCHEMES["blocks"])
    file, name = path / "model.safetensors", "model.layers.1.mlp.down_proj.weight_scale_inv"
    tensors = load_file(file)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj.weight is F8_E4M3; only F32, BF16, F16 are served"):
        load_model(path, read_model_config(path), torch.float32, "cpu")


def test_scales_of_another_scheme_are_refused(plain: Path, tmp_path: Path) -> None:
    """Nothing is misread if config.json does not fit the tensors."""
    path = quantized(plain, tmp_path / "w8a8", SCHEMES["w8a8"])
    other = quantized(plain, tmp_path / "fp8", SCHEMES["fp8"])
    shutil.copy(other / "config.json", path / "config.json")
    with pytest.raises(ModelError, match=r"weight_scale has shape \[160, 1\], config.json calls for \[\]"):
        load_model(path, read_model_config(path), torch.float32, "cpu")

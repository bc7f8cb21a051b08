"""Weights of a real model's shape that continue every prompt as planted_text.py says, with the work of a real model.

The residual stream has a planted subspace. A token's embedding fills the parts of the subspace as follows:

    low     [base]      one-hot of the low digit          one      [1]         1 for every token
    key     [key_bits]  +-1, the bits of the key          ballast  [3]         makes all embeddings equally long
    value   [num_bits]  +-1, the bits that reads take     result   [num_bits]  0; heads write the bits they read here

All other weights are random. Random heads and MLPs read the whole stream, but write only outside of the subspace. They
write so little that every norm scales the subspace by nearly the same factor; in 16 bits it is exactly the same.

A read is one query head with its kv head. Each read has its own layer if there are enough layers.

    by content   q = the bits of the target +-1, k = the bits of the key +-1, bit b weighted with 2^b: the score falls
                 by SHARPNESS for every unit of (key XOR target). Bit b lies in the first half of a rotary pair with a
                 low frequency (the highest bit in the lowest), which hardly turns over the whole context.
    by position  k = 1 in the pairs with high frequencies, q = the same turned back by `offset`: the score is a sum of
                 cosines of (distance - offset), which is highest at the distance nearest to the offset.

planted_heads.py makes the heads, also those over latents.

A read needs a layer without a window. Sinks are so low that they take no weight. DeepSeek-V4, whose layers all have
one, has a text of its own (planted_entries.py).

The lm_head compares: GAMMA for the low digit, GAMMA / 2 for each right bit, minus GAMMA / 2 for each wrong bit.
Sources: rotary pairs as in engine/attention; the metric is that of Kademlia (Maymounkov and Mazieres, 2002).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planted_delta import DeltaHeads
from planted_entries import PlantedEntries
from planted_heads import RESULT, ROPE_THETA, Dims, Heads, LatentHeads, Place
from planted_stream import SINK, Stream, comparing, embedding
from planted_text import PlantedText
from tensor_files import SHARD_BYTES, standard_normal, write_config, write_shards, write_tokenizer
from torch import Tensor

from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.made_checkpoint import EveryName, dummy_tensor
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.models.registry import tensor_specs
from baton.kernels.experts.mxfp4 import GROUP
from baton.kernels.products.fp8 import BLOCK, LARGEST, round_to_scale_ref
from baton.metadata.errors import ModelError

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
PLANTED = {
    "tie_word_embeddings": False,
    "rope_theta": ROPE_THETA,
    "rope_scaling": {"rope_type": "default"},
    "_planted": True,
}


class PlantedModel:
    """Makes the tensors of one planted model, float32."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Raises ModelError if the sizes cannot hold a text."""
        self.config = config
        self.seed = seed
        self.text = PlantedText(config.vocab_size, None if config.delta is None else config.delta.key_dim)
        self.dims = Dims.of(self.text)
        self.stream = Stream.of(self.text, self.dims, config.hidden_size, config.rms_norm_eps)
        heads = DeltaHeads if config.delta is not None else Heads if config.latent is None else LatentHeads
        self.heads = heads(config, self.text, self.dims, self.stream.scale)
        self.places = self._places()

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the values of one of `tensor_specs(config)`."""
        if spec.dtypes[0] == "U8":
            return self._packed(spec)
        drawn = standard_normal(spec.name, spec.shape, self.seed)
        if spec.name == "model.embed_tokens.weight":
            unset = [bit for bit, read in enumerate(self.text.reads) if read.address_bits]
            return embedding(drawn, self.text, self.dims, self.stream, self.config.checkpoint_dtype, unset=unset)
        if spec.name == "lm_head.weight":
            return self._lm_head(drawn)
        places = [place for place in self.places if spec.name.startswith(f"model.layers.{place.layer}.")]
        if spec.name.endswith(("bias", "sinks")) and not spec.name.endswith("dt_bias"):
            return drawn.fill_(SINK if spec.name.endswith("sinks") else 0.0)
        if len(spec.shape) == 1:
            return self.heads.norm_weight(spec.name, drawn.fill_(1.0), places)
        drawn.mul_(random_scale(spec, self._added))
        if spec.name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            drawn[: self.dims.size] = 0.0
        if spec.name.endswith(("router.weight", "mlp.gate.weight")):
            # What all tokens have in common would send them to the same experts.
            drawn[:, [self.dims.one, *range(self.dims.ballast.start, self.dims.ballast.stop)]] = 0.0
        self.heads.plant(spec.name.rsplit(".", 2)[-2], drawn, places)
        return drawn

    @property
    def _added(self) -> float:
        """Roughly what a random sublayer adds to each dimension of the stream."""
        return self.stream.random / math.sqrt(2 * self.config.num_layers)

    def _packed(self, spec: TensorSpec) -> Tensor:
        """Return random blocks or scales of experts in MXFP4, as dummies have them but for what `down_proj` writes."""
        made = dummy_tensor(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if spec.name.endswith("down_proj_blocks"):
            made[:, : self.dims.size] = 0
        elif spec.name.endswith("down_proj_scales"):
            made -= round(-math.log2(self._added * 2))
        return made

    def _places(self) -> list[Place]:
        """Place the reads from the first layer to the last without a window, each on its own kv head. A read by state
        is in the middle one of the layers with states."""
        delta = () if self.config.delta is None else self.config.delta.layers
        windows = enumerate(self.config.sliding_window)
        layers = [layer for layer, window in windows if window is None and layer not in delta]
        if not layers:
            raise ModelError(f"no layer of {self.config.architecture} attends to all tokens, as planted texts need")
        by_state = [bit for bit, read in enumerate(self.text.reads) if read.address_bits]
        bits = [bit for bit in range(self.text.num_bits) if bit not in by_state]
        last, num_heads = len(layers) - 1, self.heads.num_heads
        places = [
            Place(layers[round(at * last / (len(bits) - 1))], at % num_heads, bit, self.text.reads[bit])
            for at, bit in enumerate(bits)
        ]
        if len({place[:2] for place in places}) < len(bits):
            raise ModelError(f"{len(bits)} reads need more layers, or more kv heads in each")
        return places + [Place(delta[len(delta) // 2], 1, bit, self.text.reads[bit]) for bit in by_state]

    def _lm_head(self, drawn: Tensor) -> Tensor:
        rows = torch.from_numpy(self.text.ids[: self.text.num_codes])
        return comparing(drawn, self.text, self.dims, rows, self.stream.scale, RESULT * self.stream.scale)


def planted_model(config: ModelConfig, seed: int = 0) -> PlantedModel | PlantedEntries:
    """Return what makes the tensors of a model, and knows its text. Raises ModelError if the sizes cannot hold one."""
    return PlantedModel(config, seed) if config.compressed is None else PlantedEntries(config, seed)


def maker(config: ModelConfig) -> Callable[[TensorSpec], Tensor]:
    """Return what makes the tensors of a planted model, for --load-format planted:maker. Raises ModelError for a format
    of quantized weights in which no text is planted."""
    model, quantization = planted_model(config), config.quantization
    if quantization is None or quantization.is_online or quantization.weight_scale == "mxfp4":
        return model.tensor
    if quantization.weight_scale != "blocks" or quantization.rounding != "groups":
        raise ModelError(f"weights in FP8 with scales of each {quantization.weight_scale}: a text is planted in blocks")
    specs = {spec.name: spec for spec in tensor_specs(config, EveryName())}

    @functools.lru_cache(maxsize=1)  # values and scales of a weight are asked for one after the other
    def both(name: str) -> tuple[Tensor, Tensor]:
        spec = specs[name]
        if "I8" not in spec.dtypes:
            return in_blocks(model.tensor(spec))
        rows, num_bytes = spec.shape
        return in_groups(model.tensor(replace(spec, shape=(rows, 2 * num_bytes))))

    def make(spec: TensorSpec) -> Tensor:
        stem, _, last = spec.name.rpartition(".")
        is_scale = last == quantization.scale_name
        if not is_scale and not {"F8_E4M3", "I8"} & set(spec.dtypes):
            return model.tensor(spec)
        values, scales = both(f"{stem}.weight")
        if not is_scale:
            return values
        return scales.log2().add(127).to(torch.uint8) if spec.dtypes[0] == "F8_E8M0" else scales

    return make


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out_size, in_size] in FP8, and the scales of its blocks. These are powers of two, so that powers
    of two in the weight stay exact."""
    rows, columns = weight.shape
    blocks = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    return round_to_scale_ref(blocks, scales).flatten(2).flatten(0, 1)[:rows, :columns], scales[:, 0, :, 0]


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out_size, in_size] in MXFP4 as checkpoints have it, [out_size, in_size / 2] uint8, and scales
    of its groups, [out_size, in_size / GROUP] float32. Powers of two in the weight stay exact."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(2, keepdim=True).clamp_min(2.0**-100)
    scales = torch.exp2(torch.ceil(torch.log2(largest / _FP4[-1])))
    steps = torch.tensor(_FP4, device=weight.device)
    codes = torch.bucketize((groups / scales).abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes = codes.add_(8 * (groups < 0)).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales[:, :, 0]


def write_planted(
    directory: Path, fields: dict[str, Any], *, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> PlantedModel | PlantedEntries:
    """Write a model as `write_random` does, with a text planted in it.

    All shapes stay. Embedding and head are separate, and the rotary frequencies are lower.
    """
    config = write_config(directory, fields | PLANTED)
    model, dtype = planted_model(config, seed), getattr(torch, config.checkpoint_dtype)
    made = ((spec.name, model.tensor(spec)) for spec in tensor_specs(config))
    stored = ((name, each.to(dtype) if each.is_floating_point() else each) for name, each in made)
    write_shards(directory, stored, shard_bytes)
    write_tokenizer(directory, config.vocab_size)
    return model


def random_scale(spec: TensorSpec, added: float) -> float:
    """Return the scale of a random matrix. `added`: roughly what a sublayer adds to each dimension of the stream."""
    scale = 1 / math.sqrt(spec.shape[1])
    if spec.name.endswith(("o_proj.weight", "out_proj.weight")):
        return scale * added
    return scale * added * 2 if spec.name.endswith("down_proj.weight") else scale

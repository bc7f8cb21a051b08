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

A read needs a layer without a window. Sinks are so low that they take no weight.

The lm_head compares: GAMMA for the low digit, GAMMA / 2 for each right bit, minus GAMMA / 2 for each wrong bit.
Sources: rotary pairs as in engine/attention; the metric is that of Kademlia (Maymounkov and Mazieres, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planted_delta import DeltaHeads
from planted_heads import RESULT, ROPE_THETA, Dims, Heads, LatentHeads, Place
from planted_text import PlantedText
from tensor_files import SHARD_BYTES, standard_normal, write_config, write_shards, write_tokenizer
from torch import Tensor

from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.made_checkpoint import EveryName, dummy_tensor
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.models.registry import tensor_specs
from baton.kernels.products.fp8 import BLOCK, LARGEST, round_to_scale_ref
from baton.metadata.errors import ModelError

GAMMA = 2.5  # by how much the right token's logit leads
RANDOM_ENERGY = 2e-4  # of an embedding's, outside of the subspace
RANDOM_LOGIT = 0.05  # standard deviation of what that adds to logits
SINK = -1e6  # far below the score of every key

PLANTED = {
    "tie_word_embeddings": False,
    "rope_theta": ROPE_THETA,
    "rope_scaling": {"rope_type": "default"},
    "_planted": True,
}


@dataclass(frozen=True, slots=True)
class Stream:
    """The length of the embeddings, which decides how a norm scales the subspace."""

    hidden_size: int
    scale: float  # a norm turns 1 into this: a power of two
    energy: float  # sum of an embedding's squares
    random: float  # standard deviation outside of the subspace

    @classmethod
    def of(cls, text: PlantedText, dims: Dims, hidden_size: int, eps: float) -> Stream:
        needed = 2 + text.key_bits + text.num_bits + 1  # squares of an embedding's parts, and some ballast
        scale = 2.0 ** math.floor(math.log2(hidden_size / needed) / 2) if hidden_size > needed else 0.0
        if scale < 2 or hidden_size < 2 * dims.size:
            raise ModelError(f"hidden_size {hidden_size} is too small to plant a text of {dims.size} dimensions in")
        energy = hidden_size * (1 / scale**2 - eps)
        return cls(hidden_size, scale, energy, math.sqrt(RANDOM_ENERGY * energy / (hidden_size - dims.size)))


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


def maker(config: ModelConfig) -> Callable[[TensorSpec], Tensor]:
    """Return what makes the tensors of a planted model, for --load-format planted:maker. Raises ModelError for a format
    of quantized weights in which no text is planted."""
    model, quantization = PlantedModel(config), config.quantization
    if quantization is None or quantization.is_online or quantization.weight_scale == "mxfp4":
        return model.tensor
    if quantization.weight_scale != "blocks" or quantization.rounding != "groups":
        raise ModelError(f"weights in FP8 with scales of each {quantization.weight_scale}: a text is planted in blocks")
    shapes = {spec.name: spec.shape for spec in tensor_specs(config, EveryName())}

    def make(spec: TensorSpec) -> Tensor:
        end = quantization.scale_name
        if "F8_E4M3" not in spec.dtypes and not spec.name.endswith(end):
            return model.tensor(spec)
        name = f"{spec.name.removesuffix(end)}weight" if spec.name.endswith(end) else spec.name
        values, scales = in_blocks(model.tensor(TensorSpec(name, shapes[name])))
        return scales if spec.name.endswith(end) else values

    return make


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out_size, in_size] in FP8, and the scales of its blocks. These are powers of two, so that powers
    of two in the weight stay exact."""
    rows, columns = weight.shape
    blocks = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    return round_to_scale_ref(blocks, scales).flatten(2).flatten(0, 1)[:rows, :columns], scales[:, 0, :, 0]


def write_planted(
    directory: Path, fields: dict[str, Any], *, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> PlantedModel:
    """Write a model as `write_random` does, with a text planted in it.

    All shapes stay. Embedding and head are separate, and the rotary frequencies are lower.
    """
    config = write_config(directory, fields | PLANTED)
    model, dtype = PlantedModel(config, seed), getattr(torch, config.checkpoint_dtype)
    write_shards(directory, ((spec.name, model.tensor(spec).to(dtype)) for spec in tensor_specs(config)), shard_bytes)
    write_tokenizer(directory, config.vocab_size)
    return model


def embedding(
    drawn: Tensor,
    text: PlantedText,
    dims: Dims,
    stream: Stream,
    dtype: str,
    low: Tensor | None = None,
    unset: Sequence[int] = (),
) -> Tensor:
    """Turn normal noise [vocab_size, hidden_size], in place, into embeddings that have equal length in `dtype`.

    `low` [vocab_size] int64 replaces the low digits. The results of the bits `unset` begin as 0 of a bit.
    """
    drawn.mul_(stream.random)
    drawn[:, : dims.size] = 0.0
    drawn.copy_(drawn.to(getattr(torch, dtype)))
    rows = torch.arange(text.vocab_size, device=drawn.device)
    low = torch.from_numpy(text.low).to(drawn.device) if low is None else low
    keys, values = (torch.from_numpy(each).to(drawn.device) for each in (text.keys, text.values))
    drawn[rows, dims.low.start + low] = 1.0
    drawn[:, dims.key] = _signs(keys.unsqueeze(1) >> torch.arange(text.key_bits, device=drawn.device) & 1)
    drawn[:, dims.value] = _signs(values)
    drawn[:, dims.one] = 1.0
    drawn[:, [dims.result.start + bit for bit in unset]] = -RESULT
    rest = stream.energy - torch.cat([block.square().sum(1) for block in drawn.split(4096)])
    for dim in range(dims.ballast.start, dims.ballast.stop):
        drawn[:, dim] = _rounded_down(rest.clamp_min(0.0).sqrt(), dtype)
        rest -= drawn[:, dim].square()
    return drawn


def random_scale(spec: TensorSpec, added: float) -> float:
    """Return the scale of a random matrix. `added`: roughly what a sublayer adds to each dimension of the stream."""
    scale = 1 / math.sqrt(spec.shape[1])
    if spec.name.endswith(("o_proj.weight", "out_proj.weight")):
        return scale * added
    return scale * added * 2 if spec.name.endswith("down_proj.weight") else scale


def comparing(drawn: Tensor, text: PlantedText, dims: Dims, rows: Tensor, low_scale: float, bit_scale: float) -> Tensor:
    """Turn normal noise [num_rows, hidden_size], in place, into an lm_head that compares low digit and bits.

    The head sees the low digit as `low_scale` and the bits as +-`bit_scale`. Code c has the row rows[c]; `rows` is
    [num_codes] int64.
    """
    drawn.mul_(RANDOM_LOGIT / math.sqrt(2 * RANDOM_ENERGY * drawn.shape[1]))
    drawn[:, : dims.size] = 0.0
    rows, codes = rows.to(drawn.device), torch.arange(text.num_codes, device=drawn.device)
    bits = (codes // text.base).unsqueeze(1) >> torch.arange(text.num_bits, device=drawn.device) & 1
    drawn[rows, dims.low.start + (codes - 1) % text.base] = GAMMA / low_scale
    drawn[rows, dims.result] = _signs(bits) * (GAMMA / 2 / bit_scale)
    return drawn


def _signs(bits: Tensor) -> Tensor:
    return bits.float() * 2 - 1


def _rounded_down(values: Tensor, dtype: str) -> Tensor:
    dropped = {"float32": 0, "bfloat16": 16, "float16": 13}[dtype]  # bits of float32's mantissa
    return (values.view(torch.int32) >> dropped << dropped).view(torch.float32)

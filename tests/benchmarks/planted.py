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

The lm_head compares: GAMMA for the low digit, GAMMA / 2 for each right bit, minus GAMMA / 2 for each wrong bit.
Sources: rotary pairs as in engine/rope.py; the metric is that of Kademlia (Maymounkov and Mazieres, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from planted_text import PlantedText, Read
from tensor_files import SHARD_BYTES, standard_normal, write_config, write_shards, write_tokenizer
from torch import Tensor

from baton.engine.checkpoint import TensorSpec
from baton.engine.model_config import ModelConfig
from baton.engine.models.registry import tensor_specs
from baton.engine.rope import inverse_frequencies
from baton.metadata.errors import ModelError

ROPE_THETA = 1e9
GAMMA = 2.5  # by how much the right token's logit leads
SHARPNESS = 16.0  # between the scores of neighbouring keys
POSITION_GAP = 24.0  # between the scores of neighbouring positions
RESULT = 1 / 16  # what a head writes; small, so that the stream's length hardly changes
RANDOM_ENERGY = 2e-4  # of an embedding's, outside of the subspace
RANDOM_LOGIT = 0.05  # standard deviation of what that adds to logits
_SLOW = 0.1  # most that a bit may lose by rotation, in SHARPNESS; least lead of a position, in cosines
_FAST = 0.01  # least frequency that tells positions
_MAX_CONTEXT = 16384


PLANTED = {"tie_word_embeddings": False, "rope_theta": ROPE_THETA, "rope_scaling": None, "planted": True}


class Dims(NamedTuple):
    """The place of each part of the subspace in the residual stream."""

    low: slice
    key: slice
    value: slice
    one: int
    ballast: slice
    result: slice
    size: int  # of the subspace: the first dimensions

    @classmethod
    def of(cls, text: PlantedText) -> Dims:
        sizes = (text.base, text.key_bits, text.num_bits, 1, 3, text.num_bits)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        low, key, value, one, ballast, result = (slice(e - s, e) for s, e in zip(sizes, ends, strict=True))
        return cls(low, key, value, one.start, ballast, result, ends[-1])


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


class Place(NamedTuple):
    """The place of one read: layer, kv head and bit."""

    layer: int
    kv_head: int
    bit: int
    read: Read


class PlantedModel:
    """Makes the tensors of one planted model, float32."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Raises ModelError if the sizes cannot hold a text."""
        self.config = config
        self.seed = seed
        self.text = PlantedText(config.vocab_size)
        self.dims = Dims.of(self.text)
        self.stream = Stream.of(self.text, self.dims, config.hidden_size, config.rms_norm_eps)
        self.heads = Heads(config, self.text, self.dims, self.stream.scale)
        self.places = self._places()

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the values of one of `tensor_specs(config)`."""
        drawn = standard_normal(spec.name, spec.shape, self.seed)
        if spec.name == "model.embed_tokens.weight":
            return embedding(drawn, self.text, self.dims, self.stream, self.config.checkpoint_dtype)
        if spec.name == "lm_head.weight":
            return self._lm_head(drawn)
        places = [place for place in self.places if spec.name.startswith(f"model.layers.{place.layer}.")]
        if len(spec.shape) == 1:
            return self.heads.norm_weight(spec.name, drawn.fill_(1.0), places)
        drawn.mul_(random_scale(spec, self.stream.random / math.sqrt(2 * self.config.num_layers)))
        if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn[: self.dims.size] = 0.0
        projection = spec.name.rsplit(".", 2)[-2]
        if projection == "q_proj":  # random heads do not see what reads look for
            for place in places:
                self.heads.blind(drawn, place.read)
        for place in places:
            self._plant(projection, drawn, place)
        return drawn

    def _places(self) -> list[Place]:
        """Place the reads from the first layer to the last, each on its own kv head."""
        last, num_bits = self.config.num_layers - 1, self.text.num_bits
        places = [
            Place(round(bit * last / (num_bits - 1)), bit % self.config.num_kv_heads, bit, read)
            for bit, read in enumerate(self.text.reads)
        ]
        if len({place[:2] for place in places}) < num_bits:
            raise ModelError(f"{num_bits} reads need more layers, or more kv heads in each")
        return places

    def _plant(self, projection: str, weight: Tensor, place: Place) -> None:
        head_dim = self.config.head_dim
        query_head = place.kv_head * self.config.num_heads // self.config.num_kv_heads
        start = (query_head if projection in ("q_proj", "o_proj") else place.kv_head) * head_dim
        match projection:
            case "q_proj":
                weight[start : start + head_dim] = self.heads.query(place.read).to(weight)
            case "k_proj":
                weight[start : start + head_dim] = self.heads.key(place.read).to(weight)
            case "v_proj":
                weight[start] = 0.0
                weight[start, self.dims.value.start + place.bit] = 1 / self.stream.scale
            case "o_proj":
                weight[self.dims.result.start + place.bit, start] = RESULT
            case _:
                pass

    def _lm_head(self, drawn: Tensor) -> Tensor:
        rows = torch.from_numpy(self.text.ids[: self.text.num_codes])
        return comparing(drawn, self.text, self.dims, rows, self.stream.scale, RESULT * self.stream.scale)


class Heads:
    """Query and key rows of a read, for a stream in which a norm turns 1 into `scale`."""

    def __init__(self, config: ModelConfig, text: PlantedText, dims: Dims, scale: float) -> None:
        self.config, self.text, self.dims, self.scale = config, text, dims, scale
        self._check()

    @cached_property
    def frequencies(self) -> Tensor:
        """[head_dim / 2] float64 radians per position, falling."""
        return inverse_frequencies(self.config.rope, self.config.head_dim).double()

    @cached_property
    def context_len(self) -> int:
        """Number of positions over which reads are exact."""
        return min(self.config.context_len, _MAX_CONTEXT)

    @property
    def num_fast(self) -> int:
        """Number of pairs that distinguish positions."""
        return int((self.frequencies >= _FAST).sum())

    def query(self, read: Read) -> Tensor:
        """Return the rows of q_proj of a read, [head_dim, hidden_size]."""
        rows = torch.zeros(self.config.head_dim, self.config.hidden_size)
        pairs, gain = self._pairs(read), self._gain(read)[0]
        if read.offset is None:
            for bit, pair in enumerate(pairs):
                source = (bit - read.rotation) % self.text.key_bits
                rows[pair, self.dims.key.start + source] = -1.0 if read.mask >> bit & 1 else 1.0
        else:
            angle = -read.offset * self.frequencies[: len(pairs)].float()
            rows[pairs, self.dims.one] = angle.cos()
            rows[[pair + self.config.head_dim // 2 for pair in pairs], self.dims.one] = angle.sin()
        return rows / self.scale * (1.0 if self.config.qk_norm else gain.unsqueeze(1))

    def key(self, read: Read) -> Tensor:
        """Return the rows of k_proj of a read, [head_dim, hidden_size]."""
        rows = torch.zeros(self.config.head_dim, self.config.hidden_size)
        pairs, gain = self._pairs(read), self._gain(read)[1]
        for bit, pair in enumerate(pairs):
            rows[pair, self.dims.key.start + bit if read.offset is None else self.dims.one] = 1.0
        return rows / self.scale * (1.0 if self.config.qk_norm else gain.unsqueeze(1))

    def blind(self, q_proj: Tensor, read: Read) -> None:
        """Remove from all query heads what this read looks at."""
        q_proj.view(-1, self.config.head_dim, q_proj.shape[1])[:, self.gain_dims(read)] = 0.0

    def gain_dims(self, read: Read) -> list[int]:
        """Return the dimensions of a head that the read uses."""
        return self._gain(read)[0].nonzero().flatten().tolist()

    def norm_weight(self, name: str, weight: Tensor, places: list[Place]) -> Tensor:
        """Put the weights of reads into the norms of q and k. A norm scales ones to sqrt(head_dim / their number)."""
        for place in places if name.endswith(("q_norm.weight", "k_norm.weight")) else []:
            gain = self._gain(place.read)["k_norm" in name].to(weight)
            used = self.gain_dims(place.read)
            weight[used] = gain[used] * math.sqrt(len(self._pairs(place.read)) / self.config.head_dim)
        return weight

    def _pairs(self, read: Read) -> list[int]:
        half = self.config.head_dim // 2
        return list(range(half - self.text.key_bits, half)) if read.offset is None else list(range(self.num_fast))

    def _gain(self, read: Read) -> tuple[Tensor, Tensor]:
        """Return the weights of q and k, each [head_dim]."""
        pairs, half = self._pairs(read), self.config.head_dim // 2
        q, k = torch.zeros(2, self.config.head_dim)
        if read.offset is None:
            bits = torch.arange(len(pairs))
            k[pairs] = 2.0 ** (bits // 2)
            q[pairs] = SHARPNESS / 2 * math.sqrt(self.config.head_dim) * 2.0 ** (bits - bits // 2)
        else:
            k[pairs] = 1.0
            q[pairs] = q[[half + pair for pair in pairs]] = self._position_gain
            k[[half + pair for pair in pairs]] = 1.0 if self.config.qk_norm else 0.0
        return q, k

    @cached_property
    def _position_gain(self) -> float:
        return POSITION_GAP / self._position_slope * math.sqrt(self.config.head_dim)

    @cached_property
    def _position_slope(self) -> float:
        """The least lead of the right position's sum of cosines."""
        frequencies = self.frequencies[: self.num_fast]
        distance = torch.arange(self.context_len).double()
        sums = sum(torch.cos(distance * frequency) for frequency in frequencies)
        assert isinstance(sums, Tensor)
        offset = max(read.offset or 0 for read in self.text.reads)
        first = sums[:offset] - sums[1 : offset + 1]  # of those nearest where there are fewer tokens
        return min(float(first.min()), float(sums[0] - sums[1:].max()))

    def _check(self) -> None:
        half, key_bits = self.config.head_dim // 2, self.text.key_bits
        if half < key_bits + self.num_fast or self.num_fast == 0:
            raise ModelError(f"head_dim {2 * half} has not the {key_bits} + {self.num_fast} pairs that reads need")
        turned = 1 - torch.cos(self.frequencies[half - key_bits :] * self.context_len)
        loss = float((turned * 2.0 ** torch.arange(key_bits)).max())
        if loss > _SLOW or self._position_slope < _SLOW:
            raise ModelError(
                f"head_dim {2 * half} at rope_theta {self.config.rope.theta:g} cannot tell tokens and positions over"
                f" {self.context_len} positions; plant with head_dim 64 or more and rope_theta {ROPE_THETA:g}"
            )


def maker(config: ModelConfig) -> Callable[[TensorSpec], Tensor]:
    """Return what makes the tensors of a planted model, for --load-format planted:maker."""
    return PlantedModel(config).tensor


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
    drawn: Tensor, text: PlantedText, dims: Dims, stream: Stream, dtype: str, low: Tensor | None = None
) -> Tensor:
    """Turn normal noise [vocab_size, hidden_size], in place, into embeddings that have equal length in `dtype`.

    `low` [vocab_size] int64 replaces the low digits.
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
    rest = stream.energy - torch.cat([block.square().sum(1) for block in drawn.split(4096)])
    for dim in range(dims.ballast.start, dims.ballast.stop):
        drawn[:, dim] = _rounded_down(rest.clamp_min(0.0).sqrt(), dtype)
        rest -= drawn[:, dim].square()
    return drawn


def random_scale(spec: TensorSpec, added: float) -> float:
    """Return the scale of a random matrix. `added`: roughly what a sublayer adds to each dimension of the stream."""
    scale = 1 / math.sqrt(spec.shape[1])
    if spec.name.endswith("o_proj.weight"):
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

"""The reads of a planted text (planted.py) as heads of attention: over keys and values, or over latents.

A read's score is the sum of products of the bits of a target with the bits of a key, bit b weighted with 2^b, or a sum
of cosines of a distance. Powers of two, and rows that share one factor, are exact in 16 bits.

Latents (MLA, DeepSeek-V2, arXiv:2405.04434) hold the bits of a token's key and of its values, +-1 before their norm. A
ballast makes their length such that the norm scales them by a power of two. Content is not rotated there, and the part
of a key that is rotated is 1 in the pairs that tell positions. A head's W_K picks the bits of the key, with their
weights, and its W_V the bit that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from planted_text import PlantedText, Read
from torch import Tensor

from baton.engine.attention.attention import inverse_frequencies
from baton.engine.checkpoint.model_config import LatentConfig, ModelConfig
from baton.metadata.errors import ModelError

ROPE_THETA = 1e9
SHARPNESS = 16.0  # between the scores of neighbouring keys
POSITION_GAP = 24.0  # between the scores of neighbouring positions
RESULT = 1 / 16  # what a head writes; small, so that the stream's length hardly changes
_SLOW = 0.1  # most that a bit may lose by rotation, in SHARPNESS; least lead of a position, in cosines
_FAST = 0.01  # least frequency that tells positions
_MAX_CONTEXT = 16384
_LATENT_ENERGY = 2e-4  # of what latents have beside the bits, of the bits'
_NUM_BALLAST = 2  # numbers of a latent; the second takes what 16 bits leave of the first


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


class Place(NamedTuple):
    """The place of one read: layer, head (that of keys and values, if there are such heads) and bit."""

    layer: int
    head: int
    bit: int
    read: Read


class Positions:
    """The rotary pairs of a head, as reads by position use them."""

    def __init__(self, config: ModelConfig, text: PlantedText, dim: int) -> None:
        """`dim`: numbers of a head that are rotated."""
        self.frequencies = inverse_frequencies(config.rope, dim).double()  # [dim / 2] radians per position, falling
        self.context_len = min(config.context_len, _MAX_CONTEXT)  # over which reads are exact
        self.num_fast = int((self.frequencies >= _FAST).sum())  # pairs that tell positions
        self._offset = max(read.offset or 0 for read in text.reads)
        self._scale = config.softmax_scale

    @property
    def gain(self) -> float:
        """The weight of a query."""
        return POSITION_GAP / self.slope / self._scale

    @cached_property
    def slope(self) -> float:
        """The least lead of the right position's sum of cosines."""
        frequencies = self.frequencies[: self.num_fast]
        distance = torch.arange(self.context_len).double()
        sums = sum(torch.cos(distance * frequency) for frequency in frequencies)
        if not isinstance(sums, Tensor):  # no pair is fast
            return 0.0
        first = sums[: self._offset] - sums[1 : self._offset + 1]  # of those nearest where there are fewer tokens
        return min(float(first.min()), float(sums[0] - sums[1:].max()))

    def turned_back(self, offset: int) -> tuple[Tensor, Tensor]:
        """Return both halves of the fast pairs of a query, each [num_fast]."""
        angle = -offset * self.frequencies[: self.num_fast].float()
        return angle.cos(), angle.sin()


class Heads:
    """Reads by query heads with a head of keys and values each, for a stream in which a norm turns 1 into `scale`."""

    def __init__(self, config: ModelConfig, text: PlantedText, dims: Dims, scale: float) -> None:
        """Raises ModelError if the heads are too narrow."""
        self.config, self.text, self.dims, self.scale = config, text, dims, scale
        self.num_heads = config.num_kv_heads
        self.rotary_dim = config.rotary_dim or config.head_dim
        self.positions = Positions(config, text, self.rotary_dim)
        self._check()

    def plant(self, projection: str, weight: Tensor, places: Sequence[Place]) -> None:
        """Write the reads of a layer into one of its matrices, in place."""
        if projection == "q_proj":  # random heads do not see what reads look for
            for place in places:
                self.blind(weight, place.read)
        for place in places:
            self._plant(projection, weight, place)

    def _plant(self, projection: str, weight: Tensor, place: Place) -> None:
        head_dim = self.config.head_dim
        query_head = place.head * self.config.num_heads // self.config.num_kv_heads
        start = (query_head if projection in ("q_proj", "o_proj") else place.head) * head_dim
        match projection:
            case "q_proj":
                weight[start : start + head_dim] = self.query(place.read).to(weight)
            case "k_proj":
                weight[start : start + head_dim] = self.key(place.read).to(weight)
            case "v_proj":
                weight[start] = 0.0
                weight[start, self.dims.value.start + place.bit] = 1 / self.scale
            case "o_proj":
                weight[self.dims.result.start + place.bit, start] = RESULT
            case _:
                pass

    def query(self, read: Read) -> Tensor:
        """Return the rows of q_proj of a read, [head_dim, hidden_size]."""
        rows = torch.zeros(self.config.head_dim, self.config.hidden_size)
        pairs, gain = self._pairs(read), self._gain(read)[0]
        if read.offset is None:
            for bit, pair in enumerate(pairs):
                rows[pair, self.dims.key.start + _source(self.text, read, bit)] = _sign(read, bit)
        else:
            rows[pairs, self.dims.one], rows[self._second(pairs), self.dims.one] = self.positions.turned_back(
                read.offset
            )
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

    def norm_weight(self, name: str, weight: Tensor, places: Sequence[Place]) -> Tensor:
        """Put the weights of reads into the norms of q and k. A norm scales ones to sqrt(head_dim / their number)."""
        for place in places if name.endswith(("q_norm.weight", "k_norm.weight")) else []:
            gain = self._gain(place.read)["k_norm" in name].to(weight)
            used = self.gain_dims(place.read)
            weight[used] = gain[used] * math.sqrt(len(self._pairs(place.read)) / self.config.head_dim)
        return weight

    def _pairs(self, read: Read) -> list[int]:
        """Return the first dimensions of the rotary pairs of a read by position, or the dimensions of one by content:
        those of slow pairs, or some that are not rotated."""
        if read.offset is not None:
            return list(range(self.positions.num_fast))
        end = self.rotary_dim // 2
        if self.rotary_dim < self.config.head_dim:
            end = self.rotary_dim + self.text.key_bits
        return list(range(end - self.text.key_bits, end))

    def _second(self, pairs: Sequence[int]) -> list[int]:
        return [pair + self.rotary_dim // 2 for pair in pairs]

    def _gain(self, read: Read) -> tuple[Tensor, Tensor]:
        """Return the weights of q and k, each [head_dim]."""
        pairs = self._pairs(read)
        q, k = torch.zeros(2, self.config.head_dim)
        if read.offset is None:
            q[pairs], k[pairs] = _bit_gains(len(pairs), self.config.softmax_scale)
        else:
            k[pairs] = 1.0
            q[pairs] = q[self._second(pairs)] = self.positions.gain
            k[self._second(pairs)] = 1.0 if self.config.qk_norm else 0.0
        return q, k

    def _check(self) -> None:
        positions, half, key_bits = self.positions, self.rotary_dim // 2, self.text.key_bits
        num_plain = self.config.head_dim - self.rotary_dim
        if half < positions.num_fast + (0 if num_plain else key_bits) or positions.num_fast == 0:
            needed = f"{key_bits} + {positions.num_fast} pairs that reads need"
            raise ModelError(f"head_dim {self.config.head_dim}, {2 * half} of it rotated, has not the {needed}")
        if 0 < num_plain < key_bits:
            raise ModelError(
                f"head_dim {self.config.head_dim} has {num_plain} numbers that are not rotated; plant with none, or "
                f"with the {key_bits} that reads need"
            )
        turned = (
            torch.zeros(1) if num_plain else 1 - torch.cos(positions.frequencies[-key_bits:] * positions.context_len)
        )
        loss = float((turned * 2.0 ** torch.arange(len(turned))).max())
        if loss > _SLOW or positions.slope < _SLOW:
            raise ModelError(
                f"head_dim {2 * half} at rope_theta {self.config.rope.theta:g} cannot tell tokens and positions over"
                f" {positions.context_len} positions; plant with head_dim 64 or more and rope_theta {ROPE_THETA:g}"
            )


class LatentHeads:
    """Reads over latents, for a stream in which a norm turns 1 into `scale`."""

    def __init__(self, config: ModelConfig, text: PlantedText, dims: Dims, scale: float) -> None:
        """Raises ModelError if the latents are too narrow."""
        assert config.latent is not None, config
        self.config, self.text, self.dims, self.scale = config, text, dims, scale
        self.latent: LatentConfig = config.latent
        self.num_heads = config.num_heads
        self.positions = Positions(config, text, self.latent.rope_dim)
        self.num_bits = text.key_bits + text.num_bits
        # the norm turns +-1 into this: a power of two
        self.of_one = 2.0 ** math.floor(math.log2(self.latent.rank / (self.num_bits + 1)) / 2)
        self._check()

    def plant(self, projection: str, weight: Tensor, places: Sequence[Place]) -> None:
        """Write the reads of a layer into one of its matrices, in place."""
        if projection == "kv_a_proj_with_mqa":
            self._plant_latents(weight)
        for place in places:
            match projection:
                case "q_proj":
                    self._plant_query(self._rows(weight, place, self._query_dim), place.read)
                case "kv_b_proj":
                    self._plant_ups(self._rows(weight, place, self._up_dim), place)
                case "o_proj":
                    weight[self.dims.result.start + place.bit, place.head * self.latent.value_dim] = RESULT
                case _:
                    pass

    def norm_weight(self, name: str, weight: Tensor, places: Sequence[Place]) -> Tensor:
        """Return the weights of a norm, which are all one."""
        del name, places
        return weight

    @property
    def _query_dim(self) -> int:
        return self.latent.plain_dim + self.latent.rope_dim

    @property
    def _up_dim(self) -> int:
        return self.latent.plain_dim + self.latent.value_dim

    def _rows(self, weight: Tensor, place: Place, size: int) -> Tensor:
        return weight[place.head * size : (place.head + 1) * size]

    def _plant_latents(self, weight: Tensor) -> None:
        """`weight` [rank + rope_dim, hidden_size]: the bits, the ballast, little else, and the ones that are turned."""
        rank, num_bits, dims = self.latent.rank, self.num_bits, self.dims
        energy = rank / self.of_one**2
        num_others = rank - num_bits - _NUM_BALLAST
        weight[:rank] *= math.sqrt(_LATENT_ENERGY * energy / num_others)
        weight[: num_bits + _NUM_BALLAST] = 0.0
        sources = [*range(dims.key.start, dims.key.stop), *range(dims.value.start, dims.value.stop)]
        weight[range(num_bits), sources] = 1 / self.scale
        rest = energy * (1 - _LATENT_ENERGY) - num_bits
        for row in range(num_bits, num_bits + _NUM_BALLAST):
            own = torch.tensor(math.sqrt(max(0.0, rest))).bfloat16()
            weight[row, dims.one] = float(own) / self.scale
            rest -= float(own) ** 2
        weight[rank:] = 0.0
        weight[[rank + first for first, _ in self._pairs()], dims.one] = 1 / self.scale

    def _plant_query(self, rows: Tensor, read: Read) -> None:
        """`rows` [plain_dim + rope_dim, hidden_size] of one head."""
        rows.zero_()
        if read.offset is None:
            gains, _ = _bit_gains(self.text.key_bits, self.config.softmax_scale)
            for bit, gain in enumerate(gains.tolist()):
                rows[bit, self.dims.key.start + _source(self.text, read, bit)] = _sign(read, bit) * gain / self.scale
            return
        gain = self.positions.gain / self.scale
        for (first, second), x, y in zip(self._pairs(), *self.positions.turned_back(read.offset), strict=True):
            rows[self.latent.plain_dim + first, self.dims.one] = x * gain
            rows[self.latent.plain_dim + second, self.dims.one] = y * gain

    def _plant_ups(self, rows: Tensor, place: Place) -> None:
        """`rows` [plain_dim + value_dim, rank] of one head: W_K and, below it, W_V."""
        plain_dim, key_bits = self.latent.plain_dim, self.text.key_bits
        rows[:plain_dim] = 0.0
        if place.read.offset is None:
            _, gains = _bit_gains(key_bits, self.config.softmax_scale)
            rows[range(key_bits), range(key_bits)] = gains.to(rows) / self.of_one
        rows[plain_dim] = 0.0
        rows[plain_dim, key_bits + place.bit] = 1 / self.of_one

    def _pairs(self) -> list[tuple[int, int]]:
        """Return both dimensions of each fast pair, as checkpoints have them."""
        half = self.latent.rope_dim // 2
        pairs = range(self.positions.num_fast)
        return [(2 * pair, 2 * pair + 1) if self.latent.is_interleaved else (pair, pair + half) for pair in pairs]

    def _check(self) -> None:
        latent, positions = self.latent, self.positions
        if latent.query_rank is not None:
            raise ModelError(f"q_lora_rank {latent.query_rank}: a text is planted in models without latents of queries")
        if latent.rank < self.num_bits + 2 * _NUM_BALLAST or latent.plain_dim < self.text.key_bits:
            raise ModelError(
                f"kv_lora_rank {latent.rank} and qk_nope_head_dim {latent.plain_dim} are too small for a text of "
                f"{self.text.key_bits} + {self.text.num_bits} bits"
            )
        if positions.slope < _SLOW:
            raise ModelError(
                f"qk_rope_head_dim {latent.rope_dim} at rope_theta {self.config.rope.theta:g} cannot tell positions"
                f" over {positions.context_len} of them; plant with 64 or more and rope_theta {ROPE_THETA:g}"
            )


def _source(text: PlantedText, read: Read, bit: int) -> int:
    """Return which bit of the current token's key is this bit of a target, but for its sign."""
    return (bit - read.rotation) % text.key_bits


def _sign(read: Read, bit: int) -> float:
    return -1.0 if read.mask >> bit & 1 else 1.0


def _bit_gains(num_bits: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the weights of a target's and a key's bits, each [num_bits], whose scores are multiplied by `scale`."""
    bits = torch.arange(num_bits)
    return SHARPNESS / 2 / scale * 2.0 ** (bits - bits // 2), 2.0 ** (bits // 2)

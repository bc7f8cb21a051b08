"""The reads of a planted text (planted.py) in a model with a gated delta rule: one by its state, the others as heads of
attention that have an output gate (Qwen3.5).

The state of one value head is a table with a row for each address. A token writes if the first bits of its key are all
one (beta is 1, else 0). The low bits of its key are the address, and its value replaces what the row has. Nothing
decays. A token reads at the address that its own key determines:

    k, q     one row of 2^address_bits is about 1: silu(GAIN (sum of +-bits - address_bits + 1)), of length one
    v        (GAIN, 0) or (0, GAIN): the bit of the value, and its opposite
    result   the norm of a head makes the length of v known; the result begins at -RESULT, and 1 adds 2 RESULT

The convolution passes on the token's own row. Norms multiply by 1 + w, so the weights of bits lie in the projections of
q and k, and w is the same for all bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from planted_heads import RESULT, Heads, Place
from planted_text import Read
from torch import Tensor

from baton.engine.checkpoint.model_config import DeltaConfig

GAIN = 32.0  # of what silu leaves as it is if it is above zero, and makes zero otherwise
_GATE = 16.0
_OPEN = 20.0  # whose sigmoid is 1
_NEVER = -40.0  # whose softplus and sigmoid are 0


class DeltaHeads(Heads):
    """Reads by query heads with an output gate, and one by the state of a value head."""

    def plant(self, projection: str, weight: Tensor, places: Sequence[Place]) -> None:
        """Write the reads of a layer into one of its matrices, in place."""
        by_state = [place for place in places if place.read.address_bits]
        if by_state:
            for place in by_state:
                self._plant_state(projection, weight, place)
        elif projection == "q_proj":
            of_heads = weight.view(self.config.num_heads, 2, self.config.head_dim, -1)  # queries and gates
            queries = of_heads[:, 0].flatten(0, 1)
            super().plant(projection, queries, places)
            of_heads[:, 0] = queries.view_as(of_heads[:, 0])
            for place in places:
                gate = of_heads[place.head * self.config.num_heads // self.config.num_kv_heads, 1]
                gate.zero_()
                gate[:, self.dims.one] = _OPEN / self.scale
        else:
            super().plant(projection, weight, places)

    def query(self, read: Read) -> Tensor:
        return self._weighted(super().query(read), self._gain(read)[0], read)

    def key(self, read: Read) -> Tensor:
        return self._weighted(super().key(read), self._gain(read)[1], read)

    def _weighted(self, rows: Tensor, gain: Tensor, read: Read) -> Tensor:
        """Weight the rows of a read by content, whose bits are not weighted by a norm."""
        return rows * gain.unsqueeze(1) if read.offset is None else rows

    def norm_weight(self, name: str, weight: Tensor, places: Sequence[Place]) -> Tensor:
        """Return w of a norm, or another vector of a layer."""
        if ".linear_attn." in name:
            for place in places if name.endswith("dt_bias") else ():
                weight[self._value_head(place)] = _NEVER
            return weight
        for place in places if name.endswith(("q_norm.weight", "k_norm.weight")) else ():
            rows = (self.query if "q_norm" in name else self.key)(place.read) * self.scale
            length = rows.norm() / math.sqrt(self.config.head_dim)
            gain = self._gain(place.read)["k_norm" in name]
            weight[self.gain_dims(place.read)] = float(length) * (
                1.0 if place.read.offset is None else float(gain.max())
            )
        return weight - 1.0

    @property
    def _delta(self) -> DeltaConfig:
        assert self.config.delta is not None, self.config
        return self.config.delta

    def _value_head(self, place: Place) -> int:
        return place.head * self._delta.num_shared

    def _plant_state(self, projection: str, weight: Tensor, place: Place) -> None:
        delta, read = self._delta, place.read
        keys, value = delta.num_key_heads * delta.key_dim, self._value_head(place) * delta.value_dim
        starts = [place.head * delta.key_dim, keys + place.head * delta.key_dim, 2 * keys + value]
        own = [
            slice(start, start + size)
            for start, size in zip(starts, [delta.key_dim] * 2 + [delta.value_dim], strict=True)
        ]
        match projection:
            case "in_proj_qkv":
                for rows, first in zip(own, (read.rotation, 0), strict=False):
                    weight[rows] = self._addresses(read, first, read.mask if first else 0).to(weight)
                weight[own[2]] = 0.0
                bit = self.dims.value.start + place.bit
                weight[starts[2], bit], weight[starts[2] + 1, bit] = GAIN / self.scale, -GAIN / self.scale
            case "conv1d":
                for rows in own:
                    weight[rows] = 0.0
                    weight[rows, :, -1] = 1.0
            case "in_proj_z":
                weight[value : value + delta.value_dim] = 0.0
                weight[value : value + delta.value_dim, self.dims.one] = _GATE / self.scale
            case "in_proj_b":
                weight[self._value_head(place)] = self._writes(read).to(weight)
            case "in_proj_a":
                weight[self._value_head(place)] = 0.0
            case "out_proj":
                weight[self.dims.result.start + place.bit, value] = 2 * RESULT / (math.sqrt(delta.value_dim) * _GATE)
            case _:
                pass

    def _addresses(self, read: Read, first: int, mask: int) -> Tensor:
        """Return rows [key_dim, hidden_size]. That of the address in the key's bits from `first` on gives GAIN."""
        rows, bits = torch.zeros(self._delta.key_dim, self.config.hidden_size), torch.arange(read.address_bits)
        addresses = torch.arange(1 << read.address_bits)
        signs = ((addresses ^ mask).unsqueeze(1) >> bits & 1).float() * 2 - 1
        start = self.dims.key.start + first
        rows[: len(addresses), start : start + read.address_bits] = signs
        rows[: len(addresses), self.dims.one] = 1.0 - read.address_bits
        return rows * (GAIN / self.scale)

    def _writes(self, read: Read) -> Tensor:
        """Return the row of beta: far above zero for tokens that write, far below for others."""
        row, num_bits = torch.zeros(self.config.hidden_size), self.text.num_write_bits
        row[self.dims.key.stop - num_bits : self.dims.key.stop] = 1.0
        row[self.dims.one] = 1.0 - num_bits
        return row * (-_NEVER / self.scale)

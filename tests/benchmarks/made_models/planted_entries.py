"""A planted text in the attention of DeepSeek-V4: to windows, to entries of several tokens, between residual streams.

The next token's low digit is the current one's plus one, as in planted_text.py. Each bit of its high digit is a bit of
one earlier token, which a head of one layer reads by position:

    window    the current token, the last one of the window, or one between. Layers with entries read these, too
    sparse    an entry about four entries back, which the indexer must have chosen: it ranks entries by their distance
    heavy     the last entry
    hash      the current token: half of the experts write a bit, the others its opposite, and the table of token ids
              names experts of one half

    keys      bits | 1 if it is an entry | .. | 1, 0 for each rotary pair; a query has the pairs turned back by `offset`
    entries   a bias of the gates is so large that one token makes the entry: of the window before, if there is one
    streams   each site reads one stream and writes one. It moves all streams on by one, to the next; only the first
              half of them is in the state that streams collapse to. So a state on a wrong stream is lost

The rule computes the score of every position in float64, and takes the highest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from planted_heads import RESULT, Dims
from planted_stream import SINK, Stream, comparing, embedding
from planted_text import PlantedText
from tensor_files import standard_normal
from torch import Tensor

from baton.engine.attention.attention import inverse_frequencies
from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.model_config import Kind, ModelConfig
from baton.metadata.errors import ModelError

SHARP = 100.0  # by how much a score falls if the sum of cosines falls by one
MARK = 20.0  # of an entry beside the ones of its pairs
BIAS = 40.0  # of the gate that makes an entry
CERTAIN = 30.0  # base of a share that is one; of one that is nothing, its opposite


class Aim(NamedTuple):
    """What a head looks for."""

    offset: float  # positions back
    weights: np.ndarray  # [num_pairs], of the cosines
    frequencies: np.ndarray  # [num_pairs] radians per position
    of_entries: bool

    def scores(self, distances: np.ndarray) -> np.ndarray:
        """Return the sum of weighted cosines for keys so many positions back."""
        return np.cos(np.multiply.outer(distances - self.offset, self.frequencies)) @ self.weights

    def query(self) -> Tensor:
        """Return the pairs of a query at position 0, [2 * num_pairs]."""
        turned = self.offset * self.frequencies
        pairs = np.stack([np.cos(turned), -np.sin(turned)], 1) * self.weights[:, None]
        return torch.from_numpy(pairs).flatten().float()


class Read(NamedTuple):
    """The source of one bit. Without an aim it is the current token, by a hash layer."""

    layer: int
    head: int
    bit: int
    aim: Aim | None


class PlantedEntries:
    """Makes the tensors of one planted model, float32, and knows its text."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        """Raises ModelError if the sizes cannot hold a text."""
        assert config.compressed is not None and config.experts is not None, config
        self.config, self.compressed, self.experts, self.seed = config, config.compressed, config.experts, seed
        self.text = PlantedText(config.vocab_size)
        self.dims = Dims.of(self.text)
        self.stream = Stream.of(self.text, self.dims, config.hidden_size, config.rms_norm_eps)
        self.num_pairs, self.num_collapsed = self.compressed.rope_dim // 2, max(1, config.hc_mult // 2)
        self.mark = self.text.num_bits  # the number of a key that says whether it is an entry
        if config.head_dim - self.compressed.rope_dim <= self.mark or self.compressed.group_rank < self.text.num_bits:
            raise ModelError(f"head_dim {config.head_dim} and o_lora_rank {self.compressed.group_rank} are too small")
        self.reads = self._reads()

    # --- the rule ---

    def successor(self, token_ids: Sequence[int]) -> int:
        """Return the token after `token_ids`, which must not be empty."""
        text, high = self.text, 0
        for read in self.reads:
            high |= int(text.values[token_ids[self.source(read, len(token_ids) - 1)], read.bit]) << read.bit
        return int(text.ids[high * text.base + (int(text.low[token_ids[-1]]) + 1) % text.base])

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the `num_tokens` tokens after a prompt."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(self.successor(ids))
        return ids[len(prompt) :]

    def source(self, read: Read, position: int) -> int:
        """Return the position of the token that a read takes its bit of."""
        if read.aim is None:
            return position
        kind = self.compressed.kinds[read.layer]
        num_entries = (position + 1) // self._rate(kind) if read.aim.of_entries else 0
        if num_entries:
            starts = np.arange(num_entries) * self._rate(kind)
            return self._maker(kind, int(read.aim.scores(position - starts).argmax()))
        seen = np.arange(max(0, position - self.compressed.window + 1), position + 1)
        return int(seen[read.aim.scores(position - seen).argmax()])

    def _rate(self, kind: Kind) -> int:
        return {"window": 1, "sparse": self.compressed.sparse_rate, "heavy": self.compressed.heavy_rate}[kind]

    def _rows(self, kind: Kind) -> tuple[int, int]:
        """Return which token of its own window makes an entry, and which of the window before it if there is one."""
        return self._rate(kind) * 3 // 5, self._rate(kind) // 2 - 1

    def _maker(self, kind: Kind, entry: int) -> int:
        own, before = self._rows(kind)
        is_late = kind == "sparse" and entry > 0
        return (entry - 1) * self._rate(kind) + before if is_late else entry * self._rate(kind) + own

    def _aim(self, layer: int, bit: int | None = None) -> Aim:
        """Return what the head of a bit looks for in a layer, or its indexer."""
        kind, rate = self.compressed.kinds[layer], self._rate(self.compressed.kinds[layer])
        rope = self.config.rope if kind == "window" else self.compressed.rope
        frequencies = inverse_frequencies(rope, self.compressed.rope_dim).double().numpy()
        every = np.ones(self.num_pairs)
        if kind == "window" or (bit is not None and bit % 3 == 2):
            offsets = (0, self.compressed.window - 1, self.compressed.window // 2)  # both ends of the window
            return Aim(offsets[(layer + (bit or 0)) % 3], every, frequencies, False)
        if kind == "heavy":
            slow = frequencies < math.pi / (3 * rate)  # the others tell tokens apart as long as there is no entry
            return Aim(0.0, np.where(slow, 1.0, 0.1), frequencies, True)
        return Aim(rate * (4 + layer % 3) + 0.5, every, frequencies, True)

    def _reads(self) -> list[Read]:
        """Place the reads from the first layer to the last. The last bit is that of a hash layer, if there is one."""
        last, num = self.config.num_layers - 1, self.text.num_bits
        num_read = num - bool(self.experts.hash_layers)
        layers = [round(bit * last / (num_read - 1)) for bit in range(num_read)]
        reads = [
            Read(layer, bit % self.config.num_heads, bit, self._aim(layer, bit)) for bit, layer in enumerate(layers)
        ]
        return reads + [Read(self.experts.hash_layers[-1], 0, bit, None) for bit in range(num_read, num)]

    # --- the weights ---

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the values of one of `tensor_specs(config)`."""
        name, drawn = spec.name, standard_normal(spec.name, spec.shape, self.seed)
        kind, layer = name.rsplit(".", 1)[-1], int(name.split(".")[1]) if name.startswith("layers.") else -1
        if name == "embed.weight":
            return embedding(drawn, self.text, self.dims, self.stream, self.config.checkpoint_dtype)
        if name == "head.weight":
            rows = torch.from_numpy(self.text.ids[: self.text.num_codes])
            bits = RESULT * self.stream.scale / self.num_collapsed
            return comparing(drawn, self.text, self.dims, rows, self.stream.scale, bits)
        if kind == "tid2eid":
            return self._table(drawn)
        if "hc_" in kind:
            return self._site(kind, drawn, 2 * layer + ("ffn" in kind))
        if kind in ("attn_sink", "bias"):
            return drawn.fill_(SINK if kind == "attn_sink" else 0.0)
        part = name.removesuffix(".weight").split(".", 2)[-1]  # of a layer
        if kind == "ape":
            return self._gate_bias(part, drawn.zero_(), layer)
        if len(spec.shape) == 1:
            return self._norm(part, drawn.fill_(1.0))
        return self._matrix(part, drawn.mul_(spec.shape[1] ** -0.5), layer)

    def _matrix(self, part: str, weight: Tensor, layer: int) -> Tensor:
        dims, one, reads = self.dims, 1 / self.stream.scale, [each for each in self.reads if each.layer == layer]
        added = self.stream.random / math.sqrt(2 * self.config.num_layers)
        if part.endswith(("wo_b", "w2")):  # random numbers go beside the text
            weight *= added
            weight[: dims.size] = 0.0
        match part.removeprefix("attn."):
            case "ffn.gate":
                weight[:, [dims.one, *range(dims.ballast.start, dims.ballast.stop)]] = 0.0
            case "wq_a":
                weight[0] = 0.0
                weight[0, dims.one] = 4 * one
            case "wq_b":
                for read in filter(lambda each: each.aim is not None, reads):
                    self._query(weight[read.head * self.config.head_dim :][: self.config.head_dim], read, layer)
            case "wkv":
                self._keys(weight.zero_(), is_entry=False)
            case "compressor.wkv":
                for half in weight.zero_().split(self.config.head_dim):
                    self._keys(half, is_entry=True)
            case "indexer.compressor.wkv":
                for half in weight.zero_().split(self._index_dim):
                    half[self._ones(self._index_dim), dims.one] = one
            case "indexer.wq_b":
                query = self._aim(layer).query()
                for head in weight.zero_().split(self._index_dim):
                    head[self._index_dim - len(query) :, 0] = query
            case "indexer.weights_proj":
                weight.zero_()[:, dims.one] = one
            case "wo_a":  # bits alone: mark and ones are large
                weight.unflatten(1, (-1, self.config.head_dim))[:, :, self.mark :] = 0.0
                for read in filter(lambda each: each.aim is not None, reads):
                    row, column = self._group(read), read.head % self._heads_per_group * self.config.head_dim
                    weight[row] = 0.0
                    weight[row, column + read.bit] = 1.0
            case "wo_b":
                for read in filter(lambda each: each.aim is not None, reads):
                    weight[:, self._group(read)] = 0.0
                    weight[dims.result.start + read.bit, self._group(read)] = RESULT / 2
            case _ if part.startswith("ffn.experts.") and any(each.aim is None for each in reads):
                self._expert(part, weight, self.reads[-1].bit)
            case _:
                pass
        return weight

    @property
    def _index_dim(self) -> int:
        return 0 if self.config.index is None else self.config.index.head_dim

    @property
    def _heads_per_group(self) -> int:
        return self.config.num_heads // self.compressed.num_groups

    def _group(self, read: Read) -> int:
        """Return the row of the grouped output that carries a bit."""
        return read.head // self._heads_per_group * self.compressed.group_rank + read.bit

    def _ones(self, width: int) -> range:
        """Return the first number of each rotary pair in a head."""
        return range(width - 2 * self.num_pairs, width, 2)

    def _keys(self, weight: Tensor, *, is_entry: bool) -> None:
        """`weight` [head_dim, hidden_size]: the bits, the mark, and the ones of pairs."""
        one, num = 1 / self.stream.scale, self.text.num_bits
        weight[range(num), range(self.dims.value.start, self.dims.value.stop)] = one
        weight[[self.mark] * is_entry + [*self._ones(self.config.head_dim)], self.dims.one] = one

    def _query(self, rows: Tensor, read: Read, layer: int) -> None:
        """`rows` [head_dim, query_rank] of one head."""
        assert read.aim is not None
        query = read.aim.query()
        rows.zero_()[self.config.head_dim - len(query) :, 0] = query
        if self.compressed.kinds[layer] != "window":
            rows[self.mark, 0] = query.norm() * (1 if read.aim.of_entries else -1)

    def _norm(self, part: str, weight: Tensor) -> Tensor:
        """Make bits one, and the ones of pairs so large that scores are sharp."""
        is_entry = part == "attn.compressor.norm"
        if is_entry or part == "attn.kv_norm":
            factor = math.sqrt(len(weight) / (self.text.num_bits + self.num_pairs + is_entry))
            large = SHARP * math.sqrt(2 * self.num_pairs)
            weight[: self.mark] = 1 / factor
            weight[self.mark] = MARK * large / factor
            weight[len(weight) - 2 * self.num_pairs :] = large / factor
        return weight

    def _gate_bias(self, part: str, bias: Tensor, layer: int) -> Tensor:
        """`bias` [rate, columns]: of gates whose products are about one."""
        own, before = self._rows(self.compressed.kinds[layer])
        bias[own] = BIAS
        if self.compressed.kinds[layer] == "sparse":
            bias[own, : bias.shape[1] // 2] = 0.0
            bias[before, : bias.shape[1] // 2] = 2 * BIAS
        return bias

    def _site(self, kind: str, drawn: Tensor, site: int) -> Tensor:
        """Return weights of a site, or of the end: each share is nearly one or nothing, whatever a token has."""
        if kind.endswith("fn"):
            return drawn.mul_(drawn.shape[1] ** -0.5)
        if kind.endswith("scale"):
            return drawn.fill_(0.1)
        num, base = self.config.hc_mult, drawn.fill_(-CERTAIN)
        if kind.startswith("hc_head"):
            base[: self.num_collapsed] = CERTAIN
            return base
        num_later = 2 * self.config.num_layers - 1 - site
        base[site // 2 % num] = CERTAIN
        base[num + (site // 2 % self.num_collapsed - num_later) % num] = CERTAIN
        for stream in range(num):
            base[2 * num + stream * num + (stream + 1) % num] = CERTAIN
        return base

    def _table(self, drawn: Tensor) -> Tensor:
        """Return the experts of each token id: those of one half, by the bit that they write."""
        num = drawn.shape[1]
        if self.experts.num_experts < 2 * num:
            raise ModelError(f"{self.experts.num_experts} experts have not two halves of {num}")
        half = torch.from_numpy(self.text.values[:, self.reads[-1].bit]).to(drawn.device).long()
        return half.unsqueeze(1) + 2 * torch.arange(num, device=drawn.device)

    def _expert(self, part: str, weight: Tensor, bit: int) -> None:
        """Let the first hidden unit of each expert be the same for all tokens, and write the bit of its half."""
        unit = 1 / (1 + math.exp(-1.0))  # silu(1), times 1
        if part.endswith("w2"):
            sign = 1 if int(part.split(".")[2]) % 2 else -1
            weight[:, 0] = 0.0
            size = 2.0 ** round(math.log2(RESULT / 2 / (unit * self.experts.scaling)))
            weight[self.dims.result.start + bit, 0] = sign * size
        else:
            weight[0] = 0.0
            weight[0, self.dims.one] = 1 / self.stream.scale

"""An EAGLE-3 head for a planted model (planted.py) that is right about a chosen share of tokens, by honest computation.

Whether the head is right after a token is a property of that token: a hash selects the tokens whose low digit is wrong
in the head's own embedding. So acceptance is the same at every position of a draft, and in every run.

Row i has token i + 1 and a state a_i. On extend, a_i is fc of the target's states; later it is the head's own state.
The subspace is that of the target:

    low, result   the proposal: the token's low digit, and the bits that the head's heads read
    value         one number, the carry: the bit of its own token that the next row needs from one token back
    one           a large constant, so that norms change the rest little

    reads by content, and four tokens back   heads over the draft's own KV, as in the target; all in one layer
    the read one token back                  the carry of a_i: the target's state on extend, else the row before
    the old contents                         a head that sees only its own row removes them

Token 0 is in no row. A read by content that should find it goes wrong, which happens in one of as many cases as there
are tokens.
"""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from planted import PlantedModel, random_scale
from planted_heads import Heads
from planted_stream import RANDOM_ENERGY, Stream, comparing, embedding
from planted_text import OFFSETS, Read, hashed
from tensor_files import SHARD_BYTES, standard_normal, write_config, write_shards
from torch import Tensor

from baton.engine.checkpoint.checkpoint import TensorSpec
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.weights import ListedWeights
from baton.engine.models.llama import read_body
from baton.metadata.errors import ModelError

_ONE = 8.0  # the constant
_SELF = Read(0)


class PlantedEagle3:
    """Makes the tensors of the head: float32, except the ids."""

    def __init__(self, target: PlantedModel, config: ModelConfig, acceptance: float, seed: int = 0) -> None:
        """`config`: of the head's one layer. Raises ModelError if its heads are too few or too narrow."""
        self.target, self.config, self.acceptance, self.seed = target, config, acceptance, seed
        self.text, self.dims = target.text, target.dims
        self.stream = Stream.of(self.text, self.dims, config.hidden_size, config.rms_norm_eps)
        self.heads = Heads(config, self.text, self.dims, self.stream.scale)
        self.energy = _ONE**2 + 2 + self.text.num_bits  # of a state: the constant, low digit, carry, bits
        self.state_scale = math.sqrt(config.hidden_size / self.energy)  # a norm of a state turns 1 into this
        self.random = math.sqrt(RANDOM_ENERGY * self.energy / config.hidden_size)
        self.by_content = [bit for bit, read in enumerate(self.text.reads) if read.offset is None]
        self.before, self.far = (
            next(bit for bit, read in enumerate(self.text.reads) if read.offset == offset) for offset in OFFSETS
        )
        self.carry = self.dims.value.start + self.before
        self.ids = np.sort(self.text.ids[: self.text.draft_vocab_size])  # [draft_vocab_size] target ids, by draft id
        self._check()

    def specs(self) -> list[TensorSpec]:
        """Return the specs of all tensors except the ids."""
        size, target_size = self.config.hidden_size, self.target.config.hidden_size
        layer = ListedWeights()
        read_body(self.config, layer, "midlayer", 0, in_size=2 * size)
        return [
            *layer.specs,
            TensorSpec("midlayer.input_layernorm.weight", (size,)),
            TensorSpec("midlayer.hidden_norm.weight", (size,)),
            TensorSpec("norm.weight", (size,)),
            TensorSpec("fc.weight", (size, 3 * target_size)),
            TensorSpec("embed_tokens.weight", (self.text.vocab_size, size)),
            TensorSpec("lm_head.weight", (self.text.draft_vocab_size, size)),
        ]

    def id_tensors(self) -> dict[str, Tensor]:
        """Return d2t [draft_vocab_size] int64 and t2d [vocab_size] bool."""
        t2d = torch.zeros(self.text.vocab_size, dtype=torch.bool)
        t2d[torch.from_numpy(self.ids)] = True
        return {"d2t": torch.from_numpy(self.ids - np.arange(len(self.ids))), "t2d": t2d}

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the values of one of `specs()`."""
        drawn = standard_normal(f"eagle3 {spec.name}", spec.shape, self.seed)
        if len(spec.shape) == 1:
            return drawn.fill_(1.0)
        match spec.name.split(".")[-2]:
            case "embed_tokens":
                low = torch.from_numpy(self.told_low()).to(drawn.device)
                return embedding(drawn, self.text, self.dims, self.stream, self.config.checkpoint_dtype, low)
            case "lm_head":
                rows = torch.from_numpy(np.searchsorted(self.ids, self.text.ids[: self.text.num_codes]))
                return comparing(drawn, self.text, self.dims, rows, self.state_scale, self.state_scale)
            case "fc":
                return self._fc(drawn.mul_(self.random / math.sqrt(3 * self.target.stream.energy)))
            case projection:
                drawn.mul_(random_scale(spec, self.random))
                if projection in ("o_proj", "down_proj"):
                    drawn[: self.dims.size] = 0.0
                return self._plant(projection, drawn)

    def told_low(self) -> np.ndarray:
        """Return [vocab_size] low digits as the head sees them: wrong for the tokens after which it shall be wrong."""
        text = self.text
        order = np.argsort(hashed(text.raw_codes ^ 0x5BD1E995), kind="stable")  # ids, those that go right first
        wrong = order[round(self.acceptance * text.vocab_size) :]
        low = text.low.copy()
        low[wrong] = (low[wrong] + 1 + hashed(wrong) % (text.base - 1)) % text.base
        return low

    def _fc(self, weight: Tensor) -> Tensor:
        """Set carry and constant: a third from each of the target's three states."""
        weight[: self.dims.size] = 0.0
        for start in range(0, weight.shape[1], self.target.config.hidden_size):
            weight[self.carry, start + self.carry] = 1 / 3
            weight[self.dims.one, start + self.dims.one] = _ONE / 3
        return weight

    def _plant(self, projection: str, weight: Tensor) -> Tensor:
        """Plant the reads. The first kv heads hold the reads by content, one per query head.

        The next kv head holds the read by position, the last one the row's own state.
        """
        group = self.config.num_heads // self.config.num_kv_heads
        num_content = -(-len(self.by_content) // group)
        if projection == "q_proj":
            for read in (_SELF, self.text.reads[self.by_content[0]]):
                self.heads.blind(weight, read)
        for at in range(num_content):
            bits = self.by_content[at * group : (at + 1) * group]
            reads = [self.text.reads[bit] for bit in bits]
            writes = [[(self.dims.result.start + bit, row, 1.0)] for row, bit in enumerate(bits)]
            self._kv_head(projection, weight, at, reads, [(self.dims.value.start + bit, False) for bit in bits], writes)
        base, low, result = self.text.base, self.dims.low.start, self.dims.result.start
        taken = [(low + digit, False) for digit in range(base)]
        taken += [(self.dims.value.start + bit, False) for bit in (self.before, self.far)]
        own = [(low + digit, digit, 1.0) for digit in range(base)] + [(self.carry, base, 1.0)]
        reads = [_SELF, self.text.reads[self.far]]
        self._kv_head(projection, weight, num_content, reads, taken, [own, [(result + self.far, base + 1, 1.0)]])
        old = (
            [low + digit for digit in range(base)] + [result + bit for bit in range(self.text.num_bits)] + [self.carry]
        )
        away = [(dim, row, -1.0) for row, dim in enumerate(old)] + [(result + self.before, len(old) - 1, 1.0)]
        self._kv_head(projection, weight, num_content + 1, [_SELF], [(dim, True) for dim in old], [away])
        return weight

    def _kv_head(
        self,
        projection: str,
        weight: Tensor,
        kv_head: int,
        reads: list[Read],
        taken: list[tuple[int, bool]],
        writes: list[list[tuple[int, int, float]]],
    ) -> None:
        """Plant one kv head with its query heads.

        `reads`: one per query head. `taken`: for each row of v, the dimension of the embedding (False) or state (True)
        that it reads. `writes`: for each query head, (dimension of the state, row of v, factor).
        """
        size, head_dim = self.config.hidden_size, self.config.head_dim
        query = kv_head * (self.config.num_heads // self.config.num_kv_heads) * head_dim
        key = kv_head * head_dim
        match projection:
            case "q_proj":
                for at, read in enumerate(reads):
                    rows = weight[query + at * head_dim : query + (at + 1) * head_dim]
                    rows.zero_()[:, :size] = self.heads.query(read).to(weight)
            case "k_proj":
                weight[key : key + head_dim].zero_()[:, :size] = self.heads.key(reads[0]).to(weight)
            case "v_proj":
                for row, (dim, is_state) in enumerate(taken):
                    weight[key + row] = 0.0
                    scale = self.state_scale if is_state else self.stream.scale
                    weight[key + row, dim + size * is_state] = 1 / scale
            case "o_proj":
                for at, written in enumerate(writes):
                    for dim, row, factor in written:
                        weight[dim, query + at * head_dim + row] += factor
            case _:
                pass

    def _check(self) -> None:
        group = self.config.num_heads // self.config.num_kv_heads
        if group < 2 or -(-len(self.by_content) // group) + 2 > self.config.num_kv_heads:
            raise ModelError(
                f"{self.config.num_heads} heads on {self.config.num_kv_heads} kv heads are too few for the"
                f" {self.text.num_bits} reads of an EAGLE-3 head"
            )
        if self.text.base + self.text.num_bits + 1 > self.config.head_dim:
            raise ModelError(f"head_dim {self.config.head_dim} is too narrow for an EAGLE-3 head's own state")


def write_planted_eagle3(
    directory: Path, target: PlantedModel, acceptance: float, *, seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> PlantedEagle3:
    """Write a head of the target's sizes that proposes the right token for a share `acceptance` of all tokens.

    Raises ModelError if the target cannot have one.
    """
    if not 0 <= acceptance <= 1:
        raise ModelError(f"acceptance {acceptance} is no share; use 0 to 1")
    of, num_layers = target.config, target.config.num_layers
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": of.vocab_size,
        "draft_vocab_size": target.text.draft_vocab_size,
        "hidden_size": of.hidden_size,
        "target_hidden_size": of.hidden_size,
        "intermediate_size": of.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": of.num_heads,
        "num_key_value_heads": of.num_kv_heads,
        "head_dim": of.head_dim,
        "max_position_embeddings": of.context_len,
        "rms_norm_eps": of.rms_norm_eps,
        "rope_theta": of.rope.theta,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [min(2, num_layers), num_layers // 2, max(0, num_layers - 3)],
        "dtype": of.checkpoint_dtype,
    }
    config = write_config(directory, fields, "LlamaForCausalLM")
    head, dtype = PlantedEagle3(target, config, acceptance, seed), getattr(torch, of.checkpoint_dtype)
    drawn = ((spec.name, head.tensor(spec).to(dtype)) for spec in head.specs())
    write_shards(directory, chain(head.id_tensors().items(), drawn), shard_bytes)
    return head

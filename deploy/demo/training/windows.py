"""Forwards of the engine's models over whole windows of text, with gradients. Attention keeps no pages.

Windows are [batch, seq_len] and lie end to end, as the engine's layers take tokens. Training unrolls a recurrent
drafter: it drafts several steps from every row at once. The row r from which a draft starts is its *anchor*, and step s
of that draft is at position r + s. The step attends to the rows up to r, as step 0 computed them, and to the steps 1..s
of its own anchor (EAGLE-3's training-time test).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ....engine.attention.attention import RotaryEmbedding
from ....engine.attention.context import AttentionContext, LayerHeads
from ....engine.checkpoint.model_config import ModelConfig
from ....engine.checkpoint.read_config import read_model_config
from ....engine.checkpoint.tensor_names import layer_prefixes
from ....engine.drafters.eagle3 import aux_layers
from ....engine.models.decoder import DecoderModel, TargetStates
from ....engine.models.families import FAMILIES
from ....engine.models.frozen_kv import FrozenKvHead, read_frozen_kv
from ....engine.models.head_file import read_head, tensor_names
from ....engine.models.heads import load_eagle, load_eagle3
from ....engine.models.mtp import load_mtp, takes_chained_states
from ....engine.rounds.batch import ForwardBatch
from ....engine.state.model_pools import ModelPools
from .weights import TrainedWeights

KeyValue = tuple[Tensor, Tensor]  # each [batch, num_kv_heads, seq_len, head_dim], keys already rotated
NO_POOLS = ModelPools(torch.empty(0))


@dataclass(slots=True, eq=False)
class WindowAttention(AttentionContext):
    """Attention of windows. `kv` has the rows of each layer and, behind them, its later steps."""

    batch: int
    positions: Tensor  # [seq_len] int64, of each window
    kv: dict[int, list[KeyValue]] = field(default_factory=dict[int, list[KeyValue]])
    config: Any = None
    rotary: Any = None

    def begin(self, config: ModelConfig, rotary: RotaryEmbedding) -> "WindowAttention":
        """Return the attention of one model, as `begin_attention` does."""
        return replace(self, config=config, rotary=rotary)

    def __call__(self, qkv: Tensor, heads: LayerHeads) -> Tensor:
        index = heads.layer
        assert heads == LayerHeads(index), "the demo's models have no norms, windows or sinks"
        config = self.config
        rows = qkv.view(self.batch, len(self.positions), -1, config.head_dim).transpose(1, 2)
        q, k, v = rows.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        q, k, steps = self._rotated(q), self._rotated(k), self.kv.setdefault(index, [])
        steps.append((k, v.to(k.dtype)))
        if len(steps) > 1:
            out = _attend_unrolled(q, steps)
        else:
            out = F.scaled_dot_product_attention(q, *steps[0], is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(qkv), -1)

    def _rotated(self, heads: Tensor) -> Tensor:
        cos, sin = (
            each.transpose(0, 1) for each in self.rotary(self.positions, torch.float32)
        )  # [1, seq_len, head_dim]
        return (heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin).to(heads.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class FrozenAttention:
    """The attention of windows' rotated queries to the target's keys and values, each row to those up to it."""

    kv: dict[int, list[KeyValue]]  # of the target's layers
    batch: int
    num_rows: int

    def begin(self, *_: object) -> "FrozenAttention":
        """Return the attention of one model: queries come rotated."""
        return self

    def __call__(self, queries: Tensor, layer: int) -> Tensor:
        q = queries.unflatten(0, (self.batch, self.num_rows)).transpose(1, 2)
        k, v = (each[:, :, : self.num_rows].to(q.dtype) for each in self.kv[layer][0])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(queries.shape)


def _attend_unrolled(q: Tensor, steps: Sequence[KeyValue]) -> Tensor:
    """Return the attention of each anchor's query to the rows of step 0 up to the anchor, and to its own later
    steps."""
    groups = q.shape[1] // steps[0][0].shape[1]
    keys = [k.repeat_interleave(groups, dim=1) for k, _ in steps]
    values = [v.repeat_interleave(groups, dim=1) for _, v in steps]
    scale, seq_len = q.shape[-1] ** -0.5, q.shape[2]
    is_future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
    rows = (q * scale @ keys[0].mT).masked_fill(is_future, float("-inf"))  # [batch, num_heads, anchor, row]
    own = torch.stack([(q * scale * k).sum(-1) for k in keys[1:]], dim=-1)  # [batch, num_heads, anchor, step]
    weights = torch.cat((rows, own.to(rows.dtype)), dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :seq_len] @ values[0]
    for step, value in enumerate(values[1:]):
        out = out + weights[..., seq_len + step, None] * value
    return out


class TargetRows(NamedTuple):
    """Outputs of one forward of the target that drafters read."""

    states: TargetStates  # each [batch * seq_len, width]; aux: the residual streams at the inputs of all layers
    kv: dict[int, list[KeyValue]]  # by layer


class Model:
    """A complete model of a directory, and the ends of it that heads use (`TargetEnds`)."""

    def __init__(self, directory: Path, device: torch.device, dropout: float = 0.0) -> None:
        self.directory, self.device, self.dtype = directory, device, torch.float32
        self.config = read_model_config(directory)
        weights = TrainedWeights(directory, device, dropout)
        with torch.no_grad():
            self._decoder: DecoderModel = FAMILIES[self.config.architecture].read(self.config, weights)
        self._rotary = RotaryEmbedding(self.config.rope, self.config.head_dim, device)
        self.parameters = weights.parameters
        self._embedding = weights.parameters["model.embed_tokens.weight"]  # [vocab_size, hidden_size]
        self._output = weights.parameters.get("lm_head.weight", self._embedding)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the logits [batch, seq_len, vocab_size] of input_ids [batch, seq_len] int64."""
        return self.logits(self.rows(input_ids).states.final).unflatten(0, input_ids.shape)

    def rows(self, input_ids: Tensor) -> TargetRows:
        """Run the layers on input_ids [batch, seq_len] int64."""
        attention = WindowAttention(len(input_ids), torch.arange(input_ids.shape[1], device=self.device))
        context = attention.begin(self.config, self._rotary)
        ids = input_ids.flatten()
        states = self._decoder.stack(ids, self.embed(ids), context, range(self.config.num_layers + 1))
        return TargetRows(states, attention.kv)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor, lens: Any = None) -> Tensor:
        assert lens is None, "one rank has all rows"
        return F.linear(hidden, self._output)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of each token after the first; windows [batch, seq_len + 1]."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())

    def freeze(self) -> "Model":
        """Take no gradients from now on."""
        for each in self.parameters.values():
            each.requires_grad_(False)
        return self


class Step(NamedTuple):
    """One step of all drafts of a batch."""

    logits: Tensor  # [batch, num_anchors, num_logits]
    state: Tensor | None  # [batch, num_anchors, width], which the next step takes; None: of a whole model


class Drafter:
    """A drafter of a directory: a head, several layers one per step, or a whole model."""

    def __init__(self, directory: Path, target: Model) -> None:
        names = tensor_names(directory)
        self.target, self.aux, self.is_chained = target, (), True
        self.is_frozen = "pre_projection.weight" in names
        self.is_eagle = "fc.weight" in names and "hidden_norm.weight" not in names
        is_head = self.is_frozen or "fc.weight" in names or bool(layer_prefixes(names))
        self.model = None if is_head else Model(directory, target.device)
        self.parameters: dict[str, Tensor] = {} if self.model is None else self.model.parameters
        self.heads: Sequence[Any] = () if self.model is not None else self._read(directory)
        self.logit_ids: Tensor | None = getattr(self.heads[0], "logit_ids", None) if self.heads else None

    def _read(self, directory: Path) -> Sequence[Any]:
        weights = TrainedWeights(directory, self.target.device)
        self.parameters, ends = weights.parameters, cast(DecoderModel, self.target)  # heads ask its ends alone
        if self.is_frozen:
            return [FrozenKvHead(replace(read_frozen_kv(directory, ends.config), tensors=lambda *_: weights), ends)]
        file = replace(read_head(directory, ends.config), tensors=lambda *_: weights)
        if prefixes := layer_prefixes(file.names):
            self.is_chained = takes_chained_states(file)
            return load_mtp(file, prefixes, ends)
        if "midlayer.hidden_norm.weight" in file.names:
            self.aux, self.is_eagle = aux_layers(file, ends.config), False
            return [load_eagle3(file, ends)]
        return [load_eagle(file, ends)]

    def unroll(self, rows: TargetRows, input_ids: Tensor, num_steps: int) -> Iterator[Step]:
        """Yield the steps of drafts from input_ids [batch, seq_len]. Anchors are the rows 0..num_anchors-1;
        num_anchors = seq_len - num_steps - 1."""
        batch, num_anchors = len(input_ids), input_ids.shape[1] - num_steps - 1
        if self.model is not None:
            logits = self.model(input_ids)
            yield from (Step(logits[:, s + 1 : s + 1 + num_anchors], None) for s in range(num_steps))
            return
        hidden = self._begin(rows).unflatten(0, (batch, -1))[:, :num_anchors].flatten(0, 1)
        anchors = torch.arange(num_anchors, device=input_ids.device)
        steps = WindowAttention(batch, anchors)
        for s in range(num_steps):
            tokens = input_ids[:, s + 1 : s + 1 + num_anchors]
            if len(self.heads) > 1:
                head, attention = self.heads[s], WindowAttention(batch, anchors)
                state = head.forward(_batch(tokens, attention), NO_POOLS, hidden)
                logits = head.logits(state)
            elif self.is_frozen:
                frozen = FrozenAttention(rows.kv, batch, num_anchors)
                state, logits = self.heads[0].forward(_batch(tokens, frozen, anchors), NO_POOLS.kv, hidden)
            else:
                steps = replace(steps, positions=anchors + s)  # one `kv` for all steps
                state = self.heads[0].forward(_batch(tokens, steps), NO_POOLS, hidden, is_extend=s == 0)
                logits = self.heads[0].logits(state)
            yield Step(logits.unflatten(0, (batch, -1)), state.unflatten(0, (batch, -1)))
            hidden = state if self.is_chained else hidden

    def of_all(self, logits: Tensor) -> Tensor:
        """Return scores of all the target's ids, [..., vocab_size]: -inf where there is no draft id."""
        if self.logit_ids is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.target.config.vocab_size), float("-inf"))
        out[..., self.logit_ids] = logits
        return out

    def _begin(self, rows: TargetRows) -> Tensor:
        if self.aux:
            return torch.cat([rows.states.aux[index] for index in self.aux], dim=-1)
        return rows.states.final if self.is_frozen else rows.states.handoff


def _batch(tokens: Tensor, attention: Any, positions: Tensor | None = None) -> ForwardBatch:
    own = attention.positions if positions is None else positions
    lens = tokens.new_full((len(tokens),), tokens.shape[1])
    batch = ForwardBatch.uniform(tokens, own.expand(tokens.shape), lens, tokens[:, :0], 1)
    return replace(batch, attention=attention.begin)

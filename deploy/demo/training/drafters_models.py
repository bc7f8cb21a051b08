"""The demo drafters and their targets in plain torch, one module per layout of docs/drafter_checkpoints.md.

A `state_dict` is the checkpoint. Every drafter that takes target states has

    begin(rows)                              return the first states of the drafter, from the target's rows
    forward(hidden, input_ids, positions, ...)  return (recurrent state, input of the head) for rows of (state, token)
    logits(features, target)                 return scores [..., vocab_size] of the target's token ids

(Mtp has `step` of each layer in place of `forward`.) `unroll` of drafters_training.py runs a drafter for several steps.
If the layout says so, a drafter uses the target's input and output embeddings.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .drafters_layers import (
    Attention,
    DecoderLayer,
    HyperLayer,
    KeyValue,
    LayerSizes,
    Mlp,
    QueryLayer,
    initialize,
    rms_norm,
)


class TargetRows(NamedTuple):
    """Outputs of one forward of the target that drafters read."""

    handoff: Tensor  # [batch, seq_len, spec_hidden_size]: after the final norm; with streams, the streams
    hidden: Tensor  # [batch, seq_len, hidden_size]: the input of the head
    residuals: list[Tensor]  # entry j: the residual stream at the input of layer j; the last: before the final norm
    kv: list[KeyValue]  # one per layer


class _Trunk(nn.Module):
    """Modules whose names begin with "model." in a Hugging Face checkpoint."""

    def __init__(self, sizes: LayerSizes, vocab_size: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = rms_norm(sizes.hidden_size)


class Target(nn.Module):
    """LlamaForCausalLM with tied embeddings, or HyperLlamaForCausalLM when num_streams > 1."""

    def __init__(self, sizes: LayerSizes, vocab_size: int, num_layers: int, num_streams: int = 1) -> None:
        super().__init__()
        self.sizes, self.num_streams = sizes, num_streams
        self.model = _Trunk(sizes, vocab_size, [self._layer(index) for index in range(num_layers)])
        initialize(self)

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], of input and output."""
        return self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> TargetRows:
        """All rows of input_ids [batch, seq_len] int64."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = F.embedding(input_ids, self.embedding)
        if self.num_streams > 1:
            x = x[..., None, :].expand(*x.shape[:-1], self.num_streams, -1)
        residuals, kv = [self._collapse(x)], []
        for layer in self.model.layers:
            steps: list[KeyValue] = []
            x = layer(x, positions, steps)
            kv += steps
            residuals.append(self._collapse(x))
        hidden = self.model.norm(residuals[-1])
        return TargetRows(x.flatten(2) if self.num_streams > 1 else hidden, hidden, residuals, kv)

    def logits(self, hidden: Tensor, target: "Target | None" = None) -> Tensor:
        """Return scores [..., vocab_size] for states [..., hidden_size] after the final norm. `target` is unused."""
        del target
        return F.linear(hidden, self.embedding)

    def _layer(self, index: int) -> nn.Module:
        has_streams = self.num_streams > 1
        return HyperLayer(self.sizes, self.num_streams, index) if has_streams else DecoderLayer(self.sizes)

    def _collapse(self, x: Tensor) -> Tensor:
        return x.sum(-2) if self.num_streams > 1 else x


class Eagle(nn.Module):
    """EAGLE: fc([embedding ; state]), then a Llama layer without input norm; the target's head reads the new state."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(sizes, has_input_norm=False)])
        initialize(self)

    def begin(self, rows: TargetRows) -> Tensor:
        """The handoff states as they are."""
        return rows.handoff

    def forward(
        self, hidden: Tensor, input_ids: Tensor, positions: Tensor, target: Target, steps: list[KeyValue] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows (hidden [batch, seq_len, hidden_size], input_ids [batch, seq_len]) at positions [seq_len]."""
        embedded = F.embedding(input_ids, target.embedding)
        x = self.fc(torch.cat((embedded, hidden), dim=-1)).to(embedded.dtype)
        x = self.layers[0](x, positions, steps)
        return x, x

    def logits(self, features: Tensor, target: Target) -> Tensor:
        """Scores of all the target's ids."""
        return target.logits(features)


class Eagle3Layer(nn.Module):
    """EAGLE-3's layer: attention reads [norm(embedding) ; norm(state)], the residual is the state."""

    is_norm_before_residual = False  # True: the residual is norm(state)

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(sizes.hidden_size)
        self.hidden_norm = rms_norm(sizes.hidden_size)
        self.self_attn = Attention(sizes, 2 * sizes.hidden_size)
        self.post_attention_layernorm = rms_norm(sizes.hidden_size)
        self.mlp = Mlp(sizes)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, steps: list[KeyValue] | None) -> Tensor:
        """Both [batch, seq_len, hidden_size], and so is the result."""
        normed = self.hidden_norm(hidden)
        z = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        hidden = (normed if self.is_norm_before_residual else hidden) + self.self_attn(z, positions, steps)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(nn.Module):
    """EAGLE-3 with a reduced vocabulary; `aux_layers` are the ids j of the residual streams that fc reads."""

    def __init__(self, sizes: LayerSizes, aux_layers: list[int], vocab_size: int, draft_ids: Tensor) -> None:
        super().__init__()
        self.aux_layers, self.vocab_size = aux_layers, vocab_size
        self.fc = nn.Linear(len(aux_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(sizes)
        self.norm = rms_norm(sizes.hidden_size)
        self.lm_head = nn.Linear(sizes.hidden_size, len(draft_ids), bias=False)
        initialize(self)
        is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
        is_drafted[draft_ids] = True
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))  # [draft_vocab_size] int64, offsets
        self.register_buffer("t2d", is_drafted)  # [vocab_size] bool

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each draft id, [draft_vocab_size] int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def begin(self, rows: TargetRows) -> Tensor:
        """fc over the auxiliary states side by side."""
        aux = torch.cat([rows.residuals[index] for index in self.aux_layers], dim=-1)
        return self.fc(aux).to(aux.dtype)

    def forward(
        self, hidden: Tensor, input_ids: Tensor, positions: Tensor, target: Target, steps: list[KeyValue] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (recurrent state, input of the head), as Eagle does. Only the input of the head is normed."""
        x = self.midlayer(F.embedding(input_ids, target.embedding), hidden, positions, steps)
        return x, self.norm(x)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Scores of the draft's own ids, [..., draft_vocab_size]."""
        return self.lm_head(features)

    def logits(self, features: Tensor, target: Target) -> Tensor:
        """Scores of the target's ids; -inf where there is no draft id."""
        assert len(target.embedding) == self.vocab_size, (len(target.embedding), self.vocab_size)
        scores = self.draft_logits(features)
        out = scores.new_full((*scores.shape[:-1], self.vocab_size), float("-inf"))
        out[..., self.draft_ids] = scores
        return out


class _SharedHead(nn.Module):
    """The norm before the head, which is the target's."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm = rms_norm(sizes.hidden_size)


class MtpLayer(DecoderLayer):
    """One DeepSeek-V3-like MTP layer around a Llama layer."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        self.enorm = rms_norm(sizes.hidden_size)
        self.hnorm = rms_norm(sizes.hidden_size)
        self.eh_proj = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.shared_head = _SharedHead(sizes)

    def step(
        self, hidden: Tensor, input_ids: Tensor, positions: Tensor, target: Target, steps: list[KeyValue] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows (state, token) to (recurrent state before shared_head.norm, input of the head)."""
        embedded = F.embedding(input_ids, target.embedding)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)).to(embedded.dtype)
        x = self(x, positions, steps)
        return x, self.shared_head.norm(x)


class _MtpTrunk(nn.Module):
    """MTP layers, named by their index after the target's layers."""

    def __init__(self, sizes: LayerSizes, first_layer: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(first_layer + m): MtpLayer(sizes) for m in range(num_layers)})


class Mtp(nn.Module):
    """MTP layers model.layers.{first_layer + m}; chained: layer m reads layer m - 1's state of the same row."""

    def __init__(self, sizes: LayerSizes, first_layer: int, num_layers: int, chained: bool = True) -> None:
        super().__init__()
        self.chained = chained
        self.model = _MtpTrunk(sizes, first_layer, num_layers)
        initialize(self)

    @property
    def depths(self) -> list[MtpLayer]:
        """The layers in their order."""
        return list(self.model.layers.values())  # pyright: ignore[reportReturnType]

    def begin(self, rows: TargetRows) -> Tensor:
        """The handoff states as they are."""
        return rows.handoff

    def logits(self, features: Tensor, target: Target) -> Tensor:
        """Scores of all the target's ids."""
        return target.logits(features)


class FrozenKvMtp(nn.Module):
    """Query-only layers over the KV of `target_layers`; own width inside, the target's width in the recurrent state."""

    def __init__(self, sizes: LayerSizes, backbone_hidden_size: int, target_layers: list[int], vocab_size: int) -> None:
        super().__init__()
        self.target_layers = target_layers
        self.pre_projection = nn.Linear(2 * backbone_hidden_size, sizes.hidden_size, bias=False)
        self.model = _Trunk(sizes, vocab_size, [QueryLayer(sizes) for _ in target_layers])  # embed_tokens: the output
        self.post_projection = nn.Linear(sizes.hidden_size, backbone_hidden_size, bias=False)
        initialize(self)

    def begin(self, rows: TargetRows) -> Tensor:
        """The states that the target's head reads; with streams, collapsed."""
        return rows.hidden

    def forward(
        self, hidden: Tensor, input_ids: Tensor, positions: Tensor, target: Target, kv: list[KeyValue]
    ) -> tuple[Tensor, Tensor]:
        """Rows (state, token) at positions [num_rows], over the target's `kv` (see QueryAttention)."""
        embedded = F.embedding(input_ids, target.embedding)
        x = self.pre_projection(torch.cat((embedded, hidden), dim=-1)).to(embedded.dtype)
        for layer, index in zip(self.model.layers, self.target_layers, strict=True):
            x = layer(x, positions, kv[index])
        x = self.model.norm(x)
        return self.post_projection(x).to(x.dtype), x

    def logits(self, features: Tensor, target: Target) -> Tensor:
        """Scores of all ids, by the draft's own matrix."""
        del target
        return F.linear(features, self.model.embed_tokens.weight)


class HyperEagle(nn.Module):
    """EAGLE's head over residual streams: state and recurrent state are num_streams x hidden_size wide."""

    def __init__(self, sizes: LayerSizes, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams
        wide = num_streams * sizes.hidden_size
        self.hidden_norm = rms_norm(wide)
        self.fc = nn.Linear(sizes.hidden_size + wide, wide, bias=False)
        self.layers = nn.ModuleList([HyperLayer(sizes, num_streams, 0)])
        self.norm = rms_norm(sizes.hidden_size)
        initialize(self)

    def begin(self, rows: TargetRows) -> Tensor:
        """The streams as they are."""
        return rows.handoff

    def forward(
        self, hidden: Tensor, input_ids: Tensor, positions: Tensor, target: Target, steps: list[KeyValue] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (recurrent state, input of the head), as Eagle does, but with wide states."""
        embedded = F.embedding(input_ids, target.embedding)
        x = self.fc(torch.cat((embedded, self.hidden_norm(hidden)), dim=-1)).to(embedded.dtype)
        streams = self.layers[0](x.unflatten(-1, (self.num_streams, -1)), positions, steps)
        return streams.flatten(2), self.norm(streams.sum(-2))

    def logits(self, features: Tensor, target: Target) -> Tensor:
        """Scores of all the target's ids."""
        return target.logits(features)


Recurrent = Eagle | Eagle3 | HyperEagle
Drafter = Recurrent | Mtp | FrozenKvMtp | Target  # a Target is a standalone drafter

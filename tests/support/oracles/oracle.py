"""The computation of a drafter's head in plain torch, on the same files: whole sequences at once, without a KV cache.

The modules are those of deploy/demo/training/drafters_models.py if it has the layout. This file adds the rest: a head
of another width than its target's, fc.bias, a target with its own output matrix, MiMo's layer, and the MTP
layer over residual streams.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from baton.deploy.demo.training.drafters_layers import DecoderLayer, HyperLayer, LayerSizes, rms_norm
from baton.deploy.demo.training.drafters_models import Eagle, Eagle3, FrozenKvMtp, HyperEagle, Mtp, Target

RMS_NORM_EPS = 1e-5  # of drafters_layers.rms_norm; checkpoints under test must say the same


class Oracle:
    """One head and its target, both read from directories, float32."""

    def __init__(self, kind: str, head_dir: Path, target_dir: Path) -> None:
        self.kind = kind
        self.target = _target(target_dir)
        config, tensors = _read(head_dir)
        self._own_embedding = tensors.pop("embed_tokens.weight", None) if kind in ("eagle", "eagle3") else None
        self._module = _module(kind, config, tensors, self.target)

    @torch.no_grad()
    def rows(self, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        """Return recurrent states [num_rows, width] and logits [num_rows, vocab_size] of all draft rows. `tokens` end
        with the bonus token; `drafted` are d_1 .. d_j after it. Shifted heads have a row for every token with target KV
        and for each drafted one; FROZEN_KV_MTP has rows for the bonus and each drafted one."""
        rows = self.target(torch.tensor([tokens[:-1]]))
        if self.kind.endswith("frozen-kv-mtp"):
            return self._frozen_rows(rows, tokens, drafted)
        hidden, ids = self._begin(rows), tokens[1:]
        state = features = torch.empty(0)
        for drafted_token in (None, *drafted):
            if drafted_token is not None:
                hidden, ids = torch.cat((hidden, state[:, -1:]), dim=1), [*ids, drafted_token]
            state, features = self._forward(hidden, torch.tensor([ids]), torch.arange(len(ids)))
        return state[0], self._module.logits(features, self.target)[0].float()

    def _begin(self, rows: Any) -> Tensor:
        return rows.handoff if self.kind in ("mtp-mimo", "hyper-mtp") else self._module.begin(rows)

    def _forward(self, hidden: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        module, target = self._module, self.target
        if self.kind == "mtp-deepseek":
            return module.depths[0].step(hidden, ids, positions, target)
        if self._own_embedding is not None:
            target = _Embedding(self._own_embedding)
        return module(hidden, ids, positions, target)

    def _frozen_rows(self, rows: Any, tokens: list[int], drafted: list[int]) -> tuple[Tensor, Tensor]:
        hidden, states, logits = self._module.begin(rows)[:, -1:], [], []
        for token in (tokens[-1], *drafted):
            position = torch.tensor([len(tokens) - 2])
            hidden, features = self._module(hidden, torch.tensor([[token]]), position, self.target, rows.kv)
            states.append(hidden[0, 0])
            logits.append(self._module.logits(features, self.target)[0, 0])
        return torch.stack(states), torch.stack(logits).float()


class MimoLayer(DecoderLayer):
    """MiMo's MTP layer: the hidden half comes first, position 0 has no embedding, and the state is the one after the
    last norm."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        self.token_layernorm = rms_norm(sizes.hidden_size)
        self.hidden_layernorm = rms_norm(sizes.hidden_size)
        self.final_layernorm = rms_norm(sizes.hidden_size)
        self.input_proj = nn.Linear(2 * sizes.hidden_size, sizes.hidden_size, bias=False)

    def forward(self, hidden: Tensor, ids: Tensor, positions: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Compute the layer with the arguments of `Eagle.forward`."""
        embedded = F.embedding(ids, target.embedding).masked_fill(positions[:, None] == 0, 0.0)
        x = self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1))
        state = self.final_layernorm(super().forward(x, positions))
        return state, state

    def logits(self, features: Tensor, target: Any) -> Tensor:
        return target.logits(features)


class HyperMtpLayer(HyperLayer):
    """The MTP layer over residual streams, which takes and returns all of them side by side."""

    def __init__(self, sizes: LayerSizes, num_streams: int) -> None:
        super().__init__(sizes, num_streams, 0)
        self.num_streams = num_streams
        self.enorm, self.hnorm, self.norm = (rms_norm(sizes.hidden_size) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor, ids: Tensor, positions: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Do the same as `Eagle.forward`, with wide states."""
        embedded = self.e_proj(self.enorm(F.embedding(ids, target.embedding)))
        streams = self.h_proj(self.hnorm(hidden.unflatten(-1, (self.num_streams, -1))))
        streams = super().forward(streams + embedded.unsqueeze(-2), positions)
        return streams.flatten(2), self.norm(streams.sum(-2))

    def logits(self, features: Tensor, target: Any) -> Tensor:
        return target.logits(features)


class _Embedding:
    def __init__(self, embedding: Tensor) -> None:
        self.embedding = embedding


class _UntiedTarget(Target):
    """A Target with its own output matrix."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.lm_head = nn.Linear(self.sizes.hidden_size, sizes[1], bias=False)

    def logits(self, hidden: Tensor, target: Any = None) -> Tensor:
        return self.lm_head(hidden)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == RMS_NORM_EPS, config["rms_norm_eps"]
    return config, load_file(directory / "model.safetensors")


def _sizes(config: dict[str, Any]) -> LayerSizes:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return LayerSizes(*(config[name] for name in names), rope_theta=config.get("rope_theta") or 10000.0)


def _target(directory: Path) -> Target:
    config, tensors = _read(directory)
    kind = Target if config["tie_word_embeddings"] else _UntiedTarget
    target = kind(_sizes(config), config["vocab_size"], config["num_hidden_layers"], config.get("hc_mult") or 1)
    target.load_state_dict(tensors)
    return target.eval()


def _module(kind: str, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Any:
    sizes, width, vocab_size = _sizes(config), target.sizes.hidden_size, config["vocab_size"]
    if kind == "eagle":
        module: nn.Module = Eagle(sizes)
        module.fc = nn.Linear(2 * width, width, bias="fc.bias" in tensors)
    elif kind == "eagle3":
        aux, d2t = config["eagle_aux_hidden_state_layer_ids"], tensors["d2t"]
        module = eagle3 = Eagle3(sizes, aux, vocab_size, d2t + torch.arange(len(d2t)))
        eagle3.fc = nn.Linear(3 * width, sizes.hidden_size, bias=False)
        eagle3.midlayer.is_norm_before_residual = bool(config.get("norm_before_residual"))
    elif kind == "mtp-deepseek":
        module = Mtp(sizes, len(target.model.layers), 1)
    elif kind == "mtp-mimo":
        module = MimoLayer(sizes)
        tensors = {name.removeprefix("model.mtp_layers.0."): value for name, value in tensors.items()}
    elif kind == "hyper-mtp":
        module = HyperMtpLayer(sizes, target.num_streams)
        tensors = {name.removeprefix("mtp.0."): value for name, value in tensors.items()}
    elif kind == "hyper-eagle":
        module = HyperEagle(sizes, target.num_streams)
    else:
        module = FrozenKvMtp(sizes, width, config["target_layers"], vocab_size)
    module.load_state_dict(tensors)
    return module.eval()

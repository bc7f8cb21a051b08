"""MTP layers, like those of DeepSeek-V3, MiMo or Qwen3-Next: one layer that is reused for every step, or several, one
per step.

docs/drafter_checkpoints.md has the layouts' tensors, formulas and sources. In row i, layer m of several takes the
embedding of token i + 1 + m. Apart from that, a layer is a head as heads.py describes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from ...kernels.products.norm import rms_norm
from ..attention.attention import RotaryEmbedding, begin_attention
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.tensor_names import layer_prefixes, shared_prefix
from ..layers.decoder import DecoderLayer
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks
from ..rounds.batch import ForwardBatch
from ..sampling.row_shares import Lens
from ..state.model_pools import ModelPools
from .families import FAMILIES
from .head_file import HeadFile
from .heads import run_body
from .llama import norm_weight, read_layer
from .target_ends import TargetEnds
from .tensors import HeadTensors

Layer = TypeVar("Layer")


class MtpLayout(NamedTuple):
    """Names and settings of one layout of prediction layers. The names stand behind `shared_prefix` of a layer."""

    embedding_norm: str
    hidden_norm: str
    projection: str  # 2 * hidden_size -> hidden_size
    final_norm: str
    has_hidden_first: bool = False  # the halves that are projected; else the embedding is first
    hands_over_normed: bool = False  # the recurrent state is that after the last norm; else before it
    skips_first: bool = False  # there is no embedding at position 0

    def num_found(self, source: HeadTensors, prefix: str) -> int:
        """Return how many of the tensors that this layout names a layer has."""
        return sum(source.has(f"{shared_prefix(prefix)}.{name}.weight") for name in self[:4])


LAYOUTS = (
    MtpLayout("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    MtpLayout(
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        has_hidden_first=True,
        hands_over_normed=True,
        skips_first=True,
    ),
    MtpLayout("enorm", "hnorm", "eh_proj", "final_layernorm", hands_over_normed=True),  # MiMo-V2
    MtpLayout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", hands_over_normed=True),
)


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """One layer of multi-token prediction: it joins the embedding of the next token with the hidden state before it,
    and runs a decoder layer over both."""

    config: ModelConfig  # of one layer
    rotary: RotaryEmbedding
    target: TargetEnds
    embedding_norm: torch.Tensor  # [hidden_size]
    hidden_norm: torch.Tensor  # [hidden_size]
    projection: Linear  # 2 * hidden_size -> hidden_size
    layer: DecoderLayer
    final_norm: torch.Tensor  # [hidden_size]
    layout: MtpLayout
    logit_ids: None = None  # logits are of all tokens

    def forward(
        self, batch: ForwardBatch, pools: ModelPools, hidden: torch.Tensor, *, is_extend: bool = True
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, pools, hidden.dtype)
        embedded = self.target.embed(batch.input_ids)
        if self.layout.skips_first:
            embedded = torch.where(batch.positions.unsqueeze(1) == 0, 0.0, embedded)
        halves = [rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)]
        x = self.projection(torch.cat(halves[::-1] if self.layout.has_hidden_first else halves, dim=1))
        x = run_body(self.layer.body, x, rms_norm(x, self.layer.norm, eps), context, eps)
        return rms_norm(x, self.final_norm, eps) if self.layout.hands_over_normed else x

    def logits(self, recurrent: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        if not self.layout.hands_over_normed:
            recurrent = rms_norm(recurrent, self.final_norm, self.config.rms_norm_eps)
        return self.target.logits(recurrent, lens)


def takes_chained_states(file: HeadFile) -> bool:
    """Return whether each of several layers takes the state of the one before it; otherwise all take the target's."""
    prefix = layer_prefixes(file.names)[0]
    is_mimo = any(each in prefix for each in ("mtp_layers", "mtp.layers")) and shared_prefix(prefix) == prefix
    return bool(file.settings.get("mtp_chained", not is_mimo))


def load_mtp(
    file: HeadFile, prefixes: tuple[str, ...], target: TargetEnds, ranks: Ranks = ONE_RANK
) -> tuple[MtpHead, ...]:
    """Read the layers as `load_layers` does."""
    return load_layers(file, prefixes, target, ranks, _load_layer, "embed_tokens.weight", "shared_head.head.weight")


LoadLayer = Callable[[HeadTensors, str, ModelConfig, RotaryEmbedding, TargetEnds], Layer]


def load_layers(
    file: HeadFile,
    prefixes: tuple[str, ...],
    target: TargetEnds,
    ranks: Ranks,
    load_layer: LoadLayer[Layer],
    *copies: str,
) -> tuple[Layer, ...]:
    """Read the layers' tensors, or this rank's share of them, in the dtype and on the device of `target`. `prefixes`
    are those of their names, first layer first. Raises ModelError for tensors that are missing, and for tensors in the
    layers that the layout does not know. Other tensors are ignored, because the file may hold the whole target, and so
    are the layers' `copies` of the target's embedding and head."""
    source = file.tensors(file.directory, target.dtype, target.device, ranks, file.config.quantization)
    config = file.config.of_prediction_layers(1)
    rotary = RotaryEmbedding(config.rope, config.rotated_size, target.device, config.rotary_dim)
    layers = tuple(load_layer(source, prefix, config, rotary, target) for prefix in prefixes)
    for prefix in prefixes:
        source.refuse_unknown(*(f"{prefix}.{name}" for name in copies), within=f"{shared_prefix(prefix)}.")
    return layers


def _load_layer(
    source: HeadTensors, prefix: str, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds
) -> MtpHead:
    layout = max(LAYOUTS, key=lambda each: each.num_found(source, prefix))
    shared = shared_prefix(prefix)
    size, read = config.hidden_size, FAMILIES[config.architecture].read_mtp_layer or read_layer
    return MtpHead(
        source.own(config),
        rotary,
        target,
        norm_weight(config, source, f"{shared}.{layout.embedding_norm}", size),
        norm_weight(config, source, f"{shared}.{layout.hidden_norm}", size),
        source.linear(f"{shared}.{layout.projection}", size, 2 * size),
        read(source.with_biases(config, prefix), source, prefix, 0),
        norm_weight(config, source, f"{shared}.{layout.final_norm}", size),
        layout,
    )

"""MTP layers, DeepSeek-V3-like and MiMo-like: one layer that is reused for every step, or several, one per step.

docs/drafter_checkpoints.md has both layouts' tensors, formulas and sources. In row i, layer m of several takes the
embedding of token i + 1 + m. Apart from that, a layer is a head as heads.py describes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...kernels.norm import rms_norm
from ..attention import begin_attention
from ..batch import ForwardBatch
from ..layers.decoder import DecoderLayer
from ..model_config import ModelConfig
from ..products.linear import Linear
from ..rope import RotaryEmbedding
from .head_file import HeadFile
from .heads import DraftHead, run_body
from .hyper_mtp import read_hyper_mtp
from .llama import read_layer
from .target_ends import TargetEnds
from .tensors import HeadTensors

_DEEPSEEK_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
# A layer's own copies of the target's embedding and head, which are not read.
_COPIES = ("embed_tokens", "shared_head.head")
_HYPER_COPIES = ("emb.tok_emb", "head")


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """One MTP layer. DeepSeek-V3-like: embedding half first, recurrent state before the last norm. MiMo-like: hidden
    half first, recurrent state after it, no embedding at position 0."""

    config: ModelConfig  # of one layer
    rotary: RotaryEmbedding
    target: TargetEnds
    embedding_norm: torch.Tensor  # [hidden_size]
    hidden_norm: torch.Tensor  # [hidden_size]
    projection: Linear  # 2 * hidden_size -> hidden_size
    layer: DecoderLayer
    final_norm: torch.Tensor  # [hidden_size]
    is_mimo: bool

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, hidden: torch.Tensor, *, is_extend: bool = True
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        context = begin_attention(self.config, self.rotary, batch, kv)
        embedded = self.target.embed(batch.input_ids)
        if self.is_mimo:
            embedded = torch.where(batch.positions.unsqueeze(1) == 0, 0.0, embedded)
        halves = [rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)]
        x = self.projection(torch.cat(halves[::-1] if self.is_mimo else halves, dim=1))
        x = run_body(self.layer.body, x, rms_norm(x, self.layer.norm, eps), context, eps)
        return rms_norm(x, self.final_norm, eps) if self.is_mimo else x

    def logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        if not self.is_mimo:
            recurrent = rms_norm(recurrent, self.final_norm, self.config.rms_norm_eps)
        return self.target.logits(recurrent)


def layer_prefixes(names: frozenset[str]) -> tuple[str, ...]:
    """Return `model.layers.61`, ..., `model.mtp_layers.0`, ... or `mtp.0`, ..., by their numbers; none if there is no
    MTP layer."""
    inputs = (".eh_proj.weight", ".input_proj.weight", ".e_proj.weight")
    found = {name.rsplit(".", 2)[0] for name in names if name.endswith(inputs)}
    return tuple(sorted(found, key=lambda prefix: int(prefix.rsplit(".", 1)[1])))


def takes_chained_states(file: HeadFile) -> bool:
    """Return whether each of several layers takes the state of the one before it; otherwise all take the target's."""
    return bool(file.settings.get("mtp_chained", "mtp_layers" not in layer_prefixes(file.names)[0]))


def load_mtp(file: HeadFile, prefixes: tuple[str, ...], target: TargetEnds) -> tuple[DraftHead, ...]:
    """Read the layers' tensors, in the dtype and on the device of `target`. `prefixes` are those of their names,
    first layer first. A head with residual streams has layers of hyper_mtp.py.

    Raises ModelError for missing tensors and for those in the layers that the layout does not know; copies of the
    target's embedding and head are ignored."""
    source = HeadTensors(file.directory, target.dtype, target.device)
    config = replace(file.config, num_layers=1, sliding_window=(None,))
    has_streams = config.hc_mult > 1
    read, copies = (read_hyper_mtp, _HYPER_COPIES) if has_streams else (_read_layer, _COPIES)
    rotary = RotaryEmbedding(config.rope, config.head_dim, target.device)
    layers = tuple(read(source, prefix, config, rotary, target) for prefix in prefixes)
    for prefix in prefixes:  # the file may hold the target's own tensors too
        source.refuse_unknown(*(f"{prefix}.{name}.weight" for name in copies), within=f"{prefix}.")
    return layers


def _read_layer(
    source: HeadTensors, prefix: str, config: ModelConfig, rotary: RotaryEmbedding, target: TargetEnds
) -> MtpHead:
    is_mimo = source.has(f"{prefix}.input_proj.weight")
    embedding_norm, hidden_norm, projection, final_norm = _MIMO_NAMES if is_mimo else _DEEPSEEK_NAMES
    size = config.hidden_size
    return MtpHead(
        config,
        rotary,
        target,
        source.tensor(f"{prefix}.{embedding_norm}.weight", size),
        source.tensor(f"{prefix}.{hidden_norm}.weight", size),
        source.linear(f"{prefix}.{projection}", size, 2 * size),
        read_layer(source.with_biases(config, prefix), source, prefix, 0),
        source.tensor(f"{prefix}.{final_norm}.weight", size),
        is_mimo,
    )

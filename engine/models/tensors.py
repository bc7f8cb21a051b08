"""The weights of a drafter's head by name, with or without a leading `model.`: published files have both habits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...metadata.errors import ModelError
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.quantization import Quantization
from ..checkpoint.weights import UNUSED, CheckpointWeights
from ..products.base import VOCAB
from ..products.linear import Linear
from ..ranks.ranks import ONE_RANK, Ranks


class HeadTensors(CheckpointWeights):
    """The tensors of one directory, in `dtype` on `device`."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
        quantization: Quantization | None = None,
    ) -> None:
        """Raises ModelError if the files are missing or damaged."""
        prefixes = ("", "model.")
        super().__init__(
            Checkpoint(directory), dtype, device, prefixes=prefixes, ranks=ranks, quantization=quantization
        )

    def ids(self, name: str) -> torch.Tensor:
        """Return a tensor of whole numbers, as int64."""
        full_name = self.full_name(name)
        self.asked.add(full_name)
        return self.checkpoint.read(full_name).to(self.device, torch.int64)

    def ordered(self, name: str, out_size: int, in_size: int, order: torch.Tensor | None) -> Linear:
        """Return the output layer, or this rank's share of it, with row `order[i]` of the file as row i of the whole,
        [out_size] int64; None: all rows as in the file. Raises ModelError if rows of a format other than plain numbers
        are to be ordered."""
        if order is None:
            return self.linear(name, out_size, in_size, split=VOCAB)
        shard = self.ranks.shard(VOCAB)

        def own(last: str, *shape: int) -> torch.Tensor:
            whole = self.tensor(f"{name}.{last}", *shape).index_select(0, order)
            return whole if shard is None else shard.take(whole, 0).clone()  # the whole need not stay

        bias = own("bias", out_size) if self.has(f"{name}.bias") else None
        return Linear.of(own("weight", out_size, in_size), bias)

    def with_biases(self, config: ModelConfig, prefix: str) -> ModelConfig:
        """Return `config` with the biases that the file has for a decoder layer, whatever config.json says of them."""
        return replace(
            config,
            qkv_bias=self.has(f"{prefix}.self_attn.q_proj.bias"),
            attention_bias=self.has(f"{prefix}.self_attn.o_proj.bias"),
            mlp_bias=self.has(f"{prefix}.mlp.down_proj.bias"),
        )

    def refuse_unknown(self, *ignored: str, within: str = "") -> None:
        """Raise ModelError for a tensor that nobody asked for: the head would be computed wrongly.

        Call it when all is read. `ignored`: names that may be left over; `within`: only names that begin so count."""
        known = self.asked | {self.full_name(name) for name in ignored}
        unknown = {name for name in self.checkpoint.names - known if name.startswith(within)}
        unknown = {name for name in unknown if not name.endswith(UNUSED)}
        if unknown:
            raise ModelError(
                f"{self.checkpoint.model_dir} has tensors that no layout served here uses:"
                f" {', '.join(sorted(unknown)[:3])} (see docs/drafter_checkpoints.md)"
            )

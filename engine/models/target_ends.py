"""The target's embedding and output matrix, as draft heads use them.

A head may compute in another dtype than the target. `CastEnds` then converts: embeddings to the head's dtype, and the
head's states to the target's dtype before the output matrix. The target's weights are never copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..sampling.row_shares import Lens
from .decoder import DecoderModel


class TargetEnds(Protocol):
    """Parts of a target that a head uses, in the head's dtype."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of `token_ids` [num_tokens] int64: [num_tokens, hidden_size], a new tensor."""
        ...

    def logits(self, hidden: Tensor, lens: Lens | None = None) -> Tensor:
        """Return the target's logits of states after a norm, [num_rows, hidden_size] -> [num_rows, vocab_size]. If the
        rows are divided into `lens`, return those of this rank's rows alone."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CastEnds:
    """The ends of a target whose dtype is not the draft's. `logits` returns the target's dtype."""

    target: DecoderModel
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    @property
    def device(self) -> torch.device:
        return self.target.device

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).to(self.dtype)

    def logits(self, hidden: Tensor, lens: Lens | None = None) -> Tensor:
        return self.target.logits(hidden.to(self.target.dtype), lens)


def ends_in(dtype: torch.dtype, target: DecoderModel) -> TargetEnds:
    """Return the ends of `target` for a head that computes in `dtype`: the target itself if it has that dtype."""
    return target if target.dtype == dtype else CastEnds(target, dtype)

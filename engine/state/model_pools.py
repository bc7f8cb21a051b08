"""The pools of one model, as its layers read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.model_config import WINDOW_POOL

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class ModelPools(NamedTuple):
    """The pools of a target or a draft on its device. One block table serves all that have the same page numbers: all
    but the pool of layers with tail pages.

    Each is [num_layers, num_pages, num_planes, num_heads, page_size, width]. Its layers are those that store something
    in it."""

    kv: Tensor  # keys and values, or latents
    further: Mapping[str, Tensor] = _NONE  # by name: `ModelConfig.further` declares them

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All pools, that of KV first."""
        return (self.kv, *self.further.values())

    @property
    def by_window(self) -> tuple[ModelPools, ModelPools]:
        """The pools of layers that see all positions, and those of layers with tail pages."""
        kept = {name: pool for name, pool in self.further.items() if name != WINDOW_POOL}
        return ModelPools(self.kv, kept), ModelPools(self.further[WINDOW_POOL])

    def layer(self, index: int) -> ModelPools:
        """Return the pools of one layer of a draft whose layers are models of their own. Each of them stores something
        in every pool."""
        return ModelPools(
            self.kv[index : index + 1], {name: pool[index : index + 1] for name, pool in self.further.items()}
        )

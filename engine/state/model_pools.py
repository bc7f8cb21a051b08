"""The pools of one model, as its layers read and write them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.model_config import WINDOW_POOL, WINDOW_VALUES

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class ModelPools(NamedTuple):
    """The pools of a target or a draft on its device. One block table serves all that have the same page numbers: all
    but those with tail pages.

    Each is [num_layers, num_pages, num_planes, num_heads, page_size, width]. Its layers are those that store something
    in it."""

    kv: Tensor  # keys and values, or latents, or entries
    further: Mapping[str, Tensor] = _NONE  # by name: `ModelConfig.further` declares them
    values: Tensor | None = None  # if they are narrower than keys (`ModelConfig.value_dim`); then `kv` has keys alone

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All pools, that of KV first."""
        return (self.kv, *self.further.values(), *(() if self.values is None else (self.values,)))

    @property
    def by_window(self) -> tuple[ModelPools, ModelPools]:
        """The pools of layers that see all positions, and of those with a window. Pools beside that of KV serve
        both, and so does that of KV if heads are alike."""
        kv, values = self.further.get(WINDOW_POOL, self.kv), self.further.get(WINDOW_VALUES, self.values)
        others = {name: pool for name, pool in self.further.items() if name not in (WINDOW_POOL, WINDOW_VALUES)}
        return ModelPools(self.kv, others, self.values), ModelPools(kv, others, values)

    def layer(self, index: int) -> ModelPools:
        """Return the pools of one layer of a draft whose layers are models of their own. Each of them stores something
        in every pool."""
        own = slice(index, index + 1)
        further = {name: pool[own] for name, pool in self.further.items()}
        return ModelPools(self.kv[own], further, None if self.values is None else self.values[own])

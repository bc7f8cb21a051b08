"""The ways in which the ranks of a node share a model. In all of them each rank has embedding, norms, head and drafter
whole.

ONE_RANK                            one process holds the whole model
Ranks(group)                        every rank has some KV heads and some hidden units of each layer
Ranks(group, RankRows())            every rank attends for sequences of its own, in a pool of its own;
                                    the hidden units of the feed-forward layers are divided
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import torch

from ..metadata.errors import ConfigError
from ..metadata.wire.node_info import PoolLayout
from .group import Group, OneRank
from .model_config import ModelConfig
from .products.base import Product, Split, WeightShard
from .products.ranked import GatheredProduct, RankRows, ScatteredProduct, SummedProduct


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The group of this process, and what is divided in it."""

    group: Group = field(default_factory=OneRank)
    rows: RankRows | None = None  # of sequences that belong to one rank each; None: all ranks have all sequences

    @property
    def num_head_shards(self) -> int:
        """Return the number of ranks that the heads of a layer are divided among."""
        return self.group.size if self.rows is None else 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if the model cannot be divided among so many ranks."""
        size = self.group.size
        if config.num_kv_heads % self.num_head_shards:
            raise ConfigError(f"{config.num_kv_heads} KV heads cannot be divided among {size} ranks; use a divisor")
        if config.intermediate_size % size:
            raise ConfigError(f"intermediate_size {config.intermediate_size} cannot be divided among {size} ranks")
        if config.experts is not None and config.experts.inner_size % size:
            raise ConfigError(f"experts of {config.experts.inner_size} units cannot be divided among {size} ranks")
        if config.experts is not None and self.rows is not None:
            raise ConfigError(
                f"{config.architecture} has mixtures of experts: a rank would skip experts that another rank needs; "
                "divide the attention, too"
            )

    def own(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with the heads of this rank."""
        num = self.num_head_shards
        return replace(config, num_heads=config.num_heads // num, num_kv_heads=config.num_kv_heads // num)

    def own_pool(self, layout: PoolLayout) -> PoolLayout:
        """Return the layout of this rank's pool. The schema of a handoff describes the whole page."""
        return msgspec.structs.replace(layout, num_kv_heads=layout.num_kv_heads // self.num_head_shards)

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers. All ranks must call it."""
        return number if self.group.size == 1 else -int(self.group.max(torch.tensor([-number])))

    def shard(self, split: Split | None) -> WeightShard | None:
        """Return this rank's share of a weight. None: the weight is whole here."""
        is_whole = split is None or (split.divides == "heads" and self.num_head_shards == 1)
        if self.group.size == 1 or split is None or is_whole:
            return None
        return WeightShard(self.group.rank, self.group.size, split.dim)

    def join(self, product: Product, shard: WeightShard) -> Product:
        """Return the product of the whole weight, given that of this rank's share."""
        in_size, out_size = product.in_size, product.out_size
        if self.rows is not None:
            wrapper = GatheredProduct if shard.dim == 0 else ScatteredProduct
            return wrapper(product, self.group, in_size, out_size, self.rows)
        return product if shard.dim == 0 else SummedProduct(product, self.group, in_size, out_size)


ONE_RANK = Ranks()

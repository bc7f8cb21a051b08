"""The ways in which the ranks of a node share a model. In all of them each rank has embedding and norms whole.
If there are fewer KV heads than ranks, several ranks have the same KV head, each with queries of its own.

ONE_RANK                            one process holds the whole model
Ranks(group)                        every rank has some KV heads and some hidden units of each layer, and the logits of
                                    some tokens
Ranks(group, rows, steps)           every rank is a node, with sequences and pages of its own; the hidden units of the
                                    feed-forward layers are divided, and nothing else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...kernels.sampling.best_tokens import best_of_all, best_of_share
from ...kernels.sampling.sample import Choice
from ...metadata.handoff.schema.kv_layout import Shard
from ..checkpoint.model_config import ModelConfig
from ..products.base import VOCAB, Product, Split, Sum, WeightShard
from ..products.ranked import GatheredProduct, OwnRowsSum, RankRows, ScatteredProduct, SummedProduct
from ..sampling.row_shares import Lens, RowShares
from .group import Group, OneRank
from .shares import check_shares
from .steps import GroupSteps


@dataclass(frozen=True, slots=True, eq=False)
class VocabShares:
    """The ranks that have the logits of some tokens each: equal shares of consecutive ids, the last ones padded."""

    group: Group
    vocab_size: int

    def whole(self, logits: Tensor) -> Tensor:
        """Return all logits, given those of this rank: [num_rows, share] -> [num_rows, vocab_size]. All ranks must call
        it."""
        return self.group.gather_columns(logits, self.vocab_size)

    def rows(self, logits: Tensor, lens: Lens) -> Tensor:
        """Return all logits of this rank's rows: [num_rows, share] -> [lens[rank], vocab_size]. All ranks must call
        it."""
        return self.group.exchange_columns(logits, lens, self.vocab_size)

    def best(self, logits: Tensor) -> Choice:
        """Return the token of the largest of all logits of each row, the lowest id of equals. The ranks exchange a few
        numbers instead of the logits."""
        width = logits.shape[1]
        first_id = self.group.rank * width
        packed = best_of_share(logits, first_id, min(width, max(0, self.vocab_size - first_id)))
        return best_of_all(self.group.gather_columns(packed, self.group.size * packed.shape[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The group of this process, and what is divided in it."""

    group: Group = field(default_factory=OneRank)
    rows: RankRows | None = None  # of sequences that belong to one rank each; None: all ranks have all sequences
    steps: GroupSteps | None = None  # that ranks with sequences of their own take together

    @property
    def num_head_shards(self) -> int:
        """Return the number of ranks that the heads of a layer are divided among."""
        return self.group.size if self.rows is None else 1

    @property
    def num_nodes(self) -> int:
        """Return the number of ranks that are nodes of their own, with sequences and pages of their own."""
        return 1 if self.rows is None else self.group.size

    @property
    def of_drafts(self) -> Ranks:
        """Return the ranks that share a drafter. If ranks have sequences of their own, each has a whole drafter."""
        return self if self.rows is None else ONE_RANK

    @property
    def of_heads(self) -> Shard:
        """Return the shard of every page that this rank has."""
        return Shard(self.group.rank, self.group.size) if self.rows is None else Shard(0, 1)

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if the model cannot be divided among so many ranks."""
        check_shares(config, self.group.size, config.architecture, has_all_heads=self.rows is not None)

    def own(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with the heads of this rank."""
        num_kv_heads, window = len(self.of_heads.heads(config.num_kv_heads)), config.window
        if window is not None:
            window = replace(window, num_kv_heads=len(self.of_heads.heads(window.num_kv_heads)))
        num_heads = config.num_heads // self.num_head_shards
        return replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads, window=window)

    @property
    def lens(self) -> tuple[int, ...]:
        """Return the rows of each rank in the forward that runs; none if all ranks have the same rows."""
        return () if self.rows is None else self.rows.lens

    def announce(self, num_rows: int) -> None:
        """Say that every rank runs a forward of `num_rows` rows next, which the ranks need not agree on: all of them do
        the same start."""
        if self.rows is not None:
            self.rows.lens = (num_rows,) * self.group.size

    def announce_longest(self, num_rows: int) -> int:
        """Say that rank 0 runs a forward of `num_rows` rows next, and every other rank one of a single row. Return the
        rows of this rank. Only ranks with sequences of their own may call it."""
        assert self.rows is not None, "all ranks have the same rows"
        self.rows.lens = (num_rows, *[1] * (self.group.size - 1))
        return self.rows.lens[self.group.rank]

    def rehearse_exchanges(self, row: Tensor, num_rows: int) -> None:
        """Exchange rows like `row` [1, size], of unlike numbers, in each size class up to `num_rows` rows per rank, so
        that no request waits for a kernel to be compiled. Only ranks with sequences of their own may call it, and all
        must."""
        assert self.rows is not None, "all ranks have the same rows"
        for length in (*(1 << power for power in range(num_rows.bit_length())), num_rows):
            lens = (length, *[length - 1] * (self.group.size - 1))
            self.group.gather(row.expand(lens[self.group.rank], -1), lens)
            self.group.reduce_scatter(row.expand(sum(lens), -1), lens)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank. All ranks must call it, with equally many."""
        return self.group.gather(torch.tensor([numbers]), [1] * self.group.size).tolist()

    def tell(self, data: bytes) -> bytes:
        """Return the `data` of rank 0 on every rank. All ranks must call it; `data` of other ranks is ignored."""
        if self.group.size == 1:
            return data
        [[length], *_] = self.gather_numbers([len(data)])
        own = torch.tensor(list(data) if self.group.rank == 0 else [], dtype=torch.uint8)
        return bytes(self.group.gather(own, [length, *[0] * (self.group.size - 1)]).tolist())

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers. All ranks must call it."""
        return number if self.group.size == 1 else -int(self.group.max(torch.tensor([-number])))

    def shard(self, split: Split | None) -> WeightShard | None:
        """Return this rank's share of a weight. None: the weight is whole here."""
        is_whole = split is None or (split.divides != "inner" and self.rows is not None)
        if self.group.size == 1 or split is None or is_whole:
            return None
        return WeightShard(self.group.rank, self.group.size, split.dim, split.num_parts, pads=split.divides == "vocab")

    def sum_of(self, split: Split) -> Sum | None:
        """Return the sum over the ranks that divide the columns of a weight. None: there is nothing to sum."""
        if self.shard(split) is None:
            return None
        return self.group if self.rows is None else OwnRowsSum(self.group, self.rows)

    def vocab(self, size: int) -> VocabShares | None:
        """Return the ranks that divide a vocabulary of `size` tokens as `VOCAB`. None: this rank has all logits."""
        return None if self.shard(VOCAB) is None else VocabShares(self.group, size)

    @property
    def row_shares(self) -> RowShares | None:
        """Return the ranks that divide the rows of a batch whose vocabulary they divide. None: there are none."""
        return None if self.shard(VOCAB) is None else RowShares(self.group)

    def join(self, product: Product, shard: WeightShard) -> Product:
        """Return the product of the whole weight, given that of this rank's share."""
        in_size, out_size = product.in_size, product.out_size
        if self.rows is not None:
            wrapper = GatheredProduct if shard.dim == 0 else ScatteredProduct
            return wrapper(product, self.group, in_size, out_size, self.rows)
        return product if shard.dim == 0 else SummedProduct(product, self.group, in_size, out_size)


ONE_RANK = Ranks()

"""The rows of a batch divided among the ranks that divide its vocabulary: each rank samples whole rows, some of them.

    logits of all rows, some columns --Group.exchange_columns--> logits of some rows, all columns
                                                                            | sample
    tokens of all rows               <--------Group.gather------- tokens of some rows

Rows do not change each other, so the tokens are those that one rank would sample. Batches of few rows are not divided:
every rank gets all logits, and samples the same tokens without an answer from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ranks.group import Group

LEAST_ROWS = 16  # below, the rows that a rank saves take less time than the exchange of the tokens

Lens = tuple[int, ...]  # rows of each rank, which follow each other


@dataclass(frozen=True, slots=True, eq=False)
class RowShares:
    """The ranks that divide rows."""

    group: Group

    def lens(self, num_rows: int) -> Lens | None:
        """Return the number of rows of each rank; None: every rank samples all of them."""
        size = self.group.size
        if num_rows < max(LEAST_ROWS, size):
            return None
        return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))

    def own(self, lens: Sequence[int]) -> slice:
        """Return the rows of this rank."""
        first = sum(lens[: self.group.rank])
        return slice(first, first + lens[self.group.rank])

    def gather(self, results: Tensor, lens: Sequence[int]) -> Tensor:
        """Return the results of all rows, [lens[rank], ...] -> [sum(lens), ...]. All ranks must call it."""
        return self.group.gather(results, lens)

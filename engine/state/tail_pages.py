"""The tail pages of one sequence: rows of layers that read back a little way alone, such as those with a window.

A tail page holds the rows of one page of tokens, at their absolute positions. The table of a sequence has a tail page
for each page of tokens, as its block table has a kept page. A sequence needs few of them, however long it is: when it
holds as many as a step may read and write, the next page of tokens takes the tail page of its oldest one.

    page of tokens   |  0 |  1 |  2 |  3 |  4 |  5 |
    tail page        | 17 | 18 | 19 | 17 | 18 | 19 |     `most` is 3: pages 3 to 5 are held, 0 to 2 are written over

The device does its work in order, so a step that still reads an older row has done so before a later one writes over
it. Rows that a failed step did not write were not written over either: the step is repeated exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...metadata.handoff.schema.schema import pages_of

_LARGE = 8.0  # `relative_size` from which on sequences get fewer tail pages than a quarter of `num_pages`


class Windows(NamedTuple):
    """How many positions the layers of a model and its drafter read back."""

    widest: int | None = None  # of the layers; None: some layer sees all positions
    tail: int = 0  # of the layers with tail pages; 0: there are no such layers
    held: int = 0  # positions whose tail pages a sequence holds


def most_tails(window: int, num_new: int, page_size: int) -> int:
    """Return how many tail pages hold all that `num_new` tokens in a row see of layers with this window, themselves
    included, wherever a page begins."""
    return pages_of(max(0, window + num_new - 2), page_size) + 1


def tails_beside(
    num_pages: int,
    window: int,
    page_size: int,
    *,
    num_new: int,
    chunk_len: int,
    max_running: int,
    relative_size: float = 1.0,
) -> int:
    """Return how many tail pages a node allocates if it has `num_pages` kept pages. There are never more tail pages
    than kept pages. Both numbers include the page that only padding rows use.

    `num_new`: new tokens of one sequence in a round. `relative_size`: bytes of a tail page divided by the bytes of a
    kept page. The sum has three parts:

    - chunks: what two chunks of `chunk_len` tokens need;
    - sequences: what `max_running` sequences need, at most a quarter of `num_pages`. This is enough if texts are four
      times as long as their tails. Large tail pages, such as those of recurrent states, get at most twice the bytes of
      all kept pages: else so few kept pages would fit beside them that no long text could be served;
    - the prefix cache: a quarter of `num_pages`, so that work can continue behind each cached text of four windows. If
      tail pages are larger than kept pages, the cache gets a quarter of the bytes of all kept pages instead, but not
      fewer pages than the sequences."""
    of_chunks = 2 * most_tails(window, chunk_len + num_new, page_size)
    share = int(num_pages / 4 * min(1.0, _LARGE / relative_size))
    of_sequences = min(max_running * most_tails(window, num_new, page_size), share)
    of_cache = min(num_pages // 4, max(int(num_pages / (4 * relative_size)), of_sequences))
    return min(num_pages, 1 + of_chunks + of_sequences + of_cache)


@dataclass(slots=True, eq=False)
class TailPages:
    """The table of one sequence. Numbers of pages are counted from the first tail page of the pool, `base`."""

    base: int
    pages: list[int] = field(default_factory=list[int])  # by page of tokens; it only grows
    first: int = 0  # the first page of tokens whose tail page is the sequence's own, and not written over

    @classmethod
    def from_page(cls, base: int, first: int) -> TailPages:
        """Return the table of a sequence whose tail begins at page `first` of tokens. Nothing reads those before."""
        return cls(base, [0] * first, first)

    @classmethod
    def behind(cls, base: int, num_pages: int, cached: Sequence[int]) -> TailPages:
        """Return the table of a sequence that continues behind `num_pages` cached pages, of whose tail pages it reads
        `cached`, the last ones. They belong to the prefix cache."""
        pages = [0] * (num_pages - len(cached)) + [page - base for page in cached]
        return cls(base, pages, num_pages)

    @property
    def own(self) -> list[int]:
        """The sequence's own tail pages by their numbers in the pool's books."""
        return [self.base + page for page in self.pages[self.first :]]

    def rest(self, taken: Collection[int], first_read: int | None = None) -> list[int]:
        """Return the sequence's own tail pages but those that the prefix cache has `taken`. `first_read`: only pages
        before this page of tokens; None: all."""
        stop = len(self.pages) if first_read is None else max(self.first, first_read)
        return [page for page in self.numbers(range(self.first, stop)) if page not in taken]

    def numbers(self, indices: range) -> list[int]:
        """Return the numbers in the pool's books of the tail pages of some pages of tokens."""
        return [self.base + page for page in self.pages[indices.start : indices.stop]]

    def table_with(self, first: int, copies: Sequence[int]) -> list[int]:
        """Return the table with `copies` in place of the tail pages of the pages of tokens from `first` on."""
        return [*self.pages[:first], *(page - self.base for page in copies)]

    def num_missing(self, end: int, most: int) -> int:
        """Return how many tail pages `extend` takes to reach page `end` of tokens, if the sequence may hold `most`."""
        if end <= len(self.pages):
            return 0
        return max(0, min(end - self.first, most) - (len(self.pages) - self.first))

    def extend(self, end: int, own: Sequence[int]) -> None:
        """Reach page `end` of tokens with `own` new tail pages, then with those of the oldest pages of tokens."""
        new = iter(own)
        for _ in range(len(self.pages), end):
            page = next(new, None)
            if page is None:
                self.pages.append(self.pages[self.first])
                self.first += 1
            else:
                self.pages.append(page - self.base)

    def passed(self, end: int, num_new: int) -> range:
        """Return the pages of tokens whose tail pages `extend` takes to reach page `end` with `num_new` new ones."""
        return range(self.first, self.first + max(0, end - len(self.pages) - num_new))

    def give_up(self, num_pages: int) -> None:
        """Own the first `num_pages` no more. Steps may still read them."""
        self.first += num_pages

    def replace(self, first: int, own: Sequence[int]) -> None:
        """Hold the tail pages `own` instead of those of the pages of tokens from `first` on, which nothing reads."""
        self.pages[first : first + len(own)] = [page - self.base for page in own]

    def shrink(self, most: int) -> list[int]:
        """Keep the last `most` tail pages. Return the others, which the caller frees."""
        surplus = self.own[: max(0, len(self.pages) - self.first - most)]
        self.first += len(surplus)
        return surplus

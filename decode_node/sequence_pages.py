"""Pages of the sequences on a decode node: from the prefix cache and the pool, and back.

A sequence has a lease on the pages that it found in the prefix cache, and own pages behind them. Its full computed
pages go to the prefix cache while it runs, and again when it gives its pages back.
"""

from __future__ import annotations

from collections.abc import Collection

from ..engine.state.pages import Owner
from ..engine.state.prefix_cache import Lease, PrefixCache
from ..engine.state.tail_pages import TailPages, Windows, most_tails
from ..engine.work import MAX_MISSED
from ..metadata.errors import OutOfPages
from ..metadata.handoff.schema.schema import decode_len, pages_of, tails_before
from .sequence import Sequence


class SequencePages:
    """Takes, shares and frees the pages of sequences. Owns them together with the sequences."""

    def __init__(
        self,
        cache: PrefixCache,
        first_rounds_len: int,
        context_len: int,
        num_prompt_states: int = 0,
        windows: Windows = Windows(),  # noqa: B008 - immutable
        chunk_tokens: int = 0,
    ) -> None:
        """`first_rounds_len`: tokens that the first two rounds of a sequence may write. The other arguments are those
        of the scheduler."""
        self._cache = cache
        self._page_size = cache.pool.page_size
        self._first_rounds_len, self._context_len = first_rounds_len, context_len
        self._num_prompt_states = num_prompt_states
        self._windows = windows
        self._num_tails = tails_before(windows.tail, self._page_size)  # that a hit needs if work continues behind it
        self._chunk_len = chunk_tokens + 1 + first_rounds_len
        self.num_releases = 0  # how often a sequence gave pages back

    def note_release(self) -> None:
        """Pages have become free that no sequence had."""
        self.num_releases += 1

    def take(self, sequence: Sequence, headroom: int = 0, *, is_pulled: bool = False) -> bool:
        """Give the sequence the pages of its tokens and of two rounds, cached ones first, or none (False).

        `headroom`: pages that must be left over. `is_pulled`: its KV comes from a prefill node, tail pages included;
        otherwise it is computed here."""
        num_tokens = len(sequence.token_ids)
        num_tails = 0 if is_pulled else self._num_tails
        end = decode_len(num_tokens, self._first_rounds_len, self._context_len)  # drafts may not pass the context
        num_pages = pages_of(end, self._page_size)
        prefix = sequence.token_ids, sequence.salt, self.most_cached(sequence), num_tails
        sequence.restore(self._cache.restore(*prefix, num_pages=num_pages + headroom) * self._page_size)
        lease = self._cache.acquire(*prefix)
        tail = self._begin_tail(num_tokens, lease, is_pulled=is_pulled)
        try:
            num_own, num_tails = num_pages - len(lease.pages), 0
            if tail is not None:
                num_tails = tail.num_missing(num_pages, self._most_tails(is_decoding=is_pulled))
            if num_own + headroom > self._cache.available or num_tails > self._cache.available_tails:
                raise OutOfPages("no headroom")
            own = self._cache.allocate(num_own, Owner.REQUEST)
        except OutOfPages:
            self._cache.release(lease)
            return False
        if tail is not None:
            tail.extend(len(tail.pages) + num_tails, self._cache.allocate_tails(num_tails, Owner.REQUEST))
        sequence.take_pages(lease, own, tail)
        return True

    def fetch(self, sequence: Sequence) -> None:
        """Begin to read files of a local prompt, if that is sooner than to compute its tokens."""
        limit = self.most_cached(sequence)
        sequence.fetch = self._cache.fetch(sequence.token_ids, sequence.salt, limit, self._num_tails)

    def awaits_files(self, sequence: Sequence) -> bool:
        """Return whether files of a local prompt, of which nothing is computed here yet, are being read. Otherwise the
        prompt waits for none from now on."""
        if sequence.fetch is not None and not self._cache.is_awaited(sequence.fetch):
            sequence.fetch = None
        return sequence.fetch is not None

    def may_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether the pages are there that the sequence lacks for so many tokens."""
        num_missing, num_tails = self._num_missing(sequence, num_tokens)
        return num_missing <= self._cache.available and num_tails <= self._cache.available_tails

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence the pages that it lacks for so many tokens. Raises OutOfPages; then it has got none."""
        num_missing, num_tails = self._num_missing(sequence, num_tokens)
        if num_tails > self._cache.available_tails:
            raise OutOfPages(f"{num_tails} tail pages were asked for and {self._cache.available_tails} are free")
        if num_missing > 0:
            sequence.add_pages(self._cache.allocate(num_missing, Owner.REQUEST))
        if sequence.tail is not None:
            tails, end = self._cache.allocate_tails(num_tails, Owner.REQUEST), self._tail_end(sequence, num_tokens)
            if sequence.num_to_compute > 1 or sequence.tail.first * self._page_size < sequence.prompt_len:
                self._give_passed(sequence, sequence.tail.passed(end, num_tails))
            sequence.tail.extend(end, tails)

    def _give_passed(self, sequence: Sequence, passed: range) -> None:
        """Give the tail pages of the `passed` pages of tokens to the prefix cache, and take others for the next tokens,
        which would write over them. So another text may continue behind the end of the prompt."""
        assert sequence.lease is not None and sequence.tail is not None, sequence.unit
        tails = sequence.tail.numbers(passed)
        end = (sequence.prompt_len - 1) // self._page_size - self._num_tails  # the same prompt may come again
        others = self._cache.exchange_tails(sequence.lease, passed.start, tails, Owner.REQUEST, end)
        sequence.tail.replace(passed.start, others)

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Return how many kept pages (0 or less if none) and tail pages the sequence lacks for so many tokens."""
        num_missing, tail = pages_of(num_tokens, self._page_size) - len(sequence.pages), sequence.tail
        if tail is None:
            return num_missing, 0
        most = self._most_tails(is_decoding=sequence.num_to_compute == 1)
        return num_missing, tail.num_missing(self._tail_end(sequence, num_tokens), most)

    def _tail_end(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the page of tokens that the table of tail pages reaches for so many tokens: with the last chunk of a
        prompt, as far as the block table, which has room for the first rounds."""
        if num_tokens + 1 >= len(sequence.token_ids):
            return max(pages_of(num_tokens, self._page_size), len(sequence.pages))
        return pages_of(num_tokens, self._page_size)

    def _begin_tail(self, num_tokens: int, lease: Lease, *, is_pulled: bool) -> TailPages | None:
        """Return the table of tail pages of a sequence, without pages of its own yet. If its KV is pulled, the pages
        before those that the first round reads do not come. None: the model has no such pages."""
        base = self._cache.pool.num_pages
        if not self._windows.tail:
            return None
        if is_pulled:
            return TailPages.from_page(base, max(0, num_tokens - self._windows.tail + 1) // self._page_size)
        return TailPages.behind(base, len(lease.pages), lease.tail_pages)

    def _most_tails(self, *, is_decoding: bool) -> int:
        """Return how many tail pages a sequence may hold: those of two rounds, or of a chunk and the rounds after."""
        num_new = self._first_rounds_len if is_decoding else self._chunk_len
        return most_tails(self._windows.held, num_new, self._page_size)

    def exchange(self, sequence: Sequence) -> int:
        """Exchange pages of a local prompt of which nothing is computed yet for those that were computed since, by
        another choice or request, or read from files. Return how many tokens are in them."""
        assert sequence.lease is not None, sequence.unit
        num_before = sequence.num_computed
        num_leased = len(sequence.lease.pages)
        if num_before != num_leased * self._page_size:
            return 0
        prefix = sequence.token_ids, sequence.salt, self.most_cached(sequence), self._num_tails
        if self._cache.match(*prefix) <= num_leased and not self._cache.may_restore(*prefix):
            return 0
        self.retake(sequence)
        sequence.share_prompt(self._page_size)
        return sequence.num_computed - num_before

    def retake(self, sequence: Sequence) -> None:
        """Let a sequence of which nothing is computed yet take its pages again: first those that the prefix cache has
        got since."""
        self._free(sequence, len(sequence.pages))
        sequence.give_up_pages()
        has_pages = self.take(sequence)
        assert has_pages, "fewer pages than those that it has just released"

    def holds_copies(self, sequence: Sequence) -> bool:
        """Return whether the sequence has pages of its own beside equal ones of the prefix cache that its lease pins,
        since its hit was cut back for want of tail pages. If it is preempted, it finds the cached ones."""
        assert sequence.lease is not None, sequence.unit
        return any(own != cached for own, cached in zip(sequence.pages, sequence.lease.pages, strict=False))

    def num_uncached(self, sequence: Sequence) -> int:
        """Return how many tokens of a reserved sequence are not in the pages that it found in the prefix cache."""
        assert sequence.lease is not None, sequence.unit
        return len(sequence.token_ids) - len(sequence.lease.pages) * self._page_size

    def most_shared(self, sequence: Sequence) -> int:
        """Return how many pages of a sequence other choices of its request may find in the prefix cache once it has
        computed its prompt."""
        num_computed = 1 + (self._num_prompt_states if sequence.lacks_draft else 0)
        return max(0, len(sequence.token_ids) - num_computed) // self._page_size

    def lack_drafts(self, sequence: Sequence) -> bool:
        """Return whether full pages of a sequence lack nothing but the KV of the drafter. The next turn of a
        conversation finds them if the drafter catches up."""
        num_complete = sequence.num_computed - sequence.num_missed
        return self._cache.enabled and num_complete // self._page_size < sequence.num_computed // self._page_size

    def share(self, sequence: Sequence, end: int | None = None, num_tokens: int | None = None) -> None:
        """Give full computed pages, those before index `end`, to the prefix cache. `num_tokens`: only pages of the
        first so many tokens; None: of all tokens whose KV target and drafter have. The sequence keeps its own block
        table."""
        assert sequence.lease is not None, sequence.unit
        if sequence.first_kept:
            return  # it does not hold the first pages any more
        if num_tokens is None:  # the drafter has no KV for missed rows, which are always the last ones
            num_tokens = max(0, sequence.num_computed - sequence.num_missed)
        known = sequence.token_ids[:num_tokens]
        pages = sequence.pages[: len(known) // self._page_size][:end]
        self._cache.insert(known, pages, sequence.salt, sequence.lease)

    def share_tails(self, sequence: Sequence) -> None:
        """Give the tail pages of all full computed pages to the prefix cache, which has these pages already. The
        sequence goes on to read those that its lease pins."""
        if sequence.tail is not None:
            assert sequence.lease is not None, sequence.unit
            first, stop = sequence.tail.first, sequence.num_computed // self._page_size
            tails = sequence.tail.numbers(range(first, stop))
            end = min(stop, len(sequence.lease.pages)) - self._num_tails
            num_taken = self._cache.share_tails(sequence.lease, first, tails, end)
            sequence.tail.give_up(num_taken)

    def give_back_unseen(self, sequence: Sequence) -> None:
        """Give back the pages before what any layer sees from now on, those of the prefix cache only if all of them are
        before it. Later pages do not enter the cache, since it has whole prefixes."""
        if sequence.tail is not None:  # a prompt that was computed here held more of them
            assert sequence.lease is not None, sequence.unit
            first, surplus = sequence.tail.first, sequence.tail.shrink(self._most_tails(is_decoding=True))
            taken = self._give_tails(sequence, first, surplus)
            self.num_releases += bool(surplus)
            self._cache.pool.release(page for page in surplus if page not in taken)
        if self._windows.widest is None:
            return
        assert sequence.lease is not None, sequence.unit
        seen = sequence.num_computed - MAX_MISSED - self._windows.widest + 1  # the drafter may catch up on missed rows
        first = max(0, seen) // self._page_size
        if first <= max(sequence.first_kept, len(sequence.lease.pages) - 1):
            return
        self.share(sequence, first)
        self._free(sequence, first)
        self.num_releases += 1
        sequence.keep_from(first, self._cache.acquire(()))

    def release(self, sequence: Sequence) -> None:
        """Take all pages from a sequence. Its full computed ones go to the prefix cache."""
        if sequence.lease is None:  # it is preempted and holds nothing
            return
        self.share(sequence)
        self.num_releases += 1
        taken: list[int] = []
        if sequence.tail is not None:  # the text may continue behind its end
            end = len(sequence.lease.pages) - self._num_tails  # the cache has no page whose next tokens are unknown
            taken = self._give_tails(sequence, sequence.tail.first, sequence.tail.own, end)
        self._free(sequence, len(sequence.pages), taken)
        sequence.give_up_pages()

    def _give_tails(self, sequence: Sequence, first: int, tails: list[int], end: int | None = None) -> list[int]:
        """Give tail pages of a sequence to the prefix cache, which are those of the pages of tokens from `first` on; a
        text may continue behind those from page `end` on. Only full pages of tokens with KV count: pages that were
        to be pulled may not have come. Return those that the cache took."""
        assert sequence.lease is not None, sequence.unit
        num_full = max(0, sequence.num_computed // self._page_size - first)
        return self._cache.give_tails(sequence.lease, first, tails[:num_full], end) if tails else []

    def most_cached(self, sequence: Sequence) -> int:
        """Return how many pages of a sequence may come from the prefix cache. Positions whose states are needed are
        computed."""
        if sequence.prompt_scores is None:
            return self.most_shared(sequence)
        return min(self.most_shared(sequence), sequence.prompt_scores.num_skippable // self._page_size)

    def _free(self, sequence: Sequence, end: int, taken: Collection[int] = ()) -> None:
        """End the sequence's lease, and free its own pages before index `end`. The prefix cache has `taken` some of its
        tail pages."""
        assert sequence.lease is not None, sequence.unit
        self._cache.release(sequence.lease, sequence.pages[sequence.first_kept : end])
        if sequence.tail is not None:
            self._cache.pool.release(sequence.tail.rest(taken))

"""The prefill scheduler: decides which prompts a step computes, and owns their pages.

    submit --> held --> waiting --start--> computing --(all submitted)--> handing_over --(last ticket ended)--> done
                 (no pages)       | (all its pages) ^            (all its pages)
                                  '--> borrowing ---'

A prompt starts only when the pool can hold all of it. Prompts start in the order in which they came. But those of a
router beyond what the node grants it (`max_prompts`) are held, and queue up only when an earlier prompt of that router
is computed: so no router delays another's prompts by more than its grant. The decode node has reserved its pages before
a prompt comes here, so every ticket ends, and no prompt waits for ever.

chunk_length.py decides how many tokens a step computes, and how many prompts share them.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..engine.state.pages import Owner
from ..engine.state.prefix_cache import PrefixCache
from ..engine.state.tail_pages import TailPages, most_tails
from ..engine.work import BatchRow
from ..metadata.errors import OutOfPages
from ..metadata.handoff.schema.schema import pages_of, prefill_pages, shared_pages, tails_before
from .chunk_length import ChunkLength
from .request import Request

QUEUED_PER_SLOT = 2  # prompts that the node grants per slot of its batch, to all routers together


class PlannedChunk(NamedTuple):
    """The next tokens of one prompt."""

    request: Request
    row: BatchRow

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with these tokens."""
        return self.row.position + len(self.row.input_ids) == len(self.request.token_ids)


StepPlan = list[PlannedChunk]


class PrefillScheduler:
    """Owns the waiting, computing and handing-over requests and all pages that they hold."""

    def __init__(
        self,
        cache: PrefixCache,
        max_running: int,
        chunk_tokens: int,
        *,
        has_tails: bool = False,
        tail_window: int = 0,
        has_draft_tails: bool = False,
    ) -> None:
        """`has_tails`: long prompts are divided. `tail_window`: positions that the layers with tail pages see; 0: there
        are no such layers. `has_draft_tails`: tail pages have KV of the drafter, too."""
        self._length = ChunkLength[Request](chunk_tokens, has_tails=has_tails)
        self.cache = cache
        self.page_size = cache.pool.page_size
        self._tail_window, self._has_draft_tails = tail_window, has_draft_tails
        self._tails_before = tails_before(tail_window, self.page_size)
        self._most_tails = most_tails(tail_window, chunk_tokens, self.page_size) if tail_window else 0
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.num_routers = 1  # that share the node; set by the node
        self.held: deque[Request] = deque()
        self.waiting: deque[Request] = deque()
        self.computing: list[Request] = []  # oldest first
        self.borrowing: list[Request] = []  # pages of other nodes are on the way for them
        self.handing_over: list[Request] = []

    def share_up_to(self, num_tokens: int | None) -> None:
        """From now on, a prompt joins others in a chunk only if the chunk then has at most `num_tokens` tokens, all
        that are left of the prompt included. None: it also joins with a part of its tokens, to fill the chunk."""
        self._length.sharing_limit = num_tokens

    def submit(self, request: Request) -> None:
        """Queue a request."""
        request.fetch = self.cache.fetch(*self._prefix(request))
        self.held.append(request)
        self._grant()

    @property
    def max_prompts(self) -> int:
        """How many prompts that are not computed yet the node grants to each of its routers."""
        return max(1, QUEUED_PER_SLOT * self.max_running // max(1, self.num_routers))

    def start(self) -> list[Request]:
        """Give pages to waiting requests, in order, while they fit. Requests whose pages are read from files are passed
        by. Return the requests that start now."""
        self._grant()
        started: list[Request] = []
        for request in [each for each in self.waiting if not self.cache.is_awaited(each.fetch)]:
            if self._num_started >= self.max_running or not self._take_pages(request):
                break
            self.waiting.remove(request)
            self.computing.append(request)
            started.append(request)
        return started

    @property
    def is_fetching(self) -> bool:
        """Whether a waiting request awaits pages from files."""
        return any(self.cache.is_awaited(request.fetch) for request in self.waiting)

    def await_loan(self, request: Request) -> None:
        """Compute nothing of a request that has just started until `end_loan`: it borrows pages."""
        self.computing.remove(request)
        self.borrowing.append(request)

    def end_loan(self, request: Request) -> None:
        """Compute what the request has not borrowed."""
        self.borrowing.remove(request)
        self._free(request)
        has_pages = self._take_pages(request)  # those that have come first
        assert has_pages, "fewer pages than those that it has just released"
        bisect.insort(self.computing, request, key=_age)

    def _grant(self) -> None:
        """Let those requests wait for pages that are within their router's grant. A single router needs none."""
        if not self.held:
            return
        counts = Counter(request.router for request in (*self.waiting, *self.borrowing, *self.computing))
        for request in list(self.held):
            if self.num_routers <= 1 or counts[request.router] < self.max_prompts:
                counts[request.router] += 1
                self.held.remove(request)
                self.waiting.append(request)

    def plan(self) -> StepPlan:
        """Return at most `chunk_tokens` prompt tokens of the computing requests, oldest first. If they are tokens of
        several requests, the limit of `share_up_to` holds."""
        plan: StepPlan = []
        most = budget = self._budget()
        for request in self.computing:
            start = request.num_submitted
            num_left = len(request.token_ids) - start
            if budget == 0 or (plan and not self._length.may_share(most - budget + num_left)):
                break
            num_new = min(budget, num_left)
            is_last = num_new == num_left
            num_scored = 0
            if request.generation.prompt_logprobs:  # of every token of the prompt but the first
                num_scored = max(0, min(num_new, request.prompt_len - 1 - start))
            ids = request.token_ids[start : start + num_new]
            tail = self._tail_of(request, start + num_new)
            row = BatchRow(ids, start, request.pages, int(is_last), num_scored, tail)
            plan.append(PlannedChunk(request, row))
            budget -= num_new
        return plan

    def hand_over(self, request: Request) -> None:
        """Move a request whose last token is submitted on. The prefix cache gets its full pages, which stay pinned."""
        assert request.lease is not None and request.is_submitted, request.rid
        self.computing.remove(request)
        self.handing_over.append(request)
        num_full = len(request.token_ids) // self.page_size
        self.cache.insert(request.token_ids, request.pages[:num_full], request.cache_salt, request.lease)
        if request.tail is not None:  # what the first round reads stays
            tail, read = request.tail, max(0, len(request.token_ids) - self._tail_window + 1) // self.page_size
            end = (len(request.token_ids) - 1) // self.page_size - self._tails_before  # the same prompt may come again
            taken = self.cache.give_tails(request.lease, tail.first, tail.own, min(read, end))
            own, unread = tail.rest(taken), tail.rest(taken, read)
            self.cache.pool.release(unread)
            request.keep_tail(own[len(unread) :])

    def stop(self, request: Request) -> None:
        """Compute no more of a request that has no choices left. It keeps its pages until its tickets end."""
        for queue in (self.held, self.waiting, self.borrowing, self.computing):
            if request in queue:
                queue.remove(request)
                self.handing_over.append(request)

    def remove(self, request: Request) -> None:
        """Free all that the request holds, in any phase. None of its tickets may be open any more."""
        assert not request.tickets, (request.rid, request.tickets)
        for queue in (self.held, self.waiting, self.borrowing, self.computing, self.handing_over):
            if request in queue:
                queue.remove(request)
        if request.lease is not None:
            self._free(request)

    def _free(self, request: Request) -> None:
        assert request.lease is not None, request.rid
        self.cache.release(request.lease, request.pages)
        for pages in (request.copies, request.tail_copies, request.own_tails):
            self.cache.pool.release(pages)
        request.give_up_pages()

    def find(self, rid: str, attempt: int) -> list[Request]:
        """Return the requests of this rid and of this or an earlier attempt, in any phase."""
        return [request for request in self if request.rid == rid and request.attempt <= attempt]

    def num_pages(self, request: Request) -> int:
        """Return the number of pages for the prompt; pages that differ by choice count once per choice."""
        num_choices = 1 if request.decode is None else len(request.choices)
        return prefill_pages(len(request.token_ids), num_choices, self.page_size, self.cache.lookahead)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute."""
        queued = (*self.held, *self.waiting, *self.borrowing, *self.computing)
        return sum(len(request.token_ids) - request.num_submitted for request in queued)

    def __iter__(self) -> Iterator[Request]:
        yield from (*self.held, *self.waiting, *self.borrowing, *self.computing, *self.handing_over)

    @property
    def _num_started(self) -> int:
        return len(self.computing) + len(self.borrowing)

    def _budget(self) -> int:
        """Return how many tokens the next chunk may have."""
        if not self.computing:
            return self.chunk_tokens
        oldest = self.computing[0]
        is_alone = len(self.computing) == 1 and not self.waiting and not self.held and oldest.decode is not None
        return self._length.budget(oldest, len(oldest.token_ids) - oldest.num_submitted, is_alone=is_alone)

    def _take_pages(self, request: Request) -> bool:
        """Give the request all its pages, cached ones first, or none (False)."""
        num_tokens, num_all = len(request.token_ids), self.num_pages(request)
        prefix = self._prefix(request)
        request.restore(self.cache.restore(*prefix, num_pages=num_all) * self.page_size)
        lease = self.cache.acquire(*prefix)
        owner = _owner(request)
        num_pages = pages_of(num_tokens, self.page_size)
        num_own = num_pages - len(lease.pages)
        num_shared = shared_pages(num_tokens, self.page_size, self.cache.lookahead)
        num_tails = min(num_own, self._most_tails)
        num_copies = num_all - num_pages if self._has_draft_tails else 0  # a tail page for each copy
        try:
            if num_tails + num_copies > self.cache.available_tails:
                raise OutOfPages(f"{num_tails + num_copies} tail pages were asked for")
            own = self.cache.allocate(num_all - len(lease.pages), owner)
        except OutOfPages:
            self.cache.release(lease)
            return False
        tail = None
        if self._tail_window:
            tail = TailPages.behind(self.cache.pool.num_pages, len(lease.pages), lease.tail_pages)
            tail.extend(len(lease.pages) + num_tails, self.cache.allocate_tails(num_tails, owner))
        copies, num_cached = self.cache.allocate_tails(num_copies, owner), len(lease.pages) * self.page_size
        request.start(lease, own[:num_own], own[num_own:], num_shared, num_cached, tail, copies)
        return True

    def _tail_of(self, request: Request, num_tokens: int) -> Sequence[int] | None:
        """Return the request's table of tail pages, which reaches the first `num_tokens` tokens."""
        if request.tail is None:
            return None
        tail, end = request.tail, pages_of(num_tokens, self.page_size)
        if passed := tail.passed(end, 0):  # the prefix cache gets them, and the request others in their place
            assert request.lease is not None, request.rid
            self.cache.insert(request.token_ids, request.pages[: passed.stop], request.cache_salt, request.lease)
            tails = self.cache.exchange_tails(request.lease, passed.start, tail.numbers(passed), _owner(request))
            tail.replace(passed.start, tails)
        tail.extend(end, ())
        return tail.pages

    def _prefix(self, request: Request) -> tuple[list[int], str, int, int]:
        """Return what the request looks for in the prefix cache, as the arguments of `PrefixCache.acquire`."""
        return request.token_ids, request.cache_salt, self.most_cached(request), self._tails_before

    def most_cached(self, request: Request) -> int:
        """Return how many pages may come from the prefix cache. A request that asks for log-probabilities of its prompt
        computes every position."""
        return 0 if request.generation.prompt_logprobs else (len(request.token_ids) - 1) // self.page_size


def _age(request: Request) -> int:
    return request.key


def _owner(request: Request) -> Owner:
    """Return the kind of owner that a request's pages have."""
    return Owner.REQUEST if request.decode is None else Owner.TICKET

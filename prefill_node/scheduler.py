"""The prefill scheduler: decides which prompts a step computes, and owns their pages.

    submit --> waiting --start--> computing --(all submitted)--> handing_over --(last ticket ended)--> done
                 (no pages)        (all its pages)               (all its pages)

A prompt starts only when the pool can hold all of it. Prompts start in the order in which they came. The decode node
has reserved its pages before a prompt comes here, so every ticket ends, and no prompt waits for ever.

`ChunkLength` decides how many tokens a step computes, and how many prompts share them. A chunk has at most as many as
`--chunk` says. Two rules make it shorter:

- Sharing. All prompts of a chunk get their first tokens when it ends. Up to some size, a longer chunk computes more
  tokens per second, so all prompts that share it gain. Beyond this size a chunk takes as long as its prompts one after
  the other: sharing it would delay the first of them and help none.
- Tails. The last tokens of a long prompt are a chunk of their own if no other prompt is here. The decode node pulls the
  pages before the tail while the tail is computed. So it has little left to pull when the first token is there, and the
  second token comes sooner. Without a tail all pages of a chunk are offered at once, with the first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ..engine.state.pages import Owner
from ..engine.state.prefix_cache import PrefixCache
from ..engine.work import BatchRow
from ..metadata.errors import OutOfPages
from ..metadata.handoff.schema.schema import pages_of, prefill_pages, shared_pages
from .request import Request

LEAST_TAIL = 512  # tokens; computing them takes longer than pulling the pages of all tokens before
_UNIT = 1024  # of the tokens before a tail: fused attention takes multiples of it
_LONG = 4 * _UNIT  # tokens; pages of fewer are pulled in less time than another chunk costs
_LEAST_SHARED = 512  # tokens that prompts share in any case
_GAIN = 1.04  # a chunk twice as long must compute tokens faster by this factor
_NUM_RUNS = 3  # of each size; the shortest counts: the first may compile kernels, and a disturbance adds to a time
_MOST_S = 1.0  # of one run: a device that takes longer is not measured further

Prompt = TypeVar("Prompt")


class ChunkLength(Generic[Prompt]):
    """Decides the lengths of one node's chunks. `sharing_limit`: the most tokens of a chunk that several prompts share;
    None: they share any chunk."""

    def __init__(self, most: int, *, has_tails: bool, sharing_limit: int | None = None) -> None:
        """`most`: tokens of a chunk. `has_tails`: the last tokens of a long prompt are a chunk of their own."""
        self._most, self._has_tails = most, has_tails
        self.sharing_limit = sharing_limit
        self._tail_of: Prompt | None = None  # the prompt of which only the tail is left

    def budget(self, oldest: Prompt, num_left: int, *, is_alone: bool) -> int:
        """Return how many tokens the next chunk may have. `oldest` comes first, and `num_left` of its tokens are left.
        `is_alone`: no other prompt is here, and a decode node pulls its pages.

        A tail is alone in its chunk, since prompts that have come meanwhile would delay its first token."""
        tail_of, self._tail_of = self._tail_of, None
        if tail_of is oldest:
            return min(num_left, self._most)
        before = num_before_tail(num_left, self._most) if is_alone and self._has_tails else None
        if before is None:
            return self._most
        self._tail_of = oldest
        return before

    def may_share(self, num_tokens: int) -> bool:
        """Whether a prompt may join others in a chunk, which then has `num_tokens` tokens with all that is left of this
        prompt."""
        return self.sharing_limit is None or num_tokens <= self.sharing_limit


def num_before_tail(num_left: int, most: int) -> int | None:
    """Return how many of the last `num_left` tokens of a prompt are computed before its tail. None: it has none, since
    they are few or do not fit in one chunk."""
    if not _LONG <= num_left <= most:
        return None
    return (num_left - LEAST_TAIL) // _UNIT * _UNIT


def measured_sharing_limit(chunk_s: Callable[[int], float], longest: int) -> int | None:
    """Return the most tokens of a chunk that several prompts share. None: any chunk, up to the longest one.
    `chunk_s(num_tokens)` computes a chunk of one prompt and returns its seconds. `longest`: the most tokens of any
    chunk."""
    if longest <= _LEAST_SHARED:
        return None
    size, rate = _LEAST_SHARED, _rate(chunk_s, _LEAST_SHARED)
    while rate and size < longest:
        larger = min(2 * size, longest)
        larger_rate = _rate(chunk_s, larger)
        if 0 < larger_rate < _GAIN * rate:
            return size
        size, rate = larger, larger_rate
    return None


def _rate(chunk_s: Callable[[int], float], num_tokens: int) -> float:
    """Return the tokens per second of a chunk; 0: it takes too long to be measured."""
    best_s = min(chunk_s(num_tokens) for _ in range(_NUM_RUNS - 1))
    return 0.0 if best_s > _MOST_S else num_tokens / min(best_s, chunk_s(num_tokens))


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

    def __init__(self, cache: PrefixCache, max_running: int, chunk_tokens: int, *, has_tails: bool = False) -> None:
        """`has_tails`: long prompts are divided."""
        self._length = ChunkLength[Request](chunk_tokens, has_tails=has_tails)
        self.cache = cache
        self.page_size = cache.pool.page_size
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Request] = deque()
        self.computing: list[Request] = []  # oldest first
        self.handing_over: list[Request] = []

    def share_up_to(self, num_tokens: int | None) -> None:
        """From now on, a prompt joins others in a chunk only if the chunk then has at most `num_tokens` tokens, all
        that are left of the prompt included. None: it also joins with a part of its tokens, to fill the chunk."""
        self._length.sharing_limit = num_tokens

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def start(self) -> list[Request]:
        """Give pages to waiting requests, in order, while they fit. Return the requests that start now."""
        started: list[Request] = []
        while self.waiting and len(self.computing) < self.max_running and self._take_pages(self.waiting[0]):
            started.append(self.waiting.popleft())
            self.computing.append(started[-1])
        return started

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
            row = BatchRow(ids, start, request.pages, int(is_last), num_scored)
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

    def stop(self, request: Request) -> None:
        """Compute no more of a request that has no choices left. It keeps its pages until its tickets end."""
        for queue in (self.waiting, self.computing):
            if request in queue:
                queue.remove(request)
                self.handing_over.append(request)

    def remove(self, request: Request) -> None:
        """Free all that the request holds, in any phase. None of its tickets may be open any more."""
        assert not request.tickets, (request.rid, request.tickets)
        for queue in (self.waiting, self.computing, self.handing_over):
            if request in queue:
                queue.remove(request)
        if request.lease is not None:
            self.cache.release(request.lease, request.pages)
            self.cache.pool.release(request.tail_copies)
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
        queued = (*self.waiting, *self.computing)
        return sum(len(request.token_ids) - request.num_submitted for request in queued)

    def __iter__(self) -> Iterator[Request]:
        yield from (*self.waiting, *self.computing, *self.handing_over)

    def _budget(self) -> int:
        """Return how many tokens the next chunk may have."""
        if not self.computing:
            return self.chunk_tokens
        oldest = self.computing[0]
        is_alone = len(self.computing) == 1 and not self.waiting and oldest.decode is not None
        return self._length.budget(oldest, len(oldest.token_ids) - oldest.num_submitted, is_alone=is_alone)

    def _take_pages(self, request: Request) -> bool:
        """Give the request all its pages, cached ones first, or none (False)."""
        num_tokens = len(request.token_ids)
        lease = self.cache.acquire(request.token_ids, request.cache_salt, self._most_cached(request))
        owner = Owner.REQUEST if request.decode is None else Owner.TICKET
        num_own = pages_of(num_tokens, self.page_size) - len(lease.pages)
        try:
            own = self.cache.allocate(self.num_pages(request) - len(lease.pages), owner)
        except OutOfPages:
            self.cache.release(lease)
            return False
        num_shared = shared_pages(num_tokens, self.page_size, self.cache.lookahead)
        request.start(lease, own[:num_own], own[num_own:], num_shared, len(lease.pages) * self.page_size)
        return True

    def _most_cached(self, request: Request) -> int:
        """Return how many pages may come from the prefix cache. A request that asks for log-probabilities of its prompt
        computes every position."""
        return 0 if request.generation.prompt_logprobs else (len(request.token_ids) - 1) // self.page_size

"""Which prompts are computed in a step, and whose the pages are.

    submit --> waiting --start--> computing --(all submitted)--> handing --(last ticket ended)--> done
                 (no pages)        (all its pages)               (all its pages)

A prompt starts only when the pool can hold all of it, first come first served. Decode has reserved before a prompt
comes here, so tickets always end, and so does waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..engine.batch import BatchRow
from ..engine.pages import Owner
from ..engine.prefix_cache import PrefixCache
from ..metadata.errors import OutOfPages
from ..metadata.handoff.needs import pages_of, prefill_pages, shared_pages
from .job import PrefillJob


class PrefillScheduler:
    """Owns the waiting, computing and handing jobs and all pages they hold."""

    def __init__(self, cache: PrefixCache, max_running: int, chunk_tokens: int) -> None:
        self.cache = cache
        self.page_size = cache.pool.page_size
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[PrefillJob] = deque()
        self.computing: list[PrefillJob] = []  # oldest first
        self.handing: list[PrefillJob] = []

    def submit(self, job: PrefillJob) -> None:
        self.waiting.append(job)

    def start(self) -> list[PrefillJob]:
        """Give pages to waiting jobs, in order, while they fit; returns those that start now."""
        started: list[PrefillJob] = []
        while self.waiting and len(self.computing) < self.max_running and self._take_pages(self.waiting[0]):
            started.append(self.waiting.popleft())
            self.computing.append(started[-1])
        return started

    def plan(self) -> list[tuple[PrefillJob, BatchRow]]:
        """At most `chunk_tokens` prompt tokens of the computing jobs, oldest first."""
        plan: list[tuple[PrefillJob, BatchRow]] = []
        budget = self.chunk_tokens
        for job in self.computing:
            if budget == 0:
                break
            start = job.num_submitted
            num_new = min(budget, len(job.token_ids) - start)
            is_last = start + num_new == len(job.token_ids)
            num_logits = num_new if job.request.prompt_logprobs else int(is_last)
            plan.append((job, BatchRow(job.token_ids[start : start + num_new], start, job.pages, num_logits)))
            budget -= num_new
        return plan

    def hand_over(self, job: PrefillJob) -> None:
        """All of the prompt is submitted: its whole pages go to the prefix cache, still pinned for its tickets."""
        assert job.lease is not None and job.is_submitted, job.rid
        self.computing.remove(job)
        self.handing.append(job)
        num_whole = len(job.token_ids) // self.page_size
        self.cache.insert(job.token_ids, job.pages[:num_whole], job.request.cache_salt, job.lease)

    def stop(self, job: PrefillJob) -> None:
        """Nobody wants the prompt any more: no more of it is computed; its tickets have to end yet."""
        for queue in (self.waiting, self.computing):
            if job in queue:
                queue.remove(job)
                self.handing.append(job)

    def remove(self, job: PrefillJob) -> None:
        """Free all that the job holds, in any phase. No open ticket may name its pages any more."""
        assert not job.tickets, (job.rid, job.tickets)
        for queue in (self.waiting, self.computing, self.handing):
            if job in queue:
                queue.remove(job)
        if job.lease is not None:
            self.cache.release(job.lease, job.pages)
            self.cache.pool.release(job.tail_copies)
            job.lease, job.pages, job.tail_copies = None, [], []

    def num_pages(self, job: PrefillJob) -> int:
        """All pages of the prompt, those that differ by choice once for each."""
        num_choices = 1 if job.decode is None else len(job.choices)
        return prefill_pages(len(job.token_ids), num_choices, self.page_size, self.cache.lookahead)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return sum(len(job.token_ids) - job.num_submitted for job in (*self.waiting, *self.computing))

    def __iter__(self) -> Iterator[PrefillJob]:
        yield from (*self.waiting, *self.computing, *self.handing)

    def _take_pages(self, job: PrefillJob) -> bool:
        num_tokens = len(job.token_ids)
        # a prompt whose own log-probabilities are wanted computes every position
        limit = 0 if job.request.prompt_logprobs else (num_tokens - 1) // self.page_size
        lease = self.cache.acquire(job.token_ids, job.request.cache_salt, limit)
        owner = Owner.REQUEST if job.decode is None else Owner.TICKET
        num_own = pages_of(num_tokens, self.page_size) - len(lease.pages)
        try:
            own = self.cache.allocate(self.num_pages(job) - len(lease.pages), owner)
        except OutOfPages:
            self.cache.release(lease)
            return False
        job.lease, job.pages, job.tail_copies = lease, lease.pages + own[:num_own], own[num_own:]
        job.num_submitted = job.num_computed = job.num_cached = len(lease.pages) * self.page_size
        job.num_shared = shared_pages(num_tokens, self.page_size, self.cache.lookahead)
        assert len(lease.pages) <= job.num_shared, (job.rid, len(lease.pages), job.num_shared)
        return True

"""A sequence on the decode node: one output of a request, from its reservation to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from ..engine.sampling.state import SamplingState, ended
from ..engine.state.prefix_cache import Lease
from ..engine.state.tail_pages import TailPages
from ..engine.tiers.disk_tier import Fetch
from ..engine.work import MAX_MISSED, Accepted
from ..metadata.wire.messages import Compute, Dispatch
from ..metadata.wire.request import (
    MAX_PREEMPTIONS,
    Ended,
    GenerationRequest,
    Preemption,
    TokenLogprobs,
    Unit,
    add_bounded,
)


class SequenceClock:
    """The times of one sequence. A round only counts up; the time is read when a run begins or ends."""

    __slots__ = (
        "_clock",
        "_num_restored",
        "_paused_at",
        "_ran_s",
        "_resumed_at",
        "_since",
        "_steps",
        "_tokens",
        "is_paused",
        "num_steps",
        "preemptions",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_steps = 0
        self.preemptions: list[Preemption] = []  # at most MAX_PREEMPTIONS: neighbours are joined
        self._clock = clock
        self.is_paused = False  # the sequence has lost its pages, and has had no round since
        self._num_restored = 0  # tokens since
        self._since = self._ran_s = self._paused_at = 0.0
        self._steps = self._tokens = 0  # counts at the start of the run; after a preemption, what the run added to them
        self._resumed_at: float | None = None  # the sequence has pages again, but no round since

    def start(self, num_generated: int) -> None:
        """The first run begins."""
        self._begin_run(self._clock(), num_generated)

    def step(self, num_generated: int) -> None:
        """Count a round. `num_generated` tokens had been generated before it."""
        if self._resumed_at is not None:
            self._end_preemption(self._clock(), num_generated)
        self.num_steps += 1

    def preempt(self, num_generated: int) -> None:
        """The run ends: the sequence has lost its pages."""
        now = self._clock()
        if self._resumed_at is not None:  # preempted again before a round
            self._end_preemption(now, num_generated)
        self.is_paused = True
        self._paused_at, self._ran_s = now, now - self._since
        self._steps, self._tokens = self.num_steps - self._steps, num_generated - self._tokens

    def restore(self, num_tokens: int) -> None:
        """The KV of so many tokens has come back from the host tier, while the sequence is paused."""
        self._num_restored += num_tokens

    def resume(self) -> None:
        """The sequence has pages again. Its KV is recomputed before its next round, which begins a run."""
        self._resumed_at = self._clock()

    def _end_preemption(self, now: float, num_generated: int) -> None:
        assert self._resumed_at is not None
        waited_s, recompute_s = self._resumed_at - self._paused_at, now - self._resumed_at
        preemption = Preemption(1, self._steps, self._tokens, self._ran_s, waited_s, recompute_s, self._num_restored)
        add_bounded(self.preemptions, preemption, MAX_PREEMPTIONS)
        self._resumed_at, self._num_restored, self.is_paused = None, 0, False
        self._begin_run(now, num_generated)

    def _begin_run(self, now: float, num_generated: int) -> None:
        self._since, self._steps, self._tokens = now, self.num_steps, num_generated


@dataclass(slots=True, eq=False)
class PromptScores:
    """Log-probabilities of the prompt's tokens after the first. The state of position i scores token i + 1."""

    num_wanted: int  # tokens of the prompt after the first
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_complete(self) -> bool:
        return len(self.logprobs) == self.num_wanted

    @property
    def num_skippable(self) -> int:
        """Positions from the start whose states are not needed any more."""
        return len(self.logprobs)

    def num_scored(self, start: int, num_new: int) -> int:
        """Return how many of the `num_new` positions from `start` on score a token of the prompt."""
        return max(0, min(num_new, self.num_wanted - start))

    def take(self, start: int, logprobs: Seq[TokenLogprobs]) -> None:
        """Take the scores of the positions from `start` on. After a preemption some are computed a second time."""
        assert start <= len(self.logprobs), (start, len(self.logprobs))
        self.logprobs[start:] = logprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, pages and sampling state of one unit. The pages beyond those of `lease` are its own.

    Others change it by its methods only: the scheduler gives and takes pages, the node adds tokens, the outbox sends
    them. The engine's rounds write `slot` and `num_missed`, and clear `lacks_draft`.
    """

    unit: Unit
    order: int  # its age: the oldest has the smallest; the youngest is preempted first
    request: GenerationRequest
    prompt_len: int
    token_ids: list[int]  # prompt, received and generated tokens
    sampling: SamplingState
    router: str = ""  # epoch of the router that asked for it, and gets its tokens
    pages: list[int] = field(default_factory=list)  # the block table
    lease: Lease | None = None
    tail: TailPages | None = None  # pages of layers with a window; None: the model has none, or it holds no pages
    first_kept: int = 0  # index of the first page that it still holds; no layer sees those before
    num_computed: int = 0  # tokens with KV in `pages`
    num_cached: int = 0  # prompt tokens whose KV was found in a prefix cache, as reported to the client
    fetch: Fetch | None = None  # files of its prefix that are read; None: it waits for none
    num_restored: int = 0  # prompt tokens whose KV came from the host tier of this node
    num_sent: int = 0  # generated tokens that the router has been sent
    owes_num_cached: bool = False  # the router must be told `num_cached`, since no prefill node tells it
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index into the generated tokens
    drafts: bytearray = field(default_factory=bytearray)  # 1 by generated token that is an accepted draft, if asked for
    is_local: bool = False  # this node computes its prompt
    lacks_draft: bool = False  # the drafter has no state of its local prompt yet
    prompt_scores: PromptScores | None = None  # of its local prompt; None: not asked for here, or sent
    slot: int | None = None  # in the engine's rounds, while it runs
    num_missed: int = 0  # rows that the drafter has not seen
    routine_until: int = -1  # up to so many tokens with KV, those coming included, all drafts fit without more pages
    num_coming: int = 0  # the most tokens that the round under way may bring; 0: no such round has this sequence
    num_drafted: int = 0
    accept_counts: list[int] = field(default_factory=list)  # of rounds that drafted: how many accepted 0, 1, ... drafts
    ended: Ended | None = None
    clock: SequenceClock = field(default_factory=SequenceClock)

    @property
    def salt(self) -> str:
        """The request's cache salt, by the name that the engine's rounds use."""
        return self.request.cache_salt

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_left_behind(self) -> bool:
        """Whether the drafter has missed too many rows. Such a sequence never drafts again."""
        return self.num_missed > MAX_MISSED

    @property
    def num_to_compute(self) -> int:
        """Tokens without KV: one while decoding, more after a preemption or before a local prompt is computed."""
        return len(self.token_ids) - self.num_computed

    # --- pages ---

    def take_pages(self, lease: Lease, own: Seq[int], tail: TailPages | None = None) -> None:
        """Hold the pages of `lease`, whose KV is computed, and after them `own`. `tail`: tail pages beside them."""
        self.lease, self.pages, self.tail = lease, [*lease.pages, *own], tail

    def restore(self, num_tokens: int) -> None:
        """The prefix cache has got the KV of so many tokens back from the host tier."""
        if self.clock.is_paused:
            self.clock.restore(num_tokens)
        else:
            self.num_restored += num_tokens

    def add_pages(self, own: Seq[int]) -> None:
        self.pages += own

    def keep_from(self, first: int, lease: Lease) -> None:
        """Hold only the pages from index `first` on. `lease` has none. The block table stays as it is."""
        assert self.first_kept < first <= len(self.pages), (self.unit, self.first_kept, first)
        self.first_kept, self.lease = first, lease

    def give_up_pages(self) -> None:
        """Forget all pages, which the caller frees."""
        self.lease, self.pages, self.tail, self.first_kept, self.routine_until = None, [], None, 0, -1

    # --- running ---

    def start_pulled(self) -> None:
        """All tokens have KV, which was pulled from a prefill node."""
        self.num_computed = len(self.token_ids)

    def start_local(self, page_size: int) -> None:
        """The prompt is computed here, except for the pages found in the prefix cache."""
        self.num_cached = self._skip_cached_pages(page_size)
        self.lacks_draft = self.lacks_draft and self.num_to_compute > 1

    def share_prompt(self, page_size: int) -> None:
        """The sequence has new pages, since an older choice has computed the same prompt. It counts as cached what was
        in the prefix cache before."""
        self._skip_cached_pages(page_size)

    def preempt(self) -> None:
        """The pages are gone, and all KV with them."""
        self.num_computed = 0
        self.clock.preempt(self.num_generated)

    def resume(self, page_size: int) -> None:
        """The sequence has pages again, and computes its tokens again."""
        self._skip_cached_pages(page_size)
        self.clock.resume()

    def compute(self, num_tokens: int) -> None:
        """Record that the KV of the next `num_tokens` tokens is computed."""
        self.num_computed += num_tokens

    def join_round(self, limit: int) -> None:
        """A round is under way that accepts at most `limit` drafts."""
        self.num_coming = 1 + limit

    def leave_round(self) -> None:
        """The round's results have come."""
        self.num_coming = 0

    def take_scores(self, start: int, logprobs: Seq[TokenLogprobs]) -> None:
        """Take log-probabilities of the tokens after the positions from `start` on."""
        assert self.prompt_scores is not None, self.unit
        self.prompt_scores.take(start, logprobs)

    def forget_scores(self) -> None:
        """The log-probabilities of the prompt have been sent to the router."""
        self.prompt_scores = None

    # --- tokens ---

    def append_first(self, token_id: int, logprobs: TokenLogprobs | None, num_cached: int) -> None:
        """Append the token that the prefill node sampled. `num_cached`: prompt tokens in the prefill node's cache."""
        self.num_cached = num_cached
        self._append(token_id, logprobs)

    def accept(self, accepted: Accepted, context_len: int) -> int:
        """Append the tokens of a round, up to the one that ends the sequence. Return how many were appended."""
        self.clock.step(self.num_generated)
        if accepted.num_drafted:
            self.num_drafted += accepted.num_drafted
            self.accept_counts += [0] * (accepted.num_drafted + 1 - len(self.accept_counts))
            self.accept_counts[accepted.num_accepted] += 1
        for count, (token_id, entry) in enumerate(zip(accepted.token_ids, accepted.logprobs, strict=True), 1):
            self.num_computed += 1
            self._append(token_id, entry, is_draft=count <= accepted.num_accepted)
            end = ended(self.sampling, token_id, context_len, self.num_cached)
            if end is not None:
                self.ended = self._with_totals(end)
                return count
        return len(accepted.token_ids)

    def mark_sent(self) -> None:
        """All generated tokens have been sent to the router."""
        self.num_sent = self.num_generated
        self.owes_num_cached = False

    def _append(self, token_id: int, logprobs: TokenLogprobs | None, *, is_draft: bool = False) -> None:
        if self.request.marks_drafts:
            self.drafts.append(is_draft)
        if logprobs is not None:
            self.logprobs[self.num_generated] = logprobs
        self.token_ids.append(token_id)
        self.sampling.append(token_id)

    def _with_totals(self, end: Ended) -> Ended:
        return msgspec.structs.replace(
            end,
            num_rounds=sum(self.accept_counts),
            num_drafted=self.num_drafted,
            num_accepted=sum(place * count for place, count in enumerate(self.accept_counts)),
            num_steps=self.clock.num_steps,
            preemptions=tuple(self.clock.preemptions),
            accept_counts=tuple(self.accept_counts),
            num_restored=self.num_restored,
        )

    def _skip_cached_pages(self, page_size: int) -> int:
        assert self.lease is not None, self.unit
        self.num_computed = len(self.lease.pages) * page_size
        return self.num_computed


def new_sequence(
    message: Dispatch, choice: int, order: int, *, vocab_size: int, context_len: int, scores_prompt: bool = False
) -> Sequence:
    """Return a choice that the router asks for, without pages yet. Raises RequestError if the model cannot run it.

    `scores_prompt`: of the choices of this message, this one brings the log-probabilities of the prompt if they are
    asked for and the prompt is local."""
    request = message.request
    prompt_ids, received_ids = request.token_ids(vocab_size, context_len)
    is_local = isinstance(message, Compute)
    wants_scores = scores_prompt and is_local and request.prompt_logprobs
    sampling = SamplingState(request.params, prompt_ids, received_ids, vocab_size=vocab_size, choice=choice)
    return Sequence(
        unit=Unit(message.rid, choice, message.attempt),
        order=order,
        request=request,
        prompt_len=len(prompt_ids),
        token_ids=prompt_ids + received_ids,
        sampling=sampling,
        router=message.router_epoch,
        num_sent=len(received_ids),
        is_local=is_local,
        owes_num_cached=is_local,
        lacks_draft=is_local,
        prompt_scores=PromptScores(len(prompt_ids) - 1) if wants_scores else None,
        drafts=bytearray(len(received_ids)) if request.marks_drafts else bytearray(),
    )

"""A sequence on the decode node: one output of a request, from its reservation to its last token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from ..engine.sampling.state import SamplingState
from ..engine.sampling.stopping import ended
from ..engine.state.prefix_cache import Lease
from ..engine.work import MAX_MISSED, Accepted
from ..metadata.wire.messages import Compute, Dispatch
from ..metadata.wire.request import Ended, GenerationRequest, TokenLogprobs, Unit
from .prompt_scores import PromptScores
from .sequence_clock import SequenceClock


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
    pages: list[int] = field(default_factory=list)  # the block table
    lease: Lease | None = None
    first_kept: int = 0  # index of the first page that it still holds; no layer sees those before
    num_computed: int = 0  # tokens with KV in `pages`
    num_cached: int = 0  # prompt tokens whose KV was found in a prefix cache, as reported to the client
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
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
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

    def take_pages(self, lease: Lease, own: Seq[int]) -> None:
        """Hold the pages of `lease`, whose KV is computed, and after them `own`."""
        self.lease, self.pages = lease, [*lease.pages, *own]

    def add_pages(self, own: Seq[int]) -> None:
        self.pages += own

    def keep_from(self, first: int, lease: Lease) -> None:
        """Hold only the pages from index `first` on. `lease` has none. The block table stays as it is."""
        assert self.first_kept < first <= len(self.pages), (self.unit, self.first_kept, first)
        self.first_kept, self.lease = first, lease

    def give_up_pages(self) -> None:
        """Forget all pages, which the caller frees."""
        self.lease, self.pages, self.first_kept, self.routine_until = None, [], 0, -1

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
        self.num_rounds += accepted.num_drafted > 0
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
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
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_steps=self.clock.num_steps,
            preemptions=tuple(self.clock.preemptions),
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
        num_sent=len(received_ids),
        is_local=is_local,
        owes_num_cached=is_local,
        lacks_draft=is_local,
        prompt_scores=PromptScores(len(prompt_ids) - 1) if wants_scores else None,
        drafts=bytearray(len(received_ids)) if request.marks_drafts else bytearray(),
    )

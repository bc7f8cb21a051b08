"""A request on the prefill node: one prompt, from its arrival to the end of its last ticket.

A prompt is computed once for all its choices. Each choice samples its own first token and has its own ticket. Tokens
that an earlier attempt has already generated are computed like the prompt: `token_ids` is prompt + received.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.sampling.state import SamplingState
from ..engine.state.prefix_cache import Lease
from ..engine.state.tail_pages import TailPages
from ..engine.tiers.disk_tier import Fetch
from ..metadata.wire.messages import Prefill
from ..metadata.wire.node_info import Lender, Peer
from ..metadata.wire.request import (
    MAX_CHUNKS,
    ChunkTimes,
    GenerationRequest,
    PrefillTimes,
    TokenLogprobs,
    Unit,
    add_bounded,
)


@dataclass(slots=True, eq=False)
class Request:
    """Tokens, pages, choices and tickets of one prompt. Others change it by its methods only.

    The scheduler gives and takes the pages. The node moves the token counts on. Tickets opens and ends the tickets.
    """

    rid: str
    attempt: int
    key: int  # names the prompt on the device
    choices: dict[Unit, SamplingState]  # those that are still wanted
    generation: GenerationRequest
    decode: Peer | None  # None: the first token is the last, and no page is handed over
    prompt_len: int
    token_ids: list[int]
    arrived: float  # monotonic seconds, like the two below
    router: str = ""  # epoch of the router that asked for it, and gets its first tokens
    started: float = 0.0  # 0: not yet
    computed: float = 0.0
    lease: Lease | None = None
    rank: int = 0  # whose pool and prefix cache it uses
    pages: list[int] = field(default_factory=list)
    num_shared: int = (
        0  # pages from the start that no sampled token changes; each choice has its own copy of the others
    )
    tail: TailPages | None = None  # pages of layers with a window; None: the model has none, or it holds no pages
    kept_tails: list[int] | None = None  # the tail pages that are its own when all is submitted; None: before
    copies: list[int] = field(default_factory=list)  # of the unshared pages, for all choices but the first
    tail_copies: list[int] = field(default_factory=list)  # likewise of their tail pages, if the drafter has KV there
    lender: Lender | None = None  # another node that has pages of the prompt
    num_cached: int = 0
    fetch: Fetch | None = None  # files of its prefix that are read; None: it waits for none
    num_restored: int = 0  # tokens of these that came from the host tier
    num_submitted: int = 0  # tokens with KV in `pages` for whatever is submitted to the device from now on
    num_computed: int = 0  # the part of these that the host knows to be computed
    num_offered: int = 0  # pages
    num_offers: int = 0
    num_early_pages: int = 0  # pages offered before the whole prompt was computed
    tickets: set[Unit] = field(default_factory=set)  # open ones
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sample_s: float = 0.0
    _chunks: list[ChunkTimes] = field(default_factory=list)  # at most MAX_CHUNKS: neighbours are joined
    _idle_since: float = 0.0

    @property
    def loan(self) -> Unit:
        """The name of the loan by which it borrows pages."""
        return Unit(self.rid, 0, self.attempt)

    @property
    def cache_salt(self) -> str:
        return self.generation.cache_salt

    @property
    def num_received(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_submitted(self) -> bool:
        return self.num_submitted == len(self.token_ids)

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.token_ids)

    @property
    def times(self) -> PrefillTimes:
        """The times that the router gets for the request's timeline."""
        return PrefillTimes(
            self.sample_s, self.num_offers, self.num_early_pages, tuple(self._chunks), self.num_restored
        )

    def block_table(self, index: int) -> list[int]:
        """Return the pages of the index-th choice."""
        if index == 0 or not self.copies:
            return self.pages
        return [*self.pages[: self.num_shared], *self._copies(self.copies, index)]

    def tail_table(self, index: int) -> list[int] | None:
        """Return the table of tail pages of the index-th choice; None: the model has none."""
        if self.tail is None or index == 0 or not self.tail_copies:
            return None if self.tail is None else self.tail.pages
        return self.tail.table_with(self.num_shared, self._copies(self.tail_copies, index))

    def _copies(self, copies: Sequence[int], index: int) -> Sequence[int]:
        """Return those of the index-th choice, counted from 1."""
        num = len(self.pages) - self.num_shared
        return copies[(index - 1) * num : index * num]

    def start(
        self,
        lease: Lease,
        own: Sequence[int],
        copies: Sequence[int],
        num_shared: int,
        num_cached: int,
        tail: TailPages | None = None,
        tail_copies: Sequence[int] = (),
    ) -> None:
        """Take pages: those of `lease`, whose KV is computed already for `num_cached` tokens, then `own`. `tail`: tail
        pages beside them."""
        assert len(lease.pages) <= num_shared, (self.rid, len(lease.pages), num_shared)
        self.lease, self.pages, self.copies = lease, [*lease.pages, *own], list(copies)
        self.num_shared, self.tail, self.tail_copies = num_shared, tail, list(tail_copies)
        self.num_submitted = self.num_computed = self.num_cached = num_cached
        self._idle_since = time.monotonic()
        self.started = self.started or self._idle_since  # it takes pages again when it has borrowed some

    @property
    def own_tails(self) -> list[int]:
        """The tail pages that it must free."""
        if self.kept_tails is not None:
            return self.kept_tails
        return [] if self.tail is None else self.tail.own

    def keep_tail(self, own: list[int]) -> None:
        """Keep only the tail pages `own`. The caller has given the others to the prefix cache, or freed them."""
        self.kept_tails = own

    def restore(self, num_tokens: int) -> None:
        """Record that the prefix cache has got the KV of so many tokens back from the host tier."""
        self.num_restored += num_tokens

    def give_up_pages(self) -> None:
        """Forget all pages, which the caller frees."""
        self.lease, self.pages, self.tail, self.kept_tails = None, [], None, None
        self.copies, self.tail_copies = [], []

    def submit_chunk(self, num_tokens: int) -> None:
        """Record that the device was asked to compute the next `num_tokens` tokens."""
        self.num_submitted += num_tokens

    def finish_chunk(self, num_tokens: int, begun: float, done: float) -> None:
        """Record that the device computed `num_tokens` tokens between these times (monotonic seconds)."""
        times = ChunkTimes(1, num_tokens, max(0.0, begun - self._idle_since), done - begun)
        add_bounded(self._chunks, times, MAX_CHUNKS)
        self._idle_since = done
        self.num_computed += num_tokens

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.prompt_logprobs += logprobs

    def finish_prompt(self, computed: float) -> None:
        """Record when the whole prompt was computed (monotonic seconds)."""
        self.computed = computed

    def finish_sampling(self) -> None:
        """Record that the first tokens are on their way to the router."""
        self.sample_s = time.monotonic() - self.computed

    def drop_choice(self, unit: Unit) -> None:
        """Forget a choice that is not wanted any more, if it is known."""
        self.choices.pop(unit, None)

    def open_ticket(self, unit: Unit) -> None:
        self.tickets.add(unit)

    def end_ticket(self, unit: Unit) -> None:
        self.tickets.discard(unit)

    def offer_pages(self, num_pages: int) -> None:
        """Record an offer, after which `num_pages` pages are offered in all."""
        self.num_offered = num_pages
        self.num_offers += 1
        if not self.is_computed:
            self.num_early_pages = num_pages


def new_request(message: Prefill, *, key: int, vocab_size: int, context_len: int) -> Request:
    """Return the request of a Prefill message, without pages yet. Raises RequestError if the model cannot run it.

    `key` names the prompt on the device. No other request that the node holds may have it.
    """
    generation = message.request
    prompt_ids, received_ids = generation.token_ids(vocab_size, context_len)
    choices = {
        Unit(message.rid, choice, message.attempt): SamplingState(
            generation.params, prompt_ids, received_ids, vocab_size=vocab_size, choice=choice
        )
        for choice in message.choices
    }
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        key=key,
        choices=choices,
        generation=generation,
        decode=message.decode,
        prompt_len=len(prompt_ids),
        token_ids=prompt_ids + received_ids,
        arrived=time.monotonic(),
        router=message.router_epoch,
        lender=message.lender,
    )

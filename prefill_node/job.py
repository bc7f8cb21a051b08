"""One prompt on a prefill node, for one or more choices, from its arrival to the end of its last ticket."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..engine.prefix_cache import Lease
from ..engine.sampling_state import SamplingState
from ..metadata.wire.node_info import Peer
from ..metadata.wire.request import GenerationRequest, TokenLogprobs, Unit
from ..metadata.wire.times import MAX_CHUNKS, ChunkTimes, PrefillTimes, add_bounded


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt is computed once; each of its choices samples a first token and has a ticket of its own.

    Tokens an earlier attempt already produced are part of what is computed: `token_ids` is prompt + received.
    """

    rid: str
    attempt: int
    choices: dict[Unit, SamplingState]
    request: GenerationRequest
    decode: Peer | None  # None: the first token is the last, nothing is handed over
    prompt_len: int
    token_ids: list[int]
    arrived: float  # monotonic seconds
    started: float = 0.0
    computed: float = 0.0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # pages from the start that no sampled token changes; the others are a choice's own
    tail_copies: list[int] = field(default_factory=list)  # of pages not shared, for the choices after the first
    lease: Lease | None = None
    num_submitted: int = 0  # tokens whose KV lies in `pages` before anything that is submitted from now on reads it
    num_computed: int = 0  # of these, as far as the host knows
    num_offered: int = 0  # pages offered so far
    num_cached: int = 0
    extend_rows: torch.Tensor | None = None  # [<= num_target_rows + 1, extend width] of the last computed positions
    tickets: set[Unit] = field(default_factory=set)  # not ended yet
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunks: list[ChunkTimes] = field(default_factory=list)  # neighbours joined above MAX_CHUNKS
    num_offers: int = 0
    early_pages: int = 0  # offered before the prompt was computed
    sample_s: float = 0.0
    _idle_since: float | None = None

    @property
    def num_received(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def pages_of(self, index: int) -> list[int]:
        """The block table of the job's index-th choice."""
        if index == 0 or not self.tail_copies:
            return self.pages
        num_tail = len(self.pages) - self.num_shared
        return self.pages[: self.num_shared] + self.tail_copies[(index - 1) * num_tail : index * num_tail]

    def keep_rows(self, extend: torch.Tensor, num_rows: int) -> None:
        """Positions were computed with these states [num_new, width]: remember the last `num_rows` of all."""
        kept = extend[-num_rows:]
        if self.extend_rows is not None:
            kept = torch.cat([self.extend_rows, kept])[-num_rows:]
        self.extend_rows = kept.clone()

    def note_chunk(self, num_tokens: int, begun: float, done: float) -> None:
        """A step between these times computed so many of its tokens."""
        idle_since = self.started if self._idle_since is None else self._idle_since
        self._idle_since = done
        add_bounded(self.chunks, ChunkTimes(1, num_tokens, max(0.0, begun - idle_since), done - begun), MAX_CHUNKS)

    @property
    def times(self) -> PrefillTimes:
        """What the router is told for the request's timeline."""
        return PrefillTimes(self.sample_s, self.num_offers, self.early_pages, tuple(self.chunks))

    @property
    def is_submitted(self) -> bool:
        return self.num_submitted == len(self.token_ids)

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.token_ids)

"""One engine with a drafter, without nodes and messages. The test itself runs each chunk and each round.

solo = Solo(model, speculative="eagle", draft_model=str(head))
sequence = solo.start([1, 2, 3], params(20), chunk=2)
solo.round([sequence], 4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from heads import over_all_tokens
from model_pools import pages_for
from torch import Tensor

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.model_config import ENTRY_POOLS, INDEX
from baton.engine.drafters import frozen_kv, mtp_layers, shifted, standalone
from baton.engine.drafters.base import Drafter, DraftState, PromptChunk, PromptTail, pack_draft
from baton.engine.engine import Engine
from baton.engine.rounds import trees
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.engine.sampling.batch import INTS, SamplingBatch
from baton.engine.sampling.row_shares import Lens
from baton.engine.sampling.sampling import SubmittedSample
from baton.engine.sampling.state import SamplingState
from baton.engine.state.tail_pages import TailPages
from baton.engine.work import MAX_MISSED, Accepted, BatchRow, RoundTokens
from baton.metadata.wire.request import SamplingParams

POISON = 1e4  # written where no kernel may read; finite, so that a masked score stays masked
_MODULES = (shifted, standalone, frozen_kv, mtp_layers)  # drafters that sample by `sample_ahead`


@dataclass(slots=True, eq=False)
class Running:
    """A sequence, as the engine's rounds need it."""

    prompt_len: int
    token_ids: list[int]
    num_computed: int
    pages: list[int]
    sampling: SamplingState
    slot: int | None = None
    num_missed: int = 0
    lacks_draft: bool = False
    tail: TailPages | None = None
    salt: str = ""
    num_accepted: list[int] = field(default_factory=list)  # one a round

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


def spoil(solo: Solo, victim: Running) -> None:
    """Overwrite everything that a round must not read: static inputs name `victim`, and the rows and the page of
    padding hold large numbers."""
    for block in solo.executor.buckets.free_blocks:
        inputs = block.for_round
        named = (inputs.slots, inputs.limits, inputs.missed_rows, inputs.proposed, inputs.block_table)
        for each, value in zip(named, (victim.slot, 5, 3, 1, victim.pages[0]), strict=True):
            each.fill_(value)
    slots = solo.executor.slots
    for _, value in slots._draft.present():
        value[slots.padding] = POISON if value.is_floating_point() else 7
    for kept in slots._missed:
        kept[slots.padding * (MAX_MISSED + 1) :] = POISON if kept.is_floating_point() else 7
    for kv in solo.engine.kvs:
        kv[:, 0] = POISON


class Solo:
    """An engine with its rounds. It never frees the pages of finished sequences, so it needs enough of them."""

    def __init__(self, model: Path, *, num_slots: int = 64, buckets: Sequence[int] = (), **settings: Any) -> None:
        common: dict[str, Any] = {"device": "cpu", "threads": 1, "page_size": 4, "num_pages": 1024}
        self.engine = Engine(DecodeConfig(model=str(model), **(common | settings)))
        assert self.engine.drafter is not None
        self.drafter: Drafter = self.engine.drafter
        self.executor = DeviceExecutor(self.engine, num_slots, buckets)
        self.rounds = Rounds(self.executor)
        self._tails: dict[int, TailPages | None] = {}  # by the first page of a sequence

    def start(self, prompt: Sequence[int], params: SamplingParams, *, chunk: int = 64) -> Running:
        """Compute the prompt, `chunk` tokens at a time, and sample the first token."""
        return self.start_many([prompt], [params], chunk=chunk)[0]

    def start_many(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, chunk: int = 64
    ) -> list[Running]:
        """Start prompts of one length in one batch."""
        vocab_size = self.engine.model_config.vocab_size
        states = [SamplingState(p, ids, vocab_size=vocab_size) for ids, p in zip(prompts, params, strict=True)]
        pages = [self.allocate(len(ids) + p.max_tokens + 16)[0] for ids, p in zip(prompts, params, strict=True)]
        extend, logits = self._compute(prompts, pages, chunk)
        tokens = self._first_tokens(logits, states)
        for state, token in zip(states, tokens, strict=True):
            assert token is not None
            state.append(token)
        started = [
            Running(len(ids), [*ids, token], len(ids), own, state, tail=self._tails[own[0]])
            for ids, token, own, state in zip(prompts, tokens, pages, states, strict=True)
        ]
        draft = self._finish(started, extend)
        for row, sequence in enumerate(started):
            self.rounds.admit(sequence, pack_draft(self.engine.schema, draft.row(row)))
        return started

    def _first_tokens(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int | None]:
        masks, _ = self.engine.grammars.next(states)
        batch = SamplingBatch.of(states, self.engine.device).within(torch.from_numpy(masks).to(self.engine.device))
        return SubmittedSample.of(logits, batch).read([None] * len(states))[0]

    def round(
        self, sequences: Sequence[Running], num_steps: int, limits: Sequence[int] | None = None
    ) -> list[Accepted]:
        """Run one round of all `sequences`, and append its tokens to them."""
        shape = self.rounds.shape.with_steps(num_steps)
        results = self.rounds.run(sequences, shape, limits or [num_steps] * len(sequences))
        return self.take(sequences, results)

    def take(self, sequences: Sequence[Running], results: RoundTokens) -> list[Accepted]:
        """Append the results of a round to its sequences, and return them."""
        taken: list[Accepted] = []
        for sequence, result in zip(sequences, results.rows, strict=True):
            assert result is not None
            taken.append(result)
            for token in result.token_ids:
                sequence.token_ids.append(token)
                sequence.sampling.append(token)
            sequence.num_computed += len(result.token_ids)
            sequence.num_accepted.append(result.num_accepted)
        return taken

    def run(self, sequence: Running, num_tokens: int, num_steps: int) -> list[int]:
        """Run rounds of one sequence until it has generated `num_tokens`, and return these."""
        while len(sequence.generated) < num_tokens:
            self.round([sequence], num_steps)
        return sequence.generated[:num_tokens]

    def from_scratch(self, sequence: Running) -> Running:
        """Return a copy of the sequence with its own pages, computed from scratch in one pass."""
        known = sequence.token_ids[:-1]
        pages, tail = self.allocate(len(known) + 16)
        extend, _ = self._compute([known], [pages], len(known))
        prompt, output = sequence.token_ids[: sequence.prompt_len], sequence.generated
        known_by = sequence.sampling
        sampling = SamplingState(known_by.params, prompt, output, vocab_size=known_by.vocab_size)
        scratch = Running(sequence.prompt_len, list(sequence.token_ids), len(known), pages, sampling, tail=tail)
        self.rounds.admit(scratch, pack_draft(self.engine.schema, self._finish([scratch], extend)))
        return scratch

    def draft(self, sequence: Running) -> DraftState:
        """Return the sequence's draft state, one row."""
        assert sequence.slot is not None
        return self.executor.slots._draft.select(torch.tensor([sequence.slot], device=self.engine.device))

    def draft_kv(self, sequence: Running) -> torch.Tensor | None:
        """Return the drafter's own KV of all tokens with target KV: [num_layers, 2, num_kv_heads, L, head_dim]."""
        pools = self.engine.draft_pools
        return None if pools is None else gather(pools.kv, self._table(pools.kv, sequence), sequence.num_computed)

    def target_kv(self, sequence: Running) -> torch.Tensor:
        return gather(self.engine.kv, sequence.pages, self.num_settled(self.engine.kv, sequence.num_computed))

    def further_rows(self, sequence: Running, *, of_draft: bool = False) -> list[torch.Tensor]:
        """Return what the pools beside that of KV hold of all tokens with target KV."""
        pools = self.engine.draft_pools if of_draft else self.engine.target_pools
        further = () if pools is None else pools.further.values()
        num = sequence.num_computed
        return [gather(pool, self._table(pool, sequence), self.num_settled(pool, num)) for pool in further]

    def _table(self, pool: torch.Tensor, sequence: Running) -> list[int]:
        """Return the pages of a sequence in one of the pools."""
        tail = sequence.tail
        return tail.pages if tail is not None and self.engine.has_tail_pages(pool) else sequence.pages

    def num_settled(self, pool: torch.Tensor, num_tokens: int) -> int:
        """Return the first of `num_tokens` tokens whose slots in a pool are written: of entries, those of whole
        windows."""
        compressed = self.engine.model_config.compressed
        if compressed is None:
            return num_tokens
        by_kind = {INDEX: compressed.sparse_rate, "sparse": compressed.sparse_rate, "heavy": compressed.heavy_rate}
        rates = {ENTRY_POOLS[kind].entries: rate for kind, rate in by_kind.items()}
        pools = {self.engine.model_config.further[0].name: self.engine.kv, **self.engine.target_pools.further}
        rate = next((rates[name] for name in rates if name in pools and pools[name] is pool), 1)
        return num_tokens // rate * rate

    def poison(self, sequence: Running) -> None:
        """Overwrite every slot of the sequence beyond its tokens with KV, in all pools."""
        page_size = self.engine.pool.page_size
        for kv in self.engine.kvs:
            table = self._table(kv, sequence)
            for slot in range(sequence.num_computed, len(sequence.pages) * page_size):
                kv[:, table[slot // page_size], :, :, slot % page_size] = POISON

    def allocate(self, num_tokens: int) -> tuple[list[int], TailPages | None]:
        """Return pages of a sequence, and a tail page for each if the model has any."""
        pages, tail = pages_for(self.engine.pool, num_tokens)
        self._tails[pages[0]] = tail
        return pages, tail

    def _row(self, ids: Sequence[int], start: int, pages: list[int]) -> BatchRow:
        return BatchRow(ids, start, pages, tail=self._tail(pages))

    def _tail(self, pages: list[int]) -> list[int] | None:
        tail = self._tails[pages[0]]
        return None if tail is None else tail.pages

    def _compute(
        self, prompts: Sequence[Sequence[int]], pages: Sequence[list[int]], chunk: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return extend states of all positions [num_prompts, num_tokens, width], and logits of the last ones."""
        num_tokens, extends = len(prompts[0]), []
        for start in range(0, num_tokens, chunk):
            stop = min(start + chunk, num_tokens)
            computed = self.engine.compute(
                [self._row(ids[start:stop], start, own) for ids, own in zip(prompts, pages, strict=True)]
            )
            chunks = [
                PromptChunk(ids, start, stop, own, self._tail(own)) for ids, own in zip(prompts, pages, strict=True)
            ]
            with torch.inference_mode():
                self.drafter.observe_prompt(chunks, computed.extend)
            if computed.extend is not None:
                extends.append(computed.extend.view(len(prompts), stop - start, -1))
        return torch.cat(extends, 1) if extends else None, computed.logits

    def _finish(self, sequences: Sequence[Running], extend: torch.Tensor | None) -> DraftState:
        """Return the draft states of sequences of one length, whose tokens but the last are computed."""
        num_rows = self.drafter.hidden.num_target_rows
        tails, tokens = [], []
        for i, sequence in enumerate(sequences):
            *known, bonus = sequence.token_ids
            rows = None if extend is None else extend[i, :-1][max(0, len(known) - 1 - num_rows) :]
            tails.append(PromptTail(known, sequence.pages, rows, self._tail(sequence.pages)))
            tokens.append(bonus)
        sampling = SamplingBatch.of([sequence.sampling for sequence in sequences], self.engine.device)
        with torch.inference_mode():
            after = torch.tensor(tokens, device=self.engine.device)
            return self.drafter.finish_prompt(tails, after, None if extend is None else extend[:, -1], sampling)


def gather(kv: torch.Tensor, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """Copy [num_layers, 2, num_kv_heads, num_tokens, head_dim] from a pool [num_layers, num_pages, 2, ...]."""
    rows = kv[:, list(pages)].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    return rows[:, :, :, :num_tokens].clone()


class Spied(NamedTuple):
    """One forward of a drafter."""

    tokens: list[int]
    positions: list[int]
    seq_lens: tuple[int, ...]
    is_extend: bool | None  # None: the drafter has no separate extend
    recurrent: torch.Tensor  # [num_tokens, width] what it returned


class SpyLog(list[Spied]):
    """The forwards of a drafter in order, and the logits from which it sampled tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[torch.Tensor] = []  # each [num_rows, vocab_size]

    def clear(self) -> None:
        super().clear()
        self.logits.clear()


class _Spy:
    """Wraps a head or a draft model and records every forward."""

    def __init__(self, inner: Any, log: SpyLog) -> None:
        self._inner, self._log = inner, log

    def forward(self, batch: ForwardBatch, *rest: Any, **options: Any) -> Any:
        tokens, positions = batch.input_ids.tolist(), batch.positions.tolist()
        result = self._inner.forward(batch, *rest, **options)
        recurrent = result
        if hasattr(result, "recurrent"):
            recurrent = result.recurrent
            self._log.logits.append(result.logits)
        lens = tuple(batch.seq_lens.tolist())
        self._log.append(Spied(tokens, positions, lens, options.get("is_extend"), recurrent.clone()))
        return result

    def logits(self, rows: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        result, logit_ids = self._inner.logits(rows, lens), getattr(self._inner, "logit_ids", None)
        self._log.logits.append(over_all_tokens(result, logit_ids, self._inner.config.vocab_size))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def spied(drafter: Any) -> Iterator[SpyLog]:
    """Record the forwards of a drafter."""
    log = SpyLog()
    name = "_model" if hasattr(drafter, "_model") else "_head"
    inner = getattr(drafter, name)
    setattr(drafter, name, _Spy(inner, log))
    try:
        yield log
    finally:
        setattr(drafter, name, inner)


def plain_texts(
    model: Path, prompts: Sequence[Sequence[int]], asked: Callable[[int], SamplingParams], num_tokens: int
) -> dict[int, list[int]]:
    """Return each prompt with the tokens after it, by its index, computed side by side without drafts."""
    solo = Solo(model, speculative="ngram")
    sequences = [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts)]
    for _ in range(num_tokens - 1):
        solo.round(sequences, 0)
    return {index: sequence.token_ids for index, sequence in enumerate(sequences)}


def coach(monkeypatch: Any, truths: dict[int, list[int]], is_told: Callable[[int, int], bool]) -> None:
    """Make drafters propose the right token if `is_told(seed, position)`. Random drafters are almost never right.

    `truths`: by seed, the whole sequence. If a drafter is not told, its own choice stands."""
    original = trees.sample_ahead

    def sample_ahead(logits: torch.Tensor, base: SamplingBatch, drafted: torch.Tensor) -> torch.Tensor:
        tokens = original(logits, base, drafted).clone()
        for row, (seed, start) in enumerate(zip(base.seeds.tolist(), base.positions.tolist(), strict=True)):
            position, truth = start + drafted.shape[1], truths.get(seed, [])
            if position < len(truth) and is_told(seed, position):
                tokens[row] = truth[position]
        return tokens

    for module in _MODULES:
        monkeypatch.setattr(module, "sample_ahead", sample_ahead)
    _know_positions(monkeypatch)


def _know_positions(monkeypatch: Any) -> None:
    """Advance positions in `ahead` also if all rows are plainly greedy. It skips them then, as they are not read."""
    original, position = SamplingBatch.ahead, INTS.index("position")

    def ahead(self: SamplingBatch, num_ahead: torch.Tensor, *rest: Any) -> SamplingBatch:
        if not self.needs.is_plain_greedy:
            return original(self, num_ahead, *rest)
        ints = self.ints.unsqueeze(2).repeat(1, 1, num_ahead.shape[1])
        ints[position] += num_ahead
        return dataclasses.replace(self, ints=ints.flatten(1))

    monkeypatch.setattr(SamplingBatch, "ahead", ahead)


def frozen_fields(sequence: Running) -> dict[str, Any]:
    """Return a copy of all fields that a round must not change (all except the draft state)."""
    fields = {each.name: getattr(sequence, each.name) for each in dataclasses.fields(sequence)}
    copied = {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
    del copied["sampling"]
    return copied | {"position": sequence.sampling.position, "seed": sequence.sampling.seed}


@contextmanager
def caught() -> Iterator[None]:
    """Check that an assertion of the test itself fails in the block, and not something else."""
    with pytest.raises(AssertionError) as raised:
        yield
    assert "/tests/" in str(raised.traceback[-1].path), raised.traceback[-1]

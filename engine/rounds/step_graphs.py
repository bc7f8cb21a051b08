"""Captures rounds as three CUDA graphs, one for each step. Most rounds are one graph. These cannot be:

- Rounds that share their forward with a chunk of prompts, so that the weights are read once.
- Rounds with a grammar. After the drafter has proposed tokens, the host computes which of them the grammar allows
  (sampling/grammar.py).

The three graphs (round.py):

    propose   for a bucket, a draft shape and a kind of sampling
    verify    for a bucket, a draft shape and a number of prompt tokens, which may be 0
    settle    for a bucket, a draft shape and a kind of sampling

All graphs share the memory for what lies between their kernels, so a result in it lasts until the next replay. What one
step leaves for the next therefore lies in tensors of its own (`_Seam`).

mixed_sizes.py says which buckets, draft shapes and numbers of tokens there are with chunks, of which two kinds of
sampling serve all, and a third those with a grammar. Rounds with a grammar and without a chunk have all buckets, and
draft nothing or the most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..drafters.base import Drafter, RoundRows
from ..engine import Engine
from ..pace.draft_length import DraftShape
from ..pace.mixed_sizes import MixedSize, fitting
from ..progress import Progress, tracked
from ..prompts.graphs import PromptInputs
from ..prompts.sizes import bucket
from ..sampling.state import EVERYTHING, GREEDY, MASKED, SAMPLED, Needs, covering
from ..work import BatchRow, Round
from .capture import captured
from .inputs import InputBlock
from .round import Proposed, RoundResult, Verified, no_drafts, propose, read, settle, verify
from .slots import Slots
from .trees import Drafts

logger = logging.getLogger(__name__)

_KINDS = (SAMPLED, EVERYTHING)


@dataclass(frozen=True, slots=True, eq=False)
class _Seam:
    """The tensors that one step of a round, or the host, writes and the next step reads. One round runs at a time."""

    tokens: Tensor  # [num_seqs, N] int64, of the largest bucket and drafts
    parents: Tensor  # [num_seqs, N] int64, if the drafts are trees
    final: Tensor  # [num_rows, hidden_size] after the final norm
    extend: Tensor | None  # [num_rows, width] for the drafter; None: it takes none
    beside: Tensor | None  # [num_tokens, width] likewise, of the chunk
    allowed: Tensor  # [num_rows, num_words] int32, the tokens that grammars allow

    @classmethod
    def allocate(cls, engine: Engine, sizes: Sequence[MixedSize]) -> _Seam:
        """Return the tensors for all of `sizes`."""
        device, hidden = engine.device, engine.speculation.hidden
        num_rows, num_tokens = max(size.num_round_rows for size in sizes), max(size.num_tokens for size in sizes)
        num_seqs, num_drafts = max(size.num_seqs for size in sizes), max(size.shape.num_drafts for size in sizes)
        tokens = torch.zeros(num_seqs, num_drafts, dtype=torch.int64, device=device)
        final = torch.zeros(num_rows, engine.model_config.hidden_size, dtype=engine.model.dtype, device=device)
        extend, beside = (hidden.allocate("extend", num, device) for num in (num_rows, num_tokens))
        allowed = torch.full((num_rows, engine.grammars.num_words), -1, dtype=torch.int32, device=device)
        return cls(tokens, torch.zeros_like(tokens), final, extend, beside, allowed)

    def put_drafts(self, drafts: Drafts) -> None:
        num_seqs, num_drafts = drafts.tokens.shape
        self.tokens[:num_seqs, :num_drafts].copy_(drafts.tokens)
        if drafts.parents is not None:
            self.parents[:num_seqs, :num_drafts].copy_(drafts.parents)

    def proposed(self, rows: RoundRows, shape: DraftShape) -> Proposed:
        """Return the round of `rows` with the drafts that were put here."""
        if not shape.num_steps:
            return Proposed(rows, no_drafts(rows), None)
        return Proposed.of(rows, self.drafts(len(rows.lengths), shape), shape)

    def drafts(self, num_seqs: int, shape: DraftShape) -> Drafts:
        """Return the drafts that were put here."""
        tokens, parents = (each[:num_seqs, : shape.num_drafts] for each in (self.tokens, self.parents))
        return Drafts(tokens, None if shape.is_chain else parents)

    def put_verified(self, verified: Verified) -> None:
        pairs = zip((self.final, self.extend, self.beside), verified, strict=True)
        for kept, new in pairs:
            assert kept is not None or new is None, (kept, new)
            if kept is not None and new is not None:
                kept[: len(new)].copy_(new)

    def verified(self, num_rows: int) -> Verified:
        """Return the states of the round, of `num_rows` rows, that were put here."""
        return Verified(self.final[:num_rows], None if self.extend is None else self.extend[:num_rows], None)


class _Key(NamedTuple):
    step: Literal["propose", "verify", "settle"]
    num_seqs: int
    shape: DraftShape
    of: Needs | int  # the kind of sampling, or the tokens of the chunk


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: RoundResult | None  # of a settle: static tensors that every replay writes


class StepGraphs:
    """Owns the graphs, their inputs of chunks on the device, and what lies between the steps of a round. One round at a
    time: `propose`, `verify`, `settle`."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        slots: Slots,
        blocks: Sequence[InputBlock],
        sizes: Sequence[MixedSize],
        pool: Any,
    ) -> None:
        """`blocks`: inputs of rounds on the device, one for each bucket, which other graphs may use, too. `sizes`: from
        `mixed_sizes` and `sizes_alone`. `pool` (`torch.cuda.graph_pool_handle`) is the memory of all graphs that share
        it."""
        self.sizes = [size for size in sizes if size.num_tokens]
        self._alone = [size for size in sizes if not size.num_tokens]
        self._engine, self._drafter, self._slots, self._pool = engine, drafter, slots, pool
        self._blocks = {block.num_seqs: block for block in blocks}
        self._page_size = engine.pool.page_size
        self._num_columns = -(-engine.context_len // self._page_size)
        self._has_tails = engine.tail_window > 0
        self._seam = _Seam.allocate(engine, sizes)
        self._prompts = {
            num: PromptInputs.allocate(num, self._num_columns, engine.device, has_tails=self._has_tails)
            for num in {each.num_tokens for each in self.sizes}
        }
        self._captured: dict[_Key, _Captured] = {}

    def capture(self, progress: Progress | None = None) -> None:
        """Capture all graphs, forwards first and large ones first, so that the others fit in their memory. `progress`
        counts graphs. Raises torch.OutOfMemoryError."""
        torch.cuda.empty_cache()  # as each capture does, so that the difference is the graphs'
        started, before = time.monotonic(), torch.cuda.memory_reserved()
        for num, inputs in self._prompts.items():
            sizes = self._page_size, num, self._num_columns
            inputs.block.copy_(PromptInputs.of((), *sizes, has_tails=self._has_tails).block)
        for key in tracked(self._keys(), progress):
            block = self._blocks[key.num_seqs]
            block.fill_with_padding(self._slots.padding)
            self._captured[key] = _Captured(*captured(self._step(key, block), self._pool))
        logger.info(
            "%d graphs of rounds with chunks or grammars captured in %.1f s, %d MiB",
            len(self._captured),
            time.monotonic() - started,
            (torch.cuda.memory_reserved() - before) >> 20,
        )

    def fitting(self, work: Round, rows: Sequence[BatchRow]) -> MixedSize | None:
        """Return the size whose graphs compute a round and `rows` together. None: none does, or it would not pay."""
        num_tokens = sum(len(row.input_ids) for row in rows)
        if bucket(rows, [num_tokens], self._num_columns * self._page_size) is None:
            return None
        return fitting(self.sizes, len(work.slots), work.shape, num_tokens, len(rows))

    def alone(self, num_seqs: int, shape: DraftShape) -> MixedSize:
        """Return the size of a round of a bucket that has no chunk: one of `sizes_alone`."""
        size = MixedSize(num_seqs, shape, 0)
        assert size in self._alone, (size, self._alone)
        return size

    def propose(self, size: MixedSize, inputs: InputBlock, needs: Needs) -> Drafts:
        """Submit the first step of a round. Return its drafts, which stay until the next round.

        `inputs` have the bucket's size and hold a round of `size.shape`. They lie in host memory that stays as it is
        until the device has read it."""
        self._blocks[size.num_seqs].copy_(inputs)
        if size.shape.num_steps:
            kind = _kind(needs.of_drafts) if size.num_tokens else EVERYTHING
            self._replay(_Key("propose", size.num_seqs, size.shape, kind))
        return self._seam.drafts(size.num_seqs, size.shape)

    def verify(self, size: MixedSize, rows: Sequence[BatchRow] = ()) -> Tensor | None:
        """Submit the forward of the round, which computes `rows`, too. Return the extend states of `rows` [num_tokens,
        width], valid until the next call; None: the drafter takes none, or there is no row."""
        if size.num_tokens:
            sizes, is_pinned = (self._page_size, size.num_tokens, self._num_columns), self._engine.kind.is_apart
            chunk = PromptInputs.of(rows, *sizes, pinned=is_pinned, has_tails=self._has_tails)
            self._prompts[size.num_tokens].block.copy_(chunk.block, non_blocking=True)
        self._replay(_Key("verify", size.num_seqs, size.shape, size.num_tokens))
        beside = self._seam.beside
        return None if beside is None or not rows else beside[: sum(len(row.input_ids) for row in rows)]

    def settle(self, size: MixedSize, needs: Needs, allowed: Tensor | None = None) -> RoundResult:
        """Submit the rest of the round. `allowed` is as for `round.settle`, but in pinned memory, and there if `needs`
        has a grammar. The result is static: read it before the next call."""
        assert (allowed is not None) == needs.masks, needs
        if allowed is not None:
            self._seam.allowed[: len(allowed)].copy_(allowed, non_blocking=True)
        result = self._replay(_Key("settle", size.num_seqs, size.shape, _kind(needs)))
        assert result is not None
        return result

    def _keys(self) -> list[_Key]:
        sizes = sorted([*self.sizes, *self._alone], key=lambda size: size.num_rows, reverse=True)
        mixed = dict.fromkeys((size.num_seqs, size.shape) for size in sizes if size.num_tokens)
        every = dict.fromkeys((size.num_seqs, size.shape) for size in sizes)
        keys = [_Key("verify", *size) for size in sizes]
        for each in every:
            kinds = _KINDS if each in mixed else ()
            if each[1].num_steps:
                keys += [_Key("propose", *each, kind) for kind in kinds or (EVERYTHING,)]
            keys += [_Key("settle", *each, kind) for kind in (*kinds, MASKED)]
        return keys

    def _replay(self, key: _Key) -> RoundResult | None:
        found = self._captured[key]
        found.graph.replay()
        return found.result

    def _step(self, key: _Key, block: InputBlock) -> Callable[[], RoundResult | None]:
        """Return what the graph of `key` runs."""
        inputs, shape, seam = block.for_round, key.shape, self._seam
        if isinstance(key.of, int):
            chunk = self._prompts[key.of] if key.of else None

            def run_forward() -> None:
                tables = inputs.block_table, inputs.tail_table
                rows = self._slots.read(inputs.slots, tables[0], GREEDY, with_draft=False, tail_table=tables[1])
                beside = None if chunk is None else chunk.batch(self._page_size)
                seam.put_verified(verify(self._engine, seam.proposed(rows, shape), beside))

            return run_forward
        kind = key.of

        def run_propose() -> None:
            seam.put_drafts(propose(self._drafter, self._slots, inputs, shape, kind).drafts)

        def run_settle() -> RoundResult:
            rows = read(self._drafter, self._slots, inputs, shape, kind)
            num_rows = key.num_seqs * (shape.num_drafts + 1)
            proposed, verified = seam.proposed(rows, shape), seam.verified(num_rows)
            allowed = seam.allowed[:num_rows] if kind.masks else None
            return settle(self._engine, self._drafter, self._slots, inputs, proposed, verified, shape, kind, allowed)

        return run_propose if key.step == "propose" else run_settle


def _kind(needs: Needs) -> Needs:
    """Return the kind of sampling whose graphs do all that `needs` asks for."""
    if needs.masks:
        return MASKED
    return SAMPLED if covering(needs) in (GREEDY, SAMPLED) else EVERYTHING

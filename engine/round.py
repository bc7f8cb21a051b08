"""One round of decoding: propose, verify, accept, observe (positions: drafters/base.py).

The output is the target's own whatever the drafter proposes: every emitted token is the one that the target samples at
its position, with that position's noise, given the tokens before it. A drafter decides only how many come at once;
without one, or without drafts, a round brings one token.

`run_round` is one function over the static tensors of a bucket and the slots (slots.py); no value is read on the host
before its result is. Above the largest bucket the same function runs over tensors of the batch's own size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels import gpu
from ..kernels.attention import Tree
from ..metadata.request import SamplingParams, TokenLogprobs
from .batch import BatchRow, ForwardBatch
from .drafters.base import Drafter, DraftState, PromptChunk, PromptTail, RoundRows
from .drafters.ngram import NgramDrafter
from .engine import Engine
from .graphs import GREEDY, SAMPLED, RoundGraphs
from .logprobs import Logprobs, compute_logprobs
from .round_inputs import RoundInputs
from .sampling import sample
from .sampling_batch import SamplingBatch
from .sampling_state import Needs, SamplingState
from .slots import MAX_MISSED, Slots
from .trees import Ancestry, Drafts, DraftShape, Path, accept_chain, accept_tree, ancestry

_MEASURED = SamplingParams(max_tokens=1, temperature=0.0)


class RoundResult(NamedTuple):
    """What a round brought, still on the device."""

    tokens: Tensor  # [num_seqs, K + 1] int64: t_0 .. t_a and what does not count
    num_accepted: Tensor  # [num_seqs] int64, a
    num_valid: Tensor  # [num_seqs] int64, tokens before the first one whose logits are no numbers
    logprobs: Logprobs | None  # of num_seqs * (K + 1) rows; None: nobody asks


class Accepted(NamedTuple):
    """What a round brought one sequence."""

    token_ids: list[int]  # t_0 .. t_a, at least one; fewer where the target's logits are no numbers
    logprobs: list[TokenLogprobs | None]
    num_accepted: int  # a: drafts that equal the target's tokens
    num_drafted: int  # at most K: those that it would have taken


@dataclass(slots=True)
class RoundStats:
    """Counts since the start."""

    accepted_at: list[int]  # by draft position: how often that draft was accepted
    num_verified: int = 0  # sequences verified, once a round each
    num_drafted: int = 0
    num_accepted: int = 0

    def count(self, accepted: Accepted) -> None:
        """One sequence's round."""
        self.num_verified += 1
        self.num_drafted += accepted.num_drafted
        self.num_accepted += accepted.num_accepted
        for at in range(accepted.num_accepted):
            self.accepted_at[at] += 1


class Running(Protocol):
    """What rounds need of a sequence."""

    slot: int | None
    token_ids: list[int]  # the last one is the bonus token
    pages: list[int]
    sampling: SamplingState  # its history is the slot's
    num_missed: int  # rows since the drafter last saw one; beyond MAX_MISSED it never will again

    @property
    def salt(self) -> str:
        """Requests of one salt may learn from each other."""
        ...


@dataclass(slots=True)
class _Padding:
    """A `Running` that is nobody."""

    slot: int | None
    token_ids: list[int]
    pages: list[int]
    sampling: SamplingState
    num_missed: int = 0
    salt: str = ""


def run_round(
    engine: Engine, drafter: Drafter | None, slots: Slots, inputs: RoundInputs, shape: DraftShape, needs: Needs
) -> RoundResult:
    """Stores the KV of all verified tokens and advances the slots. With `shape.num_steps` 0 nothing is drafted."""
    rows = slots.read(inputs.slots, inputs.block_table, needs, inputs.proposed)
    drafts, tree = Drafts(rows.lengths.new_empty(len(rows.lengths), 0)), None
    if drafter is not None and shape.num_steps:
        drafts = drafter.propose(rows, shape)
    if drafts.parents is not None:
        tree = ancestry(drafts.parents, shape.num_steps)
    hidden, logits = _verify(engine, rows, drafts, tree)
    sampled = sample(logits, _node_sampling(rows, drafts, tree), with_logprobs=False)
    targets = sampled.token_ids.view(len(rows.lengths), -1)
    is_valid = sampled.is_valid.view(targets.shape)
    if tree is None:
        path = accept_chain(drafts.tokens, targets, inputs.limits)
    else:
        path = accept_tree(drafts, targets, inputs.limits, shape.num_steps)
        targets, is_valid, hidden, logits = _along(path, targets, is_valid, hidden, logits)
        engine.move_kv(inputs.block_table, *_moves(rows, path))
    draft = _observe(drafter, slots, inputs, rows, hidden, targets, path.num_accepted, shape)
    slots.advance(inputs.slots, targets, path.num_accepted, draft, needs)
    logprobs = None
    if needs.num_logprobs is not None:
        logprobs = compute_logprobs(logits, targets.flatten(), needs.num_logprobs)
    return RoundResult(targets, path.num_accepted, is_valid.long().cumprod(1).sum(1), logprobs)


def _verify(engine: Engine, rows: RoundRows, drafts: Drafts, tree: Ancestry | None) -> tuple[Tensor | None, Tensor]:
    """The target's extend state [num_seqs, N + 1, width] (None where nobody wants it) and its logits
    [num_seqs * (N + 1), vocab_size] at the bonus token and the drafts."""
    input_ids = torch.cat([rows.last_tokens.unsqueeze(1), drafts.tokens], dim=1)
    num_nodes = input_ids.shape[1]
    if tree is None:
        depths, visible = torch.arange(num_nodes, device=input_ids.device), None
    else:
        depths, visible = tree.depths, Tree(rows.lengths, tree.visible.flatten(0, 1))
    positions = rows.lengths.unsqueeze(1) + depths
    batch = ForwardBatch.uniform(
        input_ids, positions, rows.lengths + num_nodes, rows.block_table, engine.pool.page_size, visible
    )
    extend, final = engine.states(batch)
    return None if extend is None else extend.view(*input_ids.shape, -1), engine.model.logits(final)


def _node_sampling(rows: RoundRows, drafts: Drafts, tree: Ancestry | None) -> SamplingBatch:
    """Each node's own: its position, and the drafts up to it in its history."""
    num_nodes, device = drafts.tokens.shape[1] + 1, drafts.tokens.device
    if num_nodes == 1:
        return rows.sampling
    if tree is not None:
        return rows.sampling.ahead(tree.depths, drafts.tokens, tree.visible[:, :, 1:])
    step = torch.arange(num_nodes, device=device).unsqueeze(0)
    return rows.sampling.ahead(step, drafts.tokens, step[:, :-1].unsqueeze(1) < step.unsqueeze(2))


def _along(
    path: Path, targets: Tensor, is_valid: Tensor, hidden: Tensor | None, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What the nodes have, [num_seqs, N + 1, ...], of those on the path: [num_seqs, K + 1, ...]."""
    assert path.nodes is not None
    num_seqs, num_nodes = targets.shape
    first = torch.arange(0, num_seqs * num_nodes, num_nodes, device=targets.device).unsqueeze(1)
    index = (first + path.nodes).flatten()
    if hidden is not None:
        hidden = hidden.flatten(0, 1).index_select(0, index).view(*path.nodes.shape, -1)
    along = targets.gather(1, path.nodes), is_valid.gather(1, path.nodes)
    return *along, hidden, logits.index_select(0, index)


def _moves(rows: RoundRows, path: Path) -> tuple[Tensor, Tensor]:
    """Slots from which and to which the accepted nodes' KV goes, each [num_seqs, K]; others stay."""
    assert path.nodes is not None
    step = torch.arange(1, path.nodes.shape[1], device=path.nodes.device)
    nodes = torch.where(step <= path.num_accepted.unsqueeze(1), path.nodes[:, 1:], step)
    return rows.lengths.unsqueeze(1) + nodes, rows.lengths.unsqueeze(1) + step


def _observe(
    drafter: Drafter | None,
    slots: Slots,
    inputs: RoundInputs,
    rows: RoundRows,
    hidden: Tensor | None,
    targets: Tensor,
    num_accepted: Tensor,
    shape: DraftShape,
) -> DraftState | None:
    """The drafter's state for the next round. A round without drafts runs no draft extend: it keeps the row."""
    if drafter is None:
        return None
    if shape.num_steps or not drafter.has_kv:
        return drafter.observe(rows, hidden, targets, num_accepted)
    if hidden is not None:
        slots.keep_missed(inputs.slots, inputs.num_missed, hidden[:, 0])
    return None


class Rounds:
    """Runs rounds of one engine, with its drafter where it has one. One thread."""

    def __init__(self, engine: Engine, num_slots: int, buckets: Sequence[int] = ()) -> None:
        """At most `num_slots` sequences run. `buckets`: batch sizes whose inputs are static."""
        self.engine = engine
        self.drafter = engine.drafter
        self.shape = DraftShape(0) if self.drafter is None else self.drafter.shape
        self.slots = Slots(num_slots, engine.model_config.vocab_size, self.drafter, engine.device)
        self.stats = RoundStats([0] * self.shape.num_steps)
        num_tokens = engine.context_len + 2 * self.shape.num_slots + engine.speculation.hidden.num_target_rows
        self._num_columns = -(-num_tokens // engine.pool.page_size) + 1
        self._buckets = {size: self._allocate(size, is_static=True) for size in sorted(buckets)}
        self._graphs: RoundGraphs[RoundResult] | None = None

    def capture(self) -> None:
        """On CUDA: graphs of all buckets for requests without filters and penalties; others are captured when they
        come."""
        if not gpu.compiled(self.engine.kv):
            return
        inputs = [self._allocate(size, self.engine.device) for size in self._buckets]
        shapes = [self.shape.with_steps(steps) for steps in self.shape.choices]
        with torch.inference_mode():
            self._graphs = RoundGraphs(self._run_captured, inputs, self.slots.padding)
            self._graphs.capture(shapes, (GREEDY, SAMPLED))

    def admit(self, sequence: Running, length: int, draft: DraftState | None) -> None:
        """Give a sequence a slot: `length` tokens have KV, one more is known."""
        sequence.slot = self.slots.take()
        self.slots.load(sequence.slot, length, sequence.token_ids[-1], sequence.sampling, draft)
        sequence.sampling.forget_history()

    def release(self, sequence: Running) -> None:
        """The sequence is over, if it ever ran."""
        if sequence.slot is not None:
            if isinstance(self.drafter, NgramDrafter):
                self.drafter.forget(sequence.slot, sequence.token_ids, sequence.salt)
            self.slots.give_back(sequence.slot)
            sequence.slot = None

    def run(self, sequences: Sequence[Running], shape: DraftShape, limits: Sequence[int]) -> list[Accepted]:
        """Drafts of `shape` for all, of which the i-th sequence takes at most limits[i]. Pages must cover its tokens,
        and `shape.num_slots` more where its limit is not 0 (in a chain: limit + 1 more).

        The caller appends the tokens, of which the last has no KV yet. No sequences: nothing runs."""
        if not sequences:
            return []
        with torch.inference_mode():
            if shape.num_steps:
                limits = self._catch_up(sequences, limits)
            needs = Needs.any_of(sequence.sampling.needs for sequence in sequences)
            result = self._run(self._fill(sequences, limits, shape), shape, needs)
            accepted = self._read(sequences, result, limits)
        for sequence, each in zip(sequences, accepted, strict=True):
            if each.num_drafted:
                self.stats.count(each)
            is_missed = shape.num_steps == 0 or sequence.num_missed > MAX_MISSED
            if is_missed and self.drafter is not None and self.drafter.has_kv:
                sequence.num_missed += 1 + each.num_accepted
        return accepted

    def measure(self, num_seqs: int, num_steps: int) -> float:
        """Seconds of a round of `num_seqs` sequences that are padding, the host's part included."""
        sampling = SamplingState(_MEASURED, [0, 0], vocab_size=self.engine.model_config.vocab_size)
        sequence = _Padding(self.slots.padding, [0, 0], [], sampling)
        started = time.monotonic()
        self.run([sequence] * num_seqs, self.shape.with_steps(num_steps), [0] * num_seqs)
        return time.monotonic() - started

    def recompute(self, sequences: Sequence[Running], rows: Sequence[BatchRow], hidden: Tensor | None) -> None:
        """After a preemption: tokens of `sequences` were computed again, as `rows` say, with these extend states
        [num_tokens, width]. Only KV is made anew: the slot has kept the state, which is of the same tokens, and draft
        KV that depends on tokens not known yet is stored anew by the next `observe`."""
        if self.drafter is None:
            return
        chunks = [
            PromptChunk(each.token_ids, row.position, row.position + len(row.input_ids), each.pages)
            for each, row in zip(sequences, rows, strict=True)
        ]
        with torch.inference_mode():
            self.drafter.observe_prompt(chunks, hidden)

    def _run(self, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> RoundResult:
        """By a graph, where the inputs are a bucket's and there are graphs."""
        if self._graphs is not None and len(inputs.slots) in self._buckets:
            return self._graphs.replay(inputs, shape, needs)
        return run_round(self.engine, self.drafter, self.slots, inputs.to(self.engine.device), shape, needs)

    def _run_captured(self, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> RoundResult:
        if needs.processes:
            self.slots.allocate_all()
        return run_round(self.engine, self.drafter, self.slots, inputs, shape, needs)

    def _allocate(self, num_seqs: int, device: torch.device | str = "cpu", *, is_static: bool = False) -> RoundInputs:
        pinned = is_static and self.engine.device.type == "cuda" and device == "cpu"
        max_steps = max(1, self.shape.num_steps)
        return RoundInputs.allocate(num_seqs, self._num_columns, max_steps, device, pinned=pinned)

    def _fill(self, sequences: Sequence[Running], limits: Sequence[int], shape: DraftShape) -> RoundInputs:
        """The smallest bucket that holds the batch, or inputs of its own size, filled; all beyond it is padding."""
        num_seqs = len(sequences)
        size = next((each for each in self._buckets if each >= num_seqs), num_seqs)
        inputs = self._buckets.get(size) or self._allocate(size)
        slots, columns, missed, table = (each.numpy() for each in inputs[1:5])
        slots[:num_seqs] = [_slot(sequence) for sequence in sequences]
        columns[:num_seqs] = limits
        missed[:num_seqs] = [sequence.num_missed for sequence in sequences]
        for row, sequence in enumerate(sequences):
            num_pages = len(sequence.pages)
            table[row, :num_pages] = sequence.pages
            table[row, num_pages:] = 0
        slots[num_seqs:], columns[num_seqs:], missed[num_seqs:], table[num_seqs:] = self.slots.padding, 0, 0, 0
        if isinstance(self.drafter, NgramDrafter) and shape.num_steps:
            found = [
                self.drafter.lookup(_slot(sequence), sequence.token_ids, sequence.salt, shape.num_steps)
                for sequence in sequences
            ]
            inputs.proposed[:num_seqs, : shape.num_steps] = torch.tensor(found, dtype=torch.int64)
        return inputs

    def _read(self, sequences: Sequence[Running], result: RoundResult, limits: Sequence[int]) -> list[Accepted]:
        """The one place where the host waits for a round."""
        num_rows = result.tokens.shape[1]
        counts = torch.stack([result.num_accepted, result.num_valid], dim=1)
        host = torch.cat([counts, result.tokens], dim=1)[: len(sequences)].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * (len(sequences) * num_rows)
        if result.logprobs is not None:
            asked = [sequence.sampling.params.num_logprobs for sequence in sequences for _ in range(num_rows)]
            kept = Logprobs(*(each[: len(asked)] for each in result.logprobs))
            logprobs = kept.to_rows(asked)
        accepted: list[Accepted] = []
        for row, (num_accepted, num_valid, *tokens) in enumerate(host):
            count, start = min(num_accepted + 1, num_valid), row * num_rows
            num_drafted = min(limits[row], num_rows - 1)
            accepted.append(Accepted(tokens[:count], logprobs[start : start + count], num_accepted, num_drafted))
        return accepted

    def _catch_up(self, sequences: Sequence[Running], limits: Sequence[int]) -> list[int]:
        """Run the drafter over the rows that rounds without drafts left out; a sequence that lacks too many, or wants
        no drafts, is left behind for good. Returns the limits that hold then."""
        late = [sequence for sequence in sequences if 0 < sequence.num_missed <= MAX_MISSED]
        for sequence in late:
            if sequence.sampling.params.draft_steps == 0:
                sequence.num_missed = MAX_MISSED + 1
        late = [sequence for sequence in late if sequence.num_missed <= MAX_MISSED]
        if late and self.drafter is not None:
            self._observe_missed(self.drafter, late)
        return [
            0 if sequence.num_missed > MAX_MISSED else limit for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def _observe_missed(self, drafter: Drafter, late: Sequence[Running]) -> None:
        """As prompts whose first rows are computed: those since the last `observe`, and those that its proposals stood
        in for."""
        chunks: list[PromptChunk] = []
        tails: list[PromptTail] = []
        device = self.engine.device
        hidden: list[Tensor] = []
        last: list[Tensor] = []
        for sequence in late:
            *known, bonus = sequence.token_ids
            states = self.slots.missed(_slot(sequence), sequence.num_missed)
            before = self.slots.draft(_slot(sequence)).rows
            num_before = 0
            if states is not None and before is not None:
                num_before = min(before.shape[1], len(known) - sequence.num_missed)
                states = torch.cat([before[0, before.shape[1] - num_before :], states])
            chunks.append(PromptChunk(known, len(known) - sequence.num_missed - num_before, len(known), sequence.pages))
            if states is not None:
                hidden.append(states)
                last.append(states[-1:])
            tails.append(PromptTail(known, bonus, sequence.pages, None if states is None else states[:-1]))
            sequence.num_missed = 0
        drafter.observe_prompt(chunks, torch.cat(hidden) if hidden else None)
        index = torch.tensor([_slot(sequence) for sequence in late], device=device)
        needs = Needs.any_of(sequence.sampling.needs for sequence in late)
        sampling = self.slots.read(index, index.new_zeros(len(late), 0), needs).sampling
        draft = drafter.finish_prompt(tails, torch.cat(last) if last else None, sampling)
        for row, sequence in enumerate(late):
            if draft.present():
                self.slots.load_draft(_slot(sequence), draft.row(row))


def _slot(sequence: Running) -> int:
    assert sequence.slot is not None, "the sequence was not admitted"
    return sequence.slot

"""One round of decoding: propose, verify, accept, observe (positions: drafters/base.py).

Every token of a round is the one that the target samples at its position, given the tokens before it. The drafter
decides only how many tokens a round yields: one without drafts, up to K + 1 with K accepted drafts.

`run_round` is one function over the static inputs of a bucket and the slots (slots.py). The host reads no tensor before
the result, so a CUDA graph can hold the whole round. Batches above the largest bucket run the same function over
tensors of their own size. `catch_up` is a second such function: it runs the drafter over rows that rounds without
drafts left out.

A round has three steps, and each can be a graph of its own (step_graphs.py):

    propose   reads the slots; the drafter drafts
    verify    the target's forward, which a chunk of prompts may share, so that the weights are read once
    settle    sample, accept, observe; writes the slots

If a sequence has a grammar, the host learns the drafts after the first step, and says before the last one which tokens
each node may have (sampling/grammar.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.attention.attention import Tree
from ...kernels.state.rows import gather_rows
from ...kernels.state.tree_types import Ancestry
from ...kernels.state.trees import ancestry
from ..device import counted
from ..drafters.base import Drafter, DraftState, MissedRows, RoundRows
from ..engine import Engine
from ..pace.draft_length import DraftShape
from ..sampling.batch import SamplingBatch
from ..sampling.logprobs import Logprobs, compute_logprobs
from ..sampling.sampling import sample
from ..sampling.state import Needs
from .batch import ForwardBatch, MixedBatch
from .inputs import CatchUpInputs, RoundInputs
from .slots import Slots
from .trees import Drafts, Path, accept_chain, accept_tree


class RoundResult(NamedTuple):
    """Result of a round, still on the device."""

    numbers: Tensor  # [num_seqs, K + 3] int64: a, number of tokens before one whose logits are NaN, t_0 .. t_a, waste
    logprobs: Logprobs | None  # of num_seqs * (K + 1) rows; None: no row asks for them


class Proposed(NamedTuple):
    """A round before its forward."""

    rows: RoundRows
    drafts: Drafts
    tree: Ancestry | None  # of the drafts; None: they are a chain

    @classmethod
    def of(cls, rows: RoundRows, drafts: Drafts, shape: DraftShape) -> Proposed:
        """Return a round of these sequences with these drafts."""
        return cls(rows, drafts, None if drafts.parents is None else ancestry(drafts.parents, shape.num_steps))

    @property
    def num_nodes(self) -> int:
        """Tokens of each sequence that the target runs: the bonus token and the drafts."""
        return self.drafts.tokens.shape[1] + 1


class Verified(NamedTuple):
    """Result of a round's forward, before anything is sampled."""

    final: Tensor  # [num_seqs * (N + 1), hidden_size] after the final norm
    extend: Tensor | None  # [num_seqs * (N + 1), width] for the drafter; None: it takes none
    beside: (
        Tensor | None
    )  # [num_tokens, width], extend states of the chunk beside the round; None: likewise, or no chunk


def run_round(
    engine: Engine, drafter: Drafter | None, slots: Slots, inputs: RoundInputs, shape: DraftShape, needs: Needs
) -> RoundResult:
    """Store the KV of all verified tokens and advance the slots. With `shape.num_steps` 0 nothing is drafted."""
    proposed = propose(drafter, slots, inputs, shape, needs)
    return settle(engine, drafter, slots, inputs, proposed, verify(engine, proposed), shape, needs)


def propose(drafter: Drafter | None, slots: Slots, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> Proposed:
    """Read the slots and draft. The slots keep their state."""
    rows = read(drafter, slots, inputs, shape, needs)
    if drafter is not None and shape.num_steps:
        return Proposed.of(rows, drafter.propose(rows, shape), shape)
    return Proposed(rows, no_drafts(rows), None)


def read(drafter: Drafter | None, slots: Slots, inputs: RoundInputs, shape: DraftShape, needs: Needs) -> RoundRows:
    """Return the sequences of a round as it begins."""
    observes = _observes(drafter, shape)
    return slots.read(
        inputs.slots,
        inputs.block_table,
        needs,
        inputs.proposed,
        with_draft=observes,
        tail_table=inputs.tail_table,
    )


def no_drafts(rows: RoundRows) -> Drafts:
    """Return the drafts of a round that drafts nothing."""
    return Drafts(rows.lengths.new_empty(len(rows.lengths), 0))


def verify(engine: Engine, proposed: Proposed, beside: ForwardBatch | None = None) -> Verified:
    """Run the target over the bonus tokens and the drafts and, in the same forward, over the chunk `beside` them."""
    rows, drafts, tree = proposed
    input_ids, positions, visible = rows.last_tokens.unsqueeze(1), rows.lengths.unsqueeze(1), None
    num_nodes = proposed.num_nodes
    if num_nodes > 1:
        input_ids = torch.cat([input_ids, drafts.tokens], dim=1)
        depths = counted(num_nodes, input_ids.device) if tree is None else tree.depths
        positions = positions + depths
    if tree is not None:
        visible = Tree(rows.lengths, tree.visible.flatten(0, 1))
    batch = ForwardBatch.uniform(
        input_ids,
        positions,
        rows.lengths + num_nodes,
        rows.block_table,
        engine.pool.page_size,
        visible,
        rows.tail_table,
    )
    if beside is None:
        extend, final = engine.states(batch)
        return Verified(final, extend, None)
    extend, final = engine.states(MixedBatch.of(batch, beside))
    own = batch.num_tokens
    return Verified(final[:own], *((None, None) if extend is None else (extend[:own], extend[own:])))


def settle(
    engine: Engine,
    drafter: Drafter | None,
    slots: Slots,
    inputs: RoundInputs,
    proposed: Proposed,
    verified: Verified,
    shape: DraftShape,
    needs: Needs,
    allowed: Tensor | None = None,
) -> RoundResult:
    """Sample, accept and observe, and advance the slots. `allowed` [num_seqs * (N + 1), ceil(vocab_size / 32)] int32:
    the tokens that each node may have, as for `process_logits`; None: all."""
    rows, drafts, tree = proposed
    hidden, scored = verified.extend, None
    if needs.is_plain_greedy and needs.num_logprobs is None:
        token_ids, is_valid = engine.model.best(verified.final)
    else:
        sampling = _node_sampling(rows, drafts, tree).within(allowed)
        lens = sampling.lens(len(verified.final)) if needs.num_logprobs is None else None  # these need all logits
        logits = engine.model.logits(verified.final, lens)
        token_ids, is_valid, _ = sample(logits, sampling, with_logprobs=False)
        scored = logits if needs.num_logprobs is not None else None
    targets = token_ids.view(len(rows.lengths), proposed.num_nodes)
    is_valid = is_valid.view(targets.shape)
    hidden = None if hidden is None else hidden.view(*targets.shape, hidden.shape[-1])
    if tree is None:
        path = accept_chain(drafts.tokens, targets, inputs.limits)
    else:
        path = accept_tree(drafts, targets, inputs.limits, shape.num_steps)
        targets, is_valid, hidden, scored = _along(path, targets, is_valid, hidden, scored)
        engine.move_kv(inputs.block_table, *_moves(rows, path), inputs.tail_table)
    draft = _observe(drafter, slots, inputs, rows, hidden, targets, path.num_accepted, _observes(drafter, shape))
    numbers = slots.advance(inputs.slots, targets, is_valid, path.num_accepted, draft, needs)
    logprobs = None
    if scored is not None and needs.num_logprobs is not None:
        logprobs = compute_logprobs(scored, targets.flatten(), needs.num_logprobs)
    return RoundResult(numbers, logprobs)


def _observes(drafter: Drafter | None, shape: DraftShape) -> bool:
    """Return whether the drafter sees what the round brings: one with KV leaves a round without drafts for later."""
    return drafter is not None and (shape.num_steps > 0 or not drafter.has_kv)


def _node_sampling(rows: RoundRows, drafts: Drafts, tree: Ancestry | None) -> SamplingBatch:
    """Return the sampling of each node: at its own position, with the drafts up to it in its history."""
    num_nodes = drafts.tokens.shape[1] + 1
    if num_nodes == 1:
        return rows.sampling
    if tree is not None:
        return rows.sampling.ahead(tree.depths, drafts.tokens, tree.visible[:, :, 1:])
    step = counted(num_nodes, drafts.tokens.device).unsqueeze(0)
    is_before = step[:, :-1].unsqueeze(1) < step.unsqueeze(2) if rows.sampling.needs.penalizes else None
    return rows.sampling.ahead(step, drafts.tokens, is_before)


def _along(
    path: Path, targets: Tensor, is_valid: Tensor, hidden: Tensor | None, logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the values of the nodes on the path, [num_seqs, K + 1, ...], given those of all nodes,
    [num_seqs, N + 1, ...]. `logits` has one row per node instead."""
    assert path.nodes is not None
    num_seqs, num_nodes = targets.shape
    first = counted(num_seqs, targets.device, num_nodes).unsqueeze(1)
    there = [targets.flatten(), is_valid.flatten()]
    there += [] if hidden is None else [hidden.flatten(0, 1)]
    there += [] if logits is None else [logits]
    targets, is_valid, *more = gather_rows(there, (first + path.nodes).flatten())
    shape = path.nodes.shape
    along = None if hidden is None else more.pop(0).view(*shape, hidden.shape[-1])
    return targets.view(shape), is_valid.view(shape), along, more.pop() if more else None


def _moves(rows: RoundRows, path: Path) -> tuple[Tensor, Tensor]:
    """Return the token slots from which and to which the KV of accepted nodes goes, each [num_seqs, K]. Behind the
    accepted ones are slots of no token."""
    assert path.nodes is not None
    step = counted(path.nodes.shape[1], path.nodes.device)[1:]
    return rows.lengths.unsqueeze(1) + path.nodes[:, 1:], rows.lengths.unsqueeze(1) + step


def _observe(
    drafter: Drafter | None,
    slots: Slots,
    inputs: RoundInputs,
    rows: RoundRows,
    hidden: Tensor | None,
    targets: Tensor,
    num_accepted: Tensor,
    observes: bool,
) -> DraftState | None:
    """Return the drafter's state for the next round. A round without drafts runs no draft extend: it keeps the row."""
    if drafter is None:
        return None
    if observes:
        return drafter.observe(rows, hidden, targets, num_accepted)
    slots.keep_missed(inputs.missed_rows, rows.last_tokens, None if hidden is None else hidden[:, 0])
    return None


def catch_up(drafter: Drafter, slots: Slots, inputs: CatchUpInputs, num_rows: int, needs: Needs) -> None:
    """Run the drafter over the oldest `num_rows` rows that each sequence lacks, or all if they are fewer: as after a
    round that brought as many tokens."""
    rows = slots.read(inputs.slots, inputs.block_table, needs, tail_table=inputs.tail_table)
    num_missed = inputs.num_missed.clamp(min=1)  # padding has 0
    tokens, hidden = slots.missed(inputs.first_rows, num_missed, rows.last_tokens, num_rows)
    before = MissedRows(
        rows.lengths - num_missed,
        tokens[:, 0],
        rows.block_table,
        rows.sampling,
        rows.draft,
        tail_table=rows.tail_table,
    )
    slots.load_draft(inputs.slots, drafter.observe(before, hidden, tokens[:, 1:], num_missed.clamp(max=num_rows) - 1))

"""S4 and S6 for several MTP layers: every layer's KV and input, and the proposals, equal a recompute from scratch.

The recompute is plain torch without pages or batches (support/oracles/plain_heads.py). The test compares before every
round of a decode node: after the handoff, after rounds that accept 0 to K drafts, and after preemptions. Each known
defect is put back and caught."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import target_of
from heads import LAYERED, write_head
from matrix import rounds_paused
from node_pair import NodePair, node_pairs, params
from plain_heads import PlainHead
from thinned import every, thinned

from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.pace.draft_length import DraftShape
from baton.engine.prompts import prompts as engine_prompts
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.rounds.trees import Drafts
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.prefill_node import scheduler as prefill_scheduler

from .test_speculation import SETTINGS, prompts

NUM_LAYERS, NUM_TOKENS = 3, 14
CASES = prompts((1, 2, 3, 4, 8, 9, 14), seed=3)


class Checked:
    """A pair whose drafter is checked before every round of the decode node. Its proposals are then replaced, so that
    rounds accept 0, 2, 3, 1, ... tokens."""

    def __init__(self, pair: NodePair, kind: str, head: Path, plain: dict[str, list[int]]) -> None:
        self.pair, self.plain, self.num_checked = pair, plain, 0
        engine = pair.decode.executor.engine
        self._layers = PlainHead(kind, head, engine.model)
        self._num_right = itertools.cycle([0, 2, 3, 1, 3, 3, 0, 1])
        self.drafter = engine.drafter
        self._sequences: list[Any] = []  # of the round that runs
        self._submit, self._propose = pair.decode.rounds.submit, engine.drafter.propose
        pair.decode.rounds.submit, engine.drafter.propose = self._submitting, self._checked

    def generate(self, name: str, max_tokens: int = NUM_TOKENS, *, waits_until_full: bool = False) -> None:
        """`waits_until_full`: rounds begin when all requests have begun, or the decode node has no room for more."""
        pair = self.pair
        for i, prompt in enumerate(CASES):
            pair.submit(f"{i} {name}", prompt, params(max_tokens), n=1 + i % 2)
        if waits_until_full:
            with rounds_paused(pair):
                pair.step_until(lambda: pair.is_started or (pair.is_full and not pair.decode.scheduler.reserved))
        results = pair.run()
        for (rid, _), result in results.items():
            assert result.ids == self.plain[rid.split()[0]], rid

    def _submitting(self, sequences: Any, *rest: Any) -> Any:
        self._sequences = sequences
        return self._submit(sequences, *rest)

    def _checked(self, rows: RoundRows, shape: DraftShape) -> Drafts:
        drafted = self._propose(rows, shape).tokens.clone()
        for row, sequence in enumerate(self._sequences):
            self._check(sequence, rows.draft.row(row), drafted[row].tolist())
            text, at = self.plain[sequence.unit.rid.split()[0]], sequence.num_generated
            num_right = next(self._num_right)
            for step in range(shape.num_steps):
                token = text[at + step] if at + step < len(text) else 0
                drafted[row, step] = token if step < num_right else (token + 1) % 512
        return Drafts(drafted)

    def _check(self, sequence: Any, draft: DraftState, proposed: list[int]) -> None:
        self.num_checked += 1
        engine, num_rows = self.pair.decode.executor.engine, sequence.num_computed
        page_size = engine.pool.page_size
        pages = list(range(1, 2 + num_rows // page_size))
        batch = ForwardBatch.build([BatchRow(sequence.token_ids[:num_rows], 0, pages)], page_size, "cpu")
        kv = torch.zeros_like(engine.kv[:, : len(pages) + 1])
        states = engine.model.forward_with_aux(batch, ModelPools(kv), ()).handoff
        layers, proposals = self._layers.layered(states, sequence.token_ids, lambda logits, _: int(logits.argmax()))

        kept = min(NUM_LAYERS - 1, num_rows)
        assert draft.rows is not None and draft.recent is not None
        rows, recent = draft.rows[0], draft.recent[0].tolist()
        assert rows.shape == (NUM_LAYERS - 1, states.shape[1])
        assert recent[NUM_LAYERS - 1 - kept :] == sequence.token_ids[num_rows + 1 - kept :], sequence.unit
        assert torch.allclose(rows[NUM_LAYERS - 1 - kept :], states[num_rows - kept :], atol=1e-4), sequence.unit
        kv = self.drafter._pools.kv[:, sequence.pages].transpose(2, 4).flatten(1, 2)  # [layer, slot, kv head, K|V, dim]
        for m in range(NUM_LAYERS):
            num_final = max(0, num_rows - m)  # the others were computed from proposals, or not yet after a preemption
            for which, expected in enumerate(layers[m]):
                stored = kv[m, :num_final, :, which]
                assert torch.allclose(stored, expected[:num_final], atol=1e-4), (sequence.unit, m, which)
        assert proposed == proposals[: len(proposed)], (sequence.unit, proposed, proposals)


MakeChecked = Callable[..., Checked]


@functools.cache
def plain_of(model: Path) -> dict[str, list[int]]:
    """Return the ids by request without speculation."""
    with node_pairs(checks_books=False) as start:
        settings = {**SETTINGS, "num_pages": 200}
        plain = start(model, prefill=settings, decode=settings)
        for i, prompt in enumerate(CASES):
            plain.submit(str(i), prompt, params(NUM_TOKENS + 5))
        return {rid: result.ids[:NUM_TOKENS] for (rid, _), result in plain.run().items()}


@pytest.fixture
def make_checked(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakeChecked]:
    with node_pairs(checks_books=False) as start:

        def pair_of(model: Path, decode: dict[str, Any], **both: Any) -> NodePair:
            settings = {**SETTINGS, "num_pages": 200, **both}
            return start(model, prefill=settings, decode={**settings, **decode})

        def make(kind: str, decode: dict[str, Any] | None = None, **both: Any) -> Checked:
            model = target_of(kind, checkpoint)
            head = write_head(tmp_path / kind, kind, model)
            pair = pair_of(model, decode or {}, speculative="mtp", draft_model=str(head), **both)
            return Checked(pair, kind, head, plain_of(model))

        yield make


@pytest.mark.parametrize(  # tests/seeds/test_s6_chunk_tails.py has more
    ("kind", "chunk_tokens"), thinned(itertools.product(LAYERED, (1, 3, 5)), lambda i, *_: i % 4 == 0)
)
def test_layers_equal_a_recompute_after_handoff_and_partial_acceptance(
    kind: str, chunk_tokens: int, make_checked: MakeChecked
) -> None:
    checked = make_checked(kind, chunk_tokens=chunk_tokens)
    checked.generate("cold")
    checked.generate("again")  # prefix hits in both caches
    stats = checked.pair.decode.rounds.stats
    assert checked.num_checked > 100
    assert 0 < stats.accepted_at[2] < stats.accepted_at[1] < stats.accepted_at[0] < stats.num_verified, stats
    checked.pair.check_books()


@pytest.mark.parametrize(
    ("kind", "page_size"), thinned(itertools.product(LAYERED, (1, 2, 4)), lambda i, *_: i % 4 == 0)
)
def test_layers_equal_a_recompute_after_preemption(kind: str, page_size: int, make_checked: MakeChecked) -> None:
    checked = make_checked(kind, {"num_pages": 1 + 100 // page_size}, page_size=page_size)
    checked.generate("cold", waits_until_full=True)
    assert checked.pair.decode.stats().preemptions > 0
    checked.pair.check_books()


def _rows_of_the_whole_round(checked: Checked) -> None:
    """The defect: the rows kept are the last ones of the verify, not those before the accepted token."""
    observe = checked.drafter.observe

    def mutated(rows: RoundRows, hidden: torch.Tensor, *more: Any) -> DraftState:
        state = observe(rows, hidden, *more)
        return replace(state, rows=torch.cat([rows.draft.rows, hidden], dim=1)[:, 1 - NUM_LAYERS :])

    checked.drafter.observe = mutated


def _no_second_computation(checked: Checked) -> None:
    """The defect: rows that were computed from proposals are not computed again."""
    drafter = checked.drafter
    observe = drafter.observe

    def mutated(rows: RoundRows, *more: Any) -> DraftState:
        before = drafter._pools.kv.clone()
        state = observe(rows, *more)
        for length, pages in zip(rows.lengths.tolist(), rows.block_table.tolist(), strict=True):
            for position in range(max(0, length + 1 - NUM_LAYERS), length):
                page, slot = pages[position // 4], position % 4
                drafter._pools.kv[:, page, :, :, slot] = before[:, page, :, :, slot]
        return state

    drafter.observe = mutated


def _other_chaining(checked: Checked) -> None:
    """The defect: each layer takes the input of the other family."""
    drafter = checked.drafter
    drafter._is_chained = not drafter._is_chained


def _rows_of_the_last_chunk_alone(checked: Checked) -> None:
    """The defect: the prefill node forgets the states of earlier chunks."""

    def mutated(kept: torch.Tensor | None, states: torch.Tensor, num_rows: int) -> torch.Tensor:
        missing = states.new_zeros(num_rows, states.shape[1])
        return torch.cat([missing, states])[-num_rows:]

    engine_prompts._latest = mutated


def _shared_tail_pages(checked: Checked) -> None:
    """The defect: the prefill node copies only the last page per choice, though more depend on the first token."""
    prefill_scheduler.shared_pages = lambda num_tokens, page_size, _lookahead: (num_tokens - 1) // page_size


DEFECTS = (
    _rows_of_the_whole_round,
    _no_second_computation,
    _other_chaining,
    _rows_of_the_last_chunk_alone,
    _shared_tail_pages,
)


@pytest.mark.parametrize(  # each defect in one kind
    ("kind", "defect"), every(itertools.product(LAYERED, DEFECTS), 3)
)
def test_a_recompute_catches_each_known_defect(
    kind: str, defect: Callable[[Checked], None], make_checked: MakeChecked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_prompts, "_latest", engine_prompts._latest)  # put back afterwards
    monkeypatch.setattr(prefill_scheduler, "shared_pages", prefill_scheduler.shared_pages)
    checked = make_checked(kind, chunk_tokens=1)
    defect(checked)
    with pytest.raises(AssertionError):
        checked.generate("cold")


@pytest.mark.parametrize("steps", [1, 2])
def test_drafting_works_with_fewer_steps_than_layers(
    steps: int, checkpoint: Callable[..., Path], make_checked: MakeChecked
) -> None:
    checked = make_checked("mtp3-deepseek", {"draft_steps": steps})  # prefill has three: the schema is the same
    checked.generate("cold")
    assert len(checked.pair.decode.rounds.stats.accepted_at) == steps
    checked.pair.check_books()

"""S7: a rank without rows runs the same functions on zero rows, of the widths that HiddenLayout says.

Alone, prefill, rounds, catching up and the end of prompts run on zero rows with every drafter. Beside a live rank, an
idle one joins every collective operation, in every phase, and the output is that of one process. Each defect is put in
once and caught. All cells run with BATON_WHOLE_MATRIX=1. Otherwise each class of drafters runs in one variant or two,
each variant with one of the classes, and one family per kind of pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALIKE, ALL, OF_FAMILIES, STREAM_MTP, TREES_OF_FAMILIES, settings, target_of
from idle_ranks import Cell, World, Worlds, cells
from solo import Solo
from thinned import every, is_whole, thinned

from baton.engine.pace.draft_length import DraftShape
from baton.engine.ranks.agreement import Agreed
from baton.engine.rounds.trees import Drafts
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import Needs
from baton.engine.work import CatchUp, Chunk, Recompute, Round, RoundTokens
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout

TREES = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp", *TREES_OF_FAMILIES)
EVERYTHING = Needs(True, True, True, True, True, True, 2)


@pytest.mark.parametrize(
    ("name", "topk"),
    thinned(
        [*((name, 1) for name in ("ngram", *ALL)), *((name, 2) for name in TREES)],
        lambda _, name, __: name not in ALIKE,
    ),
)
def test_a_rank_without_rows_runs_everything(
    name: str, topk: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    tree = {"draft_topk": topk, "draft_tokens": 4} if topk > 1 else {}
    solo = Solo(model, num_pages=60, **settings(name, model, tmp_path, steps=3), **tree)
    kvs = [kv.clone() for kv in solo.engine.kvs]
    executor, shape = solo.executor, solo.rounds.shape
    executor.slots.allocate_all()
    for num_steps in (0, shape.num_steps):
        for needs in (Needs(), EVERYTHING):
            executor.submit(Round([], [], [], [], [], shape.with_steps(num_steps), needs, []))
            assert executor.collect() == RoundTokens([])
    if executor.keeps_missed_rows:
        for num_rows in (1, shape.num_steps + 1):
            executor.submit(CatchUp([], [], [], [], [], num_rows, Needs()))
    executor.submit(Recompute([], []))
    assert all(torch.equal(kv, before) for kv, before in zip(solo.engine.kvs, kvs, strict=True))


@pytest.mark.parametrize("name", thinned(["ngram", *ALL], lambda _, name: name not in ALIKE))
def test_the_draft_state_of_no_prompts_has_the_widths_of_the_layout(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    solo = Solo(model, num_pages=60, **settings(name, model, tmp_path, steps=3))
    engine = solo.engine
    computed = engine.compute([])
    assert computed.logits.shape == (0, engine.model_config.vocab_size)
    width = engine.speculation.hidden.allocate("extend", 0, engine.device)
    assert (computed.extend is None) == (width is None)
    assert computed.extend is None or width is None or computed.extend.shape == width.shape
    tokens = torch.zeros(0, dtype=torch.int64)
    with torch.inference_mode():
        draft = solo.drafter.finish_prompt([], tokens, computed.extend, SamplingBatch.of([], engine.device))
    found, wanted = (
        [(key, each.shape, each.dtype) for key, each in state.present()] for state in (draft, solo.drafter.allocate(0))
    )
    assert found == wanted


# --- an idle rank beside a live one ---

BESIDE_A_LIVE_RANK = ("mtp-of-glm-dsa", STREAM_MTP)  # of OF_FAMILIES
IN_GATE = {  # drafters, by variant; the second rank begins in every other one
    "alike": ("ngram", "mtp3-mimo", *BESIDE_A_LIVE_RANK),
    "padded": ("standalone", "mtp3-deepseek"),
    "narrow": ("frozen-kv-mtp",),
    "wide": ("eagle3",),
    "float32-bfloat16": ("eagle",),
    "bfloat16-float32": ("eagle3",),
    "tree": ("mtp-deepseek",),
}


def has_own_pools(name: str) -> bool:
    return name not in OF_FAMILIES or name in BESIDE_A_LIVE_RANK


CHOSEN = [Cell(name, variant, i % 2) for i, (variant, names) in enumerate(IN_GATE.items()) for name in names]
CELLS = cells() if is_whole() else CHOSEN


@pytest.fixture(scope="module")
def worlds(checkpoint: Callable[..., Path]) -> Worlds:
    return Worlds(checkpoint)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_an_idle_rank_joins_every_phase_of_a_live_one(
    cell: Cell, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worlds.of(cell, tmp_path, monkeypatch) as world:
        world.live(cell.first)


@pytest.mark.parametrize("name", thinned(["eagle", STREAM_MTP, "frozen-kv-mtp"], lambda i, _: i == 0))
def test_two_of_four_ranks_are_always_idle(
    name: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worlds.of(Cell(name, "alike", 1), tmp_path, monkeypatch, size=4) as world:
        world.live(1)
        assert {rank for _, rank in world.idle} == {0, 1, 2, 3}
        assert {each.lens for each in world.ranks.group.traces[3]} >= {(0, 1, 0, 0), (1, 0, 0, 0), (0, 4, 0, 0)}


IDLE_WORKS = {
    "recompute": Recompute([], []),
    "catch-up": CatchUp([], [], [], [], [], 4, EVERYTHING),
    "decode": Round([], [], [], [], [], DraftShape(0), EVERYTHING, []),
    "draft and verify": Round([], [], [], [], [], DraftShape(3), EVERYTHING, []),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    thinned(
        [*((name, "alike") for name in ("ngram", *ALL)), ("eagle", "padded"), ("mtp3-deepseek", "padded")],
        lambda _, name, __: has_own_pools(name),
    ),
)
def test_all_ranks_are_idle(
    name: str, variant: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work without rows reports nothing, and no page but that of padding changes."""
    with worlds.of(Cell(name, variant, 0), tmp_path, monkeypatch) as world:
        ranks, executor = world.ranks, world.ranks.executors[1]
        before = [[kv.clone() for kv in engine.kvs] for engine in ranks.engines]
        ranks.do({1: lambda: ranks.prompts[1].submit(Chunk([], [])).wait()})
        for phase, work in IDLE_WORKS.items():
            if phase == "catch-up" and not world.has_kv:
                continue
            ranks.do({1: lambda work=work: executor.submit(work)})
            if isinstance(work, Round):
                assert ranks.do({1: executor.collect}) == {1: RoundTokens([])}
        world.check_drafters()
        for engine, kvs in zip(ranks.engines, before, strict=True):
            assert all(torch.equal(kv[:, 1:], old[:, 1:]) for kv, old in zip(engine.kvs, kvs, strict=True))


# --- the defects ---


def replace_idle(world: World, do: Callable[[Callable[[Agreed], None], Agreed], None]) -> None:
    """Let the second rank run its steps without work by `do`, which is given the usual function."""
    steps = world.ranks.steps[1]
    usual = steps._run_idle
    steps._run_idle = lambda agreed: do(usual, agreed)


SKIPS: dict[str, Callable[[World, Agreed], bool]] = {
    "prefill": lambda world, agreed: agreed.has_chunks and world.phase_of_chunks == "prefill",
    "decode": lambda world, agreed: agreed.has_rounds and agreed.num_steps == 0,
    "verify": lambda world, agreed: agreed.has_rounds and agreed.num_steps > 0,
    "recompute": lambda world, agreed: agreed.has_chunks and world.phase_of_chunks == "recompute",
}


@pytest.mark.parametrize(("name", "phase"), every(itertools.product(["eagle", "mtp3-mimo", STREAM_MTP], SKIPS), 3))
def test_an_idle_rank_that_skips_a_phase_is_caught(
    name: str, phase: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip(usual: Callable[[Agreed], None], agreed: Agreed) -> None:
        if SKIPS[phase](world, agreed):
            return world.ranks.group.end()  # it comes no more, so nobody waits for it any longer
        return usual(agreed)

    with worlds.of(Cell(name, "alike", 0), tmp_path, monkeypatch) as world:
        replace_idle(world, skip)
        with pytest.raises(RuntimeError, match="rank 0 waited in gather for a rank that did not come"):
            world.live(0)


WITH_FORWARDS = thinned(
    ("standalone", "eagle", "eagle3", "mtp-mimo", "mtp3-deepseek", "frozen-kv-mtp", STREAM_MTP),
    lambda _, name: name in ("eagle", "mtp3-deepseek", "frozen-kv-mtp"),
)


@pytest.mark.parametrize("name", WITH_FORWARDS)
def test_an_idle_rank_that_computes_a_prompt_while_others_decode_is_caught(
    name: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extend path of prompts has the target's collective operations, so no rank hangs. Only the drafter tells."""

    def extend(usual: Callable[[Agreed], None], agreed: Agreed) -> None:
        if not agreed.has_rounds:
            return usual(agreed)
        engine = world.ranks.engines[1]
        with torch.inference_mode():
            engine.drafter.observe_prompt([], engine.compute([]).extend)
        return None

    with worlds.of(Cell(name, "alike", 0), tmp_path, monkeypatch) as world:
        replace_idle(world, extend)
        with pytest.raises(AssertionError, match="ranks ran unlike forwards of the drafter"):
            world.live(0)


@pytest.mark.parametrize("name", WITH_FORWARDS)
def test_an_idle_rank_that_does_not_draft_is_caught(
    name: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worlds.of(Cell(name, "alike", 0), tmp_path, monkeypatch) as world:
        drafter: Any = world.ranks.engines[1].drafter
        drafts = Drafts(torch.zeros(0, 3, dtype=torch.int64))
        usual = drafter.propose
        drafter.propose = lambda rows, shape: usual(rows, shape) if len(rows.lengths) else drafts
        if name == "mtp3-deepseek":  # its proposals are made when it observes
            drafter.observe = lambda rows, *rest: rows.draft
        with pytest.raises(AssertionError, match="ranks ran unlike forwards of the drafter"):
            world.live(0)


def of_the_other_side(layout: HiddenLayout) -> HiddenLayout:
    """Return a layout that takes the target for the draft."""
    return replace(
        layout,
        target_hidden_size=layout.draft_hidden_size,
        draft_hidden_size=layout.target_hidden_size,
        target_dtype=layout.draft_dtype,
        draft_dtype=layout.target_dtype,
    )


UNLIKE = [(name, variant) for name in ("eagle3", "frozen-kv-mtp") for variant in ("narrow", "wide")]
UNLIKE += [(name, "float32-bfloat16") for name in ("eagle", "eagle3", "mtp-deepseek", "mtp3-mimo", STREAM_MTP)]


@pytest.mark.parametrize(
    ("name", "variant", "phase"),
    thinned(((*cell, phase) for cell in UNLIKE for phase in ("prefill", "decode")), lambda i, *_: i % 4 in (0, 3)),
)
def test_widths_of_the_wrong_side_are_caught_on_an_idle_rank(
    name: str, variant: str, phase: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of the second rank asks the wrong side, for works without rows alone."""

    def mutate(usual: Callable[[Agreed], None], agreed: Agreed) -> None:
        engine = world.ranks.engines[1]
        drafter: Any = engine.drafter
        right, drafter_layout = engine.speculation, drafter.hidden
        if agreed.has_rounds == (phase == "decode"):
            engine.speculation = replace(right, hidden=of_the_other_side(right.hidden))
            drafter.hidden = engine.speculation.hidden
        try:
            usual(agreed)
        finally:
            engine.speculation, drafter.hidden = right, drafter_layout

    with worlds.of(Cell(name, variant, 0), tmp_path, monkeypatch) as world:
        replace_idle(world, mutate)
        with pytest.raises(ValueError, match=r"state of .* is \[num_rows"):
            world.live(0)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp-mimo", "frozen-kv-mtp", STREAM_MTP])
def test_a_recurrent_state_of_a_wrong_width_is_caught_on_an_idle_rank(
    name: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of the second rank hold states that are one number too wide."""
    with worlds.of(Cell(name, "alike", 0), tmp_path, monkeypatch) as world:
        slots = world.ranks.executors[1].slots
        hidden = slots._draft.hidden
        assert hidden is not None
        slots._draft = replace(slots._draft, hidden=torch.zeros(len(hidden), hidden.shape[1] + 1))
        with pytest.raises(ValueError, match=r"state of .* (is \[num_rows|does not fit a buffer)"):
            world.live(0)

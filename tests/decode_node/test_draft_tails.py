"""Prediction layers that see a window alone, beside a target with tail pages: their KV lies in these, too.

Proposals are compared with those of the same layers whose KV lies in kept pages. tests/seeds/test_s6_chunk_tails.py
compares them with one process, for chunks and prefix hits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import force_steps
from node_pair import NodePair, node_pairs, params
from own_mtp import with_mtp
from solo import caught
from thinned import is_whole, thinned
from torch import Tensor

from baton.decode_node import scheduler, sequence, sequence_pages
from baton.engine import engine as engine_module
from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.engine import Engine
from baton.engine.pace.step_times import StepTimes
from baton.engine.rounds import rounds, slots
from baton.engine.state.pages import Owner

PAGE_SIZE, WINDOW, MISSED = 4, 7, 20
BOUND = 1e-4  # of states of about 1
MODELS = ("mimo_v2_flash 1", "mimo_v2_flash 3", "deepseek_v4 1")  # and how many prediction layers they have
PROMPTS = (3, 18, 20, 37)
OF_CHOICES, NUM_TOKENS = (PROMPTS, 30) if is_whole() else ((3, 37), 10)
Proposals = dict[tuple[Any, ...], Tensor]  # by request and text: drafts, and the state that they are made of
MakePair = Callable[..., NodePair]


@pytest.fixture(scope="module", params=thinned(MODELS, lambda i, _: i == 0))
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    family, num = request.param.split()
    source = checkpoint(family)
    path = source.with_name(f"{source.name}-mtp{num}")
    return path if path.exists() else with_mtp(source, path, int(num))


@pytest.fixture
def make_pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    for module in (slots, rounds, sequence, scheduler, sequence_pages, engine_module):
        monkeypatch.setattr(module, "MAX_MISSED", MISSED)
    monkeypatch.setattr(StepTimes, "measure", lambda *_: StepTimes({(1, 0): 1.0, (1, 1): 1.0}))
    with node_pairs() as start:

        def make(**options: Any) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 200, "chunk_tokens": 6, "speculative": "mtp", "draft_steps": 2}
            return start(model, prefill=both, decode=both, **options)

        yield make


def watch(pair: NodePair) -> Proposals:
    """Return what the drafter of the decode node proposes from now on."""
    found, current = Proposals(), list[Any]()
    submit, drafter = pair.decode.rounds.submit, pair.decode.executor.engine.drafter
    assert drafter is not None
    propose = drafter.propose

    def submitting(sequences: Any, *rest: Any) -> Any:
        current[:] = sequences
        return submit(sequences, *rest)

    def proposing(rows: Any, shape: Any) -> Any:
        drafts = propose(rows, shape)
        numbers = [drafts.tokens[:, :1]] if rows.draft.hidden is None else [drafts.tokens[:, :1], rows.draft.hidden]
        seen = torch.cat([each.float() for each in numbers], 1)
        found.update({(each.unit.rid, *each.token_ids): row for each, row in zip(current, seen, strict=False)})
        return drafts

    pair.decode.rounds.submit, drafter.propose = submitting, proposing  # type: ignore[method-assign]
    return found


def with_choices(pair: NodePair) -> Proposals:
    found = watch(pair)
    for num in OF_CHOICES:
        for is_local in (False, True):
            ids = random.Random(num).choices(range(1, 512), k=num)
            pair.submit(f"{num} {is_local}", ids, params(NUM_TOKENS, temperature=1.5, seed=num), n=3, is_local=is_local)
            pair.run()
    texts = {(name, choice): tuple(result.ids) for (name, choice), result in pair.results.items()}
    assert len(set(texts.values())) == 3 * len(OF_CHOICES), "choices differ, and places do not"
    return found


def with_missed_rows(pair: NodePair) -> Proposals:
    """Rounds leave out as many rows as the drafter can catch up on, behind prompts of one length and then another. The
    tail pages that no sequence holds are written over meanwhile."""
    found = watch(pair)
    catch_up, cache, pools = pair.decode.rounds.catch_up, pair.decode.cache, pair.decode.executor.engine.draft_pools

    lost: list[tuple[int, int, int]] = []  # tokens, the first page of tokens whose tail page is held, and that is read

    def catching_up(sequences: Sequence[Any]) -> None:
        unused = cache.allocate_tails(cache.available_tails, Owner.REQUEST)
        if pair.decode.executor.engine.has_draft_tails:
            assert pools is not None
            for pool in pools.all:
                pool[:, [page - cache.pool.num_pages for page in unused]] = 1e4
        cache.pool.release(unused)
        for each in sequences if pair.decode.executor.engine.has_draft_tails else ():
            first = max(0, each.num_computed - each.num_missed - WINDOW + 1) // PAGE_SIZE
            is_pulled = each.unit.rid.endswith("False")  # of other prompts, the cache has tail pages that are read
            if is_pulled and each.tail.first > first:
                lost.append((each.num_computed, each.tail.first, first))
        catch_up(sequences)

    pair.decode.rounds.catch_up = catching_up  # type: ignore[method-assign]
    for num in PROMPTS[1:]:
        for is_local in (False, True):
            force_steps(pair, lambda index: 2 if index % (MISSED + 3) >= MISSED else 0)
            ids = random.Random(num).choices(range(1, 512), k=num)
            pair.submit(f"{num} {is_local}", ids, params(MISSED + NUM_TOKENS), is_local=is_local)
            pair.run()
    assert pair.decode.rounds.stats.num_drafted > 0 and not lost, lost
    return found


def assert_same(ours: Proposals, theirs: Proposals) -> None:
    """Compare the proposals after texts that both runs drafted after: the times of a run choose its last rounds."""
    both = ours.keys() & theirs.keys()
    assert len(both) > 10
    assert max((ours[text] - theirs[text]).abs().max() for text in both) < BOUND


_KEPT: dict[Any, Proposals] = {}  # by model and run
RUNS = {with_choices: False, with_missed_rows: True}  # and whether it chooses the drafts of rounds


@pytest.fixture
def kept(model: Path, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Proposals]:
    """`kept(run)`: the proposals of layers whose KV lies in kept pages, computed once per model."""

    def of(run: Callable[[NodePair], Proposals]) -> Proposals:
        if (model, run) not in _KEPT:
            with monkeypatch.context() as patch:
                patch.setattr(ModelConfig, "beside", lambda self, *_: self)
                pair = make_pair(is_adaptive=RUNS[run])
            assert not pair.decode.executor.engine.has_draft_tails
            _KEPT[model, run] = run(pair)
        return _KEPT[model, run]

    return of


@pytest.mark.parametrize("run", RUNS)
def test_proposals_are_those_of_kept_pages(
    run: Callable[[NodePair], Proposals], make_pair: MakePair, kept: Callable[..., Proposals]
) -> None:
    pair = make_pair(is_adaptive=RUNS[run])
    schema = pair.hellos["decode"].layout
    assert schema.draft is not None and schema.draft.window == WINDOW + schema.draft.num_layers
    assert_same(run(pair), kept(run))


def drops_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "held_window", property(lambda engine: engine.tail_window))


def forgets_copies(patch: pytest.MonkeyPatch) -> None:
    """All choices share the tail pages of the prompt."""
    patch.setattr("baton.prefill_node.request.Request.tail_table", lambda self, _: self.tail and self.tail.pages)


@pytest.mark.parametrize(("run", "defect"), [(with_choices, forgets_copies), (with_missed_rows, drops_missed)])
def test_each_defect_is_caught(
    run: Callable[[NodePair], Proposals],
    defect: Callable[[pytest.MonkeyPatch], None],
    make_pair: MakePair,
    kept: Callable[..., Proposals],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = kept(run)
    defect(monkeypatch)
    with caught():
        assert_same(run(make_pair(is_adaptive=RUNS[run])), expected)

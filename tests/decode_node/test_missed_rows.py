"""Missed rows: in a round without drafts the drafter sees no row, so it must catch up later.

That changes no token. A sequence catches up at its end, too, so that the next turn finds the pages of its answer.
A page with missed rows, which has holes in its draft KV, is never found by another request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from heads import ALGORITHM, write_head
from matrix import ASKS, PAGE_SIZE, Plain, Watch, coach, force_steps, has_generated, start_together
from node_pair import NodePair, node_pairs, params
from solo import gather
from thinned import is_whole, thinned

from baton.decode_node import scheduler, sequence
from baton.decode_node.sequence_pages import SequencePages
from baton.engine.pace.step_times import StepTimes
from baton.engine.rounds import rounds, slots

MakePair = Callable[..., NodePair]
MAX_MISSED = 7
STEPS = {
    "ngram": 5,
    "standalone": 5,
    "eagle": 5,
    "eagle3": 5,
    "mtp-deepseek": 5,
    "mtp3-deepseek": 3,
    "mtp3-mimo": 3,
    "frozen-kv-mtp": 5,
}
SCHEDULES = {
    "catches up": (5, 0, 0, 5, 1, 0, 5, 0, 0, 0, 1, 2),
    "rests longer than rows are kept": (*[0] * (MAX_MISSED + 1), 5, 0, 5, 1, 5, 5, 5, 5, 5, 5),
}


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakePair]:
    """`make_pair(name, model)`: an adaptive pair with a drafter of that kind. The test chooses its draft lengths."""
    for module in (slots, rounds, sequence, scheduler):
        monkeypatch.setattr(module, "MAX_MISSED", MAX_MISSED)
    monkeypatch.setattr(StepTimes, "measure", lambda *_: StepTimes({(1, 0): 1.0, (1, 1): 1.0}))

    with node_pairs() as start:

        def make(name: str, model: Path, *, overlaps: bool = False, **settings: Any) -> NodePair:
            settings = {"draft_steps": STEPS[name], "speculative": ALGORITHM.get(name, name)} | settings
            if name not in ("ngram", "standalone"):
                unlike = {"hidden_size": 24} if name in ("eagle3", "frozen-kv-mtp") else {}
                settings["draft_model"] = str(write_head(tmp_path / name, name, model, **unlike))
            both = {"page_size": PAGE_SIZE, "num_pages": 240, "max_running": 10, "chunk_tokens": 6, **settings}
            return start(model, prefill=both, decode=both, is_adaptive=True, overlaps=overlaps)

        yield make


def count_caught_up(pair: NodePair) -> list[int]:
    """Return a list that grows by the number of missed rows of each sequence whenever the drafter catches up."""
    counts: list[int] = []
    catch_up = pair.decode.rounds.catch_up

    def counting(sequences: Sequence[Any]) -> None:
        counts.extend(each.num_missed for each in sequences if 0 < each.num_missed <= MAX_MISSED)
        catch_up(sequences)

    pair.decode.rounds.catch_up = counting
    return counts


DRAFTS = [*((name, 1) for name in STEPS), ("eagle", 2), ("frozen-kv-mtp", 3)]


@pytest.mark.parametrize(
    ("name", "topk", "schedule"),
    thinned(  # each schedule with a drafter that has KV and with one that has none
        [(*draft, schedule) for draft in DRAFTS for schedule in SCHEDULES],
        lambda i, *_: i in (0, 10, 15, 17),
    ),
)
def test_output_is_that_of_speculation_off(
    name: str, topk: int, schedule: str, plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair, tmp_path: Path
) -> None:
    model, reference = plain(name)
    settings: dict[str, Any] = {} if topk == 1 else {"draft_topk": topk, "draft_steps": 3}
    if name == "standalone":
        settings["draft_model"] = str(drafters.perturbed(model, tmp_path / name, 0.03))
    pair = make_pair(name, model, overlaps=schedule == "catches up", **settings)
    if name != "standalone":
        coach(pair.decode.executor.engine.drafter, reference.truths)
    watch, caught_up, shape = Watch.of(pair), count_caught_up(pair), pair.decode.rounds.shape
    planned = [min(each, shape.num_steps) for each in SCHEDULES[schedule]]
    if not shape.is_chain:
        planned = [shape.num_steps if each else 0 for each in planned]
    force_steps(pair, lambda index: planned[index % len(planned)])
    left_behind = note_left_behind(pair)
    for phase in ("cold", "hit", "preempted"):
        run_all(pair, phase, reference)
    stats = pair.decode.rounds.stats
    assert stats.num_accepted > 0 and any(0 in limits and len(limits) > 1 for limits in watch.limits), watch.limits
    if pair.decode.executor.engine.drafter.has_kv:
        assert max(caught_up) > 2, caught_up
    else:
        assert not caught_up
    assert not left_behind


def run_all(pair: NodePair, phase: str, reference: Plain) -> None:
    for is_late in (False, True):
        for case in reference.cases:
            if case.ask.is_late == is_late:
                pair.submit(f"{phase} {case.ask.name}", case.prompt, case.params, n=case.ask.n)
        if not pair.decode.scheduler.preempted:  # else these wait for rounds
            start_together(pair)
        pair.step_until(lambda: has_generated(pair, f"{phase} {ASKS[0].name}", 3))
        if phase == "preempted":
            pair.decode.settle()
            for running in list(pair.decode.scheduler.running)[::2]:
                pair.decode.scheduler.preempt(running)
    results = pair.run()
    for case in reference.cases:
        case.check([results[f"{phase} {case.ask.name}", choice] for choice in range(case.ask.n)])
    assert (pair.decode.stats().preemptions > 0) == (phase == "preempted")


def note_left_behind(pair: NodePair) -> set[str]:
    """Return a set that grows by the rids of sequences that want drafts and are left behind."""
    rids: set[str] = set()
    collect = pair.decode.rounds.collect

    def noting(submitted: Any) -> Any:
        results = collect(submitted)
        if any(submitted.limits) and submitted.shape.num_steps:
            asked = [each for each in submitted.sequences if each.request.params.draft_steps != 0]
            rids.update(each.unit.rid for each in asked if each.is_left_behind)
        return results

    pair.decode.rounds.collect = noting
    return rids


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_try_after_rounds_without_drafts_is_run(
    overlaps: bool, plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair
) -> None:
    """The drafter catches up also on the row of a round that is still under way."""
    model, reference = plain("eagle")
    pair = make_pair("eagle", model, overlaps=overlaps)
    force_steps(pair, lambda index: 5 if index % 4 == 3 else 0)
    watch = Watch.of(pair)
    pair.submit("alone", reference.cases[0].prompt, reference.cases[0].params)
    reference.cases[0].check([pair.run()["alone", 0]])
    assert pair.decode.rounds.stats.num_drafted > 5, watch.limits


def test_a_draft_that_is_the_target_is_always_accepted_after_catching_up(
    plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair
) -> None:
    """Promise P2 holds over rounds without drafts, because the drafter catches up on every row. It excludes grammars,
    which a drafter does not know."""
    model, reference = plain("standalone")
    pair = make_pair("standalone", model, draft_model=str(model))
    caught_up = count_caught_up(pair)
    force_steps(pair, lambda index: SCHEDULES["catches up"][index % 12])
    for turn in ("first", "second"):
        for case in reference.cases:
            if case.params.grammar is None:
                pair.submit(f"{case.ask.name} {turn}", case.prompt, case.params, n=case.ask.n)
        start_together(pair)
        pair.run()
    stats = pair.decode.rounds.stats
    assert stats.num_drafted > 30 and len(caught_up) > 10 and {1, 2, 3} <= set(caught_up), (stats, caught_up)
    assert stats.num_accepted == stats.num_drafted, stats


# --- holes ---

PROMPT = [17, 4, 250, 33, 99, 8, 301, 12, 76]


def draft_kv_of(pair: NodePair, rid: str, prompt: list[int], num_rows: int) -> tuple[int, torch.Tensor]:
    """Return how many pages of a prompt the decode node had cached, and the draft KV of its first rows."""
    pair.admitted.clear()
    pair.submit(rid, prompt, params(3))
    pair.step_until(lambda: pair.decode.scheduler.running)
    [running] = pair.decode.scheduler.running
    kv = gather(pair.decode.executor.engine.kvs[1], running.pages, num_rows)
    pair.run()
    return pair.admitted[0].num_cached_pages, kv


def find_holes(pair: NodePair, num_drafting: int) -> tuple[int, int, float]:
    """Let a request draft for `num_drafting` rounds and then no more, and let another one continue its text. Return how
    many pages of the first are full, how many cached pages the second found, and how far their draft KV is from that of
    a pair without cached pages."""
    flush(pair)
    force_steps(pair, lambda index: pair.decode.rounds.shape.num_steps if index < num_drafting else 0)
    pair.submit(f"first {num_drafting}", PROMPT, params(MAX_MISSED + num_drafting + 8))
    text = PROMPT + pair.run()[f"first {num_drafting}", 0].ids
    pair.prefill.cache.flush()  # it would offer pages without holes
    num_rows = len(text) - 4  # later rows depend on what is sampled
    num_cached_pages, found = draft_kv_of(pair, f"second {num_drafting}", text, num_rows)
    flush(pair)
    num_anew, anew = draft_kv_of(pair, f"anew {num_drafting}", text, num_rows)
    assert num_anew == 0
    return (len(text) - 1) // PAGE_SIZE, num_cached_pages, float((found - anew).abs().max() / anew.abs().max())


def flush(pair: NodePair) -> None:
    pair.prefill.cache.flush()
    pair.decode.cache.flush()


WITH_KV = ("standalone", "eagle", "eagle3", "mtp-deepseek", "mtp3-deepseek", "mtp3-mimo")


HOLES = thinned(WITH_KV, lambda i, name: name in ("standalone", "eagle3", "mtp3-mimo"))


@pytest.mark.parametrize("name", HOLES)
def test_the_next_turn_finds_an_answer_that_was_not_drafted(
    name: str, plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair, tmp_path: Path
) -> None:
    """The drafts end at each position of a page, and pages later. The last page may lack the tokens behind it."""
    pair = pair_with_holes(name, plain, make_pair, tmp_path)
    for num_drafting in range(1, 10) if is_whole() else (1, 2, 3, 8):
        num_pages, num_cached_pages, difference = find_holes(pair, num_drafting)
        assert num_cached_pages >= num_pages - 1 and difference < 1e-4, (num_drafting, num_cached_pages, difference)


def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no drafter catch up, as if there were no memory for it."""
    monkeypatch.setattr(rounds.Rounds, "catch_up", lambda *_: None)


@pytest.mark.parametrize("name", HOLES)
def test_pages_with_holes_are_never_found(
    name: str,
    plain: Callable[[str], tuple[Path, Plain]],
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafts end at each position of a page, and pages later."""
    without_memory(monkeypatch)
    pair = pair_with_holes(name, plain, make_pair, tmp_path)
    found = [find_holes(pair, num_drafting) for num_drafting in (range(1, 10) if is_whole() else (1, 2, 3, 4, 9))]
    assert all(difference < 1e-4 for *_, difference in found), found
    assert len({num_cached_pages for _, num_cached_pages, _ in found}) > 2, found


@pytest.mark.parametrize("name", HOLES)
def test_caching_pages_with_holes_is_caught(
    name: str,
    plain: Callable[[str], tuple[Path, Plain]],
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect: full pages go to the cache as soon as the target's KV is computed."""
    without_memory(monkeypatch)
    cache_pages = SequencePages.share

    def forgetful(self: SequencePages, sequence: Any, *args: Any, **more: Any) -> None:
        num_missed, sequence.num_missed = sequence.num_missed, 0
        cache_pages(self, sequence, *args, **more)
        sequence.num_missed = num_missed

    monkeypatch.setattr(SequencePages, "share", forgetful)
    _, num_cached_pages, difference = find_holes(pair_with_holes(name, plain, make_pair, tmp_path), 2)
    assert num_cached_pages > 4 and difference > 0.01, (num_cached_pages, difference)


def pair_with_holes(name: str, plain: Any, make_pair: MakePair, tmp_path: Path) -> NodePair:
    model, _ = plain(name)
    more = {}
    if name == "standalone":
        more["draft_model"] = str(drafters.perturbed(model, tmp_path / name, 10.0))
    pair = make_pair(name, model, **more)
    for kv in pair.decode.executor.engine.kvs[1:]:
        kv.fill_(3.0)  # a slot that was never computed is far from right
    return pair

"""Requests whose output must not depend on how it is computed, their expected output, and records of a run.

The reference is a pair of nodes without speculation that runs one request at a time. Its tokens are checked again in a
single pass over each sequence. None of them is a near tie, so every comparison here is exact.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from drawn_places import Place
from grammars import EOS, THOUGHTS_AND_OBJECT, WORDS, allowed
from model_pools import pages_for
from node_pair import NodePair, Result, params, replace

from baton.decode_node.scheduler import StepPlan
from baton.engine.drafters.base import RoundRows
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.inputs import InputBlock
from baton.engine.rounds.rounds import Submitted
from baton.engine.rounds.trees import Drafts
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import sample, tie_gap
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow, CatchUp, Round, RoundTokens
from baton.metadata.wire.request import SamplingParams, choice_seed

PAGE_SIZE = 4
FEW_PAGES = 24  # for the decode node's requests where they are preempted
LEAST_GAP = 1e-3  # between the two best scores of any token: ten times what promise P1 calls a tie
BEYOND = 8  # tokens after the end of a text that drafters are told, so that accepted runs would go on


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. Its prompt and seed follow from its index in the list."""

    name: str
    prompt_len: int
    params: SamplingParams
    n: int = 1
    stop_at: int | None = None  # index of the output token that ends the request; earlier tokens differ from it
    is_late: bool = False  # it joins a running batch
    behind: str = ""  # name of an earlier request, with whose prompt and output this prompt begins

    def is_met(self, free: list[int], ids: list[int]) -> bool:
        """Return whether `ids` end at the stop token or, if `min_tokens` is larger, have another token there. `free` is
        the output without a stop token."""
        if self.stop_at is None:
            return ids == free[: self.params.max_tokens]
        if free.index(free[self.stop_at]) < self.stop_at:
            return False
        if self.params.min_tokens <= self.stop_at:
            return ids == free[: self.stop_at + 1]
        return ids[: self.stop_at] == free[: self.stop_at] and ids[self.stop_at] != free[self.stop_at]


ASKS = (
    Ask("greedy", 9, params(24)),
    Ask("one step", 12, params(11, num_logprobs=2, draft_steps=1)),
    Ask("never drafted", 6, params(9, temperature=1.0, frequency_penalty=1.5, draft_steps=0)),
    Ask("choices", 11, params(14, temperature=1.0, top_p=0.9, repetition_penalty=1.6, num_logprobs=0), n=2),
    Ask("stopped", 13, params(24, min_tokens=8), stop_at=8, is_late=True),
    Ask(
        "biased",
        4,
        params(12, temperature=0.8, top_k=40, min_p=0.01, presence_penalty=1.0, logit_bias={7: 2.0, 11: -3.0}),
        is_late=True,
    ),
    Ask("stopped later", 7, params(20, temperature=1.2, min_tokens=9, draft_steps=2), stop_at=4, is_late=True),
    Ask("object", 10, params(24, temperature=1.0, grammar=THOUGHTS_AND_OBJECT, num_logprobs=1, stop_ids=(EOS,))),
    Ask("words", 5, params(18, grammar=WORDS, min_tokens=9, stop_ids=(EOS,)), is_late=True),
)


@dataclass(frozen=True, slots=True)
class Case:
    """An `Ask` of one model, with its expected output."""

    ask: Ask
    prompt: list[int]
    params: SamplingParams
    expected: list[Result]  # by choice

    def texts(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each choice's seed and whole sequence."""
        for choice, result in enumerate(self.expected):
            yield choice_seed(self.params.seed, choice), self.prompt + result.ids

    def check(self, results: Sequence[Result]) -> None:
        """Compare the results of the first choices with the expected ones."""
        for choice, (ours, theirs) in enumerate(zip(results, self.expected, strict=False)):
            where = (self.ask.name, choice)
            assert ours.failed is None and ours.ended is not None and theirs.ended is not None, (where, ours)
            assert ours.ids == theirs.ids, where
            assert (ours.ended.reason, ours.ended.stop_id) == (theirs.ended.reason, theirs.ended.stop_id), where
            assert len(ours.logprobs) == len(theirs.logprobs), where
            for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert one.top_ids == other.top_ids, where
                gaps = [a - b for a, b in zip(one.top_logprobs, other.top_logprobs, strict=True)]
                assert max(map(abs, [one.logprob - other.logprob, *gaps])) < LEAST_GAP, (where, one, other)


@dataclass(frozen=True, slots=True)
class Plain:
    """The output without speculation, for one model."""

    cases: list[Case]
    truths: dict[int, list[int]]  # by seed: the whole sequence, and more if a stop token ends it

    @classmethod
    def of(cls, model: Path, asks: Sequence[Ask] = ASKS, **settings: Any) -> Plain:
        """`settings`: of both nodes."""
        both = {"page_size": PAGE_SIZE, **settings}
        pair = NodePair(model, prefill=both, decode=both)
        with closing(pair):
            plain = cls([], {})
            for index, ask in enumerate(asks):
                plain._add(pair, ask, index)
            pair.check_books()
        return plain

    def _add(self, pair: NodePair, ask: Ask, index: int) -> None:
        """Add a case, with the first of some prompts whose output has no near tie and ends as asked."""
        for attempt in range(20):
            asked = replace(ask.params, seed=100 + index)
            generator = torch.Generator().manual_seed(100 * index + attempt)
            prompt = self._text_of(ask.behind)
            prompt += torch.randint(1, 512, (ask.prompt_len,), generator=generator).tolist()
            longer = replace(asked, max_tokens=asked.max_tokens + BEYOND)
            free = Case(ask, prompt, longer, run_single(pair, f"{index}.{attempt} free", prompt, longer, ask.n))
            if ask.stop_at is not None:
                asked = replace(asked, stop_ids=(free.expected[0].ids[ask.stop_at],))
            if ask.stop_at is None:
                expected = [_cut(result, asked.max_tokens) for result in free.expected]
            else:
                expected = run_single(pair, f"{index}.{attempt}", prompt, asked, ask.n)
            case = Case(ask, prompt, asked, expected)
            if ask.is_met(free.expected[0].ids, case.expected[0].ids) and _least_gap(pair, case) > LEAST_GAP:
                break
        else:
            raise AssertionError(f"near ties everywhere, or it never ends as asked: {ask}")
        for (seed, text), (_, whole) in zip(case.texts(), free.texts(), strict=True):
            self.truths[seed] = whole if whole[: len(text)] == text else text
        self.cases.append(case)

    def _text_of(self, name: str) -> list[int]:
        """Return the prompt and output of a case; nothing if `name` is empty."""
        return next((each.prompt + each.expected[0].ids for each in self.cases if each.ask.name == name), [])


def run_single(pair: NodePair, rid: str, prompt: list[int], asked: SamplingParams, n: int = 1) -> list[Result]:
    pair.submit(rid, prompt, asked, n=n)
    results = pair.run()
    return [results[rid, choice] for choice in range(n)]


def _cut(result: Result, max_tokens: int) -> Result:
    """Return the result of the same request with this `max_tokens`, which may be smaller."""
    assert result.ended is not None
    ended = result.ended if len(result.ids) <= max_tokens else replace(result.ended, reason="length", stop_id=None)
    return Result(result.ids[:max_tokens], result.logprobs[:max_tokens], ended)


def _least_gap(pair: NodePair, case: Case) -> float:
    """Return the least gap between the two best scores of any token. Check every token by one forward over all."""
    engine, gaps = pair.prefill.prompts.engine, []
    vocab_size = engine.model_config.vocab_size
    longest = len(case.prompt) + case.params.max_tokens
    pages, tail = pages_for(engine.pool, longest)
    table = None if tail is None else tail.pages
    for choice, result in enumerate(case.expected):
        states = [
            SamplingState(case.params, case.prompt, result.ids[:i], vocab_size=vocab_size, choice=choice)
            for i in range(len(result.ids))
        ]
        with torch.inference_mode():
            logits = engine.forward([BatchRow(case.prompt + result.ids[:-1], 0, pages, len(result.ids), tail=table)])
            batch = SamplingBatch.of(states)
            if case.params.grammar is not None:
                batch = batch.within(allowed(engine.model_dir, case.params, result.ids, vocab_size))
            gaps.append(float(tie_gap(logits, batch).min()))
            assert sample(logits, batch).token_ids.tolist() == result.ids or gaps[-1] < LEAST_GAP, case.ask
    engine.pool.release(pages + ([] if tail is None else tail.own))
    return min(gaps)


# --- drafters that are often right ---


def _mostly(seed: int, position: int) -> bool:
    return (position - 1 + seed) % 12 not in (2, 6, 7)


def coach(drafter: Any, truths: dict[int, list[int]], is_told: Callable[[int, int], bool] = _mostly) -> None:
    """Make the drafter propose the target's own token if `is_told(seed, position)`, by default at about three positions
    of four. In a tree the right nodes are not the first ones, so their KV has to be moved."""
    propose = drafter.propose

    def coached(rows: RoundRows, shape: DraftShape) -> Drafts:
        drafts = propose(rows, shape)
        tokens = drafts.tokens.clone()
        for row, (seed, length) in enumerate(zip(rows.sampling.seeds.tolist(), rows.lengths.tolist(), strict=True)):
            start = length + 1
            following = truths.get(seed, [])[start : start + shape.num_steps]  # padding has no seed of these
            path = _path(drafts, row, shape.num_steps, length)
            for position, (node, token) in enumerate(zip(path, following, strict=False), start):
                if is_told(seed, position):
                    tokens[row, node - 1] = token
        return drafts._replace(tokens=tokens)

    drafter.propose = coached


def _path(drafts: Drafts, row: int, num_steps: int, choice: int) -> list[int]:
    """Return one node per step, below the root. In a tree: one of the longest branches, chosen by `choice`."""
    if drafts.parents is None:
        return list(range(1, num_steps + 1))
    branches = [[0]]
    for node, parent in enumerate(drafts.parents[row].tolist(), start=1):
        branches.append([*branches[parent], node])
    longest = max(map(len, branches))
    branches = [branch for branch in branches if len(branch) == longest]
    return branches[-1 - choice % len(branches)][1:]


# --- what a run was like ---


@dataclass(slots=True)
class Watch:
    """Records of the decode node's rounds."""

    members: list[set[str]] = field(default_factory=list)  # rids, one set per round
    num_old: list[int] = field(default_factory=list)  # members that had generated three tokens or more
    sizes: list[tuple[int, int]] = field(default_factory=list)  # sequences, and rows with padding
    limits: list[set[int]] = field(default_factory=list)
    num_stops_inside: int = 0  # accepted runs that go on after a stop token
    crossings: set[str] = field(default_factory=set)  # rids whose accepted run went past min_tokens
    last_runs: dict[str, int] = field(default_factory=dict)  # by rid: the length of the last accepted run
    num_dead: int = 0  # sequences that had ended when their round was settled
    num_moves: int = 0  # accepted nodes of trees whose KV had to be moved

    @classmethod
    def of(cls, pair: NodePair) -> Watch:
        watch, rounds = cls(), pair.decode.rounds
        submit, collect, move = rounds.submit, rounds.collect, pair.decode.executor.engine.move_kv
        buckets = pair.decode.executor.buckets
        fill_round, fill_catch_up = buckets.fill_round, buckets.fill_catch_up

        def submitting(sequences: Any, shape: DraftShape, limits: Sequence[int], *rest: Any) -> Submitted:
            watch.members.append({sequence.unit.rid for sequence in sequences})
            watch.num_old.append(sum(sequence.num_generated > 2 for sequence in sequences))
            watch.limits.append(set(limits))
            return submit(sequences, shape, limits, *rest)

        def collecting(submitted: Submitted) -> RoundTokens:
            results = collect(submitted)
            for sequence, result in zip(submitted.sequences, results.rows, strict=True):
                watch.num_dead += result is None
                stops = set(sequence.sampling.params.stop_ids)
                watch.num_stops_inside += result is not None and bool(stops.intersection(result.token_ids[:-1]))
                if result is not None:
                    watch.last_runs[sequence.unit.rid] = len(result.token_ids)
                if result is not None and stops:
                    num_before = sequence.sampling.params.min_tokens - sequence.num_generated
                    if 0 < num_before < len(result.token_ids) - 1:
                        watch.crossings.add(sequence.unit.rid)
            return results

        def filling(fill: Callable[[Any], InputBlock]) -> Callable[[Any], InputBlock]:
            def filled(work: Round | CatchUp) -> InputBlock:
                inputs = fill(work)
                watch.sizes.append((len(work.slots), inputs.num_seqs))
                return inputs

            return filled

        def moving(block_table: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *tails: Any) -> None:
            watch.num_moves += int((sources != targets).sum())
            move(block_table, sources, targets, *tails)

        rounds.submit, rounds.collect, pair.decode.executor.engine.move_kv = submitting, collecting, moving
        buckets.fill_round, buckets.fill_catch_up = filling(fill_round), filling(fill_catch_up)
        return watch

    @property
    def num_joins(self) -> int:
        """Number of rounds in which a new sequence joined one that had run before."""
        pairs = zip(self.members, self.members[1:], self.num_old[1:], strict=False)
        return sum(bool(after - before) and num_old > 0 for before, after, num_old in pairs)

    @property
    def num_leaves(self) -> int:
        """Number of rounds after which a sequence left while others went on."""
        pairs = zip(self.members, self.members[1:], strict=False)
        return sum(bool(before - after) and bool(before & after) for before, after in pairs)


@contextmanager
def scarce_pages(pair: NodePair, num_left: int) -> Iterator[None]:
    """Leave the decode node only `num_left` pages to give, cached ones included."""
    cache = pair.decode.cache
    held = cache.allocate(cache.available - num_left, Owner.REQUEST)
    try:
        yield
    finally:
        cache.pool.release(held)


def force_steps(pair: NodePair, choose: Callable[[int], int]) -> None:
    """Make the adaptive decode node draft `choose(index of the round)` steps, as far as a sequence can use them."""
    chooser, count = pair.decode.pacing.chooser, iter(range(1 << 30))
    assert chooser is not None
    chooser.choose, pair.decode.scheduler._rests = lambda *_: choose(next(count)), None


# --- phases ---


class Cell(NamedTuple):
    """One way to run all requests on a pair."""

    is_hit: bool
    is_mixed: bool
    is_preempted: bool

    def __str__(self) -> str:
        words = ("hit" if self.is_hit else "cold", "mixed" if self.is_mixed else "alone")
        return " ".join((*words, "preempted") if self.is_preempted else words)


CELLS = [  # in this order a hit finds the pages of a phase before
    Cell(is_hit, is_mixed, is_preempted)
    for is_mixed in (False, True)
    for is_hit, is_preempted in ((False, True), (False, False), (True, False), (True, True))
]


def cells_of(index: int) -> list[Cell]:
    """Return half of the cells, in which every two values meet. An odd index brings the other half, and the first cold
    cell, because a cell that preempts leaves no pages for a hit. With BATON_WHOLE_MATRIX=1 all cells are returned."""
    if "BATON_WHOLE_MATRIX" in os.environ:
        return CELLS
    cells = [cell for cell in CELLS if sum(cell) % 2 == index % 2 or not any(cell)]
    return sorted(cells, key=lambda cell: cell.is_hit or not cell.is_preempted)


def is_local(place: Place, rid: str) -> bool:
    """Return whether the decode node computes the prompt of a request. A draw depends on the request's name alone."""
    return place == "local" or (place == "mixed" and bool(zlib.crc32(rid.encode()) & 1))


def run_cell(pair: NodePair, cell: Cell, cases: list[Case], place: Place = "remote") -> None:
    """Run all requests once, in the way of the cell, and check the output."""
    if not cell.is_hit:
        pair.prefill.cache.flush()
        pair.decode.cache.flush()
    pair.admitted.clear()
    stats = pair.decode.stats()
    if cell.is_mixed:
        with scarce_pages(pair, FEW_PAGES) if cell.is_preempted else nullcontext():
            run_mixed(pair, cell, cases, place)
    else:
        run_each_alone(pair, cell, cases, place)
    results = [[pair.results[key] for key in sorted(pair.results) if key[0] == name_of(cell, case)] for case in cases]
    for case, choices in zip(cases, results, strict=True):
        case.check(choices)
    num_preempted = pair.decode.stats().preemptions - stats.preemptions
    num_recomputed = pair.decode.stats().computed_tokens - stats.computed_tokens
    if cell.is_preempted:
        assert num_preempted > 1 and (num_recomputed > 5 or cell.is_hit), (cell, num_preempted, num_recomputed)
    else:
        assert num_preempted == 0 and (num_recomputed > 0) == (place != "remote"), (cell, num_preempted, num_recomputed)
    least = pair.decode.cache.page_size + 2  # tokens of a prompt that can find a page
    num_able = sum(len(case.prompt) >= least for case in cases)
    check_hits(pair, cell, [choice for choices in results for choice in choices], place, num_able)


def name_of(cell: Cell, case: Case) -> str:
    return f"{cell} {case.ask.name}"


def run_each_alone(pair: NodePair, cell: Cell, cases: list[Case], place: Place) -> None:
    for case in cases:
        name = name_of(cell, case)
        pair.submit(name, case.prompt, case.params, is_local=is_local(place, name))
        if cell.is_preempted:
            pair.step_until(lambda name=name: has_generated(pair, name, 3))
            preempt(pair, cell)
        pair.run()


def run_mixed(pair: NodePair, cell: Cell, cases: list[Case], place: Place) -> None:
    """Start some requests together, and let others join later. With pages for all, what happens does not depend on how
    long handoffs take: if they are hits, all share one round; else one after the other joins the rounds."""
    is_one_by_one = not (cell.is_hit or cell.is_preempted)
    for is_late in (False, True):
        for case in cases:
            if case.ask.is_late == is_late:
                name = name_of(cell, case)
                pair.submit(name, case.prompt, case.params, n=case.ask.n, is_local=is_local(place, name))
            if case.ask.is_late and is_late and is_one_by_one:
                start_together(pair)
                pair.step()
        if not is_late and not cell.is_preempted:
            start_together(pair)  # more than any bucket of the tests holds
        pair.step_until(lambda: has_generated(pair, name_of(cell, cases[0]), 3))
    if cell.is_hit and not cell.is_preempted:
        start_together(pair)
    if cell.is_preempted:
        for _ in range(3):  # besides preemptions for lack of pages
            pair.step_until(lambda: len(pair.decode.scheduler.running) > 1 or pair.is_done)
            preempt(pair, cell)
            for _ in range(3):
                pair.step()
    pair.run()


def has_generated(pair: NodePair, rid: str, num_tokens: int) -> bool:
    """Return whether the decode node has so many tokens of a request, whether or not the messages have arrived."""
    running = (each for each in pair.decode.scheduler.running if each.unit.rid == rid)
    return any(each.num_generated >= num_tokens for each in running) or len(pair.results[rid, 0].ids) >= num_tokens


@contextmanager
def rounds_paused(pair: NodePair) -> Iterator[None]:
    """Run no rounds in the block. The decode node still receives pages and starts sequences."""
    scheduler = pair.decode.scheduler
    plan, scheduler.plan = scheduler.plan, StepPlan
    try:
        yield
    finally:
        scheduler.plan = plan


def start_together(pair: NodePair) -> None:
    """Pause rounds until every submitted request runs or has ended. What follows does not depend on how long handoffs
    take."""
    with rounds_paused(pair):
        pair.step_until(lambda: pair.is_started)


def preempt(pair: NodePair, cell: Cell) -> None:
    """Preempt the youngest sequence, if there is one. In a cold cell it finds no cached page when it resumes."""
    scheduler = pair.decode.scheduler
    pair.decode.settle()
    if scheduler.running:
        scheduler.preempt(scheduler.running[-1])
    if not cell.is_hit:
        pair.decode.cache.flush()


def check_hits(pair: NodePair, cell: Cell, results: list[Result], place: Place, num_able: int) -> None:
    """Check that requests found cached pages in a hit cell only: most of the `num_able` that can. If places are drawn,
    the prefill node may have seen few of the prompts before."""
    num_hits = sum(bool(result.ended and result.ended.num_cached) for result in results)
    num_pages = sum(admitted.num_cached_pages for admitted in pair.admitted)
    is_scarce = cell.is_mixed and cell.is_preempted  # then the decode node has few pages, and keeps few cached ones
    if cell.is_hit and place == "remote":
        assert num_hits > num_able // 2, (cell, num_hits)
        assert num_pages > 0 or cell.is_preempted, cell
    elif cell.is_hit:
        assert num_hits > (0 if place == "mixed" else num_able // 2) or is_scarce, (cell, num_hits)
    elif not is_scarce:  # a choice that waits for pages finds the pages of its own prompt
        assert num_hits == num_pages == 0, (cell, num_hits, num_pages)

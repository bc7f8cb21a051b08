"""Ranks with sequences of their own decode local prompts under one scheduler, with the output of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo, coach
from thread_ranks import ThreadRanks

from baton.decode_node.config import DecodeConfig
from baton.decode_node.ranked_rounds import RankedRounds
from baton.decode_node.ranked_scheduler import RankedDecodeScheduler
from baton.decode_node.scheduler import DecodeScheduler
from baton.decode_node.sequence import Sequence, new_sequence
from baton.engine.rounds.draft_shape import DraftShape
from baton.engine.rounds.rounds import LocalChunk, Submitted
from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.work import Accepted, BatchRow
from baton.metadata.wire.messages import Compute
from baton.metadata.wire.request import GenerationRequest, pack_ids

NUM_PAGES, PAGE_SIZE = 16, 4  # few: sequences are preempted
REQUESTS = [
    ([7, 8, 9, 7, 8, 9, 7, 8, 3, 5, 2], params(18, seed=1)),
    (list(range(40, 53)), params(20, temperature=0.9, seed=2)),
    ([3, 1], params(16, temperature=0.7, seed=3, top_k=40, repetition_penalty=1.2)),
    ([4, 4, 8, 15, 16, 23, 42, 8], params(17, seed=4, draft_steps=1)),
    ([5, 6, 7], params(12, temperature=0.8, seed=5, top_p=0.9)),
    (list(range(40, 53)), params(9, temperature=0.9, seed=6)),
]


class Serving:
    """One scheduler and the ranks of one model. A test submits requests and takes steps."""

    def __init__(self, ranks: ThreadRanks) -> None:
        queues = ranks.executor.queues
        self.rounds = RankedRounds(queues)
        shape, lookahead = queues[0].shape, ranks.engine.schema.key_lookahead
        schedulers = [
            DecodeScheduler(
                PrefixCache(PagePool(NUM_PAGES, PAGE_SIZE), lookahead),
                3,
                6,
                shape=shape,
                context_len=queue.context_len,
                num_prompt_states=queue.num_prompt_states,
                on_finish=self.rounds.release,
            )
            for queue in queues
        ]
        steps = itertools.cycle([3, 0, 0, 3, 1] if shape.is_chain else [3, 0])
        self.scheduler = RankedDecodeScheduler(
            schedulers, choose=lambda sequences, usable: shape.with_steps(min(next(steps), shape.num_steps))
        )
        self.vocab_size, self.context_len = queues[0].vocab_size, queues[0].context_len
        self._orders = itertools.count()
        self.num_running: set[tuple[int, ...]] = set()

    def submit(self, number: int) -> Sequence | None:
        """Start a request as a local prompt; None: no rank has room."""
        ids, wanted = REQUESTS[number]
        request = GenerationRequest(prompt_ids=pack_ids(ids), params=wanted)
        message = Compute("router", f"r{number}", 0, (0,), request)
        sequence = new_sequence(
            message, 0, next(self._orders), vocab_size=self.vocab_size, context_len=self.context_len
        )
        if not self.scheduler.reserve(sequence):
            return None
        self.scheduler.start_local(sequence.unit)
        self.rounds.admit(sequence, None)
        return sequence

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert not plan.failed
        self.num_running.add(tuple(sum(each.rank == rank for each in plan.decoding) for rank in range(2)))
        if plan.rows and not plan.decoding:
            self.rounds.recompute(plan.sequences, plan.rows)
        submitted = None
        if plan.decoding:
            beside = LocalChunk(plan.sequences, plan.rows) if plan.rows else None
            submitted = self.rounds.submit(plan.decoding, plan.shape, plan.limits, beside)
            assert submitted.slots == [self.rounds.number(each) for each in plan.decoding]
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            sequence.compute(len(row.input_ids))
            self.scheduler.share_computed(sequence)
        for sequence, accepted in self._results(submitted):
            sequence.accept(accepted, self.context_len)
            if sequence.ended is not None:
                self.scheduler.finish(sequence)

    def _results(self, submitted: Submitted | None) -> list[tuple[Any, Accepted]]:
        if submitted is None:
            return []
        rows = zip(submitted.sequences, self.rounds.collect(submitted).rows, strict=True)
        return [(sequence, accepted) for sequence, accepted in rows if accepted is not None]


def config_of(model: Path, **more: Any) -> DecodeConfig:
    return DecodeConfig(model=str(model), device="cpu", threads=1, page_size=PAGE_SIZE, num_pages=NUM_PAGES, **more)


@pytest.mark.parametrize(
    ("name", "topk"),
    [
        ("ngram", 1),
        ("standalone", 1),
        ("eagle", 1),
        ("mtp3-deepseek", 1),
        ("frozen-kv-mtp", 1),
        ("hyper-eagle", 1),
        ("eagle3", 2),
    ],
)
def test_ranks_under_one_scheduler_give_the_output_of_one_process(
    name: str, topk: int, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    model = target_of(name, checkpoint)
    one = Solo(model, speculative="ngram")
    truths = {wanted.seed: [*ids, *one.run(one.start(ids, wanted), wanted.max_tokens, 0)] for ids, wanted in REQUESTS}
    coach(monkeypatch, truths, lambda _seed, position: position % 3 != 0)
    more: dict[str, Any] = settings(name, model, tmp_path, steps=3)
    if topk > 1:
        more |= {"draft_topk": topk, "draft_tokens": 4}
    with ThreadRanks(2, config_of(model, **more)) as ranks:
        serving, started, waiting = Serving(ranks), list[Sequence](), list(range(len(REQUESTS)))
        for step in itertools.count():
            if waiting and step % 3 == 0 and (sequence := serving.submit(waiting[0])) is not None:
                started.append(sequence)
                waiting.pop(0)
            if not waiting and not len(serving.scheduler):
                break
            serving.step()
    for sequence, (_, wanted) in zip(started, REQUESTS, strict=True):
        assert sequence.token_ids == truths[wanted.seed], sequence.unit
    assert {sequence.rank for sequence in started} == {0, 1}
    assert any(0 in each and any(each) for each in serving.num_running), "a rank is idle at times"
    assert any(all(each) for each in serving.num_running)
    for rank, rounds in zip(serving.scheduler.ranks, serving.rounds.ranks, strict=True):
        rank.cache.flush()
        assert rank.cache.ledger().free == NUM_PAGES - 1
        assert len(rounds._free) == ranks.num_slots
    if name not in ("ngram", "eagle3"):
        assert sum(sequence.num_accepted for sequence in started) > 5


def test_a_step_without_sequences_asks_the_ranks_for_nothing(checkpoint: Callable[..., Path]) -> None:
    with ThreadRanks(2, config_of(checkpoint("llama"), speculative="ngram")) as ranks:
        num_before = len(ranks.group.traces[0])
        Serving(ranks).step()
        assert len(ranks.group.traces[0]) == num_before


def test_results_come_in_the_order_of_the_sequences(checkpoint: Callable[..., Path]) -> None:
    """Sequences stand rank by rank. Scores come from the rank that has scored rows, and slots have numbers of the
    node."""
    with ThreadRanks(2, config_of(checkpoint("llama"), speculative="none")) as ranks:
        serving = Serving(ranks)
        started = [serving.submit(number) for number in range(4)]
        sequences = [sequence for sequence in started if sequence is not None]
        assert [each.rank for each in sequences] == [0, 1, 0, 1]
        sequences.sort(key=lambda each: each.rank)
        assert [serving.rounds.number(each) for each in sequences] == [0, 1, 8, 9]
        rows = [BatchRow(each.token_ids[:-1], 0, each.pages, 0, len(each.token_ids) - 1) for each in sequences]
        rows[:2] = [BatchRow(row.input_ids, 0, row.pages, 0, 0) for row in rows[:2]]
        serving.rounds.recompute(sequences, rows)
        assert not any(queue.works for queue in ranks.executor.queues), "its pages may be handed over now"
        scores = serving.rounds.collect_scores()
        assert [len(each) for each in scores.logprobs] == [row.num_scored for row in rows]
        serving.rounds.recompute(sequences[2:3], rows[2:3])
        [again] = serving.rounds.collect_scores().logprobs
        assert [each.logprob for each in again] == pytest.approx([each.logprob for each in scores.logprobs[2]])
        for each in sequences:
            each.compute(each.num_to_compute - 1)
        alone = [serving.rounds.submit([each], DraftShape(0), [0]) for each in sequences]
        tokens = [serving.rounds.collect(each).rows[0] for each in alone]
        assert serving.rounds.stats.idle_rounds == [2, 2]
        together = serving.rounds.submit(sequences, DraftShape(0), [0] * 4)
        assert serving.rounds.stats.idle_rounds == [2, 2], "both ranks have sequences"
        assert together.slots == [0, 1, 8, 9] and together.limits == [0] * 4
        serving.scheduler.finish(sequences[1])
        results = serving.rounds.collect(together).rows
        assert [each is None for each in results] == [False, True, False, False], "one has left its slot"
        assert all(each is not None for each in tokens)
        with pytest.raises(AssertionError, match="rank by rank"):
            serving.rounds.submit(sequences[::-1], DraftShape(0), [0] * 4)

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
from baton.engine.pages import PagePool
from baton.engine.prefix_cache import PrefixCache
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
        assert not any(own.failed for own in plan.ranks)
        self.num_running.add(tuple(len(own.decoding) for own in plan.ranks))
        for sequence, accepted in self.rounds.run(plan):
            sequence.accept(accepted, self.context_len)
            if sequence.ended is not None:
                self.scheduler.finish(sequence)
        for own in plan.ranks:
            for sequence in own.sequences:
                if sequence.lease is not None:
                    self.scheduler.share_computed(sequence)


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
    config = DecodeConfig(model=str(model), device="cpu", threads=1, page_size=PAGE_SIZE, num_pages=NUM_PAGES, **more)
    with ThreadRanks(2, config) as ranks:
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
    config = DecodeConfig(
        model=str(checkpoint("llama")),
        device="cpu",
        threads=1,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        speculative="ngram",
    )
    with ThreadRanks(2, config) as ranks:
        Serving(ranks).step()
        assert not any(each.name == "gather" for each in ranks.group.traces[0])

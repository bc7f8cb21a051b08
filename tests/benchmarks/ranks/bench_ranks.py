"""Measures what one scheduler costs per round for ranks with sequences of their own. The ranks compute nothing.

    python tests/benchmarks/ranks/bench_ranks.py [--rounds N]

Prints, for 1 to 8 ranks and 64 and 512 sequences per rank, the milliseconds that a round takes on the host: to plan it,
to make its works agree, and to append its tokens. The first line of each batch is a node without ranks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from baton.decode_node.ranked_rounds import RankedRounds
from baton.decode_node.ranked_scheduler import RankedDecodeScheduler
from baton.decode_node.scheduler import DecodeScheduler
from baton.decode_node.sequence import new_sequence
from baton.engine.ranks.agreement import agree
from baton.engine.rounds.draft_shape import DraftShape
from baton.engine.rounds.rounds import Rounds
from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.work import Accepted, LoadSlot, Round, RoundTokens, RoundWork
from baton.metadata.wire.messages import Reserve
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids

PAGE_SIZE, PROMPT_LEN, VOCAB_SIZE = 16, 128, 1000
SHAPE = DraftShape(3)
NUM_NEW = 2  # tokens that a round brings each sequence


class IdleDevice:
    """An `Executor` that keeps the last round and says that all drafts but one were right."""

    shape = SHAPE
    proposer = None
    keeps_missed_rows = False
    num_prompt_states = 0
    window = None
    vocab_size, context_len = VOCAB_SIZE, 1 << 30
    runs_ahead = False
    joint_tokens: Sequence[int] = ()

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.work: Round | None = None

    def submit(self, work: RoundWork) -> None:
        assert isinstance(work, Round | LoadSlot)
        self.work = work if isinstance(work, Round) else None

    def flush(self) -> None:
        pass

    def collect(self) -> RoundTokens:
        assert self.work is not None
        return RoundTokens([Accepted([5] * NUM_NEW, [None] * NUM_NEW, NUM_NEW - 1, 3) for _ in self.work.slots])


class Times(NamedTuple):
    """Milliseconds per round."""

    plan: float
    submit: float
    tokens: float


def measure(num_ranks: int, num_sequences: int, num_rounds: int, *, is_ranked: bool) -> Times:
    """Return the median times of a round of `num_sequences` sequences on each rank."""
    max_tokens = (num_rounds + 4) * NUM_NEW + 64
    num_pages = 1 + num_sequences * (-(-(PROMPT_LEN + max_tokens + 32) // PAGE_SIZE))
    schedulers = [
        DecodeScheduler(PrefixCache(PagePool(num_pages, PAGE_SIZE)), num_sequences, 512, shape=SHAPE)
        for _ in range(num_ranks)
    ]
    devices = [IdleDevice(num_sequences) for _ in range(num_ranks)]
    rounds = RankedRounds(devices) if is_ranked else Rounds(devices[0])  # type: ignore[arg-type]
    ranked = RankedDecodeScheduler(schedulers)
    orders = itertools.count()
    for number in range(num_ranks * num_sequences):
        ids = [(number * 31 + i) % VOCAB_SIZE for i in range(PROMPT_LEN)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerationRequest(prompt_ids=pack_ids(ids), params=params)
        message = Reserve(
            router_epoch="", rid=f"r{number}", attempt=0, choices=(0,), request=request, prefill=Peer("", "", "")
        )
        sequence = new_sequence(message, 0, next(orders), vocab_size=VOCAB_SIZE, context_len=1 << 20)
        assert ranked.reserve(sequence)
        ranked.start_pulled(sequence.unit)
        sequence.append_first(5, None, 0)
        rounds.admit(sequence, None)
    assert {len(scheduler.running) for scheduler in schedulers} == {num_sequences}
    found: list[Times] = []
    for _ in range(num_rounds):
        times = [time.perf_counter()]
        plan = ranked.plan() if is_ranked else schedulers[0].plan()
        times.append(time.perf_counter())
        submitted = rounds.submit(plan.decoding, plan.shape, plan.limits)
        if is_ranked:
            agree([device.work for device in devices])
        times.append(time.perf_counter())
        for sequence, accepted in zip(plan.decoding, rounds.collect(submitted).rows, strict=True):
            assert accepted is not None
            sequence.accept(accepted, 1 << 30)
        times.append(time.perf_counter())
        found.append(Times(*(1e3 * (end - start) for start, end in itertools.pairwise(times))))
    return Times(*(statistics.median(column) for column in zip(*found, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    gc.disable()
    print("ranks  sequences per rank   plan  submit  tokens    sum (ms)   plan per sequence (us)")
    for num_sequences in (64, 512):
        for num_ranks, is_ranked in ((1, False), (1, True), (2, True), (4, True), (8, True)):
            times = measure(num_ranks, num_sequences, arguments.rounds, is_ranked=is_ranked)
            name = str(num_ranks) if is_ranked else "-"
            each = 1e3 * times.plan / num_ranks / num_sequences
            print(
                f"{name:>5} {num_sequences:>19} {times.plan:>6.2f} {times.submit:>7.2f} {times.tokens:>7.2f}"
                f" {sum(times):>11.2f} {each:>24.2f}"
            )


if __name__ == "__main__":
    main()

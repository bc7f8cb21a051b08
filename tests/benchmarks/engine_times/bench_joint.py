"""Time a round and a chunk of a prompt: each alone, one after the other, and in one forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_sequences import CONTEXT, GREEDY, Running, start, stop, store

from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.rounds import LocalChunk, Rounds
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow

_WARM_UP, _TIMES = 4, 24


def joint(engine: Engine, rounds: Rounds, batch: int, num_tokens: int, shape: DraftShape) -> dict[str, Any]:
    """Return medians in milliseconds of whole steps, each waited for: a round of `batch` sequences, a chunk of
    `num_tokens` tokens behind CONTEXT others, the chunk and then the round, and the round with the chunk beside it.

    `is_mixed` says whether the executor has computed the last in one forward."""
    sequences = start(engine, rounds, batch, (5 * (_WARM_UP + _TIMES) + 8) * shape.num_slots)
    prompt, row = _chunk(engine, num_tokens)
    chunk = LocalChunk([prompt], [row])

    def alone() -> None:
        rounds.recompute(*chunk)
        torch.cuda.synchronize()

    def round_of(beside: LocalChunk | None = None) -> None:
        submitted = rounds.submit(sequences, shape, [shape.num_steps] * batch, beside)
        for sequence, result in zip(sequences, rounds.collect(submitted).rows, strict=True):
            assert result is not None
            sequence.token_ids.extend(result.token_ids)
            for token_id in result.token_ids:
                sequence.sampling.append(token_id)

    def apart() -> None:
        rounds.recompute(*chunk)
        round_of()

    def together() -> None:
        round_of(chunk)

    calls: dict[str, Callable[[], None]] = {"round": round_of, "chunk": alone, "apart": apart, "joint": together}
    times = {f"{name}_ms": _median_ms(call) for name, call in calls.items()}
    times["round_ms"] = min(times["round_ms"], _median_ms(round_of))  # contexts have grown: first and last
    is_mixed = _is_mixed(rounds, sequences, shape, chunk)
    engine.pool.release(prompt.pages)
    return {
        "batch": batch,
        "steps": shape.num_steps,
        "tokens": num_tokens,
        "is_mixed": is_mixed,
        **times,
        "checked_tokens": stop(engine, rounds, sequences),
    }


def _chunk(engine: Engine, num_tokens: int) -> tuple[Running, BatchRow]:
    """Return a sequence without a slot whose first CONTEXT tokens have KV, and the row of the next ones."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, engine.card.vocab_size, (CONTEXT + num_tokens + 1,), generator=generator).tolist()
    pages = engine.pool.allocate(-(-(len(ids) + 64) // engine.pool.page_size), Owner.REQUEST)
    store(engine, ids[:CONTEXT], pages)
    state = SamplingState(GREEDY, ids, vocab_size=engine.model_config.vocab_size)
    return Running(ids, len(ids), pages, state), BatchRow(ids[CONTEXT:-1], CONTEXT, pages, 0)


def _is_mixed(rounds: Rounds, sequences: list[Running], shape: DraftShape, chunk: LocalChunk) -> bool:
    """Return whether the executor has graphs that serve the round and the chunk together."""
    graphs = getattr(rounds.executor, "_graphs", None)
    if graphs is None or graphs.steps is None:
        return False
    work = rounds.make_round(sequences, shape, [0] * len(sequences))
    return graphs.steps.fitting(work, chunk.rows) is not None


def _median_ms(call: Callable[[], None]) -> float:
    times: list[float] = []
    for number in range(_WARM_UP + _TIMES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if number >= _WARM_UP:
            times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3

"""Sequences for timed rounds of an engine, run as a decode node runs them.

A sequence starts from random tokens, CONTEXT unless a benchmark says otherwise. Each round is submitted before the
previous one is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from planted_text import PlantedText, planted_in

import baton.engine.rounds.round as round_module
from baton.engine.drafters.base import PromptChunk, PromptTail, pack_draft
from baton.engine.engine import Engine
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.batch import Computed
from baton.engine.rounds.rounds import Rounds, Submitted
from baton.engine.rounds.trees import Path as AcceptedPath
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.state.tail_pages import TailPages
from baton.engine.work import MAX_MISSED, BatchRow
from baton.metadata.wire.request import SamplingParams

CONTEXT = 1024
CHUNK = 8192  # tokens of prompts that are computed at once
GREEDY = SamplingParams(max_tokens=1 << 16, temperature=0.0)


@dataclass(slots=True, eq=False)
class Running:
    """The fields of a sequence that rounds need (engine/rounds/round.py `Running`)."""

    token_ids: list[int]
    prompt_len: int
    pages: list[int]
    sampling: SamplingState
    slot: int | None = None
    num_missed: int = 0
    lacks_draft: bool = False
    tail: TailPages | None = None
    salt: str = ""
    num_accepted: list[int] = field(default_factory=list)


def start(
    engine: Engine,
    rounds: Rounds,
    batch: int,
    num_new: int,
    seed: int = 0,
    params: SamplingParams = GREEDY,
    prompt_len: int = CONTEXT,
) -> list[Running]:
    """Start sequences from `prompt_len` tokens, each with room for `num_new` more, sampled by `params`.

    First tokens are greedy. Each chunk is submitted before the previous one is read, as rounds are.
    """
    generator = torch.Generator().manual_seed(batch + 1000 * seed)
    sequences: list[Running] = []
    num_pages = -(-(prompt_len + num_new + 64) // engine.pool.page_size)
    at_once = max(1, CHUNK // prompt_len)
    under_way: tuple[list[list[int]], list[list[int]], Computed] | None = None
    for first in range(0, batch, at_once):
        size = min(at_once, batch - first), prompt_len
        prompts = torch.randint(0, engine.card.vocab_size, size, generator=generator).tolist()
        pages = [engine.pool.allocate(num_pages, Owner.REQUEST) for _ in prompts]
        computed = engine.compute([row_of(engine, ids, 0, own) for ids, own in zip(prompts, pages, strict=True)])
        if under_way is not None:
            sequences += _admit(engine, rounds, params, *under_way)
        under_way = (prompts, pages, computed)
    assert under_way is not None, batch
    return sequences + _admit(engine, rounds, params, *under_way)


def start_long(engine: Engine, rounds: Rounds, prompt_len: int, num_new: int) -> Running:
    """Start one sequence that does not draft, computed in chunks."""
    ids = torch.randint(0, engine.card.vocab_size, (prompt_len,), generator=torch.Generator().manual_seed(1)).tolist()
    pages = engine.pool.allocate(-(-(prompt_len + num_new + 64) // engine.pool.page_size), Owner.REQUEST)
    first = (prompt_len - 1) // CHUNK * CHUNK
    store(engine, ids[:first], pages)
    computed = engine.compute([row_of(engine, ids[first:], first, pages)])
    [sequence] = _admit(engine, rounds, GREEDY, [ids], [pages], computed, drafts=False)
    sequence.num_missed = MAX_MISSED + 1 if engine.drafter is not None else 0
    return sequence


def row_of(engine: Engine, ids: Sequence[int], position: int, pages: Sequence[int], num_logits: int = 1) -> BatchRow:
    """Return a row of a forward. Its tail pages, if the model has any, follow from its pages, which are neighbours."""
    return BatchRow(ids, position, pages, num_logits, tail=_tail(engine, pages))


def _tail(engine: Engine, pages: Sequence[int]) -> list[int]:
    most = engine.pool.num_tails - 1
    return [1 + (page - 1) % most for page in pages] if engine.tail_window else []


def store(engine: Engine, ids: Sequence[int], pages: Sequence[int]) -> None:
    """Store the KV of a prompt's first tokens."""
    for first in range(0, len(ids), CHUNK):
        engine.compute([row_of(engine, ids[first : first + CHUNK], first, pages, 0)])


def _admit(
    engine: Engine,
    rounds: Rounds,
    params: SamplingParams,
    prompts: list[list[int]],
    pages: list[list[int]],
    computed: Computed,
    *,
    drafts: bool = True,
) -> list[Running]:
    draft = _draft(engine, prompts, pages, computed.extend, computed.logits) if drafts else None
    sequences: list[Running] = []
    for row, (ids, own, token) in enumerate(zip(prompts, pages, computed.logits.argmax(1).tolist(), strict=True)):
        state = SamplingState(params, ids, [token], vocab_size=engine.model_config.vocab_size)
        tail = TailPages(engine.pool.num_pages, _tail(engine, own))
        sequence = Running([*ids, token], len(ids), own, state, tail=tail if engine.tail_window else None)
        rounds.admit(sequence, None if draft is None else pack_draft(engine.schema, draft.row(row)))
        sequences.append(sequence)
    return sequences


def _draft(
    engine: Engine, prompts: list[list[int]], pages: list[list[int]], extend: torch.Tensor | None, logits: torch.Tensor
) -> Any:
    if engine.drafter is None:
        return None
    chunks = [PromptChunk(ids, 0, len(ids), own, _tail(engine, own)) for ids, own in zip(prompts, pages, strict=True)]
    tokens = logits.argmax(1).tolist()
    states = [
        SamplingState(GREEDY, ids, [token], vocab_size=logits.shape[1])
        for ids, token in zip(prompts, tokens, strict=True)
    ]
    with torch.inference_mode():
        engine.drafter.observe_prompt(chunks, extend)
        ends = torch.tensor([len(ids) for ids in prompts], device=engine.device).cumsum(0) - 1
        num_rows = engine.drafter.hidden.num_target_rows
        tails = []
        for ids, own, end in zip(prompts, pages, ends.tolist(), strict=True):
            rows = None if extend is None else extend[end - num_rows : end]
            tails.append(PromptTail(ids, own, rows, _tail(engine, own)))
        last = None if extend is None else extend[ends]
        after = torch.tensor(tokens, device=engine.device)
        return engine.drafter.finish_prompt(tails, after, last, SamplingBatch.of(states, engine.device))


def stop(engine: Engine, rounds: Rounds, sequences: Sequence[Running]) -> int:
    """End the sequences. Returns how many tokens were checked: those of the first 32 that are greedy."""
    num_checked = sum(
        check(engine, each.token_ids[: each.prompt_len], each.token_ids[each.prompt_len :])
        for each in sequences[:32]
        if each.sampling.is_greedy
    )
    for sequence in sequences:
        rounds.release(sequence)
        engine.pool.release(sequence.pages)
    return num_checked


def check(engine: Engine, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Compare with the known text if one is planted. Returns how many tokens were compared."""
    text = _planted_text(engine.model_dir)
    if text is None:
        return 0
    assert list(output) == text.continuation(prompt, len(output)), "the output is not the planted text"
    return len(output)


@cache
def _planted_text(model_dir: Path) -> PlantedText | None:
    config = json.loads((model_dir / "config.json").read_text())
    return planted_in(config) if config.get("_planted") else None


def force_acceptance(rates: Sequence[float], device: torch.device) -> None:
    """Let rounds of chains that are captured from now on accept the first, second, .. draft at these rates if they
    accept the one before, whatever the drafts are: for a random drafter, whose own are wrong. It lasts as long as the
    process."""
    shares = torch.tensor(rates, device=device)

    def accept(drafts: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> AcceptedPath:
        is_accepted = torch.rand(drafts.shape, device=targets.device) < shares[: drafts.shape[1]]
        return AcceptedPath(None, is_accepted.long().cumprod(1).sum(1).minimum(limits))

    round_module.accept_chain = accept


def run_rounds(rounds: Rounds, sequences: Sequence[Running], shape: DraftShape, num_rounds: int) -> float:
    """Return the seconds per round, from the read of the first round to the read of the last one, host work included.

    Each round is submitted before the previous one is read, as a node does it. The first round is left out, because it
    has no earlier round that could hide the host's work.
    """
    assert num_rounds > 1, num_rounds

    def take(submitted: Submitted) -> None:
        for sequence, result in zip(sequences, rounds.collect(submitted).rows, strict=True):
            assert result is not None
            sequence.token_ids.extend(result.token_ids)
            sequence.num_accepted.append(result.num_accepted)
            for token_id in result.token_ids:
                sequence.sampling.append(token_id)

    torch.cuda.synchronize()
    started = 0.0
    under_way: Submitted | None = None
    for _ in range(num_rounds):
        before, under_way = under_way, rounds.submit(sequences, shape, [shape.num_steps] * len(sequences))
        if before is not None:
            take(before)
            started = started or time.perf_counter()
    if under_way is not None:
        take(under_way)
    return (time.perf_counter() - started) / (num_rounds - 1)

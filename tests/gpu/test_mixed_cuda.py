"""A round and a chunk of prompts in one graph of a forward bring what two forwards bring, whatever lies in padding.

The comparison is with the same steps called directly, one after the other, on the same device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import CASES, MEMBERS, PARAMS
from cuda_cases import kernels as kernels
from drafters import settings, target_of
from grammars import LETTERS
from node_pair import params
from solo import Running, Solo, spoil
from waits import no_waiting

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.pace.mixed_sizes import MixedSize
from baton.engine.rounds.batch import ForwardBatch, MixedBatch
from baton.engine.rounds.rounds import LocalChunk
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow

PROMPTS = [random.Random(i).choices(range(512), k=num) for i, num in enumerate((7, 12, 3, 90, 150, 41))]
NUM_RUNNING = 3  # the prompts after these are computed beside rounds
CHUNKS = (1, 15, 16, 17, 64)
ASKED = [PARAMS[0], PARAMS[1] | {"grammar": LETTERS}, PARAMS[2]]


def start_local(solo: Solo, index: int) -> Running:
    prompt = PROMPTS[index]
    state = SamplingState(params(90, seed=index, **ASKED[index % 3]), prompt, vocab_size=512)
    pages = solo.engine.pool.allocate(-(-(len(prompt) + 110) // solo.engine.pool.page_size), Owner.REQUEST)
    sequence = Running(len(prompt), list(prompt), 0, pages, state, lacks_draft=True)
    solo.rounds.admit(sequence, None)
    return sequence


def run(solo: Solo, *, joins: bool) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """Return tokens, accepted counts, and KV and states at the end. Every prompt is computed beside rounds."""
    sequences = [solo.start(prompt, params(90, seed=i, **ASKED[i])) for i, prompt in enumerate(PROMPTS[:NUM_RUNNING])]
    waiting = [start_local(solo, index) for index in range(NUM_RUNNING, len(PROMPTS))]
    sequences, running = [*sequences, *waiting], list(sequences)
    most, rng = solo.rounds.shape.num_steps, random.Random(1)
    for turn in range(24):
        members = [running[i] for i in MEMBERS[turn % 6]]
        num_steps = rng.choice((0, most, rng.choice(list(solo.rounds.shape.choices))))
        limits = [rng.choice((num_steps, num_steps // 2, 0)) for _ in members]
        computed = rng.sample(waiting, min(len(waiting), 1 + turn % 2))
        rows: list[BatchRow] = []
        for sequence in computed:
            begin = sequence.num_computed
            stop = min(begin + rng.choice(CHUNKS), sequence.prompt_len - 1)
            rows.append(BatchRow(sequence.token_ids[begin:stop], begin, sequence.pages, 0))
        spoil(solo, sequences[0])
        step(solo, members, num_steps, limits, LocalChunk(computed, rows), joins=joins)
        for sequence, row in zip(computed, rows, strict=True):
            sequence.num_computed += len(row.input_ids)
            if sequence.num_computed == sequence.prompt_len - 1:
                waiting.remove(sequence)
                running.insert(turn % 3, sequence)
    assert not waiting
    state = [value for each in sequences for _, value in solo.draft(each).present()]
    state += [solo.target_kv(each) for each in sequences]
    return [each.token_ids for each in sequences], [each.num_accepted for each in sequences], state


def step(
    solo: Solo, members: Sequence[Running], num_steps: int, limits: Sequence[int], chunk: LocalChunk, *, joins: bool
) -> None:
    shape, beside = solo.rounds.shape.with_steps(num_steps), chunk if chunk.rows and joins else None
    if chunk.rows and beside is None:
        solo.rounds.recompute(*chunk)
    solo.take(members, solo.rounds.collect(solo.rounds.submit(members, shape, limits, beside)))


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_graphs_bring_what_direct_calls_bring_one_after_the_other(
    name: str,
    shape: dict[str, int],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = target_of(name, checkpoint)
    drafting = settings(name, model, tmp_path) | shape
    direct = run(Solo(model, device="cuda", num_pages=400, num_slots=8, **drafting), joins=False)
    captured = Solo(model, device="cuda", num_pages=400, num_slots=8, buckets=(1, 2), **drafting)
    captured.executor.warm_up(expects_prompts=True)
    graphs = captured.executor._graphs
    assert graphs is not None and graphs.steps is not None
    sizes, verify, mixed = list[MixedSize](), graphs.steps.verify, graphs.steps

    def noting(size: MixedSize, *rest: Any) -> Any:
        for each in (mixed._seam.final, mixed._seam.extend, mixed._seam.beside):
            if each is not None:
                each.fill_(float("nan"))
        sizes.append(size)
        return verify(size, *rest)

    monkeypatch.setattr(mixed, "verify", noting)
    tokens, accepted, state = run(captured, joins=True)
    assert (tokens, accepted) == direct[:2]
    for ours, theirs in zip(state, direct[2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    joined = [size for size in sizes if size.num_tokens]
    assert len(joined) > 4 and {size.num_seqs for size in joined} == {2}
    assert len(joined) < len(sizes), "some rounds have a grammar and no chunk"
    assert {size.shape.num_steps for size in sizes} == {0, captured.rounds.shape.num_steps}


def test_the_host_does_not_wait_for_the_device(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The host submits a round and the chunk beside it while the device works."""
    model = target_of("eagle3", checkpoint)
    drafting = settings("eagle3", model, tmp_path)
    solo = Solo(model, device="cuda", num_pages=400, num_slots=8, buckets=(2,), **drafting)
    solo.executor.warm_up(expects_prompts=True)
    sequences = [solo.start(PROMPTS[i], params(90, seed=i)) for i in range(2)]
    waiting = start_local(solo, 4)
    steps = solo.rounds.shape.num_steps
    for begin in (0, 16, 32):
        row = BatchRow(waiting.token_ids[begin : begin + 16], begin, waiting.pages, 0)
        chunk = LocalChunk([waiting], [row])
        torch.cuda.synchronize()
        if begin:  # what surrounds the graphs is compiled, and pinned memory is there
            with no_waiting():
                submitted = solo.rounds.submit(sequences, solo.rounds.shape, [steps] * 2, chunk)
        else:
            submitted = solo.rounds.submit(sequences, solo.rounds.shape, [steps] * 2, chunk)
        solo.take(sequences, solo.rounds.collect(submitted))
        waiting.num_computed += 16


def test_a_layer_of_two_batches_attends_as_alone(checkpoint: Callable[..., Path]) -> None:
    """Whole forwards of both, in bfloat16: logits and KV within the bound of direct calls against each other."""
    engine = Engine(
        EngineConfig(model=str(checkpoint("qwen3")), device="cuda", dtype="bfloat16", num_pages=64, page_size=16)
    )
    rows = [BatchRow([5], 20, [1, 2]), BatchRow([6], 9, [3]), BatchRow([7] * 40, 0, [4, 5, 6]), BatchRow([8], 3, [7])]
    engine.kv.normal_()
    before = engine.kv.clone()
    first, second = (ForwardBatch.build(part, 16, "cuda") for part in (rows[:2], rows[2:]))
    with torch.inference_mode():
        expected = torch.cat([engine.states(first)[1], engine.states(second)[1]])
        expected_kv = engine.kv.clone()
        engine.kv.copy_(before)
        _, found = engine.states(MixedBatch.of(first, second))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    torch.testing.assert_close(engine.kv[:, 1:], expected_kv[:, 1:], atol=0.1, rtol=0.1)

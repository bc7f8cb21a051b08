"""Local prompts on a device: the drafter's state after chunks of any size is that of the whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import ALL, settings, target_of
from solo import Running, Solo
from thinned import thinned

from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

BOUND = 1e-4


def local(solo: Solo, prompt: list[int]) -> Running:
    """Return a sequence with a slot whose prompt is not computed yet."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=len(prompt))
    state = SamplingState(params, prompt, vocab_size=solo.engine.model_config.vocab_size)
    pages, _ = solo.allocate(len(prompt) + 24)
    sequence = Running(len(prompt), prompt, 0, pages, state, lacks_draft=True, tail=solo._tails[pages[0]])
    solo.rounds.admit(sequence, None)
    return sequence


def compute(solo: Solo, sequences: Sequence[Running], chunks: Sequence[tuple[int, int]]) -> None:
    """Compute one chunk of each sequence together."""
    rows = [
        replace(solo._row(sequence.token_ids[start:stop], start, sequence.pages), num_logits=0)
        for sequence, (start, stop) in zip(sequences, chunks, strict=True)
    ]
    solo.rounds.recompute(sequences, rows)
    for sequence, (_, stop) in zip(sequences, chunks, strict=True):
        sequence.num_computed = stop


def check(solo: Solo, sequence: Running) -> None:
    """Check the drafter's state against that of the same tokens computed in one pass."""
    assert not (sequence.lacks_draft and solo.executor.num_prompt_states)
    whole = solo.from_scratch(sequence)
    for (name, ours), (_, theirs) in zip(solo.draft(sequence).present(), solo.draft(whole).present(), strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=BOUND, rtol=BOUND, msg=name)
        else:
            assert torch.equal(ours, theirs), (name, ours, theirs)
    ours, theirs = solo.draft_kv(sequence), solo.draft_kv(whole)
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours, theirs, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("name", thinned(ALL, lambda i, _: i % 2 == 0))
def test_the_state_does_not_depend_on_chunks(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = target_of(name, checkpoint)
    solo = Solo(model, **settings(name, model, tmp_path, steps=3))
    prompt = [(7 * index) % 50 for index in range(11)]
    for starts in ([0], [0, 9], [0, 4, 8], range(10), [0, 8, 0, 3], [0, 1, 2, 0, 9]):  # some begin again, preempted
        sequence = local(solo, list(prompt))
        for start, following in zip(starts, [*list(starts)[1:], 10], strict=True):
            compute(solo, [sequence], [(start, following if following > start else start + 1)])
        check(solo, sequence)
        solo.rounds.release(sequence)
    short, long = local(solo, prompt[:2]), local(solo, list(prompt))
    compute(solo, [short, long], [(0, 1), (0, 6)])
    compute(solo, [long], [(6, 10)])
    for sequence in (short, long):
        check(solo, sequence)
    assert not solo.executor._local_prompts.kept


def test_a_new_sequence_in_a_slot_finds_nothing_of_the_one_before(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("llama")
    solo = Solo(model, num_slots=2, **settings("mtp3-deepseek", model, tmp_path, steps=3))
    first = local(solo, [(3 * index) % 50 for index in range(9)])
    compute(solo, [first], [(0, 6)])
    assert solo.executor._local_prompts.kept
    solo.rounds.release(first)
    second = local(solo, [(5 * index) % 50 for index in range(9)])
    assert not solo.executor._local_prompts.kept
    compute(solo, [second], [(0, 8)])
    check(solo, second)


@pytest.mark.parametrize(("name", "num_states"), [("standalone", 0), ("eagle", 1), ("mtp3-deepseek", 3)])
def test_the_states_that_a_drafter_needs(
    name: str, num_states: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("llama")
    solo = Solo(model, **settings(name, model, tmp_path, steps=3))
    assert solo.executor.num_prompt_states == num_states

"""The executor reports rounds in the order of submission, and says in words that the device has no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from scratch import check_state
from solo import Running, Solo

from baton.engine.drafters.base import pack_draft
from baton.engine.rounds import device_executor
from baton.engine.rounds import round as rounds_on_device
from baton.engine.rounds.rounds import LocalChunk
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import MAX_MISSED, BatchRow
from baton.metadata.errors import ChunkOutOfMemory, OutOfMemory

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def solo(checkpoint: Callable[..., Path], tmp_path: Path) -> Solo:
    model = target_of("eagle", checkpoint)
    return Solo(model, num_slots=3, num_pages=200, buckets=(2,), **settings("eagle", model, tmp_path))


class Memory:
    """Makes a function fail as if the device had no memory left, while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.is_full = False
        self._allocate = getattr(owner, name)
        monkeypatch.setattr(owner, name, self._run)

    def _run(self, *args: Any, **options: Any) -> Any:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 376.00 MiB")
        return self._allocate(*args, **options)


def test_reports_come_in_the_order_of_submission(solo: Solo) -> None:
    wants = params(40, temperature=1.0, seed=3)
    sequence, alone = (solo.start(PROMPT, wants) for _ in range(2))
    expected = solo.run(alone, 12, 0)
    under_way: list[Any] = []
    for _ in range(11):
        under_way.append(solo.rounds.submit([sequence], solo.rounds.shape.with_steps(0), [0]))
        if len(under_way) > 1:
            solo.take([sequence], solo.rounds.collect(under_way.pop(0)))
    solo.take([sequence], solo.rounds.collect(under_way.pop(0)))
    assert sequence.generated == expected


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_round_without_memory_can_be_followed_by_others(
    solo: Solo, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of such a round are over; others in the same slots, and a round submitted before, are not."""
    memory = Memory(monkeypatch, solo.engine.model, "logits")
    wants = params(40, temperature=1.0, seed=3)
    expected = solo.run(solo.start(PROMPT, wants), 10, 2)
    victims = [solo.start([index, *PROMPT], wants) for index in range(2)]
    blocks = len(solo.executor.buckets.free_blocks)
    shape = solo.rounds.shape.with_steps(num_steps)
    before = solo.rounds.submit(victims[:1], shape, [num_steps])
    memory.is_full = True
    words = f"no memory left for a round of 2 sequences with {num_steps} drafts each"
    with pytest.raises(OutOfMemory, match=words) as caught:
        solo.rounds.submit(victims, shape, [num_steps] * 2)
    assert caught.value.__context__ is None, "the error of torch would hold the tensors of the round"
    memory.is_full = False
    [result] = solo.rounds.collect(before).rows
    assert result is not None and len(result.token_ids) == result.num_accepted + 1
    for victim in victims:
        solo.rounds.release(victim)
    assert solo.run(solo.start(PROMPT, wants), 10, 2) == expected
    assert len(solo.executor.buckets.free_blocks) >= blocks


def test_a_sequence_without_memory_for_its_parameters_gets_no_slot(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties need columns as large as the vocabulary for all slots."""
    memory = Memory(monkeypatch, solo.executor.slots, "_per_token")
    memory.is_full = True
    wants = params(20, seed=1, temperature=0.9, repetition_penalty=1.2)
    for _ in range(5):  # more often than there are slots
        with pytest.raises(OutOfMemory, match="sampling parameters"):
            solo.start(PROMPT, wants)
    memory.is_full = False
    assert len(solo.run(solo.start(PROMPT, wants), 8, 2)) == 8


def test_catching_up_without_memory_leaves_no_defined_state(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, solo.executor.drafter, "observe")
    victim = solo.start(PROMPT, params(40))
    solo.round([victim], 0)
    memory.is_full = True
    with pytest.raises(OutOfMemory, match="catch up"):
        solo.rounds.submit([victim], solo.rounds.shape, [solo.rounds.shape.num_steps])
    assert victim.num_missed == 1, "it counts as not caught up"


def test_a_metadata_row_says_its_first_token(solo: Solo) -> None:
    sequence = solo.start(PROMPT, params(4))
    sampled = solo.executor.read_row(pack_draft(solo.engine.schema, solo.draft(sequence)))
    assert (sampled.first_token, sampled.num_cached, sampled.logprobs) == (0, 0, None)


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("name", ["sample", "compute_logprobs"])
def test_a_sequence_goes_on_from_its_tokens_after_a_round_without_memory(
    name: str, num_steps: int, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the round had moved the slot on before it failed. Log-probabilities are its last step."""
    wants = params(40, temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.5, num_logprobs=1)
    expected = solo.run(solo.start(PROMPT, wants), 14, 0)
    victim = solo.start(PROMPT, wants)
    memory, shape = Memory(monkeypatch, rounds_on_device, name), solo.rounds.shape.with_steps(num_steps)
    solo.run(victim, 6, num_steps)
    for _ in range(2):
        kept = solo.executor.slots._ints[:, victim.slot].clone()
        memory.is_full = True
        with pytest.raises(OutOfMemory, match="a round of 1 sequences"):
            solo.rounds.submit([victim], shape, [num_steps])
        memory.is_full = False
        has_moved = not torch.equal(kept, solo.executor.slots._ints[:, victim.slot])
        assert has_moved == (name == "compute_logprobs")
        solo.rounds.reload(victim)
        assert torch.equal(kept, solo.executor.slots._ints[:, victim.slot])
        solo.run(victim, len(victim.generated) + 3, 0)
    assert victim.generated[:12] == expected[:12] and victim.num_missed > MAX_MISSED


def local(solo: Solo, prompt: list[int]) -> Running:
    """Return a sequence with a slot whose prompt is not computed yet."""
    state = SamplingState(params(40, seed=8), prompt, vocab_size=solo.engine.model_config.vocab_size)
    pages = solo.engine.pool.allocate(16, Owner.REQUEST)
    sequence = Running(len(prompt), list(prompt), 0, pages, state, lacks_draft=True)
    solo.rounds.admit(sequence, None)
    return sequence


def chunk_of(sequence: Running) -> LocalChunk:
    """Return all tokens of a local prompt but the last."""
    return LocalChunk([sequence], [BatchRow(sequence.token_ids[:-1], 0, sequence.pages, 0)])


WAITING, WANTS = [9, 8, 7, 6], params(40, temperature=1.0, seed=3)


def undisturbed(solo: Solo, num_steps: int) -> tuple[Any, Any]:
    """Return what 12 rounds bring PROMPT alone, and the drafter's state after the local prompt WAITING."""
    plain, waiting = solo.start(PROMPT, WANTS), local(solo, WAITING)
    expected, scratch = solo.run(plain, 12, num_steps), solo.from_scratch(waiting)
    expected_draft = solo.draft(scratch)
    for each in (plain, waiting, scratch):
        solo.rounds.release(each)
    return expected, expected_draft


@pytest.mark.parametrize("together", [True, False])
def test_a_chunk_without_memory_leaves_the_round_as_it_was(
    together: bool, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only both together find no memory, they are computed one after the other."""
    expected, expected_draft = undisturbed(solo, 2)
    waiting, sequence = local(solo, WAITING), solo.start(PROMPT, WANTS)
    owner, name = (device_executor, "verify") if together else (solo.executor.drafter, "observe_prompt")
    memory, shape = Memory(monkeypatch, owner, name), solo.rounds.shape.with_steps(2)
    state = solo.draft(sequence)
    memory.is_full = True
    if together:
        solo.take([sequence], solo.rounds.collect(solo.rounds.submit([sequence], shape, [2], chunk_of(waiting))))
    else:
        ints = solo.executor.slots._ints.clone()
        for _ in range(3):
            with pytest.raises(ChunkOutOfMemory, match="no memory left for 3 tokens of prompts") as caught:
                solo.rounds.submit([sequence], shape, [2], chunk_of(waiting))
            assert caught.value.__context__ is None
        assert waiting.lacks_draft and torch.equal(ints, solo.executor.slots._ints)
        check_state(solo.draft(sequence), state)
        memory.is_full = False
        solo.take([sequence], solo.rounds.collect(solo.rounds.submit([sequence], shape, [2], chunk_of(waiting))))
    assert not waiting.lacks_draft
    check_state(solo.draft(waiting), expected_draft)
    assert solo.run(sequence, 12, 2) == expected


def test_a_chunk_is_computed_although_the_round_beside_it_has_no_memory(
    solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_draft = undisturbed(solo, 0)
    waiting, sequence = local(solo, WAITING), solo.start(PROMPT, WANTS)
    memory = Memory(monkeypatch, rounds_on_device, "sample")
    memory.is_full = True
    with pytest.raises(OutOfMemory, match="a round of 1 sequences") as caught:
        solo.rounds.submit([sequence], solo.rounds.shape.with_steps(2), [2], chunk_of(waiting))
    assert not isinstance(caught.value, ChunkOutOfMemory) and not waiting.lacks_draft
    memory.is_full = False
    waiting.num_computed = 3
    solo.rounds.reload(sequence)
    check_state(solo.draft(waiting), expected_draft)
    assert solo.run(sequence, 12, 0) == expected
    assert len(solo.run(waiting, 5, 2)) == 5

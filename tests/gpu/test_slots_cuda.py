"""Slots on a GPU that is late."""

from __future__ import annotations

import pytest
import torch

from baton.engine.rounds.slots import Slots
from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
NUM_SLOTS = 2500  # more than twice the rows of pinned memory


def test_each_slot_has_its_own_numbers_although_the_device_reads_them_late() -> None:
    slots = Slots(NUM_SLOTS, 32, None, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # clock ticks, about half a second
    for slot in range(NUM_SLOTS):
        state = SamplingState(SamplingParams(max_tokens=9, temperature=1 + slot / 4096), [0] * 9, [5], vocab_size=32)
        slots.load(slot, 9, slot % 32, state, None)
    expected = torch.arange(NUM_SLOTS)
    assert torch.equal(slots._ints[1, :NUM_SLOTS].cpu(), expected % 32)
    assert torch.equal(slots._floats[0, :NUM_SLOTS].cpu(), (1 + expected / 4096).float())
    assert slots._ints[0].tolist() == [9] * NUM_SLOTS + [1]

"""Rows of pinned memory, against a device that is late."""

from __future__ import annotations

import pytest
import torch

from baton.engine.state import pinned_rows
from baton.engine.state.pinned_rows import PinnedRows


class Late:
    """A device that does nothing before somebody waits for it. Events are numbered by the rows given out before."""

    def __init__(self) -> None:
        self.num_taken = self.num_done = 0

    def record(self, _: torch.device) -> LateEvent:
        return LateEvent(self, self.num_taken)


class LateEvent:
    def __init__(self, device: Late, num_before: int) -> None:
        self._device, self._num_before = device, num_before

    def synchronize(self) -> None:
        self._device.num_done = max(self._device.num_done, self._num_before)


@pytest.mark.parametrize("num_rows", [2, 8])
def test_a_row_is_given_out_again_when_the_device_has_read_it(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, num_waits = Late(), 0
    monkeypatch.setattr(pinned_rows, "recorded_event", device.record)
    rows, given = PinnedRows(3, torch.device("cpu"), num_rows), dict[int, int]()  # by address: the number of the taking
    for number in range(5 * num_rows):
        before = device.num_done
        row = rows.take()
        num_waits += device.num_done > before
        device.num_taken += 1
        assert row.shape == (3,) and row.data_ptr() % 16 == 0
        assert given.get(row.data_ptr(), -1) < device.num_done, "the device has not read it"
        given[row.data_ptr()] = number
    assert len(given) == num_rows
    assert num_waits == 8, "once per half, from the second turn on"
